"""Data sets, each prepared once into the cache and then loaded from there."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from rewound.foundations.errors import InputError
from rewound.foundations.names import unknown

Say = Callable[[str], object]


def prepare(name: str, source: Path | None, say: Say) -> None:
    """Prepare a data set from a copy of it, and say how that goes and what there is then."""
    if name not in DATA_SETS:
        raise InputError(unknown("data set", name, DATA_SETS) + "; digits needs no preparation")
    DATA_SETS[name](name, source, say)


def _images(name: str, source: Path | None, say: Say) -> None:
    from rewound.tasks.datasets import cifar10

    say(f"ready: {cifar10.prepare(source)}")


def _text(name: str, source: Path | None, say: Say) -> None:
    from rewound.tasks.datasets import parallel_text

    made = parallel_text.prepare(name, source, say=say)
    for line in parallel_text.summary(name).splitlines():
        say(line)
    say(f"ready: {made}")


DATA_SETS: Final[Mapping[str, Callable[[str, Path | None, Say], None]]] = {
    "cifar10": _images,
    "wmt16": _text,
    "ende": _text,
    "multi30k": _text,
}
