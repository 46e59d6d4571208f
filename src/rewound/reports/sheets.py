"""A sheet of equal panels under a title and over a legend, drawn into a file from one Vega-Lite specification.

Lengths are printer's points. Texts are measured in Liberation Sans, which `vl_convert` brings with it; it is as wide as
Arial and Helvetica, one of which an SVG finds anywhere.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import exp, log
from pathlib import Path
from textwrap import wrap
from typing import Final, Literal, TypeAlias

from rewound.conclusions.paper.figures import pruning_order
from rewound.conclusions.paper.panels import Curves, Panel
from rewound.foundations.wholefiles import write_whole
from rewound.reports.charts import DOT, Json, filled_in, printed
from rewound.reports.look import (
    SAFE_ZONE,
    Axis,
    Look,
    compression_axis,
    dash,
    looks,
    marker_path,
    panel_limits,
    printable,
    ratios,
    time_axis,
)
from rewound.reports.words import delta_label

_DOTS_PER_INCH: Final = 160
_FONT: Final = "Liberation Sans, Arial, Helvetica, sans-serif"
_GREY, _BAND, _ZONE = "#606060", "#dcdcdc", "#f0f0f0"
_COLOURS: Final[Json] = {"paper": "white", "muted": _GREY, "band": _BAND, "zone": _ZONE}
_STYLE: Final[Json] = {
    "aria": False,  # a third of the file; a reader of the page has it
    "font": _FONT,
    "text": {"font": _FONT, "fontSize": 9.5},
    "title": {  # in one weight: of two, a PDF would have either first, by chance
        "anchor": "middle",
        "fontWeight": "normal",
        "fontSize": 10.5,
        "offset": 6,
        "subtitleColor": "#404040",
        "subtitlePadding": 4,
    },
    "view": {"stroke": None},
    "axis": {
        "domainColor": "black",
        "gridColor": "#e8e8e8",
        "gridWidth": 0.7,
        "labelFontSize": 9.5,
        "labelPadding": 3,
        "tickColor": "black",
        "tickSize": 3.5,
        "titleFontSize": 10,
        "titleFontWeight": "normal",
    },
    "axisX": {"grid": False},
    "axisY": {"titlePadding": 7, "minExtent": 28},  # the same room in every line, so that panels stand under each other
}
_LETTER: Final = 5.0  # how wide a letter is, on average
_SWATCH: Final = "M-2,-.8H2V.8H-2Z"

Cut: TypeAlias = Literal["median below", "bar below", "bar above"]
"""What may lie outside the axis: all of a point, or an end of its bar."""
_OUTSIDE: Final[Mapping[Cut, tuple[str, str, str]]] = {  # what it is called, and its mark
    "median below": ("Median below the axis", "triangle-down", _GREY),
    "bar below": ("Trials below the axis", "triangle-down", "white"),
    "bar above": ("Trials above the axis", "triangle-up", "white"),
}


@dataclass(frozen=True)
class Sheet:
    """One file to draw."""

    name: str
    title: str
    panels: tuple[Panel, ...]
    titles: tuple[str, ...]
    """What stands above each panel."""
    columns: int
    about: str = ""
    """What the line under the title begins with."""
    size: tuple[float, float] = (216, 126)
    """Of a panel."""
    marks: float = 1
    """How large the marks are, where 1 is the usual size."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of techniques, where they are not the usual ones."""
    by_pruning: bool = False
    """Whether each way of pruning has a column."""
    figure: str = ""
    """The figure of the paper that it is, or is a part of."""
    alone: bool = False
    """Whether it is one of several panels of that figure."""

    @property
    def places(self) -> dict[tuple[int, int], int]:
        """The panels' numbers by line and column: one after the other, or each in the column of its pruning."""
        prunings = sorted({panel.measured.pruning for panel in self.panels}, key=pruning_order)
        found: dict[tuple[int, int], int] = {}
        line, last = 0, -1
        for number, panel in enumerate(self.panels):
            in_turn = (last + 1) % self.columns
            column = prunings.index(panel.measured.pruning) if self.by_pruning else in_turn
            line, last = line + (column <= last), column
            found[line, column] = number
        return found

    @property
    def looks(self) -> dict[str, Look]:
        """The techniques on the sheet, in legend order."""
        known = looks(technique for panel in self.panels for technique in panel.curves)
        return {name: replace(look, label=self.labels.get(name, look.label)) for name, look in known.items()}

    @property
    def subtitle(self) -> str:
        """How many trials the sheet shows, and what it does not."""
        counts = {point.trials for panel in self.panels for point in panel.points}
        text = f"{self.about}; " if self.about else ""
        text += trials_text(counts, sum(panel.failed for panel in self.panels))
        if left_out := sum({id(panel.measured): panel.measured.left_out for panel in self.panels}.values()):
            text += f"; {left_out} higher ratios left out, as in the paper"
        return text[:1].upper() + text[1:]

    @property
    def names_sources_inside(self) -> bool:
        """Whether the works behind black dots are named in the panels, as several are; else the legend does it."""
        sources = {dot.source for panel in self.panels for dot in panel.published}
        return self.panels[0].x == "compression" and (self.alone or len(sources) > 1)


