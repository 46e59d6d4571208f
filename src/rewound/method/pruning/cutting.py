"""How many units of a group stay, and which: the authors' count, with at least `floor` of every tensor.

Where a weight is divided by the norm of its parts (`prunable`), a unit stays in each part, too.

The largest of very many scores are found exactly, ties broken by index, without a copy of them all. A sample says
between which two values the cut lies. One look at every score then settles those above and below, and only the few
between are ranked. If the sample was misleading, the counts show it, and the look is repeated on the side where the cut
is.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rewound.foundations.errors import InputError, few
from rewound.method.pruning.mask import Mask


def kept_count(total: int, density: float) -> int:
    """How many of `total` weights stay: n - ceil((n-1)(1-density)), the authors' count (law 2).

    >>> kept_count(271152, 0.2), kept_count(1000, 0.8**3) == kept_count(1000, 0.512)
    (54231, True)
    """
    # Rounded first: 0.8**3 and 0.512 differ in the last bit, and must not differ in a weight.
    return total - math.ceil(round((total - 1) * (1 - density), 6))


def kept_of(shapes: Mapping[str, torch.Size], density: float, floor: float, divided: Mapping[str, int | None]) -> int:
    """How many units of a group stay, if those are enough for the floor of each tensor and for one in each part.

    `divided` gives the dimension along which a tensor has parts (None: it is one part).
    """
    sizes = {name: shape.numel() for name, shape in shapes.items()}
    kept, least = kept_count(sum(sizes.values()), density), sum(_least(size, floor) for size in sizes.values())
    if kept < least:
        raise InputError(f"floor {floor:g} keeps {least:,} weights, but density {density:g} only {kept:,}; lower floor")
    dimensions = {name: divided[name] for name in shapes if name in divided}
    parts = sum(1 if dim is None else shapes[name][dim] for name, dim in dimensions.items())
    if kept < (needed := least + parts):
        raise InputError(
            f"density {density:g} keeps {kept:,} weights, but {needed:,} must stay, as {few(list(dimensions))} would "
            "else be divided by a norm of zero; prune to a larger density, or call remove_parametrizations "
            "(remove_weight_norm, remove_spectral_norm) first"
        )
    return kept


def cut(
    shapes: Mapping[str, torch.Size],
    units: Callable[[str], Tensor],
    density: float,
    masks: Mask,
    floor: float,
    divided: Mapping[str, int | None],
) -> dict[str, Tensor]:
    """Keep the `kept_of` units with the largest scores of the group; among equals the later index stays."""

    def scores(name: str) -> Tensor:
        s = _comparable(units(name).cpu())
        if not floor and name not in divided:
            return s
        # What is gone already is below every score, so that only what is left is protected.
        s = s.masked_fill(~masks[name].to("cpu"), -1.0) if name in masks else s
        s = _protect(s, floor) if floor else s
        return _protect_parts(name, s, divided[name]) if name in divided else s

    kept = kept_of(shapes, density, floor, divided)
    alive = sum(masks.counts.get(name, shape.numel()) for name, shape in shapes.items())
    if kept > alive:
        raise InputError(
            f"density {density:g} keeps {kept:,} weights, but only {alive:,} are left: a mask only shrinks"
        )
    return largest(list(shapes), scores, kept, masks)


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


Floats = npt.NDArray[np.floating[Any]]
Bools = npt.NDArray[np.bool_]
Bound = float | np.floating[Any]  # of the type of the scores, else numpy would round it to theirs

_CHUNK = 1 << 16  # scores looked at together; they and their comparisons stay in a core's cache
_FEW = 1 << 22  # no more than these are sorted
_STRIDE = 127  # one score in so many is sampled; a prime, out of step with rows and filters


def largest(
    names: Sequence[str], scores: Callable[[str], Tensor], count: int, within: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Where the `count` largest scores of all names are; `within` says where to look; among equals the last stay.

    >>> some = {"a": torch.tensor([3.0, 1.0, 2.0]), "b": torch.tensor([[2.0, 0.0]])}
    >>> largest(list(some), some.__getitem__, 2, {})
    {'a': tensor([ True, False, False]), 'b': tensor([[ True, False]])}
    """

    def look(name: str) -> tuple[Floats, Bools | None]:
        s, allowed = scores(name), within.get(name)
        shapes[name] = s.shape
        # In logical order, whatever the memory format is.
        flat = s.cpu().reshape(-1).numpy()
        return flat, None if allowed is None else allowed.cpu().reshape(-1).numpy()

    shapes: dict[str, torch.Size] = {}
    low, high = _bounds(map(look, names), count)
    while True:
        above: dict[str, Bools] = {}
        between: dict[str, Bools] = {}
        values: list[Floats] = []
        for name in names:
            flat, allowed = look(name)
            above[name], between[name] = _settled(name, flat, allowed, low, high)
            if low < high:
                values.append(flat[np.flatnonzero(between[name])])  # three times faster than flat[between[name]]
        left, wanted = _total(between), count - _total(above)
        if wanted < 0:
            low, high = high, math.inf
        elif wanted > left:
            low, high = -math.inf, low
        elif low < high and wanted and left > _FEW:  # many equals: their value first, then their places
            low = high = np.partition(np.concatenate(values), left - wanted)[left - wanted]
        else:
            break
    stays = np.zeros(left, bool)
    stays[left - wanted :] = True  # the last of equals
    if low < high and 0 < wanted < left:
        stays[np.argsort(np.concatenate(values), kind="stable")] = stays.copy()
    ends = np.cumsum([np.count_nonzero(part) for part in between.values()])[:-1]
    for name, part in zip(names, np.split(stays, ends), strict=True):
        above[name][np.flatnonzero(between[name])[part]] = True
    return {name: torch.from_numpy(above[name]).reshape(shapes[name]) for name in names}


def _total(parts: Mapping[str, Bools]) -> int:
    return sum(int(np.count_nonzero(part)) for part in parts.values())


def _bounds(looks: Iterable[tuple[Floats, Bools | None]], count: int) -> tuple[Bound, Bound]:
    """Two values between which the cut lies: six standard deviations of a sample's count to either side."""
    samples, total = [], 0
    for flat, allowed in looks:
        samples.append(flat[::_STRIDE].copy() if allowed is None else flat[::_STRIDE][allowed[::_STRIDE]])
        total += len(flat) if allowed is None else int(np.count_nonzero(allowed))
    sample = np.sort(np.concatenate(samples))
    fraction = 1 - count / total
    middle, margin = fraction * len(sample), 6 * math.sqrt(fraction * (1 - fraction) * len(sample)) + 6
    first, last = math.floor(middle - margin), math.ceil(middle + margin)
    return sample[first] if first >= 0 else -math.inf, sample[last] if last < len(sample) else math.inf


def _settled(name: str, flat: Floats, allowed: Bools | None, low: Bound, high: Bound) -> tuple[Bools, Bools]:
    """Where scores are above `high`, and where they are neither above it nor below `low`."""
    above, between = np.empty(len(flat), bool), np.empty(len(flat), bool)
    for start in range(0, len(flat), _CHUNK):
        part = slice(start, start + _CHUNK)
        where = True if allowed is None else allowed[part]  # what is gone may be anything
        if not (math.isfinite(flat[part].max()) or math.isfinite(flat[part].max(where=where, initial=0.0))):
            raise InputError(
                f"cannot prune {name}: it holds NaN or infinite weights, the network has diverged; "
                "train it again with a lower learning rate"
            )
        np.greater(flat[part], high, out=above[part])
        np.greater_equal(flat[part], low, out=between[part])
        between[part] ^= above[part]
        if allowed is not None:
            above[part] &= where
            between[part] &= where
    return above, between
