"""From a history to tensors: read from the store where they are, made again where they are not."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rewound.foundations.errors import InputError
from rewound.foundations.randomness import fold, own_draws
from rewound.method.pruning.counts import facts_of
from rewound.method.pruning.mask import Mask, all_names
from rewound.method.pruning.scores import Observations, observations
from rewound.method.schedule import Segment, sliced
from rewound.method.structure.examples import call_of
from rewound.method.structure.kept import mask_of_dead_layers, shapes_of
from rewound.method.structure.paths import check_path
from rewound.method.technique import Facts
from rewound.states.history import Past, Pruned, Ruled, Start, Trained, is_slim, lineage, start_of
from rewound.states.storage.statefile import Kept
from rewound.states.storage.store import Say, Store
from rewound.tasks.recipe import Position, Recipe, shapes_to_prune
from rewound.tasks.slimmed import cut_state, expanded_state, kept_by, slimmed
from rewound.tasks.training import State, begin, restored, train


class Realised(NamedTuple):
    """The tensors of a history."""

    state: State
    mask: Mask | None
    facts: Facts | None = None
    """What the pruning took away, where the history ends with one."""


def realised(past: Past | Pruned, store: Store, device: torch.device, say: Say) -> Realised:
    """A history as tensors."""
    missing: list[Trained | Pruned] = []  # what has to be made, the last operation first: there may be thousands
    while not isinstance(past, Start) and (stored := _stored(past, store)) is None:
        missing.append(past)
        past = past.parent if isinstance(past, Trained) else past.source
    found = Realised(begin(past.recipe, past.seed, fresh=past.fresh), None) if isinstance(past, Start) else stored
    assert found is not None  # the loop ends with one of the two
    while missing:
        operation = missing.pop()
        if isinstance(operation, Pruned):
            found = pruned(operation, found, store, device, say)
            continue
        ends = not (missing and isinstance(next_one := missing[-1], Pruned) and next_one.runs_on)
        if ends:  # a level; what it passed on the way is not kept
            check_same_data(operation, store, f"compute {operation.key[:12]} again")
            say(recomputing(operation.key))
        found = _trained(operation, found, store, device, say)
        if ends:
            store.save(operation.key, found.state, found.mask)
    return found


def _stored(past: Trained | Pruned, store: Store) -> Realised | None:
    """The tensors of a state, if they are in the store; a pruning has none there."""
    stored = stored_state(past, store) if isinstance(past, Trained) else None
    return Realised(stored.state, stored.mask) if stored else None


def _trained(past: Trained, before: Realised, store: Store, device: torch.device, say: Say) -> Realised:
    """A state that is no longer in the store, trained again."""
    lr = sliced(rates(past, before.facts, store, device, say), past.parent.steps)
    recipe, mask = network_of(past, before.mask)
    *_, state = train(recipe, before.state, mask, lr=lr, device=device)
    return Realised(state, before.mask)


def stored_state(past: Trained, store: Store, *, draft: bool = False, to_train: bool = True) -> Kept | None:
    """What the store keeps of a history, or of the way to it, if it can be that."""
    return store.load(past.key, draft=draft, to_train=to_train, misfit=partial(_misfit, past, draft))


def _misfit(past: Trained, draft: bool, kept: Kept) -> str | None:
    """Why tensors cannot be those of a history, in words that follow the name of their file; None if they can."""
    seed, (prunings, steps), recipe = _seed(past), kept.state.position, start_of(past).recipe
    if kept.state.seed != seed:
        return f"holds a state of seed {kept.state.seed}, not of seed {seed}"
    if prunings != past.prunings or not (0 < steps < past.steps if draft else steps == past.steps):
        return f"holds a state after {prunings} prunings and {steps} steps, not {past.prunings} and {past.steps}"
    if (kept.mask is not None) != isinstance(past.root, Pruned):
        return "holds a mask, but nothing was pruned" if kept.mask is not None else "holds no mask"
    if kept.mask is not None and not kept.mask.fits(recipe.skeleton):
        return f"holds a mask for another model than that of {recipe.label()}"
    try:
        model = network_of(past, kept.mask).recipe.skeleton
    except InputError:
        return f"holds a mask that is not of whole units of the model of {recipe.label()}"
    shapes = {name: tensor.shape for name, tensor in kept.state.model.items()}
    if shapes != {name: tensor.shape for name, tensor in model.state_dict().items()}:
        return f"holds other tensors than the model of {recipe.label()} has"
    if strange := {name.split("/", 1)[1] for name in kept.state.slots} - shapes.keys():
        return f"holds optimizer slots of {min(strange)!r}, which the model of {recipe.label()} has not"
    return None


def _seed(past: Trained) -> int:
    """The seed of a state: the trial's, with all salts on the way to it."""
    roots = [level.root for level in lineage(past)]
    seed = start_of(past).seed
    for root in roots:
        seed = fold(seed, root.salt) if isinstance(root, Pruned) and root.salt else seed
    return seed


def other_data(recipe: Recipe, made: Mapping[str, str]) -> list[str]:
    """What decides the content of batches and is not the same here as where something was made; mostly nothing."""
    today = recipe.made_with() if recipe.data_identity else {}
    return [name for name in recipe.data_identity if made.get(name) != today.get(name)]


