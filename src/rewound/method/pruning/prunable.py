"""Which parameters of any module may be pruned: weights of layers, and neither biases nor normalisation."""

from torch import Tensor, nn

from rewound.method.pruning.mask import plain_parameters

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
