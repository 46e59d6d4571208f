"""The authors' residual networks, of any depth and width: for small images, and for ImageNet (`resnet34`, `resnet50`).

    stem 3x3 - BN - ReLU | stages of blocks | global mean | dense
    block: conv 3x3 - BN - ReLU - conv 3x3 - BN - add - ReLU         (v1: the activation follows the sum)

The first block of EVERY stage, also of the first, has a 1x1 projection with BN as its shortcut; stages after the first
halve the resolution. `blocks=(n, n, n)` with widths 16, 32 and 64 is ResNet-(6n+2): 271,152 prunable weights at n = 3.
Convolutions start from a truncated normal of variance 1/fan-in, not He's 2/fan-in.

For ImageNet the stem is 7x7 with stride 2 and a 3x3 max pool behind it, the last normalisation of every block starts
at 0, batches may be normalised in groups (`normalisation`), and ResNet-50 has bottlenecks with the stride on their 3x3:
    block: conv 1x1 - BN - ReLU - conv 3x3 - BN - ReLU - conv 1x1 to four times the width - BN - add - ReLU
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rewound.foundations.errors import InputError
from rewound.method.costs import Add
from rewound.tasks.normalisation import GroupedBatchNorm2d

EXPANSION = 4
"""A bottleneck's block puts out so many times its width."""


class ConvNorm(nn.Conv2d):
    """A convolution without bias, followed by its batch normalisation `bn`."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, size, stride, padding=size // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        normalised: Tensor = self.bn(super().forward(x))
        return normalised


class Stem(ConvNorm):
    """The first layer, in training on a GPU in the form that is faster there (`blocks_convolved`)."""

    def forward(self, x: Tensor) -> Tensor:
        sizes = (*self.kernel_size, *self.stride, *(size % 2 for size in x.shape[-2:]))
        if sizes != (7, 7, 2, 2, 0, 0) or not _is_compiled_training(self, x):
            return super().forward(x)
        normalised: Tensor = self.bn(blocks_convolved(x, self.weight))
        return normalised


def blocks_convolved(x: Tensor, weight: Tensor) -> Tensor:
    """A convolution of 7x7 with stride 2 and padding 3 over images of even size, as one of 4x4 over blocks of 2x2.

    Blocks of 2x2 pixels become channels, 12 of the 3 colours, with zeros up to 16, for which kernels are made; they
    are slow for 3. The weights are the same: window i begins at pixel 2i - 3, or with a column of zeros before them at
    the even 2i - 4.
    """
    return F.conv2d(_blocks(F.pad(x, (4, 2, 4, 2))), _blocks(F.pad(weight, (1, 0, 1, 0))))


def _blocks(x: Tensor) -> Tensor:
    n, channels, height, width = x.shape
    blocks = x.reshape(n, channels, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
    return F.pad(blocks, (0, 0, 0, 0, 0, -4 * channels % 16)).contiguous(memory_format=torch.channels_last)


def _is_compiled_training(module: nn.Module, x: Tensor) -> bool:
    return module.training and x.is_cuda and torch.compiler.is_dynamo_compiling()


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int, project: bool) -> None:
        super().__init__()
        self.proj = ConvNorm(inputs, outputs, 1, stride) if project else nn.Identity()
        self.conv1 = ConvNorm(inputs, outputs, 3, stride)
        self.conv2 = ConvNorm(outputs, outputs, 3)
        self.relu = nn.ReLU()
        self.add = Add()

    def forward(self, x: Tensor) -> Tensor:
        branch = self.conv2(self.relu(self.conv1(x)))
        activated: Tensor = self.relu(self.add(branch, x, self.proj))
        return activated


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 ones, the last to four times the width, and a shortcut around them."""

    def __init__(self, inputs: int, width: int, stride: int, project: bool) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.proj = ConvNorm(inputs, outputs, 1, stride) if project else nn.Identity()
        self.conv1 = ConvNorm(inputs, width, 1)
        self.conv2 = ConvNorm(width, width, 3, stride)
        self.conv3 = ConvNorm(width, outputs, 1)
        self.relu = nn.ReLU()
        self.add = Add()

    def forward(self, x: Tensor) -> Tensor:
        branch = self.conv3(self.relu(self.conv2(self.relu(self.conv1(x)))))
        activated: Tensor = self.relu(self.add(branch, x, self.proj))
        return activated


class SamePool(nn.MaxPool2d):
    """A 3x3 max pool with stride 2 that pads as TensorFlow's "SAME" does: an even size at its end alone."""

    def __init__(self) -> None:
        super().__init__(3, 2, ceil_mode=True)

    def forward(self, x: Tensor) -> Tensor:
        odd = [size % 2 for size in x.shape[-2:]]
        if odd == [0, 0] and _is_compiled_training(self, x):
            pooled: Tensor = WindowPool.apply(x)  # type: ignore[no-untyped-call]
            return pooled
        # A window may reach beyond the end of an even size; an odd one is padded on both sides.
        return F.max_pool2d(x, 3, 2, odd, ceil_mode=True)


