"""Several workers on one store: the bits of one, and no node twice."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import rewound.experiments.executors.walking
import rewound.experiments.plans.execution
import rewound.states.storage.claims
import rewound.states.storage.store
from rewound.experiments.executors import local, working
from rewound.experiments.executors.ray_cluster import forget_earlier_deaths
from rewound.experiments.executors.walking import Headway, Watch, _handing_out, _take
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.execution import Worker
from rewound.experiments.plans.options import Options, Stop
from rewound.experiments.plans.planning import plan
from rewound.experiments.sweeps.targets import dense
from rewound.foundations.errors import InputError
from rewound.foundations.owners import this_process
from rewound.states.storage.artifacts import encoded
from rewound.states.storage.backend import Listed
from rewound.states.storage.folder import Folder
from rewound.states.storage.store import Store
from rewound.tasks.recipe import Batch
from stored import RESULT
from tiny import POISON, Tiny, Watched, logged
from tiny_sweeps import EVERYTHING, FINE_TUNING, assert_same_tensors, run, states, sweep_of, timeless


def test_fewer_than_one_job_are_refused() -> None:
    with pytest.raises(InputError, match="jobs must be at least 1, not 0"):
        local.run(plan([]), Store.__new__(Store), Options(jobs=0))


@pytest.mark.slow
def test_two_jobs_give_the_bits_of_one(store: Store, whole: Store) -> None:
    sweep = sweep_of(*EVERYTHING)
    run(sweep, store, keep_all=True, jobs=2)
    assert timeless(collected(sweep.targets, store)) == timeless(collected(sweep.targets, whole))
    assert_same_tensors(store, whole)
    assert store.claims() == {}


def test_the_claim_of_a_long_epoch_does_not_grow_old(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host would take the work over."""
    monkeypatch.setattr(rewound.states.storage.claims, "STALE", 1.0)
    loss, beats = Tiny.loss, set[int]()

    def slowly(recipe: Tiny, model: nn.Module, batch: Batch) -> Tensor:
        """The first step lasts until the claim has been renewed twice."""
        (claim,) = store.root.glob("claims/*.1")
        limit = time.monotonic() + 60
        while len(beats) < 3:
            assert time.monotonic() < limit, "nobody renewed the claim for a minute"
            beats.add(claim.stat().st_mtime_ns)
            time.sleep(0.01)
        return loss(recipe, model, batch)

    monkeypatch.setattr(Tiny, "loss", slowly)
    run(sweep_of(), store)
    assert len(beats) == 3
    assert store.claims() == {}


@pytest.mark.slow
def test_a_worker_that_is_killed_is_noted_when_the_others_did_its_work(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "support"), *sys.path]))
    monkeypatch.setattr("rewound.experiments.executors.working._TELL", -1.0)
    work, killed, said = plan(sweep_of(*EVERYTHING).targets), list[int](), list[str]()

    def tick(_: Headway) -> None:
        if not killed and (claims := store.claims()):
            killed.append(next(iter(claims.values())).pid)
            os.kill(killed[0], signal.SIGKILL)

    local.run(work, store, Options(jobs=2), say=said.append, tick=tick)
    assert killed
    assert said == ["note: 1 of 2 workers died (exit code -9); the others have done the work"]
    assert collected(work.targets, store).missing == 0


TWICE = """
recipe = "tiny:Logged"
trials = [1, 2, 3]

[[experiment]]
technique = "fine-tuning"
retrain-epochs = [1, 2]
density = [0.5, 0.25]
"""


