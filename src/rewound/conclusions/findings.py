"""What a person concludes from results: the best retraining time, its search cost, the price of compression.

The rules are the paper's. The best retraining time has the best median VALIDATION value (ties: the shortest) and is
reported on test. Ours is "no drop", which the paper says of all techniques together: the largest compression of one
technique up to which a non-increasing (isotonic) fit of the deltas stays above minus one standard deviation of the
dense runs; "1% drop" likewise at minus one point, at minus one BLEU, or in any other unit at minus one percent of the
dense mean (`Baseline.named_drop`). A delta is negative where a network is worse, so the rules hold where lower is
better, too.

The range of "no drop up to 5x" is what the rule says with all deltas one standard error lower, and higher. A delta is a
median of n trials minus the mean of the dense runs: its variance is sigma^2 pi / (2n + pi - 2), that of a normal
sample's median (exact for one trial, within 2% for odd n), plus that of the dense mean. Sigma is pooled over retraining
times and neighbouring densities.

A theoretical speed-up says how many times fewer operations a pruned network takes (paper, appendix F). Over
the dense network it is dense FLOPs / median FLOPs of the trials; over fine-tuning, the median FLOPs of fine-tuning at
the same density / those of the technique. Each technique stands at its best retraining time, chosen by validation among
the runs whose FLOPs are known. `low` is of the trial with the most operations, `high` of the one with the fewest;
against fine-tuning, of the two trials furthest apart.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Final

from rewound.conclusions.cells import Baseline, Cell, Line, Setting, cells, setting_of, spreads
from rewound.conclusions.tables import Row
from rewound.method.algorithm import KEEP, REWIND_AT_MOST

ABLATIONS: Final = ("low-lr-weight-rewinding", "reinitialization")


def best_over_time(cells: Iterable[Cell]) -> list[Cell]:
    """For each line and density the cell whose retraining time validates best; ties go to the shortest."""
    best: dict[tuple[Line, float], Cell] = {}

    def order(cell: Cell) -> tuple[Line, float, float, float]:
        return cell.line, -cell.density, -cell.metric.gain(cell.val), cell.retrain_epochs

    for cell in sorted(cells, key=order):
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


@dataclass(frozen=True)
class Reach:
    """How far a technique compresses within a tolerated drop; a compression is None where even the smallest loses more.

    `range` is None where no cell has two trials; `search_epochs` is the cost of the cell at that compression.
    """

    compression: float | None
    range: tuple[float | None, float | None] | None
    search_epochs: float | None


@dataclass(frozen=True)
class Reaches:
    """How far a technique compresses without a drop and with a drop of one, and the largest compression tried."""

    no_drop: Reach
    one_drop: Reach
    tried: float


def reaches(cells: Iterable[Cell], dense: Mapping[str, Baseline]) -> dict[Line, Reaches]:
    """How far every line compresses, at its best retraining times; the costs are those of the cells (`priced`)."""
    pruned = [cell for cell in cells if cell.density < 1]  # a retrained dense network (the control) compresses nothing
    spread = spreads(pruned)
    curves: dict[Line, list[Cell]] = defaultdict(list)
    for cell in best_over_time(pruned):
        curves[cell.line].append(cell)

    def reach(line: Line, tolerance: float) -> Reach:
        zero, curve = dense[line.recipe], curves[line]

        def deltas(errors: Iterable[float]) -> list[tuple[float, float]]:
            moved = zip(curve, errors, strict=True)
            return [(cell.compression, zero.delta(cell.median) + zero.scale * error) for cell, error in moved]

        compression = largest_compression(deltas(0.0 for _ in curve), tolerance)
        cost = next((cell.search_epochs for cell in curve if cell.compression == compression), None)
        variances = [pooled.variance for cell in curve if (pooled := spread[line, cell.density]) is not None]
        if len(variances) < len(curve):
            return Reach(compression, None, cost)
        errors = [
            math.sqrt(variance * math.pi / (2 * len(cell.tests) + math.pi - 2) + zero.sd**2 / zero.n)
            for cell, variance in zip(curve, variances, strict=True)
        ]
        lowest = largest_compression(deltas(-error for error in errors), tolerance)
        highest = largest_compression(deltas(errors), tolerance)
        return Reach(compression, (lowest, highest), cost)

    return {
        line: Reaches(
            reach(line, dense[line.recipe].spread),
            reach(line, dense[line.recipe].named_drop),
            max(cell.compression for cell in curve),
        )
        for line, curve in curves.items()
    }


@dataclass(frozen=True)
class Speedup:
    """How much faster one technique's networks of one density are, in theory."""

    line: Line
    density: float
    retrain_epochs: float
    median: float
    low: float
    high: float
    trials: int

    @property
    def setting(self) -> Setting:
        """What its trials share."""
        return Setting(self.line, self.density, self.retrain_epochs)


def over_dense(rows: Iterable[Row]) -> list[Speedup]:
    """The speed-up over the dense network, of every technique and density whose FLOPs are known.

    >>> dense = Row("digits", "", False, "", 1, None, 1, 0.9, 0.9, flops=1000)
    >>> pruned = Row("digits", "unstructured", True, "fine-tuning", 0.1, 4, 1, 0.9, 0.9, flops=250)
    >>> [found.median for found in over_dense([dense, pruned])]
    [4.0]
    """
    rows = list(rows)
    dense: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        if row.dense and row.flops:
            dense[row.recipe].append(row.flops)
    return [
        _speedup(setting, flops, [fmean(dense[setting.line.recipe])])
        for setting, flops in _best_flops(rows).items()
        if setting.line.recipe in dense
    ]


def over_fine_tuning(rows: Iterable[Row]) -> list[Speedup]:
    """The speed-up over networks of the same density that were fine-tuned; fine-tuning itself is 1 with its spread."""
    best = _best_flops(rows)
    fine_tuned = {(s.line.experiment, s.density): own for s, own in best.items() if s.line.technique == "fine-tuning"}
    return [
        _speedup(setting, flops, fine_tuned[place])
        for setting, flops in best.items()
        if (place := (setting.line.experiment, setting.density)) in fine_tuned
    ]


def _speedup(setting: Setting, flops: Sequence[int], theirs: Sequence[float]) -> Speedup:
    ratios = median(theirs) / median(flops), min(theirs) / max(flops), max(theirs) / min(flops)
    return Speedup(*setting, *ratios, len(flops))


def _best_flops(rows: Iterable[Row]) -> dict[Setting, list[int]]:
    """The operations of each trial at the best retraining time of every line and density."""
    counted = [row for row in rows if not row.dense and row.flops and row.test is not None]
    flops: dict[Setting | None, list[int]] = defaultdict(list)
    for row in counted:
        flops[setting_of(row)].append(row.flops or 0)
    return {cell.setting: flops[cell.setting] for cell in best_over_time(cells(counted))}
