"""Doing the work: once, resumably, whoever does it; what fails is said, and what nobody needs is dropped."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch

import rewound.execution
from rewound.collection import collected
from rewound.errors import InputError
from rewound.executors import local
from rewound.executors.local import Options, Progress
from rewound.history import Pruned
from rewound.outlook import outdated
from rewound.planning import Plan, plan
from rewound.pruner import kept_count
from rewound.recipe import Batch, Position, Scores
from rewound.recipes.digits import Digits
from rewound.records import Result
from rewound.results import CurveRow, LayerRow, Row
from rewound.schedule import Schedule
from rewound.store import Store
from rewound.sweep import Sweep, parse_sweep
from rewound.tables import Tables
from rewound.targets import Target, dense


@dataclass(frozen=True)
class Tiny(Digits):
    """Digits in a fraction of a second: 19 steps of a network of some 1,300 weights."""

    epochs: float = 2.0
    widths: tuple[int, ...] = (4, 8)


POISON: dict[tuple[int, int], int] = {}  # (trial, prunings) -> the step at which the data turns NaN
ENTERED: list[Position] = []  # where training began


@dataclass(frozen=True)
class Watched(Tiny):
    """Notes where training begins, and diverges where it is told to."""

    def batches(self, seed: int, position: Position, device: torch.device) -> Iterator[Batch]:
        ENTERED.append(position)
        for step, (images, labels) in enumerate(super().batches(seed, position, device), start=position.steps):
            yield images * (torch.nan if step >= POISON.get((seed, position.prunings), 10**9) else 1), labels


@dataclass(frozen=True)
class Exploding(Tiny):
    """One step, so large that the weights are infinite although every loss was a number."""

    @property
    def schedule(self) -> Schedule:
        return Schedule.constant(1, 3e38)

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return 1e6 * super().loss(model, batch)


@dataclass(frozen=True)
class Logged(Tiny):
    """Writes a line for every run and every evaluation; trains only once a second process has begun, too."""

    def batches(self, seed: int, position: Position, device: torch.device) -> Iterator[Batch]:
        log("trains")
        limit = time.monotonic() + 120
        while len({line.split()[1] for line in logged() if line.startswith("trains")}) < 2:
            assert time.monotonic() < limit, "no second process came"
            time.sleep(0.05)
        return super().batches(seed, position, device)

    def evaluate(self, model: torch.nn.Module) -> Scores:
        scores = super().evaluate(model)
        weight = next(model.parameters()).double().sum().item()
        log(f"evaluates {weight!r}")
        return scores


def log(text: str) -> None:
    kind, *rest = text.split()
    with open(os.environ["TEST_EXECUTION_LOG"], "a") as file:  # noqa: PTH123 (one atomic append)
        file.write(" ".join([kind, str(os.getpid()), *rest]) + "\n")


def logged() -> list[str]:
    return Path(os.environ["TEST_EXECUTION_LOG"]).read_text().splitlines()


@pytest.fixture(autouse=True)
def _forgetful() -> Iterator[None]:
    yield
    POISON.clear()
    ENTERED.clear()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def sweep_of(*experiments: dict[str, object], recipe: str = "Tiny", trials: tuple[int, ...] = (1,)) -> Sweep:
    table = {"recipe": f"test_execution:{recipe}", "trials": list(trials), "experiment": list(experiments)}
    return parse_sweep(table, "tiny")


FINE_TUNING = {"technique": "fine-tuning", "retrain-epochs": [1, 2], "density": 0.5}
ITERATIVE = {"technique": "weight-rewinding", "retrain-epochs": 1, "levels": {"keep": 0.5, "count": 2}}
EVERYTHING = (
    {
        "technique": ["fine-tuning", "weight-rewinding", "lr-rewinding", "low-lr-weight-rewinding", "reinitialization"],
        "retrain-epochs": [1, 2],
        "density": 0.5,
    },
    ITERATIVE,
)


def run(sweep: Sweep, store: Store, *, keep_all: bool = False, jobs: int = 1) -> list[str]:
    """Run it; returns what was said."""
    said: list[str] = []
    local.run(plan(sweep.targets), store, Options(jobs=jobs, keep_all=keep_all), say=said.append)
    return said


def timeless(tables: Tables) -> tuple[list[Row], list[LayerRow], list[CurveRow], int]:
    return [replace(row, seconds=None) for row in tables.rows], tables.layers, tables.curves, tables.missing


def states(store: Store) -> set[str]:
    return {path.stem for path in store.root.glob("states/*/*.safetensors")}


def assert_same_tensors(one: Store, other: Store) -> None:
    assert states(one) == states(other)
    for key in states(one):
        mine, yours = one.load(key, to_train=False), other.load(key, to_train=False)
        assert mine is not None
        assert yours is not None
        assert mine[0].position == yours[0].position
        for part, same in ((mine[0].model, yours[0].model), (mine[0].slots, yours[0].slots)):
            assert part.keys() == same.keys()
            assert all(torch.equal(part[name], same[name]) for name in part), key


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Everything of the tiny sweep, with all tensors; not to be changed."""
    store = Store(tmp_path_factory.mktemp("whole") / "store")
    run(sweep_of(*EVERYTHING), store, keep_all=True)
    return store


