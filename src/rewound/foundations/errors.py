"""What went wrong, said to a person: what was given, the limit, the remedy, in one sentence.

An error in a user's recipe, rule or score is a `Fault`: it comes with the lines of their code that lead to it.
"""

import os
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from os import PathLike
from pathlib import Path


class InputError(ValueError):
    """A request that cannot be honoured as given; the command line prints it and exits with 2."""


class Failed(RuntimeError):
    """Work that could not be done though the request was in order; the command line prints it and exits with 1."""


class Diverged(ArithmeticError):
    """Training produced a loss, or in a user's own loop weights, that are not finite numbers.

    `where` begins the sentence, if there is more to say. An own loop has a `text` instead, and its `step` is in epochs.
    """

    def __init__(self, step: int, loss: float, where: str = "", text: str = "") -> None:
        super().__init__(text or f"{where}the loss became {loss} by step {step}")
        self.step = step
        self.loss = loss
        self.where = where
        self.text = text

    def __reduce__(self) -> tuple[type["Diverged"], tuple[int, float, str, str]]:
        return type(self), (self.step, self.loss, self.where, self.text)


def as_number(name: str, value: object) -> float:
    """What was given for `name`, if it is a number.

    >>> as_number("compression", 10)
    10.0
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} must be a number, not {shown(value)}{_remedy(value)}")
    return float(value)


def as_whole(name: str, value: object, order: str = "") -> int:
    """What was given for `name`, if it is a whole number; `order` is for one who has swapped arguments.

    >>> as_whole("training_epochs", 90)
    90
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} must be a whole number, not {shown(value)}{_remedy(value, order)}")
    return int(value)


def as_path(name: str, value: object) -> Path:
    """What was given for `name`, if it is a path; a URL would be one, to a folder called `s3:`.

    >>> as_path("checkpoint", "run").name
    'run'
    """
    if not isinstance(value, str | PathLike) or not str(value):
        raise InputError(f"{name} must be a path, not {shown(value)}")
    if re.match(r"[a-z][a-z0-9+.-]+:(/|$)", str(path := Path(value)), re.IGNORECASE):
        url = value if isinstance(value, str) else str(path).replace(":/", "://", 1)  # a Path has lost a slash
        raise InputError(f"{name} must be a path, not the URL {url}; mount it and give its path")
    return path


def check_kind(name: str, value: object, kinds: type | tuple[type, ...], remedy: str) -> None:
    """An error if what was given for `name` is of another kind than its type says.

    >>> check_kind("model", None, (list, tuple), "give its layers")
    Traceback (most recent call last):
    rewound.foundations.errors.InputError: model must be of type list or tuple, not None; give its layers
    """
    if not isinstance(value, kinds):
        known = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
        raise InputError(f"{name} must be of type {known}, not {shown(value)}; {remedy}")


def warn(text: str) -> None:
    """Warn at the line that called this package, however deep inside it the reason was found."""
    frame, level = sys._getframe(1), 2
    own = ("rewound.", "contextlib")  # a context of this package ends inside contextlib
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(own):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def shown(value: object) -> str:
    """A value as it is written if that says something in a few words, else its type: a network takes a page.

    >>> shown("ten"), shown(dict), shown(list(range(100))), shown(object())
    ("'ten'", 'the class dict', 'list', 'object')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    return type(value).__name__ if len(text) > 60 or "\n" in text or text.startswith("<") else text


def _remedy(value: object, order: str = "") -> str:
    if isinstance(value, str):
        return "; leave out the quotes"
    return f"; {order}" if order and not isinstance(value, Real) else ""


def first_line(error: Exception) -> str:
    """What an error says, in a line; those of compilers have pages."""
    return str(error).strip().partition("\n")[0]


def in_a_line(error: Exception) -> str:
    """The kind of an error, and what it says.

    >>> in_a_line(TypeError("no number\\nbut a word"))
    'TypeError: no number'
    """
    return f"{type(error).__name__}: {first_line(error)}"


def few(names: Sequence[str], most: int = 5) -> str:
    """The first of many names, and how many more there are.

    >>> few(["a", "b"]), few(list("abcdefg"))
    ('a, b', 'a, b, c, d, e and 2 more')
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


_LIBRARIES = [str(Path(__file__).parents[1]), *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))]
_NOT_THEIRS = ("<", *(f"{folder}{os.sep}" for folder in _LIBRARIES))


class Fault(Failed):
    """What went wrong, and `where`: lines of a traceback."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(what)
        self.where = where
        self.add_note(where)  # for a traceback in Python, which has only our own lines where a worker has failed


def fault_of(error: Exception) -> Fault | None:
    """The error as a fault of the user's code, or None if none of that is on the way to it."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
    if not theirs:
        return None
    what = "".join(traceback.format_exception_only(error)).strip()
    return Fault(what, "".join(traceback.format_list(theirs)))


def error_words(error: Exception) -> list[str]:
    """An error of a worker as words, of which `error_from` makes it again in the process that waits for the worker.

    >>> error_from(error_words(InputError("give less")))
    InputError('give less')
    """
    if isinstance(error, InputError):
        return ["error", str(error)]
    if isinstance(error, Failed) and not isinstance(error, Fault):
        return ["failed", str(error)]
    fault = error if isinstance(error, Fault) else fault_of(error)
    fault = fault or Fault("a worker died", "".join(traceback.format_exception(error)))
    return ["fault", str(fault), fault.where]


def error_from(words: Sequence[str]) -> Exception:
    """The error of which `error_words` made these."""
    kinds: dict[str, Callable[..., Exception]] = {"error": InputError, "failed": Failed, "fault": Fault}
    kind, *what = words
    return kinds[kind](*what)
