"""Digits in a fraction of a second: a tiny recipe, one that tells what is done with it, and some that go wrong."""

import math
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch.nn.utils import parametrizations

from rewound.foundations.errors import InputError
from rewound.foundations.metric import Metric
from rewound.method.schedule import Schedule
from rewound.tasks.recipe import Batch, Position, Scores
from rewound.tasks.recipes.digits import Digits
from rewound.tasks.resident import WHOLE, Share


@dataclass(frozen=True)
class Tiny(Digits):
    """Digits in a fraction of a second: 19 steps of a network of some 1,300 weights."""

    epochs: float = 2.0
    widths: tuple[int, ...] = (4, 8)


POISON: dict[tuple[int, int], int] = {}  # (trial, prunings) -> the step at which the data turns NaN
ENTERED: list[Position] = []  # where training began


@dataclass(frozen=True)
class Watched(Tiny):
    """Notes where training begins, and diverges where it is told to."""

    def batches(self, seed: int, position: Position, device: torch.device) -> Iterator[Batch]:
        ENTERED.append(position)
        for step, (images, labels) in enumerate(super().batches(seed, position, device), start=position.steps):
            yield images * (torch.nan if step >= POISON.get((seed, position.prunings), 10**9) else 1), labels


@dataclass(frozen=True)
class Exploding(Tiny):
    """One step, so large that the weights are infinite although every loss was a number."""

    @property
    def training_epochs(self) -> float:
        return 1 / self.steps_per_epoch

    @property
    def schedule(self) -> Schedule:
        return Schedule.constant(1, 3e38)

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return 1e6 * super().loss(model, batch)


@dataclass(frozen=True)
class Unmeasured(Tiny):
    """A metric that is no number where half of the weights or more are pruned."""

    def evaluate(self, model: torch.nn.Module) -> Scores:
        scores, weights = super().evaluate(model), self.prunable(model).values()
        kept = sum(int(weight.count_nonzero()) for weight in weights) / sum(weight.numel() for weight in weights)
        return Scores(scores.val, math.nan) if kept <= 0.55 else scores


@dataclass(frozen=True)
class Surprised(Tiny):
    """Judged by its cross-entropy: less is better."""

    metric: ClassVar[Metric] = Metric("cross-entropy", "nats", higher_is_better=False)

    def evaluate(self, model: torch.nn.Module) -> Scores:
        images = self.images(next(model.parameters()).device)
        parts = ((images.val, images.val_labels), (images.test, images.test_labels))
        return Scores(*(float(self.loss(model, (self.standardised(x), y))) for x, y in parts))


@dataclass(frozen=True)
class Elsewhere(Tiny):
    """Also judged by its surprise at the validation images, upside down."""

    def evaluate(self, model: torch.nn.Module) -> Scores:
        images = self.images(next(model.parameters()).device)
        surprise = self.loss(model, (self.standardised(images.val.flip(2)), images.val_labels))
        return Scores(*super().evaluate(model), upside_down=float(surprise))


@dataclass(frozen=True)
class Wrong(Tiny):
    """How often it is wrong: less is better."""

    metric: ClassVar[Metric] = Metric("error", "fraction", higher_is_better=False)

    def evaluate(self, model: torch.nn.Module) -> Scores:
        val, test = super().evaluate(model)
        return Scores(1 - val, 1 - test)


@dataclass(frozen=True)
class Balanced(Tiny):
    """Judged by a metric with a name of its own."""

    metric: ClassVar[Metric] = Metric("F1")


