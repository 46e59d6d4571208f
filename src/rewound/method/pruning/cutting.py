"""How many units of a group stay, and which: the authors' count, with at least `floor` of every tensor.

Where a weight is divided by the norm of its parts (`reparametrised`), a unit stays in each part, too.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rewound.foundations.errors import InputError, few
from rewound.method.pruning.mask import Mask
from rewound.method.pruning.ranking import largest


def kept_count(total: int, density: float) -> int:
    """How many of `total` weights stay: n - ceil((n-1)(1-density)), the authors' count (law 2).

    >>> kept_count(271152, 0.2), kept_count(1000, 0.8**3) == kept_count(1000, 0.512)
    (54231, True)
    """
    # Rounded first: 0.8**3 and 0.512 differ in the last bit, and must not differ in a weight.
    return total - math.ceil(round((total - 1) * (1 - density), 6))


def kept_of(sizes: Mapping[str, int], density: float, floor: float, parts: Mapping[str, int]) -> int:
    """How many units of a group stay, if those are enough for the floor of each tensor and for one in each part."""
    kept, least = kept_count(sum(sizes.values()), density), sum(_least(size, floor) for size in sizes.values())
    if kept < least:
        raise InputError(f"floor {floor:g} keeps {least:,} weights, but density {density:g} only {kept:,}; lower floor")
    divided = [name for name in sizes if name in parts]
    if kept < (needed := least + sum(parts[name] for name in divided)):
        raise InputError(
            f"density {density:g} keeps {kept:,} weights, but {needed:,} must stay, as {few(divided)} would else be "
            "divided by a norm of zero; prune to a larger density, or call remove_parametrizations "
            "(remove_weight_norm, remove_spectral_norm) first"
        )
    return kept


def cut(
    sizes: Mapping[str, int],
    units: Callable[[str], Tensor],
    density: float,
    masks: Mask,
    floor: float,
    divided: Mapping[str, int | None],
    parts: Mapping[str, int],
) -> dict[str, Tensor]:
    """Keep the `kept_count` units with the largest scores of the group; among equals the later index stays.

    `divided` gives the dimension along which a tensor has parts, in each of which a unit stays (None: it is one part),
    and `parts` how many there are.
    """

    def scores(name: str) -> Tensor:
        s = _comparable(units(name).cpu())
        if not floor and name not in divided:
            return s
        # What is gone already is below every score, so that only what is left is protected.
        s = s.masked_fill(~masks[name].to("cpu"), -1.0) if name in masks else s
        s = _protect(s, floor) if floor else s
        return _protect_parts(name, s, divided[name]) if name in divided else s

    kept = kept_of(sizes, density, floor, parts)
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


def _protect_parts(name: str, scores: Tensor, dimension: int | None) -> Tensor:
    """Lift the top of each part above every other score; among equals the last."""
    flat, places = scores.clone().reshape(-1), torch.arange(scores.numel()).reshape(scores.shape)
    parts = places.reshape(1, -1) if dimension is None else places.movedim(dimension, 0).flatten(1)
    backwards = parts.flip(1)  # argmax gives the first of equals
    top = backwards.gather(1, flat[backwards].argmax(1, keepdim=True))[:, 0]
    if bool((flat[top] < 0).any()):
        raise InputError(
            f"the mask to go on from keeps nothing in a part of {name}, which would be divided by a norm of zero; "
            "call remove_parametrizations first, or prune anew"
        )
    flat[top[flat[top].isfinite()]] = torch.finfo(flat.dtype).max
    return flat.reshape(scores.shape)


def _least(total: int, floor: float) -> int:
    """How many units a floor keeps: something of every tensor, however low it is."""
    return max(1, math.ceil(round(floor * total, 6))) if floor else 0
