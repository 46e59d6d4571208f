"""A user's training script in miniature, for the tests of `rewound.epochs` around it."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import SGD, lr_scheduler
from torch.optim.optimizer import Optimizer

import rewound
from rewound import Epochs

T, STEPS = 5, 3  # epochs, and optimizer steps in each
AT_ONCE = [name for name, technique in rewound.TECHNIQUES.items() if technique.gradual is None]  # prune, then train


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def redraw(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def batch(epoch: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * epoch + step)
    x = torch.randn(16, 6, generator=generator)
    return x, x[:, :3].argmax(1)


def one_step(model: nn.Module, optimizer: Optimizer, epoch: int, step: int) -> None:
    device = next(model.parameters()).device
    x, y = (tensor.to(device) for tensor in batch(epoch, step))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


@dataclass
class Loop:
    """A user's training script: a model, an optimizer, a scheduler, and what it saw."""

    model: nn.Module = field(default_factory=network)
    optimizer: Optimizer = None  # type: ignore[assignment]
    scheduler: lr_scheduler.LRScheduler = None  # type: ignore[assignment]
    seen: list[tuple[int, int, int]] = field(default_factory=list)
    """(epoch, level, epoch of the schedule)"""
    rates: list[list[float]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = self.optimizer or SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        self.scheduler = self.scheduler or lr_scheduler.MultiStepLR(self.optimizer, [2, 4])

    def run(self, **options: object) -> Epochs:
        objects = (self.model, self.optimizer, self.scheduler)
        return rewound.epochs(T, *objects, say=self.said.append, **options)  # type: ignore[arg-type]

    def train(self, epoch: int) -> None:
        for step in range(STEPS):
            one_step(self.model, self.optimizer, epoch, step)
        self.scheduler.step()

    def over(self, run: Epochs, until: int | None = None, accuracy: Callable[[Epochs], float] | None = None) -> Epochs:
        for epoch in run:
            self.seen.append((epoch, run.level, run.schedule_epoch))
            self.rates.append([])
            for step in range(STEPS):
                one_step(self.model, self.optimizer, epoch, step)
                self.rates[-1].append(self.optimizer.param_groups[0]["lr"])
            self.scheduler.step()
            if accuracy is not None:
                run.report(accuracy=accuracy(run))
            if epoch == until:
                break
        return run


def made_by_the_version_before(folder: Path) -> None:
    """Take away from a folder of checkpoints what that version did not write."""
    for path in folder.glob("*.pt"):
        content = torch.load(path, weights_only=True)
        progress = content["progress"]
        progress["reached"] = [reached[:4] for reached in progress["reached"]]  # without the metric of each level
        del progress["run"], progress["gradients"]
        torch.save(content, path)  # without a checksum
    arguments = json.loads((folder / "arguments.json").read_text())
    for name in ("run", "unchecked", "checksum"):
        del arguments[name]
    (folder / "arguments.json").write_text(json.dumps({**arguments, "version": 1}))
