"""Which figures a subject has on the page, panel by panel: what each shows and over which range (`charts` draws them).

A figure has choices, of which one is seen at a time; a choice has panels; a panel refers to settings or runs by number.
A figure without data has no choices.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from statistics import median

from rewound.conclusions.cells import Cell, Setting, setting_of
from rewound.conclusions.findings import Speedup, at_full_time, best_over_time, is_algorithm_1
from rewound.conclusions.tables import LayerRow
from rewound.reports.charts import Json
from rewound.reports.look import SAFE_ZONE, compression_axis, looks, mode_title, ratios, time_axis, window
from rewound.reports.subjects import Subject
from rewound.reports.words import Contrast, against, delta_label, direction_words, drop_names


def accuracy(subject: Subject) -> Json:
    """Accuracy against compression: one-shot, iterative, and in full (Algorithm 1, where a level prunes 20%)."""
    pruned = [cell for cell in subject.best if cell.density < 1]
    shown = {mode_title(mode): [cell for cell in pruned if cell.line.iterative == mode] for mode in subject.modes}
    iterative = [cell for cell in subject.cells.values() if cell.density < 1 and cell.line.iterative]
    full = at_full_time(iterative, subject.epochs)
    if any(cell.retrain_epochs == subject.epochs for cell in full):
        alone = set(shown[mode_title(True)]) == set(full)
        if alone:  # every technique has one retraining time: a second panel says no more
            del shown[mode_title(True)]
        shown[_full_title(full, subject.epochs, alone=alone)] = full
    hollow = _overlaid(subject, shown)
    panels, triangles = [], ""
    if pruned:
        every = [*pruned, *full, *(cell for cells in hollow.values() for cell in cells)]
        limits = window(every, lambda cell: (cell.line.iterative, cell.density), subject.baseline, deepest=2)
        panels = [_compression_panel(subject, name, own, hollow[name], limits) for name, own in shown.items() if own]
        triangles = _triangles(subject, every, limits)
    metric = subject.baseline.metric
    return {
        "id": "accuracy",
        "title": f"{_metric(subject)} against compression",
        "text": "Compression counts the weights that may be pruned, not the whole network. Medians over trials, each "
        "technique at the retraining time that validates best, as the difference to "
        "the mean dense network. The band is one standard deviation of the dense runs."
        f"{direction_words(metric)}{triangles}",
        "choices": [{"label": "", "panels": panels}] if panels else [],
    }


def _full_title(full: Sequence[Cell], epochs: float, *, alone: bool) -> str:
    """The title of the panel at full time, which may be the only one of iterative pruning."""
    rewound = {cell.retrain_epochs for cell in full if cell.line.technique == "weight-rewinding"} - {epochs}
    time = f"t = {epochs:g}" + (f" (weight rewinding: {min(rewound):g})" if rewound else "")
    if is_algorithm_1(full):
        return f"{mode_title(True) + ': ' if alone else ''}Algorithm 1 and its rivals, {time}"
    return f"{mode_title(True) if alone else 'Retrained in full'}, {time}"


def _triangles(subject: Subject, cells: Iterable[Cell], limits: tuple[float, float]) -> str:
    """What the triangles are, where there are any."""
    deltas = [(subject.baseline.delta(cell.worst), subject.baseline.delta(cell.median)) for cell in cells]
    below, cut = any(m < limits[0] for _, m in deltas), any(low < limits[0] <= m for low, m in deltas)
    return (" ▼ stands for a median below the axis." if below else "") + (
        " A bar that meets the lower edge goes on below it." if cut else ""
    )


def _overlaid(subject: Subject, shown: Iterable[str]) -> dict[str, list[Cell]]:
    """What the panels show of a compared table, chosen as ours is: at its own best retraining times, or at T."""
    theirs = [cell for cell in subject.theirs.values() if cell.density < 1]
    full = at_full_time([cell for cell in theirs if cell.line.iterative], subject.epochs)
    best = best_over_time(theirs)
    in_mode = {mode_title(mode): [cell for cell in best if cell.line.iterative == mode] for mode in (False, True)}
    return {name: in_mode.get(name, full) for name in shown}


def _compression_panel(
    subject: Subject, title: str, shown: Sequence[Cell], theirs: Sequence[Cell], limits: tuple[float, float]
) -> Json:
    # Where every technique is below the axis there is nothing to see but triangles: one such compression is enough.
    visible = [cell.density for cell in shown if subject.baseline.delta(cell.median) >= limits[0]]
    lost = sorted({cell.density for cell in shown if cell.density < min(visible, default=1)})
    drawn = [cell for cell in shown if not lost or cell.density >= lost[-1]]
    drop = f"{-limits[0]:.{subject.baseline.digits - 1}f} {subject.baseline.unit}"
    return {
        "kind": "compression",
        "title": title,
        "note": f"Beyond, to {1 / lost[0]:.2f}×, all are worse by more than {drop}." if len(lost) > 1 else "",
        "settings": _numbers(subject, drawn),
        "theirs": _numbers(subject, (cell for cell in theirs if not lost or cell.density >= lost[-1])),
        "params": {**_across(drawn), **_deltas(subject, limits), "ticks": 6},
    }


def differences(subject: Subject) -> Json:
    """The techniques against one another, as differences with their intervals."""
    panels = [_difference_panel(subject, mode, contrasted) for mode, contrasted in subject.contrasts.items()]
    return {
        "id": "differences",
        "title": "Differences between techniques",
        "text": "How much better one technique is than another, both at the retraining time that validates best. A "
        "solid bar is a 95% t interval; a dashed one reaches from the least to the largest difference, where there are "
        "too few of them for an interval.",
        "choices": [{"label": "", "panels": panels}] if panels else [],
    }


def _difference_panel(subject: Subject, mode: bool, contrasted: Contrast) -> Json:
    low, high = min(0, *(each.low for each in contrasted.all)), max(0, *(each.high for each in contrasted.all))
    margin = 0.07 * (high - low) or 0.1
    first = looks([contrasted.first])[contrasted.first].label
    metric = subject.baseline.metric
    return {
        "kind": "difference",
        "title": f"{mode_title(mode)}: {first[:1].lower()}{first[1:]} {against(metric)}",
        "note": contrasted.method_note,
        "brackets": contrasted.brackets,
        "technique": contrasted.first,
        "over": list(contrasted.over),
        "settings": _numbers(subject, (each.cell for each in contrasted.all)),
        "minus": _numbers(subject, (each.minus for each in contrasted.all)),
        "differences": [
            [*map(_rounded, (each.mean, each.low, each.high)), each.n, each.paired, each.df is not None]
            for each in contrasted.all
        ],
        "params": {
            **_across(each.cell for each in contrasted.all),
            "window": [low - margin, high + margin],
            "unit": f"{'Difference' if metric.higher_is_better else 'Better by,'} in {metric.shown_unit}",
        },
    }


def times(subject: Subject) -> Json:
    """Accuracy against retraining time, a panel for every compression."""
    choices, triangles = [], ""
    for mode in subject.modes:
        cells = [cell for cell in subject.cells.values() if cell.line.iterative == mode]
        places = sorted({cell.retrain_epochs for cell in cells})
        if len(cells) > len({(cell.line, cell.density) for cell in cells}):  # some technique has several times
            panels = []
            for density, label in ratios(sorted({cell.density for cell in cells}, reverse=True)).items():
                shown, theirs = _cells_at(subject, cells, density)
                limits = window([*shown, *theirs], lambda cell: cell.retrain_epochs, subject.baseline)
                title = f"{label}, dense control" if density == 1 else label
                panels.append(_time_panel(subject, title, shown, theirs, limits, places))
                triangles = triangles or _triangles(subject, [*shown, *theirs], limits)
            choices.append({"label": mode_title(mode), "small": True, "panels": panels})
    low, high = SAFE_ZONE
    return {
        "id": "cost",
        "title": f"{_metric(subject)} against search cost",
        "text": "Epochs of retraining per level, a panel for every compression, each with its own vertical axis. In "
        f"the shaded safe zone, {low:.0%} to {high:.0%} of the {subject.epochs:g} epochs of training, the paper found "
        f"both rewindings above fine-tuning.{triangles}",
        "choices": choices,
    }


def _cells_at(subject: Subject, mode: Iterable[Cell], density: float) -> tuple[list[Cell], list[Cell]]:
    """The cells at a density, and what a compared table has of their curves."""
    shown = [cell for cell in mode if cell.density == density]
    lines = {cell.line for cell in shown}
    return shown, [cell for cell in subject.theirs.values() if cell.density == density and cell.line in lines]


def _time_panel(
    subject: Subject,
    title: str,
    shown: Sequence[Cell],
    theirs: Sequence[Cell],
    limits: tuple[float, float],
    places: Sequence[float],
) -> Json:
    params = {
        **_deltas(subject, limits),
        "across": list(time_axis(places).across),
        "places": places,
        "safe": [part * subject.epochs for part in SAFE_ZONE],
        "ticks": 4,
    }
    numbers = {"settings": _numbers(subject, shown), "theirs": _numbers(subject, theirs)}
    return {"kind": "time", "title": title, **numbers, "params": params}


def speed(subject: Subject) -> Json:
    """Theoretical speed-up against compression: over the dense network, and over fine-tuning."""
    choices = []
    for mode in sorted(subject.modes, reverse=True):
        drawn = (
            _speed_panel(subject, "Than the dense network", "speed", mode, subject.speed),
            _speed_panel(subject, "Than fine-tuning at the same compression", "faster", mode, subject.faster),
        )
        if panels := [panel for panel in drawn if panel]:
            choices.append({"label": mode_title(mode), "panels": panels})
    return {
        "id": "speed",
        "title": "Theoretical speed-up",
        "text": "How many times fewer FLOPs a network needs, medians over trials at the retraining time that validates "
        "best. Pruned in one shot, all techniques share their masks, and so their FLOPs.",
        "choices": choices,
    }


def _speed_panel(subject: Subject, title: str, field: str, mode: bool, speeds: Iterable[Speedup]) -> Json | None:
    shown = [each for each in speeds if each.line.iterative == mode and each.density < 1]
    if not shown or (field == "faster" and {each.line.technique for each in shown} == {"fine-tuning"}):
        return None
    low, high = min(1, *(each.low for each in shown)), max(1, *(each.high for each in shown))
    margin = 0.07 * (high - low) or 0.1
    params = {**_across(shown), "window": [low - margin, high + margin], "unit": "Times fewer FLOPs"}
    return {"kind": "speed", "field": field, "title": title, "settings": _numbers(subject, shown), "params": params}


def _metric(subject: Subject) -> str:
    return subject.baseline.metric.name[:1].upper() + subject.baseline.metric.name[1:]


def _numbers(subject: Subject, shown: Iterable[Cell | Speedup]) -> list[int]:
    return [subject.number[cell.setting] for cell in shown]


def _across(shown: Iterable[Cell | Speedup]) -> Json:
    axis = compression_axis(cell.density for cell in shown)
    return {"across": list(axis.across), "places": axis.places, "digits": axis.digits}


def _deltas(subject: Subject, limits: tuple[float, float]) -> Json:
    dense = subject.baseline
    sizes = {"window": list(map(_rounded, limits)), "sd": _rounded(dense.spread), "one": _rounded(dense.named_drop)}
    return {**sizes, "drops": drop_names(dense.metric), "unit": delta_label(dense.metric)}


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def layer_maps(subject: Subject, layers: Mapping[str, Sequence[LayerRow]]) -> Json:
    """A map of layers and compressions for every technique at its best time; colour is the fraction kept."""
    networks: dict[Setting, list[Sequence[LayerRow]]] = defaultdict(list)
    for row in subject.rows:
        if row.key in layers and (found := setting_of(row)) is not None:
            networks[found].append(layers[row.key])
    choices = []
    for mode in sorted(subject.modes, reverse=True):
        cells = [cell for cell in subject.best if cell.line.iterative == mode and cell.density < 1]
        panels = []
        for name, look in looks(cell.line.technique for cell in cells).items():
            own = [cell.setting for cell in cells if cell.setting in networks and cell.line.technique == name]
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
    columns = [_kept(networks[setting]) for setting in shown]
    names = list(dict.fromkeys(name for column in columns for name in column))
    labels = ratios(setting.density for setting in shown)
    return {
        "kind": "layers",
        "layers": names,
        "ratios": [labels[setting.density] for setting in shown],
        "kept": [[column.get(name) for name in names] for column in columns],
        "settings": [subject.number[setting] for setting in shown],
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
        cells = [cell for cell in subject.best if cell.line.iterative == mode]
        for density, label in ratios(sorted({cell.density for cell in cells})).items():
            shown = [runs[cell.setting] for cell in cells if cell.density == density and cell.setting in runs]
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
