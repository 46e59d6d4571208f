"""A small module under Lightning's real trainer."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, TensorDataset

from rewound import Mask
from rewound.integrations.lightning import Rewind

T, BATCHES = 3, 4  # epochs, and batches in each

MARKS = [
    pytest.mark.usefixtures("one_thread"),
    # Lightning's advice: more workers for the data loader, a lower logging interval, a loader that can be resumed.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),  # nothing is saved again
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),  # what Lightning does with torch
]


class Module(LightningModule):
    """A classifier with batch statistics; its schedule moves by step or by epoch."""

    def __init__(self, interval: str = "step", manual: bool = False, optimizers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.interval, self.count, self.automatic_optimization = interval, optimizers, not manual
        self.fake: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            assert not isinstance(optimizer, list)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> object:
        made = [SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3) for _ in range(self.count)]
        if self.interval == "step":
            steps = int(self.trainer.estimated_stepping_batches)
            moving: object = lr_scheduler.OneCycleLR(made[0], max_lr=0.2, total_steps=steps)
        else:
            moving = lr_scheduler.MultiStepLR(made[0], [1, 2])
        return made, [{"scheduler": moving, "interval": self.interval}]


class Rates(Callback):
    """Notes the learning rate of every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.seen.append(optimizer.param_groups[0]["lr"])


def loader(count: int = 16 * BATCHES) -> DataLoader[tuple[Tensor, ...]]:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(count))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=16)


def trainer(folder: Path, *callbacks: Callback, **options: object) -> Trainer:
    given: dict[str, object] = {
        "max_epochs": T,
        "default_root_dir": folder,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "num_sanity_val_steps": 1,
        **options,
    }
    return Trainer(callbacks=list(callbacks), **given)  # type: ignore[arg-type]


def fit(trainer: Trainer, module: LightningModule, checkpoint: Path | None = None) -> None:
    trainer.fit(module, loader(), loader(32), ckpt_path=checkpoint)


def rewinding(**options: object) -> Rewind:
    return Rewind(**{"compression": 1.5, "say": lambda line: None, **options})  # type: ignore[arg-type]


def every_epoch(folder: Path, **options: object) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **options)  # type: ignore[arg-type]


def pieces(values: list[float], length: int) -> list[list[float]]:
    return [values[start : start + length] for start in range(0, len(values), length)]


def assert_sparse(state: dict[str, Tensor], mask: Mask) -> None:
    for name, kept in mask.items():
        assert not state[name][~kept].any(), name
        assert int(state[name].count_nonzero()) == mask.counts[name]


def hooks(trainer: Trainer, module: LightningModule) -> list[object]:
    held = [hooks for name, hooks in vars(trainer.optimizers[0]).items() if name.endswith("_hooks")]
    parameters = [parameter._post_accumulate_grad_hooks for parameter in module.parameters()]
    return [hook for hook in (*held, *parameters, _global_optimizer_pre_hooks) if hook]
