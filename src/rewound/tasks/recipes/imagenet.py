"""ImageNet ResNets as the authors' code trains them, and the same on smaller sets of pictures.

Batch 1024, Nesterov momentum 0.9, weight decay 1e-4 on everything but batch normalisation, which sees groups of 128
images; activations in bfloat16, weights and logits in float32. Random crops with bicubic resizing and flips (`crops`),
colours standardised by the mean and deviation of ImageNet. The rate rises from 0 to 0.4 in 5 epochs and drops tenfold
after 30, 60 and 80 epochs. For the rate an epoch has 1251.14 steps, so that a drop may fall between two of them; where
an epoch has few batches, it has whole ones. A training time is counted in epochs of 1251 whole steps, as the authors
count it: 90 are 112,590. The last rate, 4e-4, holds for ever.

10,000 of the 50,000 validation pictures are the validation set and 40,000 the test set, the same in all runs. What
differs from the authors is listed in docs/imagenet.md.

| recipe                | pictures  | pixels | classes | prunable weights | T in epochs | published test accuracy |
|-----------------------|-----------|--------|---------|------------------|-------------|-------------------------|
| imagenet-resnet34     | 1,281,167 | 224    | 1,000   | 21,783,744       | 90          | 73.60 +- 0.27           |
| imagenet-resnet50     | 1,281,167 | 224    | 1,000   | 25,502,912       | 90          | 76.17 +- 0.14           |
| tinyimagenet-resnet50 | 100,000   | 64     | 200     | 23,856,832       | 18          |                         |
| imagenette-resnet50   | 9,469     | 224    | 10      | 23,475,392       | 45          |                         |

The training pictures stay on the device as bytes where they fit, and are otherwise decoded and streamed past it
(`feed`); which of the two it is changes no result.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, repeat
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from rewound.foundations.errors import InputError
from rewound.foundations.quantities import counted
from rewound.foundations.randomness import fold
from rewound.method.costs import PAPER
from rewound.method.schedule import Piece, Schedule
from rewound.tasks.datasets import jpegs, packed_images
from rewound.tasks.datasets.packed_images import Encoded, PackedImages, Pictures, decoded
from rewound.tasks.feed import nearly_in_sequence, stays_on, streamed, threads_to_decode
from rewound.tasks.hyperparameters import check_fields, check_precision
from rewound.tasks.recipe import Batch, Scores
from rewound.tasks.recipes.crops import central_boxes, random_boxes, random_flips, resized
from rewound.tasks.recipes.images import Classifier, logits, split_order
from rewound.tasks.recipes.resnet import resnet34, resnet50

_MEANS, _DEVIATIONS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's colours, from 0 to 1
_SMALL = 128  # pixels: below, ImageNet's stem would leave less than 4 x 4 to the last stage
_EVALUATED = {"cpu": 32, "cuda": 512}  # pictures at once: a CPU needs no gigabytes
_DECODED = 1024  # pictures at once on their way to the device


@dataclass(frozen=True)
class PackedClassifier(Classifier):
    """What the tasks share: pictures of any size, cropped and resized."""

    data: ClassVar[str]
    """The name of the data set (`packed_images`)."""
    network: ClassVar = staticmethod(resnet50)
    data_identity: ClassVar[tuple[str, ...]] = ("decoder", "data")
    costs = PAPER

    epochs: float = 90.0
    batch_size: int = 1024
    learning_rate: float = 0.4
    nesterov: bool = True
    weight_decay: float = 1e-4
    warmup_epochs: float = 5.0
    drops: tuple[float, ...] = (30.0, 60.0, 80.0)
    batch_norm_group: int = 128
    precision: str = "bfloat16"
    image_size: int = 224
    smallest_area: float = 0.08
    central_share: float = 0.875
    """The side of the square that is evaluated, as a share of the picture's shorter one: 224 / 256."""
    per_class: int = 0
    """How many pictures of each class there are in a subset to try things out (`rewound data NAME --per-class N`);
    0: all of them."""
    split_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, ("batch_norm_group", "image_size"), lambda value: value > 0, "above 0")
        check_fields(self, ("warmup_epochs",), lambda value: value >= 0, "at least 0")
        check_fields(self, ("smallest_area", "central_share"), lambda value: 0 < value <= 1, "above 0 and at most 1")
        check_precision(self.precision)
        if self.batch_size > self.batch_norm_group and self.batch_size % self.batch_norm_group:
            raise InputError(
                f"batch-size {self.batch_size} is not a whole number of groups of {self.batch_norm_group} images, over "
                "which batches are normalised; give a multiple of it, or another batch-norm-group"
            )
        if self.warmup_epochs >= self.epochs:
            raise InputError(f"warmup-epochs must be below epochs, {self.epochs:g}, not {self.warmup_epochs:g}")
        if any(later <= earlier for earlier, later in pairwise((self.warmup_epochs, *self.drops, self.epochs))):
            raise InputError(
                f"the rate must drop after the {self.warmup_epochs:g} epochs of warm-up and before the end at "
                f"{self.epochs:g}, in growing order, not at {', '.join(f'{drop:g}' for drop in self.drops)}; "
                "give drops and warmup-epochs together with epochs"
            )
        steps, last = round(self.epochs * self.steps_per_epoch), max(self.warmup_epochs, *self.drops, 0.0)
        if steps < 1:
            each = counted(int(self.steps_per_epoch), "step")
            raise InputError(f"{self.epochs:g} epochs are 0 steps, as an epoch has {each}; give more epochs")
        if last * self.steps_per_epoch > steps - 1:
            raise InputError(
                f"no step is left after the last change of the rate, at epoch {last:g}: {self.epochs:g} epochs are "
                f"{steps:,} steps; give more epochs, or earlier drops"
            )

    @property
    def test_size(self) -> int:  # type: ignore[override]  # of a subset it is smaller
        held_out = packed_images.size(self.data, self.per_class or None).held_out
        return held_out - held_out // 5

    @property
    def train_size(self) -> int:
        return packed_images.size(self.data, self.per_class or None).train

    @property
    def steps_per_epoch(self) -> float:
        """Whole batches, as the authors count retraining times; the data does not know epochs."""
        return max(1.0, self._exact_steps // 1)

    @property
    def _exact_steps(self) -> float:
        return self.train_size / (self.batch_size * self.accumulation)

    @cached_property
    def schedule(self) -> Schedule:
        steps, per_epoch, rate = round(self.epochs * self.steps_per_epoch), self._exact_steps, self.learning_rate
        if per_epoch < 1 or max(self.warmup_epochs, *self.drops, 0.0) * per_epoch > steps - 1:
            per_epoch = self.steps_per_epoch  # of a few batches an epoch the whole ones count
        rise = [Piece(self.warmup_epochs * per_epoch, 0.0, rate, "linear")] if self.warmup_epochs else []
        ends = [*(drop * per_epoch for drop in self.drops), max(steps, self.epochs * per_epoch)]
        held = [Piece(end, rate / 10**drop, rate / 10**drop) for drop, end in enumerate(ends)]
        return Schedule(steps, (*rise, *held))

    def model(self, seed: int) -> nn.Module:
        classes = packed_images.size(self.data).classes
        network: nn.Module = type(self).network(
            torch.Generator().manual_seed(seed),
            classes=classes,
            small_images=self.image_size < _SMALL,
            batch_norm_group=self.batch_norm_group,
        )
        return network

    def optimizer(self, model: nn.Module) -> torch.optim.SGD:
        """Momentum SGD that does not decay the scales and shifts of batch normalisation."""
        norms = {own for module in model.modules() if isinstance(module, _BatchNorm) for own in module.parameters()}
        decayed = [parameter for parameter in model.parameters() if parameter not in norms]
        others = [parameter for parameter in model.parameters() if parameter in norms]
        groups = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.SGD(groups, lr=self.learning_rate, momentum=self.momentum, nesterov=self.nesterov)

    def check_data(self) -> None:
        packed_images.check(self.data, per_class=self.per_class or None)
        jpegs.fastest_decoder()

    def made_with(self) -> Mapping[str, str]:
        made: dict[str, str] = {}
        with suppress(InputError):  # where something is missing, which `check_data` says
            made["decoder"] = jpegs.decoder_version(jpegs.fastest_decoder())
            made["data"] = _load(self.data, self.per_class).digest
        return made

    def resident(self, device: torch.device) -> Pictures:
        return _on_device(self.data, self.per_class, "train", device)

    def source(self, device: torch.device) -> Encoded | None:
        return _source(self.data, self.per_class, "train", device)

    def order(self, seed: int, prunings: int, epoch: int, part: int, device: torch.device) -> Tensor:
        """Nearly as the pictures are stored, also where they stay on the device, so that nothing depends on that."""
        return nearly_in_sequence(fold(seed, prunings, "order", epoch), self.train_size, device)

    def assembled(
        self, data: Sequence[Tensor], part: int, chosen: Tensor, key: int | Tensor, counters: Tensor
    ) -> Batch:
        pixels, starts, heights, widths, labels = data
        widths = widths[chosen]
        boxes = random_boxes(
            heights[chosen], widths, key, counters, smallest_area=self.smallest_area, share=self.central_share
        )
        images = resized(pixels, starts[chosen], widths, boxes, self.image_size, random_flips(key, counters))
        return self.standardised(images), labels[chosen]

    def standardised(self, images: Tensor) -> Tensor:
        """Colours with about mean 0 and deviation 1, in the precision of the activations."""
        # Filled on the device: a captured step cannot copy from the host.
        mean, deviation = (
            torch.cat([torch.full((1, 1, 1), 255 * value, device=images.device) for value in values])
            for values in (_MEANS, _DEVIATIONS)
        )
        return ((images - mean) / deviation).to(getattr(torch, self.precision))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(logits(model, images, self.precision), labels)

    def evaluate(self, model: nn.Module) -> Scores:
        device = next(model.parameters()).device
        held_out = packed_images.size(self.data, self.per_class or None).held_out
        val, test = (self._accuracy(model, chosen, device) for chosen in split_order(held_out, self.split_seed))
        return Scores(val, test)

    def _accuracy(self, model: nn.Module, chosen: Tensor, device: torch.device) -> float:
        correct = torch.zeros((), dtype=torch.int64, device=device)
        for (pixels, starts, heights, widths, labels), which in self._held_out(chosen, device):
            widths = widths[which]
            boxes = central_boxes(heights[which], widths, self.central_share)
            images = self.standardised(resized(pixels, starts[which], widths, boxes, self.image_size))
            correct += (logits(model, images, self.precision).argmax(1) == labels[which]).sum()
        return int(correct) / len(chosen)

    def _held_out(self, chosen: Tensor, device: torch.device) -> Iterator[tuple[Sequence[Tensor], Tensor]]:
        """The chosen held-out pictures, some at a time: data, and which of it to take."""
        some = torch.split(chosen, _EVALUATED["cuda" if device.type == "cuda" else "cpu"])
        if (source := _source(self.data, self.per_class, "held_out", device)) is None:
            yield from zip(
                repeat(_on_device(self.data, self.per_class, "held_out", device)),
                (which.to(device) for which in some),
                strict=False,
            )
        else:
            for data, which in zip(streamed(source, some, device), some, strict=True):
                yield data, torch.arange(len(which), device=device)

    def example(self) -> Batch:
        return (torch.zeros(1, 3, self.image_size, self.image_size),)


@dataclass(frozen=True)
class ImageNetResNet34(PackedClassifier):
    """21,783,744 prunable weights."""

    name: ClassVar[str] = "imagenet-resnet34"
    data: ClassVar[str] = "imagenet"
    network: ClassVar = staticmethod(resnet34)


@dataclass(frozen=True)
class ImageNetResNet50(PackedClassifier):
    """25,502,912 prunable weights."""

    name: ClassVar[str] = "imagenet-resnet50"
    data: ClassVar[str] = "imagenet"


@dataclass(frozen=True)
class TinyImageNetResNet50(PackedClassifier):
    """Tiny-ImageNet: ImageNet's schedule in a fifth of its epochs.

    Batches of 256, so that 18 epochs are 7,020 steps; more decay for a thirteenth of the pictures; no box below a
    quarter of a picture that has only 64 pixels. The stem leaves 32x32 to the first stage: ImageNet's would leave
    16x16, and 2x2 to the last.
    """

    name: ClassVar[str] = "tinyimagenet-resnet50"
    data: ClassVar[str] = "tinyimagenet"

    epochs: float = 18.0
    batch_size: int = 256
    learning_rate: float = 0.1
    weight_decay: float = 5e-4
    warmup_epochs: float = 1.0
    drops: tuple[float, ...] = (6.0, 12.0, 16.0)
    image_size: int = 64
    smallest_area: float = 0.25


@dataclass(frozen=True)
class ImagenetteResNet50(PackedClassifier):
    """Imagenette: ten classes of ImageNet, to try out what trains at 224 pixels, along half of ImageNet's schedule."""

    name: ClassVar[str] = "imagenette-resnet50"
    data: ClassVar[str] = "imagenette"

    epochs: float = 45.0
    batch_size: int = 128
    learning_rate: float = 0.05
    weight_decay: float = 5e-4
    warmup_epochs: float = 2.5
    drops: tuple[float, ...] = (15.0, 30.0, 40.0)
    smallest_area: float = 0.25


@lru_cache
def _load(name: str, per_class: int) -> PackedImages:
    return packed_images.load(name, per_class=per_class or None)


def _part(name: str, per_class: int, part: str) -> packed_images.PackedPart:
    data = _load(name, per_class)
    return data.train if part == "train" else data.held_out


def _source(name: str, per_class: int, part: str, device: torch.device) -> Encoded | None:
    """What decodes the pictures of a part, if they do not stay on the device."""
    pictures = _part(name, per_class, part)
    return None if stays_on(device, pictures.pixels) else Encoded(pictures, jpegs.fastest_decoder())


@lru_cache(maxsize=2)  # both parts of one data set: another one takes their memory
def _on_device(name: str, per_class: int, part: str, device: torch.device) -> Pictures:
    """All pictures of a part, decoded into the memory of the device."""
    pictures, decoder = _part(name, per_class, part), jpegs.fastest_decoder()
    every = torch.arange(len(pictures))
    pixels, done = torch.empty(pictures.pixels, dtype=torch.uint8, device=device), 0
    with ThreadPoolExecutor(threads_to_decode()) as threads:
        for some in torch.split(every, _DECODED):
            found = decoded(pictures, some, decoder, threads=threads).pixels
            pixels[done : done + len(found)] = found.to(device)
            done += len(found)
    return Pictures(pixels, *(each.to(device) for each in Encoded(pictures, decoder).other_tensors(every)))
