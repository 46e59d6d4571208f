"""Tables as CSV files, gzipped or not, that are whole or not there.

Nothing is an empty field, a bool 0 or 1, a number has ten significant digits. A spreadsheet takes a text that begins
with =, +, - or @ for a formula, which can send away what is in the sheet, and the names in a table may come from
elsewhere. So such a text is written with an apostrophe before it, which reading takes away.
"""

import csv
import gzip
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Final

from rewound.foundations.errors import InputError
from rewound.foundations.wholefiles import write_whole

_LONGEST_LINE: Final = 2**20
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def write_table(
    header: Iterable[str], lines: Iterable[Iterable[object]], path: str | Path, *, durable: bool = False
) -> None:
    """Write a table: all of it or nothing; `durable` waits until the disk has it."""
    path = Path(path)
    fields = _Fields()
    text = "".join(
        ",".join([fields[v] if type(v) is str else str(v) if type(v) is int else text_of(v) for v in line]) + "\n"
        for line in chain([header], lines)
    )
    data = text.encode()
    write_whole(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data, durable=durable)


@contextmanager
def reading(path: Path) -> Iterator["csv.DictReader[str]"]:
    """The records of a table; what cannot be read, while they are, is one sentence."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield csv.DictReader(_lines(file))
    except FileNotFoundError:
        raise InputError(f"there is no table {path}; check the path, or make it with `rewound report`") from None
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {path} as a CSV table: it is not text; give the file of a table") from error
    except (OSError, EOFError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {path} as a CSV table: {reason}; give the file of a table") from error


def _lines(file: IO[str]) -> Iterator[str]:
    """The lines of a table; no line can be so long that it fills the memory, as a few bytes of gzip can make one."""
    while line := file.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE:
            raise csv.Error(f"a line has more than {_LONGEST_LINE:,} letters")
        yield line


class _Fields(dict[str, str]):
    """The fields of texts, as csv.writer makes them, each once: it looks at every letter, and most come very often."""

    def __missing__(self, text: str) -> str:
        written = io.StringIO()
        csv.writer(written, lineterminator="\n").writerow([text_of(text), ""])
        field = self[text] = written.getvalue()[: -len(",\n")]
        return field


def text_of(value: object) -> str:
    """What stands in the field of a value."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.10g}"  # 0.8**3 is 0.512, as in the authors' table
    if isinstance(value, str):
        return f"'{value}" if _is_formula(value.lstrip("'")) else value
    return str(int(value) if isinstance(value, bool) else value)


def unescaped(text: str) -> str:
    """The text that stands in a field."""
    return text[1:] if text[:1] == "'" and _is_formula(text.lstrip("'")) else text


def _is_formula(text: str) -> bool:
    """Whether a spreadsheet would compute something of it; a number with a sign is a number."""
    if not text.startswith(_FORMULA):
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False
