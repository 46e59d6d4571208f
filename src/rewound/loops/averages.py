"""Averages of the weights that a loop keeps beside its model (an EMA), pruned along with it.

A module that has the model's weights is masked as the model is, and a copy of one part of it (of a generator alone, or
of the network inside a LightningModule) as that part is. Anything else is masked through its `state_dict`: the tensors
in it, however deep in dictionaries, that have the name and the shape of a pruned weight.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from rewound.foundations.errors import warn
from rewound.loops.snapshot import Stateful
from rewound.method.pruning.attachment import zero
from rewound.method.pruning.mask import Mask, plain_name, plain_parameters

Named = Mapping[str, Tensor]


def prune_along(things: Sequence[Stateful], mask: Mask, model: nn.Module) -> None:
    """Set to zero in `things` what the mask prunes of the model: in an average it would only fade."""
    masks = _under_every_name(mask, model)
    for thing in things:
        if isinstance(thing, nn.Module):
            found = _masks_of(thing, mask, model)
            if len(found) == 1:
                found[0].apply(thing)
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
        parts = len(_masks_of(thing, full, model)) if isinstance(thing, nn.Module) else 0
        found = parts == 1 if isinstance(thing, nn.Module) else any(_paired(state, masks))
        held = Counter(tensor.shape for tensor in _tensors(state))
        if parts > 1:
            warn(
                f"{type(thing).__name__} in also may be a copy of any of {parts} parts of the model, which have "
                "the same names and shapes, so it will not be pruned: average the whole model"
            )
        elif not found and Counter(weight.shape for weight in weights.values()) <= held:
            warn(
                f"{type(thing).__name__} in also holds tensors of the weights' shapes, but not under their names, and "
                "so will not be pruned with the model: let its state_dict name them as the model's does "
                f"({next(iter(weights))!r}), or give the averaged module itself"
            )


def _under_every_name(mask: Mask, model: nn.Module) -> dict[str, Tensor]:
    """The masks by all names that the model has for each weight: an average of tied ones may hold each by itself."""
    parameters = plain_parameters(model, tied=True)
    masks = _by_parameter(mask, model)
    return {name: masks[parameter] for name, parameter in parameters.items() if parameter in masks}


def _by_parameter(mask: Mask, model: nn.Module) -> dict[nn.Parameter, Tensor]:
    parameters = plain_parameters(model, tied=True)
    return {parameters[name]: kept for name, kept in mask.items()}


def _masks_of(thing: nn.Module, mask: Mask, model: nn.Module) -> list[Mask]:
    """The model's mask for a module that has its weights; else those of the parts that it may be a copy of.

    A part has more than one weight, unless the model has no other: a single layer is easily made like another.
    """
    if mask.fits(thing):
        return [mask]
    masks, shapes = _by_parameter(mask, model), _shapes(_parameters(thing))
    parts: dict[frozenset[nn.Parameter], Mask] = {}
    for part in model.modules():
        named = _parameters(part)
        pruned = {name: parameter for name, parameter in named.items() if parameter in masks}
        if len(pruned) >= min(2, len(mask)) and _shapes(named) == shapes:
            parts[frozenset(pruned.values())] = Mask({name: masks[parameter] for name, parameter in pruned.items()})
    return list(parts.values())


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_name(name): parameter for name, parameter in module.named_parameters(remove_duplicate=False)}


def _shapes(named: Named) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in named.items()}


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
