"""Which weights go: score x scope x pattern, three small tables of pure functions.

A score says how much a weight matters, a scope which tensors are ranked together, a pattern what is pruned as one.
The default is the paper's: magnitude, over all layers at once, single weights. A preset (`presets`) says all of it for
the paper's networks: which filters go, and how many.

Two patterns follow the network's graph and remove whole units (`structure/selection`), so that `rewound.slim` can make
a smaller network of the mask: `unit`, whatever the graph ties together, and `filter`, output filters of convolutions.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

import torch
from torch import Tensor, nn

from rewound.foundations.errors import InputError, as_number, as_whole, check_kind, few, shown, warn
from rewound.foundations.names import check_function, lookup, unknown
from rewound.method.pruning.cutting import cut, kept_count, kept_of, largest
from rewound.method.pruning.mask import Mask, all_names, bare_model, plain_name, plain_parameters
from rewound.method.pruning.presets import PRESETS, masks_density, removed_filters, reported_density
from rewound.method.pruning.prunable import dense_originals, divided_by_norm, prunable_weights
from rewound.method.pruning.scores import SAME_SCORE, SCORES, Score, draws
from rewound.method.structure.selection import (
    Candidates,
    Least,
    Size,
    alive_units,
    candidates,
    mean_scores,
)
from rewound.method.structure.tracing import UnitGroup, Units, as_arguments, units

Shapes = Mapping[str, tuple[int, ...]]
Scope = Callable[[Sequence[str]], Sequence[Sequence[str]]]  # names -> groups that are ranked together
Pattern = Callable[[Tensor], Tensor]  # scores of weights -> scores of units, in a shape that expands to the weight's


SCOPES: Mapping[str, Scope] = {"global": lambda names: [names], "layer": lambda names: [[name] for name in names]}
PATTERNS: Mapping[str, Pattern] = {"weight": lambda scores: scores}
UNIT_PATTERNS = ("unit", "filter")
_TABLES: Mapping[str, Mapping[str, object]] = {
    "score": SCORES,
    "scope": SCOPES,
    "pattern": {**PATTERNS, **dict.fromkeys(UNIT_PATTERNS)},
}
_PARAMETERS = {"score": ("weight", "name", "seed"), "scope": ("names",), "pattern": ("scores",)}


@dataclass(frozen=True)
class Pruner:
    """Prunes a model to a density: `Pruner()(model, 0.2)` keeps the fifth of the weights with the largest magnitude.

    `only` and `skip` are name patterns (`"encoder.*"`) over the prunable set; a tied weight has several names, and a
    pattern needs to match only one of them. `floor` is the minimum fraction kept in each tensor. What is frozen is not
    pruned. Where weight_norm or spectral_norm divides by a norm, one weight at least stays, as 0/0 is no number.

    `pattern="unit"` removes whole units, which `rewound.units` finds in the network as it runs on `example_inputs`: all
    weights that produce and read them, with biases and normalisation. `"filter"` removes only output filters of
    convolutions, ranked by their own weights. A group of units may be pruned if all its parameters train, and `only`
    and `skip` select all weights that produce it; `floor`, `min_units` and `round_to` (a multiple stays) are for each
    group. `density` counts the selected weights as for other patterns, and no more than that fraction is left.

    `preset` and `k` are the paper's structured pruning of its residual networks: `Pruner(preset="structured-b", k=3)`
    says itself how much goes, so that no density is given.

    >>> mask = Pruner(skip=("2.*",))(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), density=0.25)
    >>> list(mask), mask.kept
    (['0.weight'], 16)
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> mask = Pruner(pattern="unit")(model, density=0.5, example_inputs=torch.zeros(1, 4))
    >>> mask["0.weight"].any(1).sum().item(), mask["0.bias"].sum().item(), mask["2.weight"].any(0).sum().item()
    (4, 4, 4)
    """

    score: str = "magnitude"
    scope: str = "global"
    pattern: str = "weight"
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    floor: float = 0.0
    preset: str = ""
    k: int = 0
    round_to: int = 1
    min_units: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "score", SAME_SCORE.get(self.score, self.score))
        for kind, name in (("score", self.score), ("scope", self.scope), ("pattern", self.pattern)):
            found = lookup(kind, name, _TABLES[kind])
            if name not in _TABLES[kind]:
                check_function(kind, name, found, _PARAMETERS[kind])
        for field in ("only", "skip"):
            if isinstance(patterns := getattr(self, field), str):
                raise InputError(f"{field} takes a tuple of name patterns, not {patterns!r}; write ({patterns!r},)")
            globs = tuple(patterns) if isinstance(patterns, Iterable) else (patterns,)
            for glob in globs:
                check_kind(f"each of {field}", glob, str, "give patterns of parameters' names, as ('encoder.*',)")
            object.__setattr__(self, field, globs)
        object.__setattr__(self, "floor", as_number("floor", self.floor))
        if not 0 <= self.floor < 1:
            raise InputError(f"floor must be at least 0 and below 1, not {self.floor:g}")
        self._check_units()
        self._check_preset()

    def _check_units(self) -> None:
        for field in ("round_to", "min_units"):
            if (value := as_whole(field, getattr(self, field))) < 1:
                raise InputError(f"{field} must be at least 1 unit, not {value}")
            if value > 1 and not self.by_units:
                raise InputError(f"{field} counts units, and pattern {self.pattern!r} has none; use pattern 'unit'")
        if self.by_units and self.scope not in SCOPES:
            raise InputError(f"units are ranked with scope global or layer, not {self.scope!r}")

    @property
    def by_units(self) -> bool:
        """Whether whole units go: the network's graph is needed to know them."""
        return self.pattern in UNIT_PATTERNS

    def _check_preset(self) -> None:
        if not self.preset:
            if self.k:
                raise InputError(f"k={self.k} belongs to a preset; give preset='structured-b' with it")
            return
        if self.preset not in PRESETS:
            raise InputError(unknown("preset", str(self.preset), PRESETS))
        if as_whole("k", self.k) < 1:
            raise InputError(f"k of preset {self.preset} must be at least 1, not {self.k}; the paper has 1 to 5")
        others = [name for name in vars(self) if name not in ("preset", "k") and name in self.words]
        if others:
            raise InputError(f"preset {self.preset} says all of a pruner but k; leave out {few(others)}")

    @property
    def settings(self) -> dict[str, object]:
        """Its fields by name; those that earlier versions did not have only where they differ from their defaults."""
        later = ("preset", "k", "round_to", "min_units")  # than the first files that hold settings
        return {
            name: value for name, value in vars(self).items() if name not in later or value != getattr(Pruner, name)
        }

    @property
    def words(self) -> dict[str, str]:
        """What is not as in the paper, a word for each field.

        >>> Pruner(score="random", skip=("stem.*", "dense.*"), floor=0.01).words
        {'score': 'random', 'skip': 'skip=stem.*,dense.*', 'floor': 'floor=0.01'}
        """
        changed = {name: value for name, value in vars(self).items() if value != getattr(Pruner, name)}
        texts = {name: ",".join(value) if isinstance(value, tuple) else str(value) for name, value in changed.items()}
        return {name: text if name in ("score", "scope") else f"{name}={text}" for name, text in texts.items()}

    def __call__(
        self,
        model: nn.Module,
        density: float | None = None,
        mask: Mask | None = None,
        *,
        seed: int = 0,
        example_inputs: object = None,
        example_keywords: Mapping[str, object] | None = None,
        groups: Units | None = None,
    ) -> Mask:
        """The mask of `density` for `model`, within `mask` where one is given; the model is not changed.

        Patterns of units need `example_inputs` (and `example_keywords`), what the model takes, or the `groups` that
        `rewound.units` found in it.
        """
        check_kind("model", model, nn.Module, "give the model itself")
        model = bare_model(model)
        self.check(name for name, _ in model.named_parameters(remove_duplicate=False))
        check_memory(model)
        if self.by_units and groups is None:
            groups = self._units_of(model, example_inputs, example_keywords)
        weights = plain_parameters(model, tied=False) if self.by_units else prunable_weights(model)
        before = _within(mask, weights, all_names(model))
        trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        self._tell_of_frozen(model, weights, trained)
        if not self.by_units:
            self.check_zeros_stay(model, trained)
        left = None if mask is None else Mask({name: kept for name, kept in before.items() if name in trained})
        return Mask({**before, **self.prune(trained, density, left, seed=seed, model=model, groups=groups)})

    def _units_of(self, model: nn.Module, example_inputs: object, keywords: Mapping[str, object] | None) -> Units:
        if example_inputs is None and keywords is None:
            raise InputError(
                f"pattern {self.pattern!r} follows the network's graph; give example_inputs=, a batch of what it takes"
            )
        if hidden := [name for name, _ in model.named_parameters() if plain_name(name) != name]:
            raise InputError(f"a part of this model is compiled ({hidden[0]}); prune it before torch.compile")
        return units(model, () if example_inputs is None else as_arguments(example_inputs), keywords)

    def _tell_of_frozen(self, model: nn.Module, weights: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> None:
        """What does not train is not pruned (law 11)."""
        selected = self.selected(weights, model)
        if not (frozen := [name for name in selected if name not in trained]):
            return
        if len(frozen) == len(selected):
            raise InputError(
                f"all weights that would be pruned are frozen ({few(frozen)}), and what does not train is not pruned; "
                "call model.requires_grad_(True) before pruning, and freeze the model again afterwards"
            )
        warn(
            f"{few(frozen)} are frozen, and so neither pruned nor counted; unfreeze what is to be pruned, or name the "
            "others in skip"
        )

    def check(self, parameters: Iterable[str]) -> None:
        """An error for a pattern that matches none of a model's parameters, prunable or not."""
        names = list(dict.fromkeys(map(plain_name, parameters)))
        for field in ("only", "skip"):
            for pattern in getattr(self, field):
                if not any(_matches(name, (pattern,)) for name in names):
                    raise InputError(f"{field} {pattern!r} matches no parameter of the model; it has {few(names)}")

    def check_zeros_stay(self, model: nn.Module, names: Collection[str]) -> None:
        """An error if zeros in what is selected of these would not be zeros in what the model computes with."""
        if lost := dense_originals(model, self.selected(names, model)):
            raise InputError(
                f"cannot prune {few(lost)}: the layer computes its weight from it, and a zero in it is no zero in that "
                f"weight; exclude it with skip=({lost[0]!r},), or call remove_parametrizations first"
            )

    def prune(
        self,
        weights: Mapping[str, Tensor],
        density: float | None,
        mask: Mask | None = None,
        *,
        seed: int = 0,
        model: nn.Module | None = None,
        groups: Units | None = None,
    ) -> Mask:
        """The same for named weights, the prunable set already chosen.

        `model` is the module that has them: it knows their other names, and what it divides by a norm. For a pattern of
        units, `weights` are all parameters that train, and `groups` the units of the network.
        """
        if self.preset:
            return self._without_filters(weights, _within(mask, weights, {}))
        if density is None:
            raise InputError("give the density to prune to, the fraction of the weights that stays, as density=0.2")
        if not 0 < as_number("density", density) <= 1:
            raise InputError(f"density must be above 0 and at most 1, not {density:g}")
        if self.by_units:
            return self._without_units(weights, density, mask, seed, model, groups)
        chosen = {name: weights[name].detach() for name in self._chosen(weights, model)}
        score, pattern = lookup("score", self.score, SCORES), lookup("pattern", self.pattern, PATTERNS)
        before = _within(mask, weights, all_names(model) if model is not None else {})
        divided = divided_by_norm(model, chosen) if model is not None else {}

        def scores(name: str) -> Tensor:
            return pattern(self._scores(score, chosen[name], name, seed, before.get(name)))

        shapes = self._units({name: w.shape for name, w in chosen.items()}, chosen)
        # A unit is left while any of its weights is.
        left = Mask({name: m.sum_to_size(shapes[name]).bool() for name, m in before.items() if name in chosen})
        kept: dict[str, Tensor] = {}
        for group in self._groups(chosen):
            sizes = {name: shapes[name].numel() for name in group}
            kept |= cut(sizes, scores, density, left, self.floor, divided, _parts(shapes, divided))
        # A mask only shrinks: what an earlier pruner pruned stays so, selected by this one or not.
        pruned = Mask(dict(before) | {name: _expanded(kept[name], w, before.get(name)) for name, w in chosen.items()})
        _warn_of_starved(pruned)
        return pruned

    def _scores(self, score: Score, weight: Tensor, name: str, seed: int, left: Tensor | None) -> Tensor:
        scores = score(weight, name, seed)
        if self.score not in SCORES and not _is_score(scores, weight, left):
            raise InputError(
                f"score {self.score!r} must give one number per weight of {name}, none below 0, infinite or NaN"
            )
        return scores

    def _without_filters(self, weights: Mapping[str, Tensor], before: Mask) -> Mask:
        """All weights but the filters that the preset removes: those of the smallest L1 norm among what is left."""
        masks = {name: before.get(name, torch.ones_like(weight, dtype=torch.bool)) for name, weight in weights.items()}
        for name, count in removed_filters(self.preset, self.k, _shapes(weights)).items():
            weight, mask = weights[name].detach(), masks[name]
            alive = mask.flatten(1).any(1)
            norms = (weight.abs() * mask).flatten(1).sum(1)
            stay = largest([name], {name: norms}.__getitem__, int(alive.sum()) - count, {name: alive})[name]
            masks[name] = mask & stay.to(mask.device).reshape(-1, *[1] * (weight.ndim - 1))
        return Mask(masks)

    def _without_units(
        self,
        weights: Mapping[str, Tensor],
        density: float,
        mask: Mask | None,
        seed: int,
        model: nn.Module | None,
        groups: Units | None,
    ) -> Mask:
        """All parameters of units but those of the units that go."""
        network = self._candidates(_shapes(weights), model, groups)
        before = _within(mask, weights, all_names(model) if model is not None else {})
        score = lookup("score", self.score, SCORES)

        @cache
        def scored(name: str) -> Tensor:
            return self._scores(score, weights[name].detach(), name, seed, before.get(name))

        def of_units(group: UnitGroup) -> Tensor:
            if self.score == "random":
                return draws(seed, group.name, len(group), torch.device("cpu"))
            return mean_scores(group, network.ranked_by(group), scored, before)

        order = network.removal(of_units, alive_units(network.groups, before))
        target = self._target(network, density)
        if target > order.left(0) + order.largest_batch:  # more than the size of units explains
            raise InputError(
                f"density {density:g} keeps {target:,} weights, but only {order.left(0):,} are left: a mask only "
                "shrinks"
            )
        gone = network.groups.mask_without(order.until(target))
        kept = {
            name: torch.ones(weights[name].shape, dtype=torch.bool) for name in network.parameters if name in weights
        }
        kept |= {name: each.cpu() for name, each in before.items()}
        pruned = Mask({name: each & gone[name] if name in gone else each for name, each in kept.items()})
        _warn_of_starved(pruned)
        return pruned

    def _candidates(self, shapes: Shapes, model: nn.Module | None, groups: Units | None) -> Candidates:
        """The units that may go; `shapes` are those of all parameters that train."""
        if groups is None:
            raise InputError(f"pattern {self.pattern!r} needs the units of the network; give groups=rewound.units(...)")
        names = all_names(model) if model is not None else {}
        prunable = shapes if model is None else [name for name in prunable_weights(model) if name in shapes]
        matrices = [name for name in prunable if sum(size > 1 for size in shapes[name]) > 1]
        chosen = self._chosen(matrices, model)
        if model is not None:  # where a layer computes its weight from others, removing a unit is not setting it to 0
            computed = {*divided_by_norm(model, chosen), *dense_originals(model, chosen)}
            chosen = [name for name in chosen if name not in computed]
        return candidates(
            groups,
            trained={other for name in shapes for other in names.get(name, (name,))},
            weights=matrices,
            chosen=chosen,
            only_filters=self.pattern == "filter",
            size=Size({name: shapes[name] for name in chosen}, dict.fromkeys(chosen, 1)),
            least=Least(self.min_units, self.floor, self.round_to),
            scope=self.scope,
        )

    def _target(self, network: Candidates, density: float) -> int:
        """How much is left at most; an error where that cannot be reached."""
        total = network.size.without({})
        target, smallest = kept_count(total, density), network.smallest
        if smallest > target:
            raise InputError(
                f"density {density:g} cannot be reached by removing units: {smallest / total:.4g} of the weights are "
                "left where every group has as few units as it may; give at least that, or prune single weights, too"
            )
        return target

    def reported_density(self, shapes: Shapes) -> float:
        """The density that a preset prunes a network of these weights to, as the paper counts it."""
        return reported_density(removed_filters(self.preset, self.k, shapes), shapes)

    def kept(
        self,
        shapes: Shapes,
        density: float,
        *,
        model: nn.Module | None = None,
        groups: Units | None = None,
    ) -> int:
        """How many weights pruning to `density` leaves, known from the shapes alone; an error where it cannot be done.

        Where whole units go, it is how many are left at most; `shapes` are then those of all parameters that train.
        """
        if self.preset:
            total = sum(torch.Size(shape).numel() for shape in shapes.values())
            return round(total * masks_density(removed_filters(self.preset, self.k, shapes), shapes))
        if self.by_units:
            return self._target(self._candidates(shapes, model, groups), density)
        pieces = self._units(shapes, self._chosen(shapes, model))
        divided = divided_by_norm(model, pieces) if model is not None else {}
        parts = _parts(pieces, divided)
        sizes = {name: piece.numel() for name, piece in pieces.items()}
        if density * (total := sum(sizes.values())) < 1 - 1e-9:
            raise InputError(
                f"density {density:g} (compression {1 / density:,.10g}) leaves less than one of {total:,} weights; "
                f"the largest compression is {total:,}"
            )
        ranked = [{name: sizes[name] for name in together} for together in self._groups(pieces)]
        return sum(kept_of(together, density, self.floor, parts) for together in ranked)

    def _groups(self, names: Collection[str]) -> list[list[str]]:
        """The names that are ranked together, each in one group."""
        given = lookup("scope", self.scope, SCOPES)(list(names))
        try:
            groups = [list(group) for group in given]
            times = Counter(name for group in groups for name in group)
        except TypeError:
            raise InputError(f"scope {self.scope!r} must give lists of names, not {shown(given)}") from None
        if wrong := [name for name in {**dict.fromkeys(names), **times} if times[name] != (name in names)]:
            raise InputError(
                f"scope {self.scope!r} must put each of {few(list(names))} into exactly one group, but "
                f"{shown(wrong[0])} is in {times[wrong[0]]}"
            )
        return groups

    def _units(self, shapes: Mapping[str, tuple[int, ...]], chosen: Iterable[str]) -> dict[str, torch.Size]:
        pattern = lookup("pattern", self.pattern, PATTERNS)
        return {name: pattern(torch.empty(shapes[name], device="meta")).shape for name in chosen}

    def _chosen(self, names: Collection[str], model: nn.Module | None) -> list[str]:
        chosen = self.selected(names, model)
        if not chosen:
            raise InputError(
                "no prunable weights: pruning needs a floating-point parameter with two dimensions larger than 1 "
                "outside normalisation layers" + (", selected by only and skip" if names else "")
            )
        return chosen

    def selected(self, names: Iterable[str], model: nn.Module | None) -> list[str]:
        """Those that `only` and `skip` leave to be pruned; a tied weight counts by all names that the model has for it.

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> model[1].weight = model[0].weight
        >>> Pruner(only=("1.*",)).selected(["0.weight"], model), Pruner(skip=("1.*",)).selected(["0.weight"], model)
        (['0.weight'], [])
        """
        every = all_names(model) if model is not None and (self.only or self.skip) else {}
        return [name for name in names if self._selects(every.get(name, (name,)))]

    def _selects(self, names: Collection[str]) -> bool:
        only = not self.only or any(_matches(name, self.only) for name in names)
        return only and not any(_matches(name, self.skip) for name in names)


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def _matches(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _parts(units: Mapping[str, torch.Size], divided: Mapping[str, int | None]) -> dict[str, int]:
    """How many parts each divided weight has, of units."""
    return {name: 1 if dimension is None else units[name][dimension] for name, dimension in divided.items()}


def _within(mask: Mask | None, weights: Mapping[str, Tensor], names: Mapping[str, Sequence[str]]) -> Mask:
    """The masks that pruning goes on from, if they are for these weights, by the names that the weights have here."""
    if mask is None:
        return Mask({})
    check_kind("mask", mask, Mask, "give what a Pruner made before, or a rewound.Mask of it")
    before: dict[str, Tensor] = {}
    for name, kept in mask.items():
        here = next((other for other in (name, *names.get(name, ())) if other in weights), None)
        if here is None or weights[here].shape != kept.shape:
            raise InputError(f"this mask is for another model: it has no prunable weight {name} of that shape")
        before[here] = kept & before[here].to(kept.device) if here in before else kept
    return Mask(before)


def check_memory(model: nn.Module) -> None:
    """An error for a model that has shapes and no values."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError(
            "this model has no memory yet (meta device); call model.to_empty(device=...) and load its weights first"
        )


def as_pruner(given: Pruner | None) -> Pruner:
    """The pruner that was given, or the paper's."""
    if given is None:
        return Pruner()
    check_kind("pruner", given, Pruner, 'give a rewound.Pruner, as Pruner(score="magnitude")')
    return given


def _is_score(scores: object, weight: Tensor, left: Tensor | None) -> bool:
    """Whether every weight that is left has a finite score of at least 0.

    True if the weights themselves are not finite: ranking then blames the network, not the score.
    """
    if not isinstance(scores, Tensor) or scores.shape != weight.shape:
        return False
    ranked = (scores >= 0) & scores.isfinite()
    whole = bool((ranked if left is None else ranked | ~left.to(ranked.device)).all())
    return whole or not bool(weight.isfinite().all())


def _expanded(kept: Tensor, weight: Tensor, before: Tensor | None) -> Tensor:
    """The weights of the units that are kept, as far as they were left."""
    expanded = kept.expand(weight.shape)
    return expanded.contiguous() if before is None else expanded & before.to(expanded.device)


def _warn_of_starved(mask: Mask) -> None:
    starved = [name for name, kept in mask.items() if mask.counts[name] < 0.01 * kept.numel()]
    if starved:
        warn(f"less than 1% of the weights are left in {few(starved)}; `floor` keeps a minimum fraction of each tensor")
