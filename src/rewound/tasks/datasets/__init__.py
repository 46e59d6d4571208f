"""Data sets, each prepared once into the cache and then loaded from there."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from rewound.foundations.errors import InputError
from rewound.foundations.names import unknown

Say = Callable[[str], object]


def prepare(name: str, source: Path | None, say: Say, per_class: int | None = None) -> None:
    """Prepare a data set from a copy of it, and say how that goes and what there is then.

    Of a data set of packed images, `per_class` images of each class can be prepared, to try things out.
    """
    if name not in DATA_SETS:
        raise InputError(unknown("data set", name, DATA_SETS) + "; digits needs no preparation")
    if per_class is not None and DATA_SETS[name] is not _packed:
        raise InputError(f"{name} is always prepared whole: leave out per-class")
    DATA_SETS[name](name, source, say, per_class)


def _images(name: str, source: Path | None, say: Say, per_class: int | None) -> None:
    from rewound.tasks.datasets import cifar10

    made = cifar10.prepare(source, say=say)
    say(cifar10.summary())
    say(f"ready: {made}")


def _text(name: str, source: Path | None, say: Say, per_class: int | None) -> None:
    from rewound.tasks.datasets import parallel_text

    made = parallel_text.prepare(name, source, say=say)
    for line in parallel_text.summary(name).splitlines():
        say(line)
    say(f"ready: {made}")


def _packed(name: str, source: Path | None, say: Say, per_class: int | None) -> None:
    from rewound.tasks.datasets import packing_images

    made = packing_images.prepare(name, source, per_class=per_class, say=say)
    for line in packing_images.summary(name, per_class=per_class).splitlines():
        say(line)
    say(f"ready: {made}")


DATA_SETS: Final[Mapping[str, Callable[[str, Path | None, Say, int | None], None]]] = {
    "cifar10": _images,
    "wmt16": _text,
    "ende": _text,
    "multi30k": _text,
    "imagenet": _packed,
    "tinyimagenet": _packed,
    "imagenette": _packed,
}
