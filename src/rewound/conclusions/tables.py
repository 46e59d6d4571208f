"""Results as tables: one `Row` per retrained network in `results.csv`, with `layers.csv` and `curves.csv` beside it.

The first ten columns of `results.csv` are those of the paper's published results, so the two can be read as one table.
A dense row has an empty technique and density 1; a failed run has empty `val` and `test`. The first word of `pruning`
is what is pruned as one, "unstructured" for single weights; then follows how, where that is not as in the paper, as
"unstructured random".

`density` is the fraction of the weights that is kept: it counts weights, not units, also where filters or neurons are
pruned as one. For a preset it is the density of the network without its filters, as the authors count it. Whole units
(patterns `unit` and `filter`) meet a density only nearly: `density` is then measured, and `asked_density` is what was
asked for, by which trials belong together (`with_common_densities`). There is one exception: if a user's pattern makes
units of unequal sizes, the table has the fraction of units that was asked for, and `evidence.uneven_units` says what
fraction of the weights that is.

Three columns say what `val` and `test` are: `metric` is its name, `unit` a fraction, percent, BLEU, nats or any other,
and `direction` whether higher or lower values are better. A table without these columns holds accuracies as fractions.
`parameters` is how many the whole network still has, those that are never pruned included; with that of the dense row
it gives the compression of the network, and times four its bytes as 32-bit numbers. `others` is the metric on further
test sets, as "newstest2014=12.3". `waited` is how many of the `seconds` training waited for data that is streamed. The
columns `asked_density`, `parameters`, `others` and `waited` are in a table only where some row has them.

They are CSV files (`foundations/csvfiles`); what a field may hold is known by column.
"""

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from statistics import median_low
from typing import Any, Final, NamedTuple, TypeVar

from rewound.foundations.csvfiles import reading, text_of, unescaped, write_table
from rewound.foundations.errors import InputError, as_path
from rewound.foundations.metric import ACCURACY, Metric

UNSTRUCTURED: Final = "unstructured"
LEAST_DENSITY: Final = 1e-15
"""One weight of more than any network has. Below some density, axes and ratios of compressions are not finite."""


@dataclass(frozen=True)
class Row:
    """One trained network: where it stands in the experiment and what it reached.

    >>> Row("digits", "unstructured", False, "lr-rewinding", 0.1, 16, trial=1, val=0.96, test=0.95).compression
    10.0
    """

    recipe: str
    pruning: str
    iterative: bool
    technique: str
    density: float
    retrain_epochs: float | None
    trial: int
    val: float | None
    test: float | None
    flops: int | None = None
    search_epochs: float | None = None
    seconds: float | None = None
    key: str = ""
    metric: str = "accuracy"
    unit: str = "fraction"
    direction: str = "higher"
    asked_density: float | None = None
    parameters: int | None = None
    others: str = ""
    waited: float | None = None

    def __post_init__(self) -> None:
        if not self.metric or not self.unit or self.direction not in ("higher", "lower"):
            raise InputError(
                f"a row with metric {self.metric!r}, unit {self.unit!r}, direction {self.direction!r}; give all three, "
                "and higher or lower for the direction that is better"
            )
        for name, density in (("density", self.density), ("asked_density", self.asked_density)):
            if density is not None and not LEAST_DENSITY <= density <= 1:
                raise InputError(
                    f"{name} {density:g} is outside [{LEAST_DENSITY:g}, 1]; give the fraction of weights kept"
                )
        if self.retrain_epochs is not None and self.retrain_epochs < 0:
            raise InputError(
                f"retrain_epochs must be at least 0, not {self.retrain_epochs:g}; give the retraining time"
            )
        if self.technique and self.retrain_epochs is None:
            raise InputError(f"a row of technique {self.technique} has no retrain_epochs; only a dense row may lack it")

    @property
    def measured_by(self) -> Metric:
        """What `val` and `test` are."""
        return Metric(self.metric, self.unit, self.direction == "higher")

    @property
    def dense(self) -> bool:
        """Whether this is an unpruned, not retrained network (a dense control has a technique, and is not)."""
        return not self.technique

    @property
    def compression(self) -> float:
        """The compression ratio, 1/density."""
        return 1 / self.density


# Named tuples: a table has millions of layers and points, and a dataclass takes three times as long to make.
class LayerRow(NamedTuple):
    """What one pruned network keeps of one layer."""

    key: str
    layer: str
    kept: int
    total: int
    flops: int | None = None


class CurveRow(NamedTuple):
    """One point of a training curve."""

    key: str
    step: int
    lr: float
    loss: float
    val: float | None = None


def is_structured(pruning: str) -> bool:
    """Whether a way of pruning takes weights in groups, as the authors' structured-a and structured-b do.

    >>> is_structured("unstructured random"), is_structured("structured-a")
    (False, True)
    """
    return pruning.split(" ")[0] != UNSTRUCTURED


