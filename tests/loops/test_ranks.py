"""Data-parallel runs: every rank prunes the same, and two processes train what one would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rewound
from rewound import Mask
from rewound.loops.checkpoints import locked
from rewound.tasks import ranks

SCRIPT = Path(__file__).parents[1] / "support" / "parallel_loop.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(rewound.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without distributed")


def processes(world: int, folder: Path, kind: str, *rest: object) -> list[tuple[int, str, str]]:
    """(exit status, output, errors) of the script on each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [[str(SCRIPT), str(rank), str(world), str(folder), kind, *map(str, rest)] for rank in range(world)]
    started = [
        subprocess.Popen(
            [sys.executable, *each], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        for each in arguments
    ]
    ended = []
    for process in started:
        out, errors = process.communicate(timeout=240)
        ended.append((process.returncode, out, errors))
    return ended


def weights(folder: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(folder / f"weights-{rank}.pt", weights_only=True)
    return loaded


@pytest.mark.slow
def test_two_processes_prune_and_train_what_one_does_and_resume(tmp_path: Path) -> None:
    one = processes(1, tmp_path / "one", "ddp")
    two = processes(2, tmp_path / "two", "ddp")
    assert [status for status, _, _ in (*one, *two)] == [0, 0, 0], [errors for _, _, errors in (*one, *two)]
    masks = {out.splitlines()[-1] for _, out, _ in (*one, *two)}
    assert len(masks) == 1
    for name, expected in weights(tmp_path / "one").items():
        for rank in (0, 1):
            assert torch.allclose(weights(tmp_path / "two", rank)[name], expected, rtol=0, atol=1e-5)
    tables = [tmp_path / name / "run" / "levels" / "levels.csv" for name in ("one", "two")]
    assert len({table.read_text() for table in tables}) == 1, "rank 0 keeps the levels, each once"
    # Rank 0 alone speaks, and says it once.
    assert "rewound: 3 dense epochs" in two[0][1]
    assert "rewound" not in two[1][1]

    killed = processes(2, tmp_path / "killed", "ddp", 6)
    assert all(status != 0 for status, _, _ in killed)
    resumed = processes(2, tmp_path / "killed", "ddp")
    assert [status for status, _, _ in resumed] == [0, 0], [errors for _, _, errors in resumed]
    assert "epoch 6," in resumed[0][1]
    assert "epoch 5," not in resumed[0][1]
    for name, expected in weights(tmp_path / "two").items():
        assert torch.equal(weights(tmp_path / "killed")[name], expected)


@pytest.mark.slow
def test_ranks_draw_the_same_fresh_weights_though_their_random_numbers_differ(tmp_path: Path) -> None:
    ended = processes(2, tmp_path, "fresh")
    assert [status for status, _, _ in ended] == [0, 0], [errors for _, _, errors in ended]
    for name, expected in weights(tmp_path, 0).items():
        assert torch.equal(weights(tmp_path, 1)[name], expected)


@pytest.mark.slow
def test_ranks_that_hold_different_weights_are_named(tmp_path: Path) -> None:
    for status, _, errors in processes(2, tmp_path, "apart"):
        assert status != 0
        assert "InputError: rank 1 holds other weights than rank 0, so they would prune differently" in errors


@pytest.mark.slow
def test_what_rank_0_reports_counts_on_every_rank(tmp_path: Path) -> None:
    ended = processes(2, tmp_path, "drop")
    assert [status for status, _, _ in ended] == [0, 0], [errors for _, _, errors in ended]
    assert "returned: level 1, the last within max_drop" in ended[0][1]
    assert len({out.splitlines()[-1] for _, out, _ in ended}) == 1
    for name, expected in weights(tmp_path, 0).items():
        assert torch.equal(weights(tmp_path, 1)[name], expected)


@pytest.mark.slow
def test_no_rank_trains_in_the_folder_of_another_run(tmp_path: Path) -> None:
    with locked(tmp_path / "run"):
        ended = processes(2, tmp_path, "ddp")
    for status, _, errors in ended:
        assert status != 0
        assert f"InputError: another process trains in {tmp_path / 'run'} (process {os.getpid()} on " in errors


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how"), [("sharded", "fully_shard"), ("fsdp", "FullyShardedDataParallel")])
def test_sharded_parameters_are_refused_in_one_sentence(kind: str, how: str, tmp_path: Path) -> None:
    for status, _, errors in processes(2, tmp_path, kind):
        assert status != 0
        assert f"InputError: cannot prune sharded parameters ({how})" in errors
        assert "use DistributedDataParallel" in errors


def test_alone_everything_is_the_identity() -> None:
    model = torch.nn.Linear(3, 2)
    mask = Mask.full({"weight": model.weight})
    assert ranks.rank() == 0
    assert ranks.from_first("x") == "x"
    assert ranks.gathered(3) == [3]
    assert ranks.agreed(mask, model) is mask


@pytest.mark.slow
def test_ranks_remove_the_same_units(tmp_path: Path) -> None:
    one, two = processes(1, tmp_path / "one", "units"), processes(2, tmp_path / "two", "units")
    assert [status for status, _, _ in (*one, *two)] == [0, 0, 0], [errors for _, _, errors in (*one, *two)]
    assert len({out.splitlines()[-1] for _, out, _ in (*one, *two)}) == 1
    for name, expected in weights(tmp_path / "one").items():
        assert torch.allclose(weights(tmp_path / "two", 1)[name], expected, rtol=0, atol=1e-5)
