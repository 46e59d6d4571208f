"""An example of what a loop calls its model with: the units of a network are found by running it.

It is given by the script (`example_inputs=`), or it is what the loop calls its model with in the first forward pass of
training. A resumed script needs it before its first pass, so it is kept in the folder of the run, as `example.pt`. Of a
batch two rows are kept if the network can be traced with them.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rewound.foundations.errors import InputError, check_kind, shown
from rewound.method.structure.examples import as_arguments

_ROWS = 2


class Example(NamedTuple):
    """What a model is called with: positional arguments and keywords."""

    inputs: tuple[Any, ...]
    keywords: dict[str, Any]

    def on(self, device: torch.device) -> "Example":
        """The same on another device."""
        return Example(*(_mapped((self.inputs, self.keywords), lambda tensor: tensor.to(device))))

    @property
    def rows(self) -> int | None:
        """How many rows the batch has: the first dimension of all its tensors; None where they differ in it."""
        sizes = {tensor.shape[0] if tensor.ndim else None for tensor in _tensors((self.inputs, self.keywords))}
        return next(iter(sizes)) if len(sizes) == 1 else None

    @property
    def short(self) -> "Example":
        """The first rows of the batch, where its tensors have as many."""
        if self.rows is None or self.rows <= _ROWS:
            return self
        return Example(*(_mapped((self.inputs, self.keywords), lambda tensor: tensor[:_ROWS].clone())))


def given_example(inputs: object, keywords: object) -> Example | None:
    """The example that a script gives, if it gives one."""
    if inputs is None and keywords is None:
        return None
    keywords = {} if keywords is None else keywords
    check_kind("example_keywords", keywords, Mapping, "give the keywords of the model's call as a dict")
    assert isinstance(keywords, Mapping)  # as checked just above
    return _plain(as_arguments(inputs), keywords)


def read_example(content: object) -> Example:
    """The example in a file, which anybody may have written."""
    match content:
        case {"inputs": list(inputs), "keywords": dict(keywords)} if all(isinstance(name, str) for name in keywords):
            return _plain(inputs, keywords)
    raise InputError("it holds no inputs of a model")


def _plain(inputs: Any, keywords: Mapping[str, Any]) -> Example:
    """The example as plain data, with copies of its tensors on the CPU."""
    return Example(*_mapped((tuple(inputs), dict(keywords)), lambda tensor: tensor.detach().cpu().clone()))


def _mapped(value: Any, function: Any) -> Any:
    """The same value with its tensors replaced; an error for what is no plain data."""
    if isinstance(value, Tensor):
        return function(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {name: _mapped(each, function) for name, each in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_mapped(each, function) for each in value)
    raise InputError(
        f"the model is called with {shown(value)}, which cannot be kept for finding its units; give example_inputs= of "
        "tensors, numbers, texts and containers of them"
    )


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(value, found.append)
    return found


class FirstCall:
    """Notes what the loop calls a model with in its next forward pass, in training if there is one."""

    def __init__(self, model: nn.Module, until: ExitStack) -> None:
        self.example: Example | None = None
        self._model, self._hook = model, model.register_forward_pre_hook(self._note, with_kwargs=True)
        until.callback(self._hook.remove)

    def __deepcopy__(self, memo: object) -> "FirstCall":
        return self  # a copy of the model has this hook, too

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is self._model and (module.training or self.example is None):
            self.example = _plain(args, kwargs)
            if module.training:
                self.close()

    def close(self) -> None:
        """Note nothing more."""
        self._hook.remove()
