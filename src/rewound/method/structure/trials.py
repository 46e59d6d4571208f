"""Whether a small network equals the masked one, as seen by running both on an example.

The example and the weights may hide a difference: where all tokens are the same, or a branch ends with a layer of
zeros, attention gives the same with any number of heads. So both are also run with other weights, drawn around those
that they have, and on an example in which elements differ.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from rewound.foundations.copying import copied
from rewound.foundations.errors import InputError, shown
from rewound.foundations.randomness import own_draws
from rewound.method.pruning.mask import Mask
from rewound.method.structure.kept import KeptIndices, zero_gone

_LONGER = 3  # steps of a sequence, or rows, in place of one
_TIMES = 10  # the rounding that was seen
_ROUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}
"""How far apart the outputs of a network may be that computes in these types."""
_DRAWS = 4  # of weights, to see what an output depends on


class Call(NamedTuple):
    """What a network is called with."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def run(self, model: nn.Module, seed: int = 0) -> Any:
        """Call a network; one that draws, draws the same each time."""
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        with own_draws(device, seed):
            return model(*self.args, **self.keywords)

    def outputs(self, model: nn.Module, seed: int = 0) -> list[Tensor]:
        """The tensors that a network puts out; what its code keeps of the run goes with a copy."""
        return tensors_in(self.run(to_run(model), seed))


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
                reason = str(error).strip().partition("\n")[0]
                return f"{type(error).__name__}{_place(error, small)}: {reason}"
            if (off := distance(given, expected)) > self.tolerance and off > self._rounding(place):
                return "its outputs differ"
        return ""

    def _rounding(self, place: int) -> float:
        """How much outputs on an example may differ by rounding, where the network's code makes much of it."""
        if place not in self._known:
            example, expected = self.examples[place], self.expected[place]
            self._known[place] = rounding(self.masked, lambda: example.outputs(self.masked), expected)
        return self._known[place]


def _place(error: Exception, model: nn.Module) -> str:
    """The innermost module in whose code an error was raised, in words; torch's own are told by what calls them."""
    names, found = {id(module): name for name, module in model.named_modules()}, ""
    for frame, _ in walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if id(module) in names and not type(module).__module__.startswith("torch."):
            found = f" in {names[id(module)] or 'the network'} of the class {type(module).__name__}"
    return found


