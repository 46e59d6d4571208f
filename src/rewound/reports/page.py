"""One self-contained HTML page from tables: it opens from disk, needs no network, and asks for none.

Everything that is concluded is concluded before (`subjects`, `panels`); the page only shows it. Its data are JSON:
techniques, charts, and subjects with settings and runs as columns, numbers with six significant digits. Where layers
and curves need too much room, the runs that figures show keep theirs. A script turns the data into text nodes only; the
charts are drawn by Vega-Lite, whose JavaScript `vl_convert` bundles when the page is written. A security policy names
the two scripts by their hashes and allows nothing to be fetched. The page of `rewound watch` (`live`) is the same with
one more part, and may ask the server that it came from for new data.
"""

import base64
import hashlib
import html
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Final, Literal, TypeVar

from rewound.conclusions.cells import Line, Setting, setting_of
from rewound.conclusions.comparison import Card, Compared, Curve
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.findings import Reach, Reaches, Speedup
from rewound.conclusions.tables import CurveRow, LayerRow
from rewound.foundations.wholefiles import write_whole
from rewound.reports.charts import Json, charts
from rewound.reports.look import Look, area, dash, looks, marker_path, ratios
from rewound.reports.panels import accuracy, differences, layer_maps, speed, times, training
from rewound.reports.subjects import Subject, subjects
from rewound.reports.words import (
    against,
    criteria,
    drop_names,
    measure_words,
    note,
    reach_words,
    remarks,
    tolerance_words,
    verdict,
)

PAGE: Final = "index.html"
_SCRIPTS: Final = (
    "elements",
    "story",
    "state",
    "panels",
    "figures",
    "conformance",
    "run",
    "table",
    "page",
)  # one script, in this order


@dataclass(frozen=True)
class Origin:
    """What a page says about where its tables come from."""

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    """Names and values of the footer."""
    run: str = ""
    """The command that computes the rows again, if one does."""
    show: str = ""
    """The command that shows a run, given its key behind it."""


def write_page(evidence: Evidence, path: Path, origin: Origin) -> Path:
    """Write the page of a table; a compared one is drawn over it, with how near the two come."""
    write_whole(path, document(origin.title, content(evidence, origin)), durable=False)
    return path


def content(evidence: Evidence, origin: Origin) -> Json:
    """The data of a page."""
    return {
        **story(evidence),
        "commands": {"run": origin.run, "show": origin.show},
        "provenance": origin.facts,
    }


def document(title: str, data: Json, *, live: bool = False) -> bytes:
    """The page; one that is `live` asks its own server for new data, and for nothing else."""
    library = _library()
    script = "\n".join(_asset(f"{name}.js") for name in (*_SCRIPTS, *(["live"] if live else [])))
    page = Template(_asset("page.html")).substitute(
        policy=_policy(library, script) + ("; connect-src 'self'" if live else ""),
        title=html.escape(title),
        style=_asset("page.css"),
        story=as_json(data),
        library=library,
        script=script,
    )
    return page.encode()


@cache
def _library() -> str:
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")


def _policy(*scripts: str) -> str:
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"


def _asset(name: str) -> str:
    return (files("rewound.reports") / "assets" / name).read_text(encoding="utf-8")


