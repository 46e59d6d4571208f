"""What trials reached: the trials of a setting as one cell, the dense networks it is measured from, its spread.

The value of a cell is the median of its trials, with min to max as its spread. A delta is that median minus the mean
of the dense networks, as shown.

Three trials say little about their own spread, thirty cells of three trials say much about a spread they share. The
variance of a cell is therefore pooled over the retraining times of its density and of the densities next to it, taken
as independent. There is no bootstrap anywhere: of three trials it would only repeat the three.

A table does not name its unit, so it is judged by size: no fraction is above 1, no useful BLEU or percentage below.
Which scores are BLEU is judged by the recipe's name.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Final, NamedTuple

from rewound.conclusions.tables import Row
from rewound.foundations.errors import InputError


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

    A row without a validation value stands with its test value for both: `evidence.weaknesses` says so.

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


LARGEST_FRACTION: Final = 1.5
_TRANSLATION: Final = ("bleu", "gnmt", "translat", "wmt")


def shown_scale(value: float) -> float:
    """From a table's value to the shown one: a fraction is shown in points (x 100), anything larger as it is.

    >>> shown_scale(0.93), shown_scale(26.8)
    (100.0, 1.0)
    """
    return 100.0 if value <= LARGEST_FRACTION else 1.0


def metric_of(recipe: str, scale: float) -> str:
    """What the values of a recipe are called: accuracy where they are fractions, else BLEU or a score.

    >>> metric_of("digits", 100.0), metric_of("wmt16-gnmt", 1.0), metric_of("mypackage.tasks:Squad", 1.0)
    ('accuracy', 'BLEU', 'score')
    """
    if scale == 100:
        return "accuracy"
    return "BLEU" if any(word in recipe.lower() for word in _TRANSLATION) else "score"


def unit_of(metric: str) -> str:
    """The unit of its shown differences."""
    return "BLEU" if metric == "BLEU" else "points"


def scales(rows: Iterable[Row]) -> dict[str, float]:
    """The scale of every recipe with a finished run; a recipe whose rows mix fractions and others is an error."""
    telling_of: dict[str, list[float]] = defaultdict(list)
    pruned: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        for part, value in (("val", row.val), ("test", row.test)) if row.test is not None else ():
            if value is not None:
                (telling_of[row.recipe] if row.dense else pruned[row.recipe, part]).append(value)
    for (recipe, _), values in pruned.items():
        # A network pruned to ruin may score 0.3 BLEU, a dense one does not: among pruned ones only the best counts.
        telling_of[recipe].append(max(values))
    found = {}
    for recipe, telling in telling_of.items():
        if shown_scale(min(telling)) != shown_scale(max(telling)):
            raise InputError(
                f"the rows of {recipe} mix fractions ({min(telling):g}) with other values ({max(telling):g}); "
                "give all of them in one unit"
            )
        found[recipe] = shown_scale(max(telling))
    return found


@dataclass(frozen=True)
class Baseline:
    """The dense networks of one recipe: the zero of every delta, and how much chance alone moves it."""

    mean: float
    sd: float  # 0 for a single run, whose spread is unknown
    n: int
    metric: str = "accuracy"
    """What the values are called."""

    @property
    def scale(self) -> float:
        """Table values to shown values: a fraction is shown in points (x 100), other scores as they are."""
        return shown_scale(self.mean)

    @property
    def unit(self) -> str:
        """The unit of a shown delta."""
        return unit_of(self.metric)

    @property
    def spread(self) -> float:
        """One standard deviation, as shown."""
        return self.sd * self.scale

    def delta(self, test: float) -> float:
        """Difference to the mean dense test value, as shown.

        >>> round(Baseline(mean=0.93, sd=0.002, n=3).delta(0.92), 6)
        -1.0
        """
        return (test - self.mean) * self.scale


def baselines(rows: Iterable[Row], metrics: Mapping[str, str] = {}) -> dict[str, Baseline]:
    """The dense networks of every recipe; a recipe with pruned networks and no dense one is an error.

    `metrics` are what the values of recipes are called, as far as it is known: tables do not say it.
    """
    rows = list(rows)
    scale = scales(rows)
    dense: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.dense and row.test is not None:
            dense[row.recipe].append(row.test)
    if diverged := sorted({row.recipe for row in rows if row.dense} - dense.keys()):
        raise InputError(
            f"every dense run of {', '.join(diverged)} diverged, and deltas are measured from dense networks; "
            "lower the learning rate"
        )
    if missing := sorted({row.recipe for row in rows} - dense.keys()):
        raise InputError(
            f"no finished dense run of {', '.join(missing)}: deltas are measured from dense networks; "
            "add their rows (technique empty, density 1) to the table, or give a table of them with --dense FILE"
        )
    return {
        recipe: Baseline(
            fmean(tests),
            stdev(tests) if len(tests) > 1 else 0.0,
            len(tests),
            metrics.get(recipe) or metric_of(recipe, scale[recipe]),
        )
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


def spreads(made: Iterable[Cell]) -> dict[tuple[Line, float], Pooled | None]:
    """The variance of test values between trials, by line and density, pooled over times and neighbouring densities."""
    tests: dict[Line, dict[float, list[Sequence[float]]]] = defaultdict(lambda: defaultdict(list))
    for cell in made:
        tests[cell.line][cell.density].append(cell.tests)
    return {
        (line, density): pooled(sample for near in neighbours(grid, density) for sample in grid[near])
        for line, grid in tests.items()
        for density in grid
    }