def check_same_data(past: Trained, store: Store, to: str) -> None:
    """An error, which says what cannot be done, if a stored result was made with another decoder or other data.

    Else a run would change in its middle, or a result would have tensors that it was not measured on. To compute the
    result anew is no remedy: other results build on it.
    """
    recipe = start_of(past).recipe
    if not recipe.data_identity or (result := store.result(past.key)) is None:
        return
    if names := other_data(recipe, made := result["made"]):
        today = recipe.made_with()
        then, now = (", ".join(f"{name} {which.get(name, 'unknown')}" for name in names) for which in (made, today))
        raise InputError(
            f"cannot {to}: {past.key[:12]} was made with {then}, and this machine has {now}; install or prepare the "
            f"same {' and '.join(names)} here, run it on a machine that has it, or give another store"
        )


def recomputing(key: str) -> str:
    """The line that is printed when a state is computed again."""
    return f"recomputing {key[:12]}: the store has its result, but no longer its tensors (--keep all keeps both)"


def pruned(past: Pruned, found: Realised, store: Store, device: torch.device, say: Say) -> Realised:
    """W (.) m: the mask pruned from one state, on the weights of another; and what that pruning took away."""
    recipe, before = start_of(past).recipe, found.mask
    source = in_large_shapes(past.source, found)
    weights = {name: source.model[name] for name in shapes_to_prune(recipe, past.pruner)}
    seed = fold(source.seed, past.salt) if past.salt else source.seed
    drawn = fold(seed, past.prunings, *([past.steps] if past.runs_on else []))
    mask = past.pruner.prune(
        weights,
        past.density,
        before,
        seed=drawn,
        model=recipe.skeleton,
        groups=recipe.units if past.pruner.by_units else None,
        observations=_observations(past, recipe, replace(source, seed=seed), device),
        profile=recipe.profile if past.pruner.of == "flops" else None,
    )
    if past.slim:
        mask = _of_whole_units(recipe, mask)
    shared = past.weights.key == past.source.key
    state = source if shared else realised(past.weights, store, device, say).state
    names = all_names(recipe.skeleton)  # a tied weight is in a state under each of them
    everywhere = Mask({each: kept for name, kept in mask.items() for each in names.get(name, (name,))})
    state = state.pruned(everywhere, past.prunings, seed, steps=past.steps)
    weights = {name: source.model[name] for name in recipe.shapes}
    facts = facts_of(weights, before and _among(weights, before), _among(weights, mask))
    return Realised(cut_state(state, kept_by(recipe, mask)) if past.slim else state, mask, facts)


def _observations(past: Pruned, recipe: Recipe, source: State, device: torch.device) -> Observations | None:
    """What batches say of the weights that are pruned: the first ones of the level that the pruning begins (law 1)."""
    if not past.pruner.needs_batches:
        return None
    model, _ = restored(recipe, source, device)
    batches = recipe.batches(source.seed, recipe.first_batch(Position(past.prunings, past.steps)), device)
    with own_draws(device, fold(source.seed, past.prunings, past.steps)):
        return observations(
            model, batches, recipe.loss, count=past.pruner.batches, with_effects=past.pruner.score == "taylor"
        )


def in_large_shapes(past: Past, found: Realised) -> State:
    """A state as it is pruned: what a slim one has lost is zeros again."""
    if found.mask is None or not is_slim(past):
        return found.state
    recipe = start_of(past).recipe
    return expanded_state(found.state, kept_by(recipe, found.mask), shapes_of(recipe.skeleton))


def _of_whole_units(recipe: Recipe, mask: Mask) -> Mask:
    """The mask, completed to whole units, as a preset masks filters alone; an error if it cuts the network in two."""
    whole = recipe.units.whole(mask)
    check_path(recipe.skeleton, recipe.units, whole, call_of(recipe.example()))
    return whole


def _among(weights: Mapping[str, Tensor], mask: Mask) -> Mask:
    """The part of a mask that is for prunable weights; one of units is also for biases and normalisation."""
    return Mask({name: kept for name, kept in mask.items() if name in weights})


class Network(NamedTuple):
    """What the states of a history are trained as."""

    recipe: Recipe
    mask: Mask | None
    """In the shapes of that recipe's model. A slim network needs one only where a layer is wholly gone."""


def network_of(past: Trained | Pruned, mask: Mask | None) -> Network:
    """The recipe and the mask that a state is trained with; a slim one has a recipe of its own."""
    recipe = start_of(past).recipe
    if mask is None or not is_slim(past):
        return Network(recipe, mask)
    kept = kept_by(recipe, mask)
    return Network(slimmed(recipe, kept), mask_of_dead_layers(mask, kept))


def rates(past: Trained, facts: Facts | None, store: Store, device: torch.device, say: Say) -> list[Segment]:
    """The learning rates of a level; a rule draws them by the facts, found anew where they are not at hand."""
    if not isinstance(past.rates, Ruled):
        return list(past.known)
    known = facts or realised(past.parent, store, device, say).facts
    assert known is not None  # a rule follows a pruning
    return past.rates.drawn(known)
