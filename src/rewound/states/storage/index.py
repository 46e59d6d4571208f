"""Many results in few files, so that a hundred thousand of them need not be opened one by one: a cache, and no more.

index/DIGEST    a segment: results as they were read and checked, each with the version and size of its file then; first
                their summaries, then their files, so that who needs only the former does not unpack the latter

The files in `results/` alone count. What a segment has of a result is used only while the listing gives the file the
same version and size. Every other result is read from its file, and whoever has read many writes a segment of them. A
segment that is damaged, stale or gone costs time and nothing else, so it may be deleted at any time. Its name is the
digest of its content: two writers of the same results create one file, so that no lock is needed.

One kind of damage is not seen here: a disk that loses bits without a new version of the file. What was measured is then
still right, in the index. `rewound verify` reads every file and finds it; it removes the index first, so that nothing
wrong can last in there.
"""

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Final, NamedTuple, cast

from rewound.foundations.errors import InputError
from rewound.states.storage.artifacts import Summary, is_key
from rewound.states.storage.backend import Backend, Listed, where_writable

ENOUGH: Final = 1000
"""Results that are worth a segment."""
_FOLDER: Final = "index/"
_RESULTS, _BYTES = 10_000, 2**26  # of one segment, at which it is full
_MOST_BYTES = 2**27  # of one that is read: a full one, and the largest result; a small file could unpack to any amount


class Entry(NamedTuple):
    """A result in a segment."""

    key: str
    stamp: str
    """The version and size of its file, as they were listed before it was read."""
    summary: Summary
    content: bytes
    """All of its file, whose checksum was right; empty where only summaries were asked for."""


def stamp_of(listed: Listed) -> str:
    """What tells one version of a file from another."""
    return f"{listed.version} {listed.size}"


def entries(backend: Backend, stamps: Mapping[str, str], *, whole: bool = False) -> Iterator[Entry]:
    """What the index has of the results whose files have these stamps, by key; `whole`: not only summaries."""
    for path in sorted(backend.list(_FOLDER)):
        content = None
        with suppress(InputError):  # one that another user wrote, and this one may not read
            content = backend.read(path, _MOST_BYTES)
        if content is None:  # or removed since it was listed
            continue
        found = _entries(content, whole) if path == _path(content) else None
        if found is None or _is_stale(found, stamps):
            with where_writable():
                backend.remove(path)
        else:
            yield from (entry for entry in found if stamps.get(entry.key) == entry.stamp)


def add(backend: Backend, read: Iterable[Entry]) -> None:
    """Keep results that were read from their files, in segments; a place that cannot be written is left as it is."""
    waiting = iter(read)
    with suppress(InputError):  # it can only be read, or the disk is full: a cache is no reason to fail
        while segment := list(_full(waiting)):
            header = json.dumps([(key, stamp, len(content), summary) for key, stamp, summary, content in segment])
            body = b"".join(entry.content for entry in segment)
            content = zlib.compress(header.encode(), 1) + zlib.compress(body, 1)
            backend.create(_path(content), content, durable=False)


def drop(backend: Backend) -> None:
    """Remove the index; it is made again of what is read next."""
    with where_writable():
        for path in backend.list(_FOLDER):
            backend.remove(path)


def _full(waiting: Iterator[Entry]) -> Iterator[Entry]:
    """As many as fit into a segment."""
    size = 0
    for entry in islice(waiting, _RESULTS):
        yield entry
        if (size := size + len(entry.content)) >= _BYTES:
            return


def _path(content: bytes) -> str:
    return f"{_FOLDER}{hashlib.blake2b(content, digest_size=16).hexdigest()}"


def _entries(content: bytes, whole: bool) -> list[Entry] | None:
    """What a segment holds; None: it is none, or one of an earlier version."""
    try:
        unpacking = zlib.decompressobj()
        header = json.loads(unpacking.decompress(content, _MOST_BYTES))
        body = zlib.decompressobj().decompress(unpacking.unused_data, _MOST_BYTES) if whole else b""
        found, begin = list[Entry](), 0
        for key, stamp, size, summary in header:
            if not is_key(key) or not isinstance(stamp, str) or not size > 0 or not isinstance(summary, dict):
                return None
            found.append(Entry(key, stamp, cast(Summary, summary), body[begin : begin + size]))
            begin += size
    except (zlib.error, ValueError, TypeError, RecursionError):
        return None
    return found if begin == len(body) or not whole else None


def _is_stale(found: list[Entry], stamps: Mapping[str, str]) -> bool:
    """Whether every file has been replaced since, as when a store was copied."""
    return all(stamps.get(entry.key, entry.stamp) != entry.stamp for entry in found)
