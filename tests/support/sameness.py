"""Whether two tensors, networks or states are the same, bit for bit."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rewound import State


def assert_same(found: object, expected: object) -> None:
    """States, tensors, and what is made of them: dictionaries, masks and sequences; the error names the difference."""
    if text := difference(found, expected):
        raise AssertionError(text)


def is_same(found: object, expected: object) -> bool:
    return not difference(found, expected)


def difference(found: object, expected: object, name: str = "it") -> str:
    """Where the two differ first, and how; empty if nowhere. Loss and waiting of a state are not compared."""
    if isinstance(found, State) and isinstance(expected, State):
        found, expected = ({**vars(state), "loss": 0, "waited": 0} for state in (found, expected))
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        if (found.dtype, found.shape) != (expected.dtype, expected.shape):
            return f"{name} is {found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
        return "" if torch.equal(_bits(found), _bits(expected)) else f"{name} has other values"
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        if found.keys() != expected.keys():
            return f"{name} has {sorted(map(str, found))}, not {sorted(map(str, expected))}"
        return next(filter(None, (difference(found[key], expected[key], f"{name}[{key!r}]") for key in found)), "")
    if all(isinstance(each, Sequence) and not isinstance(each, str) for each in (found, expected)):
        if len(found) != len(expected):  # type: ignore[arg-type]
            return f"{name} has {len(found)} entries, not {len(expected)}"  # type: ignore[arg-type]
        pairs = enumerate(zip(found, expected, strict=True))  # type: ignore[call-overload]
        return next(filter(None, (difference(*pair, f"{name}[{index}]") for index, pair in pairs)), "")
    return "" if found == expected else f"{name} is {found!r}, not {expected!r}"


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor on the CPU: a NaN equals itself, and 0 is not -0."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat
