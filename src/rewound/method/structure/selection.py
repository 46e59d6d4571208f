"""`rewound.unit_mask`: which units go, by the same scores and scopes as weights.

A unit's score is the mean of the scores of its weights, so that units of different sizes can be ranked together. Units
go in the order of their scores until no more than `density` of the prunable weights are left. Of every group one unit
at least stays.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn

from rewound.foundations.errors import InputError, as_number, as_whole, check_kind
from rewound.foundations.names import lookup
from rewound.method.pruner import SCORES, Pruner, as_pruner
from rewound.method.pruning.mask import Mask
from rewound.method.pruning.prunable import prunable_weights
from rewound.method.structure.tracing import Unit, Units

SCOPES = ("global", "layer")


def unit_mask(
    model: nn.Module, groups: Units, density: float, *, pruner: Pruner | None = None, round_to: int = 1, seed: int = 0
) -> Mask:
    """The mask that leaves at most `density` of the prunable weights, without whole units: `slim` makes it a network.

    Of a `pruner` its `score` and `floor` count (the fraction of each group that stays), and its `scope`: `"global"`
    ranks all units together, `"layer"` takes the same part of each group. `round_to` keeps a multiple of so many units
    of each group, as hardware likes 8.

    >>> from rewound.method.structure.tracing import units
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> mask = unit_mask(model, units(model, (torch.zeros(1, 4),)), 0.5)
    >>> int(mask["0.weight"].any(1).sum())
    4
    """
    check_kind("model", model, nn.Module, "give the model itself")
    check_kind("groups", groups, Units, "give what rewound.units found in this model")
    pruner, density, round_to = as_pruner(pruner), as_number("density", density), as_whole("round_to", round_to)
    if not 0 < density <= 1:
        raise InputError(f"density must be above 0 and at most 1, not {density:g}")
    if pruner.scope not in SCOPES:
        raise InputError(f"units are ranked with scope global or layer, not {pruner.scope}")
    for group in groups:
        if not 1 <= round_to <= len(group):
            raise InputError(f"round_to must be from 1 to the {len(group)} units of {group.name}, not {round_to}")
    weights = prunable_weights(model)
    if not groups.groups:
        raise InputError("this network has no units that could go; groups.pinned says why")
    scores = _scores(groups, weights, pruner, seed)
    shapes = {name: list(weight.shape) for name, weight in weights.items()}
    total, gone = _count(shapes), list[Unit]()
    for batch in _order(groups, scores, pruner, round_to):
        if _count(shapes) <= density * total:
            break
        gone += batch
        for name, dim, lost in ((*place, len(at)) for unit in batch for place, at in unit.indices.items()):
            if name in shapes:
                shapes[name][dim] -= lost
    if (left := _count(shapes)) > density * total:
        raise InputError(
            f"density {density:g} cannot be reached by removing units: {left / total:.4g} of the weights are left "
            "where every group has as few units as it may; give at least that, or prune single weights, too"
        )
    return groups.mask_without(gone)


def _scores(groups: Units, weights: Mapping[str, Tensor], pruner: Pruner, seed: int) -> dict[int, list[float]]:
    """The score of each unit, by the number of its group."""
    score = lookup("score", pruner.score, SCORES)
    ranked = {name: score(weight.detach(), name, seed).double().cpu() for name, weight in weights.items()}
    found: dict[int, list[float]] = {}
    for number, group in enumerate(groups):
        members = [(name, dim) for name, dim in group.members if name in ranked]
        totals, counts = torch.zeros(len(group), dtype=torch.float64), 0
        for name, dim in members:
            rows = ranked[name].movedim(dim, 0).flatten(1).sum(1)
            totals += torch.tensor([float(rows[list(unit.indices[name, dim])].sum()) for unit in group.units])
            counts += ranked[name].numel() // ranked[name].shape[dim] * len(group.units[0].indices[name, dim])
        found[number] = (totals / max(counts, 1)).tolist()
    return found


def _order(groups: Units, scores: Mapping[int, list[float]], pruner: Pruner, round_to: int) -> list[list[Unit]]:
    """Batches of units of one group, in the order in which they go; those that must stay are in none."""
    batches: list[tuple[float, int, list[Unit]]] = []
    for number, group in enumerate(groups):
        own = scores[number]
        ascending = sorted(range(len(group)), key=own.__getitem__)
        may_go = len(group) - max(round_to, math.ceil(len(group) * pruner.floor), 1)
        first = len(group) % round_to or round_to  # what is over goes first, so that a multiple is left
        ends = range(first, may_go + 1, round_to)
        rank = -math.inf
        for start, end in pairwise([0, *ends]):
            mean = sum(own[index] for index in ascending[start:end]) / (end - start)
            rank = max(rank, mean) if pruner.scope == "global" else end / len(group)
            batches.append((rank, number, [group.units[index] for index in ascending[start:end]]))
    return [batch for _, _, batch in sorted(batches, key=lambda each: each[:2])]


def _count(shapes: Mapping[str, Sequence[int]]) -> int:
    return sum(prod(shape) for shape in shapes.values())
