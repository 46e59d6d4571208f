"""The copies of ImageNet and its subsets that exist, each read as JPEG files with their labels.

| kind                  | what it holds                                                                               |
|-----------------------|---------------------------------------------------------------------------------------------|
| folders of classes    | train/SYNSET/*.JPEG and val/SYNSET/*.JPEG; or as Tiny-ImageNet has them: .../SYNSET/images/  |
|                       | in train, val/images/ and val/val_annotations.txt. In a folder, or in a tar or zip archive   |

A label is the place of its class among the sorted synset ids.
Nothing is unpacked to disk, and one image at a time is in memory.
"""

import os
import re
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple, Protocol

from rewound.foundations.errors import InputError, few
from rewound.tasks.datasets.packed_images import PARTS, Size

_SYNSET = re.compile(r"n\d{8}")
_PICTURE = re.compile(r"[^.].*\.(?:jpe?g|png)", re.IGNORECASE)
_LARGEST = 2**28  # bytes of an image, many times what any has
TRAIN, HELD_OUT = PARTS


class Found(NamedTuple):
    """An image of a copy; `name` is for messages."""

    label: int
    name: str
    data: bytes


@dataclass(frozen=True)
class Source:
    """A copy of a data set: its classes, and the images of a part, of each class all or as many as were asked for."""

    path: Path
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

    @property
    def nothing(self) -> bool:
        """Whether there are enough images of every class."""
        return self._classes == 0


@dataclass(frozen=True)
class _Request:
    """What is asked of a copy."""

    name: str
    path: Path
    size: Size
    per_class: int | None

    def wanted(self, part: str) -> Wanted:
        """A subset has all held-out images if some classes have too few."""
        all_held_out = part == HELD_OUT and self.size.held_out != self.size.classes * (self.per_class or 0)
        return Wanted(self.size.classes, None if all_held_out else self.per_class)

    def check_classes(self, classes: Sequence[str]) -> None:
        """An error unless there are as many classes as there must be, under their synset ids."""
        if odd := [each for each in classes if not _SYNSET.fullmatch(each)]:
            raise InputError(
                f"{self.path} has the class {few(odd)}, which is not a synset id such as n01440764: labels follow the "
                "order of these; give the classes the names that they were published with"
            )
        if len(classes) != self.size.classes:
            raise InputError(
                f"{self.path} has {len(classes):,} classes, and {self.name} has {self.size.classes:,}: give a copy "
                f"that is whole, and the right one of {', '.join(NAMES)}"
            )

    def checked_label(self, label: object, name: str) -> int:
        """The label, if there is such a class."""
        if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < self.size.classes:
            raise InputError(
                f"{name} has the label {label!r}, and the labels of {self.name} are 0 to {self.size.classes - 1}: get "
                "a copy that has them"
            )
        return label


NAMES: Final = ("imagenet", "tinyimagenet", "imagenette")


def source_of(name: str, path: Path, size: Size, per_class: int | None) -> Source:
    """The copy at `path`; what kind it is shows in the names of the files in it."""
    if not path.exists():
        raise InputError(f"no file or folder {path}: give an archive or a folder that exists")
    request = _Request(name, path, size, per_class)
    with _reading(path):
        for made in (_folders,):
            if source := made(request):
                return source
    raise InputError(
        f"{path} holds no copy of {name}: give a folder (or a tar or zip archive) with train/SYNSET and val/SYNSET"
    )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, OSError) as error:
        raise InputError(f"cannot read {path}: {error}; get it again") from error


# Folders of classes


class _Files(Protocol):
    """Files by their paths, with "/" between folders; those of folders end in "/"."""

    def paths(self) -> Iterator[str]: ...

    def read(self, path: str) -> bytes: ...


class _Folder:
    def __init__(self, root: Path) -> None:
        self._root = root

    def paths(self) -> Iterator[str]:
        yield from self._below("")

    def _below(self, folder: str) -> Iterator[str]:
        with os.scandir(self._root / folder) as entries:
            found = sorted((entry.name, entry.is_dir()) for entry in entries)
        for name, is_folder in found:
            yield f"{folder}{name}/" if is_folder else f"{folder}{name}"
            if is_folder:
                yield from self._below(f"{folder}{name}/")

    def read(self, path: str) -> bytes:
        with (self._root / path).open("rb") as file:
            return file.read(_LARGEST)


class _Zip:
    def __init__(self, archive: Path) -> None:
        self._zip = zipfile.ZipFile(archive)

    def paths(self) -> Iterator[str]:
        yield from self._zip.namelist()

    def read(self, path: str) -> bytes:
        with self._zip.open(path) as file:
            return file.read(_LARGEST)


