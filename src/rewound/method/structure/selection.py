"""Which units go: those with the smallest scores, until no more is left of the network than was asked for.

Most scores of a unit are the mean of the scores of its weights, so that units of different sizes can be ranked
together: it is what their removal costs for each weight saved. Units of all groups are ranked by what part of their
group's mean score they have. Without that, the group with the smallest weights would lose all units but one, and the
network its accuracy: 36% instead of 97% on the digits at a density of 0.25, one-shot, where single weights may be
ranked as they are.

Units differ in size, so that a count of weights is not met exactly: as many go as are needed to have no more left.
Each group keeps a minimum of units, and a multiple of `round_to`.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from rewound.foundations.errors import InputError, few
from rewound.method.pruning.cutting import kept_count
from rewound.method.pruning.mask import Mask
from rewound.method.structure.groups import KERNEL, TIED, Dimension, Unit, UnitGroup, Units

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Least:
    """How many units of a group stay at least: a number, a fraction of it, and a multiple of `round_to`."""

    min_units: int = 1
    floor: float = 0.0
    round_to: int = 1

    def of(self, group: UnitGroup) -> int:
        """The smallest multiple that is enough."""
        enough = max(self.min_units, math.ceil(round(self.floor * len(group), 6)), 1)
        return min(math.ceil(enough / self.round_to) * self.round_to, len(group))

    def check(self, groups: Sequence[UnitGroup]) -> None:
        """An error for a group that has fewer units than one multiple."""
        for group in groups:
            if len(group) < self.round_to:
                raise InputError(
                    f"round_to must be from 1 to the {len(group)} units of {group.name}, not {self.round_to}; lower "
                    f"it, or leave out that group with skip=({group.name!r},)"
                )


class NetworkSize(NamedTuple):
    """What density is a fraction of: so much for each element of a weight, and what no removal can change."""

    shapes: Shapes
    per_row: Mapping[str, Sequence[float]]
    """What an element of each row of a weight counts; one number where that is the same in all rows."""
    fixed: float = 0

    def of_indices(self, place: Dimension, indices: Sequence[int]) -> float:
        """What indices of a dimension count: their number, for rows times what their elements count."""
        name, dim = place
        if dim or name not in self.per_row:
            return len(indices)
        each = self.per_row[name]
        return each[0] * len(indices) if len(each) == 1 else sum(each[index] for index in indices)

    def without(self, lost: Mapping[Dimension, float]) -> int:
        """The size of a network whose weights have lost that much along each dimension, as `of_indices` counts it."""
        total = self.fixed
        for name in self.per_row:
            whole = [self.of_indices((name, dim), range(size)) for dim, size in enumerate(self.shapes[name] or (1,))]
            total += math.prod(size - lost.get((name, dim), 0) for dim, size in enumerate(whole))
        return round(total)


def alive_units(groups: Units, before: Mask) -> list[Tensor]:
    """Which units of each group a mask leaves; an error for one that removes only a part of a unit."""
    alive = [torch.ones(len(group), dtype=torch.bool) for group in groups]
    if not before:
        return alive
    gone = groups.gone(before)
    missing = set(map(id, gone))
    for group, left in zip(groups, alive, strict=True):
        left &= torch.tensor([id(unit) not in missing for unit in group.units])
    expected = groups.mask_without(gone)
    for name, kept in before.items():
        if not torch.equal(kept.cpu(), expected.get(name, torch.ones_like(kept, device="cpu"))):
            raise InputError(
                f"the mask to go on from removes parts of units (in {name}), and whole units are pruned now; go on "
                "with the pattern that it was made with, or complete it with units(...).whole(mask)"
            )
    return alive


def _rows(tensor: Tensor, dim: int) -> Tensor:
    """What belongs to each index of a dimension, as a row."""
    return tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)


def _taken(group: UnitGroup, which: Tensor) -> list[Unit]:
    return [unit for unit, taken in zip(group.units, which.tolist(), strict=True) if taken]


def _sizes(group: UnitGroup, place: Dimension, size: NetworkSize) -> list[float]:
    """What each unit of a group counts at a place."""
    return [size.of_indices(place, unit.indices[place]) for unit in group.units]


UnitScores = Callable[[UnitGroup], Tensor]


def no_scores(group: UnitGroup) -> Tensor:
    """Zeros, where only the number of units counts."""
    return torch.zeros(len(group))


def mean_scores(group: UnitGroup, places: Sequence[Dimension], score: Callable[[str], Tensor], before: Mask) -> Tensor:
    """The mean of the scores of each unit's weights that are left, over some of the places where it has weights."""
    totals, counts = torch.zeros(len(group), dtype=torch.float64), torch.zeros(len(group), dtype=torch.float64)
    for name, dim in places:
        scores = score(name).cpu()
        if name in before:
            left = before[name].cpu()
            scores, number = scores * left, _rows(left, dim).sum(1)
        else:
            number = torch.full((scores.shape[dim],), scores.numel() // scores.shape[dim])
        totals += _sums(group, (name, dim), _rows(scores, dim).sum(1, dtype=torch.float64))
        counts += _sums(group, (name, dim), number)
    return totals / counts.clamp(min=1)


def scale_scores(group: UnitGroup, scales: Mapping[str, Tensor]) -> Tensor:
    """The absolute value of the scale of each unit's normalisation; the mean where it has several."""
    places = [place for place in group.members if place[0] in scales]
    if not places:
        raise InputError(
            f"score bn-scale is the scale of a unit's normalisation, and the units of {group.name} have none; leave "
            f"them out with skip=({group.name!r},), or use another score"
        )
    return mean_scores(group, places, lambda name: scales[name].detach().abs(), Mask({}))


def read_scores(group: UnitGroup, inputs: Mapping[Dimension, Tensor]) -> Tensor:
    """The mean absolute value of what layers read from each unit."""
    places = [place for place in group.members if place in inputs]
    if not places:
        raise InputError(
            f"score activation is what layers read from a unit, and none is seen to read those of {group.name}; leave "
            f"them out with skip=({group.name!r},), or use another score"
        )
    totals = torch.stack([_sums(group, place, inputs[place].double()) for place in places]).sum(0)
    return totals / torch.stack([_sums(group, place, torch.ones_like(inputs[place])) for place in places]).sum(0)


def _sums(group: UnitGroup, place: Dimension, values: Tensor) -> Tensor:
    """The sum of the values of each unit's indices at a place."""
    indices = [unit.indices[place] for unit in group.units]
    owners = torch.arange(len(group)).repeat_interleave(torch.tensor([len(each) for each in indices]))
    flat = torch.tensor([index for each in indices for index in each])
    return torch.zeros(len(group), dtype=torch.float64).index_add_(0, owners, values.double()[flat])


def producing_weights(group: UnitGroup, weights: Collection[str]) -> list[str]:
    """The weights that produce the units of a group; those that only read them where none does."""
    return [name for name, _ in group.producers or group.members if name in weights]


class _Batch(NamedTuple):
    """Units of a group that go together."""

    rank: float
    group: int
    units: tuple[int, ...]


@dataclass(frozen=True)
class Removal:
    """Units in the order in which they go, and how large the network is after each batch of them."""

    groups: Sequence[UnitGroup]
    batches: Sequence[_Batch]
    gone: Mapping[Dimension, float]
    """What is gone already along each dimension."""
    size: NetworkSize
    multiple: int
    """How many units of a group go together."""

    def left(self, count: int) -> int:
        """The size of the network without the first batches."""
        return self._without(Counter(batch.group for batch in self.batches[:count]))

    def until(self, target: int) -> list[Unit]:
        """The units to remove to have no more left than the target."""
        return self.units(bisect_left(range(len(self.batches)), -target, key=lambda count: -self.left(count)))

    def units(self, count: int | None = None) -> list[Unit]:
        """The units of the first batches, or of all."""
        return [self.groups[batch.group].units[unit] for batch in self.batches[:count] for unit in batch.units]

    @property
    def smallest(self) -> int:
        """The size of the network without all that may go."""
        return self.left(len(self.batches))

    @property
    def largest_batch(self) -> int:
        """The most that a batch takes from the whole network, those that are gone already included."""
        lost = [
            {place: self.multiple * max(_sizes(group, place, self.size)) for place in group.members}
            for group in self.groups
        ]
        return max(self.size.without({}) - self.size.without(each) for each in lost)

    def _without(self, batches: Mapping[int, int]) -> int:
        """The size of the network without so many batches of each group."""
        lost = dict(self.gone)
        for number, count in batches.items():
            for place, after in self._lost[number].items():
                lost[place] = lost.get(place, 0) + after[count - 1]
        return self.size.without(lost)

    @cached_property
    def _lost(self) -> dict[int, dict[Dimension, list[float]]]:
        """By group and dimension: what is lost after each of the group's batches."""
        batches: dict[int, list[_Batch]] = {}
        for batch in self.batches:
            batches.setdefault(batch.group, []).append(batch)
        lost: dict[int, dict[Dimension, list[float]]] = {}
        for number, own in batches.items():
            group = self.groups[number]
            units = [group.units[unit].indices for batch in own for unit in batch.units]
            ends = list(accumulate(len(batch.units) for batch in own))
            lost[number] = {}
            for place in group.members:
                if place[0] in self.size.per_row:
                    after = list(accumulate(self.size.of_indices(place, indices[place]) for indices in units))
                    lost[number][place] = [after[end - 1] for end in ends]
        return lost


@dataclass(frozen=True)
class Candidates:
    """The units of a network that may go, and how they are ranked."""

    groups: Units
    free: Sequence[int]
    """The numbers of the groups that may lose units."""
    weights: Collection[str]
    """Those that are no biases and no normalisation."""
    counted: Collection[str]
    """Those of them that are selected to be pruned."""
    only_filters: bool
    size: NetworkSize
    least: Least
    scope: str
    """"global" ranks all units together, relative to their group; "layer" takes the same part of each group."""

    @property
    def parameters(self) -> list[str]:
        """What a mask without units is for: all that belongs to units that may go, and what density counts."""
        inside = (name for number in self.free for name, _ in self.groups.groups[number].members)
        return list(dict.fromkeys([*(name for name in inside if name in self.groups.shapes), *self.counted]))

    @property
    def free_producers(self) -> list[list[str]]:
        """For each group that may lose units, the weights that produce them."""
        return [self._producers(self.groups.groups[number]) for number in self.free]

    def ranked_by(self, group: UnitGroup) -> list[Dimension]:
        """The weights whose scores are those of the units."""
        inside = [place for place in group.members if place[0] in self.weights]
        return [place for place in inside if place in group.producers] if self.only_filters else inside

    def removal(self, scores: UnitScores, alive: Sequence[Tensor]) -> Removal:
        """The order in which units go."""
        batches = [batch for number in self.free for batch in self._batches(number, scores, alive[number])]
        return self._removal(sorted(batches, key=lambda batch: batch[:2]), alive)

    def _removal(self, batches: Sequence[_Batch], alive: Sequence[Tensor]) -> Removal:
        gone: dict[Dimension, float] = {}
        for group, which in zip(self.groups, alive, strict=True):
            for unit in _taken(group, ~which):
                for place, indices in unit.indices.items():
                    gone[place] = gone.get(place, 0) + self.size.of_indices(place, indices)
        return Removal(self.groups.groups, batches, gone, self.size, self.least.round_to)

    def _batches(self, number: int, scores: UnitScores, alive: Tensor) -> Iterator[_Batch]:
        group, (own, ascending) = self.groups.groups[number], self._ascending(number, scores, alive)
        size, rank = len(ascending), -math.inf
        mean = sum(own[unit] for unit in ascending) / max(size, 1) or 1.0
        for start, end in pairwise([0, *self._ends(number, size)]):
            batch = tuple(ascending[start:end])
            if self.scope == "layer":
                rank = (len(group) - size + end) / len(group)
            else:
                rank = max(rank, sum(own[unit] for unit in batch) / len(batch) / mean)
            yield _Batch(rank, number, batch)

    def _ends(self, number: int, size: int) -> range:
        """How many units of a group have gone after each of its batches, where so many were left."""
        multiple = self.least.round_to
        first = size % multiple or multiple  # what is over goes first, so that a multiple is left
        return range(first, size - self.least.of(self.groups.groups[number]) + 1, multiple)

    def _ascending(self, number: int, scores: UnitScores, alive: Tensor) -> tuple[list[float], list[int]]:
        """The scores of a group's units, and those that are left, the smallest first; the later of equals stays."""
        group, left = self.groups.groups[number], alive.nonzero()[:, 0].tolist()
        own: list[float] = scores(group).tolist()
        if not all(math.isfinite(own[unit]) for unit in left):
            raise InputError(
                f"cannot prune the units of {group.name}: their scores are NaN or infinite, the network has diverged; "
                "train it again with a lower learning rate"
            )
        return own, sorted(left, key=own.__getitem__)

    def at_rates(self, rate: Callable[[str], float], scores: UnitScores, alive: Sequence[Tensor]) -> Removal:
        """The units that go where each group loses the smallest rate of the weights that produce it."""
        batches = []
        for number in self.free:
            group = self.groups.groups[number]
            least = min(rate(name) for name in self._producers(group))
            enough = max(kept_count(len(group), 1 - least), self.least.of(group))
            stay = min(math.ceil(enough / self.least.round_to) * self.least.round_to, len(group))
            _, ascending = self._ascending(number, scores, alive[number])
            if gone := tuple(ascending[: max(len(ascending) - stay, 0)]):
                batches.append(_Batch(0, number, gone))
        return self._removal(batches, alive)

    def _producers(self, group: UnitGroup) -> list[str]:
        return producing_weights(group, self.weights)

    @property
    def smallest(self) -> int:
        """What is left where all that may go is gone; at most, as of units that differ in size the largest may stay."""
        lost: dict[Dimension, float] = {}
        for number in self.free:
            group = self.groups.groups[number]
            count = max(self._ends(number, len(group)), default=0)
            for place in group.members:
                lost[place] = lost.get(place, 0) + sum(sorted(_sizes(group, place, self.size))[:count])
        return self.size.without(lost)

    @property
    def whole(self) -> list[Tensor]:
        """All units of each group."""
        return [torch.ones(len(group), dtype=torch.bool) for group in self.groups]


def candidates(
    groups: Units,
    *,
    trained: Collection[str],
    weights: Collection[str],
    chosen: Collection[str],
    only_filters: bool,
    size: NetworkSize,
    least: Least,
    scope: str,
) -> Candidates:
    """The groups that may lose units: all their parameters train, and all weights that produce them are chosen.

    `only_filters` leaves those that convolutions alone produce.
    """
    free, frozen = list[int](), dict[str, None]()
    for number, group in enumerate(groups):
        produced_by = producing_weights(group, weights)
        if not produced_by or not all(name in chosen for name in produced_by):
            continue
        if only_filters and not set(produced_by) <= {name for name, _ in group.filters}:
            continue
        fixed = [name for name, _ in group.members if name in groups.shapes and name not in trained]
        frozen |= dict.fromkeys(fixed)
        if not fixed:
            free.append(number)
    if not free:
        raise InputError(f"no units can be removed: {_why_none(groups, list(frozen))}")
    least.check([groups.groups[number] for number in free])
    return Candidates(groups, free, weights, chosen, only_filters, size, least, scope)


def _why_none(groups: Units, frozen: Sequence[str]) -> str:
    if frozen:
        return f"{few(frozen)} do not train, and what does not train is not pruned; unfreeze them"
    if groups.groups:
        return "only, skip and the pattern leave no group of them; select more layers, or use pattern 'unit'"
    why = Counter(reason for reason in groups.pinned.values() if reason not in (TIED, KERNEL)).most_common(1)
    commonest = f" (the most common reason: {why[0][0]})" if why else ""
    return f"none of the network can shrink{commonest}; `pinned` of what rewound.units(...) gives says why"
