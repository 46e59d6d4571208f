"""Files that are there whole or not at all: written beside their place, and published by one atomic rename.

A reader sees the old file or the new one, never half of it. Their mode is that of any new file, by the umask.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` in one rename when the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{secrets.token_hex(8)}.part"
    try:
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        mode = os.fstat(handle).st_mode
        os.close(handle)
        yield temporary
        temporary.chmod(mode)  # safetensors keeps what it writes to its owner
        temporary.replace(path)
    except OSError as error:
        if str(error.filename) == str(temporary):
            error.filename, error.filename2 = str(path), None  # the name that a person knows
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a file of these bytes; `durable` waits until the disk has them."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
