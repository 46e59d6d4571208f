"""Lines and markers of techniques for a browser: matplotlib's, as dashes and SVG paths."""

from math import cos, pi, sin
from typing import Final

from rewound.presentation.look import Look

_DASHES: Final = {"-": [1, 0], "--": [7, 4], "-.": [9, 3, 2, 3], ":": [2, 3], "": [0, 1]}


def dash(look: Look) -> list[int]:
    """The dashes of a technique's line, in pixels."""
    return list(_DASHES[look.line])


def area(look: Look) -> int:
    """The area of a technique's markers, in square pixels."""
    return round((1.55 * look.size) ** 2)


def outline(look: Look) -> str:
    """The marker of a technique as an SVG path in the square from -1 to 1; an unknown one is a circle.

    >>> outline(Look("Fine-tuning", "#009e73", "D", 5.5, "--"))
    'M0,-1L1,0L0,1L-1,0Z'
    """
    return _OUTLINES.get(look.marker, _OUTLINES["o"])


def _polygon(*radii: float) -> str:
    """A closed line whose corners, clockwise from the top, have these distances from the middle."""
    angles = [2 * pi * number / len(radii) for number in range(len(radii))]
    corners = [(round(r * sin(a), 3), round(-r * cos(a), 3)) for r, a in zip(radii, angles, strict=True)]
    return f"M{'L'.join(f'{x:g},{y:g}' for x, y in corners)}Z"


_CROSS: Final = "M-1,-.6L-.6,-1L0,-.4L.6,-1L1,-.6L.4,0L1,.6L.6,1L0,.4L-.6,1L-1,.6L-.4,0Z"
_OUTLINES: Final = {
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
