"""Where commands print: how far they are while they work, and the files of a report in the end."""

import math
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

from rewound.foundations.quantities import spoken
from rewound.reports.look import printable
from rewound.reports.page import PAGE

Show = Callable[[float, float], None]
"""Takes how many steps are done, and of how many."""
LINE = 30.0
"""Seconds between lines of progress where there is no terminal."""


class PlainConsole(Console):
    """Prints text as text, whoever wrote it: names in tables and files may hold codes that command a terminal.

    Control characters, ends of lines among them, are shown as they are written in Python. rich itself would make a
    picture of `:boom:` in `mine:boom:`, and a style of the brackets in a path `runs[1]`.
    """

    def __init__(self, *, file: IO[str] | None = None, width: int | None = None, stderr: bool = False) -> None:
        super().__init__(file=file, width=width, stderr=stderr, emoji=False, markup=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text) and not renderable.plain.isprintable():
            renderable = Text(printable(renderable.plain), renderable.style)
        return super().render(renderable, options)


console = PlainConsole()


def say(text: str) -> None:
    """One line, whatever is in it."""
    console.print(text, soft_wrap=True)


@contextmanager
def progress_of(name: str) -> Iterator[Show]:
    """Shows how far something is, from the first time it is told; Ctrl-C stops cleanly and says how to continue."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if console.is_terminal:
            with _bar(name) as show:
                yield show
        else:
            yield _lines(name)
    except KeyboardInterrupt:
        say(f"stopped; nothing finished is lost, continue with: {shlex.join(['rewound', *sys.argv[1:]])}")
        raise typer.Exit(1) from None
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _bar(name: str) -> Iterator[Show]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console)
    task = bar.add_task(name, total=None)

    def show(steps: float, total: float) -> None:
        bar.update(task, completed=steps, total=total)
        bar.start()

    try:
        yield show
    finally:
        if bar.live.is_started:  # stopping what never started leaves an empty line
            bar.stop()


def _lines(name: str) -> Show:
    """A line at the beginning and then one now and then."""
    first: tuple[float, float] | None = None
    told, moves = -math.inf, False

    def show(steps: float, total: float) -> None:
        nonlocal first, told, moves
        now = time.monotonic()
        if first is None or (not moves and steps > first[1]):
            # Counted from the first steps on: what comes before them, such as compilation, does not come again.
            first, moves = (now, steps), first is not None
        if steps >= total or now - told < LINE:
            return
        told, seconds, done = now, now - first[0], steps - first[1]
        left = f", about {spoken((total - steps) * seconds / done)} left" if done > 0 else ""
        say(f"{name}: {steps:,.0f} of {total:,.0f} steps{left}")

    return show


def say_files(paths: Sequence[Path]) -> None:
    """Name the files of a report, and the page among them."""
    names = [str(path.relative_to(paths[0].parent)) for path in paths]
    shown = names if len(names) <= 12 else [*names[:4], f"and {len(names) - 4} more"]
    console.print(f"report: {paths[0].parent} ({', '.join(shown)})", soft_wrap=True)
    for page in (path for path in paths if path.name == PAGE):
        console.print(f"open in a browser: {page}", soft_wrap=True)
