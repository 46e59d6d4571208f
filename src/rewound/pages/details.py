"""Layers and curves of single runs, as far as a page has room for them."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rewound.pages.jsondata import Json
from rewound.tables.results import CurveRow, LayerRow

DETAIL_BYTES: Final = 1_500_000  # with them, 25,000 rows stay below 6 MB
_CURVE_POINTS: Final = 60


def details(
    keys: Iterable[str], layers: Mapping[str, Sequence[LayerRow]], curves: Mapping[str, Sequence[CurveRow]]
) -> Json:
    """What is inside the runs, in the order of their keys until the room is used up; `left_out` counts the others."""
    names = list(dict.fromkeys(row.layer for own in layers.values() for row in own))
    number = {name: place for place, name in enumerate(names)}
    runs: dict[str, Json] = {}
    used = left_out = 0
    for key in keys:
        if key in layers or key in curves:
            own = layers.get(key, ())
            detail: Json = {
                "layer": [number[row.layer] for row in own],
                "kept": [row.kept for row in own],
                "total": [row.total for row in own],
                "curve": _curve(curves.get(key, ())),
            }
            used += len(json.dumps({key: detail}, separators=(",", ":")))
            if used <= DETAIL_BYTES:
                runs[key] = detail
            else:
                left_out += 1
    return {"layers": names, "runs": runs, "left_out": left_out}


def _curve(points: Sequence[CurveRow]) -> list[list[float | None]]:
    """Steps, rates and losses, evenly thinned; the last point stays."""
    every = math.ceil(len(points) / _CURVE_POINTS)
    kept = [point for number, point in enumerate(points) if (len(points) - 1 - number) % every == 0]
    return [
        [point.step for point in kept],
        [_short(point.lr) for point in kept],
        [_short(point.loss) for point in kept],
    ]


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
