"""A state, its mask and the notes of an unfinished node as one safetensors file, with a checksum over all of it.

Tensors are called `model/...`, `slots/...` (the optimizer's) and `mask/...` (bit-packed); the rest is JSON in the
file's metadata. Nothing is ever unpickled.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rewound.pruning.mask import Mask
from rewound.recipe import Position
from rewound.storage.artifact import Damaged, separate, tensor_digest
from rewound.storage.records import CurvePoint, Notes
from rewound.training import State


class Kept(NamedTuple):
    """What a file holds."""

    state: State
    mask: Mask | None
    notes: Notes
    has_slots: bool
    """Whether the optimizer's slots were kept: without them it is no state to train from."""


def write_state(
    path: Path,
    state: State,
    mask: Mask | None,
    draft: Notes | None = None,
    *,
    slots: bool = True,
    for_good: bool = False,
) -> None:
    """Write it, as a whole or without the optimizer's slots; `draft` are the notes of an unfinished node."""
    tensors = {f"model/{name}": t for name, t in state.model.items()}
    if slots:
        tensors |= {f"slots/{name}": t for name, t in state.slots.items()}
    tensors |= {f"mask/{name}": t for name, t in (mask.packed() if mask else {}).items()}
    tensors = separate(tensors)
    facts = {
        "seed": state.seed,
        "position": state.position,
        "shapes": {name: list(m.shape) for name, m in (mask or {}).items()},
        "masked": mask is not None,
        "slots": slots,
        "for_good": for_good,
        "draft": draft,
    }
    header = json.dumps(facts, sort_keys=True)
    save_file(tensors, path, {"rewound": header, "checksum": tensor_digest(tensors, header)})


def read_state(path: Path) -> Kept:
    """Read it; `Damaged`, or what safetensors says, for a file that is not as it was written."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    if metadata.get("checksum") != tensor_digest(tensors, metadata.get("rewound", "")):
        raise Damaged(path)
    facts = json.loads(metadata["rewound"])
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "slots": {}, "mask": {}}
    for name, tensor in tensors.items():
        part, rest = name.split("/", 1)
        parts[part][rest] = tensor
    shapes = {name: tuple(shape) for name, shape in facts["shapes"].items()}
    return Kept(
        State(parts["model"], parts["slots"], facts["seed"], Position(*facts["position"])),
        Mask.unpacked(parts["mask"], shapes) if facts["masked"] else None,
        _notes(facts["draft"]),
        facts["slots"],
    )


def is_to_train_from(path: Path) -> bool:
    """Whether the file has the optimizer's slots; True also for one that cannot be read: loading it reports that."""
    facts = _facts(path)
    return facts is None or bool(facts["slots"])


def is_for_good(path: Path) -> bool:
    """Whether the file is to outlive the sweep that it was written for."""
    facts = _facts(path)
    return facts is not None and bool(facts.get("for_good"))


def position_in(path: Path) -> Position | None:
    """How far the state in a file has come, by what its header says; None where it cannot be read."""
    facts = _facts(path)
    return None if facts is None else Position(*facts["position"])


def _facts(path: Path) -> dict[str, Any] | None:
    """What the header says, without a look at the tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            return cast(dict[str, Any], json.loads((file.metadata() or {})["rewound"]))
    except (SafetensorError, ValueError, KeyError, OSError):
        return None


def _notes(draft: Notes | None) -> Notes:
    if draft is None:
        return Notes(curve=[], seconds=0.0)
    return {**draft, "curve": [CurvePoint(*point) for point in draft["curve"]]}
