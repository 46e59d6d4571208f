"""Artifacts of a store in one file (or several of a given size), which can be read as a store and copied into another.

Nothing is copied before all packs are known to be whole. Every artifact carries its own checksum and is checked before
it is merged (`merging`); what was measured is never overwritten.

A pack is a tar archive, compressed by gzip. It is read a block at a time by the few lines below, not by tarfile: a
forged archive can make tarfile keep any amount in memory. `pack` writes only plain files and the extended headers that
the format puts before them, so nothing but one header has to be in memory.
"""

import errno
import gzip
import io
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, TYPE_CHECKING, NoReturn, Protocol, Self, TypeAlias, cast

from rewound.foundations.errors import InputError
from rewound.foundations.wholefiles import replacing
from rewound.states.storage.artifacts import Damaged, artifact_at
from rewound.states.storage.backend import Backend, Listed, Source, refusals_explained
from rewound.states.storage.statefile import LONGEST_HEADER, check_header

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Pieces: TypeAlias = list[Path]
"""The files of a pack, in order."""
_BEGINNING = b"\x1f\x8b\x08"  # of a gzip file; a later piece begins with it once in 16 million
_CHUNK = 1 << 20  # bytes that are copied at a time
_BLOCK = tarfile.BLOCKSIZE
_LONGEST_NOTE = 1 << 16  # bytes before a file for what its header has no room for: its time in fractions of a second


class _Readable(Protocol):
    """What bytes are read from, in order."""

    def read(self, size: int, /) -> bytes: ...


