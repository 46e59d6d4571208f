"""Small tasks whose data stays on the device: any optimizer, several shapes, an LSTM, an average of the weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from rewound import Batch, Schedule, Scores
from rewound.foundations.randomness import bits
from rewound.tasks.recipes.gnmt import GNMT, NO_WORD, smoothed_loss
from rewound.tasks.resident import Part, ResidentRecipe


def groups(model: nn.Module, kind: Callable[..., Optimizer]) -> Optimizer:
    """The last layer at a tenth of the rate."""
    *rest, weight, bias = model.parameters()
    return kind([{"params": rest}, {"params": [weight, bias], "lr": 0.001}], lr=0.01)


class Own(SGD):
    """An optimizer that torch does not know."""


CAPTURED: dict[str, Callable[[nn.Module], Optimizer]] = {
    name: (lambda model, kind=kind: kind(model.parameters(), lr=0.01))
    for name, kind in {
        "sgd": partial(SGD, momentum=0.9, weight_decay=1e-2),
        "plain-sgd": SGD,
        "adam": Adam,
        "amsgrad": partial(Adam, amsgrad=True, weight_decay=1e-2),
        "adamw": partial(AdamW, weight_decay=1e-2),
        "adamw-foreach": partial(AdamW, foreach=True),
        "adamax": Adamax,
        "adadelta": Adadelta,
        "nadam": NAdam,
        "radam": RAdam,
        "rmsprop": partial(RMSprop, momentum=0.9, centered=True),
    }.items()
} | {
    "groups": partial(groups, kind=partial(SGD, momentum=0.9)),
    "adam-groups": partial(groups, kind=Adam),
    "another-rate": lambda model: SGD([{"params": model.parameters(), "lr": 0.02}], lr=0.01, momentum=0.9),
    "head": lambda model: SGD(list(model.parameters())[-2:], lr=0.01, momentum=0.9),
}
OTHERS: dict[str, Callable[..., Optimizer]] = {
    "adagrad": Adagrad,
    "asgd": ASGD,
    "rprop": Rprop,
    "no-epsilon": partial(Adam, eps=0.0),
    "dampening": partial(SGD, momentum=0.9, dampening=0.5),
    "own": Own,
}


def numbers(shape: Sequence[int], key: int, device: torch.device) -> Tensor:
    """Values in [-1, 1), the same on every machine and of the default type."""
    n = torch.Size(shape).numel()
    return (bits(key, torch.arange(n)).double() / 2**62 - 1).reshape(*shape).to(device, torch.get_default_dtype())


@dataclass(frozen=True)
class Toy(ResidentRecipe):
    """What they share: 40 examples in batches of 6, and a schedule."""

    kind: str = "sgd"
    batch_size: int = 6

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(40, self.batch_size),)

    def resident(self, device: torch.device) -> Sequence[Tensor]:
        x = numbers((40, 5), 1, device)
        return x, (x.sum(1) > 0).long()

    def network(self) -> nn.Module:
        # Smooth, so that rounding flips nothing.
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2))

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.network()

    def optimizer(self, model: nn.Module) -> Optimizer:
        if self.kind in OTHERS:
            return OTHERS[self.kind](model.parameters(), lr=0.01)
        return CAPTURED[self.kind](model)

    @property
    def schedule(self) -> Schedule:
        return Schedule.linear(round(3 * self.steps_per_epoch), 0.02, 0.01)

    @property
    def training_epochs(self) -> float:
        return 3.0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> Scores:
        return Scores(0.0, 0.0)

    def example(self) -> Batch:
        return (torch.zeros(1, 5),)


@dataclass(frozen=True)
class Vectors(Toy):
    """Dropout, and any optimizer."""


class Reader(nn.Module):
    """The mean of embedded words, through a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(7, 6), nn.Linear(6, 2)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.words(words).mean(1)))
        return out


@dataclass(frozen=True)
class Sentences(Toy):
    """Sentences of three lengths, which are three parts, each with batches of its own size."""

    kind: str = "adam"

    @property
    def parts(self) -> tuple[Part, ...]:
        return Part(20, 4), Part(11, 3), Part(9, 2)

    def resident(self, device: torch.device) -> Sequence[Tensor]:
        return [
            (bits(part, torch.arange(n * (3 + part))) % 7).reshape(n, -1).to(device)
            for part, (n, _) in enumerate(self.parts)
        ]

    def assembled(self, data: Sequence[Tensor], part: int, chosen: Tensor, key: Any, counters: Tensor) -> Batch:
        words = data[part][chosen]
        return words, words.sum(1) % 2

    def network(self) -> nn.Module:
        return Reader()

    def example(self) -> Batch:
        return (torch.zeros(1, 3, dtype=torch.int64),)


class Memory(nn.Module):
    """An LSTM over the five numbers of an example."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.lstm(x[:, :, None])[0][:, -1])
        return out


@dataclass(frozen=True)
class Recurrent(Toy):
    """An LSTM."""

    def network(self) -> nn.Module:
        return Memory()


@dataclass(frozen=True)
class Translating(Sentences):
    """The translation network turns sentences round; some end before the others of their part."""

    compiles: ClassVar[bool] = False

    def assembled(self, data: Sequence[Tensor], part: int, chosen: Tensor, key: Any, counters: Tensor) -> Batch:
        words, lengths = data[part][chosen], 1 + chosen % (3 + part)
        is_behind = torch.arange(3 + part, device=words.device) >= lengths[:, None]
        return words, lengths, words.roll(1, 1), words.flip(1).masked_fill(is_behind, NO_WORD)

    def network(self) -> nn.Module:
        return GNMT(7, layers=2, units=8, dropout=0.3).to(torch.get_default_dtype())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        source, lengths, target, following = batch
        return smoothed_loss(model(source, lengths, target), following, 0.1)

    def example(self) -> Batch:
        words = torch.zeros(1, 3, dtype=torch.int64)
        return words, torch.tensor([3]), words


class Average(nn.Sequential):
    """A network that keeps an average of its first weight in a buffer."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.register_buffer("average", torch.zeros(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(self[0].weight.detach(), 0.1)
        out: Tensor = super().forward(x)
        return out


@dataclass(frozen=True)
class Averaged(Toy):
    """An average of weights beside them."""

    kind: str = "adamw"

    def network(self) -> nn.Module:
        return Average(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
