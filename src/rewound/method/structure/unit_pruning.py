"""Pruning of whole units, as the fields of a pruner say: which may go, how many, and the mask without them."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache

import torch
from torch import Tensor, nn

from rewound.foundations.errors import InputError, check_kind, few, warn
from rewound.method.flops import Profile
from rewound.method.pruning.cutting import kept_count
from rewound.method.pruning.mask import Mask, all_names
from rewound.method.pruning.prunable import embeddings, normalisation_scales, prunable_weights
from rewound.method.pruning.scores import Observations, draws
from rewound.method.pruning.settings import PrunerFields, Shapes
from rewound.method.structure.groups import UnitGroup, Units
from rewound.method.structure.selection import (
    Candidates,
    Least,
    NetworkSize,
    Removal,
    UnitScores,
    alive_units,
    candidates,
    mean_scores,
    no_scores,
    read_scores,
    scale_scores,
)


def mask_of_units(
    pruner: PrunerFields,
    parameters: Mapping[str, Tensor],
    density: float | None,
    before: Mask,
    score: Callable[[str], Tensor],
    *,
    seed: int,
    model: nn.Module | None,
    groups: Units | None,
    observations: Observations | None,
    profile: Profile | None,
) -> Mask:
    """All parameters of units that may go, without those of the units that go; `score` gives scores of weights."""
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    network = candidates_of(pruner, shapes, model, groups, profile)
    if pruner.of == "flops" and profile is not None:
        _warn_of_uncounted(network, profile, model)
    scores = _unit_scores(pruner, network, parameters, before, cache(score), seed, model, observations)
    alive = alive_units(network.groups, before)
    if pruner.rates:
        gone = _at_rates(pruner, network, model, scores, alive).units()
    else:
        assert density is not None  # as `check_density` has checked
        order = network.removal(scores, alive)
        target = target_of(pruner, network, density)
        _check_shrinks(pruner, order, target, density)
        gone = order.until(target)
    without = network.groups.mask_without(gone)
    inside = [name for name in network.parameters if name in parameters]  # a tied one by its first name
    kept = {name: torch.ones(shapes[name], dtype=torch.bool) for name in inside}
    kept |= {name: each.cpu() for name, each in before.items()}
    mask = Mask({name: each & without[name] if name in without else each for name, each in kept.items()})
    if pruner.of == "flops" and profile is not None and density is not None:
        _warn_of_more_left(profile, mask, density)
    return mask


def kept_of_units(
    pruner: PrunerFields,
    shapes: Shapes,
    density: float | None,
    *,
    model: nn.Module | None,
    groups: Units | None,
    profile: Profile | None,
) -> int:
    """How much is left at most (weights or operations), or exactly where rates say it; an error if it cannot be."""
    network = candidates_of(pruner, shapes, model, groups, profile)
    if pruner.rates:
        return _at_rates(pruner, network, model, no_scores, network.whole).smallest
    pruner.check_density(density)
    assert density is not None  # as just checked
    return target_of(pruner, network, density)


def candidates_of(
    pruner: PrunerFields, shapes: Shapes, model: nn.Module | None, groups: Units | None, profile: Profile | None
) -> Candidates:
    """The units that may go; `shapes` are those of all parameters that train."""
    if groups is None:
        raise InputError(f"pattern {pruner.pattern!r} needs the units of the network; give groups=rewound.units(...)")
    check_kind("groups", groups, Units, "give what rewound.units found in this model")
    if wrong := [name for name, shape in shapes.items() if groups.shapes.get(name, shape) != shape]:
        raise InputError(f"these units are of another model: here, {few(wrong)} have other shapes")
    names = all_names(model) if model is not None else {}
    prunable = shapes if model is None else [name for name in prunable_weights(model) if name in shapes]
    weights = [name for name in prunable if sum(size > 1 for size in shapes[name]) > 1]
    if not (selected := pruner.selected(weights, model)):
        raise InputError("no units can be removed: only and skip leave no weight of a layer; select more of them")
    # Where a layer computes its weight from others, a unit of zeros is not a unit less.
    chosen = selected if model is None else pruner.counted(selected, model)
    return candidates(
        groups,
        trained={other for name in shapes for other in names.get(name, (name,))},
        weights=weights,
        chosen=chosen,
        only_filters=pruner.pattern == "filter",
        size=_size(pruner, {name: shapes[name] for name in chosen}, profile),
        least=Least(pruner.min_units, pruner.floor, pruner.round_to),
        scope=pruner.scope,
    )


def _size(pruner: PrunerFields, counted: Shapes, profile: Profile | None) -> NetworkSize:
    """What density is a fraction of: the selected weights, or the operations of a forward pass."""
    if pruner.of == "weights":
        return NetworkSize(counted, dict.fromkeys(counted, (1,)))
    if profile is None:
        raise InputError(f"of={pruner.of!r} needs the costs of a forward pass; give profile=rewound.profile(...)")
    size = NetworkSize(profile.shapes, profile.per_row(), profile.fixed)
    if not size.without({}):
        raise InputError(
            f"of={pruner.of!r} counts no operations in this network, so that no part of them can be left; use layers "
            "of torch.nn, or matrix products and convolutions of torch, or of='weights'"
        )
    return size


def _warn_of_uncounted(network: Candidates, profile: Profile, model: nn.Module | None) -> None:
    """Warn of weights that may lose units and whose operations a mask does not change."""
    names = all_names(model) if model is not None else {}
    looked_up = embeddings(model) if model is not None else []  # which takes no operations
    inside = {name for number in network.free for name, _ in network.groups.groups[number].members}
    every = {name: names.get(name, (name,)) for name in profile.uncounted if name not in looked_up}
    weights = [n for n, each in every.items() if inside.intersection(each) and set(network.weights).intersection(each)]
    if weights:
        added = "it is" if len(weights) == 1 else "they are"
        warn(
            f"of='flops' finds no product with {few(weights)}: unless {added} only added to something, what that costs "
            "counts in full or not at all, whatever is removed, and another part of the FLOPs is left than asked for; "
            "use layers of torch.nn there, or of='weights'"
        )


def _warn_of_more_left(profile: Profile, mask: Mask, density: float) -> None:
    """Warn where rows of a weight have parts that take part in different numbers of operations, which are averaged."""
    left, total = profile.total(mask), profile.total()
    if left > kept_count(total, density):
        warn(
            f"{100 * left / total:.4g}% of the FLOPs are left, where {100 * density:.4g}% were asked for: parts of one "
            "weight's rows run at different numbers of places; make these parts weights, or ask for a lower density"
        )


def target_of(pruner: PrunerFields, network: Candidates, density: float) -> int:
    """How much is left at most; an error where that cannot be reached."""
    total = network.size.without({})
    target, smallest = kept_count(total, density), network.smallest
    if smallest > target:
        nearest = -(-10_000 * smallest // total) / 10_000  # rounded up, so that it can be reached
        compression = 10_000 * 100 // round(10_000 * nearest) / 100  # rounded down, for the same reason
        reached = f"give a density of at least {nearest:.4g} (a compression of at most {compression:.4g})"
        remedies = [*([reached] if nearest < 1 else []), *_raised(pruner), "prune single weights, too"]
        raise InputError(
            f"density {density:g} cannot be reached by removing units: {100 * nearest:.4g}% of the {_counted(pruner)} "
            f"are left where every group has as few units as it may; {', or '.join(remedies)}"
        )
    return target


def _raised(pruner: PrunerFields) -> list[str]:
    """What makes every group keep more, as a remedy."""
    fields = {"min_units": (pruner.min_units, 1), "floor": (pruner.floor, 0), "round_to": (pruner.round_to, 1)}
    given = [f"{name}={own:g}" for name, (own, default) in fields.items() if own > default]
    return [f"lower {' and '.join(given)}"] if given else []


def _counted(pruner: PrunerFields) -> str:
    """What density is a fraction of, in words."""
    return "FLOPs" if pruner.of == "flops" else pruner.of


def _check_shrinks(pruner: PrunerFields, order: Removal, target: int, density: float) -> None:
    """An error for a mask that has lost more than the target keeps, by more than the size of units explains."""
    if target > (left := order.left(0)) + order.largest_batch:
        raise InputError(
            f"density {density:g} keeps {target:,} {_counted(pruner)}, but only {left:,} are left: a mask only shrinks"
        )


def _at_rates(
    pruner: PrunerFields, network: Candidates, model: nn.Module | None, scores: UnitScores, alive: Sequence[Tensor]
) -> Removal:
    """The units that go by the pruner's rates; an error for a pattern of them by which none goes."""
    names = all_names(model) if model is not None else {}

    def rate(name: str) -> float:
        return pruner.rate_of(names.get(name, (name,)))

    for glob in (glob for glob, part in dict(pruner.rates).items() if part):
        matched = [
            name for name in network.weights if any(fnmatchcase(each, glob) for each in names.get(name, (name,)))
        ]
        may_go = [producers for producers in network.free_producers if set(producers) & set(matched)]
        if not any(all(map(rate, producers)) for producers in may_go):
            reason = _why_not(network, matched, [name for name in (may_go or [[]])[0] if not rate(name)])
            raise InputError(f"rates {glob!r} removes no units: {reason}")
    return network.at_rates(rate, scores, alive)


