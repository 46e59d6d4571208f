"""Charts as Vega-Lite specifications, one per kind; what differs between panels is a parameter.

The page gives each panel its data and the parameters named here, and every chart these: `shown` (the techniques that
are ticked), `spread` (whether to draw min to max), `compared` (whether to draw the data named so, of a compared table),
and the colours that depend on light and dark: `paper`, `muted`, `band` and `zone`. Marks that answer to the pointer and
the keyboard are in the layers `points` and `outlines`; `says` is their text.

Figures in files are of the same marks (`printed`), with the parameters written out (`filled_in`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from rewound.reports.look import Look, dash, marker_path

Json: TypeAlias = dict[str, object]
PLAIN: Final = "format(datum.value, '.4~r')"
DOT: Final[Json] = {"type": "point", "fill": "black", "stroke": "white", "size": 30, "strokeWidth": 0.6, "opacity": 1}
_TIMES: Final = "format(datum.value, '~g') + '×'"
SIGNED: Final = "datum.value == 0 ? '0' : format(datum.value, '+~g')"
SAYS: Final[Json] = {"field": "says", "type": "nominal"}
SIZE: Final[Json] = {"field": "size", "type": "quantitative", "scale": None, "legend": None}


def _axis(title: str, label: str) -> Json:
    places: Json = {"values": {"expr": "places"}, "labelOverlap": "greedy", "labelSeparation": 7}
    return {"title": title, "labelExpr": label, **places}


COMPRESSION: Final[Json] = {
    "field": "compression",
    "type": "quantitative",
    "scale": {"type": "log", "domain": {"expr": "across"}, "nice": False},
    "axis": _axis("Compression ratio", "format(datum.value, digits) + '×'"),
}
TIME: Final[Json] = {
    "field": "t",
    "type": "quantitative",
    "scale": {"domain": {"expr": "across"}, "nice": False, "zero": False},
    "axis": _axis("Retraining epochs", PLAIN),
}


def value(label: str, ticks: object = 5) -> Json:
    """The vertical place of what is shown."""
    return {
        "field": "value",
        "type": "quantitative",
        "scale": {"domain": {"expr": "window"}, "nice": False, "zero": False},
        "axis": {"labelExpr": label, "tickCount": ticks, "grid": True},
    }


def at(place: object) -> Json:
    """A place that no data decide."""
    return {"datum": place, "type": "quantitative"}


def colours(looks: Mapping[str, Look]) -> Json:
    """The colours of techniques."""
    return _by_technique(looks, lambda look: look.colour)


def edges(looks: Mapping[str, Look]) -> Json:
    """What parts the marks of techniques from one another."""

    # A white edge has to be dark on a dark page. One in a technique's own colour would fill the gaps of its dashes.
    def edge(look: Look) -> object:
        return {"expr": "paper"} if look.edge in ("white", look.colour) else look.edge

    return _by_technique(looks, edge)


def dashes(looks: Mapping[str, Look]) -> Json:
    """The dashes of their lines."""
    return _by_technique(looks, dash)


def markers(looks: Mapping[str, Look]) -> Json:
    """The shapes of their markers."""
    return _by_technique(looks, marker_path)


def _by_technique(looks: Mapping[str, Look], shown: Callable[[Look], object]) -> Json:
    scale = {"domain": list(looks), "range": [shown(look) for look in looks.values()]}
    return {"field": "technique", "type": "nominal", "scale": scale, "legend": None}


TICKED: Final[Json] = {"filter": "indexof(shown, datum.technique) >= 0 || !datum.technique"}
_OVERLAID: Final[list[Json]] = [TICKED, {"filter": "compared"}]
THEIRS: Final[Json] = {"data": {"name": "compared"}, "transform": _OVERLAID}
_MOVED: Final[Json] = {"expr": "datum.shift * 4"}  # pixels, so that error bars of techniques at one x stay apart


def lines(looks: Mapping[str, Look], x: Json, y: Json) -> list[Json]:
    """A line through the medians of each technique, over an edge that parts it from the others, with its markers."""
    line = {"type": "line", "xOffset": _MOVED, "clip": True, "strokeJoin": "round"}
    look: Json = {
        "fill": colours(looks),
        "stroke": edges(looks),
        "shape": markers(looks),
        "size": SIZE,
    }
    return [
        {"mark": {**line, "strokeWidth": 3.4}, "encoding": {"x": x, "y": y, "stroke": edges(looks)}},
        {
            "mark": {**line, "strokeWidth": 2},
            "encoding": {"x": x, "y": y, "color": colours(looks), "strokeDash": dashes(looks)},
        },
        {
            "name": "points",
            "transform": [{"filter": "datum.value >= window[0]"}],
            "mark": {"type": "point", "opacity": 1, "strokeWidth": 0.8, "xOffset": _MOVED, "cursor": "pointer"},
            "encoding": {"x": x, "y": y, **look, "description": SAYS},
        },
    ]


def spread(looks: Mapping[str, Look], x: Json, y: Json, **more: Json) -> Json:
    """From the lowest to the highest trial."""
    ends: Json = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
    return {
        "transform": [{"filter": "spread"}],
        "mark": {"type": "rule", "xOffset": _MOVED, "clip": True, "strokeWidth": 1.5, "opacity": 0.75},
        "encoding": {**ends, "color": colours(looks), **more},
    }


def below(looks: Mapping[str, Look], x: Json, look: Json, apart: int = 8) -> Json:
    """Triangles for medians below the axis, on its lower edge: techniques at one x stand above one another."""
    count: Json = {"window": [{"op": "row_number", "as": "from_below"}], "groupby": [x["field"]]}
    return {
        "transform": [{"filter": "datum.value < window[0]"}, {**count, "sort": [{"field": "place"}]}],
        "mark": {"type": "point", "shape": "triangle-down", "opacity": 1, **look},
        "encoding": {
            "x": x,
            "y": {"value": {"expr": f"height + {apart // 2} - {apart} * datum.from_below"}},
            "color": colours(looks),
        },
    }


def outlines(looks: Mapping[str, Look], x: Json, y: Json) -> list[Json]:
    """The same techniques in a compared table: thin lines and hollow markers."""
    line = {"type": "line", "xOffset": _MOVED, "clip": True, "strokeWidth": 1}
    point = {"type": "point", "filled": False, "opacity": 1, "strokeWidth": 1.2, "xOffset": _MOVED}
    edge: Json = {"field": "edge", "type": "nominal", "scale": None, "legend": None}
    return [
        {**THEIRS, "mark": line, "encoding": {"x": x, "y": y, "stroke": edge}},
        {
            **THEIRS,
            "name": "outlines",
            "transform": [*_OVERLAID, {"filter": "datum.value >= window[0]"}],
            "mark": {**point, "fill": "transparent", "cursor": "pointer"},
            "encoding": {"x": x, "y": y, "stroke": edge, "shape": markers(looks), "size": SIZE, "description": SAYS},
        },
    ]


# Pixels by which each of the names "no drop" and "1% drop" moves where their lines are closer than a line of text.
_CLOSE: Final = "max(0, 6.5 - 0.5 * abs(sd - one) * height / (window[1] - window[0]))"


def charts(looks: Mapping[str, Look]) -> dict[str, Json]:
    """Every kind of chart, for these techniques."""
    names = [
        _name("sd", "drops[0]", f"sd > one ? {_CLOSE} : -{_CLOSE}"),
        _name("one", "drops[1]", f"sd > one ? -{_CLOSE} : {_CLOSE}"),
    ]
    return {
        "compression": _deltas(looks, COMPRESSION, names),
        "time": _deltas(looks, TIME, [_SAFE_ZONE]),
        "difference": _difference(looks),
        "speed": _speed(looks),
        "rate": _rate(looks),
        "loss": _curve(looks, {"type": "linear", "zero": True}, {"grid": True, "tickCount": 4}, "linear"),
        "layers": _layers(),
    }


def _deltas(looks: Mapping[str, Look], x: Json, more: list[Json]) -> Json:
    """Deltas with their spread over the dense band; a median below the axis is a triangle on its lower edge."""
    y = value(SIGNED, {"expr": "ticks"})
    dashed: Json = {"strokeDash": [4, 4], "strokeWidth": 1}
    return _chart(
        _unit(),
        *more,
        _BAND,
        _fixed("rule", "muted", y=at(0)),
        _fixed("rule", "muted", dashed, y=at({"expr": "-sd"})),
        _fixed("rule", "muted", dashed, y=at({"expr": "-one"})),
        spread(looks, x, y),
        below(looks, x, {"filled": True, "size": 60}),  # under the marks, which answer to the pointer
        {**THEIRS, "layer": [below(looks, x, {"filled": False, "size": 110, "strokeWidth": 1.2})]},
        *lines(looks, x, y),
        *outlines(looks, x, y),
    )


def _difference(looks: Mapping[str, Look]) -> Json:
    """One technique minus others, in their colours; the extremes of few pairs are dashed, an interval is solid."""
    y = value(SIGNED)
    kinds = {"domain": [True, False], "range": [[1, 0], [3, 3]]}
    solid: Json = {"field": "interval", "type": "nominal", "scale": kinds, "legend": None}
    bars = spread(looks, COMPRESSION, y, strokeDash=solid)
    *_, points = lines(looks, COMPRESSION, y)
    return _chart(_unit(), _fixed("rule", "muted", y=at(0)), bars, points)


def _speed(looks: Mapping[str, Look]) -> Json:
    y = value(_TIMES)
    bars, curves = spread(looks, COMPRESSION, y), lines(looks, COMPRESSION, y)
    return _chart(_unit(), _fixed("rule", "muted", y=at(1)), bars, *curves)


def _rate(looks: Mapping[str, Look]) -> Json:
    axis: Json = {"values": {"expr": "places"}, "labelOverlap": "greedy"}
    # A step is taken at the rate of the point that ends it. A rate of 0 has no place on a logarithmic axis.
    chart = _curve(looks, {"type": "log", "nice": False, "padding": 12}, axis, "step-before")
    return {**chart, "transform": [TICKED, {"filter": "datum.value > 0"}]}


def _curve(looks: Mapping[str, Look], scale: Json, axis: Json, interpolate: str) -> Json:
    x: Json = {"field": "step", "type": "quantitative", "axis": {"title": "Steps", "tickCount": 5, "format": "~s"}}
    y: Json = {"field": "value", "type": "quantitative", "scale": scale, "axis": {"labelExpr": PLAIN, **axis}}
    run: Json = {"field": "key", "type": "nominal"}
    line: Json = {
        "mark": {"type": "line", "strokeWidth": 2, "interpolate": interpolate},
        "encoding": {"x": x, "y": y, "color": colours(looks), "strokeDash": dashes(looks), "detail": run},
    }
    points: Json = {
        "name": "points",
        "mark": {"type": "point", "opacity": 0, "size": 40, "cursor": "pointer"},
        "encoding": {"x": x, "y": y, "description": SAYS},
    }
    return _chart(line, points)


def _layers() -> Json:
    fraction: Json = {
        "field": "kept",
        "type": "quantitative",
        "scale": {"type": "pow", "exponent": 0.5, "domain": [0, 1], "scheme": "cividis"},
        "legend": None,
    }
    bare = {"domain": False, "ticks": False, "grid": False}
    label = "replace(datum.label, '.00×', '×')"  # columns are narrow
    apart = {"labelAngle": 0, "labelExpr": label, "labelOverlap": "greedy", "labelSeparation": 5}
    across: Json = {"title": "Compression ratio", **bare, **apart}
    module = "replace(datum.label, /[.]weight$/, '')"  # nearly all names end so, and rows have little room for them
    down: Json = {**bare, "labelLimit": 150, "labelExpr": module}
    encoding: Json = {
        "x": {"field": "ratio", "type": "ordinal", "sort": None, "axis": across},
        "y": {"field": "layer", "type": "ordinal", "sort": None, "axis": down},
        "fill": fraction,
        "description": SAYS,
    }
    return _chart({"name": "points", "mark": {"type": "rect", "cursor": "pointer"}, "encoding": encoding})


def printed(
    kind: str, looks: Mapping[str, Look], titles: tuple[str | None, str | None], size: float, *, clip: bool
) -> list[Json]:
    """The layers of a chart for paper, where nothing answers to the reader; `titles` are those of its axes.

    With `clip`, something is outside the axis: bars that go on there end in hollow triangles. The data named `lines`
    are the curves as far as they are inside, those named `published` black dots. Of the ticks on the horizontal axis,
    those whose numbers are in the parameter `labelled` have a label.
    """
    x, y = TIME if kind == "time" else COMPRESSION, value(_TIMES if kind == "speed" else SIGNED, {"expr": "ticks"})
    number = "round(datum.index * (length(places) - 1))"  # of a tick, which Vega counts from 0 to 1
    label = f"indexof(labelled, {number}) >= 0 ? {_part(x, 'axis')['labelExpr']} : ''"
    all_ticks: Json = {"tickCount": {"expr": "length(places)"}, "labelOverlap": False}  # else fewer in a small panel
    x = {**x, "axis": {**_part(x, "axis"), "title": titles[0], "labelExpr": label, **all_ticks}}
    y = {**y, "axis": {**_part(y, "axis"), "title": titles[1]}}
    whole: Json = {"clip": False}  # clipping one layer takes as much time of a PNG as drawing a panel
    zone = [_with_mark(_SAFE_ZONE, whole)] if kind == "time" else []
    rule = _fixed("rule", "muted", whole, y=at(1 if kind == "speed" else 0))
    behind = [rule] if kind == "speed" else [*zone, _with_mark(_BAND, {"clip": clip}), rule]
    _, line, points = lines(looks, x, y)
    return [
        *behind,
        _with_mark(spread(looks, x, y), {"strokeWidth": 1.2 * size, "opacity": 1, "clip": clip}),
        *([below(looks, x, {"filled": True, "size": 24}, apart=5), *_cut(looks, x)] if clip else []),
        {**THEIRS, "layer": [below(looks, x, {"filled": False, "size": 40, "strokeWidth": 1}, apart=5)]},
        {**_with_mark(line, {"strokeWidth": 1.8 * size, **whole}), "data": {"name": "lines"}},
        _with_mark(points, {"strokeWidth": 0.6}),
        *outlines(looks, x, y),
        *_published(x, y),
    ]


def _cut(looks: Mapping[str, Look], x: Json) -> list[Json]:
    """Hollow triangles where bars go on below the axis, and above it."""
    mark: Json = {"type": "point", "fill": "white", "size": 18, "strokeWidth": 0.9, "opacity": 1, "xOffset": _MOVED}
    ends = (
        ("datum.low < window[0] && datum.value >= window[0]", "triangle-down", "height - 2"),
        ("datum.high > window[1]", "triangle-up", "2"),
    )
    return [
        {
            "transform": [{"filter": outside}],
            "mark": {**mark, "shape": shape},
            "encoding": {"x": x, "y": {"value": {"expr": edge}}, "color": colours(looks)},
        }
        for outside, shape, edge in ends
    ]


def _published(x: Json, y: Json) -> list[Json]:
    """What other works reached: black dots with their error bars."""
    data: Json = {"data": {"name": "published"}}
    ends: Json = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
    return [
        {**data, "mark": {"type": "rule", "color": "black", "strokeWidth": 1.2}, "encoding": ends},
        {**data, "mark": DOT, "encoding": {"x": x, "y": y}},
    ]


def _with_mark(layer: Json, more: Json) -> Json:
    return {**layer, "mark": {**_part(layer, "mark"), **more}}


def _part(whole: Json, name: str) -> Json:
    part = whole[name]
    assert isinstance(part, dict)
    return part


def filled_in(layers: Sequence[Json], parameters: Json, data: Mapping[str, Sequence[Json]]) -> list[Json]:
    """Layers with their parameters and named data written out, as the panels of one specification share theirs.

    >>> layer = {"filter": "datum.low < window[0]", "data": {"name": "ours"}}
    >>> filled_in([layer], {"window": [-3, 1]}, {"ours": [{"low": -2}]})
    [{'filter': 'datum.low < [-3, 1][0]', 'data': {'values': [{'low': -2}]}}]
    >>> filled_in([layer], {"window": [-3, 1]}, {"ours": []})
    []
    """
    word = re.compile(rf"(?<![.\w])({'|'.join(parameters)})\b")

    def filled(part: object, key: str = "") -> object:
        if isinstance(part, dict):
            if list(part) == ["name"]:
                return {"values": data[part["name"]]}
            if list(part) == ["expr"] and part["expr"] in parameters:
                return parameters[part["expr"]]
            return {name: filled(value, name) for name, value in part.items() if name != "name"}
        if isinstance(part, list):
            return [filled(value) for value in part]
        if isinstance(part, str) and key in ("expr", "filter", "labelExpr"):
            return word.sub(lambda found: json.dumps(parameters[found[0]]), part)
        return part

    written = [{name: filled(value, name) for name, value in layer.items() if name != "name"} for layer in layers]
    return [layer for layer in written if layer.get("data") != {"values": []}]  # fewer layers take less time


def _fixed(mark: str, colour: str, more: Json | None = None, **encoding: Json) -> Json:
    """A mark that is there whatever the data are, in a colour that depends on light and dark."""
    look = {"type": mark, "color": {"expr": colour}, "clip": mark != "text", **(more or {})}
    return {"data": {"values": [{}]}, "mark": look, "encoding": encoding}


def _name(limit: str, name: str, moved: str) -> Json:
    """The name of a limit, right of its line, or moved down from there by so many pixels."""
    right: Json = {"align": "left", "baseline": "middle", "fontSize": 10.5, "dx": 5, "dy": {"expr": moved}}
    line = at({"expr": f"-{limit}"})
    text = _fixed("text", "muted", right, y=line, x={"value": "width"}, text={"value": {"expr": name}})
    return {**text, "transform": [{"filter": f"-{limit} >= window[0]"}]}


def _unit() -> Json:
    """What the vertical axis shows, above it."""
    above: Json = {"align": "left", "baseline": "bottom", "fontSize": 11, "dx": -24, "dy": -7}
    return _fixed("text", "muted", above, x={"value": 0}, y={"value": 0}, text={"value": {"expr": "unit"}})


def _chart(*layer: Json) -> Json:
    fit = {"type": "fit-x", "contains": "padding"}
    return {"width": "container", "autosize": fit, "transform": [TICKED], "layer": list(layer)}


_SAFE_ZONE: Final = _fixed("rect", "zone", x=at({"expr": "safe[0]"}), x2={"datum": {"expr": "safe[1]"}})
_BAND: Final = _fixed("rect", "band", y=at({"expr": "-sd"}), y2={"datum": {"expr": "sd"}})
