"""From a history to tensors: read from the store where they are, made again where they are not."""

from typing import NamedTuple

import torch

from rewound.history import Past, Pruned, Start, Trained, start_of
from rewound.pruning.facts import facts_of
from rewound.pruning.mask import Mask
from rewound.randomness import fold
from rewound.rates import Ruled
from rewound.schedule import Segment
from rewound.storage.store import Say, Store
from rewound.technique import Facts
from rewound.training import State, begin, train


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
    for operation in reversed(missing):
        if isinstance(operation, Pruned):
            found = _pruned(operation, found, store, device, say)
        else:
            found = _trained(operation, found, store, device, say)
    return found


def _stored(past: Trained | Pruned, store: Store) -> Realised | None:
    """The tensors of a state, if they are in the store; a pruning has none there."""
    stored = store.load(past.key) if isinstance(past, Trained) else None
    return Realised(stored.state, stored.mask) if stored else None


def _trained(past: Trained, before: Realised, store: Store, device: torch.device, say: Say) -> Realised:
    """A state that is no longer in the store, trained again."""
    say(recomputing(past.key))
    lr = rates(past, before.facts, store, device, say)
    for state in train(start_of(past).recipe, before.state, before.mask, lr=lr, device=device):
        store.save(past.key, state, before.mask)
    return Realised(state, before.mask)


def recomputing(key: str) -> str:
    """What is said of a state that is made again."""
    return f"recomputing {key[:12]}: its tensors are no longer in the store (--keep all keeps them)"


def _pruned(past: Pruned, found: Realised, store: Store, device: torch.device, say: Say) -> Realised:
    """W (.) m: the mask pruned from one state, on the weights of another; and what that pruning took away."""
    source, before, _ = found
    recipe = start_of(past).recipe
    weights = {name: source.model[name] for name in recipe.shapes}
    seed = fold(source.seed, past.salt) if past.salt else source.seed
    drawn = fold(seed, past.prunings)
    mask = past.pruner.prune(weights, past.density, before, seed=drawn, model=recipe.skeleton)
    shared = past.weights.key == past.source.key
    state = source if shared else realised(past.weights, store, device, say).state
    return Realised(state.pruned(mask, past.prunings, seed), mask, facts_of(weights, before, mask))


def rates(past: Trained, facts: Facts | None, store: Store, device: torch.device, say: Say) -> list[Segment]:
    """The learning rates of a run; a rule draws them by the facts, found anew where they are not at hand."""
    if not isinstance(past.rates, Ruled):
        return list(past.rates.known)
    known = facts or realised(past.parent, store, device, say).facts
    assert known is not None  # a rule follows a pruning
    return past.rates.drawn(known)
