"""What is asked of a copy of a data set of images, and what it must have: its classes, and how many images of each."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from rewound.foundations.errors import InputError, few
from rewound.tasks.datasets.packed_images import IMAGENETTE, PARTS, SIZES, Size, digest_of

SYNSET: Final = re.compile(r"n\d{8}")
TRAIN, HELD_OUT = PARTS


class Found(NamedTuple):
    """An image of a copy; `name` is for messages."""

    label: int
    name: str
    data: bytes


@dataclass(frozen=True)
class Copy:
    """A copy of a data set: its classes, and the images of a part, of each class all or as many as were asked for.

    `description` says what is read, as there may be more at the same place.
    """

    path: Path
    description: str
    classes: Sequence[str]
    images: Callable[[str], Iterator[Found]]


class Wanted:
    """How many images of each class of a part are still wanted."""

    def __init__(self, classes: int, per_class: int | None) -> None:
        self._left = None if per_class is None else [per_class] * classes
        self._classes = classes

    def takes(self, label: int) -> bool:
        """Whether an image of that class is wanted; if so, it counts."""
        if self._left is None:
            return True
        self._left[label] -= 1
        self._classes -= self._left[label] == 0
        return self._left[label] >= 0

    def enough(self, label: int) -> bool:
        """Whether no more images of that class are wanted."""
        return self._left is not None and self._left[label] <= 0

    @property
    def nothing(self) -> bool:
        """Whether there are enough images of every class."""
        return self._classes == 0


@dataclass(frozen=True)
class Request:
    """What is asked of a copy."""

    name: str
    path: Path
    size: Size
    per_class: int | None

    @property
    def folder(self) -> Path:
        """The folder that was given, or that of the file that was."""
        return self.path if self.path.is_dir() else self.path.parent

    def wanted(self, part: str) -> Wanted:
        """A subset has all held-out images if some classes have too few."""
        all_held_out = part == HELD_OUT and self.size.held_out != self.size.classes * (self.per_class or 0)
        return Wanted(self.size.classes, None if all_held_out else self.per_class)

    @property
    def numbers(self) -> list[str]:
        """What classes are called in a copy that does not name them."""
        return list(map(str, range(self.size.classes)))

    def found(self, part: str, images: Iterable[Found]) -> Iterator[Found]:
        """Those of the images of a part that are wanted."""
        wanted = self.wanted(part)
        for image in images:
            if wanted.takes(image.label):
                yield image
            if wanted.nothing:
                return

    def check_classes(self, classes: Sequence[str]) -> None:
        """An error unless the classes are those of the data set, under their synset ids."""
        if odd := [each for each in classes if not SYNSET.fullmatch(each)]:
            raise InputError(
                f"{self.path} has the class {few(odd)}, which is not a synset id such as n01440764: labels follow the "
                "order of these; give the classes the names that they were published with"
            )
        if len(classes) != self.size.classes:
            raise InputError(
                f"{self.path} has {len(classes):,} classes, and {self.name} has {self.size.classes:,}"
                f"{self._difference(classes)}: give a copy that is whole, and the right one of {', '.join(SIZES)}"
            )
        if digest_of(classes) != self.size.synsets:
            raise InputError(
                f"{self.path} has {len(classes):,} classes, as {self.name} has, but they are others"
                f"{self._difference(classes) or f' ({few(classes)})'}: give a copy of {self.name} with the classes "
                "that it was published with"
            )

    def _difference(self, classes: Sequence[str]) -> str:
        """Which classes are missing and which are others, in brackets; nothing where that is not known."""
        known = next((each for each in self._lists(classes) if digest_of(each) == self.size.synsets), classes)
        wrong = {
            "missing": sorted({*known}.difference(classes)),
            f"not of {self.name}": sorted({*classes}.difference(known)),
        }
        words = [f"{what}: {few(names, 3)}" for what, names in wrong.items() if names]
        return f" ({'; '.join(words)})" if words else ""

    def _lists(self, classes: Sequence[str]) -> Iterator[Sequence[str]]:
        """What the classes of the data set may be; their digest tells."""
        yield IMAGENETTE
        if len(classes) == self.size.classes + 1:
            for number in range(len(classes)):
                yield [*classes[:number], *classes[number + 1 :]]
        for pattern in ("wnids.txt", "*/wnids.txt", "LOC_synset_mapping.txt"):  # of Tiny-ImageNet and Kaggle's ImageNet
            for path in self.folder.glob(pattern):
                yield re.findall(r"^n\d{8}\b", path.read_text("utf-8", "replace"), re.MULTILINE)

    def checked_label(self, label: object, name: str) -> int:
        """The label, if there is such a class."""
        if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < self.size.classes:
            raise InputError(
                f"{name} has the label {label!r}, and the labels of {self.name} are 0 to {self.size.classes - 1}: get "
                "a copy that has them"
            )
        return label


def the_classes(names: Sequence[str]) -> str:
    """The first of some classes, for messages.

    >>> the_classes(["n01440764"]), the_classes(["n01440764", "n02102040"])
    ('the class n01440764', 'the classes n01440764, n02102040')
    """
    return f"the {'class' if len(names) == 1 else 'classes'} {few(names)}"


def check_counts(path: Path, classes: Sequence[str], counts: Sequence[Sequence[int]], expected: Size) -> None:
    """An error unless a copy has as many images as there must be; `counts` are those of each class in both parts."""
    train, held_out = (sum(each) for each in counts)
    wrong = []
    if (train, held_out) != expected[:2]:
        wrong.append(
            f"{train:,} images to train on and {held_out:,} held-out ones instead of {expected.train:,} and "
            f"{expected.held_out:,}"
        )
    for words, images, least in zip(("to train on", "held out"), counts, expected.smallest, strict=True):
        if short := [name for name, number in zip(classes, images, strict=True) if number < least]:
            wrong.append(f"too few {words} of {the_classes(short)}")
    if not wrong:
        return
    remedy = "get it again, whole"
    if train <= expected.train and held_out <= expected.held_out:
        remedy += f", or try with --per-class {min(expected.smallest[1], *counts[0], *counts[1])}"
    raise InputError(f"{path} has {', '.join(wrong)}; {remedy}")
