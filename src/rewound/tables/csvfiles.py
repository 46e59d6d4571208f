"""Tables as CSV files, gzipped or not: every value in one form, files that are whole or not there.

Nothing is an empty field, a bool 0 or 1, a number has ten significant digits.
"""

import csv
import gzip
import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rewound.errors import InputError


def write_table(header: Iterable[str], lines: Iterable[Iterable[object]], path: str | Path) -> None:
    """Write a table: all of it or nothing."""
    path = Path(path)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([text_of(value) for value in line] for line in lines)
    data = text.getvalue().encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
        draft.replace(path)  # a reader sees the old table or the new one, never half of it
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def reading(path: Path) -> Iterator["csv.DictReader[str]"]:
    """The records of a table; what cannot be read, while they are, is one sentence."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield csv.DictReader(file)
    except FileNotFoundError:
        raise InputError(f"there is no table {path}; check the path, or make it with `rewound report`") from None
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {path} as a CSV table: it is not text") from error
    except (OSError, EOFError, csv.Error) as error:
        raise InputError(f"cannot read {path} as a CSV table: {getattr(error, 'strerror', None) or error}") from error


def text_of(value: object) -> str:
    """What stands in the field of a value."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.10g}"  # 0.8**3 is 0.512, as in the authors' table
    return str(int(value) if isinstance(value, bool) else value)
