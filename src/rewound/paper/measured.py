"""All that a table has of one experiment (a recipe, a way of pruning and a mode): what a figure is drawn from."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from rewound.conclusions.baseline import Baseline
from rewound.conclusions.cell import Cell, Line, cells, failures
from rewound.conclusions.comparison import overlay
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.speedup import Speedup, over_dense, over_fine_tuning
from rewound.tables.folder import Tables


@dataclass(frozen=True)
class Measured:
    """All that was measured of one experiment; dense controls are left out."""

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
            left_out=len({cell.density for cell in self.cells} - {cell.density for cell in cells}),
        )


def measured(evidence: Evidence) -> list[Measured]:
    """What our table has of every experiment, and what a compared one has of the same."""
    rows, theirs = evidence.rows, evidence.theirs
    overlaid = measured(replace(evidence, tables=Tables(overlay(rows, theirs)), theirs=())) if theirs else []
    beside = {each.experiment: each for each in overlaid}
    dense, made, failed = evidence.baselines, [cell for cell in cells(rows) if cell.density < 1], failures(rows)
    faster, faster_yet = over_dense(rows), over_fine_tuning(rows)
    return [
        Measured(
            *experiment,
            epochs=evidence.epochs[experiment[0]],
            baseline=dense[experiment[0]],
            cells=tuple(cell for cell in made if cell.line.experiment == experiment),
            over_dense=tuple(each for each in faster if each.line.experiment == experiment and each.density < 1),
            over_fine_tuning=tuple(
                each for each in faster_yet if each.line.experiment == experiment and each.density < 1
            ),
            failed=Counter({place: n for place, n in failed.items() if place[0].experiment == experiment}),
            theirs=beside.get(experiment),
        )
        for experiment in dict.fromkeys(cell.line.experiment for cell in made)
    ]
