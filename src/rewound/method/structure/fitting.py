"""Counts in the modules of a smaller network (`out_channels`, `num_heads`, `split_size`, ...), so that it can be run.

Those of torch's own layers follow from their weights (`layer_counts`). A whole number of a user's own class may count
anything: the likely ones are written anew, the network is run on an example, and other choices are tried until it
equals the masked one (`trials`). If none does, it is refused. A number that may be any stays as it was.
"""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rewound.foundations.errors import InputError
from rewound.method.structure.examples import Call
from rewound.method.structure.kept import KeptIndices, tensors_of
from rewound.method.structure.layer_counts import count_channels, is_counted, rewrite_counts
from rewound.method.structure.passes import training_difference
from rewound.method.structure.trials import Trial, trials

_TRIES = 128  # runs of the example, to find which numbers of a module count what has shrunk
_CHOICES = 2000  # that are looked at
_SIZES = 8  # in a tuple or list that may be of sizes; longer ones are of other things, such as words


@torch.no_grad()
def correct_counts(masked: nn.Module, small: nn.Module, kept: KeptIndices, example: Call) -> None:
    """Write the counts of the small network anew, so that it gives what the masked one gives on the example."""
    rewrite_counts(masked, small)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "input's size at dim=")  # by InstanceNorm, until its channels are counted
        _fit_counts(masked, small, kept, example)
        count_channels(small, example)


def _fit_counts(masked: nn.Module, small: nn.Module, kept: KeptIndices, example: Call) -> None:
    tried = trials(masked, small, kept, example)
    numbers = own_numbers(masked, [small, *(trial.small for trial in tried)], kept)
    found = fit(numbers, lambda: _difference(tried))
    if found.choice is None and any(trial.varies for trial in tried):
        raise InputError(
            "this network does not put out the same twice, so that no smaller one can be compared with it; let it draw "
            "from the generators of torch, numpy or random, or from one that it holds"
        )
    if found.choice is None:
        raise InputError(
            f"no smaller network was found that equals the masked one ({found.failure}): a count in its code could not "
            "be written anew; let the code read sizes from its weights, keep its units with skip=, or remove equal "
            'parts of its layers by scope="layer"'
        )
    left = _restore_others(tried, numbers, found.choice, found.read)
    _fit_training(tried, numbers, found, left, kept)


def _difference(tried: Sequence[Trial]) -> str:
    return next((difference for trial in tried if (difference := trial.difference())), "")


@dataclass(frozen=True)
class _Number:
    """A whole number of somebody's module that may count what has shrunk, and what it could be now."""

    modules: tuple[nn.Module, ...]
    name: str
    place: int | None
    """In the tuple or list of that name, if it is in one."""
    options: tuple[int, ...]
    """What it was, then what it is as a size of a weight, then as a part of one (heads)."""
    beyond: int
    """A value that it cannot need, as a trial of whether it counts anything."""

    def write(self, option: int) -> None:
        self.set(self.options[min(option, len(self.options) - 1)])

    def set(self, value: int) -> None:
        for module in self.modules:
            if self.place is None:
                setattr(module, self.name, value)
            else:
                sizes = getattr(module, self.name)
                setattr(module, self.name, type(sizes)([*sizes[: self.place], value, *sizes[self.place + 1 :]]))


class _Size(NamedTuple):
    """What a size of a tensor was, and is now."""

    before: int
    now: int


Numbers = Mapping[tuple[type, str, int | None], Sequence[_Number]]
"""By the class of their modules, the name of the attribute, and the place in it."""


