"""Copies of a network that can be run: what its code does to them, it does not do to the network."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import nn

from rewound.foundations.copying import copied, weights_used
from rewound.foundations.errors import InputError


def runnable_copy(model: nn.Module) -> nn.Module:
    """A copy of a network, to be run."""
    made = copied(model)
    flatten_recurrent(made)
    return made


def sharing_copy(model: nn.Module) -> nn.Module:
    """The same, which shares with the network what cannot be copied, such as locks and open files."""
    made = _copied_but_for(model, [])
    flatten_recurrent(made)
    return made


def to_run(model: nn.Module) -> nn.Module:
    """A copy with the same weights, for one run: what the code keeps of it is not there in the next."""
    return _copied_but_for(model, list(model.parameters()))


def _copied_but_for(model: nn.Module, shared: list[nn.Parameter]) -> nn.Module:
    """A copy that shares some parameters, and what cannot be copied."""
    try:
        return copied(model, zip(shared, shared, strict=True))
    except InputError:
        things = [thing for module in model.modules() for name, thing in vars(module).items() if name not in _OF_TORCH]
        together = [*shared, *(thing for thing in things if not _can_be_copied(thing))]
        return copied(model, zip(together, together, strict=True))


_OF_TORCH = vars(nn.Module())


def _can_be_copied(thing: object) -> bool:
    try:
        copied(thing)
    except InputError:
        return False
    return True


def apart(model: nn.Module, run: Callable[[nn.Module], object]) -> nn.Module:
    """A copy in evaluation mode, which may change as it runs; the network itself if that does not run by itself.

    Another copy runs before: tables that functions keep shall hold numbers, which they would not after a trace.
    """
    with suppress(Exception), torch.no_grad(), warnings.catch_warnings():  # whatever the model's own code raises
        warnings.simplefilter("ignore")
        made = evaluating(sharing_copy(model))
        tried = to_run(made)
        if not weights_used(model, lambda: run(tried)):
            return made
    return model


def copy_in_float64(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have double precision."""
    weights = [each for each in model.parameters() if type(each) is nn.Parameter and each.is_floating_point()]
    # Weights are converted as they are copied: one copy of a large network less.
    converted = (nn.Parameter(each.detach().to(torch.float64, copy=True), each.requires_grad) for each in weights)
    return copied(model, zip(weights, converted, strict=True)).double()


def flatten_recurrent(model: nn.Module) -> None:
    """Put the weights of each recurrent layer into one piece of memory, which cuDNN would else do at every call.

    They are in several pieces after a change of their shapes, and in every copy.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def evaluating(model: nn.Module) -> nn.Module:
    """The model, in evaluation mode from now on; the `eval` of somebody's own class may return nothing."""
    model.eval()
    return model


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode; afterwards each module is in the mode that it was in.

    By its own `train`, as that may do more than say the mode: layers that merge weights for evaluation part them again.
    """
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in before.items():  # parents first, which set the mode of their parts
            if module.training != mode:
                module.train(mode)
