"""Prune your own network in an Accelerate script: the same two lines. Run: python examples/accelerate_script.py

`rewound.epochs` takes what `accelerator.prepare` returns, and `accelerator.save_state` holds the run as well. The task
is scikit-learn's handwritten digits. Kill it and run it again: it goes on from its last state.
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rewound

EPOCHS, STATE = 6, Path("accelerate-run/state")

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
pixels, digits = load_digits(return_X_y=True)
images, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
loader = DataLoader(TensorDataset(images[:1200], labels[:1200]), batch_size=32, shuffle=True)
held_out = images[1200:].to(accelerator.device), labels[1200:].to(accelerator.device)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * (len(loader) // 2))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)


def accuracy() -> float:
    with torch.no_grad():
        return (model(held_out[0]).argmax(1) == held_out[1]).double().mean().item()


run = rewound.epochs(EPOCHS, model, optimizer, scheduler, compression=3)  # new
accelerator.register_for_checkpointing(run)
if STATE.exists():
    accelerator.load_state(str(STATE))
for epoch in run:  # was: for epoch in range(EPOCHS)
    loader.set_epoch(epoch)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    run.report(accuracy())
    accelerator.save_state(str(STATE))

assert run.mask is not None
last = run.levels[-1]
print(f"{last.compression:.2f}x smaller ({last.network_compression:.2f}x of the whole network)")
print(f"accuracy {accuracy():.3f}, dense {run.levels[0].value:.3f}")
