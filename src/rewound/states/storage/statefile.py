"""A state, its mask and the notes of an unfinished node as one safetensors file, with a checksum over all of it.

Tensors are called `model/...`, `slots/...` (the optimizer's) and `mask/...` (bit-packed); the rest is JSON in the
file's metadata, with the key that the state belongs to and a checksum of its own, as it is also read alone. Whatever
passes `read_state` is consistent in itself; all else is `Damaged`. Nothing is ever unpickled.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypedDict, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file
from torch import Tensor, uint8

from rewound.method.pruning.mask import Mask
from rewound.states.storage.artifacts import Damaged, Notes, checked_notes, digest, is_key
from rewound.tasks.recipe import Position
from rewound.tasks.training import State

LONGEST_HEADER: Final = 32 * 2**20
"""Bytes of the largest header: 200,000 tensors or points of a draft's curve, of at most 150 bytes each."""


class Kept(NamedTuple):
    """What a file holds."""

    state: State
    mask: Mask | None
    notes: Notes
    has_slots: bool
    """Whether the optimizer's slots were kept: without them it is no state to train from."""


class Header(TypedDict):
    """What the header of a file says."""

    key: str | None
    """The state's key, which versions before this one did not write."""
    seed: int
    position: Position
    shapes: dict[str, tuple[int, ...]]
    """Of the mask."""
    masked: bool
    slots: bool
    """Whether the optimizer's slots are in the file."""
    for_good: bool
    """Whether the file is to outlive the sweep that it was written for."""
    draft: Notes | None


def write_state(
    path: Path,
    key: str,
    state: State,
    mask: Mask | None,
    draft: Notes | None,
    *,
    slots: bool,
    for_good: bool,
) -> None:
    """Write it, as a whole or without the optimizer's slots; `draft` are the notes of an unfinished node."""
    tensors = {f"model/{name}": t for name, t in state.model.items()}
    if slots:
        tensors |= {f"slots/{name}": t for name, t in state.slots.items()}
    tensors |= {f"mask/{name}": t for name, t in (mask.packed() if mask else {}).items()}
    tensors = separate(tensors)
    facts = {
        "key": key,
        "seed": state.seed,
        "position": state.position,
        "shapes": {name: list(m.shape) for name, m in (mask or {}).items()},
        "masked": mask is not None,
        "slots": slots,
        "for_good": for_good,
        "draft": draft,
    }
    header = json.dumps(facts, sort_keys=True)
    checksums = {"checksum": tensor_digest(tensors, header), "header-checksum": digest(header)}
    save_file(tensors, path, {"rewound": header, **checksums})


def read_state(source: Path | bytes, key: str, *, draft: bool) -> Kept:
    """The state in a file, or in its bytes, that lies where the one of `key`, or its draft, belongs."""
    if isinstance(source, Path) and source.exists() and not source.is_file():
        raise Damaged
    try:
        if isinstance(source, bytes):
            metadata, tensors = _parsed(source[8 : header_size(source)])[0], load(source)
        else:
            with safe_open(source, framework="pt") as file:
                metadata = file.metadata() or {}
                # Copies: safetensors maps the file, and what is changed in it later would change what was checked here.
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError:
        raise Damaged from None
    if metadata.get("checksum") != tensor_digest(tensors, metadata.get("rewound", "")):
        raise Damaged
    facts = _header_of(metadata, key, draft=draft)
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "slots": {}, "mask": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition("/")
        if part not in parts or (part == "slots" and "/" not in rest):
            raise Damaged(f"holds a tensor {name!r}, which is none of a state's")
        parts[part][rest] = tensor
    _check_mask(parts["mask"], facts)
    return Kept(
        State(parts["model"], parts["slots"], facts["seed"], facts["position"]),
        Mask.unpacked(parts["mask"], facts["shapes"]) if facts["masked"] else None,
        facts["draft"] or Notes(curve=[], seconds=0.0),
        facts["slots"],
    )


def check_header(header: bytes, size: int, key: str, *, draft: bool) -> None:
    """`Damaged`, unless the header is that of a file for `key` with tensors of `size` bytes."""
    metadata, end = _parsed(header)
    if end != size:
        raise Damaged
    _header_of(metadata, key, draft=draft)


def _header_of(metadata: dict[str, str], key: str, *, draft: bool) -> Header:
    """The facts of a header that belongs to `key`."""
    facts = _header_in(metadata)
    if facts["key"] not in (None, key):
        raise Damaged(f"holds the state of another key ({facts['key']})")
    if (facts["draft"] is not None) != draft:
        raise Damaged("holds a draft, not a state" if facts["draft"] else "holds a state, not a draft")
    return facts


def header_size(beginning: bytes) -> int:
    """How many bytes of a file its header is, by the first eight of them."""
    size = 8 + int.from_bytes(beginning[:8], "little")
    if len(beginning) < 8 or size > 8 + LONGEST_HEADER:
        raise Damaged
    return size


def read_header(beginning: bytes) -> Header:
    """What the header of a file says, by its first bytes, without a look at the tensors."""
    if (size := header_size(beginning)) > len(beginning):
        raise Damaged
    return _header_in(_parsed(beginning[8:size])[0])


def _parsed(header: bytes) -> tuple[dict[str, str], int]:
    """The metadata of a header, and where the last tensor ends."""
    try:
        content = json.loads(header)
        metadata = content.pop("__metadata__")
        end = max((tensor["data_offsets"][1] for tensor in content.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise Damaged from None
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise Damaged
    return metadata, end


def _header_in(metadata: dict[str, str]) -> Header:
    """The facts of a header, complete and of the right kinds."""
    header = metadata.get("rewound", "")
    if metadata.get("header-checksum", digest(header)) != digest(header):  # versions before this one have none
        raise Damaged
    try:
        facts = json.loads(header)
        prunings, steps = facts["position"]
        shapes = {name: tuple(shape) for name, shape in facts["shapes"].items()}
        counts = [prunings, steps, *(size for shape in shapes.values() for size in shape)]
        flags = [facts["masked"], facts["slots"], facts.setdefault("for_good", False)]
        key, seed, draft = facts.get("key"), facts["seed"], facts["draft"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged from None
    if any(type(count) is not int or count < 0 for count in counts) or any(type(flag) is not bool for flag in flags):
        raise Damaged
    if type(seed) is not int or (key is not None and not is_key(key)):
        raise Damaged
    known = {"key": key, "position": Position(prunings, steps), "shapes": shapes}
    return cast(Header, {**facts, **known, "draft": None if draft is None else checked_notes(draft)})


def _check_mask(packed: dict[str, Tensor], facts: Header) -> None:
    if packed.keys() != facts["shapes"].keys() or (packed and not facts["masked"]):
        raise Damaged("holds a mask of other tensors than it says")
    for name, bits in packed.items():
        if bits.dtype != uint8 or bits.ndim != 1 or len(bits) != -(-math.prod(facts["shapes"][name]) // 8):
            raise Damaged(f"holds a mask of another size than {name} has")


def separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor on the CPU in memory of its own: safetensors refuses tied weights that share it."""
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        out[name] = plain.clone() if plain.data_ptr() in seen else plain
        seen.add(plain.data_ptr())
    return out


def tensor_digest(tensors: Mapping[str, Tensor], header: str) -> str:
    """32 hexadecimal digits, a function of the header and of every tensor's name, type, shape and bits."""
    whole = hashlib.blake2b(header.encode(), digest_size=16)
    for name in sorted(tensors):
        t = tensors[name]
        whole.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        whole.update(t.reshape(-1).view(uint8).numpy().data if t.numel() else b"")
    return whole.hexdigest()
