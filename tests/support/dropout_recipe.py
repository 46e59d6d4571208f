"""A recipe with all that could break composition (dropout, batch statistics, step counts), and its states compared."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import ASGD, SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from rewound import Batch, Mask, Position, Pruner, Recipe, Schedule, Scores, State
from rewound.foundations.randomness import fold
from rewound.method.schedule import Segment
from sameness import is_same

CPU = torch.device("cpu")
STEPS = 12


class PythonCounts(Optimizer):
    """Adam as many write it: the step count is a Python number in the parameter's state, and so is a product."""

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s.update(step=0, decayed=1.0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                s["step"] += 1
                s["decayed"] *= 0.9
                s["mean"].lerp_(p.grad, 0.1)
                s["square"].lerp_(p.grad.square(), 0.001)
                scale = (1 - s["decayed"]) / math.sqrt(1 - 0.999 ** s["step"])
                p.sub_(group["lr"] * s["mean"] / scale / (s["square"].sqrt() + 1e-8))


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, momentum=0.9, weight_decay=1e-3),
    "nesterov": partial(SGD, momentum=0.9, nesterov=True),
    "adam": Adam,
    "amsgrad": partial(Adam, amsgrad=True, weight_decay=1e-3),
    "adamw-fused": partial(AdamW, fused=True),
    "nadam": NAdam,
    "radam": RAdam,
    "rmsprop": partial(RMSprop, momentum=0.9, centered=True),
    "adagrad": Adagrad,
    "asgd": ASGD,
    "rprop": Rprop,
    "adafactor": Adafactor,
    "python-counts": PythonCounts,
}


@dataclass(frozen=True)
class Dropped(Recipe):
    """A small network with dropout and BatchNorm on endless made-up data; `poison` is the step that turns NaN."""

    kind: str = "adam"
    poison: int = -1

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return OPTIMIZERS[self.kind](model.parameters(), lr=0.01)

    @property
    def schedule(self) -> Schedule:
        return Schedule.linear(STEPS, 0.02, 0.01)

    @property
    def steps_per_epoch(self) -> float:
        return 4.0

    @property
    def training_epochs(self) -> float:
        return 3.0

    def batches(self, seed: int, position: Position, device: torch.device) -> Iterator[Batch]:
        step = position.steps
        while True:
            draw = torch.Generator().manual_seed(fold(seed, position.prunings, "data", step))
            x = torch.randn(10, 6, generator=draw)
            yield x * (math.nan if step == self.poison else 1), (x.sum(1) > 0).long()
            step += 1

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> Scores:
        assert not model.training
        x, y = next(self.batches(99, Position(0, 0), CPU))
        return Scores((model(x).argmax(1) == y).double().mean().item(), F.cross_entropy(model(x), y).item())

    def example(self) -> Batch:
        return (torch.zeros(1, 6),)


def last(run: Iterator[State]) -> State:
    return [state.clone() for state in run][-1]


def whole(recipe: Recipe) -> list[Segment]:
    return recipe.schedule.segments(0, recipe.schedule.steps)


def half(recipe: Recipe, state: State) -> Mask:
    return Pruner().prune({name: state.model[name] for name in recipe.shapes}, 0.5)


def same_under(mask: Mask | None, one: State, other: State) -> bool:
    """Rprop writes step sizes for pruned weights too, which nothing reads and a new context masks again."""
    masked = [state.pruned(mask or Mask({}), 1, 3) for state in (one, other)]
    return one.position == other.position and is_same(*masked)


def differs(one: State, other: State) -> bool:
    return any(not torch.equal(w, other.model[n]) for n, w in one.model.items() if n.endswith("weight"))
