"""How many operations one forward pass takes, dense and under a mask.

What a call of each module costs is in `costs`. Under a mask the term of a weight falls with its kept count, everything
else stays. Your own layer is one more line: `profile(model, example, {**MULTIPLY_ADDS, MyLayer: my_cost})`.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rewound.costs import MULTIPLY_ADDS, CostFunction, Costs
from rewound.errors import InputError, check_kind, shown
from rewound.pruning.mask import by_plain_name


@dataclass(frozen=True)
class Profile:
    """What a forward pass of one architecture costs: pure arithmetic for any number of masks.

    >>> counts = profile(nn.Linear(3, 2), torch.zeros(1, 3))
    >>> counts.total(), counts.total({"weight": torch.tensor([[1, 0, 0], [0, 1, 0]])})
    (6, 2)
    """

    shapes: Mapping[str, torch.Size]  # of every parameter of the model
    weights: Mapping[str, tuple[int, ...]]  # operations per element, as in `Cost`, summed over calls
    fixed: int

    def total(self, mask: Mapping[str, Tensor] | None = None) -> int:
        """Return the operations of the whole pass."""
        return self.fixed + sum(self.layers(mask).values())

    def layers(self, mask: Mapping[str, Tensor] | None = None) -> dict[str, int]:
        """Return the operations of each weight by parameter name; what a mask cannot change is in `fixed`."""
        mask = mask or {}
        for name, kept in mask.items():
            if kept.shape != (shape := self.shapes.get(name)):
                has = "no such parameter" if shape is None else f"it with shape {tuple(shape)}"
                raise InputError(
                    f"mask entry {name!r} has shape {tuple(kept.shape)}, but the profiled model has {has}; "
                    f"use a mask made for that model"
                )
        return {name: self._operations(name, mask.get(name)) for name in self.weights}

    @property
    def uncounted(self) -> list[str]:
        """Names of the matrices and larger weights that no rule charged, such as embeddings and unlisted layers."""
        return [name for name, shape in self.shapes.items() if len(shape) > 1 and name not in self.weights]

    def _operations(self, name: str, kept: Tensor | None) -> int:
        per_element = self.weights[name]
        if kept is None:
            return self.shapes[name].numel() // len(per_element) * sum(per_element)
        counts: list[int] = kept.reshape(len(per_element), -1).count_nonzero(1).tolist()
        return sum(count * operations for count, operations in zip(counts, per_element, strict=True))


def profile(model: nn.Module, example: Tensor | tuple[Tensor, ...], costs: Costs = MULTIPLY_ADDS) -> Profile:
    """Count the operations of one evaluation pass of `model` on `example`, a batch of one; the model stays untouched.

    Parameters shared by several modules are counted under their first name, and modules called twice cost twice.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.ReLU())
    >>> profile(net, torch.zeros(1, 1, 4, 4)).layers()
    {'0.weight': 72}
    >>> from rewound.costs import PAPER
    >>> profile(net, torch.zeros(1, 1, 4, 4), PAPER).total()
    80
    """
    check_kind("model", model, nn.Module, "give the model itself")
    if not _tensors(example):
        raise InputError(f"example must be what the model takes, a tensor or a tuple of them, not {shown(example)}")
    parameters = by_plain_name(dict(model.named_parameters()))
    names = {id(parameter): name for name, parameter in parameters.items()}
    weights: dict[str, tuple[int, ...]] = {}
    fixed = 0

    def charge(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        nonlocal fixed
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        cost = rules[module](module, _tensors(given), _tensors(output))
        fixed += cost.fixed
        for local, operations in cost.weights.items():
            weight: Tensor = attrgetter(local)(module)
            name = names.get(id(weight))
            if name is None:  # computed from other parameters (weight norm): no mask reaches it
                fixed += weight.numel() // len(operations) * sum(operations)
            else:
                weights[name] = _add(weights.get(name, (0,)), operations)

    rules = {module: rule for module in model.modules() if (rule := _rule(module, costs)) is not None}
    training = {module: module.training for module in model.modules()}
    products = _Products()
    with ExitStack() as stack:
        stack.callback(_restore, training)
        model.eval()  # a single example must neither meet nor move batch statistics
        for module in rules:
            stack.enter_context(module.register_forward_hook(charge, with_kwargs=True))
        with torch.no_grad(), products:
            model(*example if isinstance(example, tuple) else (example,))
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    fixed += products.operations if nn.MultiheadAttention in costs else 0
    return Profile(shapes, {name: weights[name] for name in shapes if name in weights}, fixed)


class _Products(TorchFunctionMode):
    """Counts attention that a module of any type computes with `F.scaled_dot_product_attention`.

    nn.MultiheadAttention is not counted again: it reaches that function only inside another torch function, where the
    mode is off. An active mode also keeps nn.TransformerEncoder off its fused path, which would call no submodule.
    """

    operations = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            rows, value = given["query"].shape[:-1].numel(), given["value"]
            self.operations += rows * value.shape[-2] * (given["query"].shape[-1] + value.shape[-1])
        return func(*args, **kwargs)


def _rule(module: nn.Module, costs: Costs) -> CostFunction | None:
    kinds = [kind for kind in type(module).__mro__ if kind in costs]
    # transformers' Conv1D is a linear layer with a transposed weight and `nf` outputs.
    if not kinds and hasattr(module, "nf") and getattr(getattr(module, "weight", None), "ndim", 0) == 2:
        kinds = [nn.Linear] if nn.Linear in costs else []
    return costs[kinds[0]] if kinds else None


def _restore(training: Mapping[nn.Module, bool]) -> None:
    for module, mode in training.items():
        module.training = mode


def _add(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    # A single number holds for every part.
    parts = max(len(one), len(other))
    return tuple(one[i % len(one)] + other[i % len(other)] for i in range(parts))


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, Iterable) and not isinstance(value, str | nn.Module):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
