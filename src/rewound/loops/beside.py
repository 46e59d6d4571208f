"""Weights that a loop trains beside its model: a GAN's critic, a head, a loss with parameters of its own.

A run saves, restores and rewinds the model and what is in `also`. What an optimizer trains elsewhere would begin anew
when the run is resumed, under the old state of its optimizer, so it is refused. A module in `also` that is trained is
no average of the model, and is never pruned, even if it has the same layers.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import InputError
from rewound.foundations.quantities import counted
from rewound.loops.snapshot import Stateful, Subjects

Tensors = Mapping[int, Tensor]  # by identity


def check_beside(subjects: Subjects) -> None:
    """An error for what `also` cannot rewind, and for weights that nobody would save."""
    for thing in subjects.also:
        if isinstance(thing, Optimizer | LRScheduler):
            raise InputError(
                f"the learning rates of {type(thing).__name__} in also would not be rewound; give it in the lists of "
                "optimizers and schedulers"
            )
    trained = _trained_beside(subjects)
    if lost := len(trained.keys() - {key for thing in subjects.also for key in _held(thing, trained)}):
        raise InputError(
            f"the optimizer trains {counted(lost, 'tensor')} outside the model, which would be neither saved "
            "nor rewound; put all into one module and give that, or give the other module in also=[...]"
        )


def averages(subjects: Subjects) -> list[Stateful]:
    """What of `also` may hold averages of the model's weights, since it is not trained itself."""
    trained = _trained_beside(subjects)
    return [thing for thing in subjects.also if not _held(thing, trained)]


def _trained_beside(subjects: Subjects) -> Tensors:
    trained = {id(tensor): tensor for group in subjects.optimizer.param_groups for tensor in group["params"]}
    within = _held(subjects.model, trained)
    return {key: tensor for key, tensor in trained.items() if key not in within}


def _held(thing: Stateful, tensors: Tensors) -> set[int]:
    """Which of the tensors are part of a thing; copies in its state are not."""
    if isinstance(thing, nn.Module):
        return tensors.keys() & {id(tensor) for tensor in (*thing.parameters(), *thing.buffers())}
    if not tensors:
        return set()
    given = [value for value in thing.state_dict().values() if isinstance(value, Tensor)]
    return {key for key, tensor in tensors.items() if any(_is_same(tensor, value) for value in given)}


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Whether they are one memory: a state may give a tensor as it is, or detached."""
    if tensor is other:
        return True
    strided = tensor.layout == other.layout == torch.strided
    alike = (tensor.device, tensor.dtype, tensor.shape) == (other.device, other.dtype, other.shape)
    return strided and alike and tensor.data_ptr() == other.data_ptr()
