"""What commands print: how far they are, the files of a report, and what went wrong.

A command that fails prints one sentence in red and ends with an exit code. 0: done. 1: interrupted, or something
outside the request failed. 2: the request cannot be honoured as given.
"""

import math
import re
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rewound.foundations.errors import Diverged, Failed, Fault, InputError, fault_of
from rewound.foundations.names import unknown
from rewound.foundations.quantities import spoken
from rewound.method.choices import instead_of
from rewound.reports.look import printable
from rewound.reports.writing import Report

Show = Callable[[float, float], None]
"""Takes how many steps are done, and of how many."""
LINE = 30.0
"""Seconds between lines of progress where there is no terminal."""
_MISUSED: Final[type[Exception]] = typer.BadParameter.__mro__[1]  # click's UsageError, which typer has a copy of
_KINDS: Final = {"float": "a number", "number": "a number", "integer": "a whole number"}


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
def progress_of(name: str, unit: str = "steps") -> Iterator[Show]:
    """Gives a function that shows how far something is; Ctrl-C stops cleanly and says how to continue."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if console.is_terminal:
            with _bar(name, unit) as show:
                yield show
        else:
            yield progress_lines(name, say, unit)
    except KeyboardInterrupt:
        say(f"stopped; nothing finished is lost, continue with: {shlex.join(['rewound', *sys.argv[1:]])}")
        raise typer.Exit(1) from None
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _bar(name: str, unit: str) -> Iterator[Show]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
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


def progress_lines(name: str, say: Callable[[str], None], unit: str = "steps") -> Show:
    """Says a line at the beginning and then one now and then."""
    first: tuple[float, float] | None = None
    last_line, moves = -math.inf, False

    def show(steps: float, total: float) -> None:
        nonlocal first, last_line, moves
        now = time.monotonic()
        if first is None or (not moves and steps > first[1]):
            # Counted from the first steps on: what comes before them, such as compilation, does not come again.
            first, moves = (now, steps), first is not None
        if steps >= total or now - last_line < LINE:
            return
        last_line, seconds, done = now, now - first[0], steps - first[1]
        left = f", about {spoken((total - steps) * seconds / done)} left" if done > 0 else ""
        say(f"{name}: {steps:,.0f} of {total:,.0f} {unit}{left}")

    return show


def two_columns(title: str, lines: Iterable[tuple[str, str]]) -> Table:
    """A table of names and values."""
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in lines:
        table.add_row(name, value)
    return table


def print_report(report: Report) -> None:
    """Print the summary of a report, and name its files, the page among them."""
    console.print(report.summary())
    names = [str(path.relative_to(report.folder)) for path in report.files]
    shown = names if len(names) <= 12 else [*names[:4], f"and {len(names) - 4} more"]
    say(f"report: {report.folder} ({', '.join(shown)})")
    if report.page is not None:
        say(f"open in a browser: {report.page}")


@contextmanager
def exits() -> Iterator[None]:
    """Turn an error inside into a sentence and an exit code; an error nobody foresaw keeps its traceback."""
    show = warnings.showwarning

    def show_warning(message: Warning | str, category: type[Warning], filename: str, *place: Any, **given: Any) -> None:
        if Path(filename).parent.name == "typer":  # the line that called this package: it says nothing to a user
            PlainConsole(stderr=True).print(f"warning: {message}", soft_wrap=True, highlight=False)
        else:
            show(message, category, filename, *place, **given)

    try:
        warnings.showwarning = show_warning
        yield
    except InputError as error:
        _print_in_red(f"error: {error}")
        sys.exit(2)
    except _MISUSED as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # help was printed
            _print_in_red(f"error: {_misuse(error)}")
        sys.exit(2)
    except Exception as error:
        fault = error if isinstance(error, Fault) else fault_of(error)
        if fault is None and not isinstance(error, Failed | Diverged | OSError):
            raise
        for line in fault.where.splitlines() if fault is not None else ():
            _print_in_red(line)
        _print_in_red(f"failed: {fault or _reason(error)}")
        sys.exit(1)
    finally:
        warnings.showwarning = show


def _misuse(error: Any) -> str:
    """What is wrong with the words of a command, in one sentence."""
    context, param, message = error.ctx, getattr(error, "param", None), str(error.message)
    where = context.command_path if context else "rewound"
    if type(error).__name__ == "NoSuchOption":
        known = [word for param in context.command.params for word in param.opts if word.startswith("--")]
        given = _given_for(error.option_name)
        number = float(given) if re.fullmatch(r"\d*\.?\d+", given) else None
        hint = instead_of(error.option_name.strip("-"), number, "--compression {:.6g}")
        if hint and "--compression" in known:
            return f"{where} has no option {error.option_name}; {hint}"
        return unknown(f"option of {where}", error.option_name, known)
    if type(error).__name__ == "MissingParameter" and param is not None:
        example = str(context.command.epilog).removeprefix("Example: ")
        return f"{where} needs {_name(param)}, {param.help}; for example: {example}"
    if found := re.match(r"No such command '(.*?)'", message, re.DOTALL):
        return unknown("command", found[1], context.command.commands)
    if param is not None and (found := re.search(r"valid (float|number|integer)", message)):
        return f"{_name(param)} must be {_KINDS[found[1]]}, not {_given_for(param.opts[0])!r}"
    named = f"{_name(param)}: " if param is not None else ""
    return f"{named}{message[:1].lower()}{message[1:].rstrip('.')}; see {where} --help"


def _name(param: Any) -> str:
    return str(param.opts[0]) if param.opts[0].startswith("-") else str(param.name).upper()


def _given_for(option: str) -> str:
    """The word that was given for an option."""
    words = sys.argv[1:]
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else following
    return ""


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"cannot use {error.filename}: {error.strerror}"
    return str(error)


def _print_in_red(text: str) -> None:
    PlainConsole(stderr=True).print(text, style="red", soft_wrap=True, highlight=False)
