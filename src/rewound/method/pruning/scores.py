"""How much a weight matters: functions that give one number for each weight, none below 0."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rewound.foundations.randomness import bits, fold

Score = Callable[[Tensor, str, int], Tensor]  # (weight, its name, seed) -> one non-negative number per weight
SAME_SCORE = {"l1": "magnitude"}
"""Other names of scores; an address has the name on the right."""


def magnitude(weight: Tensor, name: str, seed: int) -> Tensor:
    """|w|: the paper's. Of many weights the mean is their L1 norm, divided by their number."""
    return weight.abs()


def l2(weight: Tensor, name: str, seed: int) -> Tensor:
    """w^2, whose order is that of |w|, but the mean of many weights goes by their L2 norm."""
    return weight.square()


def random(weight: Tensor, name: str, seed: int) -> Tensor:
    """A uniform draw, the control for any other score."""
    return draws(seed, name, weight.numel(), weight.device).reshape(weight.shape)


def draws(seed: int, name: str, count: int, device: torch.device) -> Tensor:
    """Uniform draws for what has that name."""
    drawn = bits(fold(seed, "score", name), torch.arange(count, device=device))
    return (drawn >> 39).to(torch.float32)  # 24 bits: exact in float32


SCORES: Mapping[str, Score] = {"magnitude": magnitude, "l2": l2, "random": random}
