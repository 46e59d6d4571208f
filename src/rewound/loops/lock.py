"""One run trains in a folder: an advisory lock, which the system releases when the process ends, after `kill -9` too.

The lock is flock's, which belongs to one open file. A record lock (lockf) belongs to the process, and is lost as soon
as the process closes any other descriptor of the same file, as a copy of the folder does. The workers of a DataLoader
inherit an open file when they are forked, and outlive a killed process by seconds; so they close it first of all. Over
NFS, Linux takes flock for a record lock at the server: it holds between machines, and the server must have locks.

Within one process a later run in the same thread takes the folder over, as from a notebook's cell that was interrupted
and is run again: the earlier run is left, and an error if somebody goes on with it. A run in another thread is refused.

With several processes (DistributedDataParallel) rank 0 holds the lock for all of them.
"""

import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rewound.foundations.errors import InputError, warn
from rewound.loops import ranks


@dataclass(eq=False)
class Held:
    """A folder that a run of this process trains in."""

    folder: Path
    leave: Callable[[], object] = lambda: None
    """Ends the run, as leaving its loop does."""
    thread: threading.Thread = field(default_factory=threading.current_thread)
    file: int | None = None
    """The descriptor that holds the lock; None on other ranks, in forked children and where there are no locks."""
    taken_over: bool = False

    def check(self) -> None:
        """An error if a later run has taken the folder over."""
        if self.taken_over:
            raise InputError(
                f"a later run of this process trains in {self.folder}, so this one has ended; give each run a "
                "checkpoint folder of its own"
            )

    def release(self) -> None:
        """Let the next one in; what a later run has taken over stays with it."""
        if _HELD.get(self.folder) is self:
            del _HELD[self.folder]
        if self.file is not None:
            os.close(self.file)
            self.file = None


_HELD: dict[Path, Held] = {}


@contextmanager
def locked(folder: Path) -> Iterator[Held]:
    """Inside, the folder is there, and no other run gets past this line with it."""
    held = Held(folder.resolve())
    try:
        problem = _take_over(held)
        if problem := ranks.from_first(problem or (None if ranks.rank() or held.file is not None else _lock(held))):
            raise InputError(problem)
        _HELD[held.folder] = held
        yield held
    finally:
        held.release()


def _take_over(held: Held) -> str | None:
    """Leave an earlier run of this process in the same folder and take its lock; or say what stands against it."""
    earlier = _HELD.get(held.folder)
    if earlier is None:
        return None
    if earlier.thread.is_alive() and earlier.thread is not held.thread:
        return (
            f"another thread of this process trains in {held.folder} ({earlier.thread.name}); wait for it, or give "
            "another checkpoint folder"
        )
    earlier.taken_over = True
    held.file, earlier.file = earlier.file, None
    earlier.leave()
    return None


def _lock(held: Held) -> str | None:
    """Lock the folder, or return what stands against it."""
    folder = held.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        return f"cannot keep checkpoints in {folder}: {error.strerror}; give another folder"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        owner = os.read(file, 200).decode(errors="replace")
        os.close(file)
        return f"another process trains in {folder} ({owner}); wait for it, or give another checkpoint folder"
    except OSError as error:
        os.close(file)
        warn(f"cannot lock {folder} ({error.strerror}): see to it that no second process trains there")
        return None
    held.file = file
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return None


def _in_child() -> None:
    """A forked child trains nothing here: it closes what it inherited, so that the lock ends with the parent."""
    for held in _HELD.values():
        if held.file is not None:
            os.close(held.file)
            held.file = None
    _HELD.clear()


os.register_at_fork(after_in_child=_in_child)
