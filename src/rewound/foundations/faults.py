"""Errors in a user's recipe, rule or score: the lines of their code that lead to it, without those of libraries."""

import os
import sysconfig
import traceback
from pathlib import Path

from rewound.foundations.errors import Failed

_LIBRARIES = [str(Path(__file__).parents[1]), *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))]
_NOT_THEIRS = ("<", *(f"{folder}{os.sep}" for folder in _LIBRARIES))


class Fault(Failed):
    """What went wrong, and `where`: lines of a traceback."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(what)
        self.where = where


def fault_of(error: Exception) -> Fault | None:
    """The error as a fault of the user's code, or None if none of that is on the way to it."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
    if not theirs:
        return None
    what = "".join(traceback.format_exception_only(error)).strip()
    return Fault(what, "".join(traceback.format_list(theirs)))
