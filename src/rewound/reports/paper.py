"""The paper's figures as files: every figure a sheet of panels, and every panel a file of its own."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from rewound.conclusions.evidence import Evidence
from rewound.paper.figures import FIGURES, PaperFigure, panels, pruning_order
from rewound.paper.networks import NETWORKS
from rewound.paper.panels import Panel, measured
from rewound.reports.look import Look, looks, mode_title, ratios
from rewound.reports.panel import (
    Cut,
    compression_axis,
    delta_axis,
    draw_outlines,
    draw_points,
    draw_published,
    epochs_axis,
    handles,
    published_mark,
    ratio_axis,
)
from rewound.reports.ranges import delta_label, panel_limits
from rewound.reports.sheet import STYLE, file_name, lay_out, save, told_trials

_SMALL: Final = {**STYLE, "font.size": 9, "axes.titlesize": 9.5}
_SIZES: Final = {1: (4.2, 2.3), 2: (3.0, 1.75), 3: (2.6, 1.75)}  # of a panel, in inches, by columns
_SMALLEST: Final = (2.3, 1.75)


@dataclass(frozen=True)
class Sheet:
    """One file to draw: a figure of the paper, its part about one recipe, or a panel alone."""

    name: str
    title: str
    figure: PaperFigure
    panels: tuple[Panel, ...]
    alone: bool = False

    @property
    def places(self) -> dict[tuple[int, int], Panel]:
        """The panels by line and column: one after the other, or each in the column of its pruning."""
        prunings = sorted({panel.measured.pruning for panel in self.panels}, key=pruning_order)
        found: dict[tuple[int, int], Panel] = {}
        line, last = 0, -1
        for panel in self.panels:
            in_turn = (last + 1) % self.figure.columns
            column = prunings.index(panel.measured.pruning) if self.figure.by_pruning else in_turn
            line, last = line + (column <= last), column
            found[line, column] = panel
        return found


def sheets(evidence: Evidence, figures: Iterable[PaperFigure] = tuple(FIGURES.values())) -> Iterator[Sheet]:
    """Every figure there are data for, each followed by its panels alone where it has several.

    A compared table is drawn over ours, hollow, where both have the cell.
    """
    found = measured(evidence)
    for figure in figures:
        made = panels(figure, found)
        number = figure.name.split("-")[1]
        for recipe in dict.fromkeys(panel.measured.recipe if figure.sheet_per_recipe else "" for panel in made):
            mine = tuple(panel for panel in made if recipe in ("", panel.measured.recipe))
            about = f"Figure {number}, {_network(recipe)}" if recipe else f"Figure {number}"
            yield Sheet(file_name(figure.name, recipe), f"{about}: {figure.title}", figure, mine)
        if len(made) > 1:
            yield from (_alone(figure, panel) for panel in made)


def _alone(figure: PaperFigure, panel: Panel) -> Sheet:
    where = panel.measured
    parts = [where.pruning, mode_title(where.iterative).lower(), *_ratio(panel)]
    name = f"{figure.name}/{file_name(where.recipe, *parts)}"
    return Sheet(name, ", ".join([_network(where.recipe), *parts]), figure, (panel,), alone=True)


def save_sheet(sheet: Sheet, out: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Draw one sheet into the folder `out`, once for each format."""
    figure = draw_sheet(sheet)
    return [save(figure, out / f"{sheet.name}.{suffix}") for suffix in formats]


def draw_sheet(sheet: Sheet) -> Figure:
    """Draw one sheet."""
    places = sheet.places
    lines, columns = (max(place[side] for place in places) + 1 for side in (0, 1))
    gap = 0.5 if len({_ylabel(panel) for panel in sheet.panels}) == 1 else 0.8  # room for a label between columns
    width, height = _SIZES.get(columns, _SMALLEST)
    with mpl.rc_context(_SMALL):
        figure = Figure(figsize=(1.0 + columns * width + (columns - 1) * gap, lines * height))
        named, cut = _looks(sheet), set[Cut]()
        sources = {dot.source for panel in sheet.panels for dot in panel.published}
        inside = sheet.panels[0].x == "compression" and (sheet.alone or len(sources) > 1)
        for place, axes in _axes(figure, lines, columns):
            if place not in places:
                axes.set_visible(False)
                continue
            panel = places[place]
            cut |= _draw(axes, panel, named, width, size=0.7 if columns > 3 else 0.85)
            _label(axes, sheet, place)
            if panel.published and inside:
                _name_source(axes, panel)
        legend = _legend(sheet, named, cut)
        legend += [] if inside else [published_mark(label=source) for source in sorted(sources)]
        lay_out(figure, sheet.title, _subtitle(sheet.panels), legend, (gap, 0.6), panel_height=height)
    return figure


