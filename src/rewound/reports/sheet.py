"""A sheet of equal panels under a title and over a legend, with room for every text reserved in inches.

Constrained layout would measure every text again for each file; with the room known, a sheet is saved three times as
fast, and its panels have the same size whatever their labels say.
"""

import hashlib
import re
from collections.abc import Collection, Sequence
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

STYLE: Final[dict[Any, Any]] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],  # Verdana is as wide, where an SVG finds no DejaVu
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titley": 1.0,  # else every save measures all that stands around a panel to put its title above it
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "svg.fonttype": "none",  # text stays text: searchable, and light
    "svg.hashsalt": "rewound",  # the same rows give the same bytes
    "pdf.fonttype": 42,  # TrueType, which journals ask for
    "savefig.dpi": 160,
}
_NO_DATE: Final = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
_QUICK: Final[dict[str, Any]] = {".png": {"pil_kwargs": {"compress_level": 3}}}  # a tenth larger, half the time
_HEAD: Final = 0.62  # inches, as all below: the title and the line under it
_PANEL_TITLE: Final = 0.28
_TICKS: Final = 0.5  # tick labels and the name of the axis
_LEFT: Final = 0.8
_RIGHT: Final = 0.2
_LEGEND: Final = 9.5  # points
_LONGEST: Final = 80  # characters of a part of a file name


def lay_out(
    figure: Figure,
    title: str,
    subtitle: str,
    legend: Sequence[Line2D | Patch],
    gaps: tuple[float, float] = (0.25, 0.6),
    panel_height: float | None = None,
) -> None:
    """Write title and legend, and give the panels what is left.

    `gaps` are inches between columns and lines; with `panel_height`, the sheet becomes as high as its panels need.
    """
    width, height = figure.get_size_inches()
    columns = _legend_columns([str(handle.get_label()) for handle in legend], width - 0.3)
    foot = 0.24 * ceil(len(legend) / columns) + 0.1
    grid = figure.axes[0].get_gridspec()
    assert grid is not None
    head = _HEAD + (_PANEL_TITLE if any(axes.get_title() for axes in figure.axes) else 0)
    if panel_height is not None:
        lines = grid.nrows * (panel_height + gaps[1]) - gaps[1]
        height = head + lines + _TICKS + foot
        figure.set_size_inches(width, height)
    across = (width - _LEFT - _RIGHT - (grid.ncols - 1) * gaps[0]) / grid.ncols
    down = (height - head - _TICKS - foot - (grid.nrows - 1) * gaps[1]) / grid.nrows
    figure.subplots_adjust(
        left=_LEFT / width,
        right=1 - _RIGHT / width,
        top=1 - head / height,
        bottom=(foot + _TICKS) / height,
        wspace=gaps[0] / across,
        hspace=gaps[1] / down,
    )
    for axes in figure.axes:  # where labels would end up anyway, without measuring all ticks first
        axes.xaxis.set_label_coords(0.5, -0.28 / down)
        axes.yaxis.set_label_coords(-0.52 / across, 0.5)
    big = min(12, width * 72 / (0.7 * len(title)))  # a bold letter is at most 0.7 of its size wide, on average
    small = min(10, 0.9 * big, width * 72 / (0.53 * len(subtitle)))
    figure.text(0.5, 1 - 0.12 / height, title, ha="center", va="top", fontsize=big, weight="bold")
    figure.text(0.5, 1 - 0.35 / height, subtitle, ha="center", va="top", fontsize=small, color="#404040")
    figure.legend(handles=list(legend), loc="lower center", ncols=columns, frameon=False, fontsize=_LEGEND)


def _legend_columns(labels: Sequence[str], width: float) -> int:
    """The most columns that fit; matplotlib fills the first ones with one label more."""
    for columns in range(len(labels), 1, -1):
        size, longer = divmod(len(labels), columns)
        ends = [n * size + min(n, longer) for n in range(columns + 1)]
        widest = [max(map(len, labels[first:last])) for first, last in pairwise(ends)]
        if sum(0.65 + 0.068 * letters for letters in widest) <= width:
            return columns
    return 1


def told_trials(counts: Collection[int], failed: int) -> str:
    """What a figure shows of so many trials.

    >>> told_trials({2, 3}, failed=1)
    'median and min to max of 2 to 3 trials; 1 failed not drawn'
    """
    trials = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else f"{max(counts)}"
    text = "1 trial" if trials == "1" else f"median and min to max of {trials} trials"
    return f"{text}; {failed} failed not drawn" if failed else text


def file_name(*parts: str) -> str:
    """The name of a file, of letters and digits whatever the parts contain.

    A part that is long, or has wildcards, which no file name can have, is told from others by a digest.

    >>> file_name("mine:Task", "", "9.31×"), file_name("unstructured skip=stem.*")
    ('mine-Task-9.31x', 'unstructured-skip-stem.-da1a9c')
    """
    return "-".join(_plain(part) for part in parts if part)


def _plain(part: str) -> str:
    plain = re.sub(r"[^\w.-]+", "-", part.replace("×", "x"))
    if len(plain) <= _LONGEST and not re.search(r"[*?,\[]", part):
        return plain
    return f"{plain[:_LONGEST].rstrip('-')}-{hashlib.blake2b(part.encode(), digest_size=3).hexdigest()}"


def save(figure: Figure, path: Path) -> Path:
    """Save a figure in the format that the path's suffix names: the same figure gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        figure.savefig(path, metadata=_NO_DATE.get(path.suffix), **_QUICK.get(path.suffix, {}))
    return path
