"""Which units the code of a network can do without, as seen by running it with fewer.

The graph of a network holds the sizes that its code has come to, and not how: attention may divide the width of its
input by the number of its heads, so that no head can go, or split what it computed by a number that nothing can change.
So a copy loses some units of every group, and is run on the example. Where its code raises, whichever counts are
written anew, one group of the module at fault stays, or all of them, and so they do in modules of the same class; then
it is run again. Whether what it puts out is right is for `trials` to find, which know which units go.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from rewound.foundations.copying import copied
from rewound.method.structure.fitting import COUNTS, choices, own_numbers, rewrite_counts, write
from rewound.method.structure.trials import Call, raised_in

Cut = Mapping[tuple[str, int], int]
"""How many indices a group loses of each dimension of a parameter or buffer, by its name."""


def groups_that_stay(model: nn.Module, cuts: Sequence[Cut], example: Call) -> dict[int, str]:
    """The groups that the code needs whole, by their place in `cuts`, and why; none if it does not run with all."""
    left, found = {place: cut for place, cut in enumerate(cuts) if cut}, dict[int, str]()
    example = _of_two_rows(model, example)
    while left and (failed := _failure(model, left.values(), example)):
        if not found and _failure(model, [], example):
            return {}
        path, at_fault = _at_fault(model, left, example, failed)
        for place in at_fault:
            del left[place]
            found[place] = f"the code of {type(model.get_submodule(path)).__name__} does not run with fewer of them"
    return found


def _of_two_rows(model: nn.Module, example: Call) -> Call:
    """The first two rows of an example, which take less time, if the network runs on them."""
    tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor)]
    rows = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
    if len(rows) == 1 and max(rows) > 2:
        short: Call = tree_map_only(Tensor, lambda tensor: tensor[:2], example)
        if not _failure(model, [], short):
            return short
    return example


def _at_fault(
    model: nn.Module, left: Mapping[int, Cut], example: Call, failed: Sequence[str]
) -> tuple[str, Collection[int]]:
    """The innermost module whose groups are at fault, and which: those with which it does not raise there any more."""
    for path in reversed(failed):
        if isinstance(model.get_submodule(path), (*COUNTS, nn.Sequential)):
            continue
        inside = [place for place, cut in left.items() if _within(cut, path)]
        for some in [*([place] for place in inside), inside]:
            others = [cut for place, cut in left.items() if place not in some]
            if some and _failure(model, others, example) != failed:
                return path, _alike(model, left, path, some)
    return "", list(left)


def _within(cut: Cut, path: str) -> set[tuple[str, int]]:
    """The dimensions of a group that belong to a module, by their names in it."""
    start = f"{path}." if path else ""
    return {(name.removeprefix(start), dim) for name, dim in cut if name.startswith(start)}


def _alike(model: nn.Module, left: Mapping[int, Cut], path: str, some: Sequence[int]) -> list[int]:
    """These groups of a module, and those that other modules of its class have in their place."""
    kind, sought = type(model.get_submodule(path)), set[tuple[str, int]]()
    sought = sought.union(*(_within(left[place], path) for place in some))
    paths = [name for name, module in model.named_modules() if type(module) is kind]
    return [place for place, cut in left.items() if any(_within(cut, name) & sought for name in paths)]


@torch.no_grad()
def _failure(model: nn.Module, cuts: Collection[Cut], example: Call) -> list[str]:
    """The modules in whose code the network raises without some units, the outermost first; none if it runs."""
    kept, small = _without(model, cuts)
    rewrite_counts(model, small)
    numbers, failed = own_numbers(model, [small], kept), list[str]()
    for choice in choices(numbers):
        write(numbers, choice)
        try:
            with _no_shortcut():
                example.run(small)
        except Exception as error:  # whatever the code of a module raises
            failed = failed or raised_in(error, small)
        else:
            return []
    return failed


def _without(model: nn.Module, cuts: Collection[Cut]) -> tuple[dict[str, dict[int, Tensor]], nn.Module]:
    """What is kept of each tensor, and a copy of the network with that much of it, in evaluation mode."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    smaller = dict(tensors)  # what is not cut is not copied
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    kept: dict[str, dict[int, Tensor]] = {}
    for (name, dim), lost in sum(map(Counter, cuts), Counter[tuple[str, int]]()).items():
        left = tensors[name].shape[dim] - lost
        kept.setdefault(name, {})[dim] = torch.arange(left)
        smaller[name] = smaller.get(name, tensors[name]).detach().narrow(dim, 0, left)
    for name in kept:
        other = smaller[name].clone()
        smaller[name] = nn.Parameter(other, False) if isinstance(tensors[name], nn.Parameter) else other
    by_id = {id(tensors[name]): (tensors[name], other) for name, other in smaller.items()}  # tied ones are one
    return kept, copied(model, by_id.values()).eval()


@contextmanager
def _no_shortcut() -> Iterator[None]:
    """Without the kernel that runs a whole layer of torch's transformers at once, and does not look at its shapes."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
