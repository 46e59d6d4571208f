"""Whether a small network equals the masked one, as seen by running both on an example.

The example and the weights may hide a difference: where all tokens are the same, or a branch ends with a layer of
zeros, attention gives the same with any number of heads. So both are also run with other weights, drawn around those
that they have, and on an example in which elements differ.
"""

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from rewound.foundations.errors import first_line
from rewound.foundations.intercepting import Intercepting
from rewound.method.copies import copy_in_float64, evaluating, runnable_copy, to_run
from rewound.method.structure.examples import Call, numbers, telling, tensors_in, varying
from rewound.method.structure.kept import KeptIndices, cut, zero_gone

_TIMES = 10  # the rounding that was seen
_ROUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}
"""How far apart the outputs of a network may be that computes in these types."""
_LEAST = 1e-6  # numbers below it are compared as if they were as large
_VARIES = 1e-4  # what is more is not the order in which a GPU adds up


@dataclass(frozen=True)
class Trial:
    """A masked and a small network in evaluation mode, and what the masked one puts out on some examples."""

    masked: nn.Module
    small: nn.Module
    examples: Sequence[Call]
    expected: Sequence[list[Tensor]]
    tolerance: float
    _known: dict[int, float] = field(default_factory=dict, init=False)
    """What `_rounding` found, by the place of the example."""

    def difference(self) -> str:
        """What is wrong with the small network, in words; nothing if it equals the masked one."""
        for place, (example, expected) in enumerate(zip(self.examples, self.expected, strict=True)):
            small = to_run(self.small)
            try:
                given = tensors_in(example.run(small))
            except Exception as error:  # whatever a module's own code raises where a count is wrong
                return told(error, small)
            if (off := distance(given, expected)) > self.tolerance and off > self._rounding(place):
                return "its outputs differ"
        return ""

    @property
    def varies(self) -> bool:
        """Whether the masked network does not put out the same twice, however it draws."""
        again = (example.outputs(self.masked) for example in self.examples)
        return any(distance(*pair) > _VARIES for pair in zip(again, self.expected, strict=True))

    def _rounding(self, place: int) -> float:
        """How much outputs on an example may differ by rounding, where the network's code makes much of it."""
        if place not in self._known:
            example, expected = self.examples[place], self.expected[place]
            self._known[place] = rounding(self.masked, lambda: example.outputs(self.masked), expected)
        return self._known[place]


def told(error: Exception, model: nn.Module) -> str:
    """What an error says, and the innermost module whose code raised it; of torch's own, what calls them."""
    names, place = {id(module): name for name, module in model.named_modules()}, ""
    for frame, _ in walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if id(module) in names and not type(module).__module__.startswith("torch."):
            place = f" in {names[id(module)] or 'the network'} of the class {type(module).__name__}"
    return f"{type(error).__name__}{place}: {first_line(error)}"


