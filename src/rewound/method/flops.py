"""How many operations one forward pass takes, dense and under a mask.

What a call of each module costs is in `costs`. Products outside of these modules are found by `products`; they count if
the table has a layer that does the same. Under a mask the term of a weight falls with its kept count, everything else
stays. Your own layer is one more line: `profile(model, example, {**MULTIPLY_ADDS, MyLayer: my_cost})`.
"""

import inspect
import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from rewound.foundations.errors import InputError, check_kind, shown
from rewound.foundations.randomness import all_draws
from rewound.method.copies import apart, in_evaluation
from rewound.method.costs import MULTIPLY_ADDS, CostFunction, Costs
from rewound.method.products import Products
from rewound.method.pruning.mask import all_names, by_plain_name


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
    first_names: Mapping[str, str] = field(default_factory=dict)
    """Of parameters that have several names, by the others: a mask may say any of them."""

    def total(self, mask: Mapping[str, Tensor] | None = None) -> int:
        """Return the operations of the whole pass."""
        return self.fixed + sum(self.layers(mask).values())

    def layers(self, mask: Mapping[str, Tensor] | None = None) -> dict[str, int]:
        """Return the operations of each weight by parameter name; what a mask cannot change is in `fixed`."""
        mask = {} if mask is None else mask
        check_kind("mask", mask, Mapping, "give the rewound.Mask of that model, or leave it out")
        left: dict[str, Tensor] = {}
        for name, kept in mask.items():
            first = self.first_names.get(name, name)
            if kept.shape != (shape := self.shapes.get(first)):
                has = "no such parameter" if shape is None else f"it with shape {tuple(shape)}"
                raise InputError(
                    f"mask entry {name!r} has shape {tuple(kept.shape)}, but the profiled model has {has}; "
                    f"use a mask made for that model"
                )
            left[first] = left[first] * kept.to(left[first].device) if first in left else kept
        return {name: self._operations(name, left.get(name)) for name in self.weights}

    @property
    def uncounted(self) -> list[str]:
        """Names of the matrices and larger weights that nothing was charged to: embeddings, weights of layers and of
        operations that are not known, and those that others are computed from."""
        return [name for name, shape in self.shapes.items() if len(shape) > 1 and name not in self.weights]

    def per_row(self) -> dict[str, tuple[float, ...]]:
        """How many operations an element of each row of a weight takes part in; one number if as many in all rows."""
        return {name: _of_rows(operations, self.shapes[name]) for name, operations in self.weights.items()}

    def _operations(self, name: str, kept: Tensor | None) -> int:
        per_element = self.weights[name]
        if kept is None:
            return self.shapes[name].numel() // len(per_element) * sum(per_element)
        counts: list[int] = kept.reshape(len(per_element), -1).count_nonzero(1).tolist()
        return sum(count * operations for count, operations in zip(counts, per_element, strict=True))


def profile(
    model: nn.Module,
    example: Tensor | tuple[Tensor, ...],
    costs: Costs = MULTIPLY_ADDS,
    *,
    keywords: Mapping[str, Any] | None = None,
) -> Profile:
    """Count the operations of one evaluation pass of `model` on `example`, a batch of one; the model stays untouched.

    A copy runs, which its code may change. Parameters shared by several modules are counted under their first name, and
    modules called twice cost twice.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.ReLU())
    >>> profile(net, torch.zeros(1, 1, 4, 4)).layers()
    {'0.weight': 72}
    >>> from rewound.method.costs import PAPER
    >>> profile(net, torch.zeros(1, 1, 4, 4), PAPER).total()
    80
    """
    check_kind("model", model, nn.Module, "give the model itself")
    if not _tensors([example, keywords]):
        raise InputError(f"example must be what the model takes, a tensor or a tuple of them, not {shown(example)}")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    def run(network: nn.Module) -> object:
        with all_draws(device, 0):
            return network(*example if isinstance(example, tuple) else (example,), **(keywords or {}))

    model = apart(model, run)
    counted = _Counted(model, costs)
    with ExitStack() as stack:
        stack.enter_context(in_evaluation(model))  # a single example must neither meet nor move batch statistics
        counted.look(stack)
        with torch.no_grad():
            run(model)
    return counted.profile()