# What is measured


def targets_of(sweep: Sweep, **labels: object) -> list[Target]:
    return [t for t in sweep.targets if all(getattr(t, name) == value for name, value in labels.items())]


def test_rows(whole: Store) -> None:
    sweep = sweep_of(*EVERYTHING)
    tables = collected(sweep.targets, whole)
    assert (len(tables.rows), tables.missing) == (1 + 5 * 2 + 2, 0)
    first = tables.rows[0]
    assert first.dense
    assert (first.technique, first.density, first.retrain_epochs, first.search_epochs) == ("", 1.0, None, 0.0)
    assert first.flops == sweep.recipe.profile.total(None)
    for row in tables.rows:
        assert row.recipe == "test_execution:Tiny"
        assert row.val is not None
        assert row.test is not None
        assert (row.val * 180) % 1 == pytest.approx(0, abs=1e-9) or (row.val * 180) % 1 == pytest.approx(1)
        assert 0 <= row.test <= 1
        assert row.seconds is not None
        assert row.seconds > 0
        assert row.flops is not None
        assert row.dense or row.flops < (first.flops or 0)
    cost = {(r.technique, r.iterative, r.density, r.retrain_epochs): r.search_epochs for r in tables.rows}
    assert cost["fine-tuning", False, 0.5, 2.0] == 2
    assert cost["reinitialization", False, 0.5, 1.0] == 3, "T + t"
    assert cost["weight-rewinding", True, 0.25, 1.0] == 2, "two levels of one epoch"
    assert {row.key for row in tables.rows} == {target.state.key for target in sweep.targets}


def test_layers(whole: Store) -> None:
    sweep = sweep_of(*EVERYTHING)
    tables = collected(sweep.targets, whole)
    total = sum(torch.Size(shape).numel() for shape in sweep.recipe.shapes.values())
    for row in tables.rows:
        layers = [layer for layer in tables.layers if layer.key == row.key]
        assert [layer.layer for layer in layers] == list(sweep.recipe.shapes)
        assert sum(layer.total for layer in layers) == total
        assert sum(layer.kept for layer in layers) == (total if row.dense else kept_count(total, row.density))
        assert sum(layer.flops or 0 for layer in layers) <= (row.flops or 0)


def test_curves(whole: Store) -> None:
    sweep = sweep_of(*EVERYTHING)
    tables = collected(sweep.targets, whole)
    (target,) = targets_of(sweep, technique="fine-tuning", retrain_epochs=2.0)
    curve = [point for point in tables.curves if point.key == target.state.key]
    assert [point.step for point in curve] == [9, 10, 18, 19], "the ends of epochs, and what is published on the way"
    assert {point.lr for point in curve} == {sweep.recipe.schedule.final}
    row = next(row for row in tables.rows if row.key == target.state.key)
    assert [point.val is not None for point in curve] == [False, True, False, True]
    assert curve[-1].val == row.val
    dense_curve = [point for point in tables.curves if point.key == tables.rows[0].key]
    assert dense_curve[-1].step == sweep.recipe.schedule.steps
    assert [point.lr for point in dense_curve] == [sweep.recipe.schedule.at(point.step - 1) for point in dense_curve]
    assert all(point.loss > 0 for point in tables.curves)


def test_pruned_weights_are_exactly_zero_and_stay_so(whole: Store) -> None:
    sweep = sweep_of(*EVERYTHING)
    for target in sweep.targets:
        stored = whole.load(target.state.key, to_train=False)
        assert stored is not None
        state, mask, _ = stored
        assert (mask is None) == (not target.technique)
        for name, kept in (mask or {}).items():
            assert state.model[name][~kept].count_nonzero() == 0
            assert state.model[name][kept].count_nonzero() > 0


