"""How techniques, ways of pruning, modes and ratios look wherever they are shown: as in the paper, in its order."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import cos, pi, sin
from typing import Final, Literal


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
