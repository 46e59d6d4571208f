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
    if isinstance(past, Start):
        return Realised(begin(past.recipe, past.seed, fresh=past.fresh), None)
    if isinstance(past, Pruned):
        return _pruned(past, store, device, say)
    if (stored := store.load(past.key)) is not None:
        return Realised(stored.state, stored.mask)
    say(recomputing(past.key))
    before = realised(past.parent, store, device, say)
    lr = rates(past, before.facts, store, device, say)
    for state in train(start_of(past).recipe, before.state, before.mask, lr=lr, device=device):
        store.save(past.key, state, before.mask)
    return Realised(state, before.mask)


def recomputing(key: str) -> str:
    """What is said of a state that is made again."""
    return f"recomputing {key[:12]}: its tensors are no longer in the store (--keep all keeps them)"


def _pruned(past: Pruned, store: Store, device: torch.device, say: Say) -> Realised:
    """W (.) m: the mask pruned from one state, on the weights of another; and what that pruning took away."""
    source, before, _ = realised(past.source, store, device, say)
    weights = {name: source.model[name] for name in start_of(past).recipe.shapes}
    seed = fold(source.seed, past.salt) if past.salt else source.seed
    mask = past.pruner.prune(weights, past.density, before, seed=fold(seed, past.prunings))
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
