"""What the panels of a figure show, as numbers: a table of results becomes curves of points, and nothing is drawn.

| panels                  | x           | y                            | retraining time                          |
|-------------------------|-------------|------------------------------|------------------------------------------|
| `best`                  | compression | delta                        | the one that validates best              |
| `full_time`             | compression | delta                        | T, weights rewound to at most .9T        |
| `every_time`            | time        | delta                        | all; one panel per density               |
| `drops`                 | time        | delta                        | all; the deepest without a drop, with 1% |
| `ends`                  | time        | delta                        | all; the mildest pruning, the strongest  |
| `speedup`               | compression | FLOPs of dense / of pruned   | the one that validates best              |
| `speedup_on_finetuning` | compression | FLOPs of fine-tuned / others | the one that validates best              |
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

from rewound.conclusions.cell import Cell
from rewound.conclusions.findings import ONE_POINT, at_full_time, best_over_time
from rewound.conclusions.speedup import Speedup
from rewound.paper.literature import Published
from rewound.paper.measured import Measured

X: TypeAlias = Literal["compression", "time"]
Y: TypeAlias = Literal["delta", "speed-up"]


class FigurePoint(NamedTuple):
    """One setting as a figure shows it: a delta in points or BLEU, or a ratio of FLOPs."""

    x: float  # a density, or a retraining time
    median: float
    low: float
    high: float
    density: float
    retrain_epochs: float
    trials: int


Curves: TypeAlias = dict[str, list[FigurePoint]]  # by technique


def curves_of(shown: Iterable[Cell | Speedup], x: X, value: Callable[[float], float]) -> Curves:
    """Settings as points, in curves by technique; `value` is what is shown of a median, a minimum and a maximum."""
    curves: Curves = defaultdict(list)
    for each in shown:
        at = each.density if x == "compression" else each.retrain_epochs
        spread = (value(each.median), value(each.low), value(each.high))
        curves[each.line.technique].append(FigurePoint(at, *spread, each.density, each.retrain_epochs, each.trials))
    return dict(curves)


@dataclass(frozen=True)
class Panel:
    """One panel: curves by technique, and what else is to be seen on it."""

    measured: Measured
    x: X
    y: Y
    curves: Curves
    theirs: Curves = field(default_factory=dict)  # of a compared table
    density: float | None = None  # of a panel against time
    published: tuple[Published, ...] = ()
    limits: tuple[float, float | None] | None = None  # of the vertical axis; None where the data decide

    @property
    def points(self) -> list[FigurePoint]:
        """The points of all our curves."""
        return [point for curve in self.curves.values() for point in curve]

    @property
    def seen(self) -> list[FigurePoint]:
        """The points of all curves, ours and those of a compared table."""
        return [*self.points, *(point for curve in self.theirs.values() for point in curve)]

    @property
    def rank(self) -> int:
        """How many milder prunings its experiment has."""
        return sum(density > (self.density or 1) for density in self.measured.densities)

    @property
    def failed(self) -> int:
        """How many runs of the panel's settings failed."""
        counts = self.measured.failed.items()
        return sum(n for (_, density), n in counts if self.density in (None, density))


_Shown: TypeAlias = Callable[[Measured], Iterable[Cell | Speedup]]  # the same choice from whichever table


def best(measured: Measured) -> Iterator[Panel]:
    """Accuracy against compression, each technique at its best retraining time."""
    yield from _against_compression(measured, lambda each: best_over_time(each.cells), "delta")


def full_time(measured: Measured) -> Iterator[Panel]:
    """Accuracy against compression of Algorithm 1 and its rivals; none where nothing was retrained for T epochs."""

    def shown(each: Measured) -> list[Cell]:
        return at_full_time(each.cells, measured.epochs)

    if any(cell.retrain_epochs == measured.epochs for cell in shown(measured)):
        yield from _against_compression(measured, shown, "delta")


def every_time(measured: Measured) -> Iterator[Panel]:
    """Accuracy against retraining time, a panel for each density."""
    for density in measured.densities:
        yield from _against_time(measured, density)


def drops(measured: Measured) -> Iterator[Panel]:
    """Accuracy against retraining time at the paper's two drops: none, and one of 1% or 1 BLEU.

    Each is the largest compression at which any technique, after any retraining time, loses no more in the median.
    """
    deepest = {_deepest(measured, drop) for drop in (0, ONE_POINT)}
    for density in measured.densities:
        if density in deepest:
            yield from _against_time(measured, density)


def _deepest(measured: Measured, drop: float) -> float | None:
    kept = (cell.density for cell in measured.cells if measured.baseline.delta(cell.median) >= -drop)
    return min(kept, default=None)


def ends(measured: Measured) -> Iterator[Panel]:
    """Accuracy against retraining time at the smallest and at the largest compression."""
    for density in dict.fromkeys((measured.densities[0], measured.densities[-1])):
        yield from _against_time(measured, density)


def speedup(measured: Measured) -> Iterator[Panel]:
    """Theoretical speed-up over the dense network, against compression."""
    yield from _against_compression(measured, lambda each: each.over_dense, "speed-up")


def speedup_on_finetuning(measured: Measured) -> Iterator[Panel]:
    """Theoretical speed-up over fine-tuned networks of the same density, against compression."""
    yield from _against_compression(measured, lambda each: each.over_fine_tuning, "speed-up")


def _against_compression(measured: Measured, shown: _Shown, y: Y) -> Iterator[Panel]:
    panel = _panel(measured, "compression", y, shown)
    if panel.curves:
        yield panel


def _against_time(measured: Measured, density: float) -> Iterator[Panel]:
    def shown(each: Measured) -> Iterable[Cell]:
        return (cell for cell in each.cells if cell.density == density)

    panel = replace(_panel(measured, "time", "delta", shown), density=density)
    if any(len(curve) > 1 for curve in panel.curves.values()):  # one retraining time is no curve
        yield panel


def _panel(measured: Measured, x: X, y: Y, shown: _Shown) -> Panel:
    """What is shown of our table, and the same of a compared one."""
    value = measured.baseline.delta if y == "delta" else float
    ours, theirs = (curves_of(shown(each), x, value) if each else {} for each in (measured, measured.theirs))
    return Panel(measured, x, y, ours, theirs)
