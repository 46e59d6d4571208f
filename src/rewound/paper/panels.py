"""What the panels of a figure show, as numbers: a table of results becomes curves of points, and nothing is drawn.

| panels                  | x           | y                            | retraining time                          |
|-------------------------|-------------|------------------------------|------------------------------------------|
| `best`                  | compression | delta                        | the one that validates best              |
| `full_time`             | compression | delta                        | T, weights rewound to at most .9T        |
| `every_time`            | time        | delta                        | all; one panel per density               |
| `drops`                 | time        | delta                        | all; where the drop begins, and at 1%    |
| `ends`                  | time        | delta                        | all; the mildest pruning, the strongest  |
| `speedup`               | compression | FLOPs of dense / of pruned   | the one that validates best              |
| `speedup_on_finetuning` | compression | FLOPs of fine-tuned / others | the one that validates best              |
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

from rewound.conclusions.cell import Cell
from rewound.conclusions.findings import at_full_time, best_over_time, verdicts
from rewound.conclusions.speedup import Speedup
from rewound.paper.experiment import Experiment
from rewound.paper.literature import Published

X: TypeAlias = Literal["compression", "time"]
Y: TypeAlias = Literal["delta", "speed-up"]


class Point(NamedTuple):
    """One setting as a figure shows it: a delta in points or BLEU, or a ratio of FLOPs."""

    x: float  # a density, or a retraining time
    median: float
    low: float
    high: float
    density: float
    retrain_epochs: float
    trials: int


Curves: TypeAlias = dict[str, list[Point]]  # by technique


def curves_of(shown: Iterable[Cell | Speedup], x: X, value: Callable[[float], float]) -> Curves:
    """Settings as points, in curves by technique; `value` is what is shown of a median, a minimum and a maximum."""
    curves: Curves = defaultdict(list)
    for each in shown:
        at = each.density if x == "compression" else each.retrain_epochs
        spread = (value(each.median), value(each.low), value(each.high))
        curves[each.line.technique].append(Point(at, *spread, each.density, each.retrain_epochs, each.trials))
    return dict(curves)


@dataclass(frozen=True)
class Panel:
    """One panel: curves by technique, and what else is to be seen on it."""

    experiment: Experiment
    x: X
    y: Y
    curves: Curves
    theirs: Curves = field(default_factory=dict)  # of a compared table
    density: float | None = None  # of a panel against time
    published: tuple[Published, ...] = ()
    limits: tuple[float, float] | None = None  # of the vertical axis; None where the data decide

    @property
    def points(self) -> list[Point]:
        """The points of all our curves."""
        return [point for curve in self.curves.values() for point in curve]

    @property
    def seen(self) -> list[Point]:
        """The points of all curves, ours and those of a compared table."""
        return [*self.points, *(point for curve in self.theirs.values() for point in curve)]

    @property
    def rank(self) -> int:
        """How many milder prunings its experiment has."""
        return sum(density > (self.density or 1) for density in self.experiment.densities)

    @property
    def failed(self) -> int:
        """How many runs of the panel's settings failed."""
        counts = self.experiment.failed.items()
        return sum(n for (_, density), n in counts if self.density in (None, density))


_Shown: TypeAlias = Callable[[Experiment], Iterable[Cell | Speedup]]  # the same choice from whichever table


def best(experiment: Experiment) -> Iterator[Panel]:
    """Accuracy against compression, each technique at its best retraining time."""
    yield from _against_compression(experiment, lambda each: best_over_time(each.cells), "delta")


def full_time(experiment: Experiment) -> Iterator[Panel]:
    """Accuracy against compression of Algorithm 1 and its rivals; none where nothing was retrained for T epochs."""

    def shown(each: Experiment) -> list[Cell]:
        return at_full_time(each.cells, experiment.epochs)

    if any(cell.retrain_epochs == experiment.epochs for cell in shown(experiment)):
        yield from _against_compression(experiment, shown, "delta")


def every_time(experiment: Experiment) -> Iterator[Panel]:
    """Accuracy against retraining time, a panel for each density."""
    for density in experiment.densities:
        yield from _against_time(experiment, density)


def drops(experiment: Experiment) -> Iterator[Panel]:
    """Accuracy against retraining time at the largest compressions without a drop, and at one of 1% or 1 BLEU."""
    found = verdicts(experiment.cells, {experiment.recipe: experiment.baseline}).values()
    largest = {max(each.no_drop or 0 for each in found), max(each.one_percent or 0 for each in found)}
    for density in experiment.densities:
        if 1 / density in largest:
            yield from _against_time(experiment, density)


def ends(experiment: Experiment) -> Iterator[Panel]:
    """Accuracy against retraining time at the smallest and at the largest compression."""
    for density in dict.fromkeys((experiment.densities[0], experiment.densities[-1])):
        yield from _against_time(experiment, density)


def speedup(experiment: Experiment) -> Iterator[Panel]:
    """Theoretical speed-up over the dense network, against compression."""
    yield from _against_compression(experiment, lambda each: each.over_dense, "speed-up")


def speedup_on_finetuning(experiment: Experiment) -> Iterator[Panel]:
    """Theoretical speed-up over fine-tuned networks of the same density, against compression."""
    yield from _against_compression(experiment, lambda each: each.over_fine_tuning, "speed-up")


def _against_compression(experiment: Experiment, shown: _Shown, y: Y) -> Iterator[Panel]:
    panel = _panel(experiment, "compression", y, shown)
    if panel.curves:
        yield panel


def _against_time(experiment: Experiment, density: float) -> Iterator[Panel]:
    def shown(each: Experiment) -> Iterable[Cell]:
        return (cell for cell in each.cells if cell.density == density)

    panel = replace(_panel(experiment, "time", "delta", shown), density=density)
    if any(len(curve) > 1 for curve in panel.curves.values()):  # one retraining time is no curve
        yield panel


def _panel(experiment: Experiment, x: X, y: Y, shown: _Shown) -> Panel:
    """What is shown of our table, and the same of a compared one."""
    value = experiment.baseline.delta if y == "delta" else float
    ours, theirs = (curves_of(shown(each), x, value) if each else {} for each in (experiment, experiment.theirs))
    return Panel(experiment, x, y, ours, theirs)
