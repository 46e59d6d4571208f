"""Batch normalisation where several processes hold the parts of one batch: by the mean and variance of all of it.

`nn.BatchNorm` normalises over the batch that it is given. With N processes that is a slice, so that the network would
be another one. `synchronised` makes the layers of a model use the statistics of all slices, in the forward and in the
backward pass, and move their running statistics by those: N processes then compute what one does with the whole batch.

Layers that normalise groups of consecutive images (`GroupedBatchNorm2d`) need the statistics of other processes only
where a group spans several of them. Their running statistics move by the mean over all groups.
"""

from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm

from rewound.foundations.errors import InputError
from rewound.tasks.recipes.grouped_norm import GroupedBatchNorm2d, move_statistics

_KNOWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, GroupedBatchNorm2d)


def synchronised(model: nn.Module, processes: ProcessGroup) -> None:
    """Let the model's batch normalisation see the whole batch, of which each process holds an equal slice."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.forward = partial(_forward, module, processes)  # type: ignore[method-assign]


def check_normalisation(model: nn.Module, batch_size: int, count: int) -> None:
    """An error unless so many processes with equal slices of a batch can do the model's batch normalisation."""
    own = batch_size // count
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and type(module) not in _KNOWN:
            raise InputError(
                f"layer {name} is a {type(module).__name__}, whose statistics cannot be shared by {count} processes; "
                "use nn.BatchNorm2d, or give 1 GPU per run"
            )
        group = _group(module, batch_size)
        if batch_size % group or (own % group and group % own):
            raise InputError(
                f"{count} processes with {own} images of a batch each do not fit groups of {group}, by which layer "
                f"{name} normalises; give a number of GPUs per run with which a process has whole groups, or a group "
                "whole processes"
            )


def _group(layer: nn.Module, batch_size: int) -> int:
    """How many images are normalised together."""
    return min(layer.group, batch_size) if isinstance(layer, GroupedBatchNorm2d) else batch_size


def _forward(layer: _BatchNorm, processes: ProcessGroup, images: Tensor) -> Tensor:
    if not layer.training:
        return type(layer).forward(layer, images)  # by running statistics, which all processes have
    layer._check_input_dim(images)  # type: ignore[no-untyped-call]
    own, count = len(images), dist.get_world_size(processes)
    group = _group(layer, own * count)
    if isinstance(layer, GroupedBatchNorm2d) and own % group == 0:
        result, means, variances = layer.grouped(images)
        mean, variance = means.mean(0), variances.mean(0)
    else:
        result, mean, variance = normalised(images, layer.eps, _block(processes, group // own))
        if layer.affine:
            shape = (1, -1, *[1] * (images.ndim - 2))
            result = result * layer.weight.view(shape) + layer.bias.view(shape)
        result = result.to(images.dtype)
    if group < own * count:
        both = torch.stack([mean, variance])
        dist.all_reduce(both, group=processes)
        mean, variance = both / count
    move_statistics(layer, mean, variance, group * (images.numel() // images.shape[1] // own))
    return result


@lru_cache(maxsize=8)
def _block(processes: ProcessGroup, size: int) -> ProcessGroup:
    """Of the blocks of so many consecutive processes, the one with this process; all of them ask at the same time."""
    if size == dist.get_world_size(processes):
        return processes
    block: ProcessGroup
    block, _ = dist.new_subgroups(size, group=processes)  # type: ignore[no-untyped-call]
    return block


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
