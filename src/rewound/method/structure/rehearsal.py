"""Which units the code of a network can do without, as seen by a network without many of them.

A graph holds the sizes that code has come to, and not how: attention may divide the width of its input by the number of
its heads, so that no head can go, or split what it computed by a number that nothing can change. So every group loses
one or three quarters of its units, and the small network is compared with the masked one. If no counts make them equal,
the groups are tried in parts, and those stay without which they are. A group and those that other modules of its class
have in its place are tried together. Shares differ, as code may need two layers to be equally wide.

It is a rough trial: in the network's own type, on two rows of the example. It says in advance what `slim`, which knows
which units go, would refuse later.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle, takewhile
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from rewound.foundations.errors import InputError, in_a_line
from rewound.method.copies import evaluating, flatten_recurrent, runnable_copy
from rewound.method.structure.examples import Call, telling
from rewound.method.structure.fitting import fit, own_numbers
from rewound.method.structure.groups import UnitGroup, Units
from rewound.method.structure.kept import KeptIndices, cut_copy, kept_without, shapes_of, zero_gone
from rewound.method.structure.layer_counts import rewrite_counts
from rewound.method.structure.passes import training_difference
from rewound.method.structure.trials import Trial, draw_weights, trial_of

_SHARES = (1, 3)  # quarters of the units that are left, by turns; not half, which is all that two units can lose
_MULTIPLE = 32  # of units that are left, or 16, or 8: some code needs it
_TOLERANCE = 1e-3  # convolutions on a GPU round to ten bits


class Family(NamedTuple):
    """Groups that are tried together, and how many quarters of their units are left."""

    groups: Sequence[UnitGroup]
    share: int


def without_needed(model: nn.Module, found: Units, example: Call) -> Units:
    """The units without those groups that the code needs whole; these are pinned, with the reason."""
    families = _families(model, found)
    for given in _shortest_first(example):
        failure = partial(_failure, model, given)
        if not families or not (reason := failure(families)):
            return found
        if not failure([]):
            return _without(found, _needed(failure, [], families, reason))
    return found  # the network does not run on the example, or does not put out the same twice


def _without(found: Units, needed: Iterable[tuple[Family, str]]) -> Units:
    """The units without those of families that are needed; these are pinned, with the reason."""
    stay = {id(group): reason for family, reason in needed for group in family.groups}
    pinned = {
        dim: f"a network without some of them was tried: {stay[id(group)]}"
        for group in found
        if id(group) in stay
        for dim in group.members
    }
    groups = tuple(group for group in found if id(group) not in stay)
    return replace(found, groups=groups, pinned={**pinned, **found.pinned})


def _families(model: nn.Module, found: Units) -> list[Family]:
    """The groups by the class of the module that has all their members, and by the place of those in it."""
    alike: dict[object, list[UnitGroup]] = {}
    for group in found:
        paths = [name.split(".")[:-1] for name, _ in group.members]
        common = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
        path = "".join(f"{part}." for part, *_ in common)
        kind = type(model.get_submodule(path.removesuffix(".")))
        members = frozenset((name.removeprefix(path), dim) for name, dim in group.members)
        alike.setdefault((kind, members), []).append(group)
    return [Family(groups, share) for groups, share in zip(alike.values(), cycle(_SHARES))]


def _shortest_first(example: Call) -> Iterator[Call]:
    """The first two rows of the example, if its tensors have as many rows, and all of it."""
    tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor)]
    rows = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
    if len(rows) == 1 and max(rows) > 2:
        yield tree_map_only(Tensor, lambda tensor: tensor[:2], example)
    yield example


def _needed(
    failure: Callable[[Sequence[Family]], str], gone: list[Family], more: Sequence[Family], reason: str
) -> Iterator[tuple[Family, str]]:
    """Those of some families that cannot go beside what is gone, and why; the others are then gone, too.

    `reason` says why all of them together cannot.
    """
    if len(more) == 1:
        yield more[0], reason
        return
    first, second = more[: len(more) // 2], more[len(more) // 2 :]
    if why := failure([*gone, *first]):
        yield from _needed(failure, gone, first, why)
        reason = failure([*gone, *second])
    else:
        gone += first
    if reason:
        yield from _needed(failure, gone, second, reason)
    else:
        gone += second


@torch.no_grad()
def _failure(model: nn.Module, example: Call, gone: Sequence[Family]) -> str:
    """Why no network without units of some groups equals the masked one, in words; nothing if one does."""
    units = [unit for groups, share in gone for group in groups for unit in group.units[_left(len(group), share) :]]
    kept = kept_without(units, shapes_of(model))
    try:
        with _no_shortcut():
            trial = _trial(model, kept, example)

            def difference() -> str:
                return trial.difference() or training_difference([trial], kept)

            return fit(own_numbers(trial.masked, [trial.small], kept), difference).failure
    except InputError:  # about what it puts out, or its copies: it says nothing of units
        return ""
    except Exception as error:  # whatever the model's own code raises
        return in_a_line(error)


def _trial(model: nn.Module, kept: KeptIndices, example: Call) -> Trial:
    """With other weights than the network has, if it runs with them."""
    masked, small = _masked_and_small(model, kept)
    examples = [example, *telling(masked, example)]
    draw_weights(masked, small, kept)
    trial = trial_of(masked, small, examples, _TOLERANCE, only_numbers=True)
    return trial if trial.examples else trial_of(*_masked_and_small(model, kept), examples, _TOLERANCE)


def _masked_and_small(model: nn.Module, kept: KeptIndices) -> tuple[nn.Module, nn.Module]:
    masked = evaluating(runnable_copy(model))
    for name, parameter in masked.named_parameters():
        zero_gone(parameter, kept.get(name, {}))
    small = cut_copy(masked, kept)
    rewrite_counts(masked, small)
    flatten_recurrent(small)
    return masked, small


def _left(size: int, share: int) -> int:
    """So many quarters, a multiple of what code may need; not all, and one only of two, as `squeeze` would lose it."""
    left = max(min((size * share + 3) // 4, size - 1), min(size - 1, 2), 1)
    return left if left < 8 else left - left % min(_MULTIPLE, 1 << (left.bit_length() - 2))


@contextmanager
def _no_shortcut() -> Iterator[None]:
    """Without the kernel that runs a whole layer of torch's transformers at once, and does not look at its shapes."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
