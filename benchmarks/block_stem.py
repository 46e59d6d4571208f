"""Another way to compute ResNet-50's first layers on 224 pixels, which is not in the package: is it worth it?

    PYTHONPATH=src python benchmarks/block_stem.py            the first layers by themselves, on a GPU
    PYTHONPATH=src python benchmarks/block_stem.py --smoke    whether both ways agree, in small, on a CPU

`imagenet.py --only resident-256-blocks` measures whole training steps with it. A convolution of 7x7 with stride 2 over
3 colours is one of 4x4 over 12 channels, which are blocks of 2x2 pixels; with channels of zeros up to 16 no kernel has
to pad them. The pool says for each window which of its pixels was the largest, and its backward pass looks at the at
most four windows of a pixel. In torch's own form, compiled, the backward pass of the pool takes 1.5 ms of a step of
40 ms, where reading and writing take 0.2.

Milliseconds of stem, normalisation, ReLU and pool, forward and backward, 256 images, on one NVIDIA H200, torch 2.11, in
a first form of this script with another written-out pool: 5.9 as in the package, 3.9 with both.
"""

import argparse
import math
from collections import OrderedDict
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rewound.tasks.recipes.resnet import ConvNorm, ResNet, SamePool


class BlockStem(ConvNorm):
    """A convolution of 7x7 with stride 2 over images of even size."""

    def forward(self, x: Tensor) -> Tensor:
        # Window i begins at pixel 2i - 3, and with a column of zeros before its weights at the even 2i - 4.
        blocks, weight = _blocks(F.pad(x, (4, 2, 4, 2))), _blocks(F.pad(self.weight, (1, 0, 1, 0)))
        normalised: Tensor = self.bn(F.conv2d(blocks, weight))
        return normalised


def _blocks(x: Tensor) -> Tensor:
    """Blocks of 2x2 pixels as channels, with channels of zeros up to a multiple of 16."""
    n, channels, height, width = x.shape
    blocks = x.reshape(n, channels, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
    return F.pad(blocks, (0, 0, 0, 0, 0, -4 * channels % 16)).contiguous(memory_format=torch.channels_last)


class WindowPool(SamePool):
    """The pool over images of even size."""

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = _Pooled.apply(x)  # type: ignore[no-untyped-call]
        return pooled


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        padded, (height, width) = F.pad(x, (0, 1, 0, 1), value=-math.inf), x.shape[-2:]
        largest, which = padded[..., :height:2, :width:2], torch.zeros((), dtype=torch.uint8, device=x.device)
        for number in range(1, 9):  # the other pixels of each window
            row, column = divmod(number, 3)
            pixel = padded[..., row : row + height - 1 : 2, column : column + width - 1 : 2]
            larger = (pixel > largest) | pixel.isnan()  # what is not a number stays so
            largest, which = torch.where(larger, pixel, largest), torch.where(larger, number, which).to(torch.uint8)
        ctx.save_for_backward(which)
        return largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (which,) = ctx.saved_tensors
        rows, columns = (torch.arange(2 * size, device=gradient.device) for size in gradient.shape[-2:])
        total = torch.zeros((), device=gradient.device)
        for above, left in product((0, 1), repeat=2):
            i, j = (rows // 2 - above)[:, None], columns // 2 - left
            row, column = rows[:, None] - 2 * i, columns - 2 * j
            inside = (i >= 0) & (j >= 0) & (row < 3) & (column < 3)
            windows = (..., i.clamp_min(0), j.clamp_min(0))
            total = total + torch.where(inside & (which[windows] == 3 * row + column), gradient[windows], 0.0)
        return total.to(gradient.dtype)


def with_blocks(network: nn.Module) -> nn.Module:
    """A ResNet with the other way to compute its first layers; its tensors stay as they are."""
    network.stem.__class__, network.pool.__class__ = BlockStem, WindowPool
    return network


def first_layers(group: int) -> nn.Module:
    """Stem, normalisation over groups, ReLU and pool."""
    generator = torch.Generator().manual_seed(0)
    network = ResNet((1,), (64,), generator=generator, stem_size=7, stem_stride=2, pool=True, batch_norm_group=group)
    return nn.Sequential(OrderedDict(list(network.named_children())[:3]))


def measured(network: nn.Module, images: Tensor, above: Tensor, *, compiled: bool) -> tuple[list[Tensor], float]:
    """The gradients, and the milliseconds of a forward and a backward pass on a GPU."""
    forward = torch.compile(network, dynamic=False) if compiled else network

    def step() -> list[Tensor]:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=compiled):
            result = forward(images)
        return list(torch.autograd.grad(result, list(network.parameters()), above))

    gradients = step()
    if not compiled:
        return gradients, math.nan
    from triton.testing import do_bench

    return gradients, do_bench(step, warmup=20, rep=200, return_mode="median")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    smoke = parser.parse_args().smoke
    device, n, size, kind = ("cpu", 4, 32, torch.float64) if smoke else ("cuda", 256, 224, torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    images, above = (torch.rand(shape, generator=draw) for shape in ((n, 3, size, size), (n, 64, size // 4, size // 4)))
    images, above = (each.to(device, kind).to(memory_format=torch.channels_last) for each in (images, above))
    found = {}
    with torch.backends.cudnn.flags(benchmark=True, benchmark_limit=0):
        for name in ("as in the package", "with blocks"):
            network = first_layers(n // 2).to(device).train()
            network = network.double() if smoke else network.to(memory_format=torch.channels_last)
            network = with_blocks(network) if name == "with blocks" else network
            found[name], took = measured(network, images, above, compiled=not smoke)
            print(name, "" if smoke else f"{took:.2f} ms", flush=True)
    for one, other in zip(*found.values(), strict=True):
        difference = float((one - other).double().norm() / one.double().norm())
        print(f"gradients differ by {difference:.1e} of their size")
        assert difference < (1e-12 if smoke else 1e-2)


if __name__ == "__main__":
    main()
