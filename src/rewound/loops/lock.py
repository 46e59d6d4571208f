"""One process trains in a folder: an advisory lock, which the system lets go of when the process ends, `kill -9` too.

With several processes (DistributedDataParallel) rank 0 holds it for all of them.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rewound.errors import InputError
from rewound.loops import ranks


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Inside, the folder is there, and no other process gets past this line with it."""
    with ExitStack() as held:
        if problem := ranks.from_first(None if ranks.rank() else _lock(folder, held)):
            raise InputError(problem)
        yield


def _lock(folder: Path, held: ExitStack) -> str | None:
    """Lock the folder until `held` closes, or return what stands against it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = held.enter_context((folder / "lock").open("a+"))
    except OSError as error:
        return f"cannot keep checkpoints in {folder}: {error.strerror}; give another folder"
    try:
        # Not flock, which the workers of a DataLoader inherit: they outlive a killed process by seconds.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        return f"another process trains in {folder} ({file.read()}); wait for it, or give another checkpoint folder"
    except OSError:
        return None  # a file system without locks
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return None
