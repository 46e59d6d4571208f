"""How techniques, ways of pruning, ratios and axes look wherever they are shown: as in the paper, in its order.

Axes are those of `window` and `panel_limits`: everything down to the paper's floor, below it only the best technique.
"""

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from math import cos, pi, sin
from typing import Final, Literal, NamedTuple

from rewound.conclusions.cells import Baseline, Cell
from rewound.conclusions.paper.panels import Curves, Measured, Panel


@dataclass(frozen=True)
class Look:
    """What a reader recognises one technique by."""

    label: str
    colour: str
    marker: str
    size: float
    line: Literal["-", "--", "-.", ":", ""]
    edge: str = "white"  # of the markers


LOOKS: Final = {
    "lr-rewinding": Look("Learning rate rewinding", "#e69f00", "o", 6, "-."),
    "weight-rewinding": Look("Weight rewinding", "#56b4e9", "*", 10, ":"),
    "fine-tuning": Look("Fine-tuning", "#009e73", "D", 5.5, "--"),
    "low-lr-weight-rewinding": Look("Low-LR weight rewinding", "#f0e442", "h", 7, "-.", edge="#8c8200"),
    "reinitialization": Look("Reinitializing", "#0072b2", "x", 7, "-.", edge="#0072b2"),
    "gradual": Look("Gradual pruning", "#cc79a7", "^", 6, "-"),
}
# For techniques the paper does not have: what is left of its palette, then greys.
_OTHERS: Final = (
    ("#d55e00", "s"),
    ("#404040", "v"),
    ("#7f7f7f", "P"),
    ("#a6a6a6", "X"),
)


def printable(text: str) -> str:
    """The text with control characters, ends of lines among them, as they are written in Python.

    >>> printable("red" + chr(27) + "[31m") == "red" + chr(92) + "x1b[31m"
    True
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def looks(techniques: Iterable[str]) -> dict[str, Look]:
    """The look of each technique, in legend order; unknown ones follow by name, in colours of their own.

    >>> [look.label for look in looks({"mine", "fine-tuning", "lr-rewinding"}).values()]
    ['Learning rate rewinding', 'Fine-tuning', 'mine']
    """
    techniques = set(techniques)
    known = {name: look for name, look in LOOKS.items() if name in techniques}
    for index, name in enumerate(sorted(techniques - known.keys())):
        colour, marker = _OTHERS[index % len(_OTHERS)]
        known[name] = Look(name, colour, marker, 6, "-")
    return known


def pruning_title(pruning: str) -> str:
    """A way of pruning in a title.

    >>> pruning_title("structured-a"), pruning_title("unstructured random floor=0.1")
    ('structured-a pruning', 'unstructured pruning, random floor=0.1')
    """
    kind, *how = pruning.split(" ", maxsplit=1)
    return ", ".join([f"{kind} pruning", *how])


def mode_title(iterative: bool) -> str:
    """A mode in a title.

    >>> mode_title(True), mode_title(False)
    ('Iterative', 'One-shot')
    """
    return "Iterative" if iterative else "One-shot"


def ratios(densities: Iterable[float]) -> dict[float, str]:
    """Compression ratios as the paper writes them, with more digits where two would read the same.

    >>> ratios([1, 0.1074]), ratios([0.9602, 0.9574])
    ({1: '1.00×', 0.1074: '9.31×'}, {0.9602: '1.041×', 0.9574: '1.044×'})
    """
    densities = list(dict.fromkeys(densities))
    for digits in range(2, 9):
        labels = [f"{1 / density:.{digits}f}×" for density in densities]
        if len(set(labels)) == len(labels):
            break
    return dict(zip(densities, labels, strict=True))


_DASHES: Final = {"-": [1, 0], "--": [7, 4], "-.": [9, 3, 2, 3], ":": [2, 3], "": [0, 1]}


def dash(look: Look) -> list[int]:
    """The dashes of a technique's line, in pixels."""
    return list(_DASHES[look.line])


def area(look: Look) -> int:
    """The area of a technique's markers, in square pixels."""
    return round((1.55 * look.size) ** 2)


def marker_path(look: Look) -> str:
    """The marker of a technique as an SVG path in the square from -1 to 1; an unknown one is a circle.

    >>> marker_path(Look("Fine-tuning", "#009e73", "D", 5.5, "--"))
    'M0,-1L1,0L0,1L-1,0Z'
    """
    return _MARKERS.get(look.marker, _MARKERS["o"])


def _polygon(*radii: float) -> str:
    """A closed line whose corners, clockwise from the top, have these distances from the middle."""
    angles = [2 * pi * number / len(radii) for number in range(len(radii))]
    corners = [(round(r * sin(a), 3), round(-r * cos(a), 3)) for r, a in zip(radii, angles, strict=True)]
    return f"M{'L'.join(f'{x:g},{y:g}' for x, y in corners)}Z"


_CROSS: Final = "M-1,-.6L-.6,-1L0,-.4L.6,-1L1,-.6L.4,0L1,.6L.6,1L0,.4L-.6,1L-1,.6L-.4,0Z"
_MARKERS: Final = {
    "o": "M0,-1A1,1,0,1,1,0,1A1,1,0,1,1,0,-1Z",
    "*": _polygon(*[1, 0.45] * 5),
    "D": "M0,-1L1,0L0,1L-1,0Z",
    "h": _polygon(*[1] * 6),
    "x": _CROSS,
    "s": "M-.85,-.85H.85V.85H-.85Z",
    "^": "M0,-1L1,.8L-1,.8Z",
    "v": "M0,1L1,-.8L-1,-.8Z",
    "P": "M-.33,-1H.33V-.33H1V.33H.33V1H-.33V.33H-1V-.33H-.33Z",
    "X": _CROSS,
}


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
