"""A pruned network as bytes: a safetensors file that any reader opens. `decoding` reads it, without trust.

| in the file      | what it is                                                                                |
|------------------|-------------------------------------------------------------------------------------------|
| `values/<dtype>` | the values of all tensors of that type, one after the other; of masked ones those kept    |
| `mask`           | one bit per weight of the masked tensors, each tensor from a new byte on; Huffman-coded   |
| `layout`         | the tensors in the order of their values, and which of them are masked; Huffman-coded     |
| metadata         | `rewound`: JSON with `version`, `about`, `hash` of the network, `checksum` of these three |

The layout is JSON: `state` maps a name to `[dtype, shape]`, or to another name where two are tied; `mask` lists names.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from safetensors.torch import save as serialized
from torch import Tensor

from rewound.storage.artifact import digest, tensor_digest
from rewound.tickets.huffman import coded

VERSION = 1

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


class Place(NamedTuple):
    """What a run of values is: a tensor of this type and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Content:
    """What a file holds."""

    state: Mapping[str, Place | str]
    """Where each tensor is, in order; a tied one names another that has a place."""
    mask: Sequence[str]
    bits: Mapping[str, Tensor]
    """The packed masks of places, in the order of `state`."""
    values: Mapping[str, Tensor]
    """By dtype, those of all places one after the other."""
    about: Mapping[str, object]

    @cached_property
    def hash(self) -> str:
        """The same for the same network, whatever is said about it."""
        bits = {f"mask/{name}": packed for name, packed in self.bits.items()}
        return tensor_digest({**bits, **_named(self.values)}, _json([self.state, self.mask]))


def encoded(content: Content) -> bytes:
    """The bytes of a file with that content."""
    bits = b"".join(packed.numpy().tobytes() for packed in content.bits.values())
    layout = _json({"state": content.state, "mask": content.mask}).encode()
    values = {name: whole for name, whole in _named(content.values).items() if whole.numel()}
    header = {"version": VERSION, "about": content.about, "hash": content.hash}
    # One entry, for safetensors writes several in an order that changes from run to run.
    metadata = {"rewound": _json({**header, "checksum": digest(header)})}
    return serialized({"layout": _bytes(coded(layout)), "mask": _bytes(coded(bits)), **values}, metadata)


def _bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _named(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"values/{dtype}": whole for dtype, whole in values.items()}


def _json(content: object) -> str:
    return json.dumps(content, separators=(",", ":"))
