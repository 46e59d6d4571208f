"""How much better one technique is than another, and how sure that is.

Means of test values over trials, each technique at its best retraining time. Trials are paired only where both
techniques started from the same dense run: by key in our tables; in the authors', which have none, one-shot rows do and
iterative rows do not. Unpaired differences have Welch's t interval. So have paired ones, over the pooled variance of
the differences; below five pairs the extremes are given instead.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Final, NamedTuple, TypeAlias

from rewound.conclusions.cells import Cell, Line, Pooled, cells, line_of, metrics_of, neighbours, pooled, spreads
from rewound.conclusions.findings import best_over_time
from rewound.conclusions.tables import Row

COVERAGE: Final = 0.95
LEAST_PAIRS: Final = 5

_Runs: TypeAlias = Mapping[tuple[Line, float, float], Sequence[Row]]  # by line, density and retraining time
_Origins: TypeAlias = Mapping[tuple[str, int], set[str]]  # the keys of the dense runs of a recipe and trial


@dataclass(frozen=True)
class Difference:
    """One technique's mean test value minus another's at one density, as shown; positive where the first is better."""

    cell: Cell
    minus: Cell
    mean: float
    low: float
    high: float
    n: int  # pairs, or trials of the side that has fewer
    paired: bool
    df: int | None  # None: low and high are the extremes, not a 95% interval


def differences(rows: Iterable[Row], first: str, second: str, retrain_epochs: float | None = None) -> list[Difference]:
    """How much better `first` is than `second` at every density of both, at a retraining time or at each one's best.

    >>> values = {"lr-rewinding": (0.92, 0.93, 0.91), "fine-tuning": (0.90, 0.90, 0.89)}
    >>> rows = [
    ...     Row("digits", "unstructured", True, technique, 0.1, 16, trial, test, test)
    ...     for technique, tests in values.items() for trial, test in enumerate(tests)
    ... ]
    >>> [f"{d.mean:+.2f} [{d.low:+.2f}, {d.high:+.2f}]" for d in differences(rows, "lr-rewinding", "fine-tuning")]
    ['+2.33 [+0.21, +4.45]']
    """
    rows = list(rows)
    metrics, runs, origins = metrics_of(rows), _runs(rows), _origins(rows)
    pruned = [cell for cell in cells(rows) if cell.density < 1]
    asked = [cell for cell in pruned if retrain_epochs in (None, cell.retrain_epochs)]
    best, spread = {(cell.line, cell.density): cell for cell in best_over_time(asked)}, spreads(pruned)
    found = []
    for (line, density), cell in best.items():
        minus = best.get((line._replace(technique=second), density))
        if line.technique == first and minus is not None:
            pairs = _pairs(_at(runs, cell), _at(runs, minus), origins)
            if pairs:
                estimate = _paired(pairs, _nearby(cell, minus, runs, origins))
            else:
                estimate = _unpaired(cell, minus, spread[line, density], spread[minus.line, density])
            metric = metrics[line.recipe]
            gains = [metric.scale * metric.gain(value) for value in (estimate.mean, estimate.low, estimate.high)]
            mean, (low, high) = gains[0], sorted(gains[1:])
            found.append(Difference(cell, minus, mean, low, high, estimate.n, bool(pairs), estimate.df))
    return found


class _Estimate(NamedTuple):
    mean: float
    low: float
    high: float
    n: int
    df: int | None


def _paired(pairs: Sequence[float], nearby: list[Sequence[float]]) -> _Estimate:
    mean, n, variance = fmean(pairs), len(pairs), pooled([pairs, *nearby])
    if n < LEAST_PAIRS or variance is None:
        return _Estimate(mean, min(pairs), max(pairs), n, None)
    half = t_quantile(variance.df) * math.sqrt(variance.variance / n)
    return _Estimate(mean, mean - half, mean + half, n, variance.df)


def _unpaired(cell: Cell, minus: Cell, one: Pooled | None, other: Pooled | None) -> _Estimate:
    mean, n = fmean(cell.tests) - fmean(minus.tests), min(len(cell.tests), len(minus.tests))
    if one is None or other is None:
        return _Estimate(mean, cell.low - minus.high, cell.high - minus.low, n, None)
    parts = (one.variance / len(cell.tests), one.df), (other.variance / len(minus.tests), other.df)
    square = sum(part for part, _ in parts)
    # Welch and Satterthwaite, rounded down: a little too wide rather than too narrow.
    df = int(square**2 / sum(part**2 / df for part, df in parts)) if square else one.df + other.df
    half = t_quantile(df) * math.sqrt(square)
    return _Estimate(mean, mean - half, mean + half, n, df)


def _nearby(cell: Cell, minus: Cell, runs: _Runs, origins: _Origins) -> list[Sequence[float]]:
    """The paired differences at equal times, at this density and those next to it, without the asked one's own."""
    grid = {d for line, d, _ in runs if line == cell.line and d < 1} & {d for line, d, _ in runs if line == minus.line}
    near, asked = neighbours(grid, cell.density), (cell.density, cell.retrain_epochs, minus.retrain_epochs)
    found = [
        _pairs(rows, runs[minus.line, density, t], origins)
        for (line, density, t), rows in runs.items()
        if line == cell.line and density in near and (minus.line, density, t) in runs and (density, t, t) != asked
    ]
    return [pairs for pairs in found if pairs]


