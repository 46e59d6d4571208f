"""What a store is kept in: six primitives over paths such as `results/ab/abcd.json`, and the errors where one fails.

Nothing else is assumed of the place: no rename, no lock, no clock, no folders. It is a folder (`folder`) or, given by
its URL, a bucket of an object store (`objects`); `conformance` checks any other. A file is there as a whole or not at
all, and a path never changes its meaning: of two that create one, exactly one succeeds.
"""

import errno
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeAlias

from safetensors import SafetensorError

from rewound.foundations.errors import InputError, as_path, shown
from rewound.foundations.wholefiles import FORGOTTEN

Location: TypeAlias = Path | str
"""Where a store is: the path of a folder, or the URL of a bucket as a text."""
SCHEMES: Final = ("s3", "az", "gs")
"""What the URL of a bucket begins with: Amazon S3 and what speaks like it, Azure, Google Cloud."""
_URL = re.compile(
    rf"(?P<scheme>{'|'.join(SCHEMES)})://(?P<bucket>[A-Za-z0-9][A-Za-z0-9._-]*)(?P<prefix>(/[A-Za-z0-9._=+-]+)*)/*"
)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/", re.IGNORECASE)

Source: TypeAlias = bytes | Callable[[Path], object]
"""What a file is to hold: its bytes, or a function that writes them to the local file that it is given."""

_TRIED, _SLOW = 20, 0.0005  # files that are read one by one, and the seconds for each from which on threads are used
_AT_ONCE, _BATCH = 16, 1000  # threads, and how many files are asked for ahead


class Listed(NamedTuple):
    """What a listing says of a file."""

    version: str
    """Another one after each write; of two within a second that write the same content, the second may be missed."""
    size: int


class Backend(Protocol):
    """Where the files of a store are; a refusal is an `InputError` that says why and what to do.

    It can be pickled, and opens the same place in another process. Several threads may use it at once.
    """

    @property
    def name(self) -> str:
        """The place, as a person knows it."""

    def read(self, path: str, most: int) -> bytes | None:
        """The first bytes of a file, at most so many; None: there is no file."""

    def fetch(self, path: str) -> Path | None:
        """The file as a local one, which is only read; None: there is no file."""

    def write(self, path: str, source: Source, *, durable: bool = True) -> None:
        """Make the file, or replace it, in one step; one that is `durable` outlasts a loss of power."""

    def create(self, path: str, content: bytes, *, durable: bool = True) -> bool:
        """Make the file in one step, unless there is one; whether it was made by this call."""

    def remove(self, path: str) -> None:
        """Remove the file, if it is there."""

    def list(self, prefix: str) -> dict[str, Listed]:
        """All files whose paths begin so; the prefix has the folder at least (`claims/`)."""

    def sweep_up(self, after: float = FORGOTTEN) -> None:
        """Remove what killed writers left; there is nothing where a write is one step by itself.

        What somebody may be writing who cannot be seen from here goes `after` so many seconds without a change.
        """
        return

    def probe(self) -> None:
        """Refuse a place that does not keep the promise of `create`; called by who opens a store in it."""
        return


def contents_of(backend: Backend, paths: Mapping[str, str], most: int) -> Iterator[tuple[str, bytes | None]]:
    """What `read` gives for each of the paths, by the name that it has here; several at once where reading is slow."""
    names, took = list(paths), 0.0
    for name in names[:_TRIED]:
        began = time.perf_counter()
        content = backend.read(paths[name], most)
        took += time.perf_counter() - began
        yield name, content
    if took < _TRIED * _SLOW:  # a disk of this machine: threads would cost more than they save
        yield from ((name, backend.read(paths[name], most)) for name in names[_TRIED:])
        return
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for begin in range(_TRIED, len(names), _BATCH):
            batch = names[begin : begin + _BATCH]
            yield from zip(batch, threads.map(lambda name: backend.read(paths[name], most), batch), strict=True)


