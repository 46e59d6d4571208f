"""A ConvNet gets physically smaller, level by level, in a loop of your own. Run: python examples/slim_loop.py

The task is scikit-learn's handwritten digits.
"""

import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import rewound

torch.manual_seed(0)
pixels, digits = load_digits(return_X_y=True)
images, labels = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(digits)
model = nn.Sequential(
    *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
    *(nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[4])

pruner = rewound.Pruner(pattern="unit", scope="layer")  # whole channels, as many of each layer
run = rewound.epochs(5, model, optimizer, scheduler, compression=4, rate=0.5, pruner=pruner, slim=True)
for _ in run:
    began = time.perf_counter()
    for rows in torch.randperm(1200).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
    scheduler.step()
    seconds = time.perf_counter() - began
    with torch.no_grad():
        run.report((model.eval()(images[1200:]).argmax(1) == labels[1200:]).double().mean().item())
    model.train()
last = run.levels[-1]
print(model)
print(f"{last.compression:.2f}x smaller ({last.network_compression:.2f}x of the whole network)")
print(f"the last epoch took {seconds:.2f} s")
torch.save(model.state_dict(), "digits-slim.pt")
