"""What `rewound.units` finds: which weights of a network must go together, and which cannot go.

A unit is what must go together for the network to become smaller: a filter, its normalisation, and what reads it. Units
of one kind form a group: the channels of a layer, or of all layers that a residual connection ties.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rewound.foundations.errors import check_kind, few
from rewound.foundations.quantities import counted
from rewound.method.pruning.mask import Mask, plain_name

TIED = "it is tied to what cannot shrink"
"""The reason given for a dimension that nothing pins by itself."""
KERNEL = "it is a dimension of a kernel"
Dimension = tuple[str, int]
"""A dimension of a parameter or buffer, by its name."""


@dataclass(frozen=True)
class Unit:
    """What goes together: for each dimension of a tensor, which of its indices."""

    indices: Mapping[Dimension, tuple[int, ...]]


@dataclass(frozen=True)
class UnitGroup:
    """Units of one kind."""

    members: tuple[Dimension, ...]
    units: tuple[Unit, ...]
    producers: tuple[Dimension, ...] = ()
    """Those members whose weights compute the units: filters, rows of linear layers, columns of an embedding."""
    filters: tuple[Dimension, ...] = ()
    """Those producers that are convolutions."""

    def __len__(self) -> int:
        return len(self.units)

    @property
    def name(self) -> str:
        """The tensor that it is known by: the first that puts it out."""
        return next((name for name, dim in self.members if dim == 0), self.members[0][0])

    def __repr__(self) -> str:
        places = few([f"{name}[{dim}]" for name, dim in self.members])
        return f"UnitGroup({counted(len(self), 'unit')} of {places})"


@dataclass(frozen=True)
class Units:
    """The groups of a network, and what cannot go with the reason."""

    groups: tuple[UnitGroup, ...]
    pinned: Mapping[Dimension, str]
    shapes: Mapping[str, tuple[int, ...]]
    """Of the network's parameters."""
    first_names: Mapping[str, str] = field(default_factory=dict)
    """Of a tied parameter, which has several names, the first, by each of the others."""

    def mask_without(self, gone: Iterable[Unit]) -> Mask:
        """The mask that removes units: all weights that belong to them, those of biases and normalisation included."""
        lost: dict[Dimension, list[int]] = {}
        for unit in gone:
            check_kind("each unit", unit, Unit, "give units of these groups, as groups.groups[0].units[:2]")
            for place, indices in unit.indices.items():
                if place[0] in self.shapes:
                    lost.setdefault(place, []).extend(indices)
        masks: dict[str, Tensor] = {}
        for (name, dim), away in lost.items():
            kept = masks.setdefault(name, torch.ones(self.shapes[name], dtype=torch.bool))
            kept.index_fill_(dim, torch.tensor(away), False)
        return Mask(masks)

    def whole(self, mask: Mask) -> Mask:
        """The mask that also removes what is left of units whose producing weights are all gone.

        >>> import rewound
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> rows = Mask({"0.weight": torch.tensor([[True, True], [False, False], [True, True]])})
        >>> rewound.units(model, (torch.zeros(1, 2),)).whole(rows)["2.weight"]
        tensor([[ True, False,  True]])
        """
        check_kind("mask", mask, Mask, "give a rewound.Mask")
        gone: list[Unit] = []
        while True:
            found = self.gone(mask, producers=True)
            if len(found) == len(gone):
                return mask
            gone = found
            removed = self.mask_without(gone)  # may leave nothing of the next layer's weights, hence again
            mask = Mask({name: _both(name, mask, removed) for name in {**mask, **removed}})

    def gone(self, mask: Mask, *, producers: bool = False) -> list[Unit]:
        """The units of which a mask removes all weights, or all of those that produce them."""
        removed = {name: ~kept for name, kept in self.by_first_name(mask).items()}
        found = []
        for group in self.groups:
            members = (group.producers if producers else ()) or [
                each for each in group.members if each[0] in self.shapes
            ]
            members = [(name, dim) for name, dim in members if name not in self.first_names]
            if not all(name in removed for name, _ in members):
                continue
            lost = {(name, dim): _gone_along(removed[name], dim) for name, dim in members}
            found += [
                unit
                for unit in group.units
                if all(flags[i] for place, flags in lost.items() for i in unit.indices[place])
            ]
        return found

    def by_first_name(self, mask: Mask) -> dict[str, Tensor]:
        """What a mask keeps of each parameter, a tied one under its first name; an error for another model's mask."""
        mask.check_shapes({plain_name(name): shape for name, shape in self.shapes.items()})
        found: dict[str, Tensor] = {}
        for name, kept in mask.items():
            first = self.first_names.get(name, name)
            found[first] = found[first] & kept.cpu() if first in found else kept.cpu()
        return found

    def __iter__(self) -> Iterator[UnitGroup]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def __repr__(self) -> str:
        return f"Units({counted(len(self.groups), 'group')}, {sum(map(len, self.groups))} units)"


def _gone_along(removed: Tensor, dim: int) -> list[bool]:
    return removed.movedim(dim, 0).reshape(removed.shape[dim], -1).all(1).tolist()


def _both(name: str, one: Mask, other: Mask) -> Tensor:
    """What two masks keep of a parameter that is in one of them, or in both."""
    kept = [mask[name].cpu() for mask in (one, other) if name in mask]
    return kept[0] & kept[-1]
