"""All trials of one setting as one value: the median, with min to max as its spread."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from rewound.conclusions.tables.rows import Row


class Line(NamedTuple):
    """What one line of a figure stands for: everything but density, retraining time and trial."""

    recipe: str
    pruning: str
    iterative: bool
    technique: str

    @property
    def subject(self) -> tuple[str, str]:
        """What a report has one part for: the recipe and the way of pruning."""
        return self.recipe, self.pruning

    @property
    def experiment(self) -> tuple[str, str, bool]:
        """What techniques are compared within: the recipe, the way of pruning and the mode."""
        return self.recipe, self.pruning, self.iterative


def line_of(row: Row) -> Line:
    """The line a row belongs to."""
    return Line(row.recipe, row.pruning, row.iterative, row.technique)


class Setting(NamedTuple):
    """One point of a line: what all trials of a cell share."""

    line: Line
    density: float
    retrain_epochs: float


def setting_of(row: Row) -> Setting | None:
    """The setting a row belongs to; a dense one has none."""
    if row.dense or row.retrain_epochs is None:
        return None
    return Setting(line_of(row), row.density, row.retrain_epochs)


@dataclass(frozen=True)
class Cell:
    """All finished trials of one setting (at least one)."""

    line: Line
    density: float
    retrain_epochs: float
    tests: tuple[float, ...]
    vals: tuple[float, ...]
    search_epochs: float | None = None

    @property
    def setting(self) -> Setting:
        """What its trials share."""
        return Setting(self.line, self.density, self.retrain_epochs)

    @property
    def median(self) -> float:
        """Median test value."""
        return median(self.tests)

    @property
    def low(self) -> float:
        """Lowest test value."""
        return min(self.tests)

    @property
    def high(self) -> float:
        """Highest test value."""
        return max(self.tests)

    @property
    def val(self) -> float:
        """Median validation value."""
        return median(self.vals)

    @property
    def trials(self) -> int:
        """How many of them there are."""
        return len(self.tests)

    @property
    def compression(self) -> float:
        """The compression ratio, 1/density."""
        return 1 / self.density


def cells(rows: Iterable[Row]) -> list[Cell]:
    """The finished trials of every setting, densest first; settings of which all trials failed are left out.

    A row without a validation value stands with its test value for both: `trust.weaknesses` says so.

    >>> rows = [Row("digits", "unstructured", False, "fine-tuning", 0.1, 4, n, 0.9, 0.9 + n / 100) for n in (1, 2, 3)]
    >>> [(cell.low, cell.median, cell.high) for cell in cells(rows)]
    [(0.91, 0.92, 0.93)]
    """
    found: dict[Setting, list[tuple[float, float, float | None]]] = defaultdict(list)
    for row in rows:
        if row.test is not None and (setting := setting_of(row)) is not None:
            val = row.test if row.val is None else row.val
            found[setting].append((row.test, val, row.search_epochs))
    made = []
    for setting, trials in found.items():
        tests, vals, costs = zip(*trials, strict=True)
        known = [cost for cost in costs if cost is not None]
        made.append(Cell(*setting, tests, vals, median(known) if known else None))
    return sorted(made, key=lambda cell: (cell.line, -cell.density, cell.retrain_epochs))


def failures(rows: Iterable[Row]) -> Counter[tuple[Line, float]]:
    """How many runs failed, by line and density, over all retraining times."""
    return Counter((line_of(row), row.density) for row in rows if not row.dense and row.test is None)
