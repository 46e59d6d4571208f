"""Averages of the weights that a loop keeps beside its model (an EMA), pruned along with it.

A module that has the model's weights is masked as the model is. Anything else is masked through its `state_dict`: the
tensors in it, however deep in dictionaries, that have the name and the shape of a pruned weight.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from rewound.attachment import zero
from rewound.errors import warn
from rewound.mask import Mask, plain_name, plain_parameters
from rewound.snapshot import Stateful

Named = Mapping[str, Tensor]


def prune_along(things: Sequence[Stateful], mask: Mask, model: nn.Module) -> None:
    """Set to zero in `things` what the mask prunes of the model: in an average it would only fade."""
    masks = _under_every_name(mask, model)
    for thing in things:
        if isinstance(thing, nn.Module):
            if mask.fits(thing):
                mask.apply(thing)
            continue
        state = thing.state_dict()
        for tensor, kept in _paired(state, masks):
            with torch.no_grad():
                zero(tensor, kept.to(tensor.device))
        if any(tensor[~kept.to(tensor.device)].any() for tensor, kept in _paired(thing.state_dict(), masks)):
            thing.load_state_dict(state)  # it had given copies


def warn_of_dense(things: Sequence[Stateful], weights: Named, model: nn.Module) -> None:
    """Warn of a thing that holds the weights, by their shapes, where `prune_along` will not find them."""
    full = Mask.full(weights)
    masks = _under_every_name(full, model)
    for thing in things:
        state = thing.state_dict()
        found = full.fits(thing) if isinstance(thing, nn.Module) else any(_paired(state, masks))
        held = Counter(tensor.shape for tensor in _tensors(state))
        if not found and Counter(weight.shape for weight in weights.values()) <= held:
            warn(
                f"{type(thing).__name__} in also holds tensors of the weights' shapes, but not under their names, and "
                "so will not be pruned with the model: let its state_dict name them as the model's does "
                f"({next(iter(weights))!r}), or give the averaged module itself"
            )


def _under_every_name(mask: Mask, model: nn.Module) -> dict[str, Tensor]:
    """The masks by all names that the model has for each weight: an average of tied ones may hold each by itself."""
    parameters = plain_parameters(model, tied=True)
    masks = {id(parameters[name]): kept for name, kept in mask.items()}
    return {name: masks[id(parameter)] for name, parameter in parameters.items() if id(parameter) in masks}


def _paired(state: Mapping[str, object], masks: Named) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors of a state that have the name and shape of a weight, with its mask."""
    for name, value in state.items():
        kept = masks.get(plain_name(name)) if isinstance(name, str) else None
        if isinstance(value, Mapping):
            yield from _paired(value, masks)
        elif isinstance(value, Tensor) and kept is not None and kept.shape == value.shape:
            yield value, kept


def _tensors(state: object) -> Iterator[Tensor]:
    """All tensors of a state, in dictionaries and lists."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping | list | tuple):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from _tensors(value)