def distance(given: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, beside the size of the numbers where that is above 1; infinite between other shapes."""
    if [each.shape for each in given] != [each.shape for each in expected]:
        return torch.inf
    return max((_distance(*pair) for pair in zip(given, expected, strict=True)), default=0.0)


def _distance(one: Tensor, other: Tensor) -> float:
    if not other.numel():
        return 0.0
    one, other = (each if each.is_complex() else each.double() for each in (one, other))
    off, largest = largest_of(one - other), largest_of(other)
    if math.isfinite(off) and math.isfinite(largest):
        return off / max(1.0, largest)
    same = (one == other) | (one.isnan() & other.isnan())  # infinite ones included
    largest = largest_of(other.nan_to_num(0, 0, 0))
    off = largest_of((one - other).abs().masked_fill(same, 0).nan_to_num(sys.float_info.max, sys.float_info.max))
    return off / max(1.0, largest)


def largest_of(tensor: Tensor) -> float:
    """The largest absolute value of what has elements; not finite if one of them is not. It needs no memory."""
    return float(torch.linalg.vector_norm(tensor, torch.inf))


def rounding(model: nn.Module, again: Callable[[], list[Tensor]], expected: Sequence[Tensor]) -> float:
    """How far apart two ways to compute what a model is expected to give may be, by rounding alone.

    More than the last digits where its code computes in a shorter type than its weights have, or makes much of those
    digits, as BatchNorm does with two like examples: then, several times what other last digits of the weights make.
    """
    types = _Types()
    with types:
        again()
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
    return max(_TIMES * found, *(_ROUNDS.get(kind, 0.0) for kind in types.found))


class _Types(TorchFunctionMode):
    """Notes of which types the numbers are that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.found = {torch.float64}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not Tensor.__deepcopy__:
            self.found |= {each.dtype for each in tree_leaves(result) if isinstance(each, Tensor)}
        return result


def exact_trials(masked: nn.Module, small: nn.Module, kept: KeptIndices, given: Call) -> list[Trial]:
    """Trials in float64 or, where the network's own code makes tensors of another type, in the type that it has."""
    try:
        doubled = tree_map_only(Tensor, _doubled, given)
        return trials(copy_in_float64(masked).eval(), copy_in_float64(small).eval(), kept, doubled, 1e-9)
    except Exception:  # whatever its code raises for another type than its own
        tolerance = _ROUNDS[torch.float32]
        return trials(runnable_copy(masked).eval(), runnable_copy(small).eval(), kept, given, tolerance)


def trials(masked: nn.Module, small: nn.Module, kept: KeptIndices, given: Call, tolerance: float) -> list[Trial]:
    """With the weights that the networks have and, if the masked one runs with them, with others."""
    examples = [given, *_telling(masked, given)]
    first = Trial(masked, small, examples, [each.outputs(masked) for each in examples], tolerance)
    masked, small = runnable_copy(masked), runnable_copy(small)
    _draw_weights(masked, small, kept)
    expected = {place: found for place, each in enumerate(examples) if (found := _numbers(masked, each)) is not None}
    if not expected:
        return [first]
    return [first, Trial(masked, small, [examples[place] for place in expected], [*expected.values()], tolerance)]


def _draw_weights(masked: nn.Module, small: nn.Module, kept: KeptIndices, seed: int = 0) -> None:
    """Add draws to the weights, so large that no branch is silent; the same to those of both networks."""
    generator = torch.Generator().manual_seed(seed)
    smaller = dict(small.named_parameters())
    for name, parameter in masked.named_parameters():
        if not parameter.is_floating_point():
            continue
        inputs = parameter.numel() // parameter.shape[0] if parameter.ndim > 1 and parameter.numel() else 32
        spread = (3 / inputs) ** 0.5
        draws = (torch.rand(parameter.shape, generator=generator) * 2 - 1) * spread
        parameter.add_(draws.to(parameter))
        zero_gone(parameter, kept.get(name, {}))
        cut = parameter.detach()
        for dim, left in kept.get(name, {}).items():
            cut = cut.index_select(dim, left.to(cut.device))
        smaller[name].copy_(cut)


def _numbers(model: nn.Module, example: Call) -> list[Tensor] | None:
    """What a network puts out on an example; None where it does not run, or what comes out are not numbers."""
    try:
        found = example.outputs(model)
    except Exception:  # whatever its own code raises for inputs that it does not take
        return None
    return None if any(bool(each.isnan().any()) for each in found) else found


# Examples that show more


def _telling(model: nn.Module, given: Call) -> Iterator[Call]:
    """The example with other elements where all of a tensor are the same, and with several steps where it has one."""
    leaves, spec = tree_flatten(given)
    most = safe_ids(model)
    changed = False
    for place, leaf in enumerate(leaves):
        if _says_nothing(leaf) and (other := _varied(leaf, most)) is not None:
            tried = [*leaves[:place], other, *leaves[place + 1 :]]
            if _numbers(model, tree_unflatten(tried, spec)) is not None:
                leaves, changed = tried, True
    if changed:
        yield tree_unflatten(leaves, spec)
    longer = tree_unflatten([lengthened(leaf, most) if _is_one_step(leaf) else leaf for leaf in leaves], spec)
    if any(map(_is_one_step, leaves)) and most >= _LONGER and _numbers(model, longer) is not None:
        yield longer


def safe_ids(model: nn.Module) -> int:
    """Below which number any table may be asked: on a GPU an index beyond its end ends the process."""
    if all(parameter.device.type == "cpu" for parameter in model.parameters()):
        return _LONGER
    return min((each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)), default=0)


def _says_nothing(thing: Any) -> bool:
    """Whether all elements of a tensor are the same: for zeros, and for equal tokens, many networks give the same."""
    return isinstance(thing, Tensor) and bool(thing.numel()) and bool((thing == thing.flatten()[0]).all())


