"""A worker of several processes: the same tables as one process, and no process that dies leaves the others waiting."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from command_line import command, environment
from rewound.conclusions.tables import Row
from rewound.experiments.executors.leading import check_processes, launched
from rewound.experiments.executors.ray_cluster import Ray, slots
from rewound.experiments.executors.slurm import Slurm
from rewound.experiments.executors.working import STOPPED, Assignment, assignment_in, work
from rewound.experiments.plans import execution
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import plan
from rewound.experiments.sweeps.sweep import Sweep
from rewound.foundations.errors import Failed, InputError
from rewound.states.storage.store import Store
from tiny_sweeps import ITERATIVE, assert_same_tensors, sweep_of

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without distributed")
TWO = Options(gpus_per_run=2, keep_all=True)
SLIM = {"technique": "lr-rewinding", "retrain-epochs": 1, "density": 0.5, "slim": True, "pruner": {"pattern": "unit"}}
GRADUAL = {"technique": "gradual", "retrain-epochs": 1, "density": 0.5}


def rows(sweep: Sweep, store: Store) -> list[Row]:
    return collected(sweep.targets, store, plan(sweep.targets)).rows


def run(sweep: Sweep, folder: Path, options: Options) -> Store:
    store = Store(folder)
    assert work(plan(sweep.targets), store, options, say=lambda line: None)
    return store


@pytest.mark.slow
def test_two_processes_make_the_same_table_and_one_that_dies_or_fails_loses_only_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = sweep_of(ITERATIVE, SLIM, GRADUAL, recipe="Shared")
    alone = run(sweep, tmp_path / "alone", Options(keep_all=True))
    together = run(sweep, tmp_path / "together", TWO)
    assert [(row.key, row.val, row.test, row.flops) for row in rows(sweep, together)] == [
        (row.key, row.val, row.test, row.flops) for row in rows(sweep, alone)
    ]
    result = together.result(rows(sweep, together)[0].key)
    assert result is not None
    assert result["made"]["process count"] == "2"

    for name in ("LOOK", "SNAPSHOT"):
        monkeypatch.setattr(execution, name, 0.0)
    for name, error, words in (
        ("dies", Failed, r"process 1 of the 2 that train a network together died \(signal 9\); nothing finished is"),
        ("fails", InputError, "process 1 has no such data; copy it there"),
    ):
        (tmp_path / name).touch()
        with pytest.raises(error, match=words):
            run(sweep, tmp_path / "disturbed", TWO)
        store = Store(tmp_path / "disturbed")
        assert store.claims() == {}
        assert store.drafts(), "of the steps before"
    disturbed = run(sweep, tmp_path / "disturbed", TWO)
    assert_same_tensors(disturbed, together)
    assert not torch.distributed.is_initialized()


LONG = """
recipe = "tiny:Shared"
trials = [1]

[recipe-fields]
epochs = 2000.0

[[experiment]]
technique = "fine-tuning"
retrain-epochs = 1
density = 0.5
"""


@pytest.mark.slow
def test_no_process_logs_the_warnings_of_torch(tmp_path: Path) -> None:
    """DistributedDataParallel would say in each that an option is slow, which is there to make runs the same."""
    (tmp_path / "short.toml").write_text(LONG.replace("2000.0", "2.0"))
    given = command("work", "short.toml", "--gpus-per-run", "2")
    ended = subprocess.run(given, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "find_unused_parameters" not in ended.stderr
    assert len(Store(tmp_path / "rewound-store").finished()) == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_followers_end_with_their_leader_and_sigterm_keeps_a_draft(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(LONG)
    for seconds in (0, 1, 4, 16, 60):  # whoever is asked to end before the first step has nothing to keep
        assert ended_by(signal.SIGTERM, tmp_path, seconds) == STOPPED
        if Store(tmp_path / "rewound-store").drafts():
            break
    assert ended_by(signal.SIGKILL, tmp_path) == -signal.SIGKILL
    assert Store(tmp_path / "rewound-store").drafts()


def ended_by(number: signal.Signals, folder: Path, seconds: float = 0) -> int:
    """The exit code of a leader that gets a signal so long after its first claim; an error if its followers live on."""
    worker = subprocess.Popen(
        command("work", "long.toml", "--gpus-per-run", "2"), cwd=folder, env=environment(), stdout=subprocess.PIPE
    )
    while not list(folder.glob("rewound-store/claims/*")):
        assert worker.poll() is None
        time.sleep(0.05)
    followers = children(worker.pid)
    assert followers
    time.sleep(seconds)
    worker.send_signal(number)
    worker.communicate(timeout=60)
    limit = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in followers):
        assert time.monotonic() < limit, "followers wait for ever"
        time.sleep(0.05)
    return worker.returncode


def children(pid: int) -> list[int]:
    """The processes that one has started, but for the one that multiprocessing keeps its records with."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in found if b"resource_tracker" not in Path(f"/proc/{each}/cmdline").read_bytes()]


