"""What goes into the files of a store: tensors in memory of their own, and checksums. Nothing is ever pickled."""

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor


class Damaged(Exception):
    """An artifact that is not what was written under its key; `reason` follows its name in a sentence."""

    def __init__(self, reason: str = "is not what was written") -> None:
        super().__init__(reason)
        self.reason = reason


def separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor on the CPU in memory of its own: safetensors refuses tied weights that share it."""
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        out[name] = plain.clone() if plain.data_ptr() in seen else plain
        seen.add(plain.data_ptr())
    return out


def digest(content: object) -> str:
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
