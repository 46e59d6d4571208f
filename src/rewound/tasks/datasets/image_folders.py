"""Images in folders of classes: which there are, and how each is read; in a folder, or in a zip or tar archive of it.

| copy          | train                      | val                                                     |
|---------------|----------------------------|---------------------------------------------------------|
| most          | train/SYNSET/*.JPEG        | val/SYNSET/*.JPEG                                       |
| Tiny-ImageNet | train/SYNSET/images/*.JPEG | val/images/*.JPEG, their classes in val_annotations.txt |
| Kaggle's      | train/SYNSET/*.JPEG        | val/*.JPEG, their classes in LOC_val_solution.csv       |

All of it may lie in other folders, but only one train and one val: two copies are an error. So are two lists that give
an image of val different classes. Other files are left alone. Nothing is unpacked to disk.
"""

import os
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple, Protocol

from rewound.foundations.errors import InputError, few

PICTURE: Final = re.compile(r"[^.].*\.(?:jpe?g|png)", re.IGNORECASE)
_LARGEST = 2**28  # bytes of an image; none has nearly as many
_PLACE = re.compile(
    r"(?:.*/)?(?P<part>train|val|valid|validation)/(?:(?P<class>(?!images/)[^/]+)/)?(?:images/)?(?P<file>[^/]+)?"
)
_LISTS = ("val_annotations.txt", "LOC_val_solution.csv")  # lines: file, tab, class; file without ending, comma, class


Read = Callable[[str], bytes]


class Listed(NamedTuple):
    """The images to train on and those of val, as paths with their classes; the classes that have a folder there.

    `opened` is a context that gives a function from a path to its bytes.
    """

    train: list[tuple[str, str]]
    val: list[tuple[str, str]]
    classes: set[str]
    opened: Callable[[], AbstractContextManager[Read]]


def listed(path: Path) -> Listed | None:
    """What a folder or an archive holds; None if it is neither, or has no images to train on."""
    if path.is_dir():
        files: _Files = _Folder(path)
    elif zipfile.is_zipfile(path) or path.suffix.lower() == ".zip":  # a truncated one is none: an error says so
        files = _Zip(path)
    elif tarfile.is_tarfile(path):
        files = _Tar(path)
    else:
        return None
    train: list[tuple[str, str]] = []
    val: list[tuple[str, str]] = []
    classes: set[str] = set()
    lists: list[str] = []
    parts: set[str] = set()  # the folders train and val
    for each in files.paths():
        if each.rpartition("/")[2] in _LISTS:
            lists.append(each)
        elif (place := _PLACE.fullmatch(each)) and "__MACOSX/" not in each:
            if place["class"]:
                classes.add(place["class"])
            if place["file"] and PICTURE.fullmatch(place["file"]):
                (train if place["part"] == "train" else val).append((each, place["class"] or ""))
                parts.add(each[: place.end("part")])
    _check_one_copy(path, parts)
    if any(not name for _, name in val):
        val = _with_classes(val, lists, files, path)
    if classless := [each for each, name in train + val if not name]:
        raise InputError(
            f"nothing in {path} says the class of {few(classless)}: give a copy that has folders of classes in train "
            f"and val, or for val one of {' and '.join(_LISTS)}"
        )
    return Listed(train, val, classes.union(name for _, name in val), files.opened) if train or classes else None


def _check_one_copy(path: Path, parts: set[str]) -> None:
    for is_train in (True, False):
        several = sorted(each for each in parts if (PurePosixPath(each).name == "train") == is_train)
        if len(several) > 1:
            example = f", such as {path / PurePosixPath(several[0]).parent}" if path.is_dir() else " by itself"
            raise InputError(f"{path} holds several copies ({few(several)}): give the one that you want{example}")


def _with_classes(val: list[tuple[str, str]], lists: list[str], files: "_Files", path: Path) -> list[tuple[str, str]]:
    """The images of val with the classes that lists say; those in folders of classes have theirs."""
    said: dict[str, dict[str, str]] = {}  # file without ending -> class -> the list that says it
    with files.opened() as read:
        for each in lists:
            rows = re.findall(r"^([^\t,]+)[\t,](n\d+)", read(each).decode("utf-8", "replace"), re.MULTILINE)
            for name, synset in rows:
                said.setdefault(PurePosixPath(name).stem, {})[synset] = each
    found = []
    for each, name in val:
        known = {} if name else said.get(PurePosixPath(each).stem, {})
        if len(known) > 1:
            both = " and ".join(f"{synset} in {source}" for synset, source in known.items())
            raise InputError(
                f"{path} gives {each} different classes, {both}: leave only the list that came with the images"
            )
        found.append((each, name or next(iter(known), "")))
    return found


def content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """The bytes of an image in an archive."""
    _check_length(member.name, member.size)
    file = tar.extractfile(member)
    return file.read() if file else b""


def _check_length(path: str, length: int) -> None:
    if length > _LARGEST:
        raise InputError(f"{path} has {length:,} bytes, more than an image has; get this copy again")


class _Files(Protocol):
    """Files by their paths, with "/" between folders; the paths of folders end in "/"."""

    def paths(self) -> Iterator[str]: ...

    def opened(self) -> AbstractContextManager[Read]: ...


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

    @contextmanager
    def opened(self) -> Iterator[Read]:
        def read(path: str) -> bytes:
            _check_length(path, (self._root / path).stat().st_size)
            return (self._root / path).read_bytes()

        yield read


class _Zip:
    def __init__(self, archive: Path) -> None:
        self._archive = archive

    def paths(self) -> Iterator[str]:
        with zipfile.ZipFile(self._archive) as archive:
            yield from archive.namelist()

    @contextmanager
    def opened(self) -> Iterator[Read]:
        with zipfile.ZipFile(self._archive) as archive:

            def read(path: str) -> bytes:
                _check_length(path, archive.getinfo(path).file_size)
                return archive.read(path)

            yield read


class _Tar:
    def __init__(self, archive: Path) -> None:
        self._archive = archive
        self._members: dict[str, tarfile.TarInfo] = {}

    def paths(self) -> Iterator[str]:
        with tarfile.open(self._archive) as tar:
            for member in tar:
                path = member.name.removeprefix("./")
                self._members[path] = member
                if member.isdir() or member.isfile():
                    yield f"{path}/" if member.isdir() else path

    @contextmanager
    def opened(self) -> Iterator[Read]:
        with tarfile.open(self._archive) as tar:
            yield lambda path: content(tar, self._members[path])
