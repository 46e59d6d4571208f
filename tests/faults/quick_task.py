"""A task that trains in milliseconds, without data on disk: which side of a surface points lie on."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor, nn

from rewound import Batch, Part, ResidentRecipe, Schedule, Scores
from rewound.foundations.randomness import bits

TRAIN, REST = 64, 128


@lru_cache
def points(device: torch.device) -> tuple[Tensor, Tensor]:
    x = bits(17, torch.arange((TRAIN + 2 * REST) * 8)).reshape(-1, 8).double()
    x = ((x - x.mean()) / x.std()).float().to(device)
    return x, (x.sum(1) + x[:, 0] * x[:, 1] > 0).long()


@dataclass(frozen=True)
class Quick(ResidentRecipe):
    """Some 350 weights and 8 steps an epoch."""

    name: ClassVar[str] = "quick"
    test_size: ClassVar[int | None] = REST
    epochs: float = 2.0

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @property
    def schedule(self) -> Schedule:
        steps = round(self.epochs * self.steps_per_epoch)
        return Schedule.piecewise(steps, [0.1, 0.01], drops=[steps / 2])

    @property
    def training_epochs(self) -> float:
        return self.epochs

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(examples=TRAIN, batch_size=8),)

    def resident(self, device: torch.device) -> Sequence[Tensor]:
        return [part[:TRAIN] for part in points(device)]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    def evaluate(self, model: nn.Module) -> Scores:
        x, y = points(next(model.parameters()).device)
        right = (model(x).argmax(1) == y).double()
        return Scores(val=right[TRAIN : TRAIN + REST].mean().item(), test=right[TRAIN + REST :].mean().item())

    def example(self) -> Batch:
        return (torch.zeros(1, 8),)
