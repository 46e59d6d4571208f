"""Images in folders of classes: which there are, and how each is read; in a folder, or in a zip or tar archive of it.

| part  | in most copies       | in Tiny-ImageNet                              |
|-------|----------------------|-----------------------------------------------|
| train | train/SYNSET/*.JPEG  | train/SYNSET/images/*.JPEG                    |
| val   | val/SYNSET/*.JPEG    | val/images/*.JPEG and val/val_annotations.txt |

All of it may be in a folder of its own. Other files are left alone. Nothing is unpacked to disk.
"""

import os
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple, Protocol

from rewound.foundations.errors import InputError, few

PICTURE: Final = re.compile(r"[^.].*\.(?:jpe?g|png)", re.IGNORECASE)
_LARGEST = 2**28  # bytes of an image; none has nearly as many
_PLACE = re.compile(r"(?:.*/)?(?P<part>train|val|valid|validation)/(?P<class>[^/]+)/(?:images/)?(?P<file>[^/]+)?")


class Listed(NamedTuple):
    """The images to train on and those of val, as paths with their classes; the classes that have a folder there."""

    train: list[tuple[str, str]]
    val: list[tuple[str, str]]
    classes: set[str]
    read: Callable[[str], bytes]


def listed(path: Path) -> Listed | None:
    """What a folder or an archive holds; None if it is neither, or has no images to train on."""
    if path.is_dir():
        files: _Files = _Folder(path)
    elif zipfile.is_zipfile(path):
        files = _Zip(path)
    elif tarfile.is_tarfile(path):
        files = _Tar(path)
    else:
        return None
    train: list[tuple[str, str]] = []
    val: list[tuple[str, str]] = []
    classes: set[str] = set()
    annotations = None
    for each in files.paths():
        if each.endswith("val/val_annotations.txt"):
            annotations = each
        elif (place := _PLACE.fullmatch(each)) and "__MACOSX/" not in each:
            if place["part"] == "train" or place["class"] != "images":
                classes.add(place["class"])
            if place["file"] and PICTURE.fullmatch(place["file"]):
                (train if place["part"] == "train" else val).append((each, place["class"]))
    if annotations:
        val = _annotated(val, annotations, files.read(annotations))
    return Listed(train, val, classes.union(name for _, name in val), files.read) if classes else None


def _annotated(val: list[tuple[str, str]], path: str, annotations: bytes) -> list[tuple[str, str]]:
    rows = (line.split("\t") for line in annotations.decode("utf-8", "replace").splitlines())
    class_of = {row[0]: row[1] for row in rows if len(row) > 1}
    if without := [each for each, _ in val if PurePosixPath(each).name not in class_of]:
        raise InputError(f"{path} has no line for {few(without)}; get this copy again, whole")
    return [(each, class_of[PurePosixPath(each).name]) for each, _ in val]


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
        _check_length(path, (self._root / path).stat().st_size)
        return (self._root / path).read_bytes()


class _Zip:
    def __init__(self, archive: Path) -> None:
        self._zip = zipfile.ZipFile(archive)

    def paths(self) -> Iterator[str]:
        yield from self._zip.namelist()

    def read(self, path: str) -> bytes:
        _check_length(path, self._zip.getinfo(path).file_size)
        return self._zip.read(path)


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
        return content(self._tar, self._members[path])
