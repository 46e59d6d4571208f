"""Files by name out of a folder or a tar archive: read into memory, never extracted."""

import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import IO

from rewound.foundations.errors import InputError

Files = dict[str, bytes]  # name without folders -> content


def read_files(source: Path, patterns: Sequence[str], largest: int) -> Files:
    """What `source` holds under names that match one of the patterns; the first of a name counts.

    `source` is a tar archive (whatever its name), a folder, the folder around it, or a single file.

    >>> read_files(Path("nowhere"), ["*.bin"], largest=100)
    Traceback (most recent call last):
    rewound.foundations.errors.InputError: no file or folder nowhere: give an archive or a folder that exists
    """
    if not source.exists():
        raise InputError(f"no file or folder {source}: give an archive or a folder that exists")
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
