"""Masks that other tools made: torch.nn.utils.prune's, and weights whose zeros are the mask."""

from collections.abc import Mapping

from torch import Tensor, nn

from rewound.foundations.errors import InputError, check_kind
from rewound.method.pruning.mask import Mask, by_plain_name, first_names
from rewound.method.pruning.prunable import is_prunable, prunable_weights


def mask_of_zeros(weights: nn.Module | Mapping[str, Tensor]) -> Mask:
    """The mask that keeps what is not zero, of a model's prunable weights or of the matrices in a state_dict.

    >>> import torch
    >>> mask_of_zeros({"weight": torch.tensor([[0.5, 0.0], [0.0, -0.1]]), "bias": torch.zeros(2)})
    Mask(1 tensors, 2 of 4 weights kept, density 0.5)
    """
    if pruned := _pruned_by_torch(state := _plain(weights)):
        raise InputError(f"{pruned[0]} was pruned by torch.nn.utils.prune; use from_torch_prune")
    chosen: Mapping[str, Tensor] = (
        prunable_weights(weights)
        if isinstance(weights, nn.Module)
        else _once({name: t for name, t in state.items() if isinstance(t, Tensor) and is_prunable(t)})
    )
    if not chosen:
        raise InputError("no weights to read a mask from: none is of floating point with two dimensions larger than 1")
    return Mask({name: weight.detach() != 0 for name, weight in chosen.items()})


def from_torch_prune(pruned: nn.Module | Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Mask]:
    """The plain state_dict and the mask of what torch.nn.utils.prune pruned.

    >>> from torch.nn.utils import prune
    >>> layer = prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=0.75)
    >>> state, mask = from_torch_prune(layer)
    >>> sorted(state), mask.kept
    (['bias', 'weight'], 4)
    """
    tensors = _plain(pruned)
    masks = {name: _kept(name, tensors) for name in _pruned_by_torch(tensors)}
    if not masks:
        raise InputError(
            "nothing here was pruned by torch.nn.utils.prune: no two names end in _orig and _mask; "
            "after prune.remove, use mask_of_zeros"
        )
    state = {}
    for name, tensor in tensors.items():
        if (plain := name.removesuffix("_orig")) in masks:
            state[plain] = tensor.masked_fill(~masks[plain], 0)
        elif name.removesuffix("_mask") not in masks:
            state[name] = tensor
    return state, Mask(masks)


def _plain(source: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    check_kind("weights", source, (nn.Module, Mapping), "give a model, or its state_dict")
    state = source.state_dict() if isinstance(source, nn.Module) else source
    return by_plain_name(state)


def _once(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tied weights count once: under their first name."""
    first = first_names(tensors)
    return {name: tensor for name, tensor in tensors.items() if first[name] == name}


def _pruned_by_torch(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of parameters for which torch.nn.utils.prune has put two others there."""
    plain = (name.removesuffix("_orig") for name in tensors if name.endswith("_orig"))
    return [name for name in plain if f"{name}_mask" in tensors]


def _kept(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    weight, mask = tensors[f"{name}_orig"], tensors[f"{name}_mask"]
    kept = mask != 0
    if mask.shape != weight.shape or bool((mask[kept] != 1).any()):
        raise InputError(f"the mask of {name} must be of zeros and ones in the shape {tuple(weight.shape)}")
    return kept
