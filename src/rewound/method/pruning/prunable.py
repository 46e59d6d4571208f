"""Which parameters of any module may be pruned: weights of layers, and neither biases nor normalisation.

Some weights a layer computes from others, and a mask on what is trained must also be a mask on what is used.
`torch.nn.utils.parametrize` trains an original and uses a function of it. Where the function keeps zeros in place
(weight_norm, spectral_norm) the original is pruned, and ranked by its own magnitude; where it does not (orthogonal),
zeros in the original leave the weight dense. Both norms divide by a norm, weight_norm by that of each row and
spectral_norm by that of the matrix: where nothing is left, that is 0/0, so a weight must stay there.
"""

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from rewound.foundations.copying import copied
from rewound.method.pruning.mask import plain_name, plain_parameters

_NORMALISATION = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)


def is_prunable(weight: Tensor) -> bool:
    """Whether it is of floating point and has at least two dimensions larger than 1."""
    return weight.is_floating_point() and sum(size > 1 for size in weight.shape) >= 2


def prunable_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The default prunable set of any module, by plain name.

    Floating-point parameters with at least two dimensions larger than 1, outside normalisation layers, tied ones once.
    """
    normalised = {
        id(p)
        for module in model.modules()
        if isinstance(module, _NORMALISATION)
        for p in module.parameters(recurse=False)
    }
    parameters = plain_parameters(model, tied=False)
    return {name: p for name, p in parameters.items() if is_prunable(p) and id(p) not in normalised}


def normalisation_scales(model: nn.Module) -> list[str]:
    """The plain names of the weights of normalisation layers.

    >>> normalisation_scales(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))
    ['1.weight']
    """
    return _weights_of(model, _NORMALISATION)


def embeddings(model: nn.Module) -> list[str]:
    """The plain names of the tables that rows are looked up in.

    >>> embeddings(nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2)))
    ['0.weight']
    """
    return _weights_of(model, (nn.Embedding, nn.EmbeddingBag))


def _weights_of(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[str]:
    """The plain names of the weights of layers of these kinds."""
    return [
        plain_name(f"{path}.weight".lstrip("."))
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, kinds) and isinstance(getattr(module, "weight", None), nn.Parameter)
    ]


def dense_originals(model: nn.Module, names: Collection[str]) -> list[str]:
    """The named parametrized originals whose zeros do not reach the weight that the layer uses.

    >>> from torch.nn.utils.parametrizations import orthogonal
    >>> dense_originals(orthogonal(nn.Linear(3, 3)), ["bias", "parametrizations.weight.original"])
    ['parametrizations.weight.original']
    """
    return [plain for plain, weight, name in _originals(model) if plain in names and not _keeps_zeros(weight, name)]


def divided_by_norm(model: nn.Module, names: Collection[str]) -> dict[str, int | None]:
    """The named weights that are divided by their norm, with the dimension along which each part has its own.

    None stands for a norm over all of the weight.

    >>> from torch.nn.utils.parametrizations import spectral_norm, weight_norm
    >>> model = nn.Sequential(weight_norm(nn.Linear(3, 3)), spectral_norm(nn.Linear(3, 3)))
    >>> divided_by_norm(model, [name for name, _ in model.named_parameters()])
    {'0.parametrizations.weight.original1': 0, '1.parametrizations.weight.original': None}
    """
    found = {plain: _norm_dimension(weight, name) for plain, weight, name in _originals(model) if plain in names}
    for path, module in model.named_modules():  # torch.nn.utils.weight_norm, which is older than parametrizations
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                found[plain_name(f"{path}.{hook.name}_v".lstrip("."))] = [None if hook.dim < 0 else hook.dim]
            elif isinstance(hook, SpectralNorm):
                found[plain_name(f"{path}.{hook.name}_orig".lstrip("."))] = [None]
    return {name: dimensions[0] for name, dimensions in found.items() if dimensions and name in names}


def _originals(model: nn.Module) -> Iterator[tuple[str, ParametrizationList, str]]:
    """Every original: its plain name in the model, the weight that is computed from it, its name there."""
    for path, weight in model.named_modules():
        if isinstance(weight, ParametrizationList):
            for name, _ in weight.named_parameters(recurse=False):
                yield plain_name(f"{path}.{name}"), weight, name


@torch.no_grad()
def _keeps_zeros(weight: ParametrizationList, name: str) -> bool:
    trial = copied(weight).eval()  # in training, spectral_norm moves its vectors whenever it is used
    original = trial.get_parameter(name)
    pruned = (torch.rand(original.shape, generator=torch.Generator().manual_seed(0)) < 0.5).to(original.device)
    original.masked_fill_(pruned, 0)
    used = trial()
    # Where all of a row was pruned, 0/0 says nothing.
    return used.shape == original.shape and not bool(used[pruned & used.isfinite()].any())


@torch.no_grad()
def _norm_dimension(weight: ParametrizationList, name: str) -> list[int | None]:
    """The first dimension along which a slice of zeros makes the weight not finite, if any; None: zeros everywhere."""
    trial = copied(weight).eval()
    original = trial.get_parameter(name)
    values = torch.randn(original.shape, generator=torch.Generator().manual_seed(0)).to(original)
    dimensions: list[int | None] = []
    for dimension in (*range(original.ndim), None):
        original.copy_(values)
        if not dimensions and trial().isfinite().all():  # else other things are not finite, and pruning says so
            (original if dimension is None else original.select(dimension, 0)).zero_()
            if not trial().isfinite().all():
                dimensions.append(dimension)
    return dimensions
