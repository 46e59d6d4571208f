"""The paper's networks: what they are called, how long they train, what they are tested on, and others' results.

Tables name them by their recipe. Other works are the black dots beside the curves of the paper's figures. Their deltas
are differences to each work's own dense network, in points of accuracy or BLEU, as read from the authors' plotting
code. Two things are theirs, not ours: Liu et al.'s 40 epochs of fine-tuning stand at 0 epochs, and their ResNet-110-A
dot against compression is the fine-tuned network with the error bar of the one trained from scratch.
"""

from dataclasses import dataclass
from typing import Final

from rewound.foundations.metric import ACCURACY, Metric


@dataclass(frozen=True)
class Network:
    """What is known of one of the paper's networks."""

    title: str
    training_epochs: float  # T
    test_share: float = 1.0
    """The fraction of the held-out examples that is the test set, where everybody draws the validation set from them:
    all of them together are the same examples everywhere, and tables are compared on those."""
    metric: Metric = ACCURACY


NETWORKS: Final = {  # by the name of the recipe, in the paper's order
    "cifar10-resnet20": Network("CIFAR-10 ResNet-20", 182, test_share=0.8),
    "cifar10-resnet56": Network("CIFAR-10 ResNet-56", 182, test_share=0.8),
    "cifar10-resnet110": Network("CIFAR-10 ResNet-110", 182, test_share=0.8),
    "imagenet-resnet50": Network("ImageNet ResNet-50", 90, test_share=0.8),
    "imagenet-resnet34": Network("ImageNet ResNet-34", 90, test_share=0.8),
    "wmt16-gnmt": Network("WMT16 GNMT", 5, metric=Metric("BLEU", "BLEU")),
}
TRAINING_EPOCHS: Final = {recipe: network.training_epochs for recipe, network in NETWORKS.items()}
TEST_SHARES: Final = {recipe: network.test_share for recipe, network in NETWORKS.items()}
METRICS: Final = {recipe: network.metric for recipe, network in NETWORKS.items()}
"""What the authors' published tables hold, which do not say it."""

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
