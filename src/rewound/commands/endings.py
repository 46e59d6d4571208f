"""How a command ends when something goes wrong: a sentence in red, and an exit code.

0: done. 1: interrupted, or something outside the request failed. 2: the request cannot be honoured as given.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from rewound.errors import Diverged, Failed, InputError
from rewound.faults import Fault, fault_of


@contextmanager
def exits() -> Iterator[None]:
    """Turn an error inside into a sentence and an exit code; an error nobody foresaw keeps its traceback."""
    try:
        yield
    except InputError as error:
        _tell(f"error: {error}")
        sys.exit(2)
    except Exception as error:
        fault = error if isinstance(error, Fault) else fault_of(error)
        if fault is None and not isinstance(error, Failed | Diverged | OSError):
            raise
        if fault is not None:
            _tell(fault.where.rstrip())
        _tell(f"failed: {fault or _reason(error)}")
        sys.exit(1)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"cannot use {error.filename}: {error.strerror}"
    return str(error)


def _tell(text: str) -> None:
    Console(stderr=True, emoji=False, markup=False).print(text, style="red", soft_wrap=True, highlight=False)
