"""A sweep's part of a store as one file (or several of a given size), to go on with on another machine.

It holds the results of the sweep, the tensors that nodes still to do will read, and drafts; the rest can be made again.
Nothing is merged before all packs are known to be whole. Every artifact carries its own checksum and is checked before
it is merged; what was measured is never overwritten (`storage/merging`).

A pack is a tar archive, compressed by gzip. It is read a block at a time by the few lines below, not by tarfile, which
keeps in memory what a forged archive tells it to: of what `pack` writes, plain files and the notes that the format puts
before them, nothing is held but one header.
"""

import gzip
import io
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, NamedTuple, TypeAlias, cast

from rewound.experiments.plans.planning import Plan
from rewound.experiments.plans.remaining import todo
from rewound.foundations.errors import InputError
from rewound.foundations.wholefiles import replacing
from rewound.states.storage.layout import Artifact, artifact_at
from rewound.states.storage.merging import merge
from rewound.states.storage.store import Store

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Pack: TypeAlias = list[Path]
"""The files of a pack, in order."""
_BEGINNING = b"\x1f\x8b\x08"  # of a gzip file; a later piece begins with it once in 16 million
_CHUNK = 1 << 20  # bytes that are copied at a time
_BLOCK = tarfile.BLOCKSIZE
_LONGEST_NOTE = 1 << 16  # bytes before a file for what its header has no room for: its time in fractions of a second


class Merged(NamedTuple):
    """What became of the artifacts of a pack."""

    added: int
    present: int
    damaged: int
    unbound: int
    """Of those added, tensors of a version that did not write their key into them."""


def pack_store(plan: Plan, store: Store, out: Path, split_bytes: int | None = None) -> list[Path]:
    """Write what is needed to continue `plan` elsewhere; returns the files written, in order."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=out.parent) as whole:
        with tarfile.open(fileobj=whole, mode="w:gz", compresslevel=1) as archive:  # pruned weights are runs of zeros
            for name in _needed(plan, store):
                archive.add(store.root / name, name)
        size = whole.tell()
        paths = [out] if split_bytes is None else _pieces(out, -(-size // split_bytes))
        whole.seek(0)
        with ExitStack() as published:  # together, when all are written
            for path in paths:
                with published.enter_context(replacing(path)).open("wb") as piece:
                    _copy(whole, piece, split_bytes or size)
    for old in out.parent.iterdir():  # a piece of an earlier, longer pack: `unpack out.*` would take it
        if old not in paths and _numbered(old)[1] is not None and _numbered(old)[0] == out:
            old.unlink()
    return paths


def _pieces(out: Path, count: int) -> list[Path]:
    digits = max(3, len(str(count)))  # as many in each, so that their names sort in order
    return [out.with_name(f"{out.name}.{number:0{digits}d}") for number in range(count)]


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> None:
    """Copy at most so many bytes."""
    while size > 0 and (content := source.read(min(size, _CHUNK))):
        target.write(content)
        size -= len(content)


def _needed(plan: Plan, store: Store) -> Iterator[str]:
    open_nodes = {node.key for node in todo(plan, store)}
    for node in plan.nodes:
        read_later = not open_nodes.isdisjoint(plan.readers.get(node.key, ()))
        yield from (found.path for found in store.artifacts(node.key) if found.kind != "state" or read_later)
    yield from sorted(_continued(plan, store))


def _continued(plan: Plan, store: Store) -> set[str]:
    """The results that those of the plan go on from, but which another plan has cut there: their time and curves."""
    found = dict[str, str]()
    for node in plan.nodes:
        result = store.result(node.key)
        # Not beyond a node of the plan, which has its own turn, or what was found before: each result is read once.
        while result is not None and (key := result["after"]) and key not in plan.by_key and key not in found:
            found[key] = Artifact("result", key).path
            result = store.result(key)
    return set(found.values())


def read_packs(paths: Sequence[Path]) -> list[Pack]:
    """The packs that files hold, in any order: whole ones and pieces; one that lacks a piece is an error."""
    packs: list[Pack] = []
    for path in sorted(set(paths)):
        with path.open("rb") as file:
            begins = file.read(len(_BEGINNING)) == _BEGINNING
        if begins:
            packs.append([path])
        elif (missing := _missing(path, packs[-1][-1] if packs else None)) is None:
            packs[-1].append(path)
        else:
            raise InputError(f"cannot read {path}: {missing}")
    for pieces in packs:
        _check(pieces)
    return packs


def _missing(path: Path, before: Path | None) -> str | None:
    """What should stand between two pieces of a pack; None where they follow each other."""
    name, number = _numbered(path)
    if number is None:  # renamed: the order of the names is all there is
        return None if before is not None and _numbered(before)[1] is None else "it is not a pack"
    expected = 0
    if before is not None and _numbered(before)[0] == name:
        expected = (_numbered(before)[1] or 0) + 1
    if expected == number:
        return None
    return f"the piece before it, {name}.{expected:0{len(path.suffix) - 1}d}, is missing; give all pieces of a pack"


def _numbered(path: Path) -> tuple[Path, int | None]:
    """A piece's pack and its number there."""
    return (path.with_suffix(""), int(path.suffix[1:])) if re.fullmatch(r"\.\d{3,}", path.suffix) else (path, None)


def _check(pieces: Pack) -> None:
    """An error if the pack is not whole, or holds something else than artifacts."""
    begun = False
    try:
        with _opened(pieces) as archive:
            for member in _members(archive):  # to its end, where its checksum is
                begun = True
                if artifact_at(member.name) is None:
                    raise InputError(f"cannot read pack {pieces[0]}: {member.name!r} is not an artifact of a store")
    except EOFError:
        raise InputError(
            f"cannot read pack {pieces[0]}: a piece after {pieces[-1].name} is missing; give all pieces of a pack"
        ) from None
    except (OSError, tarfile.TarError, zlib.error) as error:
        if isinstance(error, tarfile.TarError) and not begun:
            raise InputError(f"cannot read pack {pieces[0]}: it is no archive that rewound pack wrote") from None
        raise InputError(f"cannot read pack {pieces[0]}: {error}; give all pieces of a pack, unchanged") from error


@contextmanager
def _opened(pieces: Pack) -> Iterator[IO[bytes]]:
    """The archive, or all of them where somebody joined several in one file, with zeros between them."""
    with io.BufferedReader(_Joined(pieces)) as whole, gzip.GzipFile(fileobj=whole) as archive:
        yield cast(IO[bytes], archive)


class _Member:
    """A file in an archive, which is read from its beginning to its end."""

    def __init__(self, archive: IO[bytes], name: str, size: int) -> None:
        self._archive, self.name, self.size = archive, name, size
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
    while block := archive.read(_BLOCK):
        if not block.strip(b"\0"):  # the end of an archive, or what fills it up
            continue
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        is_note = header.type == tarfile.XHDTYPE
        if not is_note and header.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise tarfile.ReadError(f"{header.name!r} is no plain file")
        member = _Member(archive, header.name, header.size if is_note or size is None else size)
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

    def __init__(self, paths: Pack) -> None:
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


def unpack_store(packs: Iterable[Pack], store: Store) -> Merged:
    """Merge packs into a store, an artifact at a time."""
    counts, unbound = {"added": 0, "present": 0, "damaged": 0}, 0
    for pieces in packs:
        with _opened(pieces) as archive:
            for member in _members(archive):
                outcome = merge(store, member.name, member, member.size)
                counts[outcome] += 1
                unbound += outcome == "added" and artifact_at(member.name) in store.unbound(Path(member.name).stem)
    return Merged(**counts, unbound=unbound)
