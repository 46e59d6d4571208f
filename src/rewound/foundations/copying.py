"""Copies of models that have run."""

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rewound.foundations.errors import InputError, first_line
from rewound.foundations.intercepting import Intercepting

T = TypeVar("T")


def copied(thing: T, instead: Iterable[tuple[object, object]] = ()) -> T:
    """A deep copy of a model, or of what holds one; `instead` are parts of it, each with what takes its place.

    A module may keep a tensor of its last pass (features for a plot, the weight that spectral_norm computes). Torch
    copies none that has a graph, and no attribute that was set on a parameter; here values are copied, and attributes.

    >>> layer = torch.nn.Linear(2, 2)
    >>> layer.features = layer(torch.ones(1, 2))
    >>> copied(layer).features.grad_fn is None
    True
    """
    memo = {id(part): other for part, other in instead}
    try:
        with Intercepting(_values_only):
            made = copy.deepcopy(thing, memo)
            if isinstance(thing, nn.Module) and isinstance(made, nn.Module):
                for old, new in zip(thing.parameters(), made.parameters(), strict=True):
                    if new is not old:
                        vars(new).update(copy.deepcopy(vars(old), memo))
            return made
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # for locks, open files, queues, ... or by somebody's own __deepcopy__
        raise InputError(
            f"a copy of the {type(thing).__name__} is needed and cannot be made ({first_line(error)}); keep such "
            "objects outside of it, or leave them out of what its __getstate__ gives"
        ) from error


def _values_only(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies a tensor that was computed as its values, without the graph."""
    if func is Tensor.__deepcopy__ and not args[0].is_leaf:
        tensor, memo = args
        return memo.setdefault(id(tensor), tensor.detach().clone())
    return func(*args, **kwargs)


def weights_used(model: nn.Module, run: Callable[[], object]) -> list[str]:
    """The names of a model's parameters that are computed with while something runs.

    A copy uses its own, unless the code reaches its layers by a function that keeps them, which is not copied.

    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> model[1].forward = lambda x: x @ model[0].weight
    >>> other = copied(model)
    >>> weights_used(model, lambda: other(torch.ones(1, 2)))
    ['0.weight']
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, None] = {}

    def noting(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found.update((names[id(each)], None) for each in tree_leaves((args, kwargs)) if id(each) in names)
        return func(*args, **kwargs)

    with Intercepting(noting):
        run()
    return list(found)
