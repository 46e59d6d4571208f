"""Which figures a report has, in which formats, and drawing them as far as the table has data.

`default`: three figures for each recipe and way of pruning: against compression, against retraining time, and at the
full time. `paper`: the paper's figures, in the folder `paper`, with `points.csv`, the numbers in them; one of them
alone by its name. `none`: only tables and the page. A compared table is drawn over ours, hollow, where both have the
cell.
"""

import hashlib
import multiprocessing
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, TypeAlias

from rich import get_console
from rich.progress import track

from rewound.conclusions.evidence import Evidence
from rewound.conclusions.findings import at_full_time, is_algorithm_1
from rewound.conclusions.paper.figures import FIGURES, PaperFigure, panels
from rewound.conclusions.paper.networks import NETWORKS
from rewound.conclusions.paper.panels import Measured, Panel, best, every_time, full_time, measured, write_points
from rewound.foundations.errors import InputError
from rewound.foundations.owners import script_hidden, usable_cores
from rewound.reports.look import looks, mode_title, panel_limits, pruning_title, ratios
from rewound.reports.sheets import Sheet, save_sheet

_WORTH_PROCESSES: Final = 10  # sheets: drawing them takes about as long as processes take to start
_SIZES: Final = {1: (300.0, 165.0), 2: (216.0, 126.0), 3: (187.0, 126.0)}  # of a panel of the paper's, by columns
_SMALLEST: Final = (165.0, 126.0)
_LONGEST: Final = 80  # characters of a part of a file name
FORMATS: Final = ("png", "svg", "pdf")
Say: TypeAlias = Callable[[str], None]
"""Takes a line for what is left out."""


@dataclass(frozen=True)
class Drawing:
    """What was asked for."""

    figures: str = "default"
    formats: tuple[str, ...] = ("png",)

    def __post_init__(self) -> None:
        if self.figures not in (known := ("default", "paper", "none", *FIGURES)):
            raise InputError(f"unknown figures {self.figures!r}; known: {', '.join(known)}")
        for name in self.formats:
            if name not in FORMATS:
                raise InputError(f"unknown format {name!r} of figures; known: {', '.join(FORMATS)}")

    @property
    def of_the_paper(self) -> dict[str, PaperFigure]:
        """The paper's figures that are asked for, by name."""
        return FIGURES if self.figures == "paper" else {n: f for n, f in FIGURES.items() if n == self.figures}

    def check(self, evidence: Evidence) -> None:
        """An error if the paper's figures are asked for and the rows have no data for any of them."""
        asked = self.of_the_paper
        found = measured(replace(evidence, compared_with=())) if asked else []
        if asked and not any(panels(figure, found) for figure in asked.values()):
            which = "the paper's figures" if len(asked) > 1 else self.figures
            raise InputError(
                f"nothing to draw: none of the {len(evidence.rows)} rows belongs to {which}; try the default figures"
            )


DEFAULT: Final = Drawing()


def draw_figures(evidence: Evidence, out: Path, say: Say, drawing: Drawing = DEFAULT) -> list[Path]:
    """Draw what was asked for into the folder `out`."""
    with figures_under_way(evidence, out, say, drawing) as figures:
        return figures()


