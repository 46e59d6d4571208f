"""What may stand in the columns of our tables, as text: numbers, whole ones, and nothing where nothing is known."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from rewound.errors import InputError


def value_in(record: Mapping[str, str], column: str) -> Any:
    """The value of a column, which is text if nothing else is known of it; an error says what should be there."""
    text = (record.get(column) or "").strip()
    try:
        return _PARSERS.get(column, str)(text)
    except ValueError:
        raise InputError(f"column {column}: {text!r} is not {_EXPECTED.get(column, 'a number')}") from None


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)  # a run that diverged has an empty field, not nan
    return value


def _whole(text: str) -> int:
    value = _number(text)  # the authors write 35083708.0
    if not value.is_integer():
        raise ValueError(text)
    return int(value)


def _maybe(parse: Callable[[str], object]) -> Callable[[str], object]:
    return lambda text: parse(text) if text else None


_PARSERS: Final[Mapping[str, Callable[[str], object]]] = {
    "iterative": lambda text: ("0", "1").index(text) == 1,
    "density": _number,
    "retrain_epochs": _maybe(_number),
    "trial": _whole,
    "val": _maybe(_number),
    "test": _maybe(_number),
    "flops": _maybe(_whole),
    "search_epochs": _maybe(_number),
    "seconds": _maybe(_number),
    "kept": _whole,
    "total": _whole,
    "step": _whole,
    "lr": _number,
    "loss": float,  # nan where a run diverged
}
_EXPECTED: Final = {
    "iterative": "0 or 1",
    "val": "a number (of a failed run it is empty)",
    "test": "a number (of a failed run it is empty)",
    **dict.fromkeys(("trial", "flops", "kept", "total", "step"), "a whole number"),
}
