"""Averages of the weights (an EMA) that a script gives in `also`: they are pruned with the model.

A module that has the model's weights gets the model's mask; a copy of one part of it (of a generator alone, or of the
network inside a LightningModule) gets the mask of that part. Anything else is masked through its `state_dict`: the
tensors in it, however deep in dictionaries, that have the name and the shape of a pruned weight. A module in `also`
that is trained (a GAN's critic, a head, a loss with parameters) is no average and is never pruned, even if it has the
same layers. What an optimizer trains outside the model and `also` is refused: it would begin anew when the run is
resumed, with the old state of its optimizer.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import InputError, warn
from rewound.foundations.quantities import counted
from rewound.loops.snapshot import Stateful, Subjects
from rewound.method.pruning.attachment import zero
from rewound.method.pruning.mask import Mask, plain_name, plain_parameters

Named = Mapping[str, Tensor]


def prune_along(things: Sequence[Stateful], mask: Mask, model: nn.Module) -> None:
    """Set to zero in `things` what the mask prunes of the model; an average would only approach zero."""
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
            thing.load_state_dict(state)  # its state_dict gives copies


def check_averages(things: Sequence[Stateful], weights: Named, model: nn.Module, *, slim: bool) -> None:
    """Warn of a thing with tensors of the weights' shapes that `prune_along` will not find; with `slim` an error."""
    full = Mask.full(weights)
    masks = _under_every_name(full, model)
    for thing in things:
        state = thing.state_dict()
        parts = len(_masks_of(thing, full, model)) if isinstance(thing, nn.Module) else 0
        found = parts == 1 if isinstance(thing, nn.Module) else any(_paired(state, masks))
        held = Counter(tensor.shape for tensor in tensors_in(state))
        problem = ""
        if parts > 1:
            problem = (
                f"{type(thing).__name__} in also may be a copy of any of {parts} parts of the model, which have "
                "the same names and shapes, so it will not be pruned: average the whole model"
            )
        elif not found and Counter(weight.shape for weight in weights.values()) <= held:
            problem = (
                f"{type(thing).__name__} in also holds tensors of the weights' shapes, but not under their names, and "
                "so will not be pruned with the model: let its state_dict name them as the model's does "
                f"({next(iter(weights))!r}), or give the averaged module itself"
            )
        elif slim and parts and not copies([thing], model, weights):
            problem = (
                f"{type(thing).__name__} in also has the model's weights, but is not a copy of the model, so it cannot "
                "be made smaller with it: average with torch's AveragedModel"
            )
        if problem and slim:
            raise InputError(f"{problem}, or leave out slim")
        if problem:
            warn(problem)


def copies(things: Sequence[Stateful], model: nn.Module, shrinking: Iterable[str]) -> list[tuple[nn.Module, str]]:
    """The modules among things, or inside a wrapper there, that are copies of the model or of a part of it.

    Each comes with the name of that part, which has as many weights that shrink as `_masks_of` asks for.
    """
    found: list[tuple[nn.Module, str]] = []
    parameters = plain_parameters(model, tied=True)
    chosen = {parameters[name] for name in shrinking if name in parameters}
    possible = [
        (name, part)
        for name, part in model.named_modules()
        if _matrices(chosen.intersection(part.parameters())) >= _least(chosen)
    ]
    for thing in things:
        inner: object = thing
        while isinstance(inner, nn.Module):
            if parts := [name for name, part in possible if _is_copy(inner, part)]:
                found.append((inner, parts[0]))
                break
            inner = getattr(inner, "module", getattr(inner, "_orig_mod", None))
    return found


def _is_copy(module: nn.Module, part: nn.Module) -> bool:
    kinds = [[type(each) for each in of.modules()] for of in (module, part)]
    return kinds[0] == kinds[1] and _shapes(_tensors_of(module)) == _shapes(_tensors_of(part))


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**_parameters(module), **dict(module.named_buffers(remove_duplicate=False))}


