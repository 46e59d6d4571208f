"""Prune a LightningModule: one callback more. Run: python examples/lightning_module.py

The task is scikit-learn's handwritten digits. Every checkpoint is sparse, and `trainer.fit(..., ckpt_path="last")` goes
on from it under the same mask.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rewound.integrations.lightning import Rewind


class Digits(LightningModule):
    """A small convolutional network, as any other module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 16, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> object:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels))
train, validation = torch.utils.data.random_split(data, [1200, 597])

rewind = Rewind(compression=3, monitor="val_acc")  # new
trainer = Trainer(
    max_epochs=3,
    callbacks=[rewind, ModelCheckpoint(save_last=True)],
    default_root_dir="lightning-run",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Digits(), DataLoader(train, batch_size=64, shuffle=True), DataLoader(validation, batch_size=597))

run = rewind.run
assert run.mask is not None
last = run.levels[-1]
print(f"{last.compression:.2f}x smaller ({last.network_compression:.2f}x of the whole network)")
print(f"accuracy {run.levels[-1].value:.3f}, dense {run.levels[0].value:.3f}")
