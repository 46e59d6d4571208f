"""Tables as CSV files, gzipped or not: every value in one form, files that are whole or not there.

Nothing is an empty field, a bool 0 or 1, a number has ten significant digits; what a field may hold is known by column.
"""

import csv
import gzip
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rewound.foundations.errors import InputError
from rewound.foundations.wholefiles import write_whole


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


def value_in(record: Mapping[str, str], column: str) -> Any:
    """The value of a column, which is text if nothing else is known of it; an error says what should be there."""
    text = (record.get(column) or "").strip()
    try:
        return _PARSERS.get(column, str)(text)
    except ValueError:
        raise InputError(f"column {column}: {text!r} is not {_EXPECTED.get(column, 'a number')}") from None


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)  # a run that diverged has an empty field, not nan
    return value


def _whole(text: str) -> int:
    value = _number(text)  # the authors write 35083708.0
    if not value.is_integer():
        raise ValueError(text)
    return int(value)


def _maybe(parse: Callable[[str], object]) -> Callable[[str], object]:
    return lambda text: parse(text) if text else None


_PARSERS: Final[Mapping[str, Callable[[str], object]]] = {
    "iterative": lambda text: ("0", "1").index(text) == 1,
    "density": _number,
    "retrain_epochs": _maybe(_number),
    "trial": _whole,
    "val": _maybe(_number),
    "test": _maybe(_number),
    "flops": _maybe(_whole),
    "search_epochs": _maybe(_number),
    "seconds": _maybe(_number),
    "kept": _whole,
    "total": _whole,
    "step": _whole,
    "lr": _number,
    "loss": float,  # nan where a run diverged
}
_EXPECTED: Final = {
    "iterative": "0 or 1",
    "val": "a number (of a failed run it is empty)",
    "test": "a number (of a failed run it is empty)",
    **dict.fromkeys(("trial", "flops", "kept", "total", "step"), "a whole number"),
}