def own_numbers(large: nn.Module, smaller: Sequence[nn.Module], kept: KeptIndices) -> Numbers:
    """By class and name: all modules of a class write the same number anew, or none does."""
    found: dict[tuple[type, str, int | None], list[_Number]] = {}
    tensors = tensors_of(large)
    for (prefix, old), *new in zip(large.named_modules(), *(each.modules() for each in smaller), strict=True):
        if is_counted(old):
            continue
        if isinstance(old, nn.Unflatten | nn.GroupNorm):  # it counts what the layers beside it have
            prefix = prefix.rpartition(".")[0]
        sizes = _sizes_near(prefix, tensors, kept)
        for name, place, value in _whole_numbers(old):
            if len(options := _options(value, sizes, is_part=place is not None)) > 1:
                number = _Number(tuple(new), name, place, options, _beyond(value, sizes))
                found.setdefault((type(old), name, place), []).append(number)
    return found


def _sizes_near(prefix: str, tensors: Mapping[str, Tensor], kept: KeptIndices) -> Sequence[_Size]:
    """The sizes that have shrunk in a module and the two levels below it."""
    start = f"{prefix}." if prefix else ""
    sizes = []
    for name, dims in kept.items():
        if name.startswith(start) and name.removeprefix(start).count(".") < 3:
            sizes += [_Size(tensors[name].shape[dim], len(left)) for dim, left in dims.items()]
    return list(dict.fromkeys(reversed(sizes)))  # the later of equal sizes is the likelier


def _options(value: int, sizes: Sequence[_Size], *, is_part: bool) -> tuple[int, ...]:
    """What a number may be now: what it was, what it is as a size of a weight, or as a part of one (heads).

    If it is one of several (`is_part`), it may also be what one size is more than another: the rest of a split.
    """
    same = [size.now for size in sizes if size.before == value]
    parts = [
        size.now * value // size.before
        for size in sizes
        if size.before % value == 0 and size.now * value % size.before == 0
    ]
    pairs = itertools.permutations(sizes, 2) if is_part else ()
    rests = [one.now - other.now for one, other in pairs if one.before - other.before == value and one.now > other.now]
    return tuple(dict.fromkeys([value, *same, *parts, *rests]))


def _beyond(value: int, sizes: Sequence[_Size]) -> int:
    """A number a little larger, and no divisor of what is left of what the value may count the parts of."""
    divided = [size.now for size in sizes if size.before % value == 0]
    return next(more for more in itertools.count(value + 1) if all(now % more for now in divided))


def _whole_numbers(module: nn.Module) -> Iterator[tuple[str, int | None, int]]:
    """The attributes of a module that may count something, one by one where there are several."""
    for name, value in counts_in(module).items():
        for place, each in [(None, value)] if isinstance(value, int) else enumerate(value):
            if each > 1 and not name.startswith("_"):
                yield name, place, each


def counts_in(module: nn.Module) -> dict[str, int | Sequence[int]]:
    """The attributes of a module that are whole numbers, or tuples or lists of a few of them."""

    def is_whole(value: Any) -> bool:
        several = type(value) in (tuple, list) and len(value) <= _SIZES
        return type(value) is int or (several and all(type(each) is int for each in value))

    return {name: value for name, value in vars(module).items() if is_whole(value)}


class Fit(NamedTuple):
    """What came of a search for counts that make the small network equal the masked one."""

    choice: Sequence[int] | None
    """Which option of each number; None if no choice was found."""
    failure: str
    """What the first choice gave, if none was found."""
    read: Sequence[bool]
    """Which of the numbers the code read with this choice."""


def fit(numbers: Numbers, compare: Callable[[], str]) -> Fit:
    """Write numbers anew so that the small network equals the masked one, of which `compare` says how they differ.

    A choice is not tried that differs from an earlier one in numbers alone that the code had not read when it failed.
    """
    first, tries = "", 0
    failed: list[dict[int, int]] = []
    for choice in _choices(numbers):
        if any(all(choice[place] == option for place, option in each.items()) for each in failed):
            continue
        _write(numbers, choice)
        with _read({kind for kind, _, _ in numbers}) as attributes:
            difference = compare()
        read = [(kind, name) in attributes for kind, name, _ in numbers]
        if not difference:
            return Fit(choice, "", read)
        first, tries = first or difference, tries + 1
        if tries == _TRIES:
            break
        failed.append({place: option for place, option in enumerate(choice) if read[place]})
    return Fit(None, first, [])