@contextmanager
def figures_under_way(evidence: Evidence, out: Path, say: Say, drawing: Drawing) -> Iterator[Callable[[], list[Path]]]:
    """Inside, figures are drawn in the background; call what is given to wait for their files.

    A process per core draws where there are enough figures to pay for starting them; else this one does, when called.
    """
    if drawing.figures == "none":
        yield list
        return
    paths: list[Path] = []
    if drawing.figures == "default":
        sheets = list(standard_sheets(evidence))
    else:
        drawing.check(evidence)
        out = out / "paper"
        sheets = list(paper_sheets(evidence, drawing.of_the_paper.values()))
        _say_missing(drawing, sheets, say)
        points = ((sheet.figure, panel) for sheet in sheets if not sheet.alone for panel in sheet.panels)
        paths.append(write_points(points, out / "points.csv"))
    save = partial(save_sheet, out=out, formats=drawing.formats)

    def shown(files: Iterable[list[Path]]) -> list[Path]:
        hidden = drawing.figures == "default" or not get_console().is_terminal
        try:
            done = track(files, "drawing", len(sheets), transient=True, disable=hidden)
            return [*paths, *chain.from_iterable(done)]
        except ModuleNotFoundError as error:
            say(f"no figures: {error.name} is missing; pip install 'rewound[figures]'")
            return paths

    workers = min(usable_cores(), len(sheets) // _WORTH_PROCESSES)
    if workers < 2:
        yield lambda: shown(map(save, sheets))
        return
    with _pool(workers) as pool:
        try:
            with script_hidden():
                files = pool.map(save, sheets)
            yield lambda: shown(files)
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, nobody waits for the rest


def _pool(workers: int) -> ProcessPoolExecutor:
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    deaf = (signal.signal, (signal.SIGINT, signal.SIG_IGN))  # Ctrl-C is for this process alone
    return ProcessPoolExecutor(workers, context, *deaf)


def _say_missing(drawing: Drawing, sheets: Iterable[Sheet], say: Say) -> None:
    there, wanted = {sheet.figure for sheet in sheets}, drawing.of_the_paper
    if missing := [name for name in wanted if name not in there]:
        numbers = ", ".join(name.split("-")[1] for name in missing)
        say(f"no data for {len(missing)} of the paper's {len(wanted)} figures: {numbers}")


def standard_sheets(evidence: Evidence) -> Iterator[Sheet]:
    """The default figures, as far as the rows have data for them."""
    found = measured(evidence)
    if not found:
        raise InputError(f"nothing to draw: none of the {len(evidence.rows)} rows is a finished, retrained network")
    for recipe, pruning in dict.fromkeys((each.recipe, each.pruning) for each in found):
        modes = sorted(
            (each for each in found if (each.recipe, each.pruning) == (recipe, pruning)),
            key=lambda each: each.iterative,
        )
        for sheet in _standard(modes):
            name = file_name(recipe, pruning, sheet.name)
            yield replace(sheet, name=name, title=f"{recipe}, {pruning_title(pruning)}")


def _standard(modes: Sequence[Measured]) -> Iterator[Sheet]:
    pruned = [replace(each.only(lambda _, density: density < 1), failed=each.failed) for each in modes]
    if shown := [panel for each in pruned if each.cells for panel in best(each)]:
        yield _against_compression("best", shown, "Best retraining time, by validation")
    if shown := list(every_time(modes[0])):
        yield _against_time(shown)
    for panel in full_time(pruned[-1]) if pruned[-1].iterative and pruned[-1].cells else ():
        times = {name: curve[0].retrain_epochs for name, curve in panel.curves.items()}
        labels = {name: f"{look.label}, t = {times[name]:g}" for name, look in looks(times).items()}
        exact = is_algorithm_1(at_full_time(pruned[-1].cells, pruned[-1].epochs))
        name, what = ("algorithm-1", "Algorithm 1 and its rivals") if exact else ("full-time", _AT_ONE_TIME)
        yield replace(_against_compression(name, [panel], what), labels=labels)


_AT_ONE_TIME: Final = "Each technique at one retraining time"


def _against_compression(name: str, shown: Sequence[Panel], about: str) -> Sheet:
    titles = tuple(mode_title(panel.measured.iterative) for panel in shown)
    size = (330.0, 180.0) if len(shown) == 1 else (260.0, 180.0)
    return Sheet(name, "", _sharing_axis(shown), titles, len(shown), about, size)


def _against_time(shown: Sequence[Panel]) -> Sheet:
    columns, measured = _columns(len(shown)), shown[0].measured
    labels = ratios(measured.densities)
    titles = tuple(f"{labels[density]}{', dense control' if density == 1 else ''}" for density in map(_density, shown))
    rows = [_sharing_axis(shown[first : first + columns]) for first in range(0, len(shown), columns)]
    about = f"{mode_title(measured.iterative)}, by retraining time"
    return Sheet("times", "", tuple(chain(*rows)), titles, columns, about, (150.0, 100.0), marks=0.8)


def _columns(panels: int) -> int:
    if panels <= 5:
        return panels
    return min((5, 4, 3) if panels < 10 else (5, 4), key=lambda columns: -panels % columns)  # least left empty


def _sharing_axis(shown: Sequence[Panel]) -> tuple[Panel, ...]:
    limits = [panel_limits(panel) for panel in shown]
    shared = min(low for low, _ in limits), max(high for _, high in limits)
    return tuple(replace(panel, limits=shared) for panel in shown)


def paper_sheets(evidence: Evidence, figures: Iterable[PaperFigure] = tuple(FIGURES.values())) -> Iterator[Sheet]:
    """Every figure of the paper there are data for, each followed by its panels alone where it has several."""
    found = measured(evidence)
    for figure in figures:
        shown = panels(figure, found)
        number = figure.name.split("-")[1]
        for recipe in dict.fromkeys(panel.measured.recipe if figure.sheet_per_recipe else "" for panel in shown):
            own = [panel for panel in shown if recipe in ("", panel.measured.recipe)]
            about = f"Figure {number}, {_network(recipe)}" if recipe else f"Figure {number}"
            titles = [_panel_title(panel, own, figure) for panel in own]
            yield _paper_sheet(figure, file_name(figure.name, recipe), f"{about}: {figure.title}", own, titles)
        for panel in shown if len(shown) > 1 else ():
            parts = [panel.measured.pruning, mode_title(panel.measured.iterative).lower(), *_ratio(panel)]
            name = f"{figure.name}/{file_name(panel.measured.recipe, *parts)}"
            title = ", ".join([_network(panel.measured.recipe), *parts])
            yield replace(_paper_sheet(figure, name, title, [panel], [""]), alone=True)


def _paper_sheet(figure: PaperFigure, name: str, title: str, shown: Sequence[Panel], titles: Sequence[str]) -> Sheet:
    prunings = len({panel.measured.pruning for panel in shown})
    columns = prunings if figure.by_pruning else min(figure.columns, len(shown))
    return Sheet(
        name,
        title,
        tuple(shown),
        tuple(titles),
        columns,
        size=_SIZES.get(columns, _SMALLEST),
        marks=0.7 if columns > 3 else 0.85,
        labels=figure.labels,
        by_pruning=figure.by_pruning,
        figure=figure.name,
    )


def _panel_title(panel: Panel, others: Iterable[Panel], figure: PaperFigure) -> str:
    """What tells a panel from the others on its sheet."""
    where, on_sheet = panel.measured, [other.measured for other in others]
    parts = [] if figure.sheet_per_recipe else [_network(where.recipe)]
    parts += [where.pruning] if {other.pruning for other in on_sheet} != {"unstructured"} else []
    parts += _ratio(panel)
    parts += [mode_title(where.iterative).lower()] if len({other.iterative for other in on_sheet}) > 1 else []
    return ", ".join(parts)


def _network(recipe: str) -> str:
    return NETWORKS[recipe].title if recipe in NETWORKS else recipe


def _ratio(panel: Panel) -> list[str]:
    return [] if panel.density is None else [ratios(panel.measured.densities)[panel.density]]


def _density(panel: Panel) -> float:
    assert panel.density is not None
    return panel.density


def file_name(*parts: str) -> str:
    """The name of a file, of letters and digits whatever the parts contain.

    A part that is long, or has wildcards, which no file name can have, ends in a digest.

    >>> file_name("mine:Task", "", "9.31×"), file_name("unstructured skip=stem.*")
    ('mine-Task-9.31x', 'unstructured-skip-stem.-da1a9c')
    """
    return "-".join(_plain(part) for part in parts if part)


def _plain(part: str) -> str:
    plain = re.sub(r"[^\w.-]+", "-", part.replace("×", "x"))
    if len(plain) <= _LONGEST and not re.search(r"[*?,\[]", part):
        return plain
    return f"{plain[:_LONGEST].rstrip('-')}-{hashlib.blake2b(part.encode(), digest_size=3).hexdigest()}"
