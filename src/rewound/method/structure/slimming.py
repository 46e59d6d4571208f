"""`rewound.slim`: a new, smaller network without the units that a mask removes, equal to the masked one (law 8).

Every parameter and statistic is cut to the indices that are left. Counts that modules keep beside their weights
(`out_channels`, `num_heads`, `split_size`, ...) are written anew; then the network is run on the example, and refused
if it differs from the masked one.
"""

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import InputError, check_kind, few
from rewound.method.pruning.mask import Mask
from rewound.method.structure.tracing import Place, Unit, Units, as_arguments, units

_TRIES = 64  # runs of the example, to find which numbers of a module count what has shrunk
Kept = Mapping[str, Mapping[int, Tensor]]
"""By the name of a parameter or buffer, for each dimension that shrank, the indices that are left."""


@dataclass(frozen=True)
class Slim:
    """A network that has physically shrunk, and what is left of the large one's tensors."""

    model: nn.Module
    kept: Kept

    def state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state of the large network (a snapshot, an average of weights), cut to what is left."""
        return {name: _cut(tensor, self.kept.get(name, {})) for name, tensor in state.items()}

    def optimizer(self, optimizer: Optimizer, model: nn.Module) -> Optimizer:
        """The same kind of optimizer over the slim parameters: its slots are cut, groups and step counts kept."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        here = dict(self.model.named_parameters())
        groups, order = [], []
        for group in optimizer.param_groups:
            missing = [parameter for parameter in group["params"] if parameter not in names]
            if missing:
                raise InputError("the optimizer trains parameters that this model does not have; give its own model")
            order += group["params"]
            groups.append({**group, "params": [here[names[parameter]] for parameter in group["params"]]})
        known = inspect.signature(type(optimizer)).parameters
        smaller = type(optimizer)(groups, **{key: value for key, value in optimizer.defaults.items() if key in known})
        for old in order:
            slots, name = optimizer.state.get(old, {}), names[old]
            cut = {key: self._slot(name, old, value) for key, value in slots.items()}
            if cut:
                smaller.state[here[name]] = cut
        return smaller

    def _slot(self, name: str, parameter: Tensor, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            return copy.deepcopy(value)
        return _cut(value, self.kept.get(name, {}))


def slim(
    model: nn.Module, mask: Mask, example_inputs: Sequence[Any], example_keywords: Mapping[str, Any] | None = None
) -> Slim:
    """A copy of the model without the units that the mask removes; the given one stays as it is.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> groups = units(model, (torch.zeros(1, 4),))
    >>> slim(model, groups.mask_without(groups.groups[0].units[:5]), (torch.zeros(1, 4),)).model[0]
    Linear(in_features=4, out_features=3, bias=True)
    """
    check_kind("mask", mask, Mask, "give one of whole units, as rewound.units(...).mask_without makes it")
    found = units(model, example_inputs, example_keywords)
    gone = removed_units(found, mask)
    kept = _kept(model, gone)
    small = copy.deepcopy(model)
    _shrink(small, kept)
    _rewrite_counts(model, small)
    result = Slim(small, kept)
    _fit(model, mask, result, example_inputs, example_keywords)
    return result


def removed_units(found: Units, mask: Mask) -> list[Unit]:
    """The units that a mask removes; an error for one that removes only a part of a unit."""
    gone = [unit for group in found for unit in group.units if _is_gone(unit, mask)]
    expected = found.mask_without(gone)
    for name, kept in mask.items():
        whole = expected.get(name)
        same = bool(kept.all()) if whole is None else torch.equal(kept.cpu(), whole.cpu())
        if not same:
            raise InputError(
                f"the mask of {name} is not of whole units, so that no smaller network equals the masked one; "
                "prune whole units, or keep the network as it is"
            )
    for group in found:
        if all(any(unit is other for other in gone) for unit in group.units):
            raise InputError(
                f"the mask removes all {len(group)} units of {few([name for name, _ in group.members])}; "
                "keep at least one of them"
            )
    return gone


def _is_gone(unit: Unit, mask: Mask) -> bool:
    for (name, dim), indices in unit.indices.items():
        if name in mask:
            return not bool(mask[name].index_select(dim, torch.tensor(indices, device=mask[name].device)).any())
    return False


def _kept(model: nn.Module, gone: Sequence[Unit]) -> Kept:
    lost: dict[Place, set[int]] = {}
    for unit in gone:
        for place, indices in unit.indices.items():
            lost.setdefault(place, set()).update(indices)
    tensors = model.state_dict(keep_vars=True)
    kept: dict[str, dict[int, Tensor]] = {}
    for (name, dim), away in lost.items():
        size = tensors[name].shape[dim]
        kept.setdefault(name, {})[dim] = torch.tensor([index for index in range(size) if index not in away])
    return kept


def _cut(tensor: Tensor, kept: Mapping[int, Tensor]) -> Tensor:
    for dim, indices in kept.items():
        tensor = tensor.index_select(dim, indices.to(tensor.device))
    return tensor.clone()


def _shrink(model: nn.Module, kept: Kept) -> None:
    done: dict[int, nn.Parameter] = {}
    for name, dims in kept.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        tensor = getattr(module, leaf)
        if isinstance(tensor, nn.Parameter):
            if id(tensor) not in done:
                done[id(tensor)] = nn.Parameter(_cut(tensor.detach(), dims), tensor.requires_grad)
            setattr(module, leaf, done[id(tensor)])
        else:
            module.register_buffer(leaf, _cut(tensor, dims), leaf not in module._non_persistent_buffers_set)


def _convolution(old: Any, new: Any) -> None:
    transposed = isinstance(new, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
    first, second = new.weight.shape[:2]
    if not transposed and old.groups > 1 and old.weight.shape[1] == 1:
        new.groups = new.groups * first // old.weight.shape[0]
    new.in_channels = first if transposed else second * new.groups
    new.out_channels = second * new.groups if transposed else first


def _linear(old: Any, new: Any) -> None:
    new.out_features, new.in_features = new.weight.shape


def _normalisation(old: Any, new: Any) -> None:
    if new.weight is not None:
        new.num_features = new.weight.shape[0]
    elif new.running_mean is not None:
        new.num_features = new.running_mean.shape[0]


def _group_norm(old: Any, new: Any) -> None:
    if new.weight is not None:
        new.num_groups = old.num_groups * new.weight.shape[0] // old.num_channels
        new.num_channels = new.weight.shape[0]


def _embedding(old: Any, new: Any) -> None:
    new.num_embeddings, new.embedding_dim = new.weight.shape


COUNTS: Mapping[type[nn.Module], Callable[[Any, Any], None]] = {
    nn.modules.conv._ConvNd: _convolution,
    nn.Linear: _linear,
    nn.modules.batchnorm._NormBase: _normalisation,
    nn.GroupNorm: _group_norm,
    nn.Embedding: _embedding,
}
"""How the counts that a module of torch keeps follow from its weights."""


def _rewrite_counts(large: nn.Module, small: nn.Module) -> None:
    """Write anew what modules of torch count beside their weights."""
    pairs: Iterator[tuple[Any, Any]] = zip(large.modules(), small.modules(), strict=True)
    for old, new in pairs:
        if _is_conv1d(new):
            new.nx, new.nf = new.weight.shape
        for kind, rule in COUNTS.items():
            if isinstance(new, kind):
                rule(old, new)


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is the transposed linear layer of transformers, which need not be installed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


@dataclass(frozen=True)
class _Number:
    """A whole number of somebody's module that may count what has shrunk, and what it could be now."""

    module: nn.Module
    name: str
    options: tuple[int, ...]
    """What it was, then what it is as a size of a weight, then as a part of one (heads)."""


def _own_numbers(large: nn.Module, small: nn.Module, kept: Kept) -> dict[tuple[type, str], list[_Number]]:
    """By class and name: all modules of a class write the same number anew, or none does."""
    found: dict[tuple[type, str], list[_Number]] = {}
    tensors = large.state_dict(keep_vars=True)
    for (prefix, old), new in zip(large.named_modules(), small.modules(), strict=True):
        if any(isinstance(new, kind) for kind in COUNTS) or _is_conv1d(new):
            continue
        start = f"{prefix}." if prefix else ""
        inside = {name: dims for name, dims in kept.items() if name.startswith(start)}
        near = {name: dims for name, dims in inside.items() if name.removeprefix(start).count(".") < 3}
        sizes = {tensors[name].shape[dim]: len(left) for name, dims in near.items() for dim, left in dims.items()}
        for name, value in vars(old).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 2 or name.startswith("_"):
                continue
            parts = [
                left * value // size for size, left in sizes.items() if size % value == 0 and left * value % size == 0
            ]
            options = tuple(dict.fromkeys([value, *([sizes[value]] if value in sizes else []), *parts]))
            if len(options) > 1:
                found.setdefault((type(old), name), []).append(_Number(new, name, options))
    return found


def _choices(found: Mapping[tuple[type, str], Sequence[_Number]]) -> Iterator[tuple[int, ...]]:
    """Which option each number takes: first the likely ones, then with one of them changed, then with two."""
    likely = [0 if _is_size_of_head(name) else 1 for _, name in found]
    ranges = [range(max(len(number.options) for number in numbers)) for numbers in found.values()]
    for changes in range(3):
        for places in itertools.combinations(range(len(likely)), changes):
            for others in itertools.product(*(ranges[place] for place in places)):
                if all(other != likely[place] for place, other in zip(places, others, strict=True)):
                    choice = list(likely)
                    for place, other in zip(places, others, strict=True):
                        choice[place] = other
                    yield tuple(choice)


def _is_size_of_head(name: str) -> bool:
    return name in ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_kv", "dim_head")


@torch.no_grad()
def _fit(
    model: nn.Module, mask: Mask, result: Slim, example_inputs: Sequence[Any], keywords: Mapping[str, Any] | None
) -> None:
    """Write anew the numbers of the modules' own classes, until the small network equals the masked one."""
    masked = copy.deepcopy(model)
    mask.apply(masked)
    inputs = as_arguments(example_inputs)
    arguments = [_doubled(each) for each in inputs], {k: _doubled(each) for k, each in (keywords or {}).items()}
    expected = _tensors_of(masked.double().eval()(*arguments[0], **arguments[1]))
    numbers, failure = _own_numbers(model, result.model, result.kept), ""
    for choice in itertools.islice(_choices(numbers), _TRIES):
        for option, each in zip(choice, numbers.values(), strict=True):
            for number in each:
                setattr(number.module, number.name, number.options[min(option, len(number.options) - 1)])
        try:
            given = _tensors_of(copy.deepcopy(result.model).double().eval()(*arguments[0], **arguments[1]))
        except Exception as error:  # whatever a module's own code raises where a count is wrong
            failure = failure or f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            continue
        if len(given) == len(expected) and all(map(_equal, given, expected)):
            return
        failure = failure or "its outputs differ"
    raise InputError(
        f"no smaller network was found that equals the masked one ({failure}): a count in its code could not be "
        "written anew; let the code read sizes from its weights, or keep the network as it is"
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)


def _doubled(thing: Any) -> Any:
    return thing.double() if isinstance(thing, Tensor) and thing.is_floating_point() else thing


def _tensors_of(thing: Any) -> list[Tensor]:
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, Mapping):
        thing = list(thing.values())
    if isinstance(thing, list | tuple):
        return [tensor for each in thing for tensor in _tensors_of(each)]
    return []
