"""Batch normalisation over groups of a batch, as if each group were on a device of its own.

The authors trained on eight TPU cores, and each normalised its 128 images by their own mean and variance. With the
group as a number of images, one process and several compute the same. A group is that many consecutive images of the
batch; a batch of at most one group is normalised as by `nn.BatchNorm2d`, and so is everything in evaluation.

The running statistics move once per batch, by the mean over the groups of their means and unbiased variances. The
authors' TPU cores did not share theirs; what a single core's statistics follow has the same expectation and more noise.
"""

from typing import Any

import torch
from torch import Tensor, nn
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
        if not self.training or len(x) <= self.group:
            return super().forward(x)
        if len(x) % self.group:
            raise InputError(
                f"a batch of {len(x)} images is not a whole number of groups of {self.group}; "
                "give a batch size that is a multiple of the group"
            )
        normalised, mean, variance = self.grouped(x)
        move_statistics(self, mean.mean(0), variance.mean(0), len(x) // len(mean) * x.shape[2] * x.shape[3])
        return normalised

    def grouped(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What training makes of whole groups of images, and the mean and variance of each group in each channel."""
        normalised: Tensor
        normalised, mean, variance = _Normalised.apply(x, self.weight, self.bias, self.group, self.eps)  # type: ignore[no-untyped-call]
        return normalised, mean, variance


@torch.no_grad()
def move_statistics(layer: _BatchNorm, mean: Tensor, variance: Tensor, count: int) -> None:
    """Move the running statistics of a layer by a mean and a biased variance of `count` values in each channel."""
    if layer.running_mean is None or layer.running_var is None:
        return
    if count < 2:
        raise InputError(
            "a group of images has one value in each channel, which no variance can be told of; give larger images or "
            "a larger batch-norm-group"
        )
    factor = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        factor = 1.0 / float(layer.num_batches_tracked) if factor is None else factor
    assert factor is not None  # only a module that counts its batches may have no momentum
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), factor)
    layer.running_var.lerp_((variance * (count / (count - 1))).to(layer.running_var.dtype), factor)


class _Normalised(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with the statistics of each group, and these statistics.

    The gradient is written out, because that of `torch.var_mean` would read the activations once more. Groups are a
    view of the batch, so that `torch.compile` makes the same passes over memory as for one group.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, group: int, eps: float) -> tuple[Tensor, ...]:
        groups = x.view(-1, group, *x.shape[1:])
        exact = groups.to(weight.dtype)  # statistics of bfloat16 activations in float32
        variance, mean = torch.var_mean(exact, (1, 3, 4), correction=0, keepdim=True)
        inverse = torch.rsqrt(variance + eps)
        scaled = (exact - mean) * (inverse * _channels(weight)) + _channels(bias)
        ctx.save_for_backward(x, weight, mean, inverse)
        mean_of, variance_of = mean.flatten(1), variance.flatten(1)
        ctx.mark_non_differentiable(mean_of, variance_of)
        return scaled.to(x.dtype).flatten(0, 1), mean_of, variance_of

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        exact, above = (each.view(len(mean), -1, *x.shape[1:]).to(weight.dtype) for each in (x, gradient))
        centred = (exact - mean) * inverse
        total = above.sum((1, 3, 4), keepdim=True)
        along = (above * centred).sum((1, 3, 4), keepdim=True)
        count = exact.shape[1] * exact.shape[3] * exact.shape[4]
        below = (above - total / count - centred * (along / count)) * (inverse * _channels(weight))
        return below.to(x.dtype).flatten(0, 1), along.sum(0).flatten(), total.sum(0).flatten(), None, None


def _channels(values: Tensor) -> Tensor:
    return values[:, None, None]
