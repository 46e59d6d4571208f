"""Batch normalisation over a whole batch or groups of it, by one process or by several that hold parts of the batch.

`GroupedBatchNorm2d` normalises each group of consecutive images by its own mean and variance. The authors trained on
eight TPU cores, and each normalised its 128 images by themselves; with the group as a number of images, one process and
several compute the same. A batch of at most one group is normalised as by `nn.BatchNorm2d`, and so is everything in
evaluation. The running statistics move once per batch, by the mean over the groups of their means and unbiased
variances. The authors' TPU cores did not share theirs; what a single core's statistics follow has the same expectation
and more noise.

`nn.BatchNorm` normalises over the batch that it is given. With N processes that is a slice, so that the network would
be another one. `synchronised` makes the layers of a model use the statistics of all slices, or of all that a group
spans, in the forward and in the backward pass, and move their running statistics by those: N processes then compute
what one does with the whole batch.
"""

from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm

from rewound.foundations.errors import InputError


class GroupedBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` over each `group` consecutive images by themselves; its parameters and buffers are the same.

    >>> norm, images = GroupedBatchNorm2d(3, group=2), torch.rand(4, 3, 5, 5)
    >>> torch.allclose(norm(images)[:2], nn.BatchNorm2d(3)(images[:2]), atol=1e-5)
    True
    """

    def __init__(self, features: int, group: int, eps: float = 1e-5, momentum: float | None = 0.1) -> None:
        super().__init__(features, eps, momentum)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        _check_variance(count := min(self.group, len(x)) * x.shape[2] * x.shape[3])
        if len(x) <= self.group:
            return super().forward(x)
        if len(x) % self.group:
            raise InputError(
                f"a batch of {len(x)} images is not a whole number of groups of {self.group}; "
                "give a batch size that is a multiple of the group"
            )
        result, mean, variance = normalised(self, x, self.group)
        _move_statistics(self, mean, variance, count)
        return result


_KNOWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, GroupedBatchNorm2d)


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


def synchronised(model: nn.Module, processes: ProcessGroup) -> None:
    """Let the model's batch normalisation see the whole batch, of which each process holds an equal slice."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.forward = partial(_synchronised_forward, module, processes)  # type: ignore[method-assign]


def _synchronised_forward(layer: _BatchNorm, processes: ProcessGroup, images: Tensor) -> Tensor:
    if not layer.training:
        return type(layer).forward(layer, images)  # by running statistics, which all processes have
    layer._check_input_dim(images)  # type: ignore[no-untyped-call]
    own, count = len(images), dist.get_world_size(processes)
    group = _group(layer, own * count)
    spanned = _block(processes, group // own) if group > own else None
    result, mean, variance = normalised(layer, images, min(group, own), spanned)
    if group < own * count:
        both = torch.stack([mean, variance])
        dist.all_reduce(both, group=processes)
        mean, variance = both / count
    _move_statistics(layer, mean, variance, group * (images.numel() // images.shape[1] // own))
    return result


def _group(layer: nn.Module, batch_size: int) -> int:
    """How many images are normalised together."""
    return min(layer.group, batch_size) if isinstance(layer, GroupedBatchNorm2d) else batch_size


@lru_cache(maxsize=8)
def _block(processes: ProcessGroup, size: int) -> ProcessGroup:
    """Of the blocks of so many consecutive processes, the one with this process; all of them ask at the same time."""
    if size == dist.get_world_size(processes):
        return processes
    block: ProcessGroup
    block, _ = dist.new_subgroups(size, group=processes)  # type: ignore[no-untyped-call]
    return block


@torch.no_grad()
def _move_statistics(layer: _BatchNorm, mean: Tensor, variance: Tensor, count: int) -> None:
    """Move the running statistics of a layer by a mean and a biased variance of `count` values in each channel."""
    if layer.running_mean is None or layer.running_var is None:
        return
    _check_variance(count)
    factor = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        factor = 1.0 / float(layer.num_batches_tracked) if factor is None else factor
    assert factor is not None  # only a module that counts its batches may have no momentum
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), factor)
    layer.running_var.lerp_((variance * (count / (count - 1))).to(layer.running_var.dtype), factor)


def _check_variance(count: int) -> None:
    if count < 2:
        raise InputError(
            "a group of images has one value in each channel, which has no variance; give larger images, or a larger "
            "batch-size and batch-norm-group"
        )


def normalised(
    layer: _BatchNorm, images: Tensor, group: int, processes: ProcessGroup | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What a layer makes of groups of `group` images in training; the mean over groups of their means and variances.

    With processes, the group is one, and each of them has an equal slice of it.
    """
    given = (images, layer.weight, layer.bias, group, layer.eps, processes)
    result, means, variances = _Normalised.apply(*given)  # type: ignore[no-untyped-call]
    return result, means.mean(0), variances.mean(0)


class _Normalised(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with the statistics of each group, and these statistics.

    The gradient is written out, because that of `torch.var_mean` would read the activations once more. Groups are a
    view of the batch, so that `torch.compile` makes the same passes over memory as for one group.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        group: int,
        eps: float,
        processes: ProcessGroup | None,
    ) -> tuple[Tensor, ...]:
        groups = x.view(-1, group, *x.shape[1:])
        exact = groups.to(torch.promote_types(x.dtype, torch.float32))  # of bfloat16 activations, too
        ctx.dims, ctx.processes = (1, *range(3, groups.ndim)), processes
        variance, mean = torch.var_mean(exact, ctx.dims, correction=0, keepdim=True)
        if processes is not None:
            variance, mean = _of_all_slices(variance, mean, processes)
        inverse = torch.rsqrt(variance + eps)
        scaled = (exact - mean) * (inverse if weight is None else inverse * _channels(weight, groups))
        ctx.save_for_backward(x, weight, mean, inverse)
        means, variances = mean.flatten(1), variance.flatten(1)
        ctx.mark_non_differentiable(means, variances)
        result = scaled if bias is None else scaled + _channels(bias, groups)
        return result.to(x.dtype).flatten(0, 1), means, variances

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        exact, above = (each.view(len(mean), -1, *x.shape[1:]).to(mean.dtype) for each in (x, gradient))
        centred = (exact - mean) * inverse
        total = above.sum(ctx.dims, keepdim=True)
        along = (above * centred).sum(ctx.dims, keepdim=True)
        means = torch.stack([total, along]) / (exact[0].numel() // exact.shape[2])
        if ctx.processes is not None:
            dist.all_reduce(means, group=ctx.processes)
            means = means / dist.get_world_size(ctx.processes)
        offset, slope = means
        below = (above - offset - centred * slope) * (inverse if weight is None else inverse * _channels(weight, exact))
        sums = (None, None) if weight is None else (along.sum(0).flatten(), total.sum(0).flatten())
        return below.to(x.dtype).flatten(0, 1), *sums, None, None, None


def _of_all_slices(variance: Tensor, mean: Tensor, processes: ProcessGroup) -> tuple[Tensor, Tensor]:
    """The variance and mean of a group of which each process has an equal slice."""
    own = torch.stack([mean, variance])
    slices = [torch.empty_like(own) for _ in range(dist.get_world_size(processes))]
    dist.all_gather(slices, own, group=processes)
    # In the same order everywhere, so that all processes have the same bits.
    means, variances = torch.stack(slices).unbind(1)
    mean = means.mean(0)
    return (variances + (means - mean).square()).mean(0), mean


def _channels(values: Tensor, groups: Tensor) -> Tensor:
    """A value for each channel, in the shape in which it meets groups of images."""
    return values.view(-1, *[1] * (groups.ndim - 3))
