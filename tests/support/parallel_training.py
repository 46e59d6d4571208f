"""Cases of one network trained by several processes, run by `test_parallel.py` in two of them:

python parallel_training.py RANK WORLD FOLDER {cpu,cuda}

Ranks meet over a file in FOLDER. What each case gives on a rank is saved as RANK.pt: tensors by name, or an error.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from ragged_recipe import Ragged, Slow
from rewound.foundations.errors import Diverged, InputError
from rewound.method.schedule import Schedule, Segment
from rewound.tasks import training
from rewound.tasks.normalisation import GroupedBatchNorm2d
from rewound.tasks.parallel import Abandoned
from rewound.tasks.recipe import Batch, Recipe, Scores
from rewound.tasks.recipes.images import Images
from rewound.tasks.resident import Part, ResidentRecipe
from rewound.tasks.training import State, begin, train
from small_fleets import Digits64, Strangers64, sparse

RATES = (Segment(0.05, 4), Segment(0.005, 3))
SMALL = {"blocks": (1,), "widths": (8,), "batch_size": 24}
RANK, DEVICE = 0, "cpu"


@dataclass(frozen=True)
class Lengths(ResidentRecipe):
    """Sequences of two lengths, each a part of its own, normalised along the way.

    A bias before normalisation would have a gradient of rounding alone, which Adam divides by its own size.
    """

    divisible: ClassVar[bool] = True
    compiles: ClassVar[bool] = False

    @property
    def parts(self) -> tuple[Part, ...]:
        return Part(20, 4), Part(12, 6)

    def resident(self, device: torch.device) -> Sequence[Tensor]:
        draw = torch.Generator().manual_seed(3)
        return [torch.randn(size, generator=draw).to(device) for size in ((20, 3, 5), (12, 3, 2))]

    def assembled(
        self, data: Sequence[Tensor], part: int, chosen: Tensor, key: int | Tensor, counters: Tensor
    ) -> Batch:
        return (data[part][chosen],)

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv1d(3, 4, 1, bias=False), nn.BatchNorm1d(4, momentum=None), nn.Tanh(), nn.Conv1d(4, 3, 1)
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Adam:
        return torch.optim.Adam(model.parameters(), 0.05)

    @property
    def schedule(self) -> Schedule:
        return Schedule.constant(10, 0.05)

    @property
    def training_epochs(self) -> float:
        return 1.0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[0].cumsum(2))

    def evaluate(self, model: nn.Module) -> Scores:
        return Scores(0.0, 0.0)

    def example(self) -> Batch:
        return (torch.zeros(1, 3, 5),)


@dataclass(frozen=True)
class Grouped(Digits64):
    """A network that normalises groups of images."""

    group: int = 6

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layers = (nn.Conv2d(1, 4, 3, bias=False), GroupedBatchNorm2d(4, self.group), nn.Tanh(), nn.AvgPool2d(6))
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 10))


@dataclass(frozen=True)
class Streamed(Ragged):
    """Data that stays on the device of one process, and streams past those of several."""

    divisible: ClassVar[bool] = True

    def source(self, device: torch.device) -> Slow | None:
        return self.slow if dist.is_initialized() else None

    def network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


@dataclass(frozen=True)
class Indivisible(Lengths):
    divisible: ClassVar[bool] = False


@dataclass(frozen=True)
class OtherData(Digits64):
    """Other images in each process."""

    def images(self, device: torch.device) -> Images:
        images = super().images(device)
        return images._replace(train=images.train + RANK)


@dataclass(frozen=True)
class OtherLater(Digits64):
    """The same first batch in each process, of data that differs further on."""

    def made_with(self) -> dict[str, str]:
        return {"data": f"file {RANK}", "decoder": "1.0"}


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.detach().mean()
        return x


@dataclass(frozen=True)
class OwnBuffers(Digits64):
    """A buffer that follows the images of its own process."""

    def model(self, seed: int) -> nn.Module:
        return nn.Sequential(_Counting(), super().model(seed))


@dataclass(frozen=True)
class Exploding64(Digits64):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().loss(model, batch) / (0.0 if RANK else 1.0)


def trained(recipe: Recipe, processes: ProcessGroup | None, stops: Sequence[int] = (2,)) -> dict[str, Tensor]:
    mask = sparse(recipe)
    states = train(recipe, begin(recipe, 1), mask, lr=RATES, stops=stops, device=DEVICE, processes=processes)
    return tensors(list(_clones(states)))


def halves(recipe: Recipe, processes: ProcessGroup | None) -> dict[str, Tensor]:
    """The same steps by two calls of `train`."""
    mask = sparse(recipe)
    (middle,) = _clones(train(recipe, begin(recipe, 1), mask, lr=RATES[:1], device=DEVICE, processes=processes))
    return tensors(list(_clones(train(recipe, middle, mask, lr=RATES[1:], device=DEVICE, processes=processes))))


def abandoned(recipe: Recipe, processes: ProcessGroup | None) -> dict[str, Tensor]:
    """A run that rank 0 leaves in its middle, where it alone wants to look; then another."""
    looks = iter([False, True] if not RANK else [])
    states = train(
        recipe, begin(recipe, 2), lr=RATES, due=lambda: next(looks, False), device=DEVICE, processes=processes
    )
    seen = next(states).position.steps
    if not RANK:
        states.close()  # type: ignore[attr-defined]
    else:
        try:
            next(states)
        except Abandoned:
            seen += 100
    return {**trained(recipe, processes), "seen": torch.tensor(seen)}


def waiting(recipe: Recipe, processes: ProcessGroup | None) -> dict[str, Tensor]:
    """How long training says that it has waited, where a process waits one second more than the one before it."""
    looks, clock = itertools.count(), training.seconds_waited
    training.seconds_waited = lambda: next(looks) * (1.0 + RANK)
    try:
        states = train(recipe, begin(recipe, 1), lr=RATES, stops=(2,), device=DEVICE, processes=processes)
        return {"waited": torch.tensor([state.waited for state in states])}
    finally:
        training.seconds_waited = clock


def _clones(states: Iterator[State]) -> Iterator[State]:
    return (state.clone() for state in states)


def tensors(states: Sequence[State]) -> dict[str, Tensor]:
    losses = {f"loss {number}": torch.tensor(state.loss) for number, state in enumerate(states)}
    return {**states[-1].model, **states[-1].slots, **losses}


def other_state(recipe: Recipe, processes: ProcessGroup | None) -> dict[str, Tensor]:
    return tensors(list(train(recipe, begin(recipe, 1 + RANK), lr=RATES, device=DEVICE, processes=processes)))


def refused(recipe: Recipe, processes: ProcessGroup | None) -> dict[str, Tensor]:
    if processes is None:
        return {}
    return trained(recipe, processes)


Case = tuple[Callable[..., dict[str, Tensor]], Recipe]
CASES: dict[str, Case] = {
    "nesterov": (trained, Digits64(**SMALL)),
    "accumulation": (trained, Digits64(**SMALL, accumulation=3, clip_norm=0.5)),
    "each batch clipped": (trained, Digits64(**SMALL, accumulation=2, clip_norm=0.5, clip_each=True)),
    "a parameter that is not used": (trained, Strangers64(**SMALL, what="unused")),
    "parts of two shapes": (trained, Lengths()),
    "streamed data": (trained, Streamed()),
    "groups within a process": (trained, Grouped(batch_size=24, group=3)),
    "a group for each process": (trained, Grouped(batch_size=24, group=12)),
    "a group of all processes": (trained, Grouped(batch_size=24, group=48)),
    "abandoned": (abandoned, Digits64(**SMALL)),
    "dropout": (trained, Strangers64(**SMALL, what="dropout")),
    "dropout in halves": (halves, Strangers64(**SMALL, what="dropout")),
    "waiting for data": (waiting, Digits64(**SMALL)),
    "in one piece": (trained, Digits64(**{**SMALL, "blocks": (3, 3), "widths": (8, 16)})),
    "in halves": (halves, Digits64(**{**SMALL, "blocks": (3, 3), "widths": (8, 16)})),
    "groups across processes": (refused, Grouped(batch_size=24, group=8)),
    "odd batch": (refused, Digits64(**{**SMALL, "batch_size": 25})),
    "indivisible": (refused, Indivisible()),
    "other data": (refused, OtherData(**SMALL)),
    "other data later": (refused, OtherLater(**SMALL)),
    "other state": (other_state, Digits64(**SMALL)),
    "own buffers": (refused, OwnBuffers(**SMALL)),
    "diverged on rank 1": (refused, Exploding64(**SMALL)),
}


SAME = [*CASES][: [*CASES].index("abandoned")]
"""The cases that are the same with any number of processes."""


def outcome(case: str, processes: ProcessGroup | None = None) -> dict[str, Tensor] | str:
    do, recipe = CASES[case]
    try:
        return {name: tensor.cpu() for name, tensor in do(recipe, processes).items()}
    except (InputError, Diverged) as error:
        return str(error)


def main(rank: int, world: int, folder: Path, device: str) -> None:
    global RANK, DEVICE
    RANK, DEVICE = rank, f"cuda:{rank}" if device == "cuda" else device
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    cases = {2: CASES, 4: ["a group for each process", "in one piece", "in halves"]}.get(world, SAME)
    torch.save({case: outcome(case, dist.group.WORLD) for case in cases}, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