class TiedNetwork(torch.nn.Module):
    """Two layers of it have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 8), torch.nn.Linear(8, 10)
        self.one, self.other = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
        self.other.weight = self.one.weight

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(self.other(self.one(self.first(images.flatten(1)).relu()).relu()).relu())  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Tied(Tiny):
    """Digits with a network of tied weights."""

    def model(self, seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return TiedNetwork()


@dataclass(frozen=True)
class Spare(Tiny):
    """Has a weight that does not train, in one of several ways."""

    why: str = "uncalled"
    momentum: float = 0.9

    def model(self, seed: int) -> torch.nn.Module:
        network = super().model(seed)
        network.spare = torch.nn.Parameter(torch.full((8, 8), 0.01), self.why != "frozen")
        return network

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        called = model.spare.sum() if self.why != "uncalled" else 0  # type: ignore[union-attr, operator]
        return super().loss(model, batch) + called * (0 if self.why == "zero" else 1)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        left_out = model.spare if self.why == "outside" else None
        parameters = [parameter for parameter in model.parameters() if parameter is not left_out]
        return torch.optim.SGD(parameters, lr=0.1, momentum=self.momentum)


@dataclass(frozen=True)
class SpareLeftOut(Spare):
    """The same, with that weight outside what may be pruned."""

    def prunable(self, model: torch.nn.Module) -> Mapping[str, torch.nn.Parameter]:
        return {name: weight for name, weight in super().prunable(model).items() if name != "spare"}


@dataclass(frozen=True)
class Held(Tiny):
    """After its end the schedule holds the rate of its middle, so that fine-tuning is the beginning of other runs."""

    @property
    def schedule(self) -> Schedule:
        return Schedule.piecewise(19, [0.1, 0.01, 0.001], drops=[2, 14], final=0.01)


@dataclass(frozen=True)
class Logged(Tiny):
    """Writes a line for every run and every evaluation; trains only once a second process has begun, too."""

    def batches(self, seed: int, position: Position, device: torch.device) -> Iterator[Batch]:
        log("trains")
        limit = time.monotonic() + 120
        while len({line.split()[1] for line in logged() if line.startswith("trains")}) < 2:
            assert time.monotonic() < limit, "no second process came"
            time.sleep(0.05)
        return super().batches(seed, position, device)

    def evaluate(self, model: torch.nn.Module) -> Scores:
        scores = super().evaluate(model)
        weight = next(model.parameters()).double().sum().item()
        log(f"evaluates {weight!r}")
        return scores


def log(text: str) -> None:
    kind, *rest = text.split()
    with open(os.environ["TINY_LOG"], "a") as file:  # noqa: PTH123 (one atomic append)
        file.write(" ".join([kind, str(os.getpid()), *rest]) + "\n")


def logged() -> list[str]:
    return Path(os.environ["TINY_LOG"]).read_text().splitlines()


class _Mixed(torch.nn.Module):
    """Two layers of one weight, then one that is divided by the norms of its rows, or made orthogonal."""

    def __init__(self, orthogonal: bool) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.two.weight = self.one.weight
        self.last = (parametrizations.orthogonal if orthogonal else parametrizations.weight_norm)(
            torch.nn.Linear(64, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(self.two(self.one(images.flatten(1)).relu()).relu())


@dataclass(frozen=True)
class Mixed(Tiny):
    """A network whose weights are tied and computed from others."""

    orthogonal: bool = False

    def model(self, seed: int) -> torch.nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return _Mixed(self.orthogonal)


@dataclass(frozen=True)
class Shared(Tiny):
    """In float64, for several processes, of which the second dies or fails where a file in the current folder says so.

    Two ways to compute it differ by rounding alone, and its accuracies not at all.
    """

    learning_rate: float = 0.02

    def model(self, seed: int) -> torch.nn.Module:
        return super().model(seed).double()

    def standardised(self, images: torch.Tensor) -> torch.Tensor:
        return images.double() / 16 - 1

    def example(self) -> Batch:
        return (torch.zeros(1, 1, 8, 8, dtype=torch.float64),)

    def batches(self, seed: int, position: Position, device: torch.device, share: Share = WHOLE) -> Iterator[Batch]:
        for step, batch in enumerate(super().batches(seed, position, device, share), start=position.steps):
            if share.number and step == 14:
                for name in ("dies", "fails"):
                    if (file := Path(name)).exists():
                        file.unlink()
                        if name == "fails":
                            raise InputError("process 1 has no such data; copy it there")
                        os.kill(os.getpid(), signal.SIGKILL)
            yield batch
