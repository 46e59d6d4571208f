"""Several sweeps and workers in one store: nothing measured is lost, nothing needed dropped, nothing left behind."""

import time
import weakref
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import rewound.experiments.executors.walking
import rewound.experiments.plans.execution
from rewound import Scores
from rewound.experiments.executors import local
from rewound.experiments.executors.walking import Watch
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import Node, plan
from rewound.experiments.plans.remaining import pack_store, todo
from rewound.experiments.sweeps.sweep import Sweep, parse_sweep
from rewound.experiments.sweeps.targets import dense
from rewound.states.storage.merging import unpack_store
from rewound.states.storage.packs import read_packs
from rewound.states.storage.store import Store
from rewound.tasks.fleets.fleet import Fleet
from stored import merged
from tiny import POISON, Held, Tiny
from tiny_sweeps import FINE_TUNING, ITERATIVE, run, states, sweep_of

pytestmark = pytest.mark.usefixtures("looks_at_ends_of_epochs")

STEPS = Held().steps_per_epoch
# Fine-tuning of eleven steps is where longer fine-tuning and LR rewinding of sixteen part.
SHORT = sweep_of({"technique": "fine-tuning", "retrain-epochs": 11 / STEPS, "density": 0.5}, recipe="Held")
LONG = sweep_of(
    {"technique": "fine-tuning", "retrain-epochs": 19 / STEPS, "density": 0.5},
    {"technique": "lr-rewinding", "retrain-epochs": 16 / STEPS, "density": 0.5},
    recipe="Held",
)


def fine_tuning(*epochs: float, density: float = 0.5) -> Sweep:
    return sweep_of({"technique": "fine-tuning", "retrain-epochs": list(epochs), "density": density})


def test_doing_a_state_again_leaves_what_was_measured(store: Store) -> None:
    run(SHORT, store)
    key = SHORT.targets[-1].state.key
    before = store.result(key)
    assert before is not None
    assert not plan(LONG.targets).by_key[key].asked
    run(LONG, store)
    assert store.result(key) == before
    assert collected(SHORT.targets, store).missing == 0


def test_what_is_still_to_be_evaluated_keeps_its_parents(store: Store) -> None:
    run(LONG, store)
    key, more = SHORT.targets[-1].state.key, [0.4, 0.3]
    assert "val" not in (store.result(key) or {"val": 0})
    wide = sweep_of(
        *({"technique": "fine-tuning", "retrain-epochs": 11 / STEPS, "density": density} for density in (0.5, *more)),
        recipe="Held",
    )
    said = run(wide, store)
    assert len([line for line in said if "recomputing" in line]) == 1, "the dense run, once"


def test_tensors_stay_while_another_sweep_is_at_work(store: Store) -> None:
    other = "ab" * 16
    assert store.claim(other)
    sweep = sweep_of(FINE_TUNING)
    run(sweep, store)
    assert sweep.targets[0].state.key in states(store)
    store.release(other)
    run(sweep, store)
    assert states(store) == set()


def test_what_is_kept_for_good_outlives_other_runs(store: Store) -> None:
    sweep = sweep_of(FINE_TUNING)
    run(sweep, store, keep_all=True)
    kept = states(store)
    assert sweep.targets[0].state.key in kept
    run(sweep, store)
    assert states(store) == kept


@pytest.mark.parametrize("keep_all", [False, True])
def test_what_failed_leaves_no_draft_and_no_tensors_for_what_is_skipped(
    store: Store, keep_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewound.experiments.plans.execution, "SNAPSHOT", -1.0)
    POISON[1, 1] = 15  # in the second epoch of level 1
    sweep = sweep_of({**ITERATIVE, "retrain-epochs": 2}, recipe="Watched")
    run(sweep, store, keep_all=keep_all)
    assert [row.val is None for row in collected(sweep.targets, store).rows] == [False, True, True]
    assert store.drafts() == set()
    assert bool(states(store)) is keep_all


