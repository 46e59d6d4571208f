"""Which weights go: score x scope x pattern, three small tables of pure functions.

A score says how much a weight matters (`scores`), a scope which tensors are ranked together, a pattern what is pruned
as one (`patterns`). The default is the paper's: magnitude, over all layers at once, single weights. A preset
(`presets`) says all of it for the paper's networks: which filters go, and how many. Where whole units go
(`structure/unit_pruning`), `rewound.slim` makes a smaller network of the mask.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rewound.foundations.errors import InputError, check_kind, few, shown, warn
from rewound.foundations.names import lookup
from rewound.method.flops import Profile, profile
from rewound.method.pruning.cutting import cut, kept_of, largest
from rewound.method.pruning.mask import Mask, all_names, bare_model, check_memory, plain_parameters
from rewound.method.pruning.patterns import Blocks, NofM, Pieces
from rewound.method.pruning.presets import masks_density, removed_filters, reported_density
from rewound.method.pruning.prunable import dense_originals, divided_by_norm, prunable_weights
from rewound.method.pruning.scores import SCORES, Observations, observations
from rewound.method.pruning.settings import SCOPES, PrunerFields, Shapes
from rewound.method.structure.examples import as_arguments, call_of
from rewound.method.structure.groups import Units
from rewound.method.structure.tracing import check_runs, units
from rewound.method.structure.unit_pruning import candidates_of, kept_of_units, mask_of_units


@dataclass(frozen=True)
class Pruner(PrunerFields):
    """Prunes a model to a density: `Pruner()(model, 0.2)` keeps the fifth of the weights with the largest magnitude.

    `only` and `skip` are name patterns (`"encoder.*"`) over the prunable set; a tied weight has several names, and a
    pattern needs to match only one of them. `floor` is the minimum fraction kept in each tensor. What is frozen is not
    pruned. Where weight_norm or spectral_norm divides by a norm, one weight at least stays, as 0/0 is no number.

    `score` is `"magnitude"`, also called `"l1"`, `"l2"`, `"random"` or `"taylor"` (|w dL/dw|); of whole units also
    `"bn-scale"` and `"activation"`. `"taylor"` and `"activation"` are measured on the first `batches` of those that are
    given. `scope` ranks all layers together (`"global"`) or each by itself (`"layer"`); `rates` says what fraction goes
    of each layer, by name pattern, as `{"stage1.*": 0.3}`: no density is given then, and other layers stay whole.

    `pattern="2:4"` keeps 2 of every 4 weights along the inputs, as sparse tensor cores want it, and any N of M
    likewise; `"block 4x4"` prunes blocks of a layer's matrix, of outputs and all the rest. Weights whose shape does not
    divide are left out.

    `pattern="unit"` removes whole units, which `rewound.units` finds in the network as it runs on `example_inputs`: all
    weights that produce and read them, with biases and normalisation. `"filter"` removes only output filters of
    convolutions, ranked by their own weights. A group of units may be pruned if all its parameters train, and `only`
    and `skip` select all weights that produce it; `floor`, `min_units` and `round_to` (a multiple stays) are for each
    group. `density` counts the selected weights as for other patterns, or with `of="flops"` the operations of a forward
    pass, and no more than that fraction is left.

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
        batches: Iterable[object] | None = None,
        loss: Callable[[nn.Module, object], Tensor] | None = None,
    ) -> Mask:
        """The mask of `density` for `model`, within `mask` where one is given; the model is not changed.

        Patterns of units need `example_inputs` (and `example_keywords`), what the model takes, or the `groups` that
        `rewound.units` found in it. Scores that are measured need `batches` of training data, and `loss`, a function of
        the model and a batch.
        """
        check_kind("model", model, nn.Module, "give the model itself")
        model = bare_model(model)
        self.check(name for name, _ in model.named_parameters(remove_duplicate=False))
        check_memory(model)
        self.check_density(density)
        weights = plain_parameters(model, tied=False) if self.by_units else prunable_weights(model)
        before = _within(mask, weights, all_names(model))
        trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        self._warn_of_frozen(model, weights, trained)
        if not self.by_units:
            self.check_zeros_stay(model, trained)
        elif groups is None:
            groups = self._units_of(model, example_inputs, example_keywords)
        pruned = self.prune(
            trained,
            density,
            None if mask is None else Mask({name: kept for name, kept in before.items() if name in trained}),
            seed=seed,
            model=model,
            groups=groups,
            observations=self._observations(model, batches, loss),
            profile=self._profile(model, example_inputs, example_keywords),
        )
        return Mask({**before, **pruned})

    def _units_of(self, model: nn.Module, example_inputs: object, keywords: Mapping[str, object] | None) -> Units:
        if example_inputs is None and keywords is None:
            raise InputError(
                f"pattern {self.pattern!r} follows the network's graph; give example_inputs=, a batch of what it takes"
            )
        return units(model, as_arguments(example_inputs), keywords)

    def _profile(
        self, model: nn.Module, example_inputs: object, keywords: Mapping[str, object] | None
    ) -> Profile | None:
        if self.of != "flops":
            return None
        if example_inputs is None and keywords is None:
            raise InputError("of='flops' counts a forward pass; give example_inputs=, a batch of what the model takes")
        example = as_arguments(example_inputs)
        try:
            return profile(model, example, keywords=keywords)
        except InputError:
            raise
        except Exception:  # whatever the model's own code raises for an example that does not fit
            check_runs(model, call_of(example, keywords))
            raise

    def _observations(
        self,
        model: nn.Module,
        batches: Iterable[object] | None,
        loss: Callable[[nn.Module, object], Tensor] | None,
    ) -> Observations | None:
        if not self.needs_batches:
            if batches is not None or loss is not None:
                raise InputError(f"score {self.score!r} needs neither batches nor loss; leave them out")
            return None
        if batches is None or loss is None:
            raise InputError(
                f"score {self.score!r} is measured on training data; give batches=, a list of batches, and loss=, a "
                "function of the model and a batch"
            )
        check_kind("batches", batches, Iterable, "give a list of batches")
        if not callable(loss):
            raise InputError(f"loss must be a function of the model and a batch, not {shown(loss)}")
        return observations(model, batches, loss, count=self.batches, with_effects=self.score == "taylor")

    def _warn_of_frozen(self, model: nn.Module, weights: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> None:
        """Warn of weights that are frozen, since what does not train is not pruned (law 11); an error if all are."""
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
        observations: Observations | None = None,
        profile: Profile | None = None,
    ) -> Mask:
        """The same for named weights, the prunable set already chosen.

        `model` is the module that has them: it knows their other names, and what it divides by a norm. For a pattern of
        units, `weights` are all parameters that train, and `groups` the units of the network. `observations` is what
        batches say (`needs_batches`), `profile` what a forward pass costs (`of="flops"`).
        """
        if not self.sets_density:  # else it is what the pruner says itself
            self.check_density(density)
        if self.needs_batches and observations is None:
            raise InputError(f"score {self.score!r} is measured on training data, and no batches are given here")
        before = _within(mask, weights, all_names(model) if model is not None and not self.preset else {})
        if self.preset:
            return self._without_filters(weights, before)

        def score(name: str) -> Tensor:
            return self._scores(weights[name].detach(), name, seed, before.get(name), observations)

        if self.by_units:
            pruned = mask_of_units(
                self,
                weights,
                density,
                before,
                score,
                seed=seed,
                model=model,
                groups=groups,
                observations=observations,
                profile=profile,
            )
        else:
            chosen = self._chosen(_shapes(weights), model, warns=True)
            if isinstance(pattern := self.the_pattern, NofM):
                inputs = self.inputs(model)
                kept = {name: pattern.kept(score(name), inputs.get(name, 1), before.get(name)) for name in chosen}
            else:
                kept = self._cut({name: weights[name].detach() for name in chosen}, density, before, score, model)
            # A mask only shrinks: what an earlier pruner pruned stays so, selected by this one or not.
            pruned = Mask(dict(before) | kept)
        _warn_of_starved(pruned)
        return pruned

    def _cut(
        self,
        chosen: Mapping[str, Tensor],
        density: float | None,
        before: Mask,
        score: Callable[[str], Tensor],
        model: nn.Module | None,
    ) -> dict[str, Tensor]:
        """What is kept of each weight, piece by piece."""
        pattern = self.the_pattern
        assert isinstance(pattern, Pieces | Blocks)
        divided = divided_by_norm(model, chosen) if model is not None else {}
        shapes = self._pieces(_shapes(chosen))
        left = Mask({name: pattern.left(m, shapes[name]) for name, m in before.items() if name in chosen})
        kept: dict[str, Tensor] = {}
        for together, part in self._ranked(shapes, density, model):
            kept |= cut(together, lambda name: pattern.pieces(score(name)), part, left, self.floor, divided)
        return {
            name: _within_left(pattern.spread(kept[name], tuple(w.shape)), before.get(name))
            for name, w in chosen.items()
        }

    def _scores(self, weight: Tensor, name: str, seed: int, left: Tensor | None, found: Observations | None) -> Tensor:
        if self.score == "taylor":
            assert found is not None  # as checked in `prune`
            return found.effects[name]
        score = lookup("score", self.score, SCORES)
        weight = weight.float() if weight.itemsize < 4 else weight  # in half precision, small squares would be zero
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

    def kept(
        self,
        shapes: Shapes,
        density: float | None,
        *,
        model: nn.Module | None = None,
        groups: Units | None = None,
        profile: Profile | None = None,
    ) -> int:
        """How many weights pruning to `density` leaves, known from the shapes alone; an error where it cannot be done.

        Where whole units go, it is how many (or how many operations) are left at most; `shapes` are then those of all
        parameters that train.
        """
        if self.preset:
            return round(_total(shapes) * masks_density(removed_filters(self.preset, self.k, shapes), shapes))
        if self.by_units:
            return kept_of_units(self, shapes, density, model=model, groups=groups, profile=profile)
        chosen = {name: shapes[name] for name in self._chosen(shapes, model)}
        if isinstance(pattern := self.the_pattern, NofM):
            return _total(chosen) * pattern.n // pattern.m
        pieces = self._pieces(chosen)
        divided = divided_by_norm(model, pieces) if model is not None else {}
        if density is not None and density * (total := _total(pieces)) < 1 - 1e-9:
            raise InputError(
                f"density {density:g} (compression {1 / density:,.10g}) leaves less than one of {total:,} weights; "
                f"the largest compression is {total:,}"
            )
        ranked = self._ranked(pieces, density, model)
        kept = sum(kept_of(together, part, self.floor, divided) for together, part in ranked)
        return kept * pattern.size if isinstance(pattern, Blocks) else kept

    def own_density(self, shapes: Shapes, *, model: nn.Module | None = None, groups: Units | None = None) -> float:
        """The density of a pruner that says itself how much goes (`sets_density`); a preset's as the paper counts it.

        >>> Pruner(pattern="1:4").own_density({"weight": (8, 8)})
        0.25
        """
        if self.preset:
            return reported_density(removed_filters(self.preset, self.k, shapes), shapes)
        if self.by_units:
            total = candidates_of(self, shapes, model, groups, None).size.without({})
        else:
            total = _total({name: shapes[name] for name in self._chosen(shapes, model)})
        return self.kept(shapes, None, model=model, groups=groups) / total

    def _ranked(
        self, shapes: Mapping[str, torch.Size], density: float | None, model: nn.Module | None
    ) -> list[tuple[dict[str, torch.Size], float]]:
        """What is ranked together, and the density that it is pruned to."""
        if self.rates:
            every = all_names(model) if model is not None else {}
            return [({name: each}, 1 - self.rate_of(every.get(name, (name,)))) for name, each in shapes.items()]
        assert density is not None  # as checked in `check_density`
        return [({name: shapes[name] for name in together}, density) for together in self._groups(shapes)]

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

    def _pieces(self, shapes: Shapes) -> dict[str, torch.Size]:
        pattern = self.the_pattern
        assert isinstance(pattern, Pieces | Blocks)
        return {name: pattern.pieces(torch.empty(shape, device="meta")).shape for name, shape in shapes.items()}

    def _chosen(self, shapes: Shapes, model: nn.Module | None, *, warns: bool = False) -> list[str]:
        """The weights to prune, an error if there are none; `warns` of those that the pattern does not divide."""
        given = [name for name in shapes if self._selects((all_names(model) if model else {}).get(name, (name,)))]
        chosen = self.fitting({name: shapes[name] for name in given}, model)
        if given and not chosen:
            raise InputError(f"pattern {self.pattern!r} divides the shape of none of {few(given)}; use another pattern")
        if not chosen:
            raise InputError(
                "no prunable weights: pruning needs a floating-point parameter with two dimensions larger than 1 "
                "outside normalisation layers" + (", selected by only and skip" if shapes else "")
            )
        if warns and (others := [name for name in given if name not in chosen]):
            are = "is" if len(others) == 1 else "are"
            warn(f"pattern {self.pattern!r} does not divide {few(others)}, which {are} neither pruned nor counted")
        return chosen


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def _total(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes.values())


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


def _within_left(kept: Tensor, left: Tensor | None) -> Tensor:
    """What is kept, as far as it was left."""
    return kept.contiguous() if left is None else kept & left.to(kept.device)


def _warn_of_starved(mask: Mask) -> None:
    starved = [name for name, kept in mask.items() if mask.counts[name] < 0.01 * kept.numel()]
    if starved:
        warn(f"less than 1% of the weights are left in {few(starved)}; `floor` keeps a minimum fraction of each tensor")