Kind = TypeVar("Kind", Row, LayerRow, CurveRow)


def _columns(kind: type[Row | LayerRow | CurveRow]) -> tuple[str, ...]:
    return tuple(kind.__annotations__)


COLUMNS: Final = _columns(Row)
_REQUIRED: Final = COLUMNS[:10]  # what the authors' table of pruned networks has
_DENSE_REQUIRED: Final = ("recipe", "val", "test")  # their table of dense networks has these, flops, and no others
_METRIC: Final = ("metric", "unit", "direction")
_OPTIONAL: Final = ("asked_density", "parameters", "others", "waited")


def read_rows(path: str | Path, metrics: Mapping[str, Metric] = {}) -> list[Row]:
    """The rows of a `results.csv` (or `.csv.gz`), ours or the authors'; columns it does not know are ignored.

    `metrics` are those of recipes for rows that do not state theirs (`paper.networks` has the paper's); of all others
    such a row holds accuracies as fractions.

    A table without technique, density, ... columns holds dense networks, which are numbered as trials. The authors'
    table lists each of its networks twice: if all networks of a recipe, at least three, are there an even number of
    times, half of them are left out.
    """
    return _numbered(_read(Row, as_path("a table", path), metrics))


def read_layers(path: str | Path) -> list[LayerRow]:
    """The rows of a `layers.csv`."""
    return _read(LayerRow, as_path("a table", path))


def read_curves(path: str | Path) -> list[CurveRow]:
    """The rows of a `curves.csv`."""
    return _read(CurveRow, as_path("a table", path))


def write_rows(rows: Iterable[Row], path: str | Path) -> None:
    """Write `results.csv`, in the same bytes whatever order the rows came in."""
    found = ordered(rows)
    missing = {name for name in _OPTIONAL if all(getattr(row, name) in (None, "") for row in found)}
    columns = [name for name in COLUMNS if name not in missing]
    write_table(columns, (tuple(getattr(row, name) for name in columns) for row in found), path)


def ordered(rows: Iterable[Row]) -> list[Row]:
    """The rows in the order of `results.csv`: dense rows of a recipe first, then by experiment."""
    found = list[Row]()
    for _, group in groupby(sorted(rows, key=_place), _place):
        same = list(group)
        # Rows that differ in nothing but their results must not keep the order they arrived in.
        found += sorted(same, key=lambda row: [*map(text_of, vars(row).values())]) if len(same) > 1 else same
    return found


def write_layers(rows: Iterable[LayerRow], path: str | Path) -> None:
    """Write `layers.csv`, by key; the layers of one network stay in the order given, which is that of the network."""
    write_table(_columns(LayerRow), sorted(rows, key=attrgetter("key")), path)


def write_curves(rows: Iterable[CurveRow], path: str | Path) -> None:
    """Write `curves.csv`, by key and step."""
    write_table(_columns(CurveRow), sorted(rows, key=attrgetter("key", "step")), path)


def _place(row: Row) -> tuple[tuple[str, bool, str, bool, str], tuple[float, float, int, str]]:
    line = (row.recipe, not row.dense, row.pruning, row.iterative, row.technique)
    density = row.density if row.asked_density is None else row.asked_density
    return line, (-density, row.retrain_epochs or 0, row.trial, row.key)


def with_common_densities(rows: Iterable[Row]) -> list[Row]:
    """The rows, those with one asked density under one common density: the median of what was measured.

    Networks that were asked for at one density are compared with each other, whatever exactly each of them has.

    >>> row = Row("digits", "unit", False, "fine-tuning", 0.24, 16, 1, 0.9, 0.9, asked_density=0.25)
    >>> [row.density for row in with_common_densities([row, replace(row, density=0.23), replace(row, density=0.22)])]
    [0.23, 0.23, 0.23]
    """
    rows, measured = list(rows), dict[tuple[str, str, bool, float], list[float]]()
    for row in rows:
        if row.asked_density is not None and row.test is not None:
            measured.setdefault(_asked(row), []).append(row.density)
    common = {asked: median_low(densities) for asked, densities in measured.items()}
    # Two that lead to the same density stay two.
    times = Counter((*asked[:3], density) for asked, density in common.items())
    common = {asked: density if times[*asked[:3], density] == 1 else asked[3] for asked, density in common.items()}
    return [replace(row, density=common[key]) if (key := _asked(row)) in common else row for row in rows]


def _asked(row: Row) -> tuple[str, str, bool, float]:
    """What was asked for, whatever retrains it and for how long; 0 where the density is exactly that."""
    return row.recipe, row.pruning, row.iterative, row.asked_density or 0.0


