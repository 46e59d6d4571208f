"""What the panels of a figure show, as numbers: a table of results becomes curves of points, and nothing is drawn.

`Measured` is all that a table has of one experiment (a recipe, a way of pruning and a mode); from it come

| panels                  | x           | y                            | retraining time                          |
|-------------------------|-------------|------------------------------|------------------------------------------|
| `best`                  | compression | delta                        | the one that validates best              |
| `full_time`             | compression | delta                        | T, weights rewound to at most .9T        |
| `every_time`            | time        | delta                        | all; one panel per density               |
| `drops`                 | time        | delta                        | all; the deepest without a drop, with 1% |
| `ends`                  | time        | delta                        | all; the mildest pruning, the strongest  |
| `speedup`               | compression | FLOPs of dense / of pruned   | the one that validates best              |
| `speedup_on_finetuning` | compression | FLOPs of fine-tuned / others | the one that validates best              |

`points.csv` has one line for each point that is drawn. Its column `table` says whether the point is ours, of a compared
table, or published as a black dot, whose technique is the work that it comes from; its low and high are those of its
error bar, if it has one.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from rewound.conclusions.cells import Baseline, Cell, Line, cells, failures
from rewound.conclusions.comparison import overlay
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.findings import Speedup, at_full_time, best_over_time, over_dense, over_fine_tuning
from rewound.conclusions.paper.networks import Published
from rewound.conclusions.tables import Tables
from rewound.foundations.csvfiles import write_table


@dataclass(frozen=True)
class Measured:
    """All that was measured of one experiment."""

    recipe: str
    pruning: str
    iterative: bool
    epochs: float  # T
    baseline: Baseline
    cells: tuple[Cell, ...]
    over_dense: tuple[Speedup, ...]
    over_fine_tuning: tuple[Speedup, ...]
    failed: Counter[tuple[Line, float]]
    theirs: "Measured | None" = None  # what a compared table has of it, moved to our baseline
    left_out: int = 0  # densities that were measured and are not to be shown

    @property
    def experiment(self) -> tuple[str, str, bool]:
        """Recipe, way of pruning and mode, as of its lines."""
        return self.recipe, self.pruning, self.iterative

    @property
    def densities(self) -> list[float]:
        """The densities that were reached, mildest pruning first."""
        return sorted({cell.density for cell in self.cells}, reverse=True)

    def only(self, keep: Callable[[str, float], bool]) -> "Measured":
        """The same without techniques and densities that are not to be shown."""

        def kept(each: Cell | Speedup) -> bool:
            return keep(each.line.technique, each.density)

        cells = tuple(filter(kept, self.cells))
        return replace(
            self,
            cells=cells,
            over_dense=tuple(filter(kept, self.over_dense)),
            over_fine_tuning=tuple(filter(kept, self.over_fine_tuning)),
            failed=Counter({place: n for place, n in self.failed.items() if keep(place[0].technique, place[1])}),
            theirs=self.theirs and self.theirs.only(keep),
            left_out=len({cell.density for cell in self.cells if cell.density < 1} - {cell.density for cell in cells}),
        )


def measured(evidence: Evidence) -> list[Measured]:
    """What our table has of every experiment, and what a compared one has of the same."""
    rows, theirs = evidence.rows, evidence.theirs
    overlaid = measured(replace(evidence, tables=Tables(overlay(rows, theirs)), compared_with=())) if theirs else []
    compared = {each.experiment: each for each in overlaid}
    dense, found, failed = evidence.baselines, cells(rows), failures(rows)
    faster, faster_yet = over_dense(rows), over_fine_tuning(rows)
    return [
        Measured(
            *experiment,
            epochs=evidence.epochs[experiment[0]],
            baseline=dense[experiment[0]],
            cells=tuple(cell for cell in found if cell.line.experiment == experiment),
            over_dense=tuple(each for each in faster if each.line.experiment == experiment),
            over_fine_tuning=tuple(each for each in faster_yet if each.line.experiment == experiment),
            failed=Counter({place: n for place, n in failed.items() if place[0].experiment == experiment}),
            theirs=compared.get(experiment),
        )
        for experiment in dict.fromkeys(cell.line.experiment for cell in found)
    ]


X: TypeAlias = Literal["compression", "time"]
Y: TypeAlias = Literal["delta", "speed-up"]


class FigurePoint(NamedTuple):
    """One setting as a figure shows it: a delta, or a ratio of FLOPs."""

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
        low, high = sorted((value(each.low), value(each.high)))  # where lower is better, the highest is the worst
        spread = (value(each.median), low, high)
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
    deepest = {_deepest(measured, drop) for drop in (0, measured.baseline.named_drop)}
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


COLUMNS: Final = (
    *("figure", "recipe", "pruning", "iterative", "technique", "density", "retrain_epochs"),
    *("unit", "median", "low", "high", "trials", "table"),
)


def write_points(panels: Iterable[tuple[str, Panel]], path: Path) -> Path:
    """Write the points of panels, each with the name of its figure."""
    write_table(COLUMNS, ([figure, *line] for figure, panel in panels for line in _lines(panel)), path)
    return path


def _lines(panel: Panel) -> Iterator[list[str]]:
    where = panel.measured
    experiment = [where.recipe, where.pruning, str(int(where.iterative))]
    unit = "ratio" if panel.y == "speed-up" else where.baseline.unit
    for table, curves in (("ours", panel.curves), ("compared", panel.theirs)):
        for technique, point in ((technique, point) for technique, curve in curves.items() for point in curve):
            at = [technique, f"{point.density:.10g}", f"{point.retrain_epochs:g}", unit]
            spread = (_text(value) for value in (point.median, point.low, point.high))
            yield [*experiment, *at, *spread, str(point.trials), table]
    for dot in panel.published:
        at = [dot.source, f"{dot.density:.10g}", "" if dot.epochs is None else f"{dot.epochs:g}", unit]
        bar = ["", ""] if dot.error is None else [_text(dot.delta - dot.error), _text(dot.delta + dot.error)]
        yield [*experiment, *at, _text(dot.delta), *bar, "", "published"]


def _text(value: float) -> str:
    return f"{value:z.4f}"
