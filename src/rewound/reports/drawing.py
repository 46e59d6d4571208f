"""Which figures a report has, in which formats, and drawing them as far as the table has data.

`default`: three figures for each recipe and way of pruning. `paper`: the paper's figures, in the folder `paper`, with
`points.csv`, the numbers in them; one of them alone by its name. `none`: only tables and the page.
"""

import multiprocessing
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Final, TypeVar

from rich.console import Console
from rich.progress import track

from rewound.conclusions.evidence import Evidence
from rewound.errors import InputError
from rewound.paper.figures import FIGURES, PaperFigure, panels
from rewound.paper.panels import measured, write_points
from rewound.tables.results import Row, Tables

T = TypeVar("T")
R = TypeVar("R")
_WORTH_A_PROCESS: Final = 10  # sheets: about the time that a process takes to start
_WORTH_PROCESSES = 1_000  # rows, likewise
FORMATS: Final = ("png", "svg", "pdf")


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
        found = measured(replace(evidence, theirs=())) if asked else []
        if asked and not any(panels(figure, found) for figure in asked.values()):
            which = "the paper's figures" if len(asked) > 1 else self.figures
            raise InputError(
                f"nothing to draw: none of the {len(evidence.rows)} rows belongs to {which}; try --figures default"
            )


DEFAULT: Final = Drawing()


def draw_figures(evidence: Evidence, out: Path, console: Console, drawing: Drawing = DEFAULT) -> list[Path]:
    """Draw what was asked for into the folder `out`."""
    if drawing.figures == "none":
        return []
    if drawing.figures == "default":
        return _drawn_or_told(console, lambda: _default_figures(evidence, out, drawing.formats))
    return _drawn_or_told(console, lambda: _of_the_paper(evidence, out / "paper", console, drawing))


@contextmanager
def figures_under_way(
    evidence: Evidence, out: Path, console: Console, drawing: Drawing = DEFAULT
) -> Iterator[Callable[[], list[Path]]]:
    """Inside, figures are drawn in the background; call what is given to wait for their files.

    The default figures of a large table are drawn by a process per core; all others when they are waited for.
    """
    parts = _parts(evidence)
    workers = min(os.cpu_count() or 1, len(parts))
    if drawing.figures != "default" or len(evidence.rows) < _WORTH_PROCESSES or workers < 2:
        yield lambda: draw_figures(evidence, out, console, drawing)
        return
    with _pool(workers) as pool:
        try:
            parts.sort(key=lambda part: -len(part.rows))  # the largest first, so that no core waits for it in the end
            drawn = [pool.submit(_default_figures, part, out, drawing.formats) for part in parts]
            yield lambda: _drawn_or_told(console, lambda: sorted(path for files in drawn for path in files.result()))
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, nobody waits for the rest


def _drawn_or_told(console: Console, work: Callable[[], list[Path]]) -> list[Path]:
    try:
        return work()
    except ModuleNotFoundError as error:
        console.print(f"no figures: {error.name} is missing; pip install 'rewound[figures]'", markup=False)
        return []


def _default_figures(evidence: Evidence, out: Path, formats: Sequence[str]) -> list[Path]:
    from rewound.reports.standard import draw

    return draw(evidence, out, formats)


def _parts(evidence: Evidence) -> list[Evidence]:
    """What is known of each subject with a finished run; T is that of all of them."""
    pruned: dict[tuple[str, str], list[Row]] = defaultdict(list)
    dense: dict[str, list[Row]] = defaultdict(list)
    for row in evidence.rows:
        (dense[row.recipe] if row.dense else pruned[row.recipe, row.pruning]).append(row)
    finished = (key for key, group in sorted(pruned.items()) if any(row.test is not None for row in group))
    return [
        replace(evidence, tables=Tables([*dense[recipe], *pruned[recipe, pruning]]), training_epochs=evidence.epochs)
        for recipe, pruning in finished
    ]


def _of_the_paper(evidence: Evidence, out: Path, console: Console, drawing: Drawing) -> list[Path]:
    from rewound.reports.paper import save_sheet, sheets

    drawing.check(evidence)
    wanted = drawing.of_the_paper
    drawn = list(sheets(evidence, wanted.values()))
    if missing := [name for name in wanted if name not in {sheet.figure.name for sheet in drawn}]:
        numbers = ", ".join(name.split("-")[1] for name in missing)
        console.print(f"no data for {len(missing)} of the paper's {len(wanted)} figures: {numbers}")
    points = ((sheet.figure.name, panel) for sheet in drawn if not sheet.alone for panel in sheet.panels)
    paths = [write_points(points, out / "points.csv")]
    saved = _in_parallel(partial(save_sheet, out=out, formats=drawing.formats), drawn)
    for files in track(saved, "drawing", len(drawn), console=console, transient=True, disable=not console.is_terminal):
        paths += files
    return paths


def _in_parallel(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """The results in order, from a process per core where there is enough to do to pay for starting them."""
    workers = min(os.cpu_count() or 1, len(items) // _WORTH_A_PROCESS)
    if workers < 2:
        yield from map(work, items)
        return
    with _pool(workers) as pool:
        yield from pool.map(work, items)


def _pool(workers: int) -> ProcessPoolExecutor:
    deaf = (signal.signal, (signal.SIGINT, signal.SIG_IGN))  # Ctrl-C is for this process alone
    return ProcessPoolExecutor(workers, _processes(), *deaf)


def _processes() -> BaseContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rewound.reports.standard"])  # matplotlib is imported once, not by each
    return context
