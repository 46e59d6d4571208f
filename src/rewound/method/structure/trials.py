"""Whether a small network equals the masked one, as seen by running both on an example.

The example and the weights may hide a difference: where all tokens are the same, or a branch ends with a layer of
zeros, attention gives the same with any number of heads. So both are also run with other weights, drawn around those
that they have, and on an example in which elements differ.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from rewound.foundations.copying import copied
from rewound.foundations.errors import InputError, shown
from rewound.foundations.randomness import own_draws
from rewound.method.pruning.mask import Mask

_KEEP = "keep those with skip=, or keep the network as it is"
_LONGER = 3  # steps of a sequence, or rows, in place of one


class Call(NamedTuple):
    """What a network is called with."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def outputs(self, model: nn.Module, seed: int = 0) -> list[Tensor]:
        """What a network puts out; one that draws, draws the same each time."""
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        with own_draws(device, seed):
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
        trained = self._trained_masked()
        if trained is None:
            return
        example, expected = trained
        try:
            given = _trained(self.small, example)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise InputError(
                f"the smaller network does not run in training mode ({type(error).__name__}: {reason}): a part that is "
                f"used only there reads units that are gone; {_KEEP}"
            ) from error
        off = distance(given, expected)
        bound = self.tolerance if off < torch.inf else sys.float_info.max
        if off > self.tolerance and not self._passes_differ(example, expected, bound):  # if they do, only shapes count
            how = "differ" if off < torch.inf else "have other shapes"
            raise InputError(
                f"in training mode the outputs of the smaller network {how}: what only training uses or returns has "
                f"units that are gone; {_KEEP}"
            )

    def _trained_masked(self) -> tuple[Call, list[Tensor]] | None:
        """An example that the masked network trains on, of more rows if it must be, and what it puts out; None if none.

        BatchNorm needs more than one value.
        """
        for example in (self.examples[0], _more_rows(self.masked, self.examples[0])):
            with suppress(Exception):  # whatever its own code raises
                return example, _trained(self.masked, example)
        return None

    def _passes_differ(self, example: Call, expected: Sequence[Tensor], bound: float) -> bool:
        """Whether the masked network's outputs differ between passes by more than that: by its draws, or by rounding.

        Draws count if the small network makes others: those of the same shapes are the same, as both begin with one
        seed. A batch of two examples may have almost no variance, and BatchNorm then magnifies the last digits.
        """
        if _draws(self.masked, example) != _draws(self.small, example) and (
            distance(_trained(self.masked, example, 1), expected) > bound
        ):
            return True
        for seed in range(2, 7):
            for parameter in self.masked.parameters():
                if parameter.is_floating_point():
                    draws = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed)).to(parameter)
                    parameter.mul_(1 + 100 * torch.finfo(parameter.dtype).eps * draws)
            if distance(_trained(self.masked, example), expected) > bound:
                return True
        return False


def _draws(model: nn.Module, example: Call) -> list[list[torch.Size]]:
    """The shapes of what a network draws in training mode, one after the other."""
    noted = _Draws()
    with noted:
        _trained(model, example)
    return noted.shapes


def _trained(model: nn.Module, example: Call, seed: int = 0) -> list[Tensor]:
    """What a network puts out in training mode, without dropout: of fewer units, that would drop others."""
    with _NoDropout():
        return example.outputs(model.train(), seed)


_DROPOUTS = {"dropout1d", "dropout2d", "dropout3d"} | {
    f"{kind}dropout{end}" for kind in ("", "alpha_", "feature_", "feature_alpha_") for end in ("", "_")
}


class _NoDropout(TorchFunctionMode):
    """Leaves out dropout, that of attention and between the layers of a recurrent network included."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            given = dict(zip(("dropout_p", "is_causal"), args[4:], strict=False))
            args, kwargs = args[:4], {**given, **kwargs, "dropout_p": 0.0}
        elif name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):  # the probability is their only float
            args = tuple(0.0 if isinstance(each, float) else each for each in args)
        return func(*args, **kwargs)


class _Draws(TorchFunctionMode):
    """Notes the shapes of what is drawn from torch's generators, as their states tell."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[list[torch.Size]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = _generators()
        result = func(*args, **(kwargs or {}))
        if not all(map(torch.equal, before, _generators())):
            self.shapes.append([each.shape for each in tree_leaves(result) if isinstance(each, Tensor)])
        return result


def _generators() -> list[Tensor]:
    """The states of torch's generators."""
    return [each.get_state() for each in (torch.default_generator, *torch.cuda.default_generators)]


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
        doubled = tree_map_only(Tensor, _doubled, given)
        return _trials(copy_in_float64(masked).eval(), copy_in_float64(small).eval(), kept, doubled, 1e-9)
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


def _more_rows(model: nn.Module, given: Call) -> Call:
    """The example with several rows in place of each, in all tensors that have as many rows as the first."""
    most, found = _safe_ids(model), [each for each in tree_leaves(given) if isinstance(each, Tensor) and each.ndim]
    rows = found[0].shape[0] if found else 0

    def more(tensor: Tensor) -> Tensor:
        return _longer(tensor, most, 0) if tensor.ndim and tensor.shape[0] == rows else tensor

    changed: Call = tree_map_only(Tensor, more, given)
    return changed


def _is_one_step(thing: Any) -> bool:
    return isinstance(thing, Tensor) and thing.ndim > 1 and thing.shape[1] == 1


def _longer(tensor: Tensor, most: int, dim: int = 1) -> Tensor:
    repeated = tensor.repeat_interleave(_LONGER, dim)
    varied = _varied(repeated, most)
    return repeated if varied is None else varied


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


# Whether an input still matters


@torch.no_grad()
def cuts_off(model: nn.Module, mask: Mask, given: Call) -> bool:
    """Whether an output that depends on an input does not once the mask is applied, as seen on changed inputs.

    The mask may have been applied already, so that the weights are drawn anew where the network runs with others.
    """
    dense = runnable_copy(model).eval()
    _draw_weights(dense, dense, {})
    if _numbers(dense, given) is None:
        dense = runnable_copy(model).eval()
    masked = runnable_copy(dense)
    mask.apply(masked)
    before = [given.outputs(each) for each in (dense, masked)]
    for changed in _changed(given):
        after = [changed.outputs(each) for each in (dense, masked)]
        for dense_before, masked_before, dense_after, masked_after in zip(*before, *after, strict=True):
            if torch.equal(masked_before, masked_after) and not torch.equal(dense_before, dense_after):
                return True
    return False


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
