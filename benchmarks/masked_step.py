"""What a training step under a mask costs more than one without.

ResNet-20 on random CIFAR-10 shaped images with SGD (momentum 0.9, weight decay), and a transformer (4 layers of width
256) on random sequences of 64 with AdamW, both at density 0.2. Goal: a step under `mask.attached` takes at most 3%
longer than a step without; the overhead of `torch.nn.utils.prune.global_unstructured` on the same network and batch is
printed beside it. What a mask costs does not depend on the batch: 32 on CPU is smaller than usual, so that the overhead
printed is larger than usual.

On CPU most of what the transformer loses is AdamW's own: the square root of a slot that is zero takes MKL many times as
long as that of another number; the last line printed measures it.

Each takes a step per round, in a new random order (what ran before leaves its traces in caches), so that every round
gives one ratio to a step without a mask; a second network without one says what is noise. The overhead is the median
over rounds, with the quartiles in brackets: of wall-clock time and, on CPU (one thread), of CPU time, which other
programs on the machine disturb least.

    python benchmarks/masked_step.py                  # 4 minutes
    python benchmarks/masked_step.py --device cuda    # half a minute
"""

import argparse
import copy
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median, quantiles
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.prune import L1Unstructured, global_unstructured
from torch.optim.optimizer import Optimizer

from global_pruning import machine
from rewound import Mask, Pruner
from rewound.tasks.recipes.resnet import ResNet

DENSITY = 0.2
BATCH = {"cpu": 32, "cuda": 128}
ROUNDS = {"cpu": 80, "cuda": 400}


class Seconds(NamedTuple):
    """What a step took."""

    cpu: float
    wall: float


@dataclass(frozen=True)
class Task:
    """A network, the optimizer it is trained with and the shape of its input."""

    network: nn.Module
    optimizer: Callable[[nn.Module], Optimizer]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Training:
    """A network, its optimizer and the mask that is attached while it trains."""

    model: nn.Module
    optimizer: Optimizer
    mask: Mask | None = None

    def attached(self) -> AbstractContextManager[None]:
        """The mask at work, or nothing."""
        return self.mask.attached(self.model, self.optimizer) if self.mask is not None else nullcontext()

    def timed(self, inputs: Tensor, labels: Tensor) -> Seconds:
        """The seconds of a step."""
        _wait(inputs)
        cpu, wall = time.process_time(), time.perf_counter()
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        _wait(inputs)
        return Seconds(time.process_time() - cpu, time.perf_counter() - wall)


class Block(nn.Module):
    """Attention and a feed-forward network; of Linear layers, since torch's pruning breaks nn.MultiheadAttention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.attend(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.join(F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class Transformer(nn.Sequential):
    """Sequences of vectors to ten classes."""

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__(*(Block(width, heads=4) for _ in range(layers)), nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1)


def tasks() -> dict[str, Task]:
    """Both networks with their usual optimizers."""
    torch.manual_seed(0)
    return {
        "ResNet-20": Task(
            ResNet(generator=torch.Generator().manual_seed(0)),
            lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=2e-4),
            (3, 32, 32),
        ),
        "transformer": Task(
            Transformer(), lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01), (64, 256)
        ),
    }


def trainings(task: Task) -> dict[str, Training]:
    """The same network four times: dense, once more, under a mask, and pruned by torch."""
    dense, again, masked, theirs = (copy.deepcopy(task.network) for _ in range(4))
    mask = Pruner(floor=0.02)(masked, DENSITY)  # a fresh network's last layer, with its small weights, would vanish
    modules = dict(theirs.named_modules())
    pairs = [(modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in mask]
    global_unstructured(pairs, pruning_method=L1Unstructured, amount=1 - DENSITY)
    return {
        "dense": Training(dense, task.optimizer(dense)),
        "again": Training(again, task.optimizer(again)),
        "mask": Training(masked, task.optimizer(masked), mask),
        "torch": Training(theirs, task.optimizer(theirs)),
    }


def overhead(rounds: list[dict[str, Seconds]], name: str, clock: str) -> str:
    """How much longer steps take than dense ones, in percent: median and quartiles over rounds."""
    ratios = [getattr(r[name], clock) / getattr(r["dense"], clock) for r in rounds]
    low, middle, high = (f"{100 * (ratio - 1):+.1f}" for ratio in quantiles(ratios, n=4))
    return f"{middle}% [{low}, {high}]"


def measure(name: str, task: Task, device: str) -> None:
    """Print one line: the overheads on one network."""
    task.network.to(device)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH[device], *task.shape, generator=generator).to(device)
    labels = (torch.arange(BATCH[device]) % 10).to(device)
    trained = trainings(task)
    order, draw = list(trained), random.Random(0)
    rounds = []
    with trained["mask"].attached():  # once per training: not counted
        for number in range(-5, ROUNDS[device]):
            draw.shuffle(order)
            times = {name: trained[name].timed(inputs, labels) for name in order}
            if number >= 0:
                rounds.append(times)
    mask, model = trained["mask"].mask, trained["mask"].model
    assert mask is not None
    assert all(not parameter[~mask[name]].any() for name, parameter in model.named_parameters() if name in mask)
    milliseconds = 1000 * median(r["dense"].wall for r in rounds)
    clocks = {"wall": "wall clock", "cpu": "CPU time"} if device == "cpu" else {"wall": "wall clock"}
    for clock, called in clocks.items():
        print(
            f"{name}, batch {BATCH[device]}, a step of {milliseconds:.1f} ms, {called}: under a mask "
            f"{overhead(rounds, 'mask', clock)}; torch.nn.utils.prune {overhead(rounds, 'torch', clock)}; "
            f"none again {overhead(rounds, 'again', clock)}",
            flush=True,
        )


def square_roots() -> str:
    """How long AdamW's square root takes where four fifths of a slot are zero, against where none is."""
    slot = torch.rand(768, 1024) * 1e-9
    milliseconds = []
    for slots in (slot, slot * (torch.rand_like(slot) < DENSITY)):
        times = []
        for _ in range(30):
            start = time.process_time()
            slots.sqrt()
            times.append(time.process_time() - start)
        milliseconds.append(1000 * median(times))
    full, sparse = milliseconds
    return (
        f"square roots of {slot.numel():,} numbers: {full:.2f} ms, with {1 - DENSITY:.0%} of them zero {sparse:.2f} ms"
    )


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=BATCH, default="cpu")
    device = parser.parse_args().device
    torch.set_num_threads(1)
    print(machine() if device == "cpu" else f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, task in tasks().items():
        measure(name, task, device)
    if device == "cpu":
        print(square_roots())


if __name__ == "__main__":
    main()