def _pairs(ours: Sequence[Row], others: Sequence[Row], origins: _Origins) -> Sequence[float]:
    """Differences by trial; none unless every trial of the smaller side has a partner from the same dense run."""

    def related(one: Row, other: Row) -> bool:
        if one.key and other.key:  # two dense runs of one trial (two stores in one table) leave open which was pruned
            return len(origins.get((one.recipe, one.trial), ())) == 1
        return not one.key and not other.key and not one.iterative

    our_trials, other_trials = {row.trial: row for row in ours}, {row.trial: row for row in others}
    common = sorted(
        trial for trial in our_trials.keys() & other_trials.keys() if related(our_trials[trial], other_trials[trial])
    )
    if (len(our_trials), len(other_trials)) != (len(ours), len(others)) or len(common) < min(len(ours), len(others)):
        return []
    return [(our_trials[trial].test or 0.0) - (other_trials[trial].test or 0.0) for trial in common]


def _runs(rows: Iterable[Row]) -> _Runs:
    runs: dict[tuple[Line, float, float], list[Row]] = defaultdict(list)
    for row in rows:
        if not row.dense and row.test is not None and row.retrain_epochs is not None:
            runs[line_of(row), row.density, row.retrain_epochs].append(row)
    return runs


def _at(runs: _Runs, cell: Cell) -> Sequence[Row]:
    return runs[cell.line, cell.density, cell.retrain_epochs]


def _origins(rows: Iterable[Row]) -> _Origins:
    keys: dict[tuple[str, int], set[str]] = defaultdict(set)
    for row in rows:
        if row.dense and row.key:
            keys[row.recipe, row.trial].add(row.key)
    return keys


@lru_cache
def t_quantile(df: int, coverage: float = COVERAGE) -> float:
    """The t within which Student's distribution lies, on both sides, with this probability.

    For whole degrees of freedom its integral is a finite series (Abramowitz and Stegun, 26.7.3 and 26.7.4), so that a
    bisection stands in for a dependency on scipy.

    >>> round(t_quantile(2), 4), round(t_quantile(10), 4), round(t_quantile(60, 0.99), 4)
    (4.3027, 2.2281, 2.6603)
    """
    low, high = 0.0, 1.0
    while _within(high, df) < coverage:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, df) < coverage else (low, middle)
    return high


def _within(t: float, df: int) -> float:
    angle = math.atan(t / math.sqrt(df))
    odd = df % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for k in range(odd, df - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k + 1) / (k + 2)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