@pytest.mark.slow
def test_two_processes_share_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "twice.toml").write_text(TWICE)
    (tmp_path / "log").touch()
    monkeypatch.setenv("TINY_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "support"), *sys.path]))
    monkeypatch.setenv("MPLBACKEND", "agg")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "rewound", "run", "twice.toml", "--store", "store", "--jobs", "1", "--out", out],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for out in ("one", "two")
    ]
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    evaluated = [line.split() for line in logged() if line.startswith("evaluates")]
    assert len(evaluated) == 3 * (1 + 2 * 2), "every row once"
    assert max(Counter(weights for _, _, weights in evaluated).values()) == 1, "no node twice"
    assert len({pid for _, pid, _ in evaluated}) == 2, "both did something"
    for name in ("results.csv", "layers.csv", "curves.csv"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert states(Store(tmp_path / "store")) == set()


def test_an_owner_that_was_taken_for_dead_publishes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 10: it ends its run, and neither its result nor its drafts are kept; the other's draft stays as it is."""
    sweep = sweep_of()
    (key,) = (target.state.key for target in sweep.targets)
    monkeypatch.setattr(rewound.states.storage.claims, "STALE", 0.5)
    monkeypatch.setattr(rewound.experiments.plans.execution, "SNAPSHOT", -1.0)
    loss, published = Tiny.loss, list[str]()

    def frozen(recipe: Tiny, model: nn.Module, batch: Batch) -> Tensor:
        """The first step lasts so long that another host takes over, and keeps a draft."""
        if store.backend.create(f"claims/{key}.2", b'["elsewhere", 1, "1", 5]'):
            store.backend.write(f"drafts/{key}.safetensors", b"of the other")
        return loss(recipe, model, batch)

    publish = Store.publish

    def noted(self: Store, *given: Any, **named: Any) -> bool:
        published.append(given[0])
        return publish(self, *given, **named)

    monkeypatch.setattr(Tiny, "loss", frozen)
    monkeypatch.setattr(Store, "publish", noted)
    said = run(sweep, store)
    lost = f"note: {key[:12]} was taken over by another process, as this one gave no sign of life"
    assert len([line for line in said if lost in line]) == 1
    assert [line for line in said if "damaged" in line], "what the other left was there when the lease had ended"
    assert published == [key], "the second time, when it was this process's again"
    assert store.claims() == {}


@pytest.mark.parametrize("folder", ["states", "drafts"])
def test_an_owner_that_loses_its_node_while_it_writes_leaves_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """To write large tensors takes a while, and the other's may be there by then."""
    sweep = sweep_of(FINE_TUNING)
    key = plan(sweep.targets).nodes[0].key
    monkeypatch.setattr(rewound.states.storage.claims, "STALE", 0.5)
    monkeypatch.setattr(rewound.experiments.plans.execution, "SNAPSHOT", -1.0 if folder == "drafts" else 60.0)
    write, seen = rewound.states.storage.store.write_state, list[dict[str, Listed]]()

    def slowly(to: Path, of: str, *given: Any, **named: Any) -> None:
        write(to, of, *given, **named)
        if of == key and not seen:
            store.backend.create(f"claims/{key}.2", b'["elsewhere", 1, "1", 5]')
            seen.append({})
        elif len(seen) == 1:
            seen.append(store.backend.list(f"{folder}/"))

    monkeypatch.setattr(rewound.states.storage.store, "write_state", slowly)
    said = run(sweep, store)
    assert [line for line in said if f"note: {key[:12]} was taken over by another process" in line]
    assert seen[1] == {}, "when it is written for the second time, by its owner"
    assert collected(sweep.targets, store).missing == 0


def test_a_late_failure_replaces_no_measurement(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = sweep_of(recipe="Watched")
    (key,) = (target.state.key for target in sweep.targets)
    POISON[1, 0] = 5
    loss = Watched.loss

    def late(recipe: Watched, model: nn.Module, batch: Batch) -> Tensor:
        store.backend.create(f"results/{key[:2]}/{key}.json", encoded(key, RESULT))
        return loss(recipe, model, batch)

    monkeypatch.setattr(Watched, "loss", late)
    assert "was published by another process meanwhile" in run(sweep, store)[0]
    assert store.result(key) == RESULT


def test_what_another_has_published_meanwhile_is_said(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that shows new files late, a node may be begun that another worker has just finished."""
    sweep, other = sweep_of(), Store(store.root.parent / "other")
    (key,) = (target.state.key for target in sweep.targets)
    run(sweep, other)
    path = f"results/{key[:2]}/{key}.json"
    loss, content = Tiny.loss, other.backend.read(path, 2**20)
    assert content is not None

    def late(recipe: Tiny, model: nn.Module, batch: Batch) -> Tensor:
        store.backend.create(path, content)
        return loss(recipe, model, batch)

    monkeypatch.setattr(Tiny, "loss", late)
    unused = "was published by another process meanwhile; what this one did there is not used"
    assert run(sweep, store) == [f"note: {key[:12]} {unused}"]
    assert store.backend.read(path, 2**20) == content


class Counting(Folder):
    """A folder that counts how often all results are listed, and each is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.listings, self.reads = 0, Counter[str]()

    def list(self, prefix: str) -> dict[str, Listed]:
        self.listings += prefix == "results/"
        return super().list(prefix)

    def read(self, path: str, most: int) -> bytes | None:
        found = super().read(path, most)
        self.reads[path] += path.startswith("results/") and found is not None
        return found


def test_a_look_costs_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many nodes there are, all results are listed as often, and each is read once or twice."""
    monkeypatch.setattr(rewound.experiments.executors.walking, "_SHARE", 1e-9)  # no listing for the progress bar
    listings = set[int]()
    for number, epochs in enumerate(([1], [1, 2, 3, 4, 5, 6])):
        backend = Counting(tmp_path / str(number))
        run(sweep_of({**FINE_TUNING, "retrain-epochs": epochs}), Store(backend))
        listings.add(backend.listings)
        assert max(backend.reads.values()) <= 2
        assert len(Store(backend).finished()) == 1 + len(epochs)
    assert len(listings) == 1


def worker(store: Store, **options: Any) -> Worker:
    return Worker(store=store, options=Options(), say=print, alive=lambda: None, stop=Stop(), **options)


def write_deaths(store: Store, key: str, deaths: int) -> None:
    """What as many workers leave behind that were killed at a node, one after another."""
    for number in range(1, deaths + 1):
        dead = [this_process().host, os.getpid(), "born long ago", 5]
        store.backend.write(f"claims/{key}.{number}", json.dumps(dead).encode())


def test_a_node_at_which_three_workers_in_a_row_have_died_fails(store: Store) -> None:
    sweep, said = sweep_of(*EVERYTHING), list[str]()
    work = plan(sweep.targets)
    bad = next(node.key for node in work.nodes if node.key not in work.readers and node.after is not None)
    write_deaths(store, bad, 3)
    assert working.work(work, store, Options(), say=said.append, most_deaths=3)
    (line,) = said
    assert line.startswith(f"failed: {bad[:12]}: 3 workers in a row died while they worked on it; --retry-failed tries")
    assert line.endswith("; what builds on it is skipped")
    tables = collected(sweep.targets, Store(store.root))
    assert tables.missing == 0
    assert sum(row.test is None for row in tables.rows) == 1
    assert store.claims() == {}
    store.forget(bad)  # what --retry-failed does
    assert working.work(work, store, Options(), say=said.append, most_deaths=3)
    assert all(row.test is not None for row in collected(sweep.targets, Store(store.root)).rows)


def test_deaths_before_the_workers_of_ray_begin_do_not_count(store: Store) -> None:
    work = plan([dense(Tiny(), trial) for trial in (1, 2)])
    write_deaths(store, work.nodes[0].key, 3)
    other = Store(store.root)
    assert other.claim(work.nodes[1].key)
    forget_earlier_deaths(work, store)
    assert [store.deaths(node.key) for node in work.nodes] == [0, 0]
    assert store.claims().keys() == {work.nodes[1].key}, "who is alive keeps its claim"
    other.release(work.nodes[1].key)
    assert working.work(work, store, Options(), say=print, most_deaths=3)
    assert store.outcome(work.nodes[0].key) == "measured"


@pytest.mark.parametrize(("deaths", "most"), [(2, 3), (5, None)])
def test_fewer_deaths_or_workers_that_a_person_starts_are_no_failure(
    deaths: int, most: int | None, store: Store
) -> None:
    work = plan([dense(Tiny(), 1)])
    write_deaths(store, work.nodes[0].key, deaths)
    assert working.work(work, store, Options(), say=print, most_deaths=most)
    assert store.outcome(work.nodes[0].key) == "measured"


def test_a_node_that_would_fail_if_one_more_worker_died_is_done_alone(store: Store) -> None:
    work = plan([dense(Tiny(), trial) for trial in (1, 2, 3)])
    write_deaths(store, work.nodes[0].key, 2)
    here = worker(store, most_deaths=3)
    watch = Watch(work, store)
    first = _take(watch, here, None)
    assert first == work.nodes[0]
    with _handing_out(first, watch, here) as take:
        assert [take(), take()] == [first, None]
    write_deaths(store, work.nodes[2].key, 2)
    assert store.claim(work.nodes[1].key)
    with _handing_out(work.nodes[1], watch, here) as take:
        assert [take(), take()] == [work.nodes[1], None], "the first is claimed, and the third waits for its turn"


def test_a_draft_makes_deaths_before_it_forgotten(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewound.experiments.plans.execution, "SNAPSHOT", -1.0)  # one at the end of each epoch
    work, seen = plan([dense(Tiny(), 1)]), list[int]()
    write_deaths(store, work.nodes[0].key, 2)
    save = Store.save

    def saved(self: Store, key: str, *given: Any, **options: Any) -> None:
        seen.append(self.deaths(key))
        save(self, key, *given, **options)

    monkeypatch.setattr(Store, "save", saved)
    assert working.work(work, store, Options(), say=print, most_deaths=3)
    assert seen[:2] == [2, 0]


def test_workers_that_are_after_the_same_node_part(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was not the first to claim a node chooses among the next ones, as the others do."""
    work = plan([dense(Tiny(), trial) for trial in range(1, 21)])
    assert store.claim(work.nodes[0].key)
    monkeypatch.setattr(store, "claims", dict)  # as seen just before that
    chosen = set[str]()
    for _ in range(20):
        node = _take(Watch(work, store), worker(store), None)
        assert node is not None
        assert node.key != work.nodes[0].key
        chosen.add(node.key)
        store.release(node.key)
    assert len(chosen) > 1
