"""What a training step under a mask costs more than one without.

ResNet-20 on random CIFAR-10 shaped batches of 32, SGD with momentum 0.9 and weight decay, one thread, density 0.2.
Goal: a step under `mask.attached` takes at most 3% longer than a step without; the overhead of
`torch.nn.utils.prune.global_unstructured` on the same network and batch is printed beside it. What a mask costs does
not depend on the batch, so that in the recipe's batches of 128 it is about a quarter of what is printed here.

The three take a step in turn, in rotating order, so that every round gives one ratio to a step without a mask.
The overhead is the median over rounds, with the quartiles in brackets: of CPU time, which other programs on the
machine disturb least, and of wall-clock time.

    python benchmarks/masked_step.py      # 2 minutes
"""

import copy
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.prune import L1Unstructured, global_unstructured

from global_pruning import machine
from rewound import Mask, Pruner
from rewound.recipes.resnet import ResNet

DENSITY, BATCH = 0.2, 32
ROUNDS = 200


class Seconds(NamedTuple):
    """What a step took."""

    cpu: float
    wall: float


@dataclass(frozen=True)
class Training:
    """A network, its optimizer and the mask that is attached while it trains."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    mask: Mask | None = None

    def attached(self) -> AbstractContextManager[None]:
        """The mask at work, or nothing."""
        return self.mask.attached(self.model, self.optimizer) if self.mask is not None else nullcontext()

    def timed(self, images: Tensor, labels: Tensor) -> Seconds:
        """The seconds of a step; attaching is done once per training, and is not counted."""
        with self.attached():
            cpu, wall = time.process_time(), time.perf_counter()
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(images), labels).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            return Seconds(time.process_time() - cpu, time.perf_counter() - wall)


def trainings() -> dict[str, Training]:
    """The same network three times: dense, under a mask, and pruned by torch."""
    sgd = partial(torch.optim.SGD, lr=1e-3, momentum=0.9, weight_decay=2e-4)
    network = ResNet(generator=torch.Generator().manual_seed(0))
    dense, masked, theirs = (copy.deepcopy(network) for _ in range(3))
    mask = Pruner(floor=0.02)(masked, DENSITY)  # a fresh network's last layer, with its small weights, would vanish
    pairs = [(module, "weight") for module in theirs.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    global_unstructured(pairs, pruning_method=L1Unstructured, amount=1 - DENSITY)
    return {
        "dense": Training(dense, sgd(dense.parameters())),
        "mask": Training(masked, sgd(masked.parameters()), mask),
        "torch": Training(theirs, sgd(theirs.parameters())),
    }


def overhead(rounds: list[dict[str, Seconds]], name: str, clock: str) -> str:
    """How much longer steps take than dense ones, in percent: median and quartiles over rounds."""
    ratios = [getattr(r[name], clock) / getattr(r["dense"], clock) for r in rounds]
    low, middle, high = (f"{100 * (ratio - 1):+.1f}" for ratio in quantiles(ratios, n=4))
    return f"{middle}% [{low}, {high}]"


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.randn(BATCH, 3, 32, 32, generator=generator), torch.arange(BATCH) % 10
    trained = trainings()
    names = list(trained)
    for training in trained.values():
        training.timed(images, labels)
    rounds = []
    for number in range(ROUNDS):
        first = number % len(names)
        rounds.append({name: trained[name].timed(images, labels) for name in names[first:] + names[:first]})
    mask, model = trained["mask"].mask, trained["mask"].model
    assert mask is not None
    assert all(not parameter[~mask[name]].any() for name, parameter in model.named_parameters() if name in mask)
    seconds = median(r["dense"].wall for r in rounds)
    print(machine())
    print(
        f"ResNet-20, batch {BATCH}, a step of {seconds:.3f} s: under a mask {overhead(rounds, 'mask', 'cpu')} CPU, "
        f"{overhead(rounds, 'mask', 'wall')} wall clock; torch.nn.utils.prune {overhead(rounds, 'torch', 'cpu')} CPU, "
        f"{overhead(rounds, 'torch', 'wall')} wall clock"
    )


if __name__ == "__main__":
    main()
