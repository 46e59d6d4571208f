"""What a script gives is often inside something else: the model, optimizer and scheduler themselves, and lists of them.

torch.compile and data parallelism wrap a model; Accelerate and Lightning wrap an optimizer, Accelerate a scheduler.
"""

from collections.abc import Sequence
from typing import TypeVar

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.optimizer import Optimizer

Thing = TypeVar("Thing")
_WRAPPING = frozenset({"accelerate", "lightning", "lightning_fabric", "pytorch_lightning"})


def bare_model(model: nn.Module) -> nn.Module:
    """The model that was compiled, or made data-parallel."""
    while True:
        if isinstance(within := getattr(model, "_orig_mod", None), nn.Module):
            model = within
        elif isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        else:
            return model


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile is around the model or a part of it."""
    parts = model.modules()
    return any(hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) for part in parts)


def bare_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that takes the steps.

    Another one that holds an optimizer, like Lookahead, takes steps of its own: it is used as it is.
    """
    while _delegates(optimizer) and isinstance(within := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = within
    return optimizer


def bare_scheduler(scheduler: Thing) -> Thing:
    """The scheduler that moves the learning rate."""
    within: Thing = getattr(scheduler, "scheduler", scheduler)
    return within


def listed(given: Thing | Sequence[Thing]) -> Sequence[Thing]:
    """One thing, or several; a name where a thing belongs is one wrong thing, not one for each letter."""
    return given if isinstance(given, Sequence) and not isinstance(given, str) else (given,)


def _delegates(optimizer: object) -> bool:
    libraries = {base.__module__.partition(".")[0] for base in type(optimizer).__mro__}
    return not libraries.isdisjoint(_WRAPPING)
