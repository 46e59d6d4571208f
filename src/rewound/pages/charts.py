"""The page's charts as Vega-Lite specifications, one per kind; what differs between panels is a parameter.

The page gives each panel its data and the parameters named here, and every chart these: `shown` (the techniques that
are ticked), `spread` (whether to draw min to max), `compared` (whether to draw the data named so, of a compared table),
and the colours that depend on light and dark: `paper`, `muted`, `band` and `zone`. Marks that answer to the pointer and
the keyboard are in the layers `points` and `outlines`; `says` is their text.
"""

from collections.abc import Mapping
from typing import Final, TypeAlias

from rewound.pages.look import Look
from rewound.pages.marks import dash, outline

Spec: TypeAlias = dict[str, object]

_DODGE: Final = 4  # pixels between techniques at one x, so that their error bars stay apart
_TICKED: Final[Spec] = {"filter": "indexof(shown, datum.technique) >= 0 || !datum.technique"}
_OVERLAID: Final[list[Spec]] = [_TICKED, {"filter": "compared"}]
_THEIRS: Final[Spec] = {"data": {"name": "compared"}, "transform": _OVERLAID}
_SAYS: Final[Spec] = {"field": "says", "type": "nominal"}
_PLAIN: Final = "format(datum.value, '.4~r')"
_SIGNED: Final = "datum.value == 0 ? '0' : format(datum.value, '+~g')"


def charts(looks: Mapping[str, Look]) -> dict[str, Spec]:
    """Every kind of chart, for these techniques."""
    names = [_name({"expr": "-sd"}, "no drop", "-sd >= window[0]"), _name(-1, {"expr": "one"}, "-1 >= window[0]")]
    safe_zone = _fixed("rect", "zone", x=_at({"expr": "safe[0]"}), x2={"datum": {"expr": "safe[1]"}})
    return {
        "compression": _deltas(looks, _compression(), names),
        "time": _deltas(looks, _time(), [safe_zone]),
        "difference": _difference(looks),
        "speed": _speed(looks),
        "rate": _rate(looks),
        "loss": _curve(looks, {"type": "linear", "zero": True}, {"grid": True, "tickCount": 4}, "linear"),
        "layers": _layers(),
    }


def _deltas(looks: Mapping[str, Look], x: Spec, more: list[Spec]) -> Spec:
    """Deltas with their spread over the dense band; a median below the axis is a triangle on its lower edge."""
    y = _value(_SIGNED, {"expr": "ticks"})
    dashed: Spec = {"strokeDash": [4, 4], "strokeWidth": 1}
    return _chart(
        _unit(),
        *more,
        _fixed("rect", "band", y=_at({"expr": "-sd"}), y2={"datum": {"expr": "sd"}}),
        _fixed("rule", "muted", y=_at(0)),
        _fixed("rule", "muted", dashed, y=_at({"expr": "-sd"})),
        _fixed("rule", "muted", dashed, y=_at(-1)),
        _spread(looks, x, y),
        *_lines(looks, x, y),
        _below(looks, x, {"filled": True, "size": 60}),
        *_outlines(looks, x, y),
        {**_THEIRS, "layer": [_below(looks, x, {"filled": False, "size": 110, "strokeWidth": 1.2})]},
    )


def _below(looks: Mapping[str, Look], x: Spec, look: Spec) -> Spec:
    return {
        "transform": [{"filter": "datum.value < window[0]"}],
        "mark": {"type": "point", "shape": "triangle-down", "opacity": 1, **look},
        "encoding": {
            "x": x,
            "y": {"value": {"expr": "height - 6 - 8 * datum.place"}},  # techniques stand above one another
            "color": _colours(looks),
        },
    }


def _outlines(looks: Mapping[str, Look], x: Spec, y: Spec) -> list[Spec]:
    """The same techniques in a compared table: thin lines and hollow markers."""
    line = {"type": "line", "xOffset": _moved(), "clip": True, "strokeWidth": 1}
    point = {"type": "point", "filled": False, "opacity": 1, "strokeWidth": 1.2, "xOffset": _moved()}
    edge: Spec = {"field": "edge", "type": "nominal", "scale": None, "legend": None}
    shape = _by_technique(looks, [outline(look) for look in looks.values()])
    size: Spec = {"field": "size", "type": "quantitative", "scale": None, "legend": None}
    return [
        {**_THEIRS, "mark": line, "encoding": {"x": x, "y": y, "stroke": edge}},
        {
            **_THEIRS,
            "name": "outlines",
            "transform": [*_OVERLAID, {"filter": "datum.value >= window[0]"}],
            "mark": {**point, "fill": "transparent", "cursor": "pointer"},
            "encoding": {"x": x, "y": y, "stroke": edge, "shape": shape, "size": size, "description": _SAYS},
        },
    ]


