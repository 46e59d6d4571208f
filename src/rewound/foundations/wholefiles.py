"""Files that are there whole or not at all: written beside their place, and published by one atomic rename or link.

A reader sees the old file or the new one, never half of it. Their mode is that of any new file, by the umask. The name
of an unfinished file says which process writes it, so that what a killed one leaves can be removed at once. `writable`
finds out before some work whether its result can be written.
"""

import errno
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rewound.foundations.errors import InputError, as_path
from rewound.foundations.owners import owner_from, this_process

FORGOTTEN = 3600.0
"""Seconds after which an unfinished file is nobody's, where its writer cannot be seen from here."""
_UNFINISHED = re.compile(r"\.[0-9a-f]{16}(\.(?P<owner>[0-9a-f]+-[0-9]+-\w+))?\.part")
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK}
_OF_SAFETENSORS = re.compile(r"\.tmp[A-Za-z0-9]{6}")  # its own unfinished file, beside the one that it was given


@contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """A path in the folder for a file that is renamed inside the block, or removed when it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{secrets.token_hex(8)}.{this_process().as_word()}.part"
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` in one rename when the block succeeds."""
    with unfinished(path.parent) as temporary:
        try:
            handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            mode = os.fstat(handle).st_mode
            os.close(handle)
            yield temporary
            temporary.chmod(mode)  # safetensors keeps what it writes to its owner
            temporary.replace(path)
        except OSError as error:
            _name_target(error, temporary, path)
            raise


def _name_target(error: OSError, temporary: Path, path: Path) -> None:
    """Make an error about the temporary file name the file that the user knows."""
    if str(error.filename) == str(temporary):
        error.filename, error.filename2 = str(path), None


def write_whole(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a file of these bytes; `durable` waits until the disk has them."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def create_whole(path: Path, content: bytes, *, durable: bool) -> bool:
    """Write a file of these bytes unless there is one, in one step; whether this call has made it."""
    with unfinished(path.parent) as temporary:
        try:
            with os.fdopen(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), "wb") as file:
                file.write(content)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            return _linked(temporary, path, content)
        except OSError as error:
            _name_target(error, temporary, path)
            raise


def _linked(temporary: Path, path: Path, content: bytes) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return temporary.stat().st_nlink == 2  # NFS: done, but the answer was lost and the call repeated
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    else:
        return True
    # A file system without hard links, as that of a memory card: a process that is killed within these lines leaves a
    # part, which is found to be damaged.
    try:
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), "wb") as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


def remove_unfinished(folder: Path, after: float = FORGOTTEN) -> None:
    """Remove what killed writers left in a folder: at once where the writer is known to be dead, else `after` a while.

    The while is in seconds since something was written to the file.
    """
    if not folder.is_dir() or not (hidden := _hidden(folder)):
        return
    of_safetensors = [name for name in hidden if _OF_SAFETENSORS.fullmatch(name)]
    # Looked for after those: whoever writes by safetensors has an unfinished file of ours beside it all the time.
    ours = [(name, found) for name in _hidden(folder) if (found := _UNFINISHED.fullmatch(name))]
    # safetensors writes to its own file, and leaves ours as it was made.
    latest = max((_written(folder / name) for name in of_safetensors), default=0.0)
    if not [name for name, found in ours if not _removed(folder / name, found["owner"], latest, after)]:
        for name in of_safetensors:
            (folder / name).unlink(missing_ok=True)


def _hidden(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.name.startswith(".")]


def _written(path: Path) -> float:
    """When something was last written to a file; 0 if it is gone."""
    with suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


def _removed(path: Path, writer: str | None, latest: float, after: float) -> bool:
    """Remove an unfinished file, unless somebody may be writing it, or by way of it another one at `latest`."""
    owner = owner_from(writer) if writer else None
    lives = owner.lives() if owner else None
    with suppress(FileNotFoundError):
        written = max(path.stat().st_mtime, latest)
        if lives or (lives is None and _now_in(path.parent) - written <= after):
            return False
        path.unlink()
    return True


def _now_in(folder: Path) -> float:
    """The time by the clock that files there have: that of this machine may be another, or have been set."""
    with unfinished(folder) as file:
        file.touch()
        return file.stat().st_mtime


def writable(folder: str | Path, name: str = "out") -> Path:
    """The folder, which need not be there yet, if files can be written into it; nothing is left there.

    `name` is that of the argument or option that gave it.
    """
    folder = as_path(name, folder)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        # What a system says it allows is not all: root may write into /proc, which takes no files.
        with tempfile.TemporaryDirectory(dir=there, prefix=".rewound-"):
            return folder
    except NotADirectoryError:
        reason = f"{there} is not a folder"
    except OSError as error:
        reason = f"{there} takes no files ({error.strerror})"
    raise InputError(f"cannot write into {folder}: {reason}; choose another folder for {name}")


def writable_file(path: Path) -> Path:
    """The file, if it can be written."""
    if as_path("out", path).is_dir():
        raise InputError(f"cannot write {path}: it is a folder; give the path of a file for out")
    writable(path.parent)
    return path


def default_cache() -> Path:
    """Where data sets and copies of tensors live: $REWOUND_CACHE, else $XDG_CACHE_HOME/rewound, else ~/.cache/rewound.

    >>> default_cache().is_absolute()
    True
    """
    if own := os.environ.get("REWOUND_CACHE"):
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "rewound"
