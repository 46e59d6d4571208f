"""How much chance moves a mean: variances pooled over cells that share them, and Student's t.

Three trials say little about their own spread, thirty cells of three trials say much about a spread they share. The
variance of a cell is therefore pooled over the retraining times of its density and of the densities next to it, taken
as independent. There is no bootstrap anywhere: of three trials it would only repeat the three.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import fmean
from typing import Final, NamedTuple

from rewound.conclusions.cell import Cell, Line

COVERAGE: Final = 0.95


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
