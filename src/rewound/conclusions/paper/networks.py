"""The paper's networks: what they are called, how long they train, what they are tested on, and others' results.

Tables name them by their recipe. Other works are the black dots beside the curves of the paper's figures. Their deltas
are differences to each work's own dense network, in points of accuracy or BLEU, as read from the authors' plotting
code. Two things are theirs, not ours: Liu et al.'s 40 epochs of fine-tuning stand at 0 epochs, and their ResNet-110-A
dot against compression is the fine-tuned network with the error bar of the one trained from scratch.
"""

from dataclasses import dataclass
from typing import Final

NETWORKS: Final = {  # in the paper's order
    "cifar10-resnet20": "CIFAR-10 ResNet-20",
    "cifar10-resnet56": "CIFAR-10 ResNet-56",
    "cifar10-resnet110": "CIFAR-10 ResNet-110",
    "imagenet-resnet50": "ImageNet ResNet-50",
    "imagenet-resnet34": "ImageNet ResNet-34",
    "wmt16-gnmt": "WMT16 GNMT",
}
TRAINING_EPOCHS: Final = {  # T
    "cifar10-resnet20": 182.0,
    "cifar10-resnet56": 182.0,
    "cifar10-resnet110": 182.0,
    "imagenet-resnet50": 90.0,
    "imagenet-resnet34": 90.0,
    "wmt16-gnmt": 5.0,
}
# A fifth of a data set's test images is the validation set, drawn by everybody for themselves; all of them together are
# the same images everywhere. WMT16 has a validation set of its own.
TEST_SHARES: Final = {recipe: 0.8 for recipe in NETWORKS if recipe.startswith(("cifar10-", "imagenet-"))}


CARREIRA: Final = "Carreira-Perpiñán & Idelbayev (2018)"  # Learning-Compression
HE: Final = "He et al. (2018)"  # AMC
ZHU: Final = "Zhu & Gupta (2017)"  # gradual pruning
LIU: Final = "Liu et al. (2019)"  # trained from scratch; at 0 epochs, fine-tuned


@dataclass(frozen=True)
class Published:
    """One network of another work; `epochs` is its retraining time where the figure has one."""

    source: str
    recipe: str
    pruning: str
    iterative: bool
    density: float
    delta: float
    error: float | None = None
    epochs: float | None = None


# At the mildest of the five prunings, the only one Liu et al. have.
_MILDEST: Final = {
    ("cifar10-resnet56", "structured-a"): 0.9209166901,
    ("cifar10-resnet56", "structured-b"): 0.8711749789,
    ("cifar10-resnet110", "structured-a"): 0.9772632283,
    ("cifar10-resnet110", "structured-b"): 0.6875922985,
    ("imagenet-resnet34", "structured-a"): 0.9246381155,
    ("imagenet-resnet34", "structured-b"): 0.8937159746,
}


def _liu(recipe: str, pruning: str, delta: float, error: float | None, epochs: float | None = None) -> Published:
    return Published(LIU, recipe, pruning, False, _MILDEST[recipe, pruning], delta, error, epochs)


AGAINST_COMPRESSION: Final = (
    Published(CARREIRA, "cifar10-resnet56", "unstructured", True, 0.1497, -0.06),
    Published(CARREIRA, "cifar10-resnet56", "unstructured", True, 0.10, +0.16),
    Published(CARREIRA, "cifar10-resnet56", "unstructured", True, 0.05, -0.65),
    Published(CARREIRA, "cifar10-resnet56", "unstructured", True, 0.03, -1.35),
    Published(HE, "imagenet-resnet50", "unstructured", True, 0.195, -0.02),
    Published(ZHU, "wmt16-gnmt", "unstructured", True, 0.20, +0.09),
    Published(ZHU, "wmt16-gnmt", "unstructured", True, 0.15, -0.25),
    Published(ZHU, "wmt16-gnmt", "unstructured", True, 0.10, -0.58),
    _liu("cifar10-resnet56", "structured-a", -0.05, 0.14),
    _liu("cifar10-resnet56", "structured-b", -0.09, 0.18),
    _liu("cifar10-resnet110", "structured-a", +0.11, 0.22),
    _liu("cifar10-resnet110", "structured-b", +0.46, 0.25),
    _liu("imagenet-resnet34", "structured-a", -0.28, None),
    _liu("imagenet-resnet34", "structured-b", -0.40, None),
)

AGAINST_TIME: Final = (
    _liu("cifar10-resnet56", "structured-a", -0.18, 0.26, epochs=0),
    _liu("cifar10-resnet56", "structured-a", -0.05, 0.14, epochs=18.50),
    _liu("cifar10-resnet56", "structured-b", -0.60, 0.19, epochs=0),
    _liu("cifar10-resnet56", "structured-b", -0.09, 0.18, epochs=60.66),
    _liu("cifar10-resnet110", "structured-a", +0.11, 0.29, epochs=0),
    _liu("cifar10-resnet110", "structured-a", +0.08, 0.22, epochs=30.13),
    _liu("cifar10-resnet110", "structured-b", -0.25, 0.43, epochs=0),
    _liu("cifar10-resnet110", "structured-b", +0.46, 0.25, epochs=100.36),
    _liu("imagenet-resnet34", "structured-a", -0.54, None, epochs=0),
    _liu("imagenet-resnet34", "structured-a", -0.28, None, epochs=16.38),
    _liu("imagenet-resnet34", "structured-b", -0.76, None, epochs=0),
    _liu("imagenet-resnet34", "structured-b", -0.40, None, epochs=28.39),
)
