"""The processes of a data-parallel run agree: rank 0 decides, and everybody checks that they hold the same.

Without torch.distributed, or with one process, everything here is the identity. `group` is torch's process group, by
default that of all processes.
"""

import hashlib
from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rewound.foundations.errors import InputError
from rewound.method.pruning.mask import Mask

T = TypeVar("T")


def rank() -> int:
    """The number of this process, 0 for the first."""
    return dist.get_rank() if _many() else 0


def world() -> int:
    """How many processes there are."""
    return dist.get_world_size() if _many() else 1


def from_first(value: T) -> T:
    """Rank 0's value, on every rank."""
    if not _many():
        return value
    box = [value]
    dist.broadcast_object_list(box, group_src=0)
    return box[0]


def gathered(value: T, group: ProcessGroup | None = None) -> list[T]:
    """The values of all ranks, in order."""
    if not _many():
        return [value]
    box: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(box, value, group)
    return box  # type: ignore[return-value]  # filled by now


def check_same(tensors: Mapping[str, Tensor], remedy: str, group: ProcessGroup | None = None) -> None:
    """An error on every rank, with the name, if a rank holds another tensor than rank 0."""
    digests = gathered({name: _bytes_digest(tensor) for name, tensor in tensors.items()}, group)
    for number, held in enumerate(digests):
        for name in {**digests[0], **held}:
            if held.get(name) != digests[0].get(name):
                raise InputError(f"process {number} holds another {name} than process 0; {remedy}")


def share(model: nn.Module) -> None:
    """Give every rank the weights and buffers of rank 0."""
    if _many():
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor, src=0)


def agreed(mask: Mask, model: nn.Module) -> Mask:
    """Rank 0's mask on every rank; an error where a rank holds other weights under it than rank 0.

    Masks of diverged replicas would differ silently, and with them the networks.
    """
    if not _many():
        return mask
    shapes = {name: tuple(kept.shape) for name, kept in mask.items()}
    devices = {name: kept.device for name, kept in mask.items()}
    first = Mask.unpacked(from_first(mask.packed()), shapes)
    same = Mask({name: kept.to(devices[name]) for name, kept in first.items()})
    digests = gathered(_digest(same, model))
    differing = [number for number, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise InputError(
            f"rank {differing[0]} holds other weights than rank 0, so they would prune differently; give all ranks "
            "the same weights, for example by wrapping the model in DistributedDataParallel"
        )
    return same


def _many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _bytes_digest(tensor: Tensor) -> str:
    held = tensor.detach().cpu().contiguous()
    content = held.reshape(-1).view(torch.uint8).numpy().data
    return hashlib.blake2b(content, digest_size=16, key=f"{held.dtype}{tuple(held.shape)}".encode()[:64]).hexdigest()


def _digest(mask: Mask, model: nn.Module) -> str:
    """What a rank holds: its mask, and the weights that the mask keeps."""
    digest = hashlib.blake2b(digest_size=16)
    for parameter, kept in mask.pairs(model):
        digest.update(kept.cpu().numpy().tobytes())
        digest.update(parameter.detach()[kept].view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
