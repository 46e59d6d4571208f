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

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from rewound.findings import (
    ONE_POINT,
    Baseline,
    Cell,
    Line,
    at_full_time,
    baselines,
    best_over_time,
    cells,
    failures,
    largest_compression,
)
from rewound.literature import Published
from rewound.results import Row
from rewound.speedup import Speedup, over_dense, over_fine_tuning


class Point(NamedTuple):
    """One setting as a figure shows it: a delta in points or BLEU, or a ratio of FLOPs."""

    x: float  # a density, or a retraining time
    median: float
    low: float
    high: float
    density: float
    retrain_epochs: float
    trials: int


def point_of(cell: Cell, x: float, baseline: Baseline) -> Point:
    """A cell as deltas, standing at x."""
    median, low, high = (baseline.delta(value) for value in (cell.median, cell.low, cell.high))
    return Point(x, median, low, high, cell.density, cell.retrain_epochs, len(cell.tests))


@dataclass(frozen=True)
class Experiment:
    """All that was measured of one recipe, way of pruning and mode; dense controls are left out."""

    recipe: str
    pruning: str
    iterative: bool
    epochs: float  # T: the longest retraining time of the recipe
    baseline: Baseline
    cells: tuple[Cell, ...]
    over_dense: tuple[Speedup, ...]
    over_fine_tuning: tuple[Speedup, ...]
    failed: Counter[tuple[Line, float]]
    left_out: int = 0  # densities that were measured and are not to be shown

    @property
    def densities(self) -> list[float]:
        """The densities that were reached, mildest pruning first."""
        return sorted({cell.density for cell in self.cells}, reverse=True)

    def only(self, keep: Callable[[str, float], bool]) -> "Experiment":
        """The experiment without techniques and densities that are not to be shown."""

        def kept(each: Cell | Speedup) -> bool:
            return keep(each.line.technique, each.density)

        cells = tuple(filter(kept, self.cells))
        return replace(
            self,
            cells=cells,
            over_dense=tuple(filter(kept, self.over_dense)),
            over_fine_tuning=tuple(filter(kept, self.over_fine_tuning)),
            failed=Counter({place: n for place, n in self.failed.items() if keep(place[0].technique, place[1])}),
            left_out=len({cell.density for cell in self.cells} - {cell.density for cell in cells}),
        )


@dataclass(frozen=True)
class Panel:
    """One panel: curves by technique, and what else is to be seen on it."""

    experiment: Experiment
    x: Literal["compression", "time"]
    y: Literal["delta", "speed-up"]
    curves: dict[str, list[Point]]
    density: float | None = None  # of a panel against time
    published: tuple[Published, ...] = ()
    limits: tuple[float, float] | None = None  # of the vertical axis; None where the data decide

    @property
    def points(self) -> list[Point]:
        """The points of all curves."""
        return [point for curve in self.curves.values() for point in curve]

    @property
    def rank(self) -> int:
        """How many milder prunings its experiment has."""
        return sum(density > (self.density or 1) for density in self.experiment.densities)

    @property
    def failed(self) -> int:
        """How many runs of the panel's settings failed."""
        counts = self.experiment.failed.items()
        return sum(n for (_, density), n in counts if self.density in (None, density))


def experiments(rows: Iterable[Row]) -> list[Experiment]:
    """Everything a table holds, by recipe, pruning and mode."""
    rows = list(rows)
    dense, made, failed = baselines(rows), [cell for cell in cells(rows) if cell.density < 1], failures(rows)
    faster, faster_yet = over_dense(rows), over_fine_tuning(rows)
    longest: dict[str, float] = defaultdict(float)
    for cell in made:
        longest[cell.line.recipe] = max(longest[cell.line.recipe], cell.retrain_epochs)
    return [
        Experiment(
            *setting,
            longest[setting[0]],
            dense[setting[0]],
            tuple(cell for cell in made if cell.line[:3] == setting),
            tuple(each for each in faster if each.line[:3] == setting and each.density < 1),
            tuple(each for each in faster_yet if each.line[:3] == setting and each.density < 1),
            Counter({place: n for place, n in failed.items() if place[0][:3] == setting}),
        )
        for setting in dict.fromkeys(cell.line[:3] for cell in made)
    ]


def best(experiment: Experiment) -> Iterator[Panel]:
    """Accuracy against compression, each technique at its best retraining time."""
    yield from _against_compression(experiment, best_over_time(experiment.cells))


def full_time(experiment: Experiment) -> Iterator[Panel]:
    """Accuracy against compression of Algorithm 1 and its rivals; none where nothing was retrained for T epochs."""
    shown = at_full_time(experiment.cells, experiment.epochs)
    if any(cell.retrain_epochs == experiment.epochs for cell in shown):
        yield from _against_compression(experiment, shown)


def every_time(experiment: Experiment) -> Iterator[Panel]:
    """Accuracy against retraining time, a panel for each density."""
    for density in experiment.densities:
        yield from _against_time(experiment, density)


def drops(experiment: Experiment) -> Iterator[Panel]:
    """Accuracy against retraining time at the largest compressions without a drop, and at one of 1% or 1 BLEU."""
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for cell in best_over_time(experiment.cells):
        curves[cell.line.technique].append((cell.compression, experiment.baseline.delta(cell.median)))
    tolerances = (experiment.baseline.spread, ONE_POINT)
    reached = [[largest_compression(points, drop) or 0 for points in curves.values()] for drop in tolerances]
    largest = {max(ratios) for ratios in reached}
    for density in experiment.densities:
        if 1 / density in largest:
            yield from _against_time(experiment, density)


def ends(experiment: Experiment) -> Iterator[Panel]:
    """Accuracy against retraining time at the smallest and at the largest compression."""
    for density in dict.fromkeys((experiment.densities[0], experiment.densities[-1])):
        yield from _against_time(experiment, density)


def speedup(experiment: Experiment) -> Iterator[Panel]:
    """Theoretical speed-up over the dense network, against compression."""
    yield from _of_flops(experiment, experiment.over_dense)


def speedup_on_finetuning(experiment: Experiment) -> Iterator[Panel]:
    """Theoretical speed-up over fine-tuned networks of the same density, against compression."""
    yield from _of_flops(experiment, experiment.over_fine_tuning)


def _against_compression(experiment: Experiment, shown: Iterable[Cell]) -> Iterator[Panel]:
    curves: dict[str, list[Point]] = defaultdict(list)
    for cell in shown:
        curves[cell.line.technique].append(point_of(cell, cell.density, experiment.baseline))
    if curves:
        yield Panel(experiment, "compression", "delta", dict(curves))


def _against_time(experiment: Experiment, density: float) -> Iterator[Panel]:
    curves: dict[str, list[Point]] = defaultdict(list)
    for cell in experiment.cells:
        if cell.density == density:
            curves[cell.line.technique].append(point_of(cell, cell.retrain_epochs, experiment.baseline))
    if any(len(curve) > 1 for curve in curves.values()):  # one retraining time is no curve
        yield Panel(experiment, "time", "delta", dict(curves), density)


def _of_flops(experiment: Experiment, shown: Iterable[Speedup]) -> Iterator[Panel]:
    curves: dict[str, list[Point]] = defaultdict(list)
    for each in shown:
        spread = (each.median, each.low, each.high)
        curves[each.line.technique].append(Point(each.density, *spread, each.density, each.retrain_epochs, each.trials))
    if curves:
        yield Panel(experiment, "compression", "speed-up", dict(curves))
