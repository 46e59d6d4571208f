"""How many units of a group stay, and which: the authors' count, with at least `floor` of every tensor."""

import math
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from rewound.errors import InputError
from rewound.pruning.mask import Mask
from rewound.pruning.ranking import largest


def kept_count(total: int, density: float) -> int:
    """How many of `total` weights stay: n - ceil((n-1)(1-density)), the authors' count (law 2).

    >>> kept_count(271152, 0.2), kept_count(1000, 0.8**3) == kept_count(1000, 0.512)
    (54231, True)
    """
    # Rounded first: 0.8**3 and 0.512 differ in the last bit, and must not differ in a weight.
    return total - math.ceil(round((total - 1) * (1 - density), 6))


def kept_of(sizes: Collection[int], density: float, floor: float) -> int:
    """How many units of a group stay, if those are enough for the floor of each tensor."""
    kept, least = kept_count(sum(sizes), density), sum(_least(size, floor) for size in sizes)
    if kept < least:
        raise InputError(f"floor {floor:g} keeps {least:,} weights, but density {density:g} only {kept:,}; lower floor")
    return kept


def cut(
    sizes: Mapping[str, int],
    units: Callable[[str], Tensor],
    density: float,
    masks: Mask,
    floor: float,
) -> dict[str, Tensor]:
    """Keep the `kept_count` units with the largest scores of the group; among equals the later index stays."""

    def scores(name: str) -> Tensor:
        s = _comparable(units(name).cpu())
        if not floor:
            return s
        # What is gone already is below every score, so that only what is left is protected.
        return _protect(s.masked_fill(~masks[name].to("cpu"), -1.0) if name in masks else s, floor)

    kept = kept_of(sizes.values(), density, floor)
    alive = sum(masks.counts.get(name, size) for name, size in sizes.items())
    if kept > alive:
        raise InputError(
            f"density {density:g} keeps {kept:,} weights, but only {alive:,} are left: a mask only shrinks"
        )
    return largest(list(sizes), scores, kept, masks)


def _comparable(scores: Tensor) -> Tensor:
    """In a type that numpy has and that tells all of them apart."""
    small = scores.is_floating_point() and scores.dtype.itemsize <= 4
    return scores.to(torch.float32 if small else torch.float64)


def _protect(scores: Tensor, floor: float) -> Tensor:
    """Lift the top `floor` of a tensor above every other score."""
    flat = scores.clone().reshape(-1)
    top = flat.argsort(stable=True)[-_least(flat.numel(), floor) :]
    protects = (flat[top] >= 0) & flat[top].isfinite()  # neither what is gone already nor what cannot be ranked
    flat[top[protects]] = torch.finfo(flat.dtype).max
    return flat.reshape(scores.shape)


def _least(total: int, floor: float) -> int:
    """How many units a floor keeps: something of every tensor, however low it is."""
    return max(1, math.ceil(round(floor * total, 6))) if floor else 0