@contextmanager
def _read(kinds: Iterable[type]) -> Iterator[set[tuple[type, str]]]:
    """Which attributes of objects of some classes are read inside, by class and name."""
    found: set[tuple[type, str]] = set()

    def noting(kind: Any) -> Callable[[object, str], object]:
        before = kind.__getattribute__

        def noted(thing: object, name: str) -> object:
            found.add((type(thing), name))
            return before(thing, name)

        return noted

    own = {kind: vars(kind).get("__getattribute__") for kind in kinds}
    try:
        for kind in own:
            type.__setattr__(kind, "__getattribute__", noting(kind))
        yield found
    finally:
        for kind, before in own.items():
            if before is None:
                type.__delattr__(kind, "__getattribute__")
            else:
                type.__setattr__(kind, "__getattribute__", before)


def _choices(found: Numbers) -> Iterator[tuple[int, ...]]:
    """Which option each number takes: the likely ones, or what they were; then with one of them changed, then two."""
    likely = [0 if _is_size_of_head(name) else 1 for _, name, _ in found]
    ranges = [range(max(len(number.options) for number in numbers)) for numbers in found.values()]

    def changed(start: list[int], changes: int) -> Iterator[tuple[int, ...]]:
        for places in itertools.combinations(range(len(start)), changes):
            for others in itertools.product(*(ranges[place] for place in places)):
                choice = list(start)
                for place, other in zip(places, others, strict=True):
                    choice[place] = other
                yield tuple(choice)

    by_turns = (
        choice
        for changes in range(3)
        for pair in itertools.zip_longest(changed(likely, changes), changed([0] * len(likely), changes))
        for choice in pair
        if choice is not None
    )
    return iter(dict.fromkeys(itertools.islice(by_turns, _CHOICES)))


def _write(found: Numbers, choice: Sequence[int]) -> None:
    for option, numbers in zip(choice, found.values(), strict=True):
        for number in numbers:
            number.write(option)


def _restore_others(
    tried: Sequence[Trial], found: Numbers, choice: Sequence[int], read: Sequence[bool]
) -> Sequence[int]:
    """Put back each number that counts nothing here, as any would do: a layer's index, or the longest input.

    Gives the choice that is left.
    Of a number that is read, it is not enough that it makes no difference what it was: on an example of one token, a
    wrong number of heads makes none.
    """
    left = [option if is_read else 0 for option, is_read in zip(choice, read, strict=True)]
    for place, numbers in enumerate(found.values()):
        if not left[place]:
            continue
        without = [0 if other == place else option for other, option in enumerate(left)]
        _write(found, without)
        if _difference(tried[-1:]):  # the one that shows most
            continue
        for number in numbers:
            number.set(number.beyond)
        if not _difference(tried[-1:]):
            left = without
    _write(found, left)
    if left != list(choice) and _difference(tried):
        _write(found, choice)
        return choice
    return left


def _fit_training(tried: Sequence[Trial], numbers: Numbers, found: Fit, left: Sequence[int], kept: KeptIndices) -> None:
    """Write those numbers anew, too, that only training reads, if it differs; an error if it still does."""
    with _read({kind for kind, _, _ in numbers}) as attributes:
        difference = training_difference(tried, kept)
    if not difference:
        return
    assert found.choice is not None  # as training is compared once evaluation is equal
    choice = list(left)
    for place, (kind, name, _) in enumerate(numbers):
        if (kind, name) in attributes and not found.read[place]:
            choice[place] = found.choice[place]
    _write(numbers, choice)
    if choice == list(left) or training_difference(tried, kept):
        raise InputError(
            f"no smaller network was found that trains as the masked one ({difference}); keep those units with skip=, "
            "or keep the network as it is"
        )


def _is_size_of_head(name: str) -> bool:
    return name in ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_kv", "dim_head")
