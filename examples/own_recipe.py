"""A task of your own: a recipe, and the network it prunes. Run: python examples/own_recipe.py

The task is scikit-learn's breast cancer data: 30 measurements of 569 tumours, malignant or benign. In a sweep, or on
the command line, this recipe is `own_recipe:Tumours`, in the folder of this file or with that on Python's path.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import ClassVar

import torch
from torch import Tensor, nn

import rewound
from rewound import Batch, InputError, Part, ResidentRecipe, Schedule, Scores
from rewound.foundations.randomness import fold, permutation

TRAIN, VAL, TEST = 269, 100, 200


@lru_cache
def data(device: torch.device) -> tuple[Tensor, Tensor]:
    """The tumours in an order of chance, the same for ever: 269 to train on, 100 to validate, 200 to test."""
    from sklearn.datasets import load_breast_cancer

    measured, benign = (torch.from_numpy(part) for part in load_breast_cancer(return_X_y=True))
    order = permutation(fold("tumours"), len(measured))
    x, y = measured[order].float(), benign[order]
    seen = x[:TRAIN]
    return ((x - seen.mean(0)) / seen.std(0)).to(device), y.to(device)


@dataclass(frozen=True)
class Tumours(ResidentRecipe):
    """Two hidden layers. The fields are hyperparameters: part of every result's address, and keys of a sweep."""

    name: ClassVar[str] = "tumours"
    test_size: ClassVar[int | None] = TEST

    epochs: float = 10.0
    batch_size: int = 32
    learning_rate: float = 0.05
    width: int = 64

    def check_data(self) -> None:  # asked once, before any work begins
        if find_spec("sklearn") is None:
            raise InputError("the tumours recipe needs scikit-learn: pip install scikit-learn")

    def model(self, seed: int) -> nn.Module:  # its initial weights are a function of the seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Sequential(
                nn.Linear(30, self.width),
                nn.ReLU(),
                nn.Linear(self.width, self.width),
                nn.ReLU(),
                nn.Linear(self.width, 2),
            )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=0.9, weight_decay=1e-3)

    @property
    def schedule(self) -> Schedule:  # S: the rate drops tenfold at 1/2 and at 3/4 of the training
        steps = round(self.epochs * self.steps_per_epoch)
        rates = [self.learning_rate, self.learning_rate / 10, self.learning_rate / 100]
        return Schedule.piecewise(steps, rates, drops=[steps / 2, steps * 3 / 4])

    @property
    def training_epochs(self) -> float:  # T
        return self.epochs

    @property
    def parts(self) -> tuple[Part, ...]:  # one, as all examples have the same shape
        return (Part(examples=TRAIN, batch_size=self.batch_size),)

    def resident(self, device: torch.device) -> Sequence[Tensor]:  # what batches are chosen from
        return [part[:TRAIN] for part in data(device)]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    def evaluate(self, model: nn.Module) -> Scores:
        x, y = data(next(model.parameters()).device)
        right = (model(x).argmax(1) == y).double()
        return Scores(val=right[TRAIN : TRAIN + VAL].mean().item(), test=right[TRAIN + VAL :].mean().item())

    def example(self) -> Batch:  # one input of the network, to count FLOPs with
        return (torch.zeros(1, 30),)


if __name__ == "__main__":
    network = rewound.prune(Tumours(), compression=5)  # says what each level reaches
    network.save("tumours-pruned")
