"""Copies of models that have run."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.overrides import TorchFunctionMode

T = TypeVar("T")


def copied(thing: T, instead: Iterable[tuple[object, object]] = ()) -> T:
    """A deep copy of a model, or of what holds one; `instead` are parts of it, each with what takes its place.

    A module may keep a tensor of its last pass (features for a plot, the weight that spectral_norm computes). Torch
    copies none that has a graph; here its values are copied.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 2)
    >>> layer.features = layer(torch.ones(1, 2))
    >>> copied(layer).features.grad_fn is None
    True
    """
    with _ValuesOnly():
        return copy.deepcopy(thing, {id(part): other for part, other in instead})


class _ValuesOnly(TorchFunctionMode):
    """Copies a tensor that was computed as its values, without the graph."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone())
        return func(*args, **(kwargs or {}))