def _why_not(network: Candidates, matched: Sequence[str], others: Sequence[str]) -> str:
    if others:
        return f"{few(others)} also produce them, and have no rate; give them one, too, or leave out the pattern"
    if not matched:
        return "it matches no weight of a layer; give a pattern of weights, or leave it out"
    pinned = network.groups.pinned.get((matched[0], 0), "only, skip and the pattern leave none, or it does not train")
    return f"those of {matched[0]} stay ({pinned}); leave out the pattern, or let it match other layers"


def _unit_scores(
    pruner: PrunerFields,
    network: Candidates,
    parameters: Mapping[str, Tensor],
    before: Mask,
    score: Callable[[str], Tensor],
    seed: int,
    model: nn.Module | None,
    observations: Observations | None,
) -> UnitScores:
    if pruner.score == "random":
        return lambda group: draws(seed, group.name, len(group), torch.device("cpu"))
    if pruner.score == "activation":
        assert observations is not None  # as `Pruner.prune` has checked
        inputs = observations.inputs
        return lambda group: read_scores(group, inputs)
    if pruner.score == "bn-scale":
        if model is None:
            raise InputError("score bn-scale needs the model, which knows its normalisation layers; give model=")
        scales = {name: parameters[name] for name in normalisation_scales(model) if name in parameters}
        return lambda group: scale_scores(group, scales)

    def mean(group: UnitGroup) -> Tensor:
        return mean_scores(group, network.ranked_by(group), score, before)

    return mean
