"""A file that is there whole or not at all, with a checksum of what it holds.

It is written beside its place and published by one atomic rename. Nothing is ever pickled.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor


class Damaged(Exception):
    """An artifact whose content is not what its checksum says, or contradicts itself."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` in one rename when the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    os.close(handle)
    try:
        yield Path(name)
        Path(name).chmod(0o644)  # mkstemp and safetensors keep files to their owner; a store may be shared
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def write_whole(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a file of these bytes; `durable` waits until the disk has them."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor on the CPU in memory of its own: safetensors refuses tied weights that share it."""
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        out[name] = plain.clone() if plain.data_ptr() in seen else plain
        seen.add(plain.data_ptr())
    return out


def digest(content: Mapping[str, object]) -> str:
    """32 hexadecimal digits, a function of what JSON says of `content`."""
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def tensor_digest(tensors: Mapping[str, Tensor], header: str) -> str:
    """32 hexadecimal digits, a function of the header and of every tensor's name, type, shape and bits."""
    whole = hashlib.blake2b(header.encode(), digest_size=16)
    for name in sorted(tensors):
        t = tensors[name]
        whole.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        whole.update(t.reshape(-1).view(torch.uint8).numpy().data if t.numel() else b"")
    return whole.hexdigest()