def test_a_leaf_that_is_published_while_a_worker_opens(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = sweep_of(FINE_TUNING)
    work, looked = plan(sweep.targets), rewound.experiments.executors.walking.todo

    def todo_and_then_all_is_done(*given: object) -> list[Node]:
        monkeypatch.undo()
        found = looked(work, store)
        run(sweep, store)
        return found

    monkeypatch.setattr(rewound.experiments.executors.walking, "todo", todo_and_then_all_is_done)
    watch = Watch(work, store)
    watch.look()
    assert watch.status == dict.fromkeys(work.by_key, True)


def test_one_look_knows_all_that_was_done_again(store: Store) -> None:
    first, deeper = (
        sweep_of({"technique": "lr-rewinding", "retrain-epochs": 1, "levels": {"keep": 0.5, "count": count}})
        for count in (3, 4)
    )
    run(first, store)
    work = plan(deeper.targets)
    watch = Watch(work, store)  # of a second worker, which sees nothing of the following
    assert len(watch.again) == 4, "the dense run and the levels before the last"
    run(deeper, store)
    watch.look()
    assert len(watch.status) == len(work.nodes)


def test_the_clock_that_runs_out_while_a_fleet_is_made_leaves_no_claim(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Fleet):
        def __init__(self, *given: object, **named: object) -> None:
            time.sleep(0.3)
            super().__init__(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(rewound.experiments.executors.walking, "Fleet", Slow)
    local.run(plan(sweep_of(FINE_TUNING).targets), store, Options(minutes=0.1 / 60), say=print)
    assert store.claims() == {}


def test_one_fleet_is_held_at_a_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Fleet]] = []

    class Noted(Fleet):
        def __init__(self, *given: object, **named: object) -> None:
            assert not any(before() for before in made), "its device memory is given back first"
            made.append(weakref.ref(self))
            super().__init__(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(rewound.experiments.executors.walking, "Fleet", Noted)
    table = {"recipe": "tiny:Tiny", "trials": [1, 2], "recipe-fields": {"learning-rate": [0.1, 0.2]}}
    work = plan(parse_sweep({**table, "experiment": [FINE_TUNING]}, "variants").targets)
    local.run(work, store, Options(), say=print)
    assert len(made) == 2, "all of one recipe, then all of the other"


# Seconds and curves, wherever a run is cut


class Interrupted(Exception):
    """Stands for Ctrl-C."""


def interrupted(sweep: Sweep, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the sweep until its last node has a draft."""
    monkeypatch.setattr(rewound.experiments.plans.execution, "SNAPSHOT", -1.0)
    monkeypatch.setattr("rewound.experiments.executors.working._TELL", -1.0)
    key = sweep.targets[-1].state.key

    def tick(_: object) -> None:
        if store.drafted(key) is not None:
            raise Interrupted

    with pytest.raises(Interrupted):
        local.run(plan(sweep.targets), store, Options(keep_all=True), say=print, tick=tick)
    monkeypatch.undo()


@pytest.mark.parametrize(("first", "then"), [((1, 4), (4,)), ((4,), (1, 4))])
def test_a_draft_of_another_cut_is_counted_once(
    store: Store, first: tuple[float, ...], then: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(fine_tuning(*first), store, monkeypatch)
    sweep = fine_tuning(*then)
    run(sweep, store, keep_all=True)
    whole = Store(store.root.with_name("whole"))
    run(sweep, whole, keep_all=True)
    assert collected(sweep.targets, store).curves == collected(sweep.targets, whole).curves
    steps = [0, 0]
    for number, place in enumerate((store, whole)):
        key: str | None = sweep.targets[-1].state.key
        while key is not None and (result := place.result(key)) is not None:
            steps[number] += result["steps"]
            key = result["after"]
    assert steps[0] == steps[1] == sweep.targets[-1].state.steps


def test_the_curve_of_a_run_does_not_depend_on_other_runs(store: Store) -> None:
    """They cut it in the middle of epochs, twice in one of them, and at the end of one."""
    alone, other = fine_tuning(4), Store(store.root.with_name("other"))
    run(alone, store)
    run(fine_tuning(0.5, 9 / STEPS, 1.2, 1.7, 2.5, 4), other)
    here, there = collected(alone.targets, store), collected(alone.targets, other)
    assert len(plan(fine_tuning(0.5, 4).targets).nodes) > len(plan(alone.targets).nodes)
    assert here.curves == there.curves
    key = alone.targets[-1].state.key
    assert [point.step for point in here.curves if point.key == key] == [9, 18, 27, 36, alone.targets[-1].state.steps]


JUDGED: list[int] = []


@dataclass(frozen=True)
class SlowToJudge(Tiny):
    """Evaluation takes an hour, by the clock of the test."""

    name: ClassVar[str] = ""

    def evaluate(self, model: nn.Module) -> Scores:
        JUDGED.append(1)
        return super().evaluate(model)


def test_evaluation_is_not_the_next_rows_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 3600 * len(JUDGED))
    targets = tuple(dense(SlowToJudge(), trial) for trial in (1, 2, 3))
    local.run(plan(targets), store, Options(), say=print)
    assert len(JUDGED) == 3
    assert max(row.seconds or 0 for row in collected(targets, store).rows) < 3600


@dataclass(frozen=True)
class Causal(Tiny):
    """Its network has a mask of minus infinity, as that of attention is."""

    name: ClassVar[str] = ""

    def model(self, seed: int) -> nn.Module:
        model = super().model(seed)
        model.register_buffer("causal", torch.full((2, 2), -torch.inf).triu(1))
        return model


def test_an_infinite_buffer_is_no_failure(store: Store) -> None:
    targets = (dense(Causal(), 1),)
    local.run(plan(targets), store, Options(), say=print)
    assert collected(targets, store).rows[0].val is not None


def test_a_draft_of_an_edited_recipe_is_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = fine_tuning(4)
    interrupted(sweep, store, monkeypatch)
    assert not [line for line in run(sweep, store, keep_all=True) if "note:" in line]
    store.forget(sweep.targets[-1].state.key)
    interrupted(sweep, store, monkeypatch)
    monkeypatch.setattr(Tiny, "source_digest", lambda self: "edited")
    said = run(sweep, store, keep_all=True)
    assert [line for line in said if "goes on from a draft that was made with another source" in line]


# On the way between stores


def test_a_result_that_was_not_measured_gives_way_to_one_that_was(store: Store) -> None:
    other = Store(store.root.with_name("other"))
    run(LONG, store)
    run(SHORT, other)
    key = SHORT.targets[-1].state.key
    name = f"results/{key[:2]}/{key}.json"
    contents = [(place.root / name).read_bytes() for place in (store, other)]
    assert merged(other, name, contents[0]) == "present"
    assert merged(store, name, contents[1].replace(b'"val"', b'"vau"')) == "damaged"
    assert merged(store, name, contents[1]) == "added"
    assert "val" in (store.result(key) or {})
    assert merged(store, name, contents[0]) == "present"
    assert not [node for node in todo(plan(SHORT.targets), store) if node.key == key]


def test_a_pack_has_the_results_that_its_own_go_on_from(store: Store) -> None:
    run(fine_tuning(1, 4), store)
    sweep, away = fine_tuning(4), Store(store.root.with_name("away"))
    unpack_store(read_packs(pack_store(plan(sweep.targets), store, store.root.with_name("pack"))), away)
    at_home, there = collected(sweep.targets, store), collected(sweep.targets, away)
    assert there.rows == at_home.rows
    assert there.curves == at_home.curves


def test_a_shorter_pack_leaves_no_pieces_of_the_longer_one(store: Store) -> None:
    sweep = fine_tuning(1)
    run(sweep, store)
    work, out = plan(sweep.targets), store.root.with_name("pack")
    assert len(pack_store(work, store, out, split_bytes=500)) > 2
    assert pack_store(work, store, out, split_bytes=10**6) == sorted(out.parent.glob("pack.*"))
