"""From a history to tensors: read from the store where they are, made again where they are not."""

import torch

from rewound.history import Past, Pruned, Ruled, Start, Trained, start_of
from rewound.pruning.facts import facts_of
from rewound.pruning.mask import Mask
from rewound.randomness import fold
from rewound.schedule import Segment
from rewound.storage.store import Say, Store
from rewound.technique import Facts
from rewound.training import State, begin, train


def realised(past: Past | Pruned, store: Store, device: torch.device, say: Say) -> tuple[State, Mask | None]:
    """The state and mask of a history."""
    if isinstance(past, Start):
        return begin(past.recipe, past.seed, fresh=past.fresh), None
    if isinstance(past, Pruned):
        return pruned(past, store, device, say)[:2]
    if (stored := store.load(past.key)) is not None:
        return stored.state, stored.mask
    say(recomputing(past.key))
    state, mask = realised(past.parent, store, device, say)
    for state in train(start_of(past).recipe, state, mask, lr=rates(past, store, device, say), device=device):  # noqa: B020
        store.save(past.key, state, mask)
    return state, mask


def recomputing(key: str) -> str:
    """What is said of a state that is made again."""
    return f"recomputing {key[:12]}: its tensors are no longer in the store (--keep all keeps them)"


def pruned(past: Pruned, store: Store, device: torch.device, say: Say) -> tuple[State, Mask, Facts]:
    """W (.) m: the mask pruned from one state, on the weights of another; and what that pruning took away."""
    source, before = realised(past.source, store, device, say)
    weights = {name: source.model[name] for name in start_of(past).recipe.shapes}
    seed = fold(source.seed, past.salt) if past.salt else source.seed
    mask = past.pruner.prune(weights, past.density, before, seed=fold(seed, past.prunings))
    shared = past.weights.key == past.source.key
    state = source if shared else realised(past.weights, store, device, say)[0]
    return state.pruned(mask, past.prunings, seed), mask, facts_of(weights, before, mask)


def rates(past: Trained, store: Store, device: torch.device, say: Say) -> list[Segment]:
    """The learning rates of a run; a rule draws them now that the mask is known."""
    if not isinstance(past.rates, Ruled):
        return list(past.rates)
    assert isinstance(past.parent, Pruned)
    return past.rates.drawn(pruned(past.parent, store, device, say)[2])
