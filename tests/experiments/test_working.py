"""A worker is one program, whoever starts it: it stops with drafts, goes on, and refuses a plan that is not meant."""

import json
import os
import signal
import subprocess
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rewound
from command_line import SWEEP, Rewound, command, environment
from rewound.experiments.executors import executor_named, walking, working
from rewound.experiments.executors.driving import drive
from rewound.experiments.executors.walking import Headway
from rewound.experiments.executors.working import (
    STOPPED,
    Assignment,
    as_declared,
    assignment,
    assignment_in,
    check_plan,
    digest_of,
    digest_of_keys,
    stopped_by_signals,
)
from rewound.experiments.plans import execution, provenance
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.options import Options, Stop
from rewound.experiments.plans.planning import plan
from rewound.experiments.sweeps.declaration import declared
from rewound.experiments.sweeps.sweep import parse_sweep
from rewound.foundations.errors import InputError
from rewound.states.storage.store import Store
from rewound.tasks.fleets.fleet import Fleet
from rewound.tasks.fleets.place import Run
from tiny import POISON, Tiny
from tiny_sweeps import EVERYTHING, FINE_TUNING, sweep_of, timeless

LONG = """
recipe = "digits"
trials = [1]

[recipe-fields]
epochs = 500.0

[[experiment]]
technique = "fine-tuning"
retrain-epochs = 1
density = 0.5
"""


def started(folder: Path, *words: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command("work", *words), cwd=folder, env=environment(), stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
def test_a_worker_that_is_asked_to_stop_keeps_a_draft(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(LONG)
    worker = started(tmp_path, "long.toml")
    while not list(tmp_path.glob("rewound-store/claims/*")):
        assert worker.poll() is None, worker.communicate()[0]
        time.sleep(0.05)
    worker.terminate()
    said, _ = worker.communicate(timeout=60)
    assert worker.returncode == STOPPED, said
    assert "start it again" in said
    store = Store(tmp_path / "rewound-store")
    (key,) = store.drafts()
    assert store.claims() == {}
    position = store.drafted(key)
    assert position is not None
    assert position.steps > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_ask_to_stop(number: signal.Signals) -> None:
    stop, before = Stop(), signal.getsignal(number)
    with stopped_by_signals(stop):
        os.kill(os.getpid(), number)
        assert stop.is_due()
    assert signal.getsignal(number) is before


def test_a_worker_goes_on_where_another_stopped(store: Store) -> None:
    sweep = sweep_of(*EVERYTHING)
    asked = Stop()
    asked.ask()
    given = assignment(plan(sweep.targets), store, options_for(sweep))
    assert not given.work(print, asked), "it stops before it begins"
    assert store.finished() == set()
    assert given.work(print)
    assert store.finished() == plan(sweep.targets).by_key.keys()


def options_for(sweep: rewound.Sweep, **options: object) -> Options:
    return replace(Options(), declaration=as_declared(sweep.name, sweep.table), **options)  # type: ignore[arg-type]


def test_an_assignment_travels_as_json_and_as_a_command(store: Store) -> None:
    sweep = sweep_of(FINE_TUNING)
    given = assignment(plan(sweep.targets), store, options_for(sweep, minutes=2.5, keep_all=True, plain=True))
    assert assignment_in(given.as_json()) == given
    assert given.store == str(store.root.absolute())
    words = given.command("tiny.json")
    assert words == [
        *("work", "tiny.json", "--store", given.store, "--device", "cpu", "--plan", digest_of(plan(sweep.targets))),
        *("--keep", "all", "--minutes", "2.5", "--plain"),
    ]


@pytest.mark.parametrize(("fleet", "most"), [(None, 4), (3, 3), (9, 4)])
def test_a_worker_trains_so_many_networks_at_once_at_most(
    store: Store, monkeypatch: pytest.MonkeyPatch, fleet: int | None, most: int
) -> None:
    seen = list[int]()

    class Roomy(Fleet):
        """One that takes a CPU for a GPU with room for four."""

        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options, capacity=4)

        def start(self, run: Run) -> int:
            member = super().start(run)
            seen.append(self.capacity - self.free)
            return member

    monkeypatch.setattr(walking, "Fleet", Roomy)
    for module in (execution, provenance, working):
        monkeypatch.setattr(module, "device_named", lambda name: torch.device("cpu"))
    sweep = sweep_of(*EVERYTHING)
    given = assignment(plan(sweep.targets), store, options_for(sweep, device="cuda", fleet=fleet))
    assert assignment_in(given.as_json()) == given
    assert given.command("tiny.json")[-2:] == (["--fleet", str(fleet)] if fleet else ["--plan", given.plan])
    assert given.work(print)
    assert max(seen) == most


def test_fleets_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="fleet must be at least 1, not 0"):
        Options(device="cuda", fleet=0)
    with pytest.raises(InputError, match="a fleet of 3 needs a GPU, and the device is cpu; leave it out, or give"):
        Options(fleet=3)


def test_a_worker_elsewhere_makes_no_store(store: Store, tmp_path: Path) -> None:
    sweep = sweep_of(FINE_TUNING)
    given = replace(assignment(plan(sweep.targets), store, options_for(sweep)), store=str(tmp_path / "elsewhere"))
    with pytest.raises(InputError, match=r"elsewhere is not there on .*; give a folder that all machines share, or a"):
        given.work(print)
    assert not (tmp_path / "elsewhere").exists()


