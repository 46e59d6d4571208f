"""What stands under the keys of a sweep's TOML tables, each of the kind it should be; else one sentence."""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import product

from rewound.experiments.sweeps.declaration import Table
from rewound.foundations.errors import InputError, as_number
from rewound.foundations.names import unknown


def check_keys(kind: str, table: Table, names: Iterable[str]) -> None:
    """An error for a key that is not among these names."""
    for key in table:
        if key not in names:
            raise InputError(unknown(kind, key, names))


def axis_in(table: Table, key: str) -> list[object]:
    """The values of an axis of the grid: a list, or a single one."""
    if key not in table:
        raise InputError(_missing(key))
    value = table[key]
    values = value if isinstance(value, list) else [value]
    if not values:
        raise InputError(f"{key} is an empty list")
    return values


def combinations(table: Table, depths: Mapping[str, float] = {}) -> Iterator[dict[str, object]]:
    """The tables of single values that a table with lists in it stands for, one for every choice from the lists.

    `depths` are how many lists are around a single value, for keys that have any.

    >>> list(combinations({"keep": [0.8, 0.5], "count": 3}))
    [{'keep': 0.8, 'count': 3}, {'keep': 0.5, 'count': 3}]
    """
    axes = [axis_in(table, key) if depth(table[key]) > depths.get(key, 0) else [table[key]] for key in table]
    return (dict(zip(table, chosen, strict=True)) for chosen in product(*axes))


def depth(value: object) -> int:
    """How many lists are around a value."""
    return 1 + max(map(depth, value), default=0) if isinstance(value, list | tuple) else 0


def texts_in(table: Table, key: str) -> list[str]:
    """The values of an axis that are texts."""
    return [text_in({key: value}, key) for value in axis_in(table, key)]


def text_in(table: Table, key: str) -> str:
    """A text, which has to be there."""
    if not isinstance(value := table.get(key), str):
        raise InputError(_missing(key) if value is None else f"{key} must be a text, not {value!r}")
    return value


def table_in(table: Table, key: str) -> Table:
    """A table, which may be missing."""
    if not isinstance(value := table.get(key, {}), Mapping):
        raise InputError(f"{key} must be a table, not {value!r}")
    return value


def as_finite(name: str, value: object) -> float:
    """What was given for `name`, if it is a finite number."""
    if not math.isfinite(found := as_number(name, value)):
        raise InputError(f"{name} must be a finite number, not {value}")
    return found


def _missing(key: str) -> str:
    examples = {"recipe": '"digits"', "trials": "[1, 2, 3]", "technique": '["lr-rewinding"]', "retrain-epochs": "[16]"}
    return f"the key {key} is missing; give it, for example {key} = {examples[key]}"
