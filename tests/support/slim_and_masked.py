"""Law 8 for one network: the slim network does what the masked one does, and the largest difference between them."""

import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from architectures import Case
from rewound.foundations.copying import copied
from rewound.method.structure.groups import Unit, Units
from rewound.method.structure.slimming import slim
from rewound.method.structure.tracing import units

BOUND = 1e-10  # in float64: ten steps on numbers around 1


@dataclass(frozen=True)
class Compared:
    """What was compared: what `make test-long` prints of an architecture."""

    groups: int
    units: int
    removed: int
    pinned: int
    seconds: float
    difference: float


def compared(case: Case) -> Compared:
    """Remove an uneven part of a network's groups, and compare outputs, gradients and ten steps of two optimizers."""
    start, (model, args, kwargs) = time.perf_counter(), case
    model = drawn(model)
    args = tuple(map(in_float64, args))
    kwargs = {key: in_float64(each) for key, each in kwargs.items()}
    found = units(model, args, kwargs)
    gone = uneven(found)
    mask = found.mask_without(gone)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    masked = copied(model)
    mask.apply(masked)
    dense = outputs(copied(model).eval(), args, kwargs)
    assert any(
        (one - other).abs().max() > 1e-6 for one, other in zip(outputs(masked.eval(), args, kwargs), dense, strict=True)
    ), "the mask is seen in the output"
    differences = [0.0]
    # What is shifted before a normalisation has a gradient of zero, but for rounding, which AdamW divides by its own
    # size: a larger eps keeps it small. A small rate keeps the steps from magnifying it.
    for kind, options in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {"eps": 1e-3})):
        large = copied(masked).train()
        optimizer = kind(large.parameters(), lr=1e-4, weight_decay=0.01, **options)
        with mask.attached(large, optimizer):
            trained([(large, optimizer)], 2, args, kwargs)
            small = slim(large, mask, args, kwargs)
            assert numel(small.model) < numel(model)
            both = [outputs(each.eval(), args, kwargs) for each in (large, small.model)]
            differences += [difference(one, other) for one, other in zip(*both, strict=True)]
            both = [(large.train(), optimizer), (small.model.train(), small.optimizer(optimizer))]
            for steps in (1, 9):
                trained(both, steps, args, kwargs)
                gradients = small.state({key: p.grad for key, p in large.named_parameters() if p.grad is not None})
                state = small.state(large.state_dict())
                for name, parameter in small.model.named_parameters():
                    if parameter.grad is not None:
                        differences.append(difference(parameter.grad, gradients[name]))
                for name, tensor in small.model.state_dict().items():
                    differences.append(difference(tensor, state[name]))
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items()), "the given one stays"
    total = sum(map(len, found))
    return Compared(len(found), total, len(gone), len(found.pinned), time.perf_counter() - start, max(differences))


def own_movement(case: Case) -> float:
    """How far gradients of the masked network move over ten steps if the last digits of its weights change.

    Where training magnifies rounding, a slim network can be no closer.
    """
    model, args, kwargs = case
    model = drawn(model)
    args = tuple(map(in_float64, args))
    kwargs = {key: in_float64(each) for key, each in kwargs.items()}
    mask = (found := units(model, args, kwargs)).mask_without(uneven(found))
    mask.apply(model)
    other, generator = copied(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 1e-15 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    both = [(each.train(), torch.optim.SGD(each.parameters(), lr=1e-4, momentum=0.9)) for each in (model, other)]
    with mask.attached(*both[0]), mask.attached(*both[1]):
        trained(both, 12, args, kwargs)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(difference(one.grad, same.grad) for one, same in pairs if one.grad is not None and same.grad is not None)


def drawn(model: nn.Module) -> nn.Module:
    """The model in float64, with other weights and statistics than those that it was made with; dropout is off.

    Values stay around 1 through many layers. A batch of two may have almost no variance; a larger eps keeps
    normalisation from magnifying the last digits.
    """
    generator = torch.Generator().manual_seed(7)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            spread = (3 * tensor.shape[0] / tensor.numel()) ** 0.5 if tensor.ndim > 1 and tensor.numel() else 0.3
            tensor.copy_((torch.rand(tensor.shape, generator=generator) * 2 - 1) * spread)
            if tensor.ndim == 1 and name.endswith(("weight", "running_var")):
                tensor.add_(1)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eps = 0.1
        for name in ("p", "drop_prob", "dropout", "attention_dropout", "activation_dropout", "layerdrop", "drop_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.double()


def uneven(found: Units) -> list[Unit]:
    """Another part of each group: a rule that is wrong about a place shows."""
    draws = random.Random(3)
    gone: list[Unit] = []
    for group in found:
        gone += draws.sample(group.units, draws.randint(1, len(group) - 1)) if len(group) > 1 else []
    return gone


def in_float64(thing: Any) -> Any:
    return thing.double() if isinstance(thing, Tensor) and thing.is_floating_point() else thing


def outputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a network gives, those in records and tuples included."""

    def tensors(thing: Any) -> list[Tensor]:
        if isinstance(thing, Tensor):
            return [thing]
        parts = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else ()
        return [tensor for part in parts for tensor in tensors(part)]

    torch.manual_seed(0)  # one that draws, draws the same each time
    np.random.seed(0)  # noqa: NPY002  # with which speech networks hide a part of their input
    return tensors(model(*args, **kwargs))


def trained(several: list[tuple[nn.Module, Any]], steps: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for _ in range(steps):
        for model, optimizer in several:
            optimizer.zero_grad()
            given = [each for each in outputs(model, args, kwargs) if each.requires_grad]
            torch.stack([each.square().mean() for each in given]).sum().backward()
            optimizer.step()


def difference(one: Tensor, other: Tensor) -> float:
    """The largest, beside the size of the numbers where that is above 1."""
    assert one.shape == other.shape
    if not one.numel():
        return 0.0
    one, other = one.detach().double(), other.detach().double()
    found = (one - other).abs().max() / max(1.0, float(other.abs().max()))
    assert found.isfinite()
    return float(found)


def numel(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