@pytest.mark.slow
def test_torchrun_starts_the_processes(tmp_path: Path) -> None:
    (tmp_path / "short.toml").write_text(LONG.replace("2000.0", "2.0"))
    ended = by_torchrun(tmp_path, "short.toml")
    assert ended.returncode == 0, ended.stderr
    store = Store(tmp_path / "rewound-store")
    assert len(store.finished()) == 2
    assert {result["made"]["process count"] for _, result in store.summaries(store.finished())} == {"2"}
    again = by_torchrun(tmp_path, "short.toml")  # nothing is left, so the leader never calls its followers
    assert again.returncode == 0, again.stderr


@pytest.mark.slow
def test_how_a_worker_of_torchrun_has_ended_is_said_by_the_leader_alone(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(LONG)
    ended = by_torchrun(tmp_path, "long.toml", "--minutes", "0.1")
    assert ended.returncode == 1, "as torchrun has it"
    assert root_cause(ended) == ("0", str(STOPPED)), ended.stderr
    refused = by_torchrun(tmp_path, "long.toml", "--plan", "0.0.0-0")
    assert "the driver has rewound 0.0.0" in refused.stderr, "said before torchrun ends the leader"
    assert root_cause(refused) == ("0", "2"), refused.stderr


def root_cause(ended: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    """Rank and exit code of the one process that has failed by torchrun's report, but for those it has ended itself."""
    failed = re.findall(r"rank +: (\d).*\n +exitcode +: (-?\d+)", ended.stderr)
    (found,) = [(rank, code) for rank, code in failed if code != f"{-signal.SIGTERM:d}"]
    return found


def by_torchrun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """What two processes by torchrun do, which are one worker."""
    given = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "rewound", "work", *words]
    return subprocess.run(
        [sys.executable, *given, "--gpus-per-run", "2"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_what_a_machine_or_torchrun_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_processes(TWO)
    with pytest.raises(InputError, match="jobs must be 1 with 2 GPUs per run, not 3; for more workers start"):
        Options(gpus_per_run=2, jobs=3)
    with pytest.raises(InputError, match="gpus-per-run must be at least 1, not 0"):
        Options(gpus_per_run=0)
    with pytest.raises(InputError, match="device must be cuda, not cuda:1; set CUDA_VISIBLE_DEVICES to choose"):
        check_processes(Options(gpus_per_run=2, device="cuda:1"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    check_processes(Options(gpus_per_run=4, device="cuda"))
    with pytest.raises(InputError, match="8 GPUs per run are more than the 4 that torch sees here; give at most 4"):
        check_processes(Options(gpus_per_run=8, device="cuda"))
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    assert launched() == (1, 3)
    with pytest.raises(InputError, match="2 GPUs per run contradict the 3 processes that torchrun has started"):
        check_processes(TWO)


def test_what_cannot_be_shared_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="5 processes cannot share batches of 96 equally"):
        run(sweep_of(ITERATIVE, recipe="Shared"), tmp_path, Options(gpus_per_run=5))
    with pytest.raises(InputError, match="its batches cannot be asked for in slices"):
        run(sweep_of(ITERATIVE, recipe="Watched"), tmp_path, TWO)


def test_engines_ask_for_as_many_gpus(tmp_path: Path) -> None:
    given = Assignment("tiny", {}, "/store", "0.1.0-0", Options(device="cuda", gpus_per_run=4))
    assert assignment_in(given.as_json()) == given
    assert given.command("tiny.json")[-2:] == ["--gpus-per-run", "4"]
    assert "#SBATCH --gres=gpu:4" in Slurm().script(given, tmp_path / "tiny.json", 2)
    on_cpu = Assignment("tiny", {}, "/store", "0.1.0-0", Options(gpus_per_run=4))
    assert "#SBATCH --cpus-per-task=4" in Slurm().script(on_cpu, tmp_path / "tiny.json", 2)
    assert slots([{"GPU": 8.0}], "cuda", 1, 4) == 2
    with pytest.raises(InputError, match="per-gpu 2 contradicts 4 GPUs per run; give one of the two"):
        Ray(per_gpu=2).check(Options(device="cuda", gpus_per_run=4))
