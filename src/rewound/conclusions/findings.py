"""What a person concludes from results: the best retraining time, its search cost, the price of compression.

The rules are the paper's. The best retraining time has the highest median VALIDATION value (ties: the shortest) and is
reported on test. Ours is "no drop", which the paper says of all techniques together: the largest compression of one
technique up to which a non-increasing (isotonic) fit of the deltas stays above minus one standard deviation of the
dense runs; "1% drop" likewise at minus one point.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from rewound.conclusions.baseline import Baseline
from rewound.conclusions.cell import Cell, Line
from rewound.method.algorithm import KEEP, REWIND_AT_MOST

ONE_POINT: Final = 1.0
ABLATIONS: Final = ("low-lr-weight-rewinding", "reinitialization")


def best_over_time(cells: Iterable[Cell]) -> list[Cell]:
    """For each line and density the cell whose retraining time validates best; ties go to the shortest."""
    best: dict[tuple[Line, float], Cell] = {}
    for cell in sorted(cells, key=lambda cell: (cell.line, -cell.density, -cell.val, cell.retrain_epochs)):
        best.setdefault((cell.line, cell.density), cell)
    return list(best.values())


def priced(cells: Iterable[Cell], epochs: Mapping[str, float]) -> list[Cell]:
    """The cells with their search cost, by the paper's rule where the table does not know it; `epochs` is T by recipe.

    Each level costs t epochs, or T + t for reinitialization; the levels of an iterative run are its line's densities.

    >>> line = Line("digits", "unstructured", True, "fine-tuning")
    >>> found = priced((Cell(line, d, 8, (0.9,), (0.9,)) for d in (0.8, 0.64)), {"digits": 16})
    >>> [cell.search_epochs for cell in found]
    [8, 16]
    """
    cells = list(cells)
    densities: dict[Line, set[float]] = defaultdict(set)
    for cell in cells:
        densities[cell.line].add(cell.density)

    def cost(cell: Cell) -> float:
        again = epochs[cell.line.recipe] if cell.line.technique == "reinitialization" else 0
        levels = sum(density >= cell.density for density in densities[cell.line]) if cell.line.iterative else 1
        return (again + cell.retrain_epochs) * levels

    return [cell if cell.search_epochs is not None else replace(cell, search_epochs=cost(cell)) for cell in cells]


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


@dataclass(frozen=True)
class Verdict:
    """The largest compressions of one technique; None where even the smallest one tried loses more."""

    no_drop: float | None
    one_percent: float | None
    tried: float


def verdicts(cells: Iterable[Cell], dense: Mapping[str, Baseline]) -> dict[Line, Verdict]:
    """How far each line compresses without a drop, and at a drop of one point, each at its best retraining time."""
    curves: dict[Line, list[tuple[float, float]]] = defaultdict(list)
    for cell in best_over_time(cells):
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


def largest_compression(points: Iterable[tuple[float, float]], tolerance: float) -> float | None:
    """The largest compression of (compression, delta) points up to which the fitted drop is at most `tolerance`.

    >>> largest_compression([(2, 0.3), (4, -0.4), (8, 0.1), (16, -3.0)], tolerance=0.2)
    8
    """
    ordered = sorted(points)
    fit = isotonic([delta for _, delta in ordered])
    kept = [compression for (compression, _), delta in zip(ordered, fit, strict=True) if delta >= -tolerance]
    return kept[-1] if kept else None


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
