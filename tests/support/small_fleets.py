"""Small recipes for fleets, runs of them alone and together, and how far apart they end."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rewound.foundations.errors import Diverged
from rewound.method.pruning.mask import Mask
from rewound.method.schedule import Segment
from rewound.tasks.fleets.fleet import Event, Fleet
from rewound.tasks.fleets.place import Place, Run
from rewound.tasks.recipe import Batch, Recipe
from rewound.tasks.recipes.cifar10 import ResNet20
from rewound.tasks.recipes.digits import Digits
from rewound.tasks.recipes.images import Images
from rewound.tasks.training import State, train

CPU = torch.device("cpu")
RATES = (Segment(0.05, 12), Segment(0.005, 5))
DIGITS = Digits(blocks=(1,), widths=(8,))

# How far two computations of the same steps may be apart in float64. A sum of n terms errs by at most n times 1.1e-16;
# here n is below 1e4, and a step has about forty such sums one after the other: 5e-11. The least that a wrong step
# differs by is a step's weight decay, 1e-7.
ROUNDING = 1e-9


@lru_cache
def noise(device: torch.device) -> Images:
    draw = torch.Generator().manual_seed(0)

    def part(n: int) -> tuple[Tensor, Tensor]:
        images = torch.randint(0, 256, (n, 3, 32, 32), generator=draw, dtype=torch.uint8)
        return images, torch.randint(0, 10, (n,), generator=draw)

    return Images(*part(60), *part(10), *part(20)).to(device)


@dataclass(frozen=True)
class Noise(ResNet20):
    """The CIFAR-10 network on sixty images of noise."""

    batch_size: int = 8

    @property
    def train_size(self) -> int:
        return 60

    def images(self, device: torch.device) -> Images:
        return noise(device)


class _Float64:
    """A recipe in float64, for tests whose default type (fixture `float64`) that is.

    Two computations of one step differ by rounding. Where it moves an activation across zero, ReLU's derivative changes
    from 0 to 1, and the gradient by far more than the rounding: in float32 on some CPUs and not on others. In float64
    no activation of these tests is that close to zero: there are 1e7 of them, and rounding is about 1e-15.
    """

    def standardised(self, images: Tensor) -> Tensor:
        return images.double() / 16 - 1  # exact, where the recipes' own is rounded to float32

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])  # ResNet20 rounds its logits to float32


@dataclass(frozen=True)
class Digits64(_Float64, Digits):
    """Digits in float64."""


@dataclass(frozen=True)
class Noise64(_Float64, Noise):
    """Noise in float64."""


@dataclass(frozen=True)
class OwnBatches(Digits):
    """A recipe that feeds itself in its own way."""

    def batches(self, seed, position, device):  # type: ignore[no-untyped-def]
        return super().batches(seed, position, device)


@dataclass(frozen=True)
class HeadAlone(Digits):
    """A recipe that trains its last layer only."""

    def optimizer(self, model: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(model.get_submodule("dense").parameters(), self.learning_rate, self.momentum)


class Strange(nn.Sequential):
    """Digits' network, and after it something that one graph cannot repeat as `train` has it."""

    def __init__(self, network: nn.Module, what: str) -> None:
        super().__init__(network)
        self.what = what
        if what == "unused":
            self.unused = nn.Parameter(torch.zeros(3))
        if what == "frozen":
            next(network.parameters()).requires_grad_(False)
        if what == "buffer":
            self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        if self.what == "buffer":
            self.seen = self.seen + 1
        if self.what == "python":
            return x * (1 + random.random())
        if self.what == "numpy":
            return x * (1 + np.random.rand())  # noqa: NPY002
        if self.what == "noise":
            return x + torch.randn_like(x)
        return F.dropout(x, 0.5, self.training) if self.what == "dropout" else x


@dataclass(frozen=True)
class Strangers(Digits):
    """A recipe whose network is one of those."""

    what: str = ""

    def model(self, seed: int) -> nn.Module:
        return Strange(super().model(seed), self.what)


@dataclass(frozen=True)
class Strangers64(_Float64, Strangers):
    """The same in float64."""


def sparse(recipe: Recipe) -> Mask:
    draw = torch.Generator().manual_seed(1)
    return Mask({name: torch.rand(shape, generator=draw) < 0.3 for name, shape in recipe.shapes.items()})


def alone(recipe: Recipe, run: Run, device: torch.device = CPU) -> list[State]:
    states = train(recipe, run.state, run.mask, lr=run.lr, stops=run.stops, device=device)
    return [state.clone() for state in states]


def together(fleet: Fleet, runs: Sequence[Run]) -> dict[int, list[State | Diverged]]:
    """Every member's outcomes, each run started as soon as there is a place."""
    waiting = list(runs)
    outcomes: dict[int, list[State | Diverged]] = {}
    while waiting:
        while waiting and fleet.free:
            outcomes[fleet.start(waiting.pop(0))] = []
        for member, outcome, _ in fleet.events():
            outcomes[member].append(outcome if isinstance(outcome, Diverged) else outcome.clone())
            while waiting and fleet.free:
                outcomes[fleet.start(waiting.pop(0))] = []
    return outcomes


def furthest(one: State, other: State, parts: Sequence[str] = ("model", "slots")) -> float:
    """The largest difference between the tensors of two states."""
    assert (one.model.keys(), one.slots.keys(), one.position) == (
        other.model.keys(),
        other.slots.keys(),
        other.position,
    )
    pairs = [(a, getattr(other, part)[name]) for part in parts for name, a in getattr(one, part).items()]
    return max(float((a.cpu().double() - b.cpu().double()).abs().max()) for a, b in pairs)


def stopped(place: Place) -> Event:
    while not place.arrived():
        place.launch()
    return Event(0, *place.report())