def test_provenance(whole: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = sweep_of(*EVERYTHING)
    work = plan(sweep.targets)
    for node in work.nodes:
        result = whole.result(node.key)
        assert result is not None
        assert result["made"] == {
            "source": sweep.recipe.source_digest(),
            "torch": torch.__version__,
            "python": ".".join(map(str, sys.version_info[:3])),
            "device": "cpu",
        }
        assert result["history"][0] == "start test_execution:Tiny seed 1"
        assert result["steps"] == node.steps
        assert ("val" in result) == node.asked, "what nobody asks for is not evaluated"
    assert outdated(work, whole, "cpu") == []
    monkeypatch.setattr(Tiny, "source_digest", lambda self: "another")
    (line,) = outdated(work, whole, "cpu")
    assert "another source" in line
    assert str(len(work.nodes)) in line


# Nothing is done twice


def test_what_is_finished_is_never_run_again(store: Store) -> None:
    sweep = sweep_of(FINE_TUNING, recipe="Watched")
    run(sweep, store)
    before = {path: path.stat().st_mtime_ns for path in store.root.glob("results/*/*.json")}
    assert len(before) == 3
    ENTERED.clear()
    assert run(sweep, store) == []
    assert ENTERED == []
    assert {path: path.stat().st_mtime_ns for path in store.root.glob("results/*/*.json")} == before


def test_a_larger_sweep_does_only_what_is_new(store: Store, whole: Store) -> None:
    run(sweep_of(FINE_TUNING), store)
    finished = store.finished()
    run(sweep_of(*EVERYTHING), store)
    assert finished < store.finished()
    tables = collected(sweep_of(*EVERYTHING).targets, store)
    expected = collected(sweep_of(*EVERYTHING).targets, whole)
    assert [row[:] for row in _values(tables)] == _values(expected)


def _values(tables: Tables) -> list[tuple[object, ...]]:
    """What was measured; the points of a curve depend on where it was cut."""
    return [(row.key, row.val, row.test, row.flops) for row in tables.rows]


# Tensors


def test_tensors_are_dropped_when_no_planned_node_needs_them(store: Store) -> None:
    work = plan(sweep_of(*EVERYTHING).targets)
    seen: list[int] = []

    def look(progress: Progress) -> None:
        finished = store.finished()
        for key in states(store):
            assert any(reader not in finished for reader in work.readers[key]), "nobody needs it any more"
        seen.append(len(states(store)))

    local.run(work, store, Options(), say=lambda text: None, tick=look)
    assert max(seen) > 0
    assert states(store) == set()
    assert list(store.root.glob("drafts/*")) == []
    assert store.claims() == {}


def test_keep_all_keeps_all(whole: Store) -> None:
    work = plan(sweep_of(*EVERYTHING).targets)
    assert states(whole) == {node.key for node in work.nodes}
    for node in work.nodes:
        assert whole.has_state(node.key, to_train=True) == (node.key in work.readers), "leaves without slots"


def test_missing_parents_are_made_again_and_it_is_said(store: Store, whole: Store) -> None:
    run(sweep_of(FINE_TUNING), store)
    assert states(store) == set()
    sweep = sweep_of(*EVERYTHING)
    said = run(sweep, store)
    original = dense(sweep.recipe, 1).state.key
    assert any(line.startswith(f"recomputing {original[:12]}") for line in said)
    assert _values(collected(sweep.targets, store)) == _values(collected(sweep.targets, whole))
    assert states(store) == set(), "and they are dropped again"


@pytest.mark.parametrize("kind", ["result", "state"])
def test_damage_is_found_set_aside_and_repaired(store: Store, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = sweep_of(FINE_TUNING)
    run(sweep, store, keep_all=True)
    before = collected(sweep.targets, store)
    original, (short, *_) = dense(sweep.recipe, 1).state.key, targets_of(sweep, technique="fine-tuning")
    if kind == "result":
        path = store.root / "results" / original[:2] / f"{original}.json"
    else:
        path = store.root / "states" / original[:2] / f"{original}.safetensors"
        store.forget(short.state.key)
        store.drop(short.state.key)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    run(sweep, store, keep_all=True)
    assert f"damaged: {path.name}" in capsys.readouterr().out
    assert (store.root / "damaged" / path.name).exists()
    assert timeless(collected(sweep.targets, store)) == timeless(before)
    run(sweep, store, keep_all=True)
    assert "damaged" not in capsys.readouterr().out


# Interruptions


class Interrupted(Exception):
    """Stands for Ctrl-C."""


def interrupting(after: int) -> Callable[[Progress], None]:
    calls = iter(range(after))

    def tick(progress: Progress) -> None:
        if next(calls, None) is None:
            raise Interrupted

    return tick


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_a_resumed_node_gives_the_same_bits(store: Store, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_TELL", -1.0)  # look at every epoch
    monkeypatch.setattr(rewound.execution, "SNAPSHOT", -1.0)  # a draft at the end of every epoch
    monkeypatch.setattr(rewound.execution, "HEARTBEAT", -1.0)
    sweep = sweep_of(FINE_TUNING, recipe="Watched")
    work = plan(sweep.targets)
    with pytest.raises(Interrupted):
        local.run(work, store, Options(keep_all=True), say=lambda text: None, tick=interrupting(after))
    assert store.claims() == {}, "what was under way is given up"
    drafts = [path.stem for path in store.root.glob("drafts/*")]
    ENTERED.clear()
    run(sweep, store, keep_all=True)
    if drafts:
        assert ENTERED[0].steps > 0, "it goes on where the draft was made"
    assert list(store.root.glob("drafts/*")) == []
    other = Store(store.root.with_name("other"))
    run(sweep, other, keep_all=True)
    assert timeless(collected(sweep.targets, store)) == timeless(collected(sweep.targets, other))
    assert_same_tensors(store, other)


def test_interruptions_leave_drafts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_TELL", -1.0)  # look at every epoch
    monkeypatch.setattr(rewound.execution, "SNAPSHOT", -1.0)
    work = plan(sweep_of(FINE_TUNING).targets)
    with pytest.raises(Interrupted):
        local.run(work, store, Options(), say=lambda text: None, tick=interrupting(0))
    (draft,) = store.root.glob("drafts/*")
    assert draft.stem == work.nodes[0].key
    stored = store.load(draft.stem, draft=True)
    assert stored is not None
    assert stored[0].position == Position(0, 9)
    assert len(stored[2]["curve"]) == 1
    assert stored[2]["seconds"] > 0


def test_an_error_while_a_node_is_begun_leaves_no_claim(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # A claim is as good as its process lives: in a notebook, one left behind would block the next call for ever.
    def full(*args: object) -> NoReturn:
        raise InputError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(rewound.execution, "realised", full)
        with pytest.raises(InputError, match="the disk is full"):
            run(sweep_of(FINE_TUNING), store)
    assert store.claims() == {}
    run(sweep_of(FINE_TUNING), store)


# Failure


def failing(trials: tuple[int, ...] = (1, 2)) -> Sweep:
    return sweep_of(FINE_TUNING, ITERATIVE, recipe="Watched", trials=trials)


def results(work: Plan, store: Store) -> dict[str, Result | None]:
    return {node.key: store.result(node.key) for node in work.nodes}


def test_a_run_that_turns_nan_fails_alone(store: Store, whole: Store) -> None:
    POISON[2, 1] = 3  # trial 2 after its first pruning: fine-tuning and level 1, and all that builds on them
    sweep = failing()
    work = plan(sweep.targets)
    said: list[str] = []
    seen: list[Progress] = []
    local.run(work, store, Options(), say=said.append, tick=seen.append)
    failed = {key: result for key, result in results(work, store).items() if result and "failed" in result}
    assert len(failed) == 2
    assert len([line for line in said if line.startswith("failed: ") and "skipped" in line]) == 2
    for result in failed.values():
        assert result["failed"]["loss"] == "nan"
        assert 3 <= result["failed"]["step"] <= 10
        assert "val" not in result
    skipped = [key for key, result in results(work, store).items() if result is None]
    assert len(skipped) == 2, "two epochs of fine-tuning, and level 2"
    assert (seen[-1].nodes, seen[-1].failed) == (len(work.nodes), 4), "what is skipped counts as failed"
    tables = collected(sweep.targets, store)
    assert tables.missing == 0, "rows that failed are there, not missing"
    lost = [row for row in tables.rows if row.val is None]
    assert {(row.trial, row.technique, row.density, row.retrain_epochs) for row in lost} == {
        (2, "fine-tuning", 0.5, 1.0),
        (2, "fine-tuning", 0.5, 2.0),
        (2, "weight-rewinding", 0.5, 1.0),
        (2, "weight-rewinding", 0.25, 1.0),
    }
    assert all(row.test is None and row.flops is None for row in lost)
    kept = {row.key for row in tables.rows if row.val is not None}
    assert {layer.key for layer in tables.layers} == {point.key for point in tables.curves} == kept


def test_what_failed_is_not_tried_again_until_told(store: Store) -> None:
    POISON[2, 1] = 3
    sweep = failing()
    work = plan(sweep.targets)
    run(sweep, store)
    before = results(work, store)
    ENTERED.clear()
    assert run(sweep, store) == [], "and nothing is made again for what cannot be done"
    assert ENTERED == []
    assert results(work, store) == before
    POISON.clear()
    for key, result in before.items():
        if result is not None and "failed" in result:
            store.forget(key)  # what --retry-failed does
    run(sweep, store)
    healthy = Store(store.root.with_name("healthy"))
    run(sweep, healthy)
    assert timeless(collected(sweep.targets, store)) == timeless(collected(sweep.targets, healthy))


def test_a_dense_run_that_fails_takes_its_trial_with_it(store: Store) -> None:
    POISON[2, 0] = 12  # after the state that weights are rewound to
    sweep = failing()
    run(sweep, store)
    tables = collected(sweep.targets, store)
    assert tables.missing == 0
    assert {row.trial for row in tables.rows if row.val is None} == {2}
    assert {row.trial for row in tables.rows if row.val is not None} == {1}
    assert run(sweep, store) == []


def test_weights_that_are_infinite_fail_although_the_loss_was_a_number(store: Store) -> None:
    sweep = sweep_of({"technique": "fine-tuning", "retrain-epochs": 1, "density": 0.5}, recipe="Exploding")
    said = run(sweep, store)
    assert any(line.startswith("failed: ") for line in said)
    tables = collected(sweep.targets, store)
    assert [row.val for row in tables.rows] == [None, None]


def test_a_failed_node_leaves_no_draft(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_TELL", -1.0)  # look at every epoch
    monkeypatch.setattr(rewound.execution, "SNAPSHOT", -1.0)
    POISON[2, 0] = 12
    run(failing((2,)), store)
    assert list(store.root.glob("drafts/*")) == []


# Several workers


def test_bad_options() -> None:
    with pytest.raises(InputError, match="jobs must be at least 1, not 0"):
        local.run(plan([]), Store.__new__(Store), Options(jobs=0))


@pytest.mark.slow
def test_two_jobs_give_the_bits_of_one(store: Store, whole: Store) -> None:
    sweep = sweep_of(*EVERYTHING)
    run(sweep, store, keep_all=True, jobs=2)
    assert timeless(collected(sweep.targets, store)) == timeless(collected(sweep.targets, whole))
    assert_same_tensors(store, whole)
    assert store.claims() == {}


TWICE = """
recipe = "test_execution:Logged"
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
    monkeypatch.setenv("TEST_EXECUTION_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
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


# Parts of a run that nobody asked for by name


def test_every_technique_starts_where_it_should(store: Store) -> None:
    sweep = sweep_of(*EVERYTHING, recipe="Watched")
    run(sweep, store)
    retraining = [node for node in plan(sweep.targets).nodes if isinstance(node.state.parent, Pruned)]
    starts = Counter((node.state.prunings, node.after.steps if node.after else 0) for node in retraining)
    assert Counter(tuple(position) for position in ENTERED if position.prunings) == starts


@dataclass(frozen=True)
class Held(Tiny):
    """After its end the schedule holds the rate of its middle, so that fine-tuning is the beginning of other runs."""

    @property
    def schedule(self) -> Schedule:
        return Schedule.piecewise(19, [0.1, 0.01, 0.001], drops=[2, 14], final=0.01)


def test_what_another_sweep_passed_on_its_way_is_evaluated_when_asked_for(store: Store) -> None:
    rewinding = {"technique": "lr-rewinding", "retrain-epochs": [1, 1.25, 1.5], "density": 0.5}
    tuning = {"technique": "fine-tuning", "retrain-epochs": 0.5, "density": 0.5}
    run(sweep_of(rewinding, recipe="Held"), store)
    sweep = sweep_of(tuning, recipe="Held")
    (target,) = targets_of(sweep, technique="fine-tuning")
    passed = store.result(target.state.key)
    assert passed is not None, "a branch point of the first sweep"
    assert "val" not in passed
    assert collected(sweep.targets, store).missing == 1
    run(sweep, store)
    other = Store(store.root.with_name("other"))
    run(sweep, other)
    assert _values(collected(sweep.targets, store)) == _values(collected(sweep.targets, other))
    assert run(sweep, store) == []
