"""One panel of a figure: deltas with their spread over the dense band, on axes that hide no point silently.

A median below the axis is a triangle on its lower edge, in the colour of its technique; a bar that goes on below it, or
above it, ends in a hollow one.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation, Transform

from rewound.conclusions.baseline import Baseline
from rewound.paper.networks import Published
from rewound.paper.panels import FigurePoint
from rewound.reports.look import Look, ratios
from rewound.reports.ranges import SAFE_ZONE

Cut: TypeAlias = Literal["median below", "bar below", "bar above"]
"""What may lie outside the axis: all of a point, or an end of its bar."""

_DODGE: Final = 2.4  # printer's points between techniques at one x, so that their error bars stay apart
_BAND: Final = "#dcdcdc"
_SAFE: Final = "#f0f0f0"


def draw_points(
    axes: Axes, curves: Mapping[str, Sequence[FigurePoint]], looks: Mapping[str, Look], size: float = 1
) -> set[Cut]:
    """One line per technique through the medians, bars from min to max; what of them is outside the axis."""
    (bottom, top), rows, found = axes.get_ylim(), 0, set[Cut]()
    for index, (name, look) in enumerate(looks.items()):
        mine = sorted(curves.get(name, ()))
        at, medians = [point.x for point in mine], [point.median for point in mine]
        bars = axes.vlines(at, [p.low for p in mine], [p.high for p in mine], color=look.colour, linewidth=1.2 * size)
        line = axes.add_line(_line(look, at, medians, size))
        line.set(marker="none")
        seen = [point for point in mine if point.median >= bottom]
        marks = axes.add_line(_line(look, [point.x for point in seen], [point.median for point in seen], size))
        marks.set(linestyle="none", clip_on=False)  # a marker at the edge stays whole
        outside: dict[Cut, list[float]] = {
            "median below": [point.x for point in mine if point.median < bottom],
            "bar below": [point.x for point in seen if point.low < bottom],
            "bar above": [point.x for point in mine if point.high > top],
        }
        edges = [_triangles(look, cut, x, top if cut == "bar above" else bottom) for cut, x in outside.items()]
        right = _right(index, looks, size)
        ups = (0, 0, 0, 3 + 5 * rows, 2, -2)  # techniques below the axis stand above one another
        for artist, up in zip((bars, line, marks, *map(axes.add_line, edges)), ups, strict=True):
            artist.set(transform=_moved(axes, right, up), zorder=4 - index / 10, in_layout=False)
        rows += bool(outside["median below"])
        found |= {cut for cut, x in outside.items() if x}
    return found


def draw_outlines(
    axes: Axes, curves: Mapping[str, Sequence[FigurePoint]], looks: Mapping[str, Look], size: float = 1
) -> None:
    """The same techniques in a table to compare with: thin lines and hollow markers through its medians."""
    for index, (name, look) in enumerate(looks.items()):
        mine = sorted(curves.get(name, ()))
        line = axes.add_line(_line(look.outline, [point.x for point in mine], [point.median for point in mine], size))
        line.set(linewidth=size, markeredgewidth=size, zorder=5, in_layout=False)
        line.set(transform=_moved(axes, _right(index, looks, size), 0))


def _right(index: int, looks: Mapping[str, Look], size: float) -> float:
    return (index - (len(looks) - 1) / 2) * _DODGE * size


def draw_published(axes: Axes, dots: Iterable[Published]) -> None:
    """What other works reached, as black dots; those without a retraining time stand at their density."""
    dots = list(dots)
    at, deltas = [dot.density if dot.epochs is None else dot.epochs for dot in dots], [dot.delta for dot in dots]
    lows, highs = zip(*((dot.delta - (dot.error or 0), dot.delta + (dot.error or 0)) for dot in dots), strict=True)
    axes.vlines(at, lows, highs, color="black", linewidth=1.2, zorder=5)
    axes.add_line(published_mark(at, deltas)).set_zorder(5)


def published_mark(x: Sequence[float] = (), y: Sequence[float] = (), label: str = "") -> Line2D:
    """The black dots of other works, also for a legend."""
    mark = Line2D(x, y, label=label, color="black", linestyle="none", marker="o", markersize=5.5)
    mark.set(clip_on=False, markeredgecolor="white", markeredgewidth=0.6)
    return mark


def _moved(axes: Axes, right: float, up: float) -> Transform:
    return axes.transData + ScaledTranslation(right / 72, up / 72, axes.figure.dpi_scale_trans)


def delta_axis(axes: Axes, baseline: Baseline, window: tuple[float, float]) -> None:
    """The vertical axis: signed deltas around the zero line and the band of the dense runs."""
    axes.set_ylim(window)
    axes.axhspan(-baseline.spread, baseline.spread, color=_BAND, linewidth=0, zorder=0.5)
    axes.axhline(0, color="#606060", linewidth=1, zorder=1)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+.5g}".replace("-", "−") if value else "0"))
    _grid(axes)


def ratio_axis(axes: Axes, window: tuple[float, float]) -> None:
    """The vertical axis of speed-ups: how many times faster, around a line at 1."""
    axes.set_ylim(window)
    axes.axhline(1, color="#606060", linewidth=1, zorder=1)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    _grid(axes)


def compression_axis(axes: Axes, densities: Iterable[float], inches: float, others: Iterable[float] = ()) -> None:
    """The paper's horizontal axis: density, logarithmic and reversed, labelled with the compression ratio.

    `others` are to be seen, too, without a tick of their own.
    """
    ticks = sorted(set(densities), reverse=True)
    left, right = math.log(max(ticks[0], *others, 0)), math.log(min(ticks[-1], *others, 1))
    margin = 0.06 * (left - right) or 0.1
    axes.set_xscale("log")
    axes.set_xlim(math.exp(left + margin), math.exp(right - margin))
    width = left - right + 2 * margin
    places = [(left + margin - math.log(density)) / width for density in ticks]
    _ticks(axes, ticks, list(ratios(ticks).values()), places, inches)


def epochs_axis(axes: Axes, times: Iterable[float], epochs: float, inches: float, others: Iterable[float] = ()) -> None:
    """The retraining times, with the safe zone of rewinding shaded; `others` are seen without a tick."""
    ticks = sorted(set(times))
    first, last = min(ticks[0], *others, math.inf), max(ticks[-1], *others, -math.inf)
    margin = 0.06 * (last - first) or 1.0
    left, right = first - margin, last + margin
    axes.set_xlim(left, right)
    axes.axvspan(*(part * epochs for part in SAFE_ZONE), color=_SAFE, linewidth=0, zorder=0.4)
    _ticks(axes, ticks, [f"{t:g}" for t in ticks], [(t - left) / (right - left) for t in ticks], inches)


def handles(
    looks: dict[str, Look], baseline: Baseline, *, safe_zone: bool, cut: Collection[Cut], compared: bool
) -> list[Line2D | Patch]:
    """The legend of a figure: its techniques in the paper's order, then what else is drawn."""
    legend: list[Line2D | Patch] = [_line(look) for look in looks.values()]
    if compared:
        legend.append(_line(Look("The compared table", "#606060", "o", 6, "-").outline))
        legend[-1].set(linewidth=1, markeredgewidth=1)
    if baseline.n > 1:
        legend.append(Patch(color=_BAND, linewidth=0, label="Dense runs, mean ± 1 sd"))
    if safe_zone:
        low, high = SAFE_ZONE
        legend.append(Patch(facecolor=_SAFE, edgecolor="#cccccc", label=f"Rewinding safe zone, {low:g}T to {high:g}T"))
    names: dict[Cut, str] = {
        "median below": "Median below the axis",
        "bar below": "Trials below the axis",
        "bar above": "Trials above the axis",
    }
    legend += [_triangles(Look(name, "#606060", "v", 7, ""), each) for each, name in names.items() if each in cut]
    return legend