def _difference(looks: Mapping[str, Look]) -> Spec:
    """One technique minus others, in their colours; the extremes of few pairs are dashed, an interval is solid."""
    y = _value(_SIGNED)
    kinds = {"domain": [True, False], "range": [[1, 0], [3, 3]]}
    dashes: Spec = {"field": "interval", "type": "nominal", "scale": kinds, "legend": None}
    bars = _spread(looks, _compression(), y, strokeDash=dashes)
    *_, points = _lines(looks, _compression(), y)
    return _chart(_unit(), _fixed("rule", "muted", y=_at(0)), bars, points)


def _speed(looks: Mapping[str, Look]) -> Spec:
    y = _value("format(datum.value, '~g') + '×'")
    bars, lines = _spread(looks, _compression(), y), _lines(looks, _compression(), y)
    return _chart(_unit(), _fixed("rule", "muted", y=_at(1)), bars, *lines)


def _rate(looks: Mapping[str, Look]) -> Spec:
    axis: Spec = {"values": {"expr": "places"}, "labelOverlap": "greedy"}
    # A step is taken at the rate of the point that ends it. A rate of 0 has no place on a logarithmic axis.
    chart = _curve(looks, {"type": "log", "nice": False, "padding": 12}, axis, "step-before")
    return {**chart, "transform": [_TICKED, {"filter": "datum.value > 0"}]}


def _curve(looks: Mapping[str, Look], scale: Spec, axis: Spec, interpolate: str) -> Spec:
    x: Spec = {"field": "step", "type": "quantitative", "axis": {"title": "Steps", "tickCount": 5, "format": "~s"}}
    y: Spec = {"field": "value", "type": "quantitative", "scale": scale, "axis": {"labelExpr": _PLAIN, **axis}}
    run: Spec = {"field": "key", "type": "nominal"}
    line: Spec = {
        "mark": {"type": "line", "strokeWidth": 2, "interpolate": interpolate},
        "encoding": {"x": x, "y": y, "color": _colours(looks), "strokeDash": _dashes(looks), "detail": run},
    }
    points: Spec = {
        "name": "points",
        "mark": {"type": "point", "opacity": 0, "size": 40, "cursor": "pointer"},
        "encoding": {"x": x, "y": y, "description": _SAYS},
    }
    return _chart(line, points)


def _layers() -> Spec:
    fraction: Spec = {
        "field": "kept",
        "type": "quantitative",
        "scale": {"type": "pow", "exponent": 0.5, "domain": [0, 1], "scheme": "cividis"},
        "legend": None,
    }
    bare = {"domain": False, "ticks": False, "grid": False}
    label = "replace(datum.label, '.00×', '×')"  # columns are narrow
    apart = {"labelAngle": 0, "labelExpr": label, "labelOverlap": "greedy", "labelSeparation": 5}
    across: Spec = {"title": "Compression ratio", **bare, **apart}
    encoding: Spec = {
        "x": {"field": "ratio", "type": "ordinal", "sort": None, "axis": across},
        "y": {"field": "layer", "type": "ordinal", "sort": None, "axis": {**bare, "labelLimit": 150}},
        "fill": fraction,
        "description": _SAYS,
    }
    return _chart({"name": "points", "mark": {"type": "rect", "cursor": "pointer"}, "encoding": encoding})


