"""How a command ends when something goes wrong: a sentence in red, and an exit code.

0: done. 1: interrupted, or something outside the request failed. 2: the request cannot be honoured as given.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import typer

from rewound.commands.console import PlainConsole
from rewound.foundations.errors import Diverged, Failed, InputError
from rewound.foundations.faults import Fault, fault_of
from rewound.foundations.names import unknown
from rewound.method.algorithm import instead_of

_MISUSED: Final[type[Exception]] = typer.BadParameter.__mro__[1]  # click's UsageError, which typer has a copy of
_KINDS: Final = {"float": "a number", "number": "a number", "integer": "a whole number"}


@contextmanager
def exits() -> Iterator[None]:
    """Turn an error inside into a sentence and an exit code; an error nobody foresaw keeps its traceback."""
    try:
        yield
    except InputError as error:
        _tell(f"error: {error}")
        sys.exit(2)
    except _MISUSED as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # help was printed
            _tell(f"error: {_said(error)}")
        sys.exit(2)
    except Exception as error:
        fault = error if isinstance(error, Fault) else fault_of(error)
        if fault is None and not isinstance(error, Failed | Diverged | OSError):
            raise
        for line in fault.where.splitlines() if fault is not None else ():
            _tell(line)
        _tell(f"failed: {fault or _reason(error)}")
        sys.exit(1)


def _said(error: Any) -> str:
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


def _tell(text: str) -> None:
    PlainConsole(stderr=True).print(text, style="red", soft_wrap=True, highlight=False)
