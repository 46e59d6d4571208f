"""A pruned network as bytes, and back: a safetensors file that any reader opens and nobody has to trust.

| in the file      | what it is                                                                                |
|------------------|-------------------------------------------------------------------------------------------|
| `values/<dtype>` | the values of all tensors of that type, one after the other; of masked ones those kept    |
| `mask`           | one bit per weight of the masked tensors, each tensor from a new byte on; Huffman-coded   |
| `layout`         | the tensors in the order of their values, and which of them are masked; Huffman-coded     |
| metadata         | `rewound`: JSON with `version`, `about`, `hash` of the network, the number of its         |
|                  | `parameters` where it is known, and a `checksum` of these                                 |

The layout is JSON: `state` maps a name to `[dtype, shape]`, or to another name where two are tied; `mask` lists names.

Whatever passes `decoded` is consistent in itself. Nothing is allocated on the word of a header: values are counted
before they are read. The Huffman code is zlib's without repetitions: it spends at least a bit on a byte, so that
nothing grows more than eightfold when it is read, and a mask of n weights has at least n/64 bytes in the file.
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save as serialized
from torch import Tensor

from rewound.foundations.errors import InputError
from rewound.states.storage.artifacts import Damaged, digest
from rewound.states.storage.statefile import tensor_digest

VERSION = 1
REMEDY = "give the file that rewound.save or rewound prune wrote"
_MOST_DIMENSIONS = 64  # numpy's limit

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


class Extent(NamedTuple):
    """What a run of values is: a tensor of this type and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Packed:
    """What a file holds."""

    state: Mapping[str, Extent | str]
    """Where each tensor is, in order; a tied one names another that has a place."""
    mask: Sequence[str]
    bits: Mapping[str, Tensor]
    """The packed masks of places, in the order of `state`."""
    values: Mapping[str, Tensor]
    """By dtype, those of all places one after the other."""
    about: Mapping[str, object]
    parameters: int | None = None
    """How many parameters the network has, tied ones once; the rest of the tensors are buffers. None: not known."""

    @cached_property
    def hash(self) -> str:
        """The same for the same network, whatever is said about it."""
        bits = {f"mask/{name}": packed for name, packed in self.bits.items()}
        return tensor_digest({**bits, **_named(self.values)}, _json([self.state, self.mask]))


def encoded(content: Packed) -> bytes:
    """The bytes of a file with that content."""
    bits = b"".join(packed.numpy().tobytes() for packed in content.bits.values())
    layout = _json({"state": content.state, "mask": content.mask}).encode()
    values = {name: whole for name, whole in _named(content.values).items() if whole.numel()}
    header: dict[str, object] = {"version": VERSION, "about": content.about, "hash": content.hash}
    if content.parameters is not None:
        header["parameters"] = content.parameters
    # One entry, for safetensors writes several in an order that changes from run to run.
    metadata = {"rewound": _json({**header, "checksum": digest(header)})}
    return serialized({"layout": _coded(layout), "mask": _coded(bits), **values}, metadata)


def _coded(raw: bytes) -> Tensor:
    """The Huffman code of these bytes."""
    coder = zlib.compressobj(level=9, memLevel=9, strategy=zlib.Z_HUFFMAN_ONLY)
    return torch.frombuffer(bytearray(coder.compress(raw) + coder.flush()), dtype=torch.uint8)


def _named(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"values/{dtype}": whole for dtype, whole in values.items()}


def _json(content: object) -> str:
    return json.dumps(content, separators=(",", ":"))


class _Part(TypedDict):
    """A tensor as safetensors hands it out: as long as its type and shape say, and checked no further."""

    dtype: str
    shape: list[int]
    data: bytearray


def decoded(data: bytes, name: str = "the file") -> Packed:
    """The content of a file, consistent in itself; `name` is what an error calls the file."""
    try:
        parts: dict[str, _Part] = dict(deserialize(data))  # type: ignore[no-untyped-call]  # safetensors has no types
    except SafetensorError as error:
        raise InputError(f"{name} is not a safetensors file, or not a whole one; {REMEDY}") from error
    try:
        header = _header(data)
        if header is None:
            remedy = "rewound.save writes one, with rewound.mask_of_zeros where zeros are the mask"
            raise InputError(f"{name} is a safetensors file but no ticket; {remedy}")
        if isinstance(version := header.get("version"), int) and version > VERSION:
            raise InputError(f"{name} is a ticket of version {version}; this rewound knows {VERSION}, upgrade it")
        return _packed(header, parts)
    except (Damaged, RecursionError) as error:
        raise InputError(f"the ticket {name} is damaged: {error}; save it or get it again") from error


def _header(data: bytes) -> dict[str, object] | None:
    """What the metadata says of a ticket, if anything; safetensors has read them, but hands them out of files alone."""
    length = int.from_bytes(data[:8], "little")
    metadata = _parsed(data[8 : 8 + length]).get("__metadata__")
    if not isinstance(metadata, dict) or "rewound" not in metadata:
        return None
    header = _parsed(metadata["rewound"])
    return header if "hash" in header else None  # the states of a store say other things under that name


