"""How much a weight matters: one number for each weight, none below 0.

| score        | of a weight                         | of a unit, where whole units go                           |
|--------------|-------------------------------------|-----------------------------------------------------------|
| `magnitude`  | w in absolute value: the paper's    | the mean of its weights' scores; also called `l1`         |
| `l2`         | w squared                           | the mean of its weights' scores                           |
| `taylor`     | w dL/dw in absolute value           | the mean of its weights' scores                           |
| `random`     | a uniform draw                      | one draw                                                  |
| `bn-scale`   |                                     | the scale of its normalisation, in absolute value         |
| `activation` |                                     | the mean absolute value of what layers read from it       |

`taylor` (Molchanov et al. 2017, to first order) and `activation` are means over batches of training data
(`observations`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rewound.foundations.errors import InputError, shown
from rewound.foundations.intercepting import Intercepting
from rewound.foundations.randomness import bits, fold
from rewound.method.copies import in_evaluation
from rewound.method.pruning.mask import plain_parameters

Score = Callable[[Tensor, str, int], Tensor]  # (weight, its name, seed) -> one non-negative number per weight
OTHER_NAMES = {"l1": "magnitude"}
"""Other names of scores; keys are made with the name on the right."""
B = TypeVar("B")


def magnitude(weight: Tensor, name: str, seed: int) -> Tensor:
    """|w|, whose mean over many weights is their L1 norm divided by their number."""
    return weight.abs()


def l2(weight: Tensor, name: str, seed: int) -> Tensor:
    """w^2, whose order is that of |w|, but its mean over many weights goes by their L2 norm."""
    return weight.square()


def random(weight: Tensor, name: str, seed: int) -> Tensor:
    """A uniform draw, the control for any other score."""
    return draws(seed, name, weight.numel(), weight.device).reshape(weight.shape)


def draws(seed: int, name: str, count: int, device: torch.device) -> Tensor:
    """Uniform draws for what has that name."""
    drawn = bits(fold(seed, "score", name), torch.arange(count, device=device))
    return (drawn >> 39).to(torch.float32)  # 24 bits: exact in float32


SCORES: Mapping[str, Score] = {"magnitude": magnitude, "l2": l2, "random": random}
WITH_BATCHES = ("taylor", "activation")
OF_UNITS = ("bn-scale", "activation")
"""Scores that single weights do not have."""


@dataclass(frozen=True)
class Observations:
    """What batches say of a network's weights and of what layers read, as means over the batches."""

    effects: Mapping[str, Tensor]
    """By the name of a weight: |w dL/dw|, to first order how much the loss changes without it."""
    inputs: Mapping[tuple[str, int], Tensor]
    """By the name of a weight and its dimension that reads: the mean |x| for each index of it."""


def observations(
    model: nn.Module,
    batches: Iterable[B],
    loss: Callable[[nn.Module, B], Tensor],
    *,
    count: int = 8,
    with_effects: bool = True,
) -> Observations:
    """Run the first batches through the network in evaluation mode; its weights and gradients stay as they are.

    Only effects (`taylor`) differentiate the loss; without them it is called for what layers read, and may return
    anything.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 2.0]]))
    >>> found = observations(model, [torch.tensor([[3.0, 5.0]])], lambda model, x: model(x).sum())
    >>> found.effects["weight"].tolist(), found.inputs["weight", 1].tolist()
    ([[3.0, 10.0]], [3.0, 5.0])
    """
    trained = {name: p for name, p in plain_parameters(model, tied=False).items() if p.requires_grad}
    parameters = trained if with_effects else {}
    # In half precision most products would be zero.
    effects = {
        name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for name, p in parameters.items()
    }
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    reads, taken = _Reads(plain_parameters(model, tied=True)), 0
    with in_evaluation(model):
        for _, batch in zip(range(count), batches, strict=False):
            # cuDNN has no gradients of recurrent layers in evaluation mode.
            with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext():
                with Intercepting(reads.called):
                    value = loss(model, batch)
                gradients = _gradients(value, list(parameters.values())) if with_effects else ()
            taken += 1
            for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
                if gradient is not None:
                    effects[name] += (parameter.detach().to(effects[name]) * gradient).abs()
    if not taken:
        raise InputError("there are no batches to measure scores on; give at least one")
    return Observations({name: effect / taken for name, effect in effects.items()}, reads.means())


def _gradients(value: object, parameters: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of what a loss returned, None where it does not depend on a parameter."""
    if not isinstance(value, Tensor):
        given = shown(value)
    elif value.numel() != 1:
        given = f"a tensor of shape {tuple(value.shape)}"
    elif not value.requires_grad:
        given = "a tensor without a gradient"
    else:
        return torch.autograd.grad(value, parameters, allow_unused=True)
    raise InputError(
        f"score 'taylor' differentiates what loss returns, and that is {given}; return one number as a tensor that was "
        "computed from the model's outputs, such as their mean loss"
    )


class _Reads:
    """Notes what linear layers, convolutions and the first of recurrent layers read, however modules call them."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.names: dict[int, list[str]] = {}
        for name, parameter in parameters.items():
            self.names.setdefault(id(parameter), []).append(name)
        self.sums: dict[tuple[str, int], tuple[Tensor, int]] = {}

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _READERS:
            at, dim, channels = _READERS[func]
            x = args[at] if len(args) > at else kwargs.get("input")
            weight = args[at + 1] if len(args) > at + 1 else kwargs.get("weight")
            if isinstance(x, Tensor) and isinstance(weight, Tensor) and id(weight) in self.names:
                self.note(x.detach(), weight, dim, channels)
        elif func in _RECURRENT:
            x, flat = args[0], next(each for each in reversed(args) if isinstance(each, list | tuple))
            for weight in flat:
                if any("weight_ih_l0" in name for name in self.names.get(id(weight), ())):
                    self.note(x.detach(), weight, 1, None)
        return func(*args, **kwargs)

    def note(self, x: Tensor, weight: Tensor, dim: int, channels: int | None) -> None:
        place = -1 if channels is None else channels if x.ndim == weight.ndim else channels - 1
        # The dimension of a grouped convolution has the channels of one group: those at one place of a group are taken
        # together.
        rows = x.movedim(place, 0).reshape(-1, weight.shape[dim], x.numel() // x.shape[place]).movedim(1, 0).flatten(1)
        for name in self.names[id(weight)]:
            total, count = self.sums.get((name, dim), (torch.zeros_like(rows[:, 0], dtype=torch.float64), 0))
            self.sums[name, dim] = total + rows.double().abs().sum(1), count + rows.shape[1]

    def means(self) -> dict[tuple[str, int], Tensor]:
        return {place: (total / max(count, 1)).cpu() for place, (total, count) in self.sums.items()}


_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
# (where the input is among the arguments, the weight's dimension that reads, the input's dimension; None: the last)
_READERS: Mapping[Callable[..., Any], tuple[int, int, int | None]] = {
    F.linear: (0, 1, None),
    torch.addmm: (1, 0, None),  # the Conv1D of transformers
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), (0, 1, 1)),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), (0, 0, 1)),
}
