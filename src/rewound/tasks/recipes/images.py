"""What the image classification recipes share: momentum SGD, cross-entropy, accuracy; for small images, random shifts.

The data lives on the training device as bytes (`resident`). The order of an epoch and every shift are counter-based
draws (`randomness`), so a batch is a function of (seed, prunings, step) and the stream can be entered anywhere.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rewound.foundations.errors import InputError
from rewound.foundations.randomness import fold, integers, permutation
from rewound.method.schedule import Schedule
from rewound.tasks.hyperparameters import check_fields
from rewound.tasks.recipe import Batch, Scores
from rewound.tasks.resident import Part, ResidentRecipe

_EVALUATION_BATCH = 1000


class Images(NamedTuple):
    """A data set: images as bytes (N, C, H, W) with their labels, and the held-out ones split in two."""

    train: Tensor
    train_labels: Tensor
    val: Tensor
    val_labels: Tensor
    test: Tensor
    test_labels: Tensor

    def to(self, device: torch.device) -> "Images":
        """The same on another device."""
        return Images(*(part.to(device) for part in self))


def split_order(size: int, split_seed: int) -> tuple[Tensor, Tensor]:
    """20% of the held-out images for validation, the rest for testing, as in the paper; one split per recipe."""
    val, test = permutation(fold("split", split_seed), size).tensor_split([size // 5])
    return val, test


def split(held: Tensor, labels: Tensor, split_seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Held-out images and their labels, for validation and for testing."""
    val, test = split_order(len(held), split_seed)
    return held[val], labels[val], held[test], labels[test]


@dataclass(frozen=True)
class Classifier(ResidentRecipe):
    """A classifier trained by momentum SGD."""

    divisible: ClassVar[bool] = True

    epochs: float = 1.0
    batch_size: int = 128
    learning_rate: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, ("epochs", "batch_size", "learning_rate"), lambda value: value > 0, "above 0")
        check_fields(self, ("momentum", "weight_decay"), lambda value: value >= 0, "at least 0")
        if self.learning_rate > (largest := torch.finfo(torch.float32).max):
            raise InputError(f"learning-rate must be at most {largest:.4g}, not {self.learning_rate:g}")
        if self.nesterov and not self.momentum:
            raise InputError("nesterov needs a momentum above 0, not 0; set nesterov = false for plain SGD")
        if not math.isfinite(self.epochs * self.steps_per_epoch):
            raise InputError(f"epochs = {self.epochs:g} is more than can be counted in steps; give fewer")

    @property
    @abstractmethod
    def train_size(self) -> int:
        """The number of training images, known without the data."""

    @property
    def training_epochs(self) -> float:
        return self.epochs

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(self.train_size, self.batch_size),)

    def optimizer(self, model: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(
            model.parameters(),
            lr=self.learning_rate,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)


def logits(model: nn.Module, images: Tensor, precision: str) -> Tensor:
    """What the model puts out, with activations of a precision."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        put_out: Tensor = model(images)
    return put_out.float()


@dataclass(frozen=True)
class ImageClassification(Classifier):
    """A classifier of images of one size, which are shifted, along a step schedule."""

    shift: int = 0
    split_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, ("shift",), lambda value: value >= 0, "at least 0")

    @abstractmethod
    def images(self, device: torch.device) -> Images:
        """The data, on the device it is used on."""

    @abstractmethod
    def standardised(self, images: Tensor) -> Tensor:
        """Bytes to what the network takes."""

    def augmented(self, images: Tensor, key: int | Tensor, counters: Tensor) -> Tensor:
        """Training images from bytes: shifted by up to `shift` pixels each way, zeros moving in."""
        return self.standardised(shifted(images, self.shift, key, counters))

    @cached_property
    def schedule(self) -> Schedule:
        """The paper's shape: the rate drops tenfold at 1/2 and at 3/4 of training."""
        steps = round(self.epochs * self.steps_per_epoch)
        rates = [self.learning_rate * scale for scale in (1, 0.1, 0.01)]
        return Schedule.piecewise(steps, rates, drops=[round(steps / 2), round(steps * 3 / 4)])

    def resident(self, device: torch.device) -> Images:
        return self.images(device)

    def assembled(
        self, data: Sequence[Tensor], part: int, chosen: Tensor, key: int | Tensor, counters: Tensor
    ) -> Batch:
        images, labels = data[:2]
        return self.augmented(images[chosen], key, counters), labels[chosen]

    def evaluate(self, model: nn.Module) -> Scores:
        images = self.images(next(model.parameters()).device)
        return Scores(
            self._accuracy(model, images.val, images.val_labels), self._accuracy(model, images.test, images.test_labels)
        )

    def _accuracy(self, model: nn.Module, images: Tensor, labels: Tensor) -> float:
        pairs = zip(torch.split(images, _EVALUATION_BATCH), torch.split(labels, _EVALUATION_BATCH), strict=True)
        correct = sum((model(self.standardised(x)).argmax(1) == y).sum() for x, y in pairs)
        return int(correct) / len(labels)


def shifted(images: Tensor, by: int, key: int | Tensor, counters: Tensor) -> Tensor:
    """Each image moved by up to `by` pixels in each direction, zeros moving in.

    >>> shifted(torch.ones(1, 1, 2, 2), 0, 0, torch.zeros(1)).sum()
    tensor(4.)
    """
    if by == 0:
        return images
    n, _, height, width = images.shape
    padded = F.pad(images, (by, by, by, by))
    down = integers(key, 2 * counters, 2 * by + 1)[:, None] + torch.arange(height, device=images.device)
    right = integers(key, 2 * counters + 1, 2 * by + 1)[:, None] + torch.arange(width, device=images.device)
    rows = torch.arange(n, device=images.device)[:, None, None]
    # Channels last while indexing, so that one gather moves whole pixels.
    return padded.permute(0, 2, 3, 1)[rows, down[:, :, None], right[:, None, :]].permute(0, 3, 1, 2)