def as_json(value: object) -> str:
    """JSON that may stand inside a <script> element: nothing in it can end the element or begin another.

    >>> as_json({"recipe": "</script>&"})
    '{"recipe":"\\\\u003c/script\\\\u003e\\\\u0026"}'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII: U+2028 and U+2029 are escaped, too
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


Detail = TypeVar("Detail", LayerRow, CurveRow)


def story(evidence: Evidence) -> Json:
    """All that a page shows."""
    about, tables = subjects(evidence), evidence.tables
    named = looks(setting.line.technique for subject in about for setting in subject.settings)
    layers, curves = _by_key(tables.layers), _by_key(tables.curves)
    return {
        "techniques": [_technique(name, look) for name, look in named.items()],
        "charts": charts(named),
        "subjects": [_subject(subject, list(named), layers, curves) for subject in about],
        "details": details(_shown_first(about), layers, curves),
        "notes": evidence.weaknesses,
        "cards": {card.recipe: card_data(card) for card in evidence.cards},
    }


def _technique(name: str, look: Look) -> Json:
    mark = {"dash": dash(look), "outline": marker_path(look), "size": area(look), "edge": look.edge}
    return {"name": name, "label": look.label, "colour": look.colour, **mark}


def _subject(
    subject: Subject,
    techniques: Sequence[str],
    layers: Mapping[str, Sequence[LayerRow]],
    curves: Mapping[str, Sequence[CurveRow]],
) -> Json:
    zero = subject.baseline
    figures = (
        accuracy(subject),
        differences(subject),
        times(subject),
        speed(subject),
        layer_maps(subject, layers),
        training(subject, curves),
    )
    return {
        "recipe": subject.recipe,
        "pruning": subject.pruning,
        "sentence": subject.sentence,
        "unit": zero.unit,
        "scale": zero.scale,
        "sign": zero.metric.gain(1),
        "digits": zero.digits,
        "drops": drop_names(zero.metric),
        "tolerance": f"The dense network reaches {zero.metric.name} {zero.shown(zero.mean)}; {tolerance_words(zero)}.",
        "against": against(zero.metric),
        "dense": {"mean": zero.mean, "flops": _dense(subject, "flops"), "parameters": _dense(subject, "parameters")},
        "reach": [_reach(line, reached, subject) for line, reached in subject.reaches.items()],
        "settings": _settings(subject, techniques),
        "runs": _runs(subject),
        "figures": [figure for figure in figures if figure["choices"]],
    }


def _reach(line: Line, reached: Reaches, subject: Subject) -> Json:
    shown = ratios(cell.density for cell in subject.best if cell.line == line)
    labels = {1 / density: label for density, label in shown.items()}

    def words(reach: Reach) -> Json:
        found = reach_words(reach, reached.tried, labels)
        return {"ratio": found.ratio, "cost": _short(reach.search_epochs), "range": found.range}

    drops = {"no_drop": words(reached.no_drop), "one": words(reached.one_drop)}
    return {"technique": line.technique, "iterative": line.iterative, **drops}


def _settings(subject: Subject, techniques: Sequence[str]) -> Json:
    """Settings as columns; `same` are the numbers of the settings that are the very same runs."""
    place = {name: number for number, name in enumerate(techniques)}
    found = [(setting, subject.cells.get(setting)) for setting in subject.settings]
    delta = subject.baseline.delta
    return {
        "technique": [place[setting.line.technique] for setting in subject.settings],
        "iterative": [int(setting.line.iterative) for setting in subject.settings],
        "density": [_short(setting.density) for setting in subject.settings],
        "t": [_short(setting.retrain_epochs) for setting in subject.settings],
        "trials": [len(cell.tests) if cell else 0 for _, cell in found],
        "delta": [_short(delta(cell.median)) if cell else None for _, cell in found],
        "low": [_short(delta(cell.worst)) if cell else None for _, cell in found],
        "high": [_short(delta(cell.best)) if cell else None for _, cell in found],
        "cost": [_short(cell.search_epochs) if cell else None for _, cell in found],
        "speed": _speeds(subject, subject.speed),
        "faster": _speeds(subject, subject.faster),
        "same": _column(_same(subject)),
        "theirs": _column(_theirs(subject)),
    }


def _speeds(subject: Subject, speeds: Iterable[Speedup]) -> list[object] | None:
    """Median, low and high of the settings that have a speed-up."""
    known = {each.setting: [_short(each.median), _short(each.low), _short(each.high)] for each in speeds}
    return _column(known.get(setting) for setting in subject.settings)


def _theirs(subject: Subject) -> Iterable[object]:
    """Median, low and high of the settings that a compared table has, too, as deltas; and its trials."""
    delta = subject.baseline.delta
    for setting in subject.settings:
        cell = subject.theirs.get(setting)
        yield cell and [*(_short(delta(value)) for value in (cell.median, cell.worst, cell.best)), len(cell.tests)]


def _same(subject: Subject) -> list[list[int] | None]:
    keys: dict[Setting, set[str]] = defaultdict(set)
    for row in subject.rows:
        if (setting := setting_of(row)) is not None and row.key:
            keys[setting].add(row.key)
    twins: dict[frozenset[str], list[int]] = defaultdict(list)
    for setting, own in keys.items():
        twins[frozenset(own)].append(subject.number[setting])
    found: list[list[int] | None] = [None] * len(subject.settings)
    for group in twins.values():
        for number in group if len(group) > 1 else ():
            found[number] = [other for other in group if other != number]
    return found


def _runs(subject: Subject) -> Json:
    """Rows as columns, dense ones with setting -1; a column that is empty throughout is null."""
    rows = subject.rows
    return {
        "setting": [-1 if (setting := setting_of(row)) is None else subject.number[setting] for row in rows],
        "trial": [row.trial for row in rows],
        "val": [_short(row.val) for row in rows],
        "test": [_short(row.test) for row in rows],
        "flops": _column(row.flops for row in rows),
        "parameters": _column(row.parameters for row in rows),
        "seconds": _column(_short(row.seconds) for row in rows),
        "key": _column(row.key or None for row in rows),
    }


def _dense(subject: Subject, name: Literal["flops", "parameters"]) -> int | None:
    return next((getattr(row, name) for row in subject.rows if row.dense and getattr(row, name)), None)


def _column(values: Iterable[object]) -> list[object] | None:
    column = list(values)
    return column if any(value is not None for value in column) else None


def _short(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() else rounded


def _by_key(rows: Iterable[Detail]) -> dict[str, list[Detail]]:
    found: dict[str, list[Detail]] = defaultdict(list)
    for row in rows:
        found[row.key].append(row)
    return dict(found)


def _shown_first(about: Iterable[Subject]) -> list[str]:
    """The keys of all runs, those that figures show before the others."""
    first: list[str] = []
    rest: list[str] = []
    for subject in about:
        best = {cell.setting for cell in subject.best}
        for row in subject.rows:
            (first if row.dense or setting_of(row) in best else rest).append(row.key)
    return list(dict.fromkeys([*first, *rest]))


def card_data(card: Card) -> Json:
    """A card; every cell names its curve by number, and has the two digits that the terminal shows."""
    return {
        "verdict": verdict(card),
        "measure": measure_words(card),
        "criteria": [criterion._asdict() for criterion in criteria(card)],
        "curves": [_compared_curve(curve) for curve in card.curves],
        "cells": _cells(card),
        "remarks": remarks(card),
    }


def _compared_curve(curve: Curve) -> Json:
    counts = {"cells": len(curve.cells), "outside": sum(not cell.inside for cell in curve.cells)}
    line = {"technique": curve.line.technique, "iterative": curve.line.iterative, "pruning": curve.line.pruning}
    return {**line, **counts, "bias": _shown(curve.bias), "note": note(curve)}


def _cells(card: Card) -> Json:
    labels = [ratios(cell.density for cell in curve.cells) for curve in card.curves]

    def column(value: Callable[[Compared], float]) -> list[float]:
        return [_shown(value(cell)) for cell in card.cells]

    return {
        "curve": [number for number, curve in enumerate(card.curves) for _ in curve.cells],
        "ratio": [own[cell.density] for own, curve in zip(labels, card.curves, strict=True) for cell in curve.cells],
        "t": [cell.retrain_epochs for cell in card.cells],
        "ours": column(lambda cell: cell.ours),
        "n": [cell.n for cell in card.cells],
        "theirs": column(lambda cell: cell.theirs),
        "low": column(lambda cell: cell.low),
        "high": column(lambda cell: cell.high),
        "m": [cell.m for cell in card.cells],
        "difference": column(lambda cell: cell.difference),
        "margin": column(lambda cell: cell.margin),
        "inside": [int(cell.inside) for cell in card.cells],
    }


def _shown(value: float) -> float:
    return round(value, 2) + 0.0  # adding 0 turns -0.0 into 0


DETAIL_BYTES: Final = 1_500_000  # with them, 25,000 rows stay below 6 MB
_CURVE_POINTS: Final = 60


def details(
    keys: Iterable[str], layers: Mapping[str, Sequence[LayerRow]], curves: Mapping[str, Sequence[CurveRow]]
) -> Json:
    """What is inside the runs, in the order of their keys until the room is used up; `left_out` counts the others."""
    names = list(dict.fromkeys(row.layer for own in layers.values() for row in own))
    number = {name: place for place, name in enumerate(names)}
    known = [key for key in keys if key in layers or key in curves]
    runs: dict[str, Json] = {}
    used = 0
    for key in known:
        own = layers.get(key, ())
        detail: Json = {
            "layer": [number[row.layer] for row in own],
            "kept": [row.kept for row in own],
            "total": [row.total for row in own],
            "curve": _thinned(curves.get(key, ())),
        }
        used += len(json.dumps({key: detail}, separators=(",", ":")))
        if used > DETAIL_BYTES:
            break
        runs[key] = detail
    return {"layers": names, "runs": runs, "left_out": len(known) - len(runs)}


def _thinned(points: Sequence[CurveRow]) -> list[list[float | None]]:
    """Steps, rates and losses, evenly thinned; the last point stays."""
    every = math.ceil(len(points) / _CURVE_POINTS)
    kept = [point for number, point in enumerate(points) if (len(points) - 1 - number) % every == 0]
    return [
        [point.step for point in kept],
        [_four_digits(point.lr) for point in kept],
        [_four_digits(point.loss) for point in kept],
    ]


def _four_digits(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
