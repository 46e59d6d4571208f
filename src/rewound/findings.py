"""What a person concludes from results: medians over trials, the best retraining time, the price of compression.

The rules are the paper's. A *cell* is all trials of one setting; its value is the median, its spread min to max. The
best retraining time has the highest median VALIDATION value (ties: the shortest) and is reported on test. A delta is
median test - mean dense test. Ours is "no drop", which the paper says of all techniques together: the largest
compression of one technique up to which a non-increasing (isotonic) fit of the deltas stays above minus one standard
deviation of the dense runs; "1% drop" likewise at minus one point.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import Final, NamedTuple

from rewound.algorithm import KEEP, REWIND_AT_MOST
from rewound.errors import InputError
from rewound.results import Row
from rewound.units import scales, shown_scale

ONE_POINT: Final = 1.0
ABLATIONS: Final = ("low-lr-weight-rewinding", "reinitialization")


class Line(NamedTuple):
    """What one line of a figure stands for: everything but density, retraining time and trial."""

    recipe: str
    pruning: str
    iterative: bool
    technique: str


def line_of(row: Row) -> Line:
    """The line a row belongs to."""
    return Line(row.recipe, row.pruning, row.iterative, row.technique)


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


@dataclass(frozen=True)
class Baseline:
    """The dense networks of one recipe: the zero of every delta, and how much chance alone moves it."""

    mean: float
    sd: float  # 0 for a single run, whose spread is unknown
    n: int

    @property
    def scale(self) -> float:
        """Table values to shown values: a fraction is shown in points (x 100), BLEU and the like as it is."""
        return shown_scale(self.mean)

    @property
    def metric(self) -> str:
        """What the values are, judged by their size."""
        return "accuracy" if self.scale == 100 else "BLEU"

    @property
    def unit(self) -> str:
        """The unit of a shown delta."""
        return "points" if self.scale == 100 else "BLEU"

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


@dataclass(frozen=True)
class Verdict:
    """The largest compressions of one technique; None where even the smallest one tried loses more."""

    no_drop: float | None
    one_percent: float | None
    tried: float


def cells(rows: Iterable[Row]) -> list[Cell]:
    """The finished trials of every setting, densest first; settings of which all trials failed are left out.

    A row without a validation value stands with its test value for both: `trust.weaknesses` says so.

    >>> rows = [Row("digits", "unstructured", False, "fine-tuning", 0.1, 4, n, 0.9, 0.9 + n / 100) for n in (1, 2, 3)]
    >>> [(cell.low, cell.median, cell.high) for cell in cells(rows)]
    [(0.91, 0.92, 0.93)]
    """
    found: dict[tuple[Line, float, float], list[tuple[float, float, float | None]]] = defaultdict(list)
    for row in rows:
        if not row.dense and row.retrain_epochs is not None and row.test is not None:
            val = row.test if row.val is None else row.val
            found[line_of(row), row.density, row.retrain_epochs].append((row.test, val, row.search_epochs))
    made = []
    for (line, density, t), trials in found.items():
        tests, vals, costs = zip(*trials, strict=True)
        known = [cost for cost in costs if cost is not None]
        made.append(Cell(line, density, t, tests, vals, median(known) if known else None))
    return sorted(made, key=lambda cell: (cell.line, -cell.density, cell.retrain_epochs))


def failures(rows: Iterable[Row]) -> Counter[tuple[Line, float]]:
    """How many runs failed, by line and density, over all retraining times."""
    return Counter((line_of(row), row.density) for row in rows if not row.dense and row.test is None)


def best_over_time(cells: Iterable[Cell]) -> list[Cell]:
    """For each line and density the cell whose retraining time validates best; ties go to the shortest."""
    best: dict[tuple[Line, float], Cell] = {}
    for cell in sorted(cells, key=lambda cell: (cell.line, -cell.density, -cell.val, cell.retrain_epochs)):
        best.setdefault((cell.line, cell.density), cell)
    return list(best.values())


def longest_times(cells: Iterable[Cell]) -> dict[str, float]:
    """T of every recipe, as far as its cells tell: the longest retraining time."""
    longest: dict[str, float] = defaultdict(float)
    for cell in cells:
        longest[cell.line.recipe] = max(longest[cell.line.recipe], cell.retrain_epochs)
    return dict(longest)


def at_full_time(cells: Iterable[Cell], epochs: float) -> list[Cell]:
    """The cells of the paper's Algorithm 1 and its rivals: retrained for T epochs, weights rewound for at most .9T.

    Ablations are no rivals, and are left out.
    """
    chosen = []
    by_line: dict[Line, list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.line.technique not in ABLATIONS:
            by_line[cell.line].append(cell)
    for line, members in by_line.items():
        times = {cell.retrain_epochs for cell in members}
        early = [t for t in times if t <= REWIND_AT_MOST * epochs]
        t = max(early) if early and line.technique == "weight-rewinding" else epochs
        chosen += [cell for cell in members if cell.retrain_epochs == t]
    return chosen


def is_algorithm_1(full: Iterable[Cell]) -> bool:
    """Whether cells at full time have the paper's Algorithm 1 among them: LR rewinding, 20% a level, the last at most.

    >>> line = Line("digits", "unstructured", True, "lr-rewinding")
    >>> fifths, halves = [[Cell(line, d, 16, (0.9,), (0.9,)) for d in ds] for ds in ([0.8, 0.64, 0.6], [0.5, 0.25])]
    >>> is_algorithm_1(fifths), is_algorithm_1(halves)
    (True, False)
    """
    levels = sorted({cell.density for cell in full if cell.line.technique == "lr-rewinding"}, reverse=True)
    kept = [after / before / KEEP for before, after in pairwise([1.0, *levels])]
    # Tables round densities.
    return bool(kept) and kept[-1] > 0.98 and all(abs(part - 1) < 0.02 for part in kept[:-1])


def baselines(rows: Iterable[Row]) -> dict[str, Baseline]:
    """The dense networks of every recipe; a recipe with pruned networks and no dense one is an error."""
    rows = list(rows)
    scales(rows)  # refuses a mixture of units
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
            "add their rows (technique empty, density 1) to the table"
        )
    return {
        recipe: Baseline(fmean(tests), stdev(tests) if len(tests) > 1 else 0.0, len(tests))
        for recipe, tests in dense.items()
    }


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-increasing sequence nearest to the values in least squares (pool adjacent violators).

    >>> isotonic([0.0, -2.0, -1.0, -3.0])
    [0.0, -1.5, -1.5, -3.0]
    """
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] < mean:
            above, count = pools.pop()
            mean, size = (above * count + mean * size) / (count + size), count + size
        pools.append((mean, size))
    return [mean for mean, size in pools for _ in range(size)]


