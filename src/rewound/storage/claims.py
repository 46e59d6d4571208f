"""Who is working on what: one small file per node, with the owner's host, process and heartbeat.

A claim whose local owner is dead is free at once; another host's, and one whose owner cannot be seen from here, when
its heartbeat has stopped for two minutes.
"""

import fcntl
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rewound.wholefiles import write_whole

HEARTBEAT = 2.0
"""Seconds between two signs of how far the work is."""
STALE = 120.0
"""Seconds without one after which another host's claim is taken over."""
_PROC = Path("/proc")
_UNSEEN = "unknown"  # the birth of a process that is there, but not shown: another user's, or without /proc


class Claim(NamedTuple):
    """Who works on a node, and how many steps it has done."""

    host: str
    """Its name, and which boot and process numbers of it are meant (`_host`)."""
    pid: int
    birth: str | None
    """When the process was born, so that a number used again is not taken for it."""
    steps: int

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
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(path: Path, steps: int) -> None:
    write_whole(path, json.dumps(_mine(steps)).encode(), durable=False)


def _is_mine(path: Path) -> bool:
    return (owner := _read(path)) is not None and owner[:3] == _mine(0)[:3]


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


def _mine(steps: int) -> Claim:
    pid = os.getpid()
    return Claim(_host(), pid, _process_start(pid), steps)


@cache
def _host() -> str:
    """This host, since it was started, and as its processes are numbered here: containers may share its name."""
    try:
        numbered = f"{(_PROC / 'sys/kernel/random/boot_id').read_text()} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return socket.gethostname()
    return f"{socket.gethostname()}/{hashlib.blake2b(numbered.encode(), digest_size=4).hexdigest()}"


def _read(path: Path) -> Claim | None:
    """The claim in a file; None: it is not there, or makes no sense."""
    try:
        return Claim(*json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _is_abandoned(path: Path) -> bool:
    """Whether nobody alive holds the claim in a file."""
    owner = _read(path)
    if owner is None:
        return True
    if owner.host == _host() and (born := _process_start(owner.pid)) != _UNSEEN:
        return born != owner.birth
    try:
        return time.time() - path.stat().st_mtime > STALE
    except FileNotFoundError:  # given up since it was read
        return True


def _process_start(pid: int) -> str | None:
    """When a local process was born: with its number, it names one process for ever. None: it is dead."""
    try:
        fields = (_PROC / f"{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return _UNSEEN if _is_alive(pid) else None
    return None if fields[0] in "ZX" else fields[19]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
