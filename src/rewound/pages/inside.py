"""Figures of what is inside the networks: how much is left of each layer, and how they were trained.

Like `drawings`, for tables that have layers and curves.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from statistics import median

from rewound.conclusions.cell import Setting, setting_of
from rewound.pages.jsondata import Json
from rewound.pages.subjects import Subject
from rewound.presentation.look import looks, mode_title, ratios
from rewound.tables.results import LayerRow


def layer_maps(subject: Subject, layers: Mapping[str, Sequence[LayerRow]]) -> Json:
    """A map of layers and compressions for every technique at its best time; colour is the fraction kept."""
    networks: dict[Setting, list[Sequence[LayerRow]]] = defaultdict(list)
    for row in subject.rows:
        if row.key in layers and (found := setting_of(row)) is not None:
            networks[found].append(layers[row.key])
    choices = []
    for mode in sorted(subject.modes, reverse=True):
        mine = [cell for cell in subject.best if cell.line.iterative == mode and cell.density < 1]
        panels = []
        for name, look in looks(cell.line.technique for cell in mine).items():
            own = [cell.setting for cell in mine if cell.setting in networks and cell.line.technique == name]
            if own:
                panels.append({"title": look.label, "technique": name, **_map(subject, own, networks)})
        if panels:
            choices.append({"label": mode_title(mode), "panels": panels})
    return {
        "id": "layers",
        "title": "What is kept of each layer",
        "text": "The fraction of weights that is left, median over trials, from the first layer to the last, each "
        "technique at the retraining time that validates best.",
        "choices": choices,
    }


def _map(subject: Subject, shown: Sequence[Setting], networks: Mapping[Setting, Sequence[Sequence[LayerRow]]]) -> Json:
    columns = [_kept(networks[mine]) for mine in shown]
    names = list(dict.fromkeys(name for column in columns for name in column))
    labels = ratios(mine.density for mine in shown)
    return {
        "kind": "layers",
        "layers": names,
        "ratios": [labels[mine.density] for mine in shown],
        "kept": [[column.get(name) for name in names] for column in columns],
        "settings": [subject.number[mine] for mine in shown],
    }


def _kept(networks: Iterable[Sequence[LayerRow]]) -> dict[str, float]:
    fractions: dict[str, list[float]] = defaultdict(list)
    for network in networks:
        for row in network:
            fractions[row.layer].append(row.kept / row.total if row.total else 0.0)
    return {name: round(median(values), 4) for name, values in fractions.items()}


def training(subject: Subject, known: Container[str]) -> Json:
    """Learning rate and loss of every technique at one compression; `known` are the keys that have curves."""
    runs: dict[Setting | None, int] = {}
    for number, row in enumerate(subject.rows):
        if row.key in known:
            runs.setdefault(setting_of(row), number)
    choices = []
    for mode in sorted(subject.modes, reverse=True):
        mine = [cell for cell in subject.best if cell.line.iterative == mode]
        for density, label in ratios(sorted({cell.density for cell in mine})).items():
            shown = [runs[cell.setting] for cell in mine if cell.density == density and cell.setting in runs]
            kinds = (("rate", "Learning rate"), ("loss", "Training loss"))
            if shown:
                panels = [{"kind": kind, "title": title, "runs": shown} for kind, title in kinds]
                choices.append({"label": f"{mode_title(mode)}, {label}", "panels": panels})
    return {
        "id": "curves",
        "title": "Training curves",
        "text": "The first trial of each technique at the retraining time that validates best, from the moment its "
        "last level was pruned.",
        "choices": choices,
    }