def largest_compression(points: Iterable[tuple[float, float]], tolerance: float) -> float | None:
    """The largest compression of (compression, delta) points up to which the fitted drop is at most `tolerance`.

    >>> largest_compression([(2, 0.3), (4, -0.4), (8, 0.1), (16, -3.0)], tolerance=0.2)
    8
    """
    ordered = sorted(points)
    fit = isotonic([delta for _, delta in ordered])
    kept = [compression for (compression, _), delta in zip(ordered, fit, strict=True) if delta >= -tolerance]
    return kept[-1] if kept else None


def verdicts(rows: Iterable[Row]) -> dict[Line, Verdict]:
    """How far each line compresses without a drop, and at a drop of one point, each at its best retraining time."""
    rows = list(rows)
    dense = baselines(rows)
    curves: dict[Line, list[tuple[float, float]]] = defaultdict(list)
    for cell in best_over_time(cells(rows)):
        if cell.density < 1:  # a retrained dense network (the control) compresses nothing
            curves[cell.line].append((cell.compression, dense[cell.line.recipe].delta(cell.median)))
    return {
        line: Verdict(
            largest_compression(points, dense[line.recipe].spread),
            largest_compression(points, ONE_POINT),
            max(compression for compression, _ in points),
        )
        for line, points in curves.items()
    }
