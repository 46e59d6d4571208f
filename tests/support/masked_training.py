"""Training under a mask: steps as loops take them, the product in the forward pass as reference, what is zero."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from rewound import Mask, Pruner
from small_networks import batches, network

MakeOptimizer = Callable[[Iterator[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(SGD, lr=0.1),
    "sgd-momentum-decay": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd-dampening": partial(SGD, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd-nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd-foreach": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "sgd-fused": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "adam": partial(Adam, lr=0.01),
    "adam-decay": partial(Adam, lr=0.01, weight_decay=0.01),
    "adam-amsgrad": partial(Adam, lr=0.01, amsgrad=True),
    "adam-foreach": partial(Adam, lr=0.01, weight_decay=0.01, foreach=True),
    "adam-fused": partial(Adam, lr=0.01, weight_decay=0.01, fused=True),
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.1),
    "adamw-fused": partial(AdamW, lr=0.01, weight_decay=0.1, fused=True),
    "rmsprop": partial(RMSprop, lr=0.01, momentum=0.9, weight_decay=0.01),
    "rmsprop-centered": partial(RMSprop, lr=0.01, centered=True),
    "adagrad": partial(Adagrad, lr=0.1, weight_decay=0.01, initial_accumulator_value=0.1),
    "adadelta": partial(Adadelta, weight_decay=0.01),
    "adamax": partial(Adamax, weight_decay=0.01),
    "nadam": partial(NAdam, weight_decay=0.01),
    "radam": partial(RAdam, weight_decay=0.01),
    "asgd": partial(ASGD, weight_decay=0.01),
    "rprop": Rprop,
}

LOOPS = ("plain", "clip-norm", "clip-value", "accumulate", "autocast", "scaler", "scaler-clip", "own-gradients")


class Centred(Optimizer):
    """Couples the elements of a tensor twice, as LARS (a norm over all of it) and gradient centralisation do."""

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.seen: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.seen += [p.detach().clone(), p.grad.clone()]
                    trust = p.norm() / (p.grad.norm() + 1e-3)
                    p.sub_(group["lr"] * trust * (p.grad - p.grad.mean()))


def update(forward: Callable[[Tensor], Tensor], model: nn.Module, optimizer: Optimizer, loop: str, step: int) -> None:
    """One optimizer step the way `loop` does it; `forward` is the model with or without the product."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=loop.startswith("scaler"))
    parameters = list(model.parameters())
    optimizer.zero_grad()
    for x, y in batches(12)[2 * step : 2 * step + (2 if loop == "accumulate" else 1)]:
        with torch.autocast("cpu", torch.bfloat16) if loop == "autocast" else nullcontext():
            loss = F.cross_entropy(forward(x), y)
        if loop == "own-gradients":
            for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = grad
        else:
            scaler.scale(loss).backward()
    if loop == "clip-norm":
        nn.utils.clip_grad_norm_(parameters, 0.1)
    if loop == "clip-value":
        nn.utils.clip_grad_value_(parameters, 0.01)
    if loop == "scaler-clip":
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 0.1)
    scaler.step(optimizer)
    scaler.update()


def step_after(model: nn.Module, optimizer: Optimizer) -> None:
    update(model, model, optimizer, "plain", 0)


def by_product(make: MakeOptimizer, loop: str, mask: Mask, model: nn.Module | None = None) -> nn.Module:
    """The reference: raw weights, multiplied by the mask wherever they are used."""
    model = model or network()
    optimizer = make(model.parameters())
    for step in range(2):
        update(model, model, optimizer, loop, step)

    def forward(x: Tensor) -> Tensor:
        weights = {n: p * mask[n] if n in mask else p for n, p in model.named_parameters()}
        return functional_call(model, weights, (x,))

    for step in range(2, 6):
        update(forward, model, optimizer, loop, step)
    for name, kept in mask.items():
        model.get_parameter(name).data.mul_(kept)
    return model


def half(model: nn.Module, density: float = 0.4) -> Mask:
    return Pruner()(model, density)


def pruned_values(model: nn.Module, mask: Mask) -> Tensor:
    return torch.cat([model.get_parameter(name)[~kept] for name, kept in mask.items()])


# Adamax and Rprop write a least value into these, whatever the gradient; their updates of a zero stay zero.
FLOORED = ("exp_inf", "step_size")


def pruned_slots(model: nn.Module, mask: Mask, optimizer: Optimizer) -> Tensor:
    slots = [
        slot[~kept]
        for name, kept in mask.items()
        for key, slot in optimizer.state[model.get_parameter(name)].items()
        if isinstance(slot, Tensor) and slot.shape == kept.shape and key not in FLOORED
    ]
    return torch.cat([torch.zeros(1), *slots])


def all_zero(values: Tensor) -> bool:
    return bool((values == 0).all())
