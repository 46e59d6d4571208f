"""Which figures a report has, in which formats, and drawing them as far as the table has data.

`default`: three figures for each recipe and way of pruning. `paper`: the paper's figures, in the folder `paper`, with
`points.csv`, the numbers in them; one of them alone by its name. `none`: only tables and the page.
"""

import multiprocessing
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Final, TypeVar

from rich.console import Console
from rich.progress import track

from rewound.conclusions.cell import cells
from rewound.conclusions.findings import longest_times
from rewound.errors import InputError
from rewound.paper.figures import FIGURES, PaperFigure, panels
from rewound.paper.measured import measured
from rewound.paper.points import write_points
from rewound.tables.results import Row

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

    def check(self, rows: Sequence[Row], epochs: Mapping[str, float] | None = None) -> None:
        """An error if the paper's figures are asked for and the rows have no data for any of them."""
        asked = self.of_the_paper
        found = measured(rows, epochs=epochs) if asked else []
        if asked and not any(panels(figure, found) for figure in asked.values()):
            which = "the paper's figures" if len(asked) > 1 else self.figures
            raise InputError(f"nothing to draw: none of the {len(rows)} rows belongs to {which}; try --figures default")


DEFAULT: Final = Drawing()


def draw_figures(
    rows: list[Row],
    out: Path,
    console: Console,
    drawing: Drawing = DEFAULT,
    theirs: Sequence[Row] = (),
    epochs: Mapping[str, float] | None = None,
) -> list[Path]:
    """Draw what was asked for into the folder `out`; the rows of `theirs` over ours. `epochs` gives T by recipe."""
    if drawing.figures == "none":
        return []
    if drawing.figures == "default":
        return _told(console, lambda: _default_figures(rows, out, drawing.formats, epochs or {}, theirs))
    return _told(console, lambda: _of_the_paper(rows, out / "paper", console, drawing, theirs, epochs))


@contextmanager
def figures_under_way(
    rows: list[Row],
    out: Path,
    console: Console,
    drawing: Drawing = DEFAULT,
    theirs: Sequence[Row] = (),
    epochs: Mapping[str, float] | None = None,
) -> Iterator[Callable[[], list[Path]]]:
    """`draw_figures` while something else is done; what it gives waits for the files.

    The default figures of a large table are drawn by a process per core; all others when they are waited for.
    """
    groups = _groups(rows)
    workers = min(os.cpu_count() or 1, len(groups))
    if drawing.figures != "default" or len(rows) < _WORTH_PROCESSES or workers < 2:
        yield lambda: draw_figures(rows, out, console, drawing, theirs, epochs)
        return
    longest = longest_times(cells(rows)) | dict(epochs or {})  # over all ways of pruning
    with _pool(workers) as pool:
        try:
            largest = sorted(groups, key=len, reverse=True)  # first, so that no core waits for it in the end
            parts = [pool.submit(_default_figures, group, out, drawing.formats, longest, theirs) for group in largest]
            yield lambda: _told(console, lambda: sorted(path for part in parts for path in part.result()))
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, nobody waits for the rest


def _told(console: Console, work: Callable[[], list[Path]]) -> list[Path]:
    try:
        return work()
    except ModuleNotFoundError as error:
        console.print(f"no figures: {error.name} is missing; pip install 'rewound[figures]'", markup=False)
        return []


def _default_figures(
    rows: list[Row], out: Path, formats: Sequence[str], epochs: Mapping[str, float], theirs: Sequence[Row]
) -> list[Path]:
    from rewound.pages.figures import draw

    return draw(rows, out, formats, epochs, theirs)


def _groups(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each recipe and way of pruning with a finished run, and its dense ones."""
    pruned: dict[tuple[str, str], list[Row]] = defaultdict(list)
    dense: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        (dense[row.recipe] if row.dense else pruned[row.recipe, row.pruning]).append(row)
    finished = (key for key, group in sorted(pruned.items()) if any(row.test is not None for row in group))
    return [[*dense[recipe], *pruned[recipe, pruning]] for recipe, pruning in finished]


def _of_the_paper(
    rows: list[Row],
    out: Path,
    console: Console,
    drawing: Drawing,
    theirs: Sequence[Row],
    epochs: Mapping[str, float] | None,
) -> list[Path]:
    from rewound.pages.paper import save_sheet, sheets

    drawing.check(rows, epochs)
    wanted = drawing.of_the_paper
    drawn = list(sheets(rows, wanted.values(), theirs, epochs))
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
    context.set_forkserver_preload(["rewound.pages.figures"])  # matplotlib is imported once, not by each
    return context
