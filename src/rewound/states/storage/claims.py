"""Who is working on what: one small file per node, with the owner's host, process and heartbeat.

A claim whose local owner is dead is free at once; another host's, and one whose owner cannot be seen from here, when
its heartbeat has stopped for two minutes.
"""

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from rewound.foundations.owners import Owner, is_process_number, this_process
from rewound.foundations.wholefiles import write_whole

HEARTBEAT = 2.0
"""Seconds between two signs of how far the work is."""
STALE = 120.0
"""Seconds without one after which another host's claim is taken over."""
_LONGEST = 4096  # bytes of a claim; one has about a hundred


class Claim(NamedTuple):
    """Who works on a node, and how many steps it has done."""

    host: str
    pid: int
    birth: str | None
    steps: int

    @property
    def owner(self) -> Owner:
        return Owner(self.host, self.pid, self.birth)

    @property
    def host_name(self) -> str:
        return self.host.partition("/")[0]


def take(path: Path) -> bool:
    """Claim the work that this file stands for, unless somebody alive has it."""
    with _locked(path.parent):
        if path.exists() and not _is_abandoned(path):
            return False
        _write(path, 0)
        return True


def beat(path: Path, steps: int) -> None:
    """Say that this process is at the work, and how many steps it has done, unless another has taken it over."""
    with _locked(path.parent):
        if _is_mine(path):
            _write(path, steps)


def give_up(path: Path) -> None:
    """Let others have the work, unless one of them has taken it over."""
    with suppress(FileNotFoundError), _locked(path.parent):  # somebody may have removed the store
        if _is_mine(path):
            path.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Inside, no other process looks at a claim of the folder and acts on it."""
    # A link in its place is refused: somebody else's file would be locked, or made.
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _write(path: Path, steps: int) -> None:
    write_whole(path, json.dumps([*this_process(), steps]).encode(), durable=False)


def _is_mine(path: Path) -> bool:
    return (claim := _read(path)) is not None and claim.owner == this_process()


@contextmanager
def heart(folder: Path) -> Iterator[None]:
    """Inside, this process's claims in a folder do not grow old, however long an epoch or a recomputation takes."""
    stop = threading.Event()

    def beats() -> None:
        while not stop.wait(STALE / 4):
            with suppress(OSError):  # a disk that does not answer: next time, then
                for path in filter(_is_mine, folder.glob("*.json")):
                    with suppress(FileNotFoundError):  # given up since it was listed
                        os.utime(path)

    thread = threading.Thread(target=beats, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def under_way(folder: Path) -> dict[str, Claim]:
    """The claims of a folder that somebody alive holds, by key."""
    found = ((path, _read(path)) for path in folder.glob("*.json"))
    return {path.stem: claim for path, claim in found if claim is not None and not _is_abandoned(path)}


def _read(path: Path) -> Claim | None:
    """The claim in a file; None: it is not there, or makes no sense."""
    try:
        with path.open("rb") as file:
            host, pid, birth, steps = json.loads(file.read(_LONGEST))
        host.encode(), (birth or "").encode()  # half a character pair cannot be printed
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    makes_sense = type(pid) is int and is_process_number(pid) and type(steps) is int and 0 <= steps < 2**63
    return Claim(host, pid, birth, steps) if makes_sense else None


def _is_abandoned(path: Path) -> bool:
    """Whether nobody alive holds the claim in a file."""
    claim = _read(path)
    if claim is None:
        return True
    if (lives := claim.owner.lives()) is not None:
        return not lives
    try:
        return time.time() - path.stat().st_mtime > STALE
    except FileNotFoundError:  # given up since it was read
        return True
