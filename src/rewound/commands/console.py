"""Where commands print: a progress bar while they work, and the files of a report in the end."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rewound.pages.page import PAGE

console = Console()


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress bar; Ctrl-C stops cleanly and says how to continue."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console) as bar:
            yield bar
    except KeyboardInterrupt:
        again = shlex.join(["rewound", *sys.argv[1:]])
        console.print(f"stopped; nothing finished is lost, continue with: {again}", soft_wrap=True, markup=False)
        raise typer.Exit(1) from None


def say_files(paths: Sequence[Path]) -> None:
    """Name the files of a report, and the page among them."""
    names = [str(path.relative_to(paths[0].parent)) for path in paths]
    shown = names if len(names) <= 12 else [*names[:4], f"and {len(names) - 4} more"]
    console.print(f"report: {paths[0].parent} ({', '.join(shown)})", soft_wrap=True)
    for page in (path for path in paths if path.name == PAGE):
        console.print(f"open in a browser: {page}", soft_wrap=True)
