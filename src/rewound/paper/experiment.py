"""All that a table has of one recipe, way of pruning and mode (one-shot or iterative): what a figure is drawn from."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rewound.conclusions.baseline import Baseline, baselines
from rewound.conclusions.cell import Cell, Line, cells, failures
from rewound.conclusions.comparison import overlay
from rewound.conclusions.findings import longest_times
from rewound.conclusions.speedup import Speedup, over_dense, over_fine_tuning
from rewound.tables.results import Row


@dataclass(frozen=True)
class Experiment:
    """All that was measured of one recipe, way of pruning and mode; dense controls are left out."""

    recipe: str
    pruning: str
    iterative: bool
    epochs: float  # T
    baseline: Baseline
    cells: tuple[Cell, ...]
    over_dense: tuple[Speedup, ...]
    over_fine_tuning: tuple[Speedup, ...]
    failed: Counter[tuple[Line, float]]
    theirs: "Experiment | None" = None  # what a compared table has of it, moved to our baseline
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
            theirs=self.theirs and self.theirs.only(keep),
            left_out=len({cell.density for cell in self.cells} - {cell.density for cell in cells}),
        )


def experiments(
    rows: Iterable[Row], theirs: Sequence[Row] = (), epochs: Mapping[str, float] | None = None
) -> list[Experiment]:
    """Everything a table holds, by recipe, pruning and mode, and what the compared table `theirs` has of the same.

    `epochs` gives T by recipe; without it, T is the recipe's longest retraining time.
    """
    rows = list(rows)
    overlaid = experiments(overlay(rows, theirs)) if theirs else []
    beside = {(each.recipe, each.pruning, each.iterative): each for each in overlaid}
    dense, made, failed = baselines(rows), [cell for cell in cells(rows) if cell.density < 1], failures(rows)
    faster, faster_yet = over_dense(rows), over_fine_tuning(rows)
    longest = longest_times(made) | dict(epochs or {})
    return [
        Experiment(
            *setting,
            longest[setting[0]],
            dense[setting[0]],
            tuple(cell for cell in made if cell.line.experiment == setting),
            tuple(each for each in faster if each.line.experiment == setting and each.density < 1),
            tuple(each for each in faster_yet if each.line.experiment == setting and each.density < 1),
            Counter({place: n for place, n in failed.items() if place[0].experiment == setting}),
            beside.get(setting),
        )
        for setting in dict.fromkeys(cell.line.experiment for cell in made)
    ]
