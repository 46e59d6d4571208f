"""CIFAR-10 ResNets exactly as the authors' code trains them.

Batch 128, momentum 0.9, weight decay 2e-4 on every trainable, batch-norm momentum 0.003; zero-padded random crops and
flips of the raw pixels, then per-image standardisation; 71,108 steps (182 nominal epochs) at 0.1, 0.01 after step
35,546 and 0.001 after step 53,125. All 50,000 training images are trained on; 2,000 of the 10,000 test images are the
validation set. The paper's text says Nesterov momentum, its code uses plain momentum: `nesterov` follows the code.

| recipe            | prunable weights | FLOPs       | accuracy on all 10,000: published | measured (bfloat16)  |
|-------------------|------------------|-------------|-----------------------------------|----------------------|
| cifar10-resnet20  | 271,152          | 41,886,986  | 91.63 +- 0.21                     | 91.55 +- 0.26, n = 8 |
| cifar10-resnet56  | 851,760          | 128,197,898 | 93.36 +- 0.18                     | 93.43 +- 0.09, n = 4 |
| cifar10-resnet110 | 1,722,672        | 257,664,266 | 93.69 +- 0.21                     |                      |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rewound.foundations.errors import InputError
from rewound.foundations.randomness import integers
from rewound.method.costs import PAPER
from rewound.method.schedule import Schedule
from rewound.tasks.datasets import cifar10
from rewound.tasks.hyperparameters import check_precision
from rewound.tasks.recipe import Batch
from rewound.tasks.recipes.images import ImageClassification, Images, logits, shifted, split
from rewound.tasks.recipes.resnet import ResNet


@dataclass(frozen=True)
class CIFAR10(ImageClassification):
    """What the three networks share."""

    blocks_per_stage: ClassVar[int]
    test_size: ClassVar[int | None] = 8_000
    costs = PAPER

    epochs: float = 182.0
    steps: int = 71_108
    drops: tuple[int, ...] = (35_547, 53_126)  # piecewise_constant keeps a rate up to and including its boundary
    batch_size: int = 128
    learning_rate: float = 0.1
    weight_decay: float = 2e-4
    shift: int = 4
    batch_norm_momentum: float = 0.003
    precision: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_precision(self.precision)

    @property
    def train_size(self) -> int:
        return 50_000

    @cached_property
    def schedule(self) -> Schedule:
        """Tenfold drops; the paper's `S[T]` is 0.001, which holds for ever."""
        nominal = self.epochs * self.steps_per_epoch  # the authors' 182 epochs are 14 steps longer
        if abs(self.steps - nominal) >= self.steps_per_epoch:
            raise InputError(
                f"{self.epochs:g} epochs of batches of {self.batch_size} are {nominal:,.0f} steps, not {self.steps:,}; "
                "give steps, and the drops among them, together with epochs and batch-size"
            )
        return Schedule.piecewise(self.steps, [self.learning_rate * scale for scale in (1, 0.1, 0.01)], self.drops)

    def model(self, seed: int) -> nn.Module:
        return ResNet(
            (self.blocks_per_stage,) * 3,
            batch_norm_momentum=self.batch_norm_momentum,
            generator=torch.Generator().manual_seed(seed),
        )

    def check_data(self) -> None:
        cifar10.check()

    def images(self, device: torch.device) -> Images:
        return _images(self.split_seed, device)

    def standardised(self, images: Tensor) -> Tensor:
        """Mean 0 and deviation 1 over all values of an image; the deviation is at least 1/sqrt(3072)."""
        x = images.float()
        centred = x - x.mean((1, 2, 3), keepdim=True)
        deviation = centred.square().mean((1, 2, 3), keepdim=True).sqrt()
        return centred / deviation.clamp_min(3072**-0.5)

    def augmented(self, images: Tensor, key: int | Tensor, counters: Tensor) -> Tensor:
        """A random crop of the image padded by 4 zeros, half of them flipped."""
        crops = shifted(images, self.shift, key, counters)
        flip = integers(key, -1 - counters, 2)[:, None, None, None].bool()
        return self.standardised(torch.where(flip, crops.flip(3), crops))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(logits(model, images, self.precision), labels)

    def example(self) -> Batch:
        return (torch.zeros(1, 3, 32, 32),)


@dataclass(frozen=True)
class ResNet20(CIFAR10):
    """271,152 prunable weights."""

    name: ClassVar[str] = "cifar10-resnet20"
    blocks_per_stage: ClassVar[int] = 3
    epoch_seconds: ClassVar[Mapping[str, float]] = {"cuda": 0.34, "cpu": 315.0}


@dataclass(frozen=True)
class ResNet56(CIFAR10):
    """851,760 prunable weights."""

    name: ClassVar[str] = "cifar10-resnet56"
    blocks_per_stage: ClassVar[int] = 9
    epoch_seconds: ClassVar[Mapping[str, float]] = {"cuda": 0.59}


@dataclass(frozen=True)
class ResNet110(CIFAR10):
    """1,722,672 prunable weights."""

    name: ClassVar[str] = "cifar10-resnet110"
    blocks_per_stage: ClassVar[int] = 18


@lru_cache
def _images(split_seed: int, device: torch.device) -> Images:
    data = cifar10.load()
    held = split(data.test_images, data.test_labels, split_seed)
    return Images(data.train_images, data.train_labels, *held).to(device)
