"""What a chart draws of each technique: a line with its markers, the spread, and the same of a compared table."""

from collections.abc import Mapping
from typing import Final

from rewound.pages.channels import SAYS, SIZE, colours, dashes, edges, markers
from rewound.pages.jsondata import Json
from rewound.presentation.look import Look

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


def below(looks: Mapping[str, Look], x: Json, look: Json) -> Json:
    """Triangles for medians below the axis, on its lower edge: techniques at one x stand above one another."""
    count: Json = {"window": [{"op": "row_number", "as": "from_below"}], "groupby": [x["field"]]}
    return {
        "transform": [{"filter": "datum.value < window[0]"}, {**count, "sort": [{"field": "place"}]}],
        "mark": {"type": "point", "shape": "triangle-down", "opacity": 1, **look},
        "encoding": {
            "x": x,
            "y": {"value": {"expr": "height + 4 - 8 * datum.from_below"}},
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
