"""What a captured step does with the gradients: mask them (law 3), clip them, move the weights.

There are two ways, chosen by the recipe's optimizer and proven equal to it by tests:

    FlatMomentum     SGD on one flat buffer of all weights, of which the parameters are views: one kernel
    TorchOptimizer   any of torch's optimizers that can be captured, on the parameters where they are
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from rewound.method.pruning.attachment import may_divide_by_zero
from rewound.method.pruning.mask import Mask

Gradients = Sequence[Tensor | None]

_ALIGN = 4  # floats, 16 bytes: inductor copies an input that is aligned less
_MOMENTUM = "momentum_buffer"  # torch.optim.SGD's name for it
_CAPTURABLE: Final = (SGD, Adadelta, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop)  # each element by itself (law 3)
_FIRST: Final[Mapping[str, float]] = {"mu_product": 1.0}
"""What a slot holds before the first step, where that is not 0."""


class Update(Protocol):
    """What moves the weights of one run at a time, in device memory alone."""

    def load(self, slots: Mapping[str, Tensor], mask: Mask | None) -> None:
        """Take over the optimizer's slots, by name, and the mask."""

    def clipped(self, gradients: Gradients) -> Gradients:
        """The gradients of one batch, clipped if each batch is clipped by itself."""

    def apply(self, gradients: Gradients, lr: Tensor) -> None:
        """Do what the optimizer does with these gradients at this learning rate."""

    def slots(self) -> dict[str, Tensor]:
        """The optimizer's slots as they are now, by name."""


def captures(optimizer: Optimizer) -> bool:
    """Whether a step of the optimizer can be captured: nothing in it depends on what the host knows."""
    groups = optimizer.param_groups
    parameters = {parameter for group in groups for parameter in group["params"]}
    return (
        type(optimizer) in _CAPTURABLE
        and not any(group.get("dampening") for group in groups)  # the first step is another one
        and not any(group.get("differentiable") for group in groups)
        and all(parameter.is_floating_point() for parameter in parameters)
        and not may_divide_by_zero(optimizer, parameters)  # `attached` masks after such a step
    )


