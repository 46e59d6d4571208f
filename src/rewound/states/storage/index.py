"""Many results in few files, so that a hundred thousand of them need not be opened one by one: a cache, and no more.

index/DIGEST    a segment: results as they were read and checked, without their histories, each with the version and
                size of its file then; first the summaries, then curves and layers, so that who needs only the former
                does not unpack the latter

Curves and layers are kept by columns: all steps of a segment in one list, all losses in another. To read and check such
lists takes a fraction of the time that a list for each point takes, and an object for each layer.

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
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any, Final, NamedTuple, cast

from rewound.foundations.errors import InputError
from rewound.states.storage.artifacts import (
    CurvePoint,
    LayerCount,
    Measurements,
    Summary,
    are_counts,
    are_numbers,
    is_key,
    is_texts,
    summary_of,
)
from rewound.states.storage.backend import Backend, Listed, where_writable

ENOUGH: Final = 1000
"""Results that are worth a segment."""
_FOLDER: Final = "index/"
_RESULTS, _BYTES = 10_000, 2**26  # of one segment, at which it is full
_POINT, _LAYER = CurvePoint._fields, ("kept", "total", "flops")
_COLUMNS = ("points", *_POINT, "network", *_LAYER)
_MOST_BYTES = 2**27  # of one that is read: a full one, and the largest result; a small file could unpack to any amount


class Entry(NamedTuple):
    """A result in a segment."""

    key: str
    stamp: str
    """The version and size of its file, as they were listed before it was read."""
    result: Summary
    """Its summary; `Measurements`, of which curve and layers are checked, where more was asked for."""


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


class Segment:
    """Results that were read from their files, until they are written as one file of the index."""

    def __init__(self) -> None:
        self._summaries: list[tuple[str, str, Summary]] = []
        self._size = 0
        self._columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        self._networks: dict[tuple[str, ...], int] = {}

    @property
    def is_full(self) -> bool:
        return len(self._summaries) >= _RESULTS or self._size >= _BYTES

    def add(self, key: str, stamp: str, result: Measurements, size: int) -> None:
        """Take a result, and how many bytes its file has."""
        self._size += size
        self._summaries.append((key, stamp, summary_of(result)))
        columns, curve, layers = self._columns, result["curve"], result.get("layers")
        columns["points"].append(len(curve))
        for name, values in zip(_POINT, zip(*curve, strict=True), strict=False):
            columns[name] += values
        names = None if layers is None else tuple(layers)
        columns["network"].append(names if names is None else self._networks.setdefault(names, len(self._networks)))
        for name in _LAYER:
            columns[name] += map(itemgetter(name), layers.values()) if layers else ()

    def write(self, backend: Backend) -> None:
        """Write it, unless it is empty; a place that cannot be written is left as it is."""
        if not self._summaries:
            return
        header, body = json.dumps(self._summaries), json.dumps({**self._columns, "networks": [*self._networks]})
        content = zlib.compress(header.encode(), 1) + zlib.compress(body.encode(), 1)
        with suppress(InputError):  # it can only be read, or the disk is full: a cache is no reason to fail
            backend.create(_path(content), content, durable=False)


def drop(backend: Backend) -> None:
    """Remove the index; it is made again of what is read next."""
    with where_writable():
        for path in backend.list(_FOLDER):
            backend.remove(path)


def _path(content: bytes) -> str:
    return f"{_FOLDER}{hashlib.blake2b(content, digest_size=16).hexdigest()}"


def _entries(content: bytes, whole: bool) -> list[Entry] | None:
    """What a segment holds; None: it is none, or one of an earlier version."""
    try:
        unpacking = zlib.decompressobj()
        found = [Entry(*entry) for entry in json.loads(unpacking.decompress(content, _MOST_BYTES))]
        if not all(is_key(e.key) and isinstance(e.stamp, str) and isinstance(e.result, dict) for e in found):
            return None
        if not whole:
            return found
        columns = json.loads(zlib.decompressobj().decompress(unpacking.unused_data, _MOST_BYTES))
        details = zip(found, _curves(columns), _layers(columns), strict=True)
        return [
            Entry(key, stamp, cast(Measurements, {**summary, "curve": curve, **layers}))
            for (key, stamp, summary), curve, layers in details
        ]
    except (zlib.error, ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None


def _curves(columns: Mapping[str, list[Any]]) -> list[list[CurvePoint]]:
    """The curve of each result."""
    counts, (steps, rates, losses) = columns["points"], (columns[name] for name in _POINT)
    if not (are_counts(counts) and are_counts(steps) and are_numbers(rates) and are_numbers(losses)):
        raise ValueError("no columns of curves")
    points = map(partial(tuple.__new__, CurvePoint), zip(steps, rates, losses, strict=True))
    curves = [list(islice(points, count)) for count in counts]
    if sum(counts) != len(steps):
        raise ValueError("not as many points as curves have")
    return curves


def _layers(columns: Mapping[str, list[Any]]) -> list[dict[str, dict[str, LayerCount]]]:
    """The layers of each result, as a part of it; one that was not evaluated has none."""
    networks, numbers, (kept, total, flops) = columns["networks"], columns["network"], (columns[n] for n in _LAYER)
    if not (all(map(is_texts, networks)) and all(map(are_counts, (kept, total, flops)))):
        raise ValueError("no columns of layers")
    if not are_counts([number for number in numbers if number is not None]):
        raise ValueError("no numbers of networks")
    counts: Iterator[LayerCount] = (
        {"kept": k, "total": t, "flops": f} for k, t, f in zip(kept, total, flops, strict=True)
    )
    named = [None if number is None else networks[number] for number in numbers]
    if sum(len(names) for names in named if names is not None) != len(kept):
        raise ValueError("not as many layers as networks have")
    return [{} if names is None else {"layers": dict(zip(names, counts, strict=False))} for names in named]


def _is_stale(found: list[Entry], stamps: Mapping[str, str]) -> bool:
    """Whether every file has been replaced since, as when a store was copied."""
    return all(stamps.get(entry.key, entry.stamp) != entry.stamp for entry in found)
