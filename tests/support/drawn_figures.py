"""What a figure shows, mark by mark, as Vega lays it out before it is written to a file."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import vl_convert

from rewound.reports.sheets import Sheet, specification

Item = dict[str, Any]


class Box(NamedTuple):
    """Where a text stands."""

    left: float
    top: float
    right: float
    bottom: float
    text: str

    def overlaps(self, other: "Box") -> bool:
        """Whether two boxes share more than a point in both directions."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return across > 1 and down > 1


def charts(sheet: Sheet) -> list[Item]:
    """The panels of a sheet as Vega-Lite charts."""
    grid: Any = specification(sheet)["vconcat"]
    return [chart for chart in grid[0]["concat"] if "layer" in chart]


def limits(chart: Item, axis: str) -> tuple[float, float]:
    """How far an axis of a chart reaches."""
    low, high = next(part["scale"]["domain"] for part in parts(chart, axis) if "scale" in part)
    return low, high


def parts(chart: Any, name: str) -> Iterator[Any]:
    """All that has this name in a chart."""
    if isinstance(chart, dict):
        yield from (value for key, value in chart.items() if key == name)
        chart = list(chart.values())
    if isinstance(chart, list):
        for value in chart:
            yield from parts(value, name)


def layout(sheet: Sheet) -> tuple[tuple[float, float], list[tuple[float, float, Item]]]:
    """The size of a sheet, and its marks with their places on it."""
    found = vl_convert.vegalite_to_scenegraph(json.dumps(specification(sheet)))
    left, top = found["origin"]
    return (found["width"], found["height"]), list(_items(found["scenegraph"], left, top))


def _items(mark: Item, x: float, y: float) -> Iterator[tuple[float, float, Item]]:
    for item in mark.get("items", ()):
        at = x + item.get("x", 0), y + item.get("y", 0)
        if "marktype" in item or "items" in item:
            yield from _items(item, *(at if "marktype" not in item else (x, y)))
        else:
            yield *at, item


def boxes(sheet: Sheet) -> tuple[tuple[float, float], list[Box]]:
    """The size of a sheet, and where its texts stand; a letter is about half as wide as it is high."""
    size, items = layout(sheet)
    return size, [_box(x, y, item) for x, y, item in items if item.get("text")]


def _box(x: float, y: float, item: Item) -> Box:
    lines = item["text"] if isinstance(item["text"], list) else [str(item["text"])]
    high = item.get("fontSize", 11)
    wide = (0.56 if item.get("fontWeight") == "bold" else 0.5) * high * max(map(len, lines))
    left = {"center": -wide / 2, "right": -wide}.get(item.get("align", "left"), 0)
    deep = high * len(lines)
    top = {"middle": -deep / 2, "top": 0, "line-top": 0}.get(item.get("baseline", "alphabetic"), -0.8 * high)
    x, y = x + item.get("dx", 0), y + item.get("dy", 0)
    if item.get("angle"):  # a title of a vertical axis, which reads upwards
        return Box(x + top, y - left - wide, x + top + deep, y - left, lines[0])
    return Box(x + left, y + top, x + left + wide, y + top + deep, lines[0])
