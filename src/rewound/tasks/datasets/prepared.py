"""A prepared data set: a file of tensors in the cache, with a checksum of them; it is there whole or not at all."""

import errno
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rewound.foundations.errors import InputError
from rewound.foundations.wholefiles import replacing


class Damaged(InputError):
    """What is there is not what was written, or not of this version; `fault` says so without the remedy."""

    def __init__(self, fault: str, remedy: str) -> None:
        super().__init__(fault, remedy)
        self.fault = fault

    def __str__(self) -> str:
        return ": ".join(self.args)


def check_source(source: Path | None) -> None:
    """An error if a copy is given that is not there, whether or not it would be read."""
    if source is not None and not source.exists():
        raise InputError(f"no file or folder {source}: give an archive or a folder that exists")


def publish(tensors: dict[str, Tensor], target: Path) -> None:
    """Write the file; the checksum is over the tensors in their order."""
    try:
        with replacing(target) as temporary:
            save_file(tensors, temporary, metadata={"sha256": _checksum(tensors)})
    except (OSError, SafetensorError) as error:
        size = sum(tensor.nbytes for tensor in tensors.values()) // 10**6 + 10
        raise cannot_write(target, error, f"{size} MB") from error


def cannot_write(target: Path, error: OSError | SafetensorError, needed: str) -> InputError:
    """What to do about data that cannot be written: make room if the disk is full, else choose another folder."""
    # An error of safetensors has no number; it writes to a folder in which a file was made just before.
    full = isinstance(error, SafetensorError) or error.errno in (errno.ENOSPC, errno.EDQUOT)
    room = f"free {needed} there, or " if full else ""
    return InputError(f"cannot write {target}: {error}; {room}set REWOUND_CACHE to a folder that can be written")


def read(path: Path, remedy: str, names: Sequence[str] | None = None) -> dict[str, Tensor] | None:
    """What was published, or None if nothing was; `names` are the tensors in the order of the checksum, else sorted."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in names or sorted(file.keys())}
            written = (file.metadata() or {}).get("sha256")
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{path} is damaged ({error})", f"{remedy} to make it anew") from error
    if _checksum(tensors) != written:
        raise Damaged(f"{path} is damaged (its checksum does not hold)", f"{remedy} to make it anew")
    return tensors


def checksum_of(path: Path) -> str | None:
    """The checksum that a file was published with, if it is there; its tensors are not read."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("sha256")
    except (OSError, SafetensorError):
        return None


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    checksum = hashlib.sha256()
    for name, tensor in tensors.items():
        checksum.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        checksum.update(tensor.numpy().data)
    return checksum.hexdigest()