class NewPack:
    """A pack that is being written; it becomes the file `out`, or several of `split_bytes`, when the block succeeds."""

    def __init__(self, out: Path, split_bytes: int | None = None) -> None:
        self.out, self.split_bytes = out, split_bytes
        self.files: list[Path] = []
        """What was written, in order."""
        self.paths: set[str] = set()
        """What has been added."""

    def __enter__(self) -> Self:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self._whole = TemporaryFile(dir=self.out.parent)
        self._archive = tarfile.open(fileobj=self._whole, mode="w:gz", compresslevel=1)  # weights are runs of zeros
        return self

    def add(self, path: str, source: Backend) -> None:
        """Copy a file of a store; what is removed meanwhile is left out."""
        try:
            if (file := source.fetch(path)) is None:
                return
            # Opened once: another process may replace the file between two looks at it.
            with file.open("rb") as content:
                described = self._archive.gettarinfo(arcname=path, fileobj=content)
                if not described.isreg():
                    return
                self._archive.addfile(described, content)
        except FileNotFoundError:
            return
        self.paths.add(path)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._whole:
            if kind is None:
                self._archive.close()
                self._publish()

    def _publish(self) -> None:
        size, out = self._whole.tell(), self.out
        self.files = [out] if self.split_bytes is None else _pieces(out, -(-size // self.split_bytes))
        self._whole.seek(0)
        with ExitStack() as published:  # together, when all are written
            for path in self.files:
                with published.enter_context(replacing(path)).open("wb") as piece:
                    _copy(self._whole, piece, self.split_bytes or size)
        for old in out.parent.iterdir():  # a piece of an earlier, longer pack: `unpack out.*` would take it
            if old not in self.files and _numbered(old)[1] is not None and _numbered(old)[0] == out:
                old.unlink()


def _pieces(out: Path, count: int) -> list[Path]:
    digits = max(3, len(str(count)))  # as many in each, so that their names sort in order
    return [out.with_name(f"{out.name}.{number:0{digits}d}") for number in range(count)]


def _copy(source: _Readable, target: IO[bytes], size: int) -> None:
    """Copy at most so many bytes."""
    while size > 0 and (content := source.read(min(size, _CHUNK))):
        target.write(content)
        size -= len(content)


class Pack(Backend):
    """A pack as a store that is only read, best in the order in which it lists its files."""

    def __init__(self, pieces: Pieces, number: int) -> None:
        self._pieces, self._number = pieces, number  # of the archive, where somebody joined several in one file
        self.files: dict[str, Listed] = {}
        self._opened = ExitStack()
        self._members: Iterator[_Member] = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def name(self) -> str:
        return str(self._pieces[0])

    def list(self, prefix: str) -> dict[str, Listed]:
        return {path: listed for path, listed in self.files.items() if path.startswith(prefix)}

    def read(self, path: str, most: int) -> bytes | None:
        return None if (member := self._member(path)) is None else member.read(most)

    def fetch(self, path: str) -> Path | None:
        """A temporary file, until the next one; nothing is written of tensors whose header is not that of the path."""
        if (member := self._member(path)) is None:
            return None
        beginning = member.read(8)
        length = int.from_bytes(beginning, "little")
        if not 8 <= 8 + length <= member.size or length > LONGEST_HEADER:
            raise Damaged
        header = member.read(length)
        if (artifact := artifact_at(path)) is None:
            raise Damaged
        check_header(header, member.size - 8 - length, artifact.key, draft=artifact.kind == "draft")
        file = self._folder / "fetched"
        with refusals_explained(str(self._folder)), file.open("wb") as written:
            if member.size > shutil.disk_usage(self._folder).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written.write(beginning + header)
            _copy(member, written, member.size)
        return file

    def _member(self, path: str) -> "_Member | None":
        """The file at a path: the next one that is read, or after a new beginning."""
        if path not in self.files:
            return None
        for attempt in range(2):
            if attempt:
                self._opened.close()
                self._folder = Path(self._opened.enter_context(TemporaryDirectory(prefix="rewound-")))
                self._members = _members(self._opened.enter_context(_opened(self._pieces)))
            for member in self._members:
                if (member.archive, member.name) == (self._number, path):
                    return member
        return None

    def write(self, path: str, source: Source, *, durable: bool = True) -> NoReturn:
        raise self._refusal()

    def create(self, path: str, content: bytes, *, durable: bool = True) -> NoReturn:
        raise self._refusal()

    def remove(self, path: str) -> NoReturn:
        raise self._refusal()

    def _refusal(self) -> InputError:
        return InputError(f"pack {self.name} can only be read; merge it into a store with rewound unpack")


def read_packs(paths: Sequence[Path]) -> list[Pack]:
    """The packs that files hold, in any order: whole ones and pieces; one that lacks a piece is an error."""
    packs: list[Pieces] = []
    for path in sorted(set(paths)):
        with path.open("rb") as file:
            begins = file.read(len(_BEGINNING)) == _BEGINNING
        if begins:
            packs.append([path])
        elif (missing := _missing(path, packs[-1][-1] if packs else None)) is None:
            packs[-1].append(path)
        else:
            raise InputError(f"cannot read {path}: {missing}")
    return [pack for pieces in packs for pack in _checked(pieces)]


def _missing(path: Path, before: Path | None) -> str | None:
    """What should stand between two pieces of a pack; None where they follow each other."""
    name, number = _numbered(path)
    if number is None:  # renamed: the order of the names is all there is
        follows = before is not None and _numbered(before)[1] is None
        return None if follows else "it is not a pack; give the files that rewound pack wrote"
    expected = 0
    if before is not None and _numbered(before)[0] == name:
        expected = (_numbered(before)[1] or 0) + 1
    if expected == number:
        return None
    return f"the piece before it, {name}.{expected:0{len(path.suffix) - 1}d}, is missing; give all pieces of a pack"


def _numbered(path: Path) -> tuple[Path, int | None]:
    """A piece's pack and its number there."""
    return (path.with_suffix(""), int(path.suffix[1:])) if re.fullmatch(r"\.\d{3,}", path.suffix) else (path, None)


def _checked(pieces: Pieces) -> list[Pack]:
    """The packs in these files; an error if one is not whole, or holds something else than artifacts."""
    packs: dict[int, Pack] = {}
    begun = False
    try:
        with _opened(pieces) as archive:
            for member in _members(archive):  # to its end, where its checksum is
                begun = True
                if artifact_at(member.name) is None:
                    raise InputError(f"cannot read pack {pieces[0]}: {member.name!r} is not an artifact of a store")
                pack = packs.setdefault(member.archive, Pack(pieces, member.archive))
                if member.name in pack.files:
                    raise InputError(f"cannot read pack {pieces[0]}: {member.name!r} is in it twice")
                pack.files[member.name] = Listed("", member.size)
    except EOFError:
        raise InputError(
            f"cannot read pack {pieces[0]}: a piece after {pieces[-1].name} is missing; give all pieces of a pack"
        ) from None
    except (OSError, tarfile.TarError, zlib.error) as error:
        if isinstance(error, tarfile.TarError) and not begun:
            raise InputError(f"cannot read pack {pieces[0]}: it is no archive that rewound pack wrote") from None
        raise InputError(f"cannot read pack {pieces[0]}: {error}; give all pieces of a pack, unchanged") from error
    return list(packs.values())


@contextmanager
def _opened(pieces: Pieces) -> Iterator[IO[bytes]]:
    """The archive, or all of them where somebody joined several in one file, with zeros between them."""
    with io.BufferedReader(_Joined(pieces)) as whole, gzip.GzipFile(fileobj=whole) as archive:
        yield cast(IO[bytes], archive)


class _Member:
    """A file in an archive, which is read from its beginning to its end."""

    def __init__(self, source: IO[bytes], name: str, size: int, archive: int) -> None:
        self._archive, self.name, self.size = source, name, size
        self.archive = archive
        """How many archives end before it."""
        self._left, self._padding = size, -size % _BLOCK

    def read(self, size: int) -> bytes:
        content = self._archive.read(min(size, self._left))
        self._left -= len(content)
        return content

    def skip(self) -> None:
        """Go to where the next file begins."""
        while self._left and self.read(_CHUNK):
            pass
        if self._left or len(self._archive.read(self._padding)) < self._padding:
            raise tarfile.ReadError(f"it ends within {self.name!r}")


def _members(archive: IO[bytes]) -> Iterator[_Member]:
    """The files of an archive, one after the other; whoever is given one may read of it what they like."""
    size: int | None = None  # as a note says, where the header has no room for it
    ended, number = False, 0
    while block := archive.read(_BLOCK):
        if not block.strip(b"\0"):  # the end of an archive, or what fills it up
            ended = True
            continue
        ended, number = False, number + ended
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        is_note = header.type == tarfile.XHDTYPE
        if not is_note and header.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise tarfile.ReadError(f"{header.name!r} is no plain file")
        member = _Member(archive, header.name, header.size if is_note or size is None else size, number)
        if member.size < 0 or (is_note and member.size > _LONGEST_NOTE):
            raise tarfile.ReadError(f"{header.name!r} cannot have {member.size:,} bytes")
        if is_note:
            found = re.search(rb"^\d+ size=(\d{1,18})$", member.read(member.size), re.MULTILINE)
            size = int(found[1]) if found else None
        else:
            yield member
            size = None
        member.skip()


class _Joined(io.RawIOBase):
    """Files that are read one after the other, as if they were one."""

    def __init__(self, paths: Pieces) -> None:
        self._later = iter(paths)
        self._file = next(self._later).open("rb")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        while not (count := self._file.readinto(buffer)) and (path := next(self._later, None)) is not None:
            self._file.close()
            self._file = path.open("rb")
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
