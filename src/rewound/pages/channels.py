"""What of the data a chart shows by place, by colour, by dash and by shape: Vega-Lite's encoding channels."""

from collections.abc import Callable, Mapping
from typing import Final

from rewound.pages.jsondata import Json
from rewound.pages.marks import dash, outline
from rewound.presentation.look import Look

PLAIN: Final = "format(datum.value, '.4~r')"
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
    return _by_technique(looks, outline)


def _by_technique(looks: Mapping[str, Look], shown: Callable[[Look], object]) -> Json:
    scale = {"domain": list(looks), "range": [shown(look) for look in looks.values()]}
    return {"field": "technique", "type": "nominal", "scale": scale, "legend": None}
