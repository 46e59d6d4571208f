"""A file of torch with a seal: a checksum over all its bytes, the run that wrote it, and its name.

torch writes a zip archive, and does not check it when it is read: a flipped bit is another weight. The seal is the
archive's comment, so that the file stays one that `torch.load` reads:

    {"run": "8f0c...", "file": "level-03", "sha256": "5b1e..."}

So a file that is damaged, or stands in the place of another, is found out before anything is read from it. SHA-256
because most processors have instructions for it: it takes 0.6 s per GB, and torch 0.6 s to write the file. (BLAKE2b
takes 1.2 s; all on one thread of an AMD EPYC.)
"""

import errno
import hashlib
import os
import re
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from rewound.foundations.errors import InputError
from rewound.foundations.wholefiles import replacing

_END = b"PK\x05\x06"  # begins the 22 bytes that end a zip archive; the last two are the length of its comment
_LONGEST = 1000  # bytes of an end with a seal
_SEAL = re.compile(rb'\{"run": "(\w*)", "file": "([\w-]*)", "sha256": "(\w*)"\}')


class Damaged(Exception):
    """A file whose bytes are not those that were written."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"cannot read {path}: it is damaged")
        self.path = path


class Seal(NamedTuple):
    """What a file says of itself."""

    run: str
    file: str

    def with_checksum(self, of_bytes: "hashlib._Hash") -> bytes:
        """The comment of an archive of these bytes."""
        whole = of_bytes.copy()
        whole.update(f"{self.run} {self.file}".encode())
        return f'{{"run": "{self.run}", "file": "{self.file}", "sha256": "{whole.hexdigest()}"}}'.encode()


def write_sealed(content: object, path: Path, run: str) -> None:
    """Write the content; the file is there whole or not at all."""
    with replacing(path) as temporary, temporary.open("r+b") as file:
        written = _Hashed(file)
        torch.save(content, written)  # type: ignore[arg-type]  # which writes and flushes, and does nothing else
        comment = Seal(run, path.stem).with_checksum(written.hash)
        file.seek(-2, os.SEEK_END)
        file.write(len(comment).to_bytes(2, "little") + comment)


def read_unchecked(path: Path) -> object:
    """What a file holds, its tensors on the CPU; `seal_of` says whether it is what was written. No code in it runs."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that nobody has checked make torch and pickle raise anything
        # A file that was cut short is an invalid argument to torch; what else a system says may pass.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise _unreadable(path, error) from error
        raise Damaged(path) from error


def seal_of(path: Path) -> Seal | None:
    """The seal of a file whose bytes are those that were written; None where there is none, as in earlier versions."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LONGEST))
            tail = file.read()
            end = tail.rfind(_END)
            if end < 0:
                raise Damaged(path)
            length, comment = tail[end + 20 : end + 22], tail[end + 22 :]
            if not comment:
                return None
            found = _SEAL.fullmatch(comment)
            if found is None or int.from_bytes(length, "little") != len(comment):
                raise Damaged(path)
            seal = Seal(found[1].decode(), found[2].decode())
            if seal.with_checksum(_hash_of(file, size - len(comment))) != comment:
                raise Damaged(path)
            return seal
    except OSError as error:
        raise _unreadable(path, error) from error


class _Hashed:
    """A file that is hashed while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.hash = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def _hash_of(file: BinaryIO, size: int) -> "hashlib._Hash":
    """The hash of an archive of that size as torch wrote it, with a comment of length 0."""
    hashed, left = hashlib.sha256(), size - 2
    file.seek(0)
    while left > 0 and (data := file.read(min(left, 1 << 20))):
        hashed.update(data)
        left -= len(data)
    hashed.update(b"\0\0")
    return hashed


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"cannot read {path}: {error.strerror}; make it readable and run again")
