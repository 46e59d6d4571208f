"""What a training step of a slim network takes, beside one of the dense network: ResNet-20, SGD, batch 32, one thread.

Half and three quarters of the weights go, as whole channels, as many of each layer. Each network takes a step per round
in a new random order, so that every round gives one ratio to the dense step; the median over rounds is printed, with
the quartiles in brackets, of CPU time, which other programs on the machine disturb least.

    python benchmarks/slim_step.py    # 1 minute
"""

import random
import time
from collections.abc import Callable
from statistics import quantiles

import torch
from torch import nn

from global_pruning import machine
from rewound import Pruner, slim
from rewound.tasks.recipes.resnet import ResNet

ROUNDS, BATCH = 60, 32


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    dense = ResNet(generator=torch.Generator().manual_seed(0))
    pruner = Pruner(pattern="unit", scope="layer")
    networks = {"dense": dense}
    for density in (0.5, 0.25):
        mask = pruner(dense, density=density, example_inputs=images[:2])
        networks[f"density {density:g}"] = slim(dense, mask, images[:2]).model
    steps = {name: step(network, images, labels) for name, network in networks.items()}
    for each in steps.values():
        each()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name in random.sample(list(steps), len(steps)):
            began = time.process_time()
            steps[name]()
            seconds[name].append(time.process_time() - began)
    print(machine())
    for name, network in networks.items():
        low, middle, high = quantiles([a / b for a, b in zip(seconds[name], seconds["dense"], strict=True)], n=4)
        weights = sum(parameter.numel() for parameter in network.parameters())
        print(f"{name}: {weights:,} parameters, {middle:.2f} [{low:.2f}, {high:.2f}] of the dense step")


def step(network: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    network.train()

    def take() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()

    return take


if __name__ == "__main__":
    main()