def distance(given: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, beside the size of the numbers of a tensor; infinite between other shapes.

    Small numbers beside large ones (gradients that are zero but for rounding) count as a thousandth of these.
    """
    if [each.shape for each in given] != [each.shape for each in expected]:
        return torch.inf
    sizes = [_size(each) for each in expected]
    least = max(_LEAST, min(1.0, max(sizes, default=0.0)) / 1000)
    pairs = zip(given, expected, sizes, strict=True)
    return max((_difference(one, other) / max(least, size) for one, other, size in pairs), default=0.0)


def _size(tensor: Tensor) -> float:
    """The largest absolute value that is finite."""
    largest = largest_of(tensor)
    return largest if math.isfinite(largest) else largest_of(tensor.nan_to_num(0, 0, 0))


def _difference(one: Tensor, other: Tensor) -> float:
    one, other = (each if each.is_complex() else each.double() for each in (one, other))
    off = largest_of(one - other)
    if math.isfinite(off):
        return off
    same = (one == other) | (one.isnan() & other.isnan())  # infinite ones included
    return largest_of((one - other).abs().masked_fill(same, 0).nan_to_num(sys.float_info.max, sys.float_info.max))


def largest_of(tensor: Tensor) -> float:
    """The largest absolute value; not finite if one of them is not. It needs no memory."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        tensor = tensor.double()
    return float(torch.linalg.vector_norm(tensor, torch.inf)) if tensor.numel() else 0.0


def rounding(model: nn.Module, again: Callable[[], list[Tensor]], expected: Sequence[Tensor]) -> float:
    """How far apart two ways to compute what a model is expected to give may be, by rounding alone.

    More than the last digits where its code computes in a shorter type than its weights have, or makes much of those
    digits, as BatchNorm does with two like examples: then, several times what other last digits of the weights make.
    Nothing where it does not give the same twice.
    """
    types = {torch.float64}

    def noting(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func is not Tensor.__deepcopy__:
            types.update(each.dtype for each in tree_leaves(result) if isinstance(each, Tensor))
        return result

    with Intercepting(noting):
        if distance(again(), expected) > _VARIES:
            return 0.0
    given, found = [parameter.detach().clone() for parameter in model.parameters()], 0.0
    try:
        for seed in range(5):
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    draws = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed)).to(parameter)
                    parameter.mul_(1 + 100 * torch.finfo(parameter.dtype).eps * draws)
            found = max(found, distance(again(), expected))
    finally:
        for parameter, before in zip(model.parameters(), given, strict=True):
            parameter.copy_(before)
    return max(_TIMES * found, *(_ROUNDS.get(kind, 0.0) for kind in types))


def trials(masked: nn.Module, small: nn.Module, kept: KeptIndices, given: Call) -> list[Trial]:
    """With the weights and the type that the networks have, then a closer one, on more examples.

    This is in float64 and with other weights, as far as the masked network puts out numbers then: its code may make
    tensors of another type. All examples run in its own type first: a table that the code keeps for later calls is made
    then.
    """
    large, less = evaluating(to_run(masked)), evaluating(to_run(small))
    examples = [given, *telling(large, given)]
    own = trial_of(large, less, examples, _ROUNDS[torch.float32], only_numbers=True)
    examples += varying(large, given)
    for with_draws, doubled in itertools.product((True, False), (True, False)):
        copy = copy_in_float64 if doubled else runnable_copy
        pair = evaluating(copy(masked)), evaluating(copy(small))
        if with_draws:
            draw_weights(*pair, kept)
        calls = [tree_map_only(Tensor, _doubled, each) for each in examples] if doubled else examples
        tolerance = 1e-9 if doubled else _ROUNDS[torch.float32]
        trial = trial_of(*pair, calls, tolerance, only_numbers=True)
        if trial.examples:
            return [each for each in (own, trial) if each.examples]
    return [trial_of(large, less, [given], _ROUNDS[torch.float32])]


def trial_of(
    masked: nn.Module, small: nn.Module, examples: Sequence[Call], tolerance: float, *, only_numbers: bool = False
) -> Trial:
    """On those of some examples on which the masked network puts out numbers, or on all."""
    outputs = [numbers(masked, each) if only_numbers else each.outputs(masked) for each in examples]
    expected = {place: found for place, found in enumerate(outputs) if found is not None}
    return Trial(masked, small, [examples[place] for place in expected], [*expected.values()], tolerance)


def draw_weights(masked: nn.Module, small: nn.Module, kept: KeptIndices, seed: int = 0) -> None:
    """Add draws to the weights, so large that no branch is silent; the same to those of both networks."""
    generator = torch.Generator().manual_seed(seed)
    smaller = dict(small.named_parameters())
    for name, parameter in masked.named_parameters():
        if not parameter.is_floating_point():
            continue
        inputs = parameter.numel() // parameter.shape[0] if parameter.ndim > 1 and parameter.numel() else 32
        spread = (3 / inputs) ** 0.5
        draws = torch.empty(parameter.shape).uniform_(-spread, spread, generator=generator)
        parameter.add_(draws.to(parameter.device))
        zero_gone(parameter, kept.get(name, {}))
        smaller[name].copy_(cut(parameter.detach(), kept.get(name, {})))


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
