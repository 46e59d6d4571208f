"""The paper's networks and techniques by short names, and the panels of its figures by number."""

from collections.abc import Iterable
from dataclasses import replace

from rewound.conclusions.paper.figures import FIGURES, panels
from rewound.conclusions.paper.panels import Measured, Panel
from rewound.conclusions.tables import Row

R20, R56, R110 = "cifar10-resnet20", "cifar10-resnet56", "cifar10-resnet110"
R34, R50, GNMT = "imagenet-resnet34", "imagenet-resnet50", "wmt16-gnmt"
LR, WEIGHT, FINE = "lr-rewinding", "weight-rewinding", "fine-tuning"
NAMES = {int(name.split("-")[1]): name for name in FIGURES}


def shown(number: int, found: Iterable[Measured]) -> list[Panel]:
    return panels(FIGURES[NAMES[number]], found)


def in_bleu(row: Row) -> Row:
    """The row of a translation that reaches 30 BLEU where this one reaches 100%."""
    return replace(row, val=30 * (row.val or 0), test=30 * (row.test or 0), metric="BLEU", unit="BLEU")