def as_location(name: str, value: object) -> Location:
    """Where a store is, if what was given for `name` can be that.

    >>> as_location("store", "runs"), as_location("store", "s3://bucket/runs/")
    (PosixPath('runs'), 's3://bucket/runs')
    """
    if not isinstance(value, str | PathLike) or not (found := _SCHEME.match(str(value))):
        return as_path(name, value)
    url = str(value) if isinstance(value, str) else str(value).replace(":/", "://", 1)  # a Path has lost a slash
    if re.search("[@?#]", url):  # it may have a password in it, and is not repeated
        raise InputError(f"{name} must be a URL without credentials and options in it; give them by the environment")
    if found[1] not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise InputError(f"{name} must be a path or a URL ({known}), not {shown(url)}; mount it and give its path")
    if (matched := _URL.fullmatch(url)) and not {".", ".."} & {*matched["prefix"].split("/")}:
        return f"{matched['scheme']}://{matched['bucket']}{matched['prefix']}"
    raise InputError(f"{name} must be {found[1]}://BUCKET/PREFIX with letters, digits and . _ = + -, not {shown(url)}")


class ReadOnly(InputError):
    """The place can only be read."""


class OnlyRead(Backend):
    """Another backend of which nothing is changed, not even by opening a store in it: every write is refused."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def name(self) -> str:
        return self._backend.name

    def read(self, path: str, most: int) -> bytes | None:
        return self._backend.read(path, most)

    def fetch(self, path: str) -> Path | None:
        return self._backend.fetch(path)

    def list(self, prefix: str) -> dict[str, Listed]:
        return self._backend.list(prefix)

    def write(self, path: str, source: Source, *, durable: bool = True) -> None:
        raise self._refusal(path)

    def create(self, path: str, content: bytes, *, durable: bool = True) -> bool:
        raise self._refusal(path)

    def remove(self, path: str) -> None:
        raise self._refusal(path)

    def _refusal(self, path: str) -> ReadOnly:
        return ReadOnly(f"cannot change {path} in store {self.name}: it was opened to be read")


class Gone(Exception):
    """A file was removed by another process while it was copied."""


def copied(file: Path) -> Source:
    """The content of a local file, to be written elsewhere."""

    def copy(to: Path) -> None:
        try:
            shutil.copyfile(file, to)
        except FileNotFoundError:
            raise Gone(str(file)) from None

    return copy


_REASONS = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again, nothing stored is lost",
    errno.EDQUOT: "the disk quota is used up; free some and run the same command again, nothing stored is lost",
    errno.EACCES: "it is not writable; choose another with --store",
    errno.EPERM: "it is not writable; choose another with --store",
    errno.EROFS: "it is on a read-only file system; choose another with --store",
    errno.ENOTDIR: "it is a file, or lies below one; choose a folder with --store",
    errno.ELOOP: "a link stands where it keeps a file of its own; remove the link",
    errno.EEXIST: "it is a file; choose a folder with --store",
}
_READ_ONLY = {errno.EACCES, errno.EPERM, errno.EROFS}


def refusal(name: str, error: OSError | RuntimeError) -> InputError:
    """The sentence about what the system refuses."""
    number = error.errno if isinstance(error, OSError) else None
    kind = ReadOnly if number in _READ_ONLY else InputError
    return kind(f"cannot use store {name}: {_REASONS.get(number or 0, error)}")


@contextmanager
def refusals_explained(name: str) -> Iterator[None]:
    """Inside, what the system refuses about the files of a store becomes a sentence for a person."""
    try:
        yield
    except OSError as error:
        raise refusal(name, error) from error
    except SafetensorError as error:  # save_file wraps what the system said
        if "No space" in str(error) or "os error 28" in str(error):
            raise refusal(name, OSError(errno.ENOSPC, "no space")) from error
        raise


def where_writable() -> suppress:
    """Inside, a write that a read-only store refuses is left out."""
    return suppress(ReadOnly)
