"""What an axis of deltas is called and how far it reaches, and which retraining times are safe for rewinding."""

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Final

from rewound.conclusions.baseline import Baseline
from rewound.conclusions.cell import Cell

SAFE_ZONE: Final = (0.25, 0.9)  # of T (paper, section 4)
_FLOORS: Final = {"points": -3.0, "BLEU": -6.0}  # the paper's lower limits
_LITTLE: Final = 1.2  # times the floor: a lowest value above that is still shown


def window(
    cells: Iterable[Cell], x: Callable[[Cell], Hashable], baseline: Baseline, deepest: float = math.inf
) -> tuple[float, float]:
    """Limits that show everything down to the paper's floor, below it only the best technique at each x.

    They follow the best one to `deepest` times the floor; what ends a little below the floor is shown whole.
    """
    cells = list(cells)
    best: dict[Hashable, float] = {}
    for cell in cells:
        best[x(cell)] = max(best.get(x(cell), -math.inf), baseline.delta(cell.median))
    lowest = min(-baseline.spread, *(baseline.delta(cell.low) for cell in cells))
    floor = _FLOORS[baseline.unit]
    floor = lowest if _LITTLE * floor <= lowest < floor else floor
    bottom = max(lowest, deepest * floor, min(floor, *best.values()))
    top = max(baseline.spread, *(baseline.delta(cell.high) for cell in cells))
    margin = 0.06 * (top - bottom) or 1.0
    return bottom - margin, top + margin


def delta_label(baseline: Baseline) -> str:
    """The name of an axis of deltas."""
    return "Δ BLEU" if baseline.metric == "BLEU" else f"Δ {baseline.metric} (points)"