class WindowPool(torch.autograd.Function):
    """The pool over images of even size, with a backward pass that is faster when it is compiled.

    The forward pass keeps which of its nine pixels each window took. A pixel lies in at most four windows, and the
    backward pass asks each of them whether it took this pixel. Torch's own would ask with indices of eight bytes.
    """

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


class ResNet(nn.Sequential):
    """A residual network whose weights are drawn from `generator` alone, on the generator's device.

    >>> net = ResNet((1, 1), (4, 8), channels=1, generator=torch.Generator().manual_seed(0))
    >>> net(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    >>> [name for name, _ in net.named_parameters() if name.startswith("stage1.block1.proj")]
    ['stage1.block1.proj.weight', 'stage1.block1.proj.bn.weight', 'stage1.block1.proj.bn.bias']
    """

    def __init__(
        self,
        blocks: Sequence[int] = (3, 3, 3),
        widths: Sequence[int] = (16, 32, 64),
        *,
        generator: torch.Generator,
        channels: int = 3,
        classes: int = 10,
        stem_size: int = 3,
        stem_stride: int = 1,
        pool: bool = False,
        bottleneck: bool = False,
        zero_last: bool = False,
        batch_norm_momentum: float = 0.003,
        batch_norm_group: int | None = None,
    ) -> None:
        if len(blocks) != len(widths) or min((*blocks, *widths), default=0) < 1:
            raise InputError(
                f"blocks={tuple(blocks)} and widths={tuple(widths)} must have the same number of entries, at least "
                f"one, all positive; give the number of blocks and the width of each stage"
            )
        with torch.device("meta"):  # PyTorch's own initialisation would draw from the global generator
            stem = Stem(channels, widths[0], stem_size, stem_stride)
            pooled = {"pool": SamePool()} if pool else {}
            block = Bottleneck if bottleneck else Block
            layers = {"stem": stem, "relu": nn.ReLU(), **pooled, **_layers(blocks, widths, classes, block)}
            super().__init__(OrderedDict(layers))
            for module in list(self.modules()):
                if batch_norm_group is not None and isinstance(module, ConvNorm):
                    module.bn = GroupedBatchNorm2d(module.out_channels, batch_norm_group)
        self.to_empty(device=generator.device)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = batch_norm_momentum
            _initialise(module, generator)
        for module in self.modules():
            if zero_last and isinstance(module, Block | Bottleneck):
                nn.init.zeros_((module.conv3 if isinstance(module, Bottleneck) else module.conv2).bn.weight)


def _for_imagenet(
    generator: torch.Generator,
    *,
    bottleneck: bool,
    classes: int = 1000,
    small_images: bool = False,
    batch_norm_group: int | None = None,
) -> ResNet:
    """A network as the authors trained it on ImageNet.

    Small images, of 64 pixels, have a 3x3 stem with stride 2 and no pool, which leaves 32x32 to the first stage.
    """
    return ResNet(
        (3, 4, 6, 3),
        (64, 128, 256, 512),
        generator=generator,
        classes=classes,
        stem_size=3 if small_images else 7,
        stem_stride=2,
        pool=not small_images,
        bottleneck=bottleneck,
        zero_last=True,
        batch_norm_momentum=0.1,
        batch_norm_group=batch_norm_group,
    )


resnet34 = partial(_for_imagenet, bottleneck=False)
"""21,783,744 prunable weights."""
resnet50 = partial(_for_imagenet, bottleneck=True)
"""25,502,912 prunable weights."""


def _layers(
    blocks: Sequence[int], widths: Sequence[int], classes: int, kind: type[Block] | type[Bottleneck]
) -> dict[str, nn.Module]:
    """All that follows the stem."""
    layers: dict[str, nn.Module] = {}
    inputs = widths[0]
    for stage, (count, width) in enumerate(zip(blocks, widths, strict=True), start=1):
        outputs = width * EXPANSION if kind is Bottleneck else width
        first = kind(inputs, width, stride=1 if stage == 1 else 2, project=True)
        others = [kind(outputs, width, stride=1, project=False) for _ in range(count - 1)]
        named = {f"block{number}": block for number, block in enumerate([first, *others], start=1)}
        layers[f"stage{stage}"] = nn.Sequential(OrderedDict(named))
        inputs = outputs
    return layers | {"mean": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "dense": nn.Linear(inputs, classes)}


@torch.no_grad()
def _initialise(module: nn.Module, generator: torch.Generator) -> None:
    if isinstance(module, nn.BatchNorm2d):
        module.reset_parameters()
    elif isinstance(module, nn.Conv2d):
        module.weight.uniform_(-1, 1, generator=generator)
        fan_in = module.weight[0].numel()
        module.weight.copy_(_truncated_normal(module.weight) / math.sqrt(fan_in))
    elif isinstance(module, nn.Linear):
        module.weight.normal_(std=0.01, generator=generator)
        module.bias.zero_()


def _truncated_normal(uniform: Tensor) -> Tensor:
    # The inverse distribution function of a normal cut at two standard deviations, scaled to variance 1 after the cut.
    # nn.init.trunc_normal_ changed its draws for one seed between torch releases.
    within = math.erf(math.sqrt(2))
    deviation = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / within)  # 0.8796
    return torch.erfinv(uniform * within) * (math.sqrt(2) / deviation)