def _varied(tensor: Tensor, most: int) -> Tensor | None:
    """The tensor with draws added; whole numbers stay within the range that they have, or below `most`."""
    generator = torch.Generator().manual_seed(0)
    if tensor.is_floating_point():
        return tensor + torch.randn(tensor.shape, generator=generator).to(tensor)
    if tensor.dtype == torch.bool or tensor.is_complex() or tensor.numel() < 2 or bool((tensor < 0).any()):
        return None
    if most < 2 and not bool(tensor.all()):
        return None
    draws = torch.randint(2, tensor.shape, generator=generator)
    draws.view(-1)[-1] = 1 - draws.view(-1)[0]
    draws = draws.to(tensor)
    return torch.where(tensor > 0, tensor - draws, tensor + draws)


def _is_one_step(thing: Any) -> bool:
    return isinstance(thing, Tensor) and thing.ndim > 1 and thing.shape[1] == 1


def lengthened(tensor: Tensor, most: int, dim: int = 1) -> Tensor:
    repeated = tensor.repeat_interleave(_LONGER, dim)
    varied = _varied(repeated, most)
    return repeated if varied is None else varied


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


# Whether an input still matters


@torch.no_grad()
def cuts_off(model: nn.Module, mask: Mask, given: Call) -> bool:
    """Whether an output that depends on an input does not once the mask is applied, as seen on changed inputs.

    The mask may have been applied already, so that the weights are drawn anew where the network runs with others: a few
    times, since all units of a small layer may be silent on the example.
    """
    moved: tuple[set[tuple[int, int]], set[tuple[int, int]]] = set(), set()  # of the dense network, of the masked one
    for seed in range(_DRAWS):
        dense = runnable_copy(model).eval()
        _draw_weights(dense, dense, {}, seed)
        if not (runs := _numbers(dense, given) is not None):
            dense = runnable_copy(model).eval()
        masked = runnable_copy(dense)
        mask.apply(masked)
        for network, found in zip((dense, masked), moved, strict=True):
            before = given.outputs(network)
            for place, changed in enumerate(_changed(given)):
                after = changed.outputs(network)
                same = map(torch.equal, before, after)
                found.update((place, number) for number, is_same in enumerate(same) if not is_same)
        if not runs:
            break
    dense_moved, masked_moved = moved
    return not dense_moved <= masked_moved


def _changed(given: Call) -> Iterator[Call]:
    """The example with one of its tensors changed at a time; whole numbers stay within their range."""
    leaves, spec = tree_flatten(given)
    for place, leaf in enumerate(leaves):
        if (other := _other(leaf)) is not None:
            yield tree_unflatten([*leaves[:place], other, *leaves[place + 1 :]], spec)


def _other(thing: Any) -> Tensor | None:
    if not isinstance(thing, Tensor) or thing.dtype == torch.bool or not thing.numel():
        return None
    if thing.is_floating_point():
        return thing + torch.linspace(0.5, 1, thing.numel(), dtype=thing.dtype, device=thing.device).view(thing.shape)
    return thing.max() + thing.min() - thing


# Copies and outputs


def copy_in_float64(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have double precision."""
    weights = [each for each in model.parameters() if type(each) is nn.Parameter and each.is_floating_point()]
    # Weights are converted as they are copied: one copy of a large network less.
    converted = (nn.Parameter(each.detach().to(torch.float64, copy=True), each.requires_grad) for each in weights)
    return copied(model, zip(weights, converted, strict=True)).double()


def to_run(model: nn.Module) -> nn.Module:
    """A copy with the same weights, for one run: what the code keeps of it is not there in the next."""
    return copied(model, ((parameter, parameter) for parameter in model.parameters()))


def runnable_copy(model: nn.Module) -> nn.Module:
    """A copy of a network, to be run."""
    made = copied(model)
    flatten_recurrent(made)
    return made


def flatten_recurrent(model: nn.Module) -> None:
    """Put the weights of each recurrent layer into one piece of memory, which cuDNN would else do at every call.

    They are in several pieces after a change of their shapes, and in every copy.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def tensors_in(thing: Any) -> list[Tensor]:
    """The tensors of an output, however it nests them; an error if there is none."""
    if found := list(_tensors(thing)):
        return found
    raise InputError(
        f"the network puts out no tensor, but {shown(thing)}, so that nothing can be compared; let it give tensors, in "
        "lists, dictionaries or dataclasses if there are several"
    )


def _tensors(thing: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(thing):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from _tensors(list(leaf.values()))
        elif isinstance(leaf, list | tuple):
            yield from _tensors(list(leaf))
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors(list(vars(leaf).values()))
