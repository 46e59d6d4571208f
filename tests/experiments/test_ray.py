"""Workers on a Ray cluster give the same tables, are started again when they are killed, and stop with drafts."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest

import rewound
from command_line import Rewound, command, environment
from rewound.experiments.executors import executor_named, working
from rewound.experiments.executors.ray_cluster import Ray, check_answers, connected, no_room, slots
from rewound.experiments.executors.working import as_declared
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import plan
from rewound.experiments.sweeps.sweep import Sweep
from rewound.foundations.errors import InputError
from rewound.states.storage.store import Store
from tiny_sweeps import EVERYTHING, FINE_TUNING, sweep_of, timeless

RECIPE = """
import os, signal, time
from dataclasses import dataclass
from pathlib import Path

from tiny import Tiny


@dataclass(frozen=True)
class Mine(Tiny):
    def batches(self, seed, position, device):
        if position.prunings and Path("kill").exists():
            Path("kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if (seed, position.prunings) == (2, 0) and Path("poison").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        for batch in super().batches(seed, position, device):
            if Path("wait").exists():
                time.sleep(1)
            yield batch
"""
SWEEP = """
recipe = "mine:Mine"
trials = [1, 2]

[[experiment]]
technique = ["lr-rewinding", "fine-tuning"]
retrain-epochs = [1, 2]
density = 0.5
"""


@pytest.fixture(autouse=True, scope="module")
def _not_nice() -> Iterator[None]:
    """Ray's workers give way to all other processes by default: beside other tests they would wait for minutes."""
    with patch.dict(os.environ, RAY_worker_niceness="0"):
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a user's own recipe and a sweep of it."""
    (tmp_path / "mine.py").write_text(RECIPE)
    (tmp_path / "mine.toml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def cluster() -> Iterator[ModuleType]:
    """A Ray cluster with two CPUs, to which this process is connected."""
    before = dict(os.environ)
    os.environ.update(environment())
    try:
        with connected(None, 2, print) as ray:
            yield ray
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_on_ray(sweep: Sweep, store: Store, on: Ray, **options: object) -> list[str]:
    said: list[str] = []
    declaration = as_declared(sweep.name, sweep.table)
    on(plan(sweep.targets), store, replace(Options(), declaration=declaration, **options), say=said.append)  # type: ignore[arg-type]
    return said


@pytest.mark.slow
def test_tables_are_those_of_this_machine(cluster: ModuleType, store: Store, whole: Store) -> None:
    sweep = sweep_of(*EVERYTHING)
    assert run_on_ray(sweep, store, Ray()) == ["Ray starts 2 workers"]
    assert timeless(collected(sweep.targets, store)) == timeless(collected(sweep.targets, whole))
    assert store.claims() == {}
    assert run_on_ray(sweep, store, Ray()) == [], "nothing is started for what is done"


@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again(cluster: ModuleType, folder: Path) -> None:
    (folder / "kill").touch()
    said: list[str] = []
    here = rewound.run("mine.toml", store="on-ray", on=Ray(workers=1), say=said.append)
    assert not (folder / "kill").exists()
    (line,) = [line for line in said if line.startswith("note: ")]
    assert line.startswith("note: worker 1 was killed, or its machine was lost; Ray has started it again on ")
    there = rewound.run("mine.toml", store="here", jobs=1, say=said.append)
    assert timeless(here.tables) == timeless(there.tables)
    assert here.missing == 0


@pytest.mark.slow
def test_a_node_that_kills_each_worker_fails_and_the_others_are_done(cluster: ModuleType, folder: Path) -> None:
    (folder / "poison").touch()
    said: list[str] = []
    found = rewound.run("mine.toml", store="on-ray", on=Ray(workers=1), say=said.append)
    (line,) = [line for line in said if line.startswith("failed: ")]
    assert line.endswith(
        ": 3 workers in a row died while they worked on it; --retry-failed tries it again; what builds on it is skipped"
    )
    assert found.missing == 0
    assert {row.trial for row in found.failed} == {2}
    assert {row.trial for row in found.rows if row.test is not None} == {1}


@pytest.mark.slow
def test_what_a_worker_refuses_is_said_by_the_driver(
    cluster: ModuleType, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = sweep_of(FINE_TUNING)
    with pytest.raises(InputError, match="the Ray cluster has no GPU now; give --device cpu, or --workers"):
        run_on_ray(sweep, store, Ray(), device="cuda")
    with pytest.raises(InputError, match=r"already; leave out address 127.0.0.1:6379, or call ray.shutdown\(\) before"):
        run_on_ray(sweep, store, Ray(address="127.0.0.1:6379"))
    monkeypatch.setattr(working, "digest_of", lambda plan: "0.0.7-0123456789abcdef")
    with pytest.raises(InputError, match=f"the driver has rewound 0.0.7, and this worker {rewound.__version__}"):
        run_on_ray(sweep, store, Ray(workers=2))


@pytest.mark.slow
def test_ctrl_c_leaves_drafts_and_no_process(folder: Path) -> None:
    words = ["run", "mine.toml", "--on", "ray", "--workers", "1"]
    (folder / "wait").touch()
    with (folder / "output").open("w") as to:
        driver = subprocess.Popen(command(*words), env=environment(), stdout=to, stderr=to, start_new_session=True)
    store = folder / "rewound-store"
    while not list(store.glob("claims/*")):
        assert driver.poll() is None, (folder / "output").read_text()
        time.sleep(0.1)
    os.killpg(driver.pid, signal.SIGINT)  # as a terminal does: to all processes of the group
    assert driver.wait() == 1, (folder / "output").read_text()
    said = (folder / "output").read_text()
    assert "starting Ray on this machine, for this run alone" in said
    assert "Traceback" not in said
    opened = Store(store)
    assert len(opened.drafts()) == 1, said
    assert opened.claims() == {}
    assert not list(of_session(driver.pid))
    (folder / "wait").unlink()
    ended = subprocess.run(command(*words), env=environment(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    on_ray, here = rewound.results("mine.toml"), rewound.run("mine.toml", store="here", jobs=1, say=[].append)
    assert timeless(on_ray.tables) == timeless(here.tables)
    assert on_ray.missing == 0


@pytest.mark.slow
def test_work_goes_on_when_a_machine_is_lost(folder: Path) -> None:
    from ray.cluster_utils import Cluster

    (folder / "wait").touch()
    small = {"include_dashboard": False, "object_store_memory": 100 << 20}
    machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    try:
        _, lost = machines.add_node(num_cpus=1, **small), machines.add_node(num_cpus=1, **small)
        words = command("run", "mine.toml", "--on", "ray", "--address", machines.address)
        with (folder / "output").open("w") as to:
            driver = subprocess.Popen(words, env=environment(), stdout=to, stderr=to)
        while len(list(folder.glob("rewound-store/claims/*"))) < 2:
            assert driver.poll() is None, (folder / "output").read_text()
            time.sleep(0.1)
        machines.remove_node(lost, allow_graceful=False)
        (folder / "wait").unlink()
        assert driver.wait() == 0, (folder / "output").read_text()
    finally:
        machines.shutdown()
    on_ray, here = rewound.results("mine.toml"), rewound.run("mine.toml", store="here", jobs=1, say=[].append)
    assert timeless(on_ray.tables) == timeless(here.tables)
    assert on_ray.missing == 0


def of_session(leader: int) -> Iterator[str]:
    """The names of the processes that live in a session."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = status.read_text().partition("(")[2].rpartition(")")
            state, _, _, session, *_ = rest.split()
            if int(session) == leader and state != "Z":
                yield name


def test_what_cannot_begin_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = sweep_of(FINE_TUNING)
    with pytest.raises(InputError, match="workers must be at least 1, not 0"):
        Ray(workers=0)
    with pytest.raises(InputError, match="per-gpu must be a whole number"):
        Ray(per_gpu=0.5)  # type: ignore[arg-type]
    with pytest.raises(
        InputError, match=r"ray://head:10001 is not a host and port.*give the whole command to `ray job"
    ):
        Ray(address="ray://head:10001")
    with pytest.raises(InputError, match="per-gpu 2 goes with device cuda, not with cpu; leave it out"):
        run_on_ray(sweep, store, Ray(per_gpu=2))
    with pytest.raises(InputError, match="device must be cpu or cuda on Ray, not cuda:1; Ray chooses the GPU"):
        run_on_ray(sweep, store, Ray(), device="cuda:1")
    with pytest.raises(InputError, match="give a TOML file, the name of a shipped sweep, or a dict"):
        Ray()(plan(sweep.targets), store, Options())
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"--on ray needs ray, which is not installed; pip install 'rewound\[ray\]'"):
        run_on_ray(sweep, store, Ray())


def test_an_address_that_does_not_answer_is_refused() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(
            InputError, match=f"no Ray cluster answers at {address} .*leave it out to start one on this"
        ):
            check_answers(address)
    with pytest.raises(InputError, match="address must be a host and port"):
        check_answers("head")


def test_a_cluster_has_room_for_its_cpus_or_for_parts_of_its_gpus() -> None:
    machines = [{"CPU": 48.0, "GPU": 6.0, "memory": 1e12}, {"CPU": 16.0, "GPU": 2.0}]
    assert slots(machines, "cpu", 1) == 64
    assert slots(machines, "cuda", 1) == 8
    assert slots(machines, "cuda", 3) == 24
    assert slots([{"CPU": 64.0}], "cuda", 3) == 0


def test_a_worker_needs_all_its_gpus_on_one_machine() -> None:
    machines = [{"CPU": 2.0, "GPU": 3.0}, {"CPU": 2.0, "GPU": 3.0}]
    assert slots(machines, "cuda", 1, 2) == 2
    assert slots(machines, "cuda", 1, 4) == 0
    words = "the Ray cluster has no machine with 4 GPUs now, and at most 3; give --gpus-per-run 3, or --workers for a"
    assert str(no_room(machines, "cuda", 4)).startswith(words)
    words = "the Ray cluster has no machine with 4 CPUs now, and at most 2; give --gpus-per-run 2, or --workers for a"
    assert str(no_room(machines, "cpu", 4)).startswith(words)
    assert "has no GPU now; give --device cpu, or --workers" in str(no_room([{"CPU": 2.0}], "cuda", 4))


def test_jobs_are_for_this_machine(rewound_command: Rewound) -> None:
    ended = rewound_command("run", "digits", "--on", "ray", "--jobs", "3")
    assert ended.code == 2
    assert "jobs is for processes of this machine; on a cluster give workers=3 instead" in " ".join(ended.err.split())


def test_options_fill_the_fields() -> None:
    assert executor_named("ray", workers=3, address=None, per_gpu=2) == Ray(workers=3, per_gpu=2)
    with pytest.raises(InputError, match="--address goes with --on ray, not with --on local; leave it out"):
        executor_named("local", address="auto")
