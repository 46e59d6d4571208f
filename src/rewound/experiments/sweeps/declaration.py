"""A sweep as it is written: a TOML file, or one that comes with the package, and the values under its keys.

Nothing here needs torch, so that a misspelt name is refused at once. A value of the wrong kind is one sentence.
"""

import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeVar

from rewound.foundations.errors import InputError, as_number, as_path, shown
from rewound.foundations.names import unknown

Table = Mapping[str, object]
Kind = TypeVar("Kind")


class Declaration(NamedTuple):
    """What a file declares."""

    name: str
    """The name of the sweep in reports."""
    table: Table


def declared(word: str | Path) -> Declaration:
    """The table in a TOML file (or the same as JSON), or in the shipped one of that name.

    >>> declared("digits").table["recipe"]
    'digits'
    """
    shipped = shipped_sweeps()
    path, word = as_path("sweep", word), str(word)
    if path.suffix in (".toml", ".json") or path.is_file():
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            remedy = f"give the path of a TOML file, or one of {', '.join(sorted(shipped))}"
            raise InputError(f"cannot read sweep {word}: {reason}; {remedy}") from error
    elif word in shipped:
        text = shipped[word]
    else:
        raise InputError(unknown("sweep", word, shipped) + " or the path of a TOML file")
    kind, parsed = ("JSON", json.loads) if path.suffix == ".json" else ("TOML", tomllib.loads)
    try:
        table = parsed(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{word} is not {kind}: {error}; correct it there") from error
    if not isinstance(table, dict):
        raise InputError(f"{word} holds {shown(table)}, not a table; a sweep is an object with the keys of a TOML file")
    return Declaration(path.stem, table)


def as_table(given: Table) -> Table:
    """The table of a TOML file that a dict stands for: tuples, ranges, arrays and their numbers are lists and numbers.

    >>> as_table({"trials": range(1, 3), "experiment": ({"density": (0.2, 0.1)},)})
    {'trials': [1, 2], 'experiment': [{'density': [0.2, 0.1]}]}
    """
    return {str(key): _plain(value) for key, value in given.items()}


def _plain(value: object) -> object:
    if callable(convert := getattr(value, "tolist", None)):  # numpy's arrays and numbers, torch's tensors
        value = convert()
    if isinstance(value, Mapping):
        return as_table(value)
    return [_plain(each) for each in value] if isinstance(value, list | tuple | range) else value


def shipped_sweeps() -> dict[str, str]:
    """The sweeps that come with the package, by name."""
    folder = files("rewound.experiments.sweeps") / "shipped"
    return {f.name.removesuffix(".toml"): f.read_text() for f in folder.iterdir() if f.name.endswith(".toml")}


def check_keys(kind: str, table: Table, names: Iterable[str]) -> None:
    """Refuse a key that is not among these names."""
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


def axis_of(table: Table, key: str, kind: type[Kind], what: str) -> list[Kind]:
    """The values of an axis, all of one type, which is `what` in a message."""
    if wrong := [value for value in axis_in(table, key) if not isinstance(value, kind)]:
        raise InputError(f"{key} must be {what}, not {wrong[0]!r}")
    return [value for value in axis_in(table, key) if isinstance(value, kind)]


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
