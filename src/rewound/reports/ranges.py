"""How far the axes of a panel reach, and which times are safe for rewinding."""

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Final, NamedTuple

from rewound.conclusions.cells import Baseline, Cell
from rewound.conclusions.paper.panels import Curves, Measured, Panel
from rewound.reports.look import ratios

SAFE_ZONE: Final = (0.25, 0.9)  # of T (paper, section 4)
_FLOORS: Final = {"points": -3.0, "BLEU": -6.0}  # the paper's lower limits
_OTHER_FLOOR: Final = -0.5  # in any other unit, times the dense value: a loss half as large again
_LITTLE: Final = 1.2  # times the floor: a lowest value above that is still shown


class Axis(NamedTuple):
    """A horizontal axis: its two ends, the places of its ticks, and how their numbers are formatted."""

    across: tuple[float, float]
    places: list[float]
    digits: str = ""


def compression_axis(densities: Iterable[float], others: Iterable[float] = ()) -> Axis:
    """The axis of compression ratios, logarithmic; `others` are densities to be seen without a tick of their own."""
    labels = ratios(sorted(set(densities), reverse=True))
    places = [1 / density for density in labels]
    ends = [*places, *(1 / density for density in others)]
    margin = (max(ends) / min(ends)) ** 0.05 if len(ends) > 1 else 1.1
    digits = len(next(iter(labels.values())).partition(".")[2]) - 1  # behind the point; the last is the sign
    return Axis((min(ends) / margin, max(ends) * margin), places, f".{digits}f")


def time_axis(times: Iterable[float], others: Iterable[float] = ()) -> Axis:
    """The axis of retraining times; `others` are to be seen without a tick of their own."""
    places = sorted(set(times))
    first, last = min(places[0], *others, places[0]), max(places[-1], *others, places[-1])
    margin = 0.05 * (last - first) or 1.0
    return Axis((first - margin, last + margin), places)


def window(
    cells: Iterable[Cell], x: Callable[[Cell], Hashable], baseline: Baseline, deepest: float = math.inf
) -> tuple[float, float]:
    """Limits that show everything down to the paper's floor, below it only the best technique at each x.

    In a unit that the paper does not have, the floor is half the dense value, or as low as the best of all cells. They
    follow the best one to `deepest` times the floor; what ends a little below the floor is shown whole.
    """
    cells = list(cells)
    best: dict[Hashable, float] = {}
    for cell in cells:
        best[x(cell)] = max(best.get(x(cell), -math.inf), baseline.delta(cell.median))
    lowest = min(-baseline.spread, *(baseline.delta(cell.worst) for cell in cells))
    other = min(_OTHER_FLOOR * abs(baseline.mean), max(best.values()))
    floor = _FLOORS.get(baseline.unit, other)
    floor = lowest if _LITTLE * floor <= lowest < floor else floor
    bottom = max(lowest, deepest * floor, min(floor, *best.values()))
    top = max(baseline.spread, *(baseline.delta(cell.best) for cell in cells))
    margin = 0.06 * (top - bottom) or 1.0
    return bottom - margin, top + margin


def panel_limits(panel: Panel) -> tuple[float, float]:
    """Limits of a panel of the paper's figures: the authors', else the data's, moved where a median would be outside.

    Deltas below the axis are the exception: they are marked there, else a ruined network would flatten all others.
    """
    (bottom, top), (low, high) = _window(panel), panel.limits or (None, None)
    low, high = bottom if low is None else low, top if high is None else high
    medians = [point.median for point in panel.seen]
    if panel.y == "speed-up":
        return min(low, *medians), max(high, *medians)
    return low, max(high, *(1.1 * median for median in medians))


def _window(panel: Panel) -> tuple[float, float]:
    if panel.y == "speed-up":
        low, high = min(1.0, *(point.low for point in panel.seen)), max(1.0, *(point.high for point in panel.seen))
        margin = 0.06 * (high - low) or 0.1
        return low - margin, high + margin
    tables = ((panel.measured, panel.curves), (panel.measured.theirs, panel.theirs))
    cells = [cell for each, curves in tables if each is not None for cell in _shown(each, curves)]
    if panel.x == "compression":
        return window(cells, lambda cell: cell.density, panel.measured.baseline, deepest=2)
    return window(cells, lambda cell: cell.retrain_epochs, panel.measured.baseline)


def _shown(measured: Measured, curves: Curves) -> list[Cell]:
    shown = {(name, point.density, point.retrain_epochs) for name, curve in curves.items() for point in curve}
    return [c for c in measured.cells if (c.line.technique, c.density, c.retrain_epochs) in shown]
