"""What trials reached: the trials of a setting as one cell, the dense networks it is measured from, its spread.

The value of a cell is the median of its trials, with min to max as its spread. A delta is that median minus the mean
of the dense networks, as shown, or that mean minus the median where lower is better: a negative one is worse.

Three trials say little about their own spread, thirty cells of three trials say much about a spread they share. The
variance of a cell is therefore pooled over the retraining times of its density and of the densities next to it, taken
as independent. There is no bootstrap anywhere: of three trials it would only repeat the three.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import NamedTuple

from rewound.conclusions.tables import Row
from rewound.foundations.errors import InputError
from rewound.foundations.metric import ACCURACY, Metric


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
    metric: Metric = ACCURACY

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
    def worst(self) -> float:
        """Worst test value."""
        return min(self.tests, key=self.metric.gain)

    @property
    def best(self) -> float:
        """Best test value."""
        return max(self.tests, key=self.metric.gain)

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

    A row without a validation value stands with its test value for both: `evidence.weaknesses` says so.

    >>> rows = [Row("digits", "unstructured", False, "fine-tuning", 0.1, 4, n, 0.9, 0.9 + n / 100) for n in (1, 2, 3)]
    >>> [(cell.low, cell.median, cell.high) for cell in cells(rows)]
    [(0.91, 0.92, 0.93)]
    """
    trials: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.test is not None:  # a plain tuple: to make a setting of each of very many rows takes three times as long
            trials[row.recipe, row.pruning, row.iterative, row.technique, row.density, row.retrain_epochs].append(row)
    found = []
    for finished in trials.values():
        if (setting := setting_of(finished[0])) is None:
            continue
        tests, vals = scores_of(finished)
        costs = [row.search_epochs for row in finished if row.search_epochs is not None]
        found.append(Cell(*setting, tests, vals, median(costs) if costs else None, finished[0].measured_by))
    return sorted(found, key=lambda cell: (cell.line, -cell.density, cell.retrain_epochs))


def scores_of(rows: Iterable[Row]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Test and validation values of finished runs."""
    tested = [(row.test, row.test if row.val is None else row.val) for row in rows if row.test is not None]
    return tuple(test for test, _ in tested), tuple(val for _, val in tested)


def failures(rows: Iterable[Row]) -> Counter[tuple[Line, float]]:
    """How many runs failed, by line and density, over all retraining times."""
    return Counter((line_of(row), row.density) for row in rows if not row.dense and row.test is None)


def metrics_of(rows: Iterable[Row]) -> dict[str, Metric]:
    """The metric of every recipe; rows that mix metrics, or whose values cannot be in its unit, are an error."""
    found: dict[str, Metric] = {}
    for row in rows:
        metric = row.measured_by
        if found.setdefault(row.recipe, metric) != metric:
            raise InputError(
                f"the rows of {row.recipe} mix {found[row.recipe].described()} with {metric.described()}; "
                "give all of them in one metric"
            )
        metric.check((row.val, row.test), row.recipe)
    return found


@dataclass(frozen=True)
class Baseline:
    """The dense networks of one recipe: the zero of every delta, and how much chance alone moves it."""

    mean: float
    sd: float  # 0 for a single run, whose spread is unknown
    n: int
    metric: Metric = ACCURACY

    @property
    def scale(self) -> float:
        """From a value of the table to the shown one."""
        return self.metric.scale

    @property
    def unit(self) -> str:
        """The unit of a shown delta."""
        return self.metric.shown_unit

    @property
    def spread(self) -> float:
        """One standard deviation, as shown."""
        return self.sd * self.scale

    @property
    def named_drop(self) -> float:
        """The size of a "1% drop", as shown: one point, or one BLEU; in any other unit, one percent of the mean.

        >>> loss = Metric("loss", "nats", higher_is_better=False)
        >>> Baseline(0.93, 0.002, 3).named_drop, Baseline(2.5, 0.1, 3, loss).named_drop
        (1.0, 0.025)
        """
        return 1.0 if self.metric.ends_at_hundred else abs(self.mean) / 100

    @property
    def digits(self) -> int:
        """How many digits behind the point a shown value has: two, or as many as show a tenth of `named_drop`."""
        if self.metric.ends_at_hundred or not self.named_drop:
            return 2
        return min(9, max(2, 1 - math.floor(math.log10(self.named_drop))))

    def delta(self, test: float) -> float:
        """How much better than the mean dense network, as shown; a negative one is worse.

        >>> round(Baseline(mean=0.93, sd=0.002, n=3).delta(0.92), 6)
        -1.0
        """
        return self.metric.gain(test - self.mean) * self.scale

    def shown(self, value: float) -> str:
        """A value of the table, as shown."""
        return f"{value * self.scale:.{self.digits}f}"

    def signed(self, delta: float) -> str:
        """A delta, as shown."""
        return f"{delta:+z.{self.digits}f}"


def baselines(rows: Iterable[Row]) -> dict[str, Baseline]:
    """The dense networks of every recipe; a recipe with pruned networks and no dense one is an error."""
    rows = list(rows)
    metrics = metrics_of(rows)
    dense: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.dense and row.test is not None:
            dense[row.recipe].append(row.test)
    if diverged := sorted({row.recipe for row in rows if row.dense} - dense.keys()):
        raise InputError(
            f"no dense run of {', '.join(diverged)} has a value, and deltas are measured from dense networks; lower "
            "the learning rate if they diverged, or see that evaluate returns finite numbers"
        )
    if missing := sorted({row.recipe for row in rows} - dense.keys()):
        raise InputError(
            f"no finished dense run of {', '.join(missing)}: deltas are measured from dense networks; "
            "add their rows (technique empty, density 1) to the table, or give a table of them with --dense FILE"
        )
    return {
        recipe: Baseline(fmean(tests), stdev(tests) if len(tests) > 1 else 0.0, len(tests), metrics[recipe])
        for recipe, tests in dense.items()
    }


class Pooled(NamedTuple):
    """A variance that several samples share, and how many degrees of freedom it rests on."""

    variance: float
    df: int


def pooled(samples: Iterable[Sequence[float]]) -> Pooled | None:
    """The variance within samples, around the mean of each; None where no sample has two values.

    >>> pooled([(1.0, 3.0), (10.0, 10.0, 10.0), (5.0,)])
    Pooled(variance=0.6666666666666666, df=3)
    """
    squares, df = 0.0, 0
    for sample in samples:
        mean = fmean(sample)
        squares += sum((value - mean) ** 2 for value in sample)
        df += len(sample) - 1
    return Pooled(squares / df, df) if df else None


def neighbours(densities: Iterable[float], density: float) -> list[float]:
    """A density of a grid and the ones next to it.

    >>> neighbours([0.8, 0.64, 0.512, 0.4096], 0.8)
    [0.8, 0.64]
    """
    grid = sorted(set(densities), reverse=True)
    place = grid.index(density)
    return grid[max(0, place - 1) : place + 2]


def spreads(cells: Iterable[Cell]) -> dict[tuple[Line, float], Pooled | None]:
    """The variance of test values between trials, by line and density, pooled over times and neighbouring densities."""
    tests: dict[Line, dict[float, list[Sequence[float]]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        tests[cell.line][cell.density].append(cell.tests)
    return {
        (line, density): pooled(sample for near in neighbours(grid, density) for sample in grid[near])
        for line, grid in tests.items()
        for density in grid
    }