def is_flat(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether the optimizer is what `FlatMomentum` does, for a model whose weights may be moved."""
    parameters = list(model.parameters())
    (group, *others) = groups = optimizer.param_groups
    own = {"params", "weight_decay"}
    return (
        type(optimizer) is SGD
        and not any(other[option] != group[option] for other in others for option in group.keys() - own)
        and sum(len(each["params"]) for each in groups) == len(parameters)
        and {id(parameter) for each in groups for parameter in each["params"]} == {id(each) for each in parameters}
        and not group["dampening"]
        and not group["maximize"]
        and {parameter.dtype for parameter in parameters} in ({torch.float32}, {torch.float64})
        and all(parameter.requires_grad for parameter in parameters)
        # cuDNN wants the weights of an LSTM in one piece of its own, and copies them at every call otherwise.
        and not any(isinstance(module, nn.RNNBase) for module in model.modules())
    )


class Span(NamedTuple):
    """Where a parameter lies in the flat buffers; `order` sorts its dimensions by their strides."""

    name: str
    shape: torch.Size
    order: tuple[int, ...]
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        stored = [self.shape[dim] for dim in self.order]
        return flat[self.offset : self.offset + math.prod(stored)].view(stored).permute(_inverse(self.order))


def _inverse(order: tuple[int, ...]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


class Momentum:
    """SGD as a function of flat tensors, compiled once for all runs of a recipe.

    g = clipped(m (.) dL/dW) + decay W;  v = momentum v + g;  W -= lr v

    Weights may have different decays, which are then a flat tensor, too.
    """

    def __init__(
        self, sgd: Optimizer, model: nn.Module, clip_norm: float, compiled: Callable[..., Callable[..., None]]
    ) -> None:
        group = sgd.param_groups[0]
        self.momentum, self.nesterov, self.clip_norm = float(group["momentum"]), bool(group["nesterov"]), clip_norm
        self.spans: list[Span] = []
        self.size = 0
        for name, parameter in model.named_parameters():
            order = tuple(sorted(range(parameter.ndim), key=lambda dim, p=parameter: -p.stride(dim)))  # type: ignore[misc]
            self.spans.append(Span(name, parameter.shape, order, self.size))
            self.size += -(-parameter.numel() // _ALIGN) * _ALIGN
        first = next(model.parameters())
        self.padding = torch.zeros(_ALIGN, dtype=first.dtype, device=first.device)
        self.decay = self._decays(sgd, model)
        self.update = compiled(self._update)

    def _decays(self, sgd: Optimizer, model: nn.Module) -> float | Tensor:
        decays = {
            parameter: float(group["weight_decay"]) for group in sgd.param_groups for parameter in group["params"]
        }
        if len(set(decays.values())) == 1:
            return next(iter(decays.values()))
        parameters, flat = dict(model.named_parameters()), self.padding.new_zeros(self.size)
        for span in self.spans:
            span.of(flat).fill_(decays[parameters[span.name]])
        return flat

    def pieces(self, gradients: Gradients) -> list[Tensor]:
        """The gradients as pieces of a flat buffer, in the order of the weights in memory, whatever their own is."""
        pieces = []
        for span, gradient in zip(self.spans, gradients, strict=True):
            assert gradient is not None  # every weight is reached
            pieces.append(gradient.permute(span.order).reshape(-1))
            if rest := -gradient.numel() % _ALIGN:
                pieces.append(self.padding[:rest])
        return pieces

    def _update(self, weights: Tensor, momenta: Tensor, mask: Tensor, gradient: Tensor, lr: Tensor) -> None:
        # The mask first: decay of a weight that is zero is zero, so weight and momentum stay so (law 3). Filled, not
        # multiplied: an infinite gradient of a pruned weight is nobody's.
        gradient = torch.where(mask, gradient, 0.0)
        if math.isfinite(self.clip_norm):  # as torch.nn.utils.clip_grad_norm_ has it
            gradient = gradient * (self.clip_norm / (gradient.norm() + 1e-6)).clamp(max=1.0)
        gradient = gradient + self.decay * weights
        momenta.mul_(self.momentum).add_(gradient)  # from zero this is the gradient, as SGD's first step has it
        weights.sub_(lr * (gradient + self.momentum * momenta if self.nesterov else momenta))


class FlatMomentum:
    """SGD on one flat buffer: an `Update`."""

    def __init__(self, model: nn.Module, momentum: Momentum) -> None:
        self.momentum, like = momentum, momentum.padding
        self.weights, self.momenta, self.gradient = (like.new_zeros(momentum.size) for _ in range(3))
        self.mask = torch.ones(momentum.size, dtype=torch.bool, device=like.device)
        parameters = dict(model.named_parameters())
        for span in momentum.spans:
            view = span.of(self.weights)
            view.copy_(parameters[span.name].detach())
            parameters[span.name].data = view

    def load(self, slots: Mapping[str, Tensor], mask: Mask | None) -> None:
        self.momenta.zero_()
        self.mask.fill_(True)
        for span in self.momentum.spans:
            if (slot := slots.get(f"{_MOMENTUM}/{span.name}")) is not None:
                span.of(self.momenta).copy_(slot)
            if mask is not None and span.name in mask:
                span.of(self.mask).copy_(mask[span.name])
        self.momenta.masked_fill_(~self.mask, 0)

    def clipped(self, gradients: Gradients) -> Gradients:
        return gradients

    def apply(self, gradients: Gradients, lr: Tensor) -> None:
        torch.cat(self.momentum.pieces(gradients), out=self.gradient)
        self.momentum.update(self.weights, self.momenta, self.mask, self.gradient, lr)

    def slots(self) -> dict[str, Tensor]:
        if not self.momentum.momentum:
            return {}
        return {f"{_MOMENTUM}/{span.name}": span.of(self.momenta) for span in self.momentum.spans}


class TorchOptimizer:
    """One of torch's optimizers with everything it reads in device memory: an `Update`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        factors: Sequence[float],
        clip_norm: float,
        clip_batch: float = math.inf,
        reached: Collection[str],
    ) -> None:
        self.optimizer, self.factors, self.clip_norm, self.clip_batch = optimizer, factors, clip_norm, clip_batch
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        # Of every parameter: a mask of units has biases and normalisation, too.
        self.masks = {name: torch.ones_like(p, dtype=torch.bool) for p, name in self.names.items()}
        self.trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        device = self.trained[0].device
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros((), device=device)
            if "capturable" in group:
                group["capturable"] = device.type == "cuda"  # torch refuses it elsewhere,
                group["foreach"] = group["foreach"] and group["capturable"]  # and without it a rate in memory
            if type(optimizer) in (SGD, Adam, AdamW) and not group["foreach"]:
                group["fused"] = True  # one kernel, and the only one of SGD's that takes a rate in device memory
        for parameter, name in self.names.items():
            parameter.grad = torch.zeros_like(parameter) if name in reached else None
        optimizer.step()  # at a rate of 0: makes the slots, whose places in memory are captured

    def load(self, slots: Mapping[str, Tensor], mask: Mask | None) -> None:
        for name, own in self.masks.items():
            own.fill_(True) if mask is None or name not in mask else own.copy_(mask[name])
        for parameter, state in self.optimizer.state.items():
            name = self.names[parameter]
            for slot, value in state.items():
                if not isinstance(value, Tensor):
                    continue
                given = slots.get(f"{slot}/{name}")
                value.fill_(_FIRST.get(slot, 0.0)) if given is None else value.copy_(given)
                if value.shape == parameter.shape:
                    value.masked_fill_(~self.masks[name], 0)

    def clipped(self, gradients: Gradients) -> Gradients:
        if not math.isfinite(self.clip_batch):
            return gradients
        self._set(gradients)
        nn.utils.clip_grad_norm_(self.trained, self.clip_batch)
        return [parameter.grad for parameter in self.names]

    def _set(self, gradients: Gradients) -> None:
        for (parameter, name), gradient in zip(self.names.items(), gradients, strict=True):
            if gradient is not None:
                gradient = torch.where(self.masks[name], gradient, 0.0)
            parameter.grad = gradient

    def apply(self, gradients: Gradients, lr: Tensor) -> None:
        self._set(gradients)
        if math.isfinite(self.clip_norm):
            nn.utils.clip_grad_norm_(self.trained, self.clip_norm)
        for group, factor in zip(self.optimizer.param_groups, self.factors, strict=True):
            torch.mul(lr, factor, out=group["lr"])  # law 9
        self.optimizer.step()

    def slots(self) -> dict[str, Tensor]:
        return {
            f"{slot}/{self.names[parameter]}": value
            for parameter, state in self.optimizer.state.items()
            for slot, value in state.items()
            if isinstance(value, Tensor)
        }