def _packed(header: dict[str, object], parts: dict[str, _Part]) -> Packed:
    if header.pop("checksum", None) != digest(header):
        raise Damaged("its metadata does not match its checksum")
    if header.get("version") != VERSION or not isinstance(about := header.get("about"), dict):
        raise Damaged("its metadata is not that of a ticket")
    layout = _parsed(_taken("layout", parts))
    state, mask = _state(layout.get("state")), layout.get("mask")
    if not isinstance(mask, list) or not all(isinstance(name, str) and name in state for name in mask):
        raise Damaged("its mask is not a list of its tensors")
    places = {name: place for name, place in state.items() if isinstance(place, Extent)}
    masked = {place if isinstance(place := state[name], str) else name for name in mask}
    bits = _bits({name: place for name, place in places.items() if name in masked}, _taken("mask", parts))
    parameters, sizes = header.get("parameters"), {name: place.size for name, place in places.items()}
    least, most = sum(sizes[name] for name in masked), sum(sizes.values())
    if not (parameters is None or (type(parameters) is int and least <= parameters <= most)):
        raise Damaged("it does not have as many parameters as its metadata says")
    content = Packed(state, mask, bits, _values(places, bits, parts), about, parameters)
    if header.get("hash") != content.hash:
        raise Damaged("its content does not match its hash")
    return content


def _state(found: object) -> dict[str, Extent | str]:
    if not isinstance(found, dict):
        raise Damaged("its tensors are not listed")
    state = {name: _place(name, entry) for name, entry in found.items()}
    for name, place in state.items():
        if isinstance(place, str) and not isinstance(state.get(place), Extent):
            raise Damaged(f"{name!r} is tied to {place!r}, which has no place of its own")
    return state


def _place(name: str, entry: object) -> Extent | str:
    match entry:
        case str():
            return entry
        case [str(dtype), list(shape)] if dtype in DTYPES and len(shape) <= _MOST_DIMENSIONS:
            # torch multiplies the sizes of an empty tensor, too, each as at least 1, and that must not overflow.
            if all(type(n) is int and n >= 0 for n in shape) and math.prod(max(n, 1) for n in shape) < 2**63:
                return Extent(dtype, tuple(shape))
    raise Damaged(f"{name!r} does not have the type and shape of a tensor")


def _bits(places: Mapping[str, Extent], raw: bytes) -> dict[str, Tensor]:
    """The packed masks of these places."""
    lengths = {name: -(-place.size // 8) for name, place in places.items()}
    if len(raw) != sum(lengths.values()):
        raise Damaged(f"its mask has {len(raw):,} bytes of bits where its tensors have {sum(lengths.values()):,}")
    runs = np.split(np.frombuffer(bytearray(raw), np.uint8), np.cumsum(list(lengths.values())))
    bits = {name: torch.from_numpy(run) for name, run in zip(lengths, runs, strict=False)}
    for name, place in places.items():
        if place.size % 8 and int(bits[name][-1]) & (0xFF >> place.size % 8):
            raise Damaged(f"the mask of {name!r} goes on after its end")
    return bits


def _values(places: Mapping[str, Extent], bits: Mapping[str, Tensor], parts: Mapping[str, _Part]) -> dict[str, Tensor]:
    """By dtype, as many values as the places have or their masks keep."""
    counts: dict[str, int] = {}
    for name, place in places.items():
        kept = int(np.bitwise_count(bits[name].numpy()).sum()) if name in bits else place.size
        counts[place.dtype] = counts.get(place.dtype, 0) + kept
    expected = {f"values/{dtype}": (dtype, [count]) for dtype, count in counts.items() if count}
    if expected != {name: (part["dtype"], part["shape"]) for name, part in parts.items()}:
        raise Damaged("its values are not as many, or not of the types, as its tensors and masks say")
    values = {dtype: torch.empty(0, dtype=DTYPES[dtype]) for dtype in counts}
    for name, (dtype, _) in expected.items():
        values[dtype] = torch.frombuffer(parts[name]["data"], dtype=DTYPES[dtype])
    if "BOOL" in values and bool((values["BOOL"].view(torch.uint8) > 1).any()):
        raise Damaged("it has values that are neither true nor false")
    return values


def _taken(name: str, parts: dict[str, _Part]) -> bytes:
    """What was coded, taken from the parts."""
    part = parts.pop(name, None)
    if part is None or part["dtype"] != "U8":
        raise Damaged(f"it has no {name}")
    decoder = zlib.decompressobj()
    try:
        raw = decoder.decompress(bytes(part["data"]), 8 * len(part["data"]))
    except zlib.error as error:
        raise Damaged(f"its {name} cannot be decoded ({error})") from error
    if not decoder.eof or decoder.unused_data:
        raise Damaged(f"its {name} is not one whole Huffman code")
    return raw


def _parsed(text: str | bytes) -> dict[str, object]:
    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("a name comes twice")
        return found

    try:
        found = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"its metadata cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise Damaged("its metadata is not a table")
    return found