def test_a_sweep_of_objects_does_not_travel(store: Store) -> None:
    sweep = sweep_of(FINE_TUNING)
    with pytest.raises(InputError, match="give a TOML file, the name of a shipped sweep, or a dict"):
        assignment(plan(sweep.targets), store, Options())
    assert as_declared("mine", {"recipe": sweep.recipe}) is None


def test_a_plan_that_is_not_meant_is_refused(tmp_path: Path, rewound_command: Rewound) -> None:
    (tmp_path / "tiny.toml").write_text(SWEEP)
    sweep = sweep_of(FINE_TUNING)
    check_plan(plan(sweep.targets), digest_of(plan(sweep.targets)))
    ended = rewound_command("work", "tiny.toml", "--plan", digest_of(plan(sweep.targets)))
    assert ended.code == 2
    assert "this worker's plan of the sweep differs from the driver's" in ended.err
    assert not (tmp_path / "rewound-store").exists(), "before a store is made"
    ended = rewound_command("work", "tiny.toml", "--plan", "0.0.7-0123456789abcdef")
    assert f"the driver has rewound 0.0.7, and this worker {rewound.__version__}" in ended.err


def test_a_worker_with_other_code_of_a_recipe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    work = plan(sweep_of(FINE_TUNING).targets)
    before, keys = digest_of(work), digest_of_keys(work)
    monkeypatch.setattr(Tiny, "source_digest", lambda self: "of an older copy")
    assert digest_of_keys(work) == keys
    with pytest.raises(InputError, match="give both the same sweep and the same code of its recipes"):
        check_plan(work, before)


def test_a_sweep_can_be_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    table = {"recipe": "digits", "trials": [1]}
    path.write_text(json.dumps(table))
    assert declared(path) == ("small", table)
    path.write_text("[1")
    with pytest.raises(InputError, match=r"small\.json is not JSON"):
        declared(path)
    path.write_text("[1]")
    with pytest.raises(InputError, match="not a table"):
        declared(path)


def test_an_option_of_another_executor_is_refused() -> None:
    with pytest.raises(InputError, match="not with --on local; leave it out"):
        executor_named("local", workers=3)


class Processes:
    """Workers as processes of this machine that were given what another machine would be."""

    def __init__(self, given: Assignment, folder: Path, count: int) -> None:
        (folder / "tiny.json").write_text(json.dumps(given.table))
        words = given.command("tiny.json")[1:]
        self.workers = [started(folder, *words) for _ in range(count)]

    def living(self) -> int:
        return sum(worker.poll() is None for worker in self.workers)

    def stop(self) -> None:
        for worker in self.workers:
            worker.terminate()
        for worker in self.workers:
            worker.communicate()


@pytest.mark.slow
def test_workers_share_a_sweep_and_a_driver_waits_for_them(tmp_path: Path, store: Store, whole: Store) -> None:
    sweep = sweep_of(*EVERYTHING)
    work, seen, said = plan(sweep.targets), list[Headway](), list[str]()
    workers = Processes(assignment(work, store, options_for(sweep)), tmp_path, 2)
    drive(work, store, workers, keep_all=False, say=said.append, tick=seen.append)
    assert seen[-1].nodes == len(work.nodes)
    assert workers.living() == 0
    assert said == []
    assert timeless(collected(sweep.targets, store)) == timeless(collected(sweep.targets, whole))


@pytest.mark.slow
def test_a_driver_that_is_interrupted_stops_its_workers(tmp_path: Path, store: Store) -> None:
    sweep = parse_sweep(tomllib.loads(LONG), "long")
    work = plan(sweep.targets)
    workers = Processes(assignment(work, store, options_for(sweep)), tmp_path, 1)

    def interrupted(headway: Headway) -> None:
        if store.claims():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drive(work, store, workers, keep_all=False, say=print, tick=interrupted)
    assert workers.living() == 0
    assert store.claims() == {}


def test_a_driver_tells_failures_once(store: Store) -> None:
    sweep = sweep_of(FINE_TUNING, recipe="Watched")
    POISON[1, 1] = 0
    work, said = plan(sweep.targets), list[str]()

    class Here:
        """A worker that works while it is looked at."""

        def living(self) -> int:
            return 0 if assignment(work, store, options_for(sweep)).work(lambda text: None) else 1

        def stop(self) -> None:
            pass

    drive(work, store, Here(), keep_all=False, say=said.append, tick=lambda headway: None)
    assert len([line for line in said if line.startswith("failed: ")]) == len(said) == 1


def test_another_sweep_of_the_same_name_is_told(tmp_path: Path) -> None:
    table = {"recipe": "tiny:Tiny", "trials": [1], "experiment": [FINE_TUNING]}
    said: list[str] = []
    for trials in ([1], [1], [2], [1]):
        said.append("--")
        rewound.run({**table, "trials": trials}, store=tmp_path / "store", jobs=1, say=said.append)
    notes = [line for line in said if line == "--" or "differs from the one that last ran" in line]
    assert [line == "--" for line in notes] == [True, True, True, False, True, False]
