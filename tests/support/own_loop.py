"""A user's own training script, which `test_checkpoints.py` kills: python own_loop.py FOLDER TECHNIQUE [DIE_IN | wait]

With DIE_IN it kills itself, as `kill -9` does, in the middle of that epoch; with `wait` it stays in the first one, with
the worker of a DataLoader beside it, until it is killed. Its last line is a digest of the weights.
"""

import hashlib
import os
import random
import signal
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import rewound
import rewound.loops.iteration


def main(folder: str, technique: str, die_in: int | None = None, waits: bool = False) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    random.seed(0), np.random.seed(0)  # noqa: NPY002  # what many a script does
    x = torch.randn(64, 6)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=4 * 4)
    generator = torch.Generator().manual_seed(1)  # as of a DataLoader
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    run = rewound.epochs(
        4,
        model,
        optimizer,
        scheduler,
        compression=1.9,
        technique=technique,
        retrain_epochs=3,
        final=0.01,
        checkpoint=folder,
        also=[ema, generator],
        init=lambda model: model.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None),
    )
    for epoch in run:
        model.train()
        for _ in range(4):
            rows = torch.randint(64, (16,), generator=generator)
            noise = random.random() * 0.01 + np.random.rand() * 0.01  # noqa: NPY002
            loss = nn.functional.cross_entropy(model(x[rows] + noise), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ema.update_parameters(model)
            if waits:
                wait()
            if epoch == die_in:
                os.kill(os.getpid(), signal.SIGKILL)
        print(f"epoch {epoch}, level {run.level}, rate {optimizer.param_groups[0]['lr']:.6g}")
    digest = hashlib.sha256()
    for tensor in [*model.state_dict().values(), *ema.state_dict().values()]:
        digest.update(tensor.numpy().tobytes())
    print(digest.hexdigest())


def wait() -> None:
    if os.fork() == 0:  # as a DataLoader does, whose worker outlives the script for a while
        time.sleep(10)
        os._exit(0)
    print("waiting", flush=True)
    time.sleep(60)


if __name__ == "__main__":  # the tests import this file, too
    rewound.loops.iteration.SAVE_SECONDS = 0.0
    last = sys.argv[3] if len(sys.argv) > 3 else None
    main(sys.argv[1], sys.argv[2], None if last in (None, "wait") else int(last), waits=last == "wait")
