"""Work that is interrupted: nobody holds it afterwards, and it goes on from its draft to the same bits."""

import time
from collections.abc import Callable
from typing import NoReturn

import pytest

import rewound.experiments.plans.execution
from rewound.experiments.executors import local
from rewound.experiments.executors.walking import Headway, Watch
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.options import Options, Paused
from rewound.experiments.plans.outlook import estimate
from rewound.experiments.plans.planning import plan
from rewound.foundations.errors import InputError
from rewound.states.storage.store import Store
from rewound.tasks.recipe import Position
from tiny import ENTERED, Tiny
from tiny_sweeps import FINE_TUNING, assert_same_tensors, run, sweep_of, timeless, values

pytestmark = pytest.mark.usefixtures("looks_at_ends_of_epochs")


class Interrupted(Exception):
    """Stands for Ctrl-C."""


def interrupting(after: int) -> Callable[[Headway], None]:
    calls = iter(range(1 + after))  # the first is before the work

    def tick(progress: Headway) -> None:
        if next(calls, None) is None:
            raise Interrupted

    return tick


@pytest.mark.parametrize(
    ("after", "drafts", "goes_on"),
    [(0, 1, (0, 9)), (1, 1, (0, 18)), (2, 0, (1, 0)), (3, 1, (1, 9)), (4, 0, (1, 10))],  # 2, 4: a node had just ended
)
def test_a_resumed_node_gives_the_same_bits(
    store: Store, after: int, drafts: int, goes_on: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rewound.experiments.executors.working._TELL", -1.0)  # look at every epoch
    monkeypatch.setattr(rewound.experiments.plans.execution, "SNAPSHOT", -1.0)  # a draft at the end of every epoch
    monkeypatch.setattr(rewound.experiments.plans.execution, "HEARTBEAT", -1.0)
    sweep = sweep_of(FINE_TUNING, recipe="Watched")
    work = plan(sweep.targets)
    with pytest.raises(Interrupted):
        local.run(work, store, Options(keep_all=True), say=lambda text: None, tick=interrupting(after))
    assert store.claims() == {}, "what was under way is given up"
    assert len(list(store.root.glob("drafts/*"))) == drafts
    ENTERED.clear()
    run(sweep, store, keep_all=True)
    assert ENTERED[0] == goes_on, "where the draft was made, or after what had ended"
    assert list(store.root.glob("drafts/*")) == []
    other = Store(store.root.with_name("other"))
    run(sweep, other, keep_all=True)
    assert timeless(collected(sweep.targets, store)) == timeless(collected(sweep.targets, other))
    assert_same_tensors(store, other)


def test_a_plan_says_what_drafts_have_done(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewound.experiments.executors.working._TELL", -1.0)
    monkeypatch.setattr(rewound.experiments.plans.execution, "SNAPSHOT", -1.0)
    work = plan(sweep_of(FINE_TUNING, recipe="Watched").targets)
    before = dict(estimate("x", work, store, "cpu", jobs=1).lines)["epochs to do"]
    with pytest.raises(Interrupted):
        local.run(work, store, Options(), say=lambda text: None, tick=interrupting(1))
    (key,) = store.drafts()
    draft = store.drafted(key)
    assert draft is not None
    done = round(draft.steps / Tiny().steps_per_epoch)
    assert done > 0
    after = dict(estimate("x", work, store, "cpu", jobs=1).lines)["epochs to do"]
    assert after == f"{int(before) - done} (and {done} done, in drafts)"
    assert Watch(work, store).headway() == Headway(draft.steps, nodes=0, failed=0)


@pytest.mark.parametrize("after", [2, 3])
def test_a_draft_of_a_run_that_is_cut_anew(store: Store, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the first cut, or beyond it: the curve is that of a run without interruptions."""
    monkeypatch.setattr("rewound.experiments.executors.working._TELL", -1.0)
    monkeypatch.setattr(rewound.experiments.plans.execution, "SNAPSHOT", -1.0)
    whole = sweep_of(FINE_TUNING | {"retrain-epochs": 3}, recipe="Watched")
    grown = sweep_of(FINE_TUNING | {"retrain-epochs": [1, 3]}, recipe="Watched")
    with pytest.raises(Interrupted):
        local.run(plan(whole.targets), store, Options(), say=lambda text: None, tick=interrupting(after + 1))
    (draft,) = store.root.glob("drafts/*")
    assert draft.stem == whole.targets[-1].state.key
    run(grown, store)
    other = Store(store.root.with_name("other"))
    run(grown, other)
    resumed, straight = collected(grown.targets, store), collected(grown.targets, other)
    assert values(resumed) == values(straight)
    assert resumed.curves == straight.curves


def test_what_is_made_again_goes_on_from_its_draft_when_the_time_was_up(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dense run has a result, so its draft is not one of unfinished work at first sight."""
    monkeypatch.setattr("rewound.experiments.executors.working._TELL", -1.0)
    monkeypatch.setattr(rewound.experiments.plans.execution, "SNAPSHOT", -1.0)
    run(sweep_of(FINE_TUNING, recipe="Watched"), store)
    further = sweep_of(FINE_TUNING | {"density": 0.25}, recipe="Watched")
    times = iter([False, True])

    def tick(progress: Headway) -> None:
        if next(times, False):
            raise Paused

    local.run(plan(further.targets), store, Options(), say=lambda text: None, tick=tick)
    ENTERED.clear()
    run(further, store)
    assert ENTERED[0].steps > 0


def test_interruptions_leave_drafts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewound.experiments.executors.working._TELL", -1.0)  # look at every epoch
    monkeypatch.setattr(rewound.experiments.plans.execution, "SNAPSHOT", -1.0)
    work = plan(sweep_of(FINE_TUNING).targets)
    with pytest.raises(Interrupted):
        local.run(work, store, Options(), say=lambda text: None, tick=interrupting(0))
    (draft,) = store.root.glob("drafts/*")
    assert draft.stem == work.nodes[0].key
    stored = store.load(draft.stem, draft=True)
    assert stored is not None
    assert stored.state.position == Position(0, 9)
    assert len(stored.notes["curve"]) == 1
    assert stored.notes["seconds"] > 0


def test_an_error_while_a_node_is_begun_leaves_no_claim(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # A claim is as good as its process lives: in a notebook, one left behind would block the next call for ever.
    def full(*args: object) -> NoReturn:
        raise InputError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(rewound.experiments.plans.execution, "realised", full)
        with pytest.raises(InputError, match="the disk is full"):
            run(sweep_of(FINE_TUNING), store)
    assert store.claims() == {}
    run(sweep_of(FINE_TUNING), store)


@pytest.mark.parametrize("after", [1, 4, 13])
def test_an_epoch_is_interrupted_in_its_middle_and_goes_on_to_the_same_bits_and_curves(
    store: Store, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = sweep_of(FINE_TUNING, recipe="Watched")
    other = Store(store.root.with_name("other"))
    run(sweep, other, keep_all=True)
    monkeypatch.setattr("rewound.experiments.executors.working._TELL", -1.0)
    for name in ("LOOK", "SNAPSHOT", "HEARTBEAT"):  # the clock has always moved on: a look and a draft at every step
        monkeypatch.setattr(rewound.experiments.plans.execution, name, -1.0)
    with pytest.raises(Interrupted):
        local.run(plan(sweep.targets), store, Options(keep_all=True), say=lambda text: None, tick=interrupting(after))
    monkeypatch.undo()
    ENTERED.clear()
    run(sweep, store, keep_all=True)
    assert ENTERED[0] == (0, after + 1), "one step before the interruption"
    assert timeless(collected(sweep.targets, store)) == timeless(collected(sweep.targets, other))
    assert_same_tensors(store, other)


def test_the_time_is_up_within_an_epoch(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = sweep_of(FINE_TUNING, recipe="Watched")
    began = time.monotonic()
    steps = iter(range(10**6))
    monkeypatch.setattr(time, "monotonic", lambda: began + next(steps) / 10)  # a tenth of a second at each look
    local.run(plan(sweep.targets), store, Options(minutes=0.01), say=lambda text: None)
    monkeypatch.undo()
    (draft,) = (store.drafted(key) for key in store.drafts())
    assert draft is not None
    assert 0 < draft.steps < 9, "an epoch has 9 steps"
    assert store.claims() == {}