def save_sheet(sheet: Sheet, out: Path, formats: Sequence[str]) -> list[Path]:
    """Draw one sheet into the folder `out`, once for each format: the same sheet gives the same bytes."""
    import vl_convert

    numbers: dict[str, int] = {}  # Vega goes on counting from sheet to sheet
    svg = vl_convert.vegalite_to_svg(json.dumps(_printable(specification(sheet))))
    svg = re.sub(r'(?<=["#])clip\d+', lambda clip: f"clip{numbers.setdefault(clip[0], len(numbers))}", svg)
    paths = [out / f"{sheet.name}.{suffix}" for suffix in formats]
    for path in paths:
        if path.suffix == ".png":
            data = vl_convert.svg_to_png(svg, scale=_DOTS_PER_INCH / 72, ppi=72)
        else:
            data = vl_convert.svg_to_pdf(svg) if path.suffix == ".pdf" else svg.encode()
        write_whole(path, data, durable=False)
    return paths


def _printable(value: object) -> object:
    """The value with text that an SVG may hold: `vl_convert` ends the process at a control character."""
    if isinstance(value, Mapping):
        return {key: _printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def specification(sheet: Sheet) -> Json:
    """A sheet in Vega-Lite: its panels, and its legend as one more chart."""
    places, (wide, high) = sheet.places, sheet.size
    lines, columns = (max(place[side] for place in places) + 1 for side in (0, 1))
    empty: Json = {"data": {"values": []}, "mark": "point", "width": wide, "height": high}
    panels = [
        _panel(sheet, (line, column)) if (line, column) in places else empty
        for line in range(lines)
        for column in range(columns)
    ]
    gap = 8 if len({_ylabel(panel) for panel in sheet.panels}) == 1 else 20
    width = columns * (wide + 30 + gap)
    big = min(13.0, width / (0.53 * len(sheet.title)))  # a letter is at most 0.53 of its size wide, on average
    small = min(10.0, 0.9 * big, width / (0.53 * len(sheet.subtitle)))
    return {
        "title": {
            "text": sheet.title,
            "subtitle": sheet.subtitle,
            "offset": 12,
            "fontSize": big,
            "subtitleFontSize": small,
        },
        "vconcat": [
            {"concat": panels, "columns": columns, "spacing": {"column": gap, "row": 12}},
            _legend(legend_entries(sheet), width),
        ],
        "center": True,
        "spacing": 12,
        "padding": 8,
        "config": _STYLE,
    }


def _panel(sheet: Sheet, place: tuple[int, int]) -> Json:
    (line, column), number = place, sheet.places[place]
    panel, named, (width, height) = sheet.panels[number], sheet.looks, sheet.size
    left, under = sheet.places.get((line, column - 1)), sheet.places.get((line + 1, column))
    xlabel = "Compression ratio" if panel.x == "compression" else "Retraining epochs"
    same = left is not None and _ylabel(sheet.panels[left]) == _ylabel(panel)
    titles = (None if under is not None else xlabel, None if same else _ylabel(panel))
    kind = "speed" if panel.y == "speed-up" else panel.x
    wide_band = panel.measured.baseline.spread > min(map(abs, panel_limits(panel)))
    chart = printed(kind, named, titles, sheet.marks, clip=wide_band or bool(outside(panel)))
    data = {
        "lines": _lines(panel, named, sheet.marks),
        "compared": _values(panel.theirs, named, sheet.marks),
        "published": _dots(panel),
    }
    layers = filled_in(chart, _parameters(panel, named, sheet.size), data)
    if panel.published and sheet.names_sources_inside:
        layers.append(_source_name(panel.published[0].source, height))
    values = {"values": _values(panel.curves, named, sheet.marks)}
    return {"data": values, "width": width, "height": height, "title": sheet.titles[number], "layer": layers}


def _parameters(panel: Panel, named: Mapping[str, Look], size: tuple[float, float]) -> Json:
    at, dots = {point.x for point in panel.points}, panel.published
    if panel.x == "compression":
        axis = compression_axis(at, [dot.density for dot in dots])
        labels = list(ratios(sorted(at, reverse=True)).values())
    else:
        axis = time_axis(at, [dot.epochs or 0 for dot in dots])
        labels = [f"{t:.4g}" for t in axis.places]
    return {
        "shown": list(named),
        "spread": True,
        "compared": True,
        **_COLOURS,
        "width": size[0],
        "height": size[1],
        "window": panel_limits(panel),
        "ticks": 5 if size[1] > 110 else 4,
        "sd": panel.measured.baseline.spread,
        "safe": [min(max(part * panel.measured.epochs, axis.across[0]), axis.across[1]) for part in SAFE_ZONE],
        "across": axis.across,
        "places": axis.places,
        "digits": axis.digits,
        "labelled": _labelled(axis, labels, size[0], logarithmic=panel.x == "compression"),
    }


def _labelled(axis: Axis, labels: Sequence[str], width: float, *, logarithmic: bool) -> list[int]:
    """The ticks whose labels fit: always those at both ends, of the others as many as can, from left to right."""
    scale = log if logarithmic else float
    start, stop = (scale(end) for end in axis.across)
    middles = [width * (scale(place) - start) / (stop - start) for place in axis.places]
    room = [_LETTER * len(label) + 4 for label in labels]
    last = len(labels) - 1
    shown, taken, end = {0, last}, middles[0] + room[0] / 2, middles[last] - room[last] / 2
    for number in range(1, last):
        left, right = middles[number] - room[number] / 2, middles[number] + room[number] / 2
        if left >= taken and right <= end:
            shown.add(number)
            taken = right
    return sorted(shown)


def _values(curves: Curves, named: Mapping[str, Look], size: float) -> list[Json]:
    """The points of curves as a chart wants them; techniques at one x stand a little apart."""
    order = list(named)
    return [
        {
            "technique": name,
            "compression": 1 / point.density,
            "t": point.retrain_epochs,
            "value": point.median,
            "low": point.low,
            "high": point.high,
            "place": order.index(name),
            "shift": _shift(name, order, size),
            "size": _area(named[name], size),
            "edge": _outline(named[name]),
        }
        for name in reversed(order)  # the first technique is drawn last, over the others
        for point in sorted(curves.get(name, ()))
    ]


def _shift(name: str, order: Sequence[str], size: float) -> float:
    return 0.6 * size * (order.index(name) - (len(order) - 1) / 2)


def _lines(panel: Panel, named: Mapping[str, Look], size: float) -> list[Json]:
    """The curves of a panel, cut where they leave its axis below, and interrupted there."""
    (bottom, _), order = panel_limits(panel), list(named)
    field, scale, back = ("compression", log, exp) if panel.x == "compression" else ("t", float, float)
    rows: list[Json] = []
    for name in reversed(order):
        last: tuple[float, float] | None = None
        for point in sorted(panel.curves.get(name, ())):
            x, y = scale(1 / point.x if panel.x == "compression" else point.x), point.median
            corners: list[tuple[float, float | None]] = [(x, y if y >= bottom else None)]
            if last and (last[1] < bottom) != (y < bottom):
                corners.insert(0, (last[0] + (x - last[0]) * (bottom - last[1]) / (y - last[1]), bottom))
            common: Json = {"technique": name, "shift": _shift(name, order, size)}
            rows += [{**common, field: back(across), "value": height} for across, height in corners]
            last = x, y
    return rows


def _area(look: Look, size: float) -> float:
    return (1.15 * look.size * size) ** 2


def _outline(look: Look) -> str:
    return look.colour if look.edge == "white" else look.edge


def _dots(panel: Panel) -> list[Json]:
    return [
        {
            "compression": 1 / dot.density,
            "t": dot.epochs,
            "value": dot.delta,
            "low": dot.delta - (dot.error or 0),
            "high": dot.delta + (dot.error or 0),
        }
        for dot in panel.published
    ]


def _source_name(source: str, height: float) -> Json:
    """The work behind the black dots of a panel, in its lower left corner."""
    lines = wrap(source, 24)
    middle = height - 8 - 5.5 * (len(lines) - 1)
    text: Json = {"type": "text", "text": lines, "align": "left", "baseline": "top", "fontSize": 8.5, "lineHeight": 11}
    return {
        "data": {"values": [{}]},
        "layer": [
            {"mark": {**DOT, "x": 9, "y": middle}},
            {"mark": {**text, "x": 17, "y": height - 11.5 * len(lines) - 1.5}},
        ],
    }


def _ylabel(panel: Panel) -> str:
    return "Speed-up" if panel.y == "speed-up" else delta_label(panel.measured.baseline.metric)


def outside(panel: Panel) -> set[Cut]:
    """What of a panel's points lies outside its vertical axis."""
    low, high = panel_limits(panel)
    found: set[Cut] = {"median below"} if any(point.median < low for point in panel.seen) else set()
    if any(point.low < low <= point.median for point in panel.points):
        found.add("bar below")
    if any(point.high > high for point in panel.points):
        found.add("bar above")
    return found


def legend_entries(sheet: Sheet) -> dict[str, Json]:
    """The marks of a sheet by their names: its techniques in the paper's order, then what else is drawn."""
    first, cut = sheet.panels[0], {each for panel in sheet.panels for each in outside(panel)}
    entries: dict[str, Json] = {
        look.label: {
            "colour": look.colour,
            "dash": dash(look),
            "width": 1.8,
            "shape": marker_path(look),
            "size": _area(look, 1),
            "fill": look.colour,
            "stroke": "white" if look.edge == look.colour else look.edge,
        }
        for look in sheet.looks.values()
    }
    if any(panel.theirs for panel in sheet.panels):
        circle = marker_path(Look("", _GREY, "o", 6, "-"))
        line: Json = {"colour": _GREY, "dash": [1, 0], "width": 1}
        entries["The compared table"] = {**line, "shape": circle, "size": 48, "fill": "white", "stroke": _GREY}
    if first.measured.baseline.n > 1 and first.y == "delta":
        entries["Dense runs, mean ± 1 sd"] = {"shape": _SWATCH, "size": 100, "fill": _BAND, "stroke": _BAND}
    if first.x == "time":
        low, high = SAFE_ZONE
        swatch: Json = {"shape": _SWATCH, "size": 100, "fill": _ZONE, "stroke": "#cccccc"}
        entries[f"Rewinding safe zone, {low:g}T to {high:g}T"] = swatch
    for end, (name, shape, fill) in _OUTSIDE.items():
        if end in cut:
            entries[name] = {"shape": shape, "size": 20, "fill": fill, "stroke": _GREY}
    if not sheet.names_sources_inside:
        for source in sorted({dot.source for panel in sheet.panels for dot in panel.published}):
            entries[source] = {"shape": "circle", "size": 30, "fill": "black", "stroke": "black"}
    return entries


def _legend(entries: Mapping[str, Json], width: float) -> Json:
    """The legend as a chart: entries one below the other, in as many columns as fit."""
    labels = list(entries)
    for lines in range(1, len(labels) + 1):
        columns = [labels[first : first + lines] for first in range(0, len(labels), lines)]
        starts = list(accumulate((36 + _LETTER * max(map(len, column)) for column in columns), initial=0.0))
        if starts[-1] <= width:
            break
    rows = [
        {"label": label, "x": start, "y": 8 + 15 * line, **entries[label]}
        for start, column in zip(starts, columns, strict=False)
        for line, label in enumerate(column)
    ]

    def marks(mark: Json, across: Mapping[str, float], **fields: str) -> Json:
        places = {name: {"value": {"expr": f"datum.x + {right}"}} for name, right in across.items()}
        looks = {channel: {"field": name, "type": "nominal", "scale": None} for channel, name in fields.items()}
        return {"mark": mark, "encoding": {**places, "y": {"value": {"expr": "datum.y"}}, **looks}}

    layers = [
        {
            "transform": [{"filter": "datum.dash"}],
            **marks({"type": "rule"}, {"x": 0, "x2": 24}, stroke="colour", strokeDash="dash", strokeWidth="width"),
        },
        marks(
            {"type": "point", "opacity": 1, "strokeWidth": 0.7},
            {"x": 12},
            **{channel: channel for channel in ("shape", "size", "fill", "stroke")},
        ),
        marks({"type": "text", "align": "left", "baseline": "middle"}, {"x": 31}, text="label"),
    ]
    return {"data": {"values": rows}, "width": starts[-1], "height": 15 * lines, "layer": layers}


def trials_text(counts: Collection[int], failed: int) -> str:
    """What a figure shows of so many trials.

    >>> trials_text({2, 3}, failed=1)
    'median and min to max of 2 to 3 trials; 1 failed not drawn'
    """
    trials = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else f"{max(counts)}"
    text = "1 trial" if trials == "1" else f"median and min to max of {trials} trials"
    return f"{text}; {failed} failed not drawn" if failed else text
