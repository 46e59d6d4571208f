"""What is left of a network's tensors where units are gone.

A mask has the shapes of the large network, and says what is gone. What is left of each tensor (`KeptIndices`) follows
from it: `contracted` takes that from a state of the large network, and `expanded` puts it back among zeros.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rewound.foundations.copying import copied
from rewound.foundations.errors import InputError
from rewound.method.pruning.mask import Mask, plain_name
from rewound.method.structure.groups import Dimension, Unit, UnitGroup, Units

KeptIndices = Mapping[str, Mapping[int, Tensor]]
"""By the name of a parameter or buffer, for each dimension that shrank, the indices that are left."""


def kept_indices(groups: Units, mask: Mask, shapes: Mapping[str, Sequence[int]]) -> KeptIndices:
    """What is left of each tensor that loses something; an error for a mask that removes a part of a unit.

    Of a layer that is wholly gone the first unit is left. `shapes` are those of the large network's parameters and
    buffers.
    """
    gone = groups.gone(mask)
    given, expected = groups.by_first_name(mask), groups.by_first_name(groups.mask_without(gone))
    for name in {**given, **expected}:
        sides = [side[name] for side in (given, expected) if name in side]
        same = torch.equal(*sides) if len(sides) == 2 else bool(sides[0].all())
        if not same:
            raise InputError(
                f"the mask of {name} is not of whole units, so that no smaller network equals the masked one; "
                "complete the mask with rewound.units(...).whole(mask), or keep the network as it is"
            )
    lost = _lost(gone)
    for group in dead_groups(groups, gone):
        if any(len(lost[name, dim]) == shapes[name][dim] for name, dim in group.members):
            for place, indices in group.units[0].indices.items():
                lost[place].difference_update(indices)
    return _left(lost, shapes)


def kept_without(gone: Iterable[Unit], shapes: Mapping[str, Sequence[int]]) -> KeptIndices:
    """What is left of each tensor without some units."""
    return _left(_lost(gone), shapes)


def _lost(gone: Iterable[Unit]) -> dict[Dimension, set[int]]:
    lost: dict[Dimension, set[int]] = {}
    for unit in gone:
        for place, indices in unit.indices.items():
            lost.setdefault(place, set()).update(indices)
    return lost


def _left(lost: Mapping[Dimension, set[int]], shapes: Mapping[str, Sequence[int]]) -> KeptIndices:
    kept: dict[str, dict[int, Tensor]] = {}
    for (name, dim), away in lost.items():
        if away:
            left = [index for index in range(shapes[name][dim]) if index not in away]
            kept.setdefault(name, {})[dim] = torch.tensor(left)
    return kept


def contracted(tensors: Mapping[str, Tensor], kept: KeptIndices) -> dict[str, Tensor]:
    """What is left of tensors of the large network; those that lose nothing are copied."""
    return {name: cut(tensor, kept.get(plain_name(name), {})) for name, tensor in tensors.items()}


def cut(given: Tensor, kept: Mapping[int, Tensor]) -> Tensor:
    """What is left of a tensor, as a copy."""
    tensor = given
    for dim, left in kept.items():
        tensor = tensor.index_select(dim, left.to(tensor.device))
    found: Tensor = _copied_in_order(tensor, given)
    return found


def cut_copy(model: nn.Module, kept: KeptIndices) -> nn.Module:
    """A copy of a network with what is left of its tensors; what is gone of its weights is not copied first."""
    tensors, instead = tensors_of(model), dict[str, nn.Parameter]()
    for name in kept:
        if type(weight := tensors[name]) is nn.Parameter:
            instead[name] = nn.Parameter(cut(weight.detach(), kept[name]), weight.requires_grad)
    small = copied(model, [(tensors[name], smaller) for name, smaller in instead.items()])
    others = tensors_of(small)
    for name in kept.keys() - instead.keys():
        replace_data(others[name], cut(others[name].detach(), kept[name]))
    return small


def _copied_in_order(thing: Any, given: Any) -> Any:
    """A copy; a tensor has its dimensions in memory as the one that was given: channels stay last where they are."""
    if not isinstance(thing, Tensor):
        return copy.deepcopy(thing)  # a module's extra state
    order = sorted(range(given.ndim), key=lambda dim: -given.stride(dim))
    back = sorted(range(given.ndim), key=order.__getitem__)
    return thing.permute(order).contiguous().permute(back).clone()


def expanded(
    tensors: Mapping[str, Tensor], kept: KeptIndices, shapes: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    """Tensors of the small network in the shapes of the large one, with zeros where units are gone.

    >>> expanded({"bias": torch.tensor([5.0, 6.0])}, {"bias": {0: torch.tensor([1, 3])}}, {"bias": (4,)})
    {'bias': tensor([0., 5., 0., 6.])}
    """
    found = {}
    for name, given in tensors.items():
        tensor = given
        for dim, left in kept.get(plain_name(name), {}).items():
            size = list(tensor.shape)
            size[dim] = shapes[plain_name(name)][dim]
            tensor = tensor.new_zeros(size).index_copy_(dim, left.to(tensor.device), tensor.detach())
        found[name] = _copied_in_order(tensor, given)
    return found


def mask_of_dead_layers(mask: Mask, kept: KeptIndices) -> Mask:
    """The mask of the small network that keeps at zero what stands for layers that are wholly gone."""
    return Mask({name: left for name, left in contracted(mask, kept).items() if not bool(left.all())})


def dead_groups(groups: Units, gone: Iterable[Unit]) -> list[UnitGroup]:
    """The groups of which every unit is gone."""
    ids = {id(unit) for unit in gone}
    return [group for group in groups if all(id(unit) in ids for unit in group.units)]


def zero_gone(parameter: Tensor, kept: Mapping[int, Tensor]) -> None:
    """Set what is not kept of a parameter to zero."""
    for dim, left in kept.items():
        gone = torch.ones(parameter.shape[dim], dtype=torch.bool).index_fill_(0, left.cpu(), False)
        parameter.index_fill_(dim, gone.nonzero()[:, 0].to(parameter.device), 0)


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters and buffers, by plain name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors_of(model).items()}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, those that are not saved included, under each of their names."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return {plain_name(n): t for n, t in [*model.named_parameters(remove_duplicate=False), *buffers.items()]}


def replace_data(tensor: Tensor, smaller: Tensor) -> None:
    """Put other data, of another shape, into a tensor that others hold."""
    if tensor.shape != smaller.shape:
        tensor.grad = None
        # A loss of earlier that is still alive holds the node that accumulates this gradient, with the old shape.
        # Autograd makes a new one only where the type of the data changes.
        tensor.data = torch.empty(0, dtype=torch.float32 if tensor.dtype == torch.float64 else torch.float64)
    tensor.data = smaller.detach().clone()