class FirstPass:
    """Counts the operations of a model's next forward pass in training, which somebody else makes; then looks no more.

    The pass itself is left as it is, and what cannot be counted is None. It may have many examples: their number is
    the first dimension of the first tensor that the model is given.

    >>> net = nn.Linear(3, 2)
    >>> first = FirstPass(net)
    >>> _ = net(torch.zeros(5, 3))
    >>> first.profile.total(), first.examples
    (30, 5)
    """

    def __init__(self, model: nn.Module, costs: Costs = MULTIPLY_ADDS) -> None:
        self.profile: Profile | None = None
        self.examples = 0
        self._model, self._costs = model, costs
        self._counted: _Counted | None = None
        self._hooks = ExitStack()
        self._hooks.callback(model.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
        self._hooks.callback(model.register_forward_hook(self._end, always_call=True).remove)

    def __deepcopy__(self, memo: object) -> "FirstPass":
        return self  # a copy of the model has these hooks, which tell it from the model

    def close(self) -> None:
        """Look no more."""
        self._hooks.close()

    def _begin(self, module: nn.Module, args: object, kwargs: object) -> None:
        given = _tensors([args, kwargs])
        if module is self._model and module.training and self._counted is None and given and given[0].ndim:
            self.examples, self._counted = given[0].shape[0], _Counted(module, self._costs)
            self._counted.look(self._hooks, strict=False)
            if module in self._counted.rules:  # its own hook comes too late
                self._counted.products.hide()

    def _end(self, module: nn.Module, args: object, output: object) -> None:
        if module is self._model and self._counted is not None:
            self.close()
            if output is not None and not self._counted.has_failed:  # None: the pass has failed
                self.profile = self._counted.profile()


class _Counted:
    """What the modules of a model that are called cost, and the products outside of them."""

    def __init__(self, model: nn.Module, costs: Costs) -> None:
        self.parameters = by_plain_name(dict(model.named_parameters()))
        self.first_names = {name: names[0] for name, names in all_names(model).items() if name != names[0]}
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.rules = {module: rule for module in model.modules() if (rule := _rule(module, costs)) is not None}
        self.products, self.costs = Products(self.parameters), costs
        self.weights: dict[str, tuple[int, ...]] = {}
        self.fixed, self.failed = 0, False

    @property
    def has_failed(self) -> bool:
        """Whether something could not be counted."""
        return self.failed or self.products.failed

    def look(self, until: ExitStack, *, strict: bool = True) -> None:
        """Count what is called until then; errors are raised in the pass, or noted as failed."""

        def try_to_charge(module: nn.Module, args: Any, kwargs: Any, output: object) -> None:
            try:
                self.charge(module, args, kwargs, output)
            except Exception:  # of a rule that does not know this use of a layer
                self.failed = True

        def begin(module: nn.Module, args: object) -> None:
            self.products.hide()

        def end(module: nn.Module, args: object, output: object) -> None:
            self.products.show()

        for module in self.rules:
            hook = self.charge if strict else try_to_charge
            until.enter_context(module.register_forward_pre_hook(begin, prepend=True))
            until.enter_context(module.register_forward_hook(end, prepend=True, always_call=True))
            until.enter_context(module.register_forward_hook(hook, with_kwargs=True, prepend=True))
        self.products.look(until, strict=strict)

    def charge(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        cost = self.rules[module](module, _tensors(given), _tensors(output))
        self.fixed += cost.fixed
        for local, operations in cost.weights.items():
            weight: Tensor = attrgetter(local)(module)
            name = self.names.get(id(weight))
            if name is None:  # computed from other parameters (weight norm): no mask reaches it
                self.fixed += weight.numel() // len(operations) * sum(operations)
            else:
                self.weights[name] = _add(self.weights.get(name, (0,)), operations)

    def profile(self) -> Profile:
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        weights, fixed = dict(self.weights), self.fixed
        for product in self.products.found:
            if product.layer not in self.costs:
                continue
            if product.weight is None:
                fixed += product.operations
            else:
                weights[product.weight] = _add(weights.get(product.weight, (0,)), product.parts)
        counted = {name: weights[name] for name in shapes if name in weights}
        return Profile(shapes, counted, fixed, self.first_names)


def _rule(module: nn.Module, costs: Costs) -> CostFunction | None:
    kinds = [kind for kind in type(module).__mro__ if kind in costs]
    # transformers' Conv1D is a linear layer with a transposed weight and `nf` outputs.
    if not kinds and hasattr(module, "nf") and getattr(getattr(module, "weight", None), "ndim", 0) == 2:
        kinds = [nn.Linear] if nn.Linear in costs else []
    return costs[kinds[0]] if kinds else None


def _of_rows(parts: tuple[int, ...], shape: torch.Size) -> tuple[float, ...]:
    if len(set(parts)) == 1:
        return parts[:1]
    rows = shape[0]
    each = tuple(part for part in parts for _ in range(math.lcm(len(parts), rows) // len(parts)))
    inside = len(each) // rows  # parts within a row: their mean
    return tuple(sum(each[row * inside : (row + 1) * inside]) / inside for row in range(rows))


def _add(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    # A number holds for all the parts that its own part is divided into.
    parts = math.lcm(len(one), len(other))
    return tuple(one[i * len(one) // parts] + other[i * len(other) // parts] for i in range(parts))


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, Iterable) and not isinstance(value, str | nn.Module):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