def _lines(looks: Mapping[str, Look], x: Spec, y: Spec) -> list[Spec]:
    """A line through the medians of each technique, over an edge that parts it from the others, with its markers."""
    line = {"type": "line", "xOffset": _moved(), "clip": True, "strokeJoin": "round"}
    look: Spec = {
        "fill": _colours(looks),
        "stroke": _edges(looks),
        "shape": _by_technique(looks, [outline(look) for look in looks.values()]),
        "size": {"field": "size", "type": "quantitative", "scale": None, "legend": None},
    }
    return [
        {"mark": {**line, "strokeWidth": 3.4}, "encoding": {"x": x, "y": y, "stroke": _edges(looks)}},
        {
            "mark": {**line, "strokeWidth": 2},
            "encoding": {"x": x, "y": y, "color": _colours(looks), "strokeDash": _dashes(looks)},
        },
        {
            "name": "points",
            "transform": [{"filter": "datum.value >= window[0]"}],
            "mark": {"type": "point", "opacity": 1, "strokeWidth": 0.8, "xOffset": _moved(), "cursor": "pointer"},
            "encoding": {"x": x, "y": y, **look, "description": _SAYS},
        },
    ]


def _spread(looks: Mapping[str, Look], x: Spec, y: Spec, **more: Spec) -> Spec:
    ends: Spec = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
    return {
        "transform": [{"filter": "spread"}],
        "mark": {"type": "rule", "xOffset": _moved(), "clip": True, "strokeWidth": 1.5, "opacity": 0.75},
        "encoding": {**ends, "color": _colours(looks), **more},
    }


def _moved() -> Spec:
    return {"expr": f"datum.shift * {_DODGE}"}


def _by_technique(looks: Mapping[str, Look], values: list[object]) -> Spec:
    scale = {"domain": list(looks), "range": values}
    return {"field": "technique", "type": "nominal", "scale": scale, "legend": None}


def _colours(looks: Mapping[str, Look]) -> Spec:
    return _by_technique(looks, [look.colour for look in looks.values()])


def _dashes(looks: Mapping[str, Look]) -> Spec:
    return _by_technique(looks, [dash(look) for look in looks.values()])


def _edges(looks: Mapping[str, Look]) -> Spec:
    # A white edge parts marks from one another: on a dark page it has to be dark. One in a technique's own colour would
    # fill the gaps of its dashes.
    def edge(look: Look) -> object:
        return {"expr": "paper"} if look.edge in ("white", look.colour) else look.edge

    return _by_technique(looks, [edge(look) for look in looks.values()])


def _compression() -> Spec:
    return {
        "field": "compression",
        "type": "quantitative",
        "scale": {"type": "log", "domain": {"expr": "across"}, "nice": False},
        "axis": _axis("Compression ratio", "format(datum.value, digits) + '×'"),
    }


def _time() -> Spec:
    return {
        "field": "t",
        "type": "quantitative",
        "scale": {"domain": {"expr": "across"}, "nice": False, "zero": False},
        "axis": _axis("Retraining epochs", _PLAIN),
    }


def _value(label: str, ticks: object = 5) -> Spec:
    return {
        "field": "value",
        "type": "quantitative",
        "scale": {"domain": {"expr": "window"}, "nice": False, "zero": False},
        "axis": {"labelExpr": label, "tickCount": ticks, "grid": True},
    }


def _axis(title: str, label: str) -> Spec:
    places: Spec = {"values": {"expr": "places"}, "labelOverlap": "greedy", "labelSeparation": 7}
    return {"title": title, "labelExpr": label, **places}


def _fixed(mark: str, colour: str, more: Spec | None = None, **encoding: Spec) -> Spec:
    """A mark that is there whatever the data are, in a colour that depends on light and dark."""
    said = {"type": mark, "color": {"expr": colour}, "clip": mark != "text", **(more or {})}
    return {"data": {"values": [{}]}, "mark": said, "encoding": encoding}


def _name(value: object, name: object, shown: str) -> Spec:
    """The name of a limit, right of its line."""
    beside: Spec = {"align": "left", "baseline": "middle", "fontSize": 10.5, "dx": 5}
    text = _fixed("text", "muted", beside, y=_at(value), x={"value": "width"}, text={"value": name})
    return {**text, "transform": [{"filter": shown}]}


def _unit() -> Spec:
    """What the vertical axis shows, above it."""
    above: Spec = {"align": "left", "baseline": "bottom", "fontSize": 11, "dx": -24, "dy": -7}
    return _fixed("text", "muted", above, x={"value": 0}, y={"value": 0}, text={"value": {"expr": "unit"}})


def _at(value: object) -> Spec:
    return {"datum": value, "type": "quantitative"}


def _chart(*layer: Spec) -> Spec:
    fit = {"type": "fit-x", "contains": "padding"}
    return {"width": "container", "autosize": fit, "transform": [_TICKED], "layer": list(layer)}
