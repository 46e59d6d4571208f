"""Networks of a recipe that have lost units: network = recipe + what is left of each tensor (`KeptIndices`).

A slim recipe has the data, loss, optimizer, schedule and evaluation of its recipe, and a smaller model. So `train`,
`evaluate` and fleets treat it as any other. Pruning and rewinding happen in the shapes of the large network:
`expanded_state` takes a slim state there, and `cut_state` brings it back.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from rewound.foundations.copying import copied
from rewound.foundations.errors import InputError
from rewound.method.pruning.mask import Mask, plain_name
from rewound.method.structure.kept import (
    KeptIndices,
    contracted,
    cut,
    expanded,
    kept_indices,
    replace_data,
    shapes_of,
    tensors_of,
)
from rewound.method.structure.slimming import slim_to
from rewound.tasks.recipe import Recipe
from rewound.tasks.training import State

_MOST = 64  # slim recipes that are remembered, each with a model
_known: dict[tuple[Recipe, object], Recipe] = {}


def kept_by(recipe: Recipe, mask: Mask) -> KeptIndices:
    """What a mask of whole units leaves of the tensors of a recipe's network."""
    return kept_indices(recipe.units, mask, shapes_of(recipe.skeleton))


def slimmed(recipe: Recipe, kept: KeptIndices) -> Recipe:
    """The recipe whose model has what is left of the tensors; it is one and the same for all networks of these sizes.

    >>> from rewound.tasks.recipes.digits import Digits
    >>> groups = Digits().units
    >>> inner = next(group for group in groups if group.name == "stage1.block1.conv1.weight")
    >>> smaller = slimmed(Digits(), kept_by(Digits(), groups.mask_without(inner.units[:30])))
    >>> smaller.label(), tuple(smaller.model(1).stage1.block1.conv1.weight.shape)
    ('digits', (2, 32, 3, 3))
    """
    # The sizes suffice: which indices are left is said by what a state holds, and every model is loaded with a state.
    # Buffers that no state holds need the indices themselves.
    unsaved = _unsaved(recipe.skeleton)
    sizes = tuple(
        (name, dim, tuple(left.tolist()) if name in unsaved else len(left))
        for name, dims in kept.items()
        for dim, left in dims.items()
    )
    if (recipe, sizes) not in _known:
        while len(_known) >= _MOST:
            _known.pop(next(iter(_known)))
        _known[recipe, sizes] = _slim_recipe(recipe, kept)
    return _known[recipe, sizes]


def _unsaved(model: nn.Module) -> set[str]:
    """The names of the buffers that a state of the model does not hold."""
    return tensors_of(model).keys() - {plain_name(name) for name in model.state_dict()}


def _slim_recipe(recipe: Recipe, kept: KeptIndices) -> Recipe:
    """A recipe of a class of its own, as recipes of one class with the same fields are equal."""
    template = slim_to(recipe.skeleton, kept, recipe.example()).model
    _keep_layout(recipe.skeleton, template)

    unsaved = _unsaved(recipe.skeleton)

    def model(self: Recipe, seed: int) -> nn.Module:
        made = copied(template)
        if unsaved:  # they may depend on the seed
            large, small = tensors_of(recipe.model(seed)), tensors_of(made)
            for name in unsaved:
                replace_data(small[name], cut(large[name], kept.get(name, {})))
        return made

    def source_digest(self: Recipe) -> str:
        return recipe.source_digest()

    def reduced(self: Recipe) -> tuple[Any, ...]:
        return slimmed, (recipe, kept)

    parts = {"name": recipe.label(), "model": model, "source_digest": source_digest, "__reduce__": reduced}
    kind = cast(type[Recipe], type(f"Slim{type(recipe).__name__}", (type(recipe),), parts))
    slim = object.__new__(kind)
    vars(slim).update(recipe.__getstate__())  # its fields, which the recipe has checked
    return slim


def _keep_layout(large: nn.Module, small: nn.Module) -> None:
    """Convolutions of images whose channels come last in memory stay so: cutting has made them ordinary tensors."""
    tensors = dict(large.named_parameters())
    for name, parameter in small.named_parameters():
        given = tensors[name]
        if given.ndim == 4 and not given.is_contiguous() and given.is_contiguous(memory_format=torch.channels_last):
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def cut_state(state: State, kept: KeptIndices) -> State:
    """What is left of a state of the large network."""
    return replace(state, model=contracted(state.model, kept), slots=_slots(state, kept, None))


def expanded_state(state: State, kept: KeptIndices, shapes: Mapping[str, tuple[int, ...]]) -> State:
    """A slim state in the shapes of the large network, with zeros where units are gone."""
    return replace(state, model=expanded(state.model, kept, shapes), slots=_slots(state, kept, shapes))


def _slots(state: State, kept: KeptIndices, shapes: Mapping[str, tuple[int, ...]] | None) -> dict[str, Tensor]:
    """The optimizer's slots, cut or, to these shapes, expanded as their parameters are; step counts as they are."""
    found = {}
    for name, slot in state.slots.items():
        kind, parameter = name.split("/", 1)
        if parameter not in kept or slot.ndim == 0:
            found[name] = slot.clone()
            continue
        if slot.shape != state.model[parameter].shape:
            raise InputError(
                f"slim networks need an optimizer whose state has the shape of the weights, and {kind} of {parameter} "
                f"has the shape {tuple(slot.shape)}, not {tuple(state.model[parameter].shape)}; leave out slim, or "
                "use another optimizer"
            )
        one = {parameter: slot}
        found[name] = (contracted(one, kept) if shapes is None else expanded(one, kept, shapes))[parameter]
    return found
