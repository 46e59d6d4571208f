"""Prune your own network, in a training loop of your own: two lines change. Run: python examples/pytorch_loop.py

The task is scikit-learn's handwritten digits. Kill it and run it again: it goes on where it was.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rewound

EPOCHS = 10

torch.manual_seed(0)
pixels, digits = load_digits(return_X_y=True)
images, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
loader = DataLoader(TensorDataset(images[:1200], labels[:1200]), batch_size=64, shuffle=True)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[6, 8])


def accuracy() -> float:
    with torch.no_grad():
        return (model(images[1200:]).argmax(1) == labels[1200:]).double().mean().item()


run = rewound.epochs(EPOCHS, model, optimizer, scheduler, compression=5, checkpoint="digits-run")  # new
for _ in run:  # was: for _ in range(EPOCHS)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    scheduler.step()
    run.report(accuracy())  # only to be told of it level by level, or for max_drop=

assert run.mask is not None
last = run.levels[-1]
print(f"{last.compression:.2f}x smaller ({last.network_compression:.2f}x of the whole network)")
print(f"accuracy {accuracy():.3f}, dense {run.levels[0].value:.3f}")
rewound.save(model, run.mask, "digits.safetensors")
