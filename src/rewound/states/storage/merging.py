"""Artifacts of another store: merged if they are intact and better than what is here, and checked before that.

What was measured is never overwritten; a result without a measurement gives way to one that has it. Tensors are where
training goes on from: a draft gives way to one of more steps, a state without the optimizer's slots to one with them.
Whichever of two are used, the results are the same on one kind of machine; two kinds differ in the last bits, and each
result says what it was made with (`made`).
"""

import errno
import os
import shutil
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from rewound.foundations.errors import InputError
from rewound.foundations.wholefiles import replacing
from rewound.states.storage.artifact import Damaged
from rewound.states.storage.layout import artifact_at
from rewound.states.storage.refusals import refusal, said_of
from rewound.states.storage.resultfile import LONGEST_RESULT, decoded
from rewound.states.storage.statefile import LONGEST_HEADER, Kept, check_header, read_state
from rewound.states.storage.store import Store

Outcome: TypeAlias = Literal["added", "present", "damaged"]
_CHUNK = 1 << 20  # bytes that are copied at a time


class Readable(Protocol):
    """What bytes are read from, in order."""

    def read(self, size: int, /) -> bytes: ...


class _Present(Exception):
    """What arrives is no better than what is here."""


def merge(store: Store, name: str, file: Readable, size: int) -> Outcome:
    """Take an artifact of another store, named as it is there, from the next `size` bytes of a file."""
    artifact = artifact_at(name)
    if artifact is None:
        raise InputError(f"{name!r} is not an artifact of a store")
    try:
        if artifact.kind == "result":
            _merge_result(store, artifact.key, file, size)
        else:
            _merge_tensors(store, artifact.key, store.root / name, file, size, draft=artifact.kind == "draft")
    except _Present:
        return "present"
    except Damaged as damage:
        store.say(f"damaged: {name} {damage.reason}; left out")
        return "damaged"
    return "added"


def _merge_result(store: Store, key: str, file: Readable, size: int) -> None:
    if size > LONGEST_RESULT:
        raise Damaged(f"has {size:,} bytes, and a result at most {LONGEST_RESULT:,}")
    arriving, mine = decoded(file.read(size), key), store.result(key)
    if mine is not None and ("val" in mine or "failed" in mine or "val" not in arriving):
        raise _Present
    store.publish(key, arriving)


def _merge_tensors(store: Store, key: str, path: Path, file: Readable, size: int, *, draft: bool) -> None:
    """Header first: nothing is written of a file whose header is not that of this state, or of another length."""
    begin = file.read(min(8, size))
    length = int.from_bytes(begin, "little")
    if not 8 <= 8 + length <= size or length > LONGEST_HEADER:
        raise Damaged
    header = file.read(length)
    check_header(header, size - 8 - length, key, draft=draft)
    if size > shutil.disk_usage(store.root).free:
        raise refusal(store.root, OSError(errno.ENOSPC, "no space"))
    with said_of(store.root), replacing(path) as temporary:
        with temporary.open("wb") as written:
            written.write(begin + header)
            left = size - 8 - length
            while left > 0 and (content := file.read(min(left, _CHUNK))):
                left -= written.write(content)
            written.flush()
            os.fsync(written.fileno())
        arriving = read_state(temporary, key, draft=draft)
        if (_has_further if draft else _has_state)(store, key, arriving):
            raise _Present


def _has_state(store: Store, key: str, arriving: Kept) -> bool:
    return store.has_state(key, to_train=arriving.has_slots)


def _has_further(store: Store, key: str, arriving: Kept) -> bool:
    """Whether the node has ended here, or is at least as far."""
    if store.result(key) is not None:
        return True
    mine = store.load(key, draft=True)  # all of it: one that is damaged gives way
    return mine is not None and mine.state.position >= arriving.state.position
