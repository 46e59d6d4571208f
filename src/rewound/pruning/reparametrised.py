"""Weights that a layer computes from others: a mask on what is trained must also be a mask on what is used.

`torch.nn.utils.parametrize` trains an original and uses a function of it. Where the function keeps zeros in place
(weight_norm, spectral_norm) the original is pruned, and ranked by its own magnitude; where it does not (orthogonal),
zeros in the original leave the weight dense.
"""

import copy
from collections.abc import Collection

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from rewound.pruning.mask import plain_name


def dense_originals(model: nn.Module, names: Collection[str]) -> list[str]:
    """The named parametrized originals whose zeros do not reach the weight that the layer uses.

    >>> from torch.nn.utils.parametrizations import orthogonal
    >>> dense_originals(orthogonal(nn.Linear(3, 3)), ["bias", "parametrizations.weight.original"])
    ['parametrizations.weight.original']
    """
    return [
        plain
        for path, weight in model.named_modules()
        if isinstance(weight, ParametrizationList)
        for name, _ in weight.named_parameters(recurse=False)
        if (plain := plain_name(f"{path}.{name}")) in names and not _keeps_zeros(weight, name)
    ]


@torch.no_grad()
def _keeps_zeros(weight: ParametrizationList, name: str) -> bool:
    trial = copy.deepcopy(weight).eval()  # in training, spectral_norm moves its vectors whenever it is used
    original = trial.get_parameter(name)
    pruned = (torch.rand(original.shape, generator=torch.Generator().manual_seed(0)) < 0.5).to(original.device)
    original.masked_fill_(pruned, 0)
    used = trial()
    return used.shape == original.shape and not bool(used[pruned].any())
