"""From tables to the JSON that a page holds: techniques, charts, and subjects with settings and runs as columns.

Everything that is concluded is concluded before (`subjects`, `drawings`, `inside`); the page only shows it. Numbers
have six significant digits. Where layers and curves need too much room, the runs that figures show keep theirs.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from rewound.conclusions.cell import Line, Setting, setting_of
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.speedup import Speedup
from rewound.conclusions.trust import Reach, Reaches
from rewound.pages.charts import charts
from rewound.pages.compared import told_card
from rewound.pages.details import details
from rewound.pages.drawings import accuracy, differences, speed, times
from rewound.pages.inside import layer_maps, training
from rewound.pages.jsondata import Json
from rewound.pages.marks import area, dash, outline
from rewound.pages.subjects import Subject, subjects
from rewound.presentation.look import Look, looks, ratios
from rewound.presentation.reaching import one_drop, told_reach
from rewound.tables.results import CurveRow, LayerRow

Detail = TypeVar("Detail", LayerRow, CurveRow)


def story(evidence: Evidence) -> Json:
    """All that a page shows."""
    about, tables = subjects(evidence), evidence.tables
    named = looks(mine.line.technique for subject in about for mine in subject.settings)
    layers, curves = _by_key(tables.layers), _by_key(tables.curves)
    return {
        "techniques": [_technique(name, look) for name, look in named.items()],
        "charts": charts(named),
        "subjects": [_subject(subject, list(named), layers, curves) for subject in about],
        "details": details(_shown_first(about), layers, curves),
        "notes": evidence.weaknesses,
        "cards": {card.recipe: told_card(card) for card in evidence.cards},
    }


def _technique(name: str, look: Look) -> Json:
    mark = {"dash": dash(look), "outline": outline(look), "size": area(look), "edge": look.edge}
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
        "metric": zero.metric,
        "unit": zero.unit,
        "scale": zero.scale,
        "one": one_drop(zero),
        "dense": {"mean": zero.mean, "sd": zero.sd, "n": zero.n, "flops": _dense_flops(subject)},
        "reach": [_reach(line, reached, subject) for line, reached in subject.reaches.items()],
        "settings": _settings(subject, techniques),
        "runs": _runs(subject),
        "figures": [figure for figure in figures if figure["choices"]],
    }


def _reach(line: Line, reached: Reaches, subject: Subject) -> Json:
    shown = ratios(cell.density for cell in subject.best if cell.line == line)
    labels = {1 / density: label for density, label in shown.items()}

    def said(reach: Reach) -> Json:
        told = told_reach(reach, reached.tried, labels)
        return {"ratio": told.ratio, "cost": _short(reach.search_epochs), "range": told.range}

    drops = {"no_drop": said(reached.no_drop), "one": said(reached.one_percent)}
    return {"technique": line.technique, "iterative": line.iterative, **drops}


def _settings(subject: Subject, techniques: Sequence[str]) -> Json:
    """Settings as columns; `same` are the numbers of the settings that are the very same runs."""
    place = {name: number for number, name in enumerate(techniques)}
    found = [(mine, subject.cells.get(mine)) for mine in subject.settings]
    delta = subject.baseline.delta
    return {
        "technique": [place[mine.line.technique] for mine in subject.settings],
        "iterative": [int(mine.line.iterative) for mine in subject.settings],
        "density": [_short(mine.density) for mine in subject.settings],
        "t": [_short(mine.retrain_epochs) for mine in subject.settings],
        "trials": [len(cell.tests) if cell else 0 for _, cell in found],
        "delta": [_short(delta(cell.median)) if cell else None for _, cell in found],
        "low": [_short(delta(cell.low)) if cell else None for _, cell in found],
        "high": [_short(delta(cell.high)) if cell else None for _, cell in found],
        "cost": [_short(cell.search_epochs) if cell else None for _, cell in found],
        "speed": _speeds(subject, subject.speed),
        "faster": _speeds(subject, subject.faster),
        "same": _column(_same(subject)),
        "theirs": _column(_theirs(subject)),
    }


def _speeds(subject: Subject, speeds: Iterable[Speedup]) -> list[object] | None:
    """Median, low and high of the settings that have a speed-up."""
    known = {each.setting: [_short(each.median), _short(each.low), _short(each.high)] for each in speeds}
    return _column(known.get(mine) for mine in subject.settings)


def _theirs(subject: Subject) -> Iterable[object]:
    """Median, low and high of the settings that a compared table has, too, as deltas; and its trials."""
    delta = subject.baseline.delta
    for mine in subject.settings:
        cell = subject.theirs.get(mine)
        yield cell and [*(_short(delta(value)) for value in (cell.median, cell.low, cell.high)), len(cell.tests)]


def _same(subject: Subject) -> list[list[int] | None]:
    keys: dict[Setting, set[str]] = defaultdict(set)
    for row in subject.rows:
        if (mine := setting_of(row)) is not None and row.key:
            keys[mine].add(row.key)
    twins: dict[frozenset[str], list[int]] = defaultdict(list)
    for mine, own in keys.items():
        twins[frozenset(own)].append(subject.number[mine])
    found: list[list[int] | None] = [None] * len(subject.settings)
    for group in twins.values():
        for number in group if len(group) > 1 else ():
            found[number] = [other for other in group if other != number]
    return found


def _runs(subject: Subject) -> Json:
    """Rows as columns, dense ones with setting -1; a column that is empty throughout is null."""
    rows = subject.rows
    return {
        "setting": [-1 if (mine := setting_of(row)) is None else subject.number[mine] for row in rows],
        "trial": [row.trial for row in rows],
        "val": [_short(row.val) for row in rows],
        "test": [_short(row.test) for row in rows],
        "flops": _column(row.flops for row in rows),
        "seconds": _column(_short(row.seconds) for row in rows),
        "key": _column(row.key or None for row in rows),
    }


def _dense_flops(subject: Subject) -> int | None:
    return next((row.flops for row in subject.rows if row.dense and row.flops), None)


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
