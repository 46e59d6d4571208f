"""A network of two layers with its batches, those of tied and merged weights, and what wrappers do to names."""

import torch
from torch import Tensor, nn


def network(memory_format: torch.memory_format = torch.contiguous_format) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)]
    return nn.Sequential(*layers).to(memory_format=memory_format)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    return [
        (torch.randn(6, 2, 4, 4, generator=draw), torch.randint(4, (6,), generator=draw, dtype=torch.int64))
        for _ in range(count)
    ]


class Wrapped(nn.Module):
    """What DataParallel and DistributedDataParallel do to names, without processes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


class Compiled(nn.Module):
    """What torch.compile does to names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, x: Tensor) -> Tensor:
        return self._orig_mod(x)


class Tied(nn.Module):
    """One matrix as embedding and as output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 3)
        self.output = nn.Linear(3, 6, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.embedding(tokens))


class Merging(nn.Linear):
    """A linear layer and an adapter of low rank, which is added to its weights for evaluation, as loralib does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.down, self.up = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))
        self.merged = False

    def train(self, mode: bool = True) -> "Merging":
        if self.merged == mode:
            self.weight.data += (1 - 2 * mode) * self.up @ self.down
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found if self.merged else found + x @ self.down.T @ self.up.T