def _under_every_name(mask: Mask, model: nn.Module) -> dict[str, Tensor]:
    """The masks by all names that the model has for each weight: an average may hold tied weights separately."""
    masks = dict(mask.pairs(model))
    parameters = plain_parameters(model, tied=True)
    return {name: masks[parameter] for name, parameter in parameters.items() if parameter in masks}


def _masks_of(thing: nn.Module, mask: Mask, model: nn.Module) -> list[Mask]:
    """The model's mask for a module that has its weights; otherwise those of the parts that it may be a copy of.

    A part has more than one weight, unless the model has only one: a single layer is often like another.
    """
    if mask.fits(thing):
        return [mask]
    masks, shapes = dict(mask.pairs(model)), _shapes(_parameters(thing))
    least = _least(masks)
    parts: dict[frozenset[nn.Parameter], Mask] = {}
    for part in model.modules():
        named = _parameters(part)
        pruned = {name: parameter for name, parameter in named.items() if parameter in masks}
        if _matrices(pruned.values()) >= least and _shapes(named) == shapes:
            parts[frozenset(pruned.values())] = Mask({name: masks[parameter] for name, parameter in pruned.items()})
    return list(parts.values())


def _least(shrinking: Collection[nn.Parameter]) -> int:
    """How many pruned weights a part must have."""
    return min(2, max(1, _matrices(shrinking)))


def _matrices(parameters: Iterable[nn.Parameter]) -> int:
    """How many are weights of layers, and not biases or normalisation, which go with whole units."""
    return sum(parameter.ndim > 1 for parameter in parameters)


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


def tensors_in(state: object) -> Iterator[Tensor]:
    """All tensors of a state, in dictionaries and lists."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping | list | tuple):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from tensors_in(value)


# What is trained outside the model

Tensors = Mapping[int, Tensor]  # by identity


def check_also(subjects: Subjects) -> None:
    """An error for an optimizer or scheduler in `also`, and for trained tensors outside the model and `also`."""
    for thing in subjects.also:
        if isinstance(thing, Optimizer | LRScheduler):
            raise InputError(
                f"the learning rates of {type(thing).__name__} in also would not be rewound; give it in the lists of "
                "optimizers and schedulers"
            )
    trained = _trained_outside(subjects)
    if lost := len(trained.keys() - {key for thing in subjects.also for key in _held(thing, trained)}):
        raise InputError(
            f"the optimizer trains {counted(lost, 'tensor')} outside the model, which would be neither saved "
            "nor rewound; put all into one module and give that, or give the other module in also=[...]"
        )


def averages(subjects: Subjects) -> list[Stateful]:
    """The objects in `also` that may be averages of the model's weights: those that are not trained."""
    trained = _trained_outside(subjects)
    return [thing for thing in subjects.also if not _held(thing, trained)]


def _trained_outside(subjects: Subjects) -> Tensors:
    """The tensors that the optimizer trains and the model does not have."""
    trained = {id(tensor): tensor for group in subjects.optimizer.param_groups for tensor in group["params"]}
    within = _held(subjects.model, trained)
    return {key: tensor for key, tensor in trained.items() if key not in within}


def _held(thing: Stateful, tensors: Tensors) -> set[int]:
    """Which of the tensors an object holds; copies in its state do not count."""
    if isinstance(thing, nn.Module):
        return tensors.keys() & {id(tensor) for tensor in (*thing.parameters(), *thing.buffers())}
    if not tensors:
        return set()
    values = [value for value in thing.state_dict().values() if isinstance(value, Tensor)]
    return {key for key, tensor in tensors.items() if any(_shares_memory(tensor, value) for value in values)}


def _shares_memory(tensor: Tensor, other: Tensor) -> bool:
    """Whether they share their memory: a state may hold a tensor itself, or a detached one."""
    if tensor is other:
        return True
    strided = tensor.layout == other.layout == torch.strided
    alike = (tensor.device, tensor.dtype, tensor.shape) == (other.device, other.dtype, other.shape)
    return strided and alike and tensor.data_ptr() == other.data_ptr()
