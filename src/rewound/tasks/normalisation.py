"""Batch normalisation where several processes hold the parts of one batch: by the mean and variance of all of it.

`nn.BatchNorm` normalises over the batch that it is given. With N processes that is a slice, so that the network would
be another one. `synchronised` makes the layers of a model use the statistics of all slices, in the forward and in the
backward pass, and move their running statistics by those: N processes then compute what one does with the whole batch.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm

from rewound.foundations.errors import InputError

_ORDINARY = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def synchronised(model: nn.Module, processes: ProcessGroup) -> None:
    """Let the model's batch normalisation see the whole batch, of which each process holds an equal slice."""
    for name, module in model.named_modules():
        if type(module) in _ORDINARY:
            module.forward = partial(_forward, module, processes)
        elif isinstance(module, _BatchNorm | nn.modules.lazy.LazyModuleMixin):
            raise InputError(
                f"layer {name} is a {type(module).__name__}, whose statistics cannot be shared by several processes; "
                "use nn.BatchNorm2d, or give 1 GPU per run"
            )


def _forward(layer: _BatchNorm, processes: ProcessGroup, images: Tensor) -> Tensor:
    if not layer.training:
        return type(layer).forward(layer, images)  # by running statistics, which all processes have
    layer._check_input_dim(images)  # type: ignore[no-untyped-call]
    normal, mean, variance = normalised(images, layer.eps, processes)
    if layer.track_running_stats and layer.running_mean is not None:
        assert layer.running_var is not None  # they come together
        assert layer.num_batches_tracked is not None
        layer.num_batches_tracked.add_(1)
        count = images.numel() // images.shape[1] * dist.get_world_size(processes)
        factor = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
        with torch.no_grad():
            layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), factor)
            layer.running_var.lerp_((variance * count / max(count - 1, 1)).to(layer.running_var.dtype), factor)
    if layer.affine:
        shape = (1, -1, *[1] * (images.ndim - 2))
        normal = normal * layer.weight.view(shape) + layer.bias.view(shape)
    return normal.to(images.dtype)


def normalised(values: Tensor, epsilon: float, processes: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """The values with mean 0 and variance 1 in each channel over the slices of all processes; that mean and variance.

    The result has at least float32. Statistics get no gradient of their own.
    """
    normal, mean, variance = _Normalised.apply(values, epsilon, processes)  # type: ignore[no-untyped-call]
    return normal, mean, variance


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, epsilon: float, processes: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        wide = values if values.dtype == torch.float64 else values.float()
        dims = [0, *range(2, values.ndim)]
        variance, mean = torch.var_mean(wide, dims, correction=0)
        own = torch.stack([mean, variance])
        slices = [torch.empty_like(own) for _ in range(dist.get_world_size(processes))]
        dist.all_gather(slices, own, group=processes)
        # In the same order everywhere, so that all processes have the same bits.
        means, variances = torch.stack(slices).unbind(1)
        mean = means.mean(0)
        variance = (variances + (means - mean).square()).mean(0)
        shape = (1, -1, *[1] * (values.ndim - 2))
        scale = (variance + epsilon).rsqrt().view(shape)
        normal = (wide - mean.view(shape)) * scale
        ctx.save_for_backward(normal, scale)
        ctx.dims, ctx.processes, ctx.dtype = dims, processes, values.dtype
        ctx.mark_non_differentiable(mean, variance)
        return normal, mean, variance

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        normal, scale = ctx.saved_tensors
        means = torch.stack([gradient.mean(ctx.dims), (gradient * normal).mean(ctx.dims)])
        dist.all_reduce(means, group=ctx.processes)
        means /= dist.get_world_size(ctx.processes)
        offset, slope = (part.view(scale.shape) for part in means)
        return (scale * (gradient - offset - normal * slope)).to(ctx.dtype), None, None
