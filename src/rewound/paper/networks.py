"""The paper's networks: what they are called, and how long they train. Tables name them by their recipe."""

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