def _axes(figure: Figure, lines: int, columns: int) -> Iterator[tuple[tuple[int, int], Axes]]:
    for line, row in enumerate(figure.subplots(lines, columns, squeeze=False)):
        for column, axes in enumerate(row):
            yield (line, column), axes


def _draw(axes: Axes, panel: Panel, named: dict[str, Look], inches: float, size: float) -> set[Cut]:
    where = panel.measured
    if panel.y == "speed-up":
        ratio_axis(axes, panel_limits(panel))
    else:
        delta_axis(axes, where.baseline, panel_limits(panel))
    at = {point.x for point in panel.points}
    if panel.x == "compression":
        compression_axis(axes, at, inches, [dot.density for dot in panel.published])
    else:
        epochs_axis(axes, at, where.epochs, inches, [dot.epochs or 0 for dot in panel.published])
    if panel.published:
        draw_published(axes, panel.published)
    cut = draw_points(axes, panel.curves, named, size)
    draw_outlines(axes, panel.theirs, named, size)
    return cut


def _label(axes: Axes, sheet: Sheet, place: tuple[int, int]) -> None:
    panel, (line, column) = sheet.places[place], place
    axes.set_title("" if sheet.alone else _title(panel, sheet))
    left = sheet.places.get((line, column - 1))
    if left is None or _ylabel(left) != _ylabel(panel):
        axes.set_ylabel(_ylabel(panel))
    if (line + 1, column) not in sheet.places:
        axes.set_xlabel("Compression ratio" if panel.x == "compression" else "Retraining epochs")


def _name_source(axes: Axes, panel: Panel) -> None:
    mark = published_mark(label=fill(panel.published[0].source, 24))
    axes.legend(handles=[mark], loc="lower left", fontsize=8, frameon=False, borderpad=0, handletextpad=0)


def _looks(sheet: Sheet) -> dict[str, Look]:
    named = looks(technique for panel in sheet.panels for technique in panel.curves)
    return {name: replace(look, label=sheet.figure.labels.get(name, look.label)) for name, look in named.items()}


def _legend(sheet: Sheet, named: dict[str, Look], cut: Collection[Cut]) -> list[Line2D | Patch]:
    first, compared = sheet.panels[0], any(panel.theirs for panel in sheet.panels)
    baseline = first.measured.baseline
    if first.y == "speed-up":
        baseline = replace(baseline, n=1)  # no band of the dense runs
    return handles(named, baseline, safe_zone=first.x == "time", cut=cut, compared=compared)


def _title(panel: Panel, sheet: Sheet) -> str:
    """What tells a panel from the others on its sheet."""
    where, others = panel.measured, [other.measured for other in sheet.panels]
    parts = [] if sheet.figure.sheet_per_recipe else [_network(where.recipe)]
    parts += [where.pruning] if {other.pruning for other in others} != {"unstructured"} else []
    parts += _ratio(panel)
    parts += [mode_title(where.iterative).lower()] if len({other.iterative for other in others}) > 1 else []
    return ", ".join(parts)


def _subtitle(shown: Sequence[Panel]) -> str:
    counts = {point.trials for panel in shown for point in panel.points}
    text = told_trials(counts, sum(panel.failed for panel in shown))
    text = text[:1].upper() + text[1:]
    if left_out := sum({id(panel.measured): panel.measured.left_out for panel in shown}.values()):
        text += f"; {left_out} higher ratios left out, as in the paper"
    return text


def _network(recipe: str) -> str:
    return NETWORKS.get(recipe, recipe)


def _ratio(panel: Panel) -> list[str]:
    return [] if panel.density is None else [ratios(panel.measured.densities)[panel.density]]


def _ylabel(panel: Panel) -> str:
    return "Speed-up" if panel.y == "speed-up" else delta_label(panel.measured.baseline)
