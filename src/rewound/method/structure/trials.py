"""Whether a small network equals the masked one, as seen by running both on an example.

The example and the weights may hide a difference: where all tokens are the same, or a branch ends with a layer of
zeros, attention gives the same with any number of heads. So both are also run with other weights, drawn around those
that they have, and on an example in which elements differ.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from rewound.foundations.copying import copied
from rewound.foundations.errors import InputError, shown
from rewound.foundations.randomness import own_draws

_KEEP = "keep those with skip=, or keep the network as it is"
_LONGER = 3  # steps of a sequence, in place of an example's only one


class Call(NamedTuple):
    """What a network is called with."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def outputs(self, model: nn.Module) -> list[Tensor]:
        return tensors_in(model(*self.args, **self.keywords))


@dataclass(frozen=True)
class Trial:
    """A masked and a small network in evaluation mode, and what the masked one puts out on some examples."""

    masked: nn.Module
    small: nn.Module
    examples: Sequence[Call]
    expected: Sequence[list[Tensor]]
    tolerance: float

    def difference(self) -> str:
        """What is wrong with the small network, in words; nothing if it equals the masked one."""
        for example, expected in zip(self.examples, self.expected, strict=True):
            try:
                given = example.outputs(self.small)
            except Exception as error:  # whatever a module's own code raises where a count is wrong
                return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            if distance(given, expected) > self.tolerance:
                return "its outputs differ"
        return ""

    def check_training(self) -> None:
        """An error if the networks differ in training mode, of which nothing was traced; afterwards they stay in it."""
        try:
            expected = self._trained(self.masked)
        except Exception:  # it does not train on such an example; BatchNorm needs more than one value
            return
        try:
            given = self._trained(self.small)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise InputError(
                f"the smaller network does not run in training mode ({type(error).__name__}: {reason}): a part that is "
                f"used only there reads units that are gone; {_KEEP}"
            ) from error
        off = distance(given, expected)
        bound = self.tolerance if off < torch.inf else sys.float_info.max
        if off > self.tolerance and not self._passes_differ(expected, bound):  # where they do, only shapes count
            how = "differ" if off < torch.inf else "have other shapes"
            raise InputError(
                f"in training mode the outputs of the smaller network {how}: what only training uses or returns has "
                f"units that are gone; {_KEEP}"
            )

    def _trained(self, model: nn.Module, seed: int = 0) -> list[Tensor]:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        with own_draws(device, seed):
            return self.examples[0].outputs(model.train())

    def _passes_differ(self, expected: Sequence[Tensor], bound: float) -> bool:
        """Whether the masked network's outputs differ between passes by more than that: by dropout, or by rounding.

        A batch of two examples may have almost no variance, and BatchNorm then magnifies the last digits.
        """
        if distance(self._trained(self.masked, 1), expected) > bound:
            return True
        for seed in range(2, 7):
            for parameter in self.masked.parameters():
                if parameter.is_floating_point():
                    draws = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed)).to(parameter)
                    parameter.mul_(1 + 100 * torch.finfo(parameter.dtype).eps * draws)
            if distance(self._trained(self.masked, seed), expected) > bound:
                return True
        return False


def distance(given: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, beside the size of the numbers where that is above 1; infinite between other shapes."""
    if [each.shape for each in given] != [each.shape for each in expected]:
        return torch.inf
    return max((_distance(*pair) for pair in zip(given, expected, strict=True)), default=0.0)


def _distance(one: Tensor, other: Tensor) -> float:
    one, other = (each if each.is_complex() else each.double() for each in (one, other))
    same = (one == other) | (one.isnan() & other.isnan())  # infinite ones included
    largest = float(other.abs().nan_to_num(0, 0, 0).max()) if other.numel() else 0.0
    off = (one - other).abs().masked_fill(same, 0).nan_to_num(sys.float_info.max, sys.float_info.max)
    return float(off.max()) / max(1.0, largest) if off.numel() else 0.0


def trials(masked: nn.Module, small: nn.Module, kept: Mapping[str, Mapping[int, Tensor]], given: Call) -> list[Trial]:
    """With the weights that the networks have and, if the masked one runs with them, with others.

    In float64 or, where the network's own code makes tensors of another type, in the type that it has.
    """
    try:
        in_float64 = copied(masked).double().eval(), copied(small).double().eval()
        return _trials(*in_float64, kept, tree_map_only(Tensor, _doubled, given), 1e-9)
    except Exception:  # whatever its code raises for another type than its own
        return _trials(runnable_copy(masked).eval(), runnable_copy(small).eval(), kept, given, 1e-4)


def _trials(
    masked: nn.Module, small: nn.Module, kept: Mapping[str, Mapping[int, Tensor]], given: Call, tolerance: float
) -> list[Trial]:
    examples = [given, *_telling(masked, given)]
    first = Trial(masked, small, examples, [each.outputs(masked) for each in examples], tolerance)
    masked, small = runnable_copy(masked), runnable_copy(small)
    _draw_weights(masked, small, kept)
    expected = {place: found for place, each in enumerate(examples) if (found := _numbers(masked, each)) is not None}
    if not expected:
        return [first]
    return [first, Trial(masked, small, [examples[place] for place in expected], [*expected.values()], tolerance)]


def _draw_weights(masked: nn.Module, small: nn.Module, kept: Mapping[str, Mapping[int, Tensor]]) -> None:
    """Add draws to the weights, so large that no branch is silent; the same to those of both networks."""
    generator = torch.Generator().manual_seed(0)
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


def zero_gone(parameter: Tensor, kept: Mapping[int, Tensor]) -> None:
    """Set what is not kept of a parameter to zero."""
    for dim, left in kept.items():
        gone = torch.ones(parameter.shape[dim], dtype=torch.bool).index_fill_(0, left.cpu(), False)
        parameter.index_fill_(dim, gone.nonzero()[:, 0].to(parameter.device), 0)


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
    most = _safe_ids(model)
    changed = False
    for place, leaf in enumerate(leaves):
        if _says_nothing(leaf) and (other := _varied(leaf, most)) is not None:
            tried = [*leaves[:place], other, *leaves[place + 1 :]]
            if _numbers(model, tree_unflatten(tried, spec)) is not None:
                leaves, changed = tried, True
    if changed:
        yield tree_unflatten(leaves, spec)
    longer = tree_unflatten([_longer(leaf, most) if _is_one_step(leaf) else leaf for leaf in leaves], spec)
    if any(map(_is_one_step, leaves)) and most >= _LONGER and _numbers(model, longer) is not None:
        yield longer


def _safe_ids(model: nn.Module) -> int:
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


def _longer(tensor: Tensor, most: int) -> Tensor:
    repeated = tensor.repeat_interleave(_LONGER, 1)
    varied = _varied(repeated, most)
    return repeated if varied is None else varied


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


# Copies and outputs


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