class _Tar:
    def __init__(self, archive: Path) -> None:
        self._tar = tarfile.open(archive)  # noqa: SIM115 - read from until the process has done with it
        self._members: dict[str, tarfile.TarInfo] = {}

    def paths(self) -> Iterator[str]:
        for member in self._tar:
            path = member.name.removeprefix("./")
            self._members[path] = member
            if member.isdir() or member.isfile():
                yield f"{path}/" if member.isdir() else path

    def read(self, path: str) -> bytes:
        return _content(self._tar, self._members[path])


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    return file.read(_LARGEST) if file else b""


def _folders(request: _Request) -> Source | None:
    path = request.path
    if path.is_dir():
        archives = [each for name in _ARCHIVES[request.name] for each in sorted(path.glob(name))]
        files: _Files = _opened(archives[0]) if archives else _Folder(path)
    elif zipfile.is_zipfile(path) or tarfile.is_tarfile(path):
        files = _opened(path)
    else:
        return None
    listed = _listed(files)
    if not listed.images[TRAIN] and not listed.classes[TRAIN]:
        return None
    classes = sorted({*listed.classes[TRAIN], *listed.classes[HELD_OUT]})
    request.check_classes(classes)
    _check_listed(request, listed, classes)

    labels = {name: label for label, name in enumerate(classes)}

    def images(part: str) -> Iterator[Found]:
        wanted = request.wanted(part)
        with _reading(path):
            for file, name in listed.images[part]:
                if wanted.takes(labels[name]):
                    yield Found(labels[name], file, files.read(file))

    return Source(path, classes, images)


_ARCHIVES: Final = {
    "imagenet": (),
    "tinyimagenet": ("tiny-imagenet-200.zip",),
    "imagenette": ("imagenette*.tgz", "imagenette*.tar.gz"),
}


def _opened(archive: Path) -> _Files:
    return _Zip(archive) if zipfile.is_zipfile(archive) else _Tar(archive)


class _Listed(NamedTuple):
    """The images of each part, as path and class, and the classes that have a folder there."""

    images: dict[str, list[tuple[str, str]]]
    classes: dict[str, set[str]]


_PLACE = re.compile(r"(?:.*/)?(?P<part>train|val|valid|validation)/(?P<class>[^/]+)/(?:images/)?(?P<file>[^/]+)?")


def _listed(files: _Files) -> _Listed:
    images: dict[str, list[tuple[str, str]]] = {part: [] for part in PARTS}
    classes: dict[str, set[str]] = {part: set() for part in PARTS}
    annotations = None
    for path in files.paths():
        if path.endswith("val/val_annotations.txt"):
            annotations = path
        elif (place := _PLACE.fullmatch(path)) and "__MACOSX/" not in path:
            part = TRAIN if place["part"] == "train" else HELD_OUT
            classes[part].add(place["class"])
            if place["file"] and _PICTURE.fullmatch(place["file"]):
                images[part].append((path, place["class"]))
    if annotations:
        rows = (line.split("\t") for line in files.read(annotations).decode("utf-8", "replace").splitlines())
        class_of = {row[0]: row[1] for row in rows if len(row) > 1}
        images[HELD_OUT] = [(path, class_of.get(PurePosixPath(path).name, "")) for path, _ in images[HELD_OUT]]
        classes[HELD_OUT] = {name for _, name in images[HELD_OUT]}
        if unknown := [path for path, name in images[HELD_OUT] if not name]:
            raise InputError(f"{annotations} has no line for {few(unknown)}; get this copy again, whole")
    return _Listed(images, classes)


def _check_listed(request: _Request, listed: _Listed, classes: Sequence[str]) -> None:
    """Errors that need no reading; what is said of a class is said of the part that lacks it."""
    for part, words in zip(PARTS, ("train", "val"), strict=True):
        counts = Counter(name for _, name in listed.images[part])
        if empty := [name for name in classes if not counts[name]]:
            raise InputError(f"{request.path} has no image in {words} of the class {few(empty)}; get it again, whole")
    if request.per_class is None:
        found = tuple(len(listed.images[part]) for part in PARTS)
        check_counts(request.path, found, request.size)


def check_counts(path: Path, found: tuple[int, ...], expected: Size) -> None:
    """An error unless a copy has as many images as there must be."""
    if found != expected[:2]:
        raise InputError(
            f"{path} has {found[0]:,} images to train on and {found[1]:,} held-out ones instead of "
            f"{expected.train:,} and {expected.held_out:,}; get it again, whole"
        )