def _numbered(rows: list[Row]) -> list[Row]:
    """Dense rows with a number each, if nothing tells them apart; rows as they are, if something does."""
    if not all(row.dense and row.trial == 0 and not row.key for row in rows):
        return rows
    times = Counter(rows)
    different = Counter(row.recipe for row in times)
    once = {row.recipe for row, n in times.items() if n % 2 or different[row.recipe] < 3}  # two may be equal by chance
    seen: Counter[Row] = Counter()
    trials: Counter[str] = Counter()
    numbered = []
    for row in rows:
        seen[row] += 1
        if row.recipe in once or seen[row] <= times[row] // 2:
            trials[row.recipe] += 1
            numbered.append(replace(row, trial=trials[row.recipe]))
    return numbered


def _read(kind: type[Kind], path: Path, metrics: Mapping[str, Metric] = {}) -> list[Kind]:
    with reading(path) as table:
        return list(_parse(kind, table, path, metrics))


def _parse(kind: type[Kind], table: "csv.DictReader[str]", path: Path, metrics: Mapping[str, Metric]) -> Iterator[Kind]:
    header, columns = set(table.fieldnames or ()), _columns(kind)
    if not header:
        raise InputError(f"{path} is empty; a table starts with the line {','.join(columns)}")
    if twice := [name for name, count in Counter(table.fieldnames).items() if count > 1]:
        raise InputError(f"{path} has the column {', '.join(twice)} more than once; leave one of them")
    only_dense = kind is Row and header.isdisjoint(_REQUIRED[1:7])
    required = _DENSE_REQUIRED if only_dense else _REQUIRED if kind is Row else columns
    if kind is Row and not header.isdisjoint(_METRIC):
        required += _METRIC
    if missing := [name for name in required if name not in header]:
        hint = " (separate them by commas)" if len(header) == 1 else ""
        raise InputError(
            f"{path} has no column {', '.join(missing)}; its columns are {', '.join(sorted(header))}{hint}"
        )
    for record in table:
        line = f"{path}, line {table.line_num}"
        try:
            if None in record or None in record.values():  # how the reader marks fields too many, or too few
                count = len(table.fieldnames or ())
                raise InputError(f"not {count} fields, as the first line has; get the whole file again")
            if kind is Row and not record["recipe"].strip():
                raise InputError("column recipe is empty; name the task")
            if only_dense:
                record |= {"iterative": "0", "density": "1", "trial": "0"}
            if kind is Row and not any(record.get(name) for name in _METRIC):
                stated = metrics.get(record["recipe"].strip(), ACCURACY)
                record |= zip(_METRIC, (stated.name, stated.unit, stated.direction), strict=True)
            yield kind(**{name: value_in(record, name) for name in columns})
        except InputError as error:
            raise InputError(f"{line}: {error}") from None


Detail = TypeVar("Detail", LayerRow, CurveRow)


@dataclass(frozen=True)
class Tables:
    """The three of them; what was asked for and has no result yet is left out and counted."""

    rows: list[Row]
    layers: list[LayerRow] = field(default_factory=list)
    curves: list[CurveRow] = field(default_factory=list)
    missing: int = 0
    made: Mapping[str, Mapping[str, int]] = field(default_factory=dict, compare=False)
    """What the runs were computed with, where that is known: for each name ("torch") how many have which value."""

    def write(self, folder: Path) -> list[Path]:
        """Write them as CSV; only results.csv where nothing is known of layers and curves."""
        paths = [folder / f"{name}.csv" for name in ("results", "layers", "curves")]
        write_rows(self.rows, paths[0])
        if not self.layers and not self.curves:
            return paths[:1]
        write_layers(self.layers, paths[1])
        write_curves(self.curves, paths[2])
        return paths


def with_details(rows: list[Row], folder: Path) -> Tables:
    """The tables of these rows, with what layers.csv and curves.csv of a folder, where there are any, say of them."""
    keys = {row.key for row in rows if row.key}

    def details(read: Callable[[Path], Sequence[Detail]], path: Path) -> list[Detail]:
        return [detail for detail in read(path) if detail.key in keys] if keys and path.exists() else []

    return Tables(rows, details(read_layers, folder / "layers.csv"), details(read_curves, folder / "curves.csv"))


def value_in(record: Mapping[str, str], column: str) -> Any:
    """The value of a column, which is text if nothing else is known of it; an error says what should be there."""
    text = (record.get(column) or "").strip()
    try:
        return _PARSERS.get(column, unescaped)(text)
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
    "asked_density": _maybe(_number),
    "parameters": _maybe(_whole),
    "retrain_epochs": _maybe(_number),
    "trial": _whole,
    "val": _maybe(_number),
    "test": _maybe(_number),
    "flops": _maybe(_whole),
    "search_epochs": _maybe(_number),
    "seconds": _maybe(_number),
    "waited": _maybe(_number),
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
    **dict.fromkeys(("trial", "flops", "parameters", "kept", "total", "step"), "a whole number"),
}
