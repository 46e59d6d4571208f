"""The authors' residual network for small images, of any depth and width.

    stem 3x3 - BN - ReLU | stages of blocks | global mean | dense
    block: conv 3x3 - BN - ReLU - conv 3x3 - BN - add - ReLU         (v1: the activation follows the sum)

The first block of EVERY stage, also of the first, has a 1x1 projection with BN as its shortcut; stages after the first
halve the resolution. `blocks=(n, n, n)` with widths 16, 32 and 64 is ResNet-(6n+2): 271,152 prunable weights at n = 3.
Convolutions start from a truncated normal of variance 1/fan-in, not He's 2/fan-in.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rewound.foundations.errors import InputError
from rewound.method.costs import Add


class ConvNorm(nn.Conv2d):
    """A convolution without bias, followed by its batch normalisation `bn`."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, size, stride, padding=size // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        normalised: Tensor = self.bn(super().forward(x))
        return normalised


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
        stem_stride: int = 1,
        batch_norm_momentum: float = 0.003,
    ) -> None:
        if len(blocks) != len(widths) or min((*blocks, *widths), default=0) < 1:
            raise InputError(
                f"blocks={tuple(blocks)} and widths={tuple(widths)} must have the same number of entries, at least "
                f"one, all positive; give the number of blocks and the width of each stage"
            )
        with torch.device("meta"):  # PyTorch's own initialisation would draw from the global generator
            super().__init__(OrderedDict(_layers(blocks, widths, channels, classes, stem_stride)))
        self.to_empty(device=generator.device)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = batch_norm_momentum
            _initialise(module, generator)


def _layers(
    blocks: Sequence[int], widths: Sequence[int], channels: int, classes: int, stem_stride: int
) -> dict[str, nn.Module]:
    layers: dict[str, nn.Module] = {"stem": ConvNorm(channels, widths[0], 3, stem_stride), "relu": nn.ReLU()}
    inputs = widths[0]
    for stage, (count, width) in enumerate(zip(blocks, widths, strict=True), start=1):
        first = Block(inputs, width, stride=1 if stage == 1 else 2, project=True)
        others = [Block(width, width, stride=1, project=False) for _ in range(count - 1)]
        named = {f"block{number}": block for number, block in enumerate([first, *others], start=1)}
        layers[f"stage{stage}"] = nn.Sequential(OrderedDict(named))
        inputs = width
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
