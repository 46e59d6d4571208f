"""A data-parallel training script, run by `test_ranks.py` in several processes:

python parallel_loop.py RANK WORLD FOLDER {ddp,units,fresh,apart,drop,sharded,fsdp} [DIE_IN]

Ranks meet over a file in FOLDER. `ddp` trains with DistributedDataParallel; so does `fresh`, by reinitialization, with
random numbers of each rank's own, `units`, which removes hidden units, and `drop`, where rank 0 finds the second level
worse and rank 1 does not; `apart` gives each rank weights of its own; `sharded` asks for fully_shard, `fsdp` for
FullyShardedDataParallel. The last line is a digest of the mask, and the weights are saved.
"""

import hashlib
import os
import signal
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rewound
import rewound.loops.iteration

BATCH, STEPS, T = 16, 3, 3


def main(rank: int, world: int, folder: Path, kind: str, die_in: int | None = None) -> None:
    torch.set_num_threads(1)
    if world > 1:
        folder.mkdir(exist_ok=True)
        meeting = folder / f"meeting-{die_in}"
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    torch.manual_seed(rank if kind in ("apart", "fresh") else 0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    model: nn.Module = plain
    if kind in ("ddp", "units", "fresh", "drop") and world > 1:
        model = DistributedDataParallel(plain)
    elif kind == "sharded":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    elif kind == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(plain, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T)
    run = rewound.epochs(
        T,
        model,
        optimizer,
        scheduler,
        compression=2,
        technique="reinitialization" if kind == "fresh" else "weight-rewinding",
        retrain_epochs=2,
        init=lambda model: model.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None),
        checkpoint=folder / "run",
        max_drop=0.1 if kind == "drop" else None,
        pruner=rewound.Pruner(pattern="unit" if kind == "units" else "weight"),
    )
    for epoch in run:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 * epoch + step)
            x = torch.randn(BATCH, 8, generator=generator, dtype=torch.float64)
            mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[mine]), x[mine, :4].argmax(1)).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if epoch == die_in:
                os.kill(os.getpid(), signal.SIGKILL)
        for name, kept in (run.mask or {}).items():
            assert not plain.get_parameter(name)[~kept].any()
            assert not plain.get_parameter(name).grad[~kept].any()
        print(f"epoch {epoch}, norm {norm:.9f}")
        scheduler.step()
        if kind == "drop" and rank == 0:
            run.report(0.9 if run.level < 2 else 0.5)
        elif kind == "drop" and run.level < 2:
            run.report(0.9 - run.level)
    assert run.mask is not None
    digest = hashlib.sha256(b"".join(kept.numpy().tobytes() for kept in run.mask.values())).hexdigest()
    torch.save(plain.state_dict(), folder / f"weights-{rank}.pt")
    print(digest)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # a thread of gloo's that is still being joined would abort an ordinary end, now and then


if __name__ == "__main__":  # the tests import this file, too
    rewound.loops.iteration.SAVE_SECONDS = 0.0
    warnings.simplefilter("ignore")
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        Path(sys.argv[3]),
        sys.argv[4],
        int(sys.argv[5]) if len(sys.argv) > 5 else None,
    )
