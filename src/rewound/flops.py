"""How many operations one forward pass takes, dense and under a mask.

A rule is a table from module type to a pure function that says what one call of such a module costs; a subclass costs
what its nearest listed ancestor does, and a module in no row is free. Two tables come with the package:

| layer                     | `MULTIPLY_ADDS`                       | `PAPER` (ResNet-20: 41,886,986)                  |
|---------------------------|---------------------------------------|--------------------------------------------------|
| convolution               | 1 per weight and output position      | the same                                         |
| linear                    | 1 per weight and row                  | 2 per weight and row, 1 per bias                 |
| recurrent (layer or cell) | 1 per weight and time step            | the same                                         |
| attention                 | projections, query-key, weights-value | the same                                         |
| batch normalisation       | 0                                     | 2 per element                                    |
| ReLU, global mean         | 0                                     | 1 per element                                    |
| residual sum (`Add`)      | 0                                     | 1 per element of branch and block input          |

Padding and causal masks save nothing: each position counts in full.
Under a mask the term of a weight falls with its kept count, everything else stays. Your own layer is one more line:
`profile(model, example, {**MULTIPLY_ADDS, MyLayer: my_cost})`.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rewound.errors import InputError, check_kind, shown

__all__ = ["MULTIPLY_ADDS", "PAPER", "Add", "Cost", "CostFunction", "Costs", "Profile", "profile"]


class Add(nn.Module):
    """The sum that ends a residual block, as a module: PyTorch has none, and only modules are counted.

    >>> Add()(torch.ones(2), torch.ones(2), nn.Identity())
    tensor([2., 2.])
    """

    def forward(self, branch: Tensor, x: Tensor, shortcut: nn.Module) -> Tensor:
        # The shortcut is called in here so that a rule sees the block's input, which is what the paper counts.
        return branch + cast(Tensor, shortcut(x))


@dataclass(frozen=True)
class Cost:
    """What one call of a module costs.

    `weights` maps a weight (its name within the module) to the operations each of its elements takes part in: one
    number, or several for as many equal parts of its rows. `fixed` is what no mask can change.
    """

    weights: Mapping[str, tuple[int, ...]]
    fixed: int = 0


# Given the module and the tensors it took (in the order of its signature) and returned.
CostFunction = Callable[[nn.Module, Sequence[Tensor], Sequence[Tensor]], Cost]
Costs = Mapping[type[nn.Module], CostFunction]


def _convolution(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Cost:
    return Cost({"weight": (outputs[0].numel() // cast(nn.Conv2d, module).out_channels,)})


def _transposed(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Cost:
    return Cost({"weight": (inputs[0].numel() // cast(nn.ConvTranspose2d, module).in_channels,)})


def _linear(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Cost:
    return Cost({"weight": (outputs[0].shape[:-1].numel(),)})


def _recurrent(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Cost:
    # Every matrix of every layer and direction is used once a time step; this also counts a packed sequence.
    steps = inputs[0].numel() // cast(nn.RNNBase, module).input_size
    return Cost({name: (steps,) for name, _ in module.named_parameters(recurse=False) if name.startswith("weight")})


def _attention(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Cost:
    attention = cast(nn.MultiheadAttention, module)
    query, key = inputs[:2]
    queries, keys = query.numel() // attention.embed_dim, key.numel() // attention.kdim
    weights: dict[str, tuple[int, ...]] = {"out_proj.weight": (queries,)}  # used without calling out_proj
    if attention.kdim == attention.vdim == attention.embed_dim:
        weights["in_proj_weight"] = (queries, keys, keys)
    else:
        weights |= {"q_proj_weight": (queries,), "k_proj_weight": (keys,), "v_proj_weight": (keys,)}
    length = key.shape[1 if attention.batch_first and key.ndim == 3 else 0]
    length += (attention.bias_k is not None) + attention.add_zero_attn
    return Cost(weights, fixed=2 * queries * length * attention.embed_dim)


def _paper_linear(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Cost:
    bias = outputs[0].numel() if module.bias is not None else 0
    return Cost({"weight": (2 * outputs[0].shape[:-1].numel(),)}, fixed=bias)


def _elements(count: int) -> CostFunction:
    def cost(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Cost:
        return Cost({}, fixed=count * sum(tensor.numel() for tensor in inputs))

    return cost


MULTIPLY_ADDS: Costs = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _transposed),
    **dict.fromkeys((nn.RNNBase, nn.RNNCellBase), _recurrent),
    nn.Linear: _linear,
    nn.MultiheadAttention: _attention,
}

PAPER: Costs = {
    **MULTIPLY_ADDS,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _elements(2)),
    **dict.fromkeys((nn.ReLU, nn.AdaptiveAvgPool2d, Add), _elements(1)),
    nn.Linear: _paper_linear,
}


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
    >>> profile(net, torch.zeros(1, 1, 4, 4), PAPER).total()
    80
    """
    check_kind("model", model, nn.Module, "give the model itself")
    if not _tensors(example):
        raise InputError(f"example must be what the model takes, a tensor or a tuple of them, not {shown(example)}")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
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
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
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
