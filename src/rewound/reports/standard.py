"""The default figures of a table of results: against compression, against retraining time, and at the full time."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from rewound.conclusions.baseline import Baseline
from rewound.conclusions.cell import Cell, cells, failures
from rewound.conclusions.comparison import overlay
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.findings import at_full_time, best_over_time, is_algorithm_1
from rewound.errors import InputError
from rewound.paper.panels import curves_of
from rewound.reports.look import Look, looks, mode_title, pruning_title, ratios
from rewound.reports.panel import Cut, compression_axis, delta_axis, draw_outlines, draw_points, epochs_axis, handles
from rewound.reports.ranges import delta_label, window
from rewound.reports.sheet import STYLE, file_name, lay_out, save, told_trials


@dataclass(frozen=True)
class _Subject:
    recipe: str
    pruning: str
    epochs: float
    baseline: Baseline
    cells: Sequence[Cell]
    failed: int
    theirs: Sequence[Cell] = ()  # of the compared table, on the scale of ours


def draw(evidence: Evidence, out: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Draw every figure the rows have data for into the folder `out`; returns the files.

    A compared table is drawn over ours, hollow, where both have the cell.
    """
    rows = evidence.rows
    theirs: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells(overlay(rows, evidence.theirs)):
        theirs[cell.line.subject].append(cell)
    dense, failed = evidence.baselines, failures(rows)
    groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells(rows):
        groups[cell.line.subject].append(cell)
    if not groups:
        raise InputError(f"nothing to draw: none of the {len(rows)} rows is a finished, retrained network")
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    with mpl.rc_context(STYLE):
        for (recipe, pruning), group in groups.items():
            lost = sum(n for (line, _), n in failed.items() if line.subject == (recipe, pruning))
            found = (evidence.epochs[recipe], dense[recipe], group, lost, theirs[recipe, pruning])
            for name, figure in _figures(_Subject(recipe, pruning, *found)):
                stem = file_name(recipe, pruning, name)
                paths += [save(figure, out / f"{stem}.{suffix}") for suffix in formats]
    return paths


def _figures(subject: _Subject) -> Iterator[tuple[str, Figure]]:
    pruned = [cell for cell in subject.cells if cell.density < 1]
    if pruned:
        theirs = best_over_time(subject.theirs)
        yield (
            "best",
            _against_compression(subject, best_over_time(pruned), theirs, "Best retraining time, by validation"),
        )
    one_shot = [cell for cell in subject.cells if not cell.line.iterative] or subject.cells
    times_of = Counter((cell.line, cell.density) for cell in one_shot)
    if max(times_of.values(), default=0) > 1:  # one retraining time of each technique is no curve
        lines = {cell.line for cell in one_shot}
        yield "times", _against_time(subject, one_shot, [cell for cell in subject.theirs if cell.line in lines])
    full = at_full_time([cell for cell in pruned if cell.line.iterative], subject.epochs)
    if any(cell.retrain_epochs == subject.epochs for cell in full):
        times = {cell.line.technique: f"{cell.retrain_epochs:g}" for cell in full}
        named = {name: replace(look, label=f"{look.label}, t = {times[name]}") for name, look in looks(times).items()}
        theirs = at_full_time([cell for cell in subject.theirs if cell.line.iterative], subject.epochs)
        if is_algorithm_1(full):
            yield "algorithm-1", _against_compression(subject, full, theirs, "Algorithm 1 and its rivals", named)
        else:
            what = "Each technique at one retraining time"
            yield "full-time", _against_compression(subject, full, theirs, what, named)


def _against_compression(
    subject: _Subject, shown: Sequence[Cell], theirs: Sequence[Cell], what: str, named: dict[str, Look] | None = None
) -> Figure:
    modes = sorted({cell.line.iterative for cell in shown})
    figure = Figure(figsize=(2.6 * len(modes) + 3.4, 4.6))
    named, cut = named or looks(cell.line.technique for cell in shown), set[Cut]()
    every = [*shown, *theirs]
    limits = window(every, lambda cell: (cell.line.iterative, cell.density), subject.baseline, deepest=2)
    panels = figure.subplots(1, len(modes), sharey=True, squeeze=False)[0]
    panels[0].set_ylabel(delta_label(subject.baseline))
    for axes, iterative in zip(panels, modes, strict=True):
        mine = [cell for cell in shown if cell.line.iterative == iterative]
        axes.set_title(mode_title(iterative))
        axes.set_xlabel("Compression ratio")
        delta_axis(axes, subject.baseline, limits)
        compression_axis(axes, [cell.density for cell in mine], inches=figure.get_figwidth() / len(modes) - 0.6)
        cut |= draw_points(axes, curves_of(mine, "compression", subject.baseline.delta), named)
        hollow = [cell for cell in theirs if cell.line.iterative == iterative and cell.density < 1]
        draw_outlines(axes, curves_of(hollow, "compression", subject.baseline.delta), named)
    legend = handles(named, subject.baseline, safe_zone=False, cut=cut, compared=bool(theirs))
    _finish(figure, subject, what, legend)
    return figure


def _against_time(subject: _Subject, shown: Sequence[Cell], theirs: Sequence[Cell]) -> Figure:
    labels = ratios(sorted({cell.density for cell in shown}, reverse=True))
    densities, columns = list(labels), _columns(len(labels))
    lines = ceil(len(labels) / columns)
    figure = Figure(figsize=(max(6, 2.5 * columns + 0.6), 2.3 * lines + 1.5))
    inches = figure.get_figwidth() / columns - 0.5
    named, cut = looks(cell.line.technique for cell in shown), set[Cut]()
    for line, panels in enumerate(figure.subplots(lines, columns, sharey="row", squeeze=False)):
        row = densities[line * columns : (line + 1) * columns]
        limits = window(
            [cell for cell in (*shown, *theirs) if cell.density in row],
            lambda cell: (cell.density, cell.retrain_epochs),
            subject.baseline,
        )
        panels[0].set_ylabel(delta_label(subject.baseline))
        for axes, density in zip(panels, row, strict=False):
            mine = [cell for cell in shown if cell.density == density]
            axes.set_title(f"{labels[density]}, dense control" if density == 1 else labels[density])
            delta_axis(axes, subject.baseline, limits)
            epochs_axis(axes, [cell.retrain_epochs for cell in shown], subject.epochs, inches)
            cut |= draw_points(axes, curves_of(mine, "time", subject.baseline.delta), named, size=0.8)
            hollow = [cell for cell in theirs if cell.density == density]
            draw_outlines(axes, curves_of(hollow, "time", subject.baseline.delta), named, size=0.8)
            if density in densities[-columns:]:  # no panel below this one
                axes.set_xlabel("Retraining epochs")
        for axes in panels[len(row) :]:
            axes.set_visible(False)
    what = f"{mode_title(shown[0].line.iterative)}, by retraining time"
    legend = handles(named, subject.baseline, safe_zone=True, cut=cut, compared=bool(theirs))
    _finish(figure, subject, what, legend)
    return figure


def _columns(panels: int) -> int:
    if panels <= 5:
        return panels
    return min((5, 4, 3) if panels < 10 else (5, 4), key=lambda columns: -panels % columns)  # least left empty


def _finish(figure: Figure, subject: _Subject, what: str, legend: list[Line2D | Patch]) -> None:
    trials = told_trials({cell.trials for cell in subject.cells}, subject.failed)
    lay_out(figure, f"{subject.recipe}, {pruning_title(subject.pruning)}", f"{what}; {trials}", legend)