def _grid(axes: Axes) -> None:
    axes.grid(axis="y", color="#e8e8e8", linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)


def _line(look: Look, x: Sequence[float] = (), y: Sequence[float] = (), size: float = 1) -> Line2D:
    line = Line2D(x, y, label=look.label, color=look.colour, linestyle=look.line, linewidth=1.8 * size)
    line.set(marker=look.marker, markersize=look.size * size, markeredgecolor=look.edge)
    line.set(markerfacecolor=look.face or look.colour)
    line.set(markeredgewidth=(1.8 if look.marker == "x" else 0.6) * size)
    return line


def _triangles(look: Look, cut: Cut, x: Sequence[float] = (), y: float = 0) -> Line2D:
    """What stands on the edge at `y` for what is beyond it: filled for a median, hollow for the end of a bar."""
    marker = "^" if cut == "bar above" else "v"
    line = Line2D(x, [y] * len(x), label=look.label, color=look.colour, linestyle="none", marker=marker, markersize=5)
    line.set(markeredgecolor=look.edge, markeredgewidth=0.5, clip_on=False)
    if cut != "median below":
        line.set(markersize=4, markerfacecolor="white", markeredgecolor=look.colour, markeredgewidth=0.9)
    return line


def _ticks(axes: Axes, ticks: Sequence[float], labels: Sequence[str], places: Sequence[float], inches: float) -> None:
    # A tick at every value, but a label only where it fits: always at both ends, else left to right.
    room = [len(label) * 0.085 + 0.08 for label in labels]
    shown = {0, len(ticks) - 1}
    taken, end = (places[0] * inches + room[0] / 2, places[-1] * inches - room[-1] / 2)
    for index in range(1, len(ticks) - 1):
        middle = places[index] * inches
        if middle - room[index] / 2 >= taken and middle + room[index] / 2 <= end:
            shown.add(index)
            taken = middle + room[index] / 2
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FixedFormatter([label if n in shown else "" for n, label in enumerate(labels)]))
