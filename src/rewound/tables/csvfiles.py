"""Tables as CSV files, gzipped or not: every value in one form, files that are whole or not there.

Nothing is an empty field, a bool 0 or 1, a number has ten significant digits.
"""

import csv
import gzip
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rewound.errors import InputError
from rewound.wholefiles import write_whole


def write_table(header: Iterable[str], lines: Iterable[Iterable[object]], path: str | Path) -> None:
    """Write a table: all of it or nothing."""
    path = Path(path)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([text_of(value) for value in line] for line in lines)
    data = text.getvalue().encode()
    write_whole(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data, durable=False)


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
