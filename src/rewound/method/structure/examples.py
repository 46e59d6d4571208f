"""What a network is called with, and other examples that are made of it, which show what the given one hides.

Where all tokens are the same, attention gives the same with any number of heads; of one size, a number that the code
says is told apart from none that follows from it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from rewound.foundations.errors import InputError, check_kind, shown
from rewound.foundations.intercepting import Intercepting
from rewound.foundations.randomness import all_draws
from rewound.method.copies import to_run

_SHORT = 9  # that no power of two divides: steps, or rows and columns of an image
_SHORTEST = 3
_LONGER = 3  # steps of a sequence, or rows, in place of one


class Call(NamedTuple):
    """What a network is called with."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def run(self, model: nn.Module, seed: int = 0) -> Any:
        """Call a network, without dropout; one that draws, draws the same each time."""
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        with all_draws(device, seed), Intercepting(_without_dropout):
            return model(*self.args, **self.keywords)

    def outputs(self, model: nn.Module, seed: int = 0) -> list[Tensor]:
        """The tensors that a network puts out; what its code keeps of the run goes with a copy."""
        return tensors_in(self.run(to_run(model), seed))


def call_of(example_inputs: object, example_keywords: Mapping[str, Any] | None = None) -> Call:
    """The call that an example is of."""
    given = {} if example_keywords is None else example_keywords
    check_kind("example_keywords", given, Mapping, "give values by the names of arguments")
    return Call(as_arguments(example_inputs), dict(given))


def as_arguments(example_inputs: object) -> tuple[Any, ...]:
    """The positional arguments of an example; one tensor is one argument, and None is no argument."""
    if example_inputs is None:
        return ()
    return tuple(example_inputs) if isinstance(example_inputs, list | tuple) else (example_inputs,)


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


def numbers(model: nn.Module, example: Call) -> list[Tensor] | None:
    """What a network puts out on an example; None where it does not run, or what comes out are not numbers."""
    try:
        found = example.outputs(model)
    except Exception:  # whatever its own code raises for inputs that it does not take
        return None
    return None if any(bool(each.isnan().any()) for each in found) else found


def telling(model: nn.Module, given: Call) -> Iterator[Call]:
    """The example with other elements where all of a tensor are the same, and with several steps where it has one."""
    leaves, spec = tree_flatten(given)
    most = safe_ids(model)
    is_varied = False
    for place, leaf in enumerate(leaves):
        if _says_nothing(leaf) and (other := _varied(leaf, most)) is not None:
            tried = [*leaves[:place], other, *leaves[place + 1 :]]
            if numbers(model, tree_unflatten(tried, spec)) is not None:
                leaves, is_varied = tried, True
    if is_varied:
        yield tree_unflatten(leaves, spec)
    longer = tree_unflatten([lengthened(leaf, most) if _is_one_step(leaf) else leaf for leaf in leaves], spec)
    if any(map(_is_one_step, leaves)) and most >= _LONGER and numbers(model, longer) is not None:
        yield longer


def varying(model: nn.Module, given: Call) -> Iterator[Call]:
    """Small examples that are shorter, with other ids, and longer than the given one, as far as the model runs on them.

    Longer ones only on CPUs: on a GPU an index beyond the end of a table ends the process.
    """
    short = given
    for size in _sizes(given):
        for other in (_SHORT, size // 2 + 1) if size > _SHORT else ():
            if _is_sure(model, resized := _resized(short, {size: other})):
                short = resized
                break
    counting: Call = tree_map_only(Tensor, _counting, short)
    if _is_another(counting, short) and _is_sure(model, counting):
        yield counting
    elif short is not given:
        yield short
    yield from _with_sizes(model, short, {size: _SHORTEST for size in _sizes(short) if size > _SHORTEST})
    if _is_on_cpu(model):
        yield from _with_sizes(model, short, {size: 2 * size + 1 for size in _sizes(given) if size <= _SHORT})


def _with_sizes(model: nn.Module, example: Call, sizes: Mapping[int, int]) -> Iterator[Call]:
    """The example with other sizes in place of some: with all at once or, if the model does not run then, with each."""
    if sizes and _is_sure(model, together := _resized(example, sizes)):
        yield together
        return
    for size, other in sizes.items():
        if _is_sure(model, resized := _resized(example, {size: other})):
            yield resized


def _sizes(example: Call) -> list[int]:
    """The sizes that tensors of an example have, each once."""
    tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor)]
    return list(dict.fromkeys(size for each in tensors for size in each.shape))


def _is_another(one: Call, other: Call) -> bool:
    """Whether one example was made with other tensors than the other."""
    return any(first is not second for first, second in zip(tree_leaves(one), tree_leaves(other), strict=True))


def _is_sure(model: nn.Module, example: Call) -> bool:
    """Whether a network runs on an example, and gives the same twice: it reads no memory beyond what it is given."""
    found, again = numbers(model, example), numbers(model, example)
    return found is not None and again is not None and all(map(torch.equal, found, again))


def _counting(tensor: Tensor) -> Tensor:
    """Ids from 0 up to the largest, again and again: among them those that a number in the code may stand for."""
    if tensor.is_floating_point() or tensor.is_complex() or not tensor.numel() or int(tensor.max()) < 2:
        return tensor
    return (torch.arange(tensor.numel(), device=tensor.device) % (tensor.max() + 1)).to(tensor).view(tensor.shape)


def _resized(example: Call, sizes: Mapping[int, int]) -> Call:
    """With other sizes in place of some: the first elements, or all again and again, with draws."""

    def resized(tensor: Tensor) -> Tensor:
        before = tensor.numel()
        for dim, size in enumerate(tensor.shape):
            if size in sizes:
                tensor = tensor.index_select(dim, torch.arange(sizes[size], device=tensor.device) % size)
        if tensor.numel() > before and tensor.is_floating_point():
            tensor = tensor + torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor)
        return tensor

    found: Call = tree_map_only(Tensor, resized, example)
    return found


def safe_ids(model: nn.Module) -> int:
    """Below which number any table may be asked: on a GPU an index beyond its end ends the process."""
    if _is_on_cpu(model):
        return _LONGER
    return min((each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)), default=0)


def _is_on_cpu(model: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in model.parameters())


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


def changed(given: Call) -> Iterator[Call]:
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


_DROPOUTS = {"dropout1d", "dropout2d", "dropout3d"} | {
    f"{kind}dropout{end}" for kind in ("", "alpha_", "feature_", "feature_alpha_") for end in ("", "_")
}


def _without_dropout(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Leaves out dropout, that of attention and between the layers of a recurrent network included."""
    name = getattr(func, "__name__", "")
    if name in _DROPOUTS:
        return args[0] if args else kwargs["input"]
    if name == "scaled_dot_product_attention":
        given = dict(zip(("dropout_p", "is_causal"), args[4:], strict=False))
        args, kwargs = args[:4], {**given, **kwargs, "dropout_p": 0.0}
    elif name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):  # the probability is their only float
        args = tuple(0.0 if isinstance(each, float) else each for each in args)
    return func(*args, **kwargs)
