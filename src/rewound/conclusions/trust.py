"""How far a claim can be trusted: the range of a verdict, what it costs to find, and what makes it weak.

The range of "no drop up to 5x" is what the rule says with all deltas one standard error lower, and higher. A delta is a
median of n trials minus the mean of the dense runs: its variance is sigma^2 pi / (2n + pi - 2), that of a normal
sample's median (exact for one trial, within 2% for odd n), plus that of the dense mean. Sigma is pooled over retraining
times and neighbouring densities.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from rewound.conclusions.baseline import Baseline
from rewound.conclusions.cell import Cell, Line, cells
from rewound.conclusions.findings import ONE_POINT, best_over_time, largest_compression, verdicts
from rewound.conclusions.intervals import spreads
from rewound.conclusions.tables.rows import Row

LEAST_TRIALS: Final = 3


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
    """A technique's two verdicts, and the largest compression that was tried."""

    no_drop: Reach
    one_percent: Reach
    tried: float


def reaches(cells: Iterable[Cell], dense: Mapping[str, Baseline]) -> dict[Line, Reaches]:
    """The verdicts of every line with their ranges and costs; the costs are those of the cells (`findings.priced`)."""
    made = [cell for cell in cells if cell.density < 1]
    spread = spreads(made)
    curves: dict[Line, list[Cell]] = defaultdict(list)
    for cell in best_over_time(made):
        curves[cell.line].append(cell)

    def reach(line: Line, compression: float | None, tolerance: float) -> Reach:
        zero, moved = dense[line.recipe], []
        for sign in (-1, 1):
            points = []
            for cell in curves[line]:
                variance = spread[line, cell.density]
                if variance is None:
                    return Reach(compression, None, _cost(curves[line], compression))
                median = variance.variance * math.pi / (2 * len(cell.tests) + math.pi - 2)
                error = math.sqrt(median + zero.sd**2 / zero.n)
                points.append((cell.compression, zero.delta(cell.median + sign * error)))
            moved.append(largest_compression(points, tolerance))
        return Reach(compression, (moved[0], moved[1]), _cost(curves[line], compression))

    return {
        line: Reaches(
            reach(line, verdict.no_drop, dense[line.recipe].spread),
            reach(line, verdict.one_percent, ONE_POINT),
            verdict.tried,
        )
        for line, verdict in verdicts(made, dense).items()
    }


def _cost(curve: Iterable[Cell], compression: float | None) -> float | None:
    return next((cell.search_epochs for cell in curve if cell.compression == compression), None)


def weaknesses(rows: Iterable[Row]) -> list[str]:
    """What makes the conclusions from a table weak, one sentence each."""
    rows = [row for row in rows if row.test is not None]
    said = []
    for recipe in sorted({row.recipe for row in rows if not row.dense}):
        mine = [row for row in rows if row.recipe == recipe]
        made, dense = cells(mine), sum(row.dense for row in mine)
        few = [cell for cell in made if len(cell.tests) < LEAST_TRIALS]
        if few:
            said.append(
                f"{recipe}: {len(few)} of {len(made)} cells have fewer than {LEAST_TRIALS} trials; "
                "their medians may be luck"
            )
        if all(row.val is None or row.val == row.test for row in mine if not row.dense):
            said.append(f"{recipe}: no validation split; retraining times are chosen on the test set and look too good")
        if dense == 1:
            said.append(f'{recipe}: one dense run; its spread is unknown, so "no drop" tolerates nothing')
    return said
