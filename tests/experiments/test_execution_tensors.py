"""The tensors of a sweep: what nobody needs is dropped, what is missing or damaged is made again."""

import warnings
from pathlib import Path

import pytest
from torch import Tensor, nn

from rewound.experiments.executors import local
from rewound.experiments.executors.walking import Headway, Watch
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import plan
from rewound.experiments.sweeps.targets import dense
from rewound.states.storage.store import Store
from rewound.tasks.recipe import Batch, Position
from tiny import ENTERED, Tiny
from tiny_sweeps import EVERYTHING, FINE_TUNING, run, states, sweep_of, targets_of, timeless, values


def test_tensors_are_dropped_when_no_planned_node_needs_them(store: Store) -> None:
    work = plan(sweep_of(*EVERYTHING).targets)
    seen: list[int] = []

    def look(progress: Headway) -> None:
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
    why = "the store has its result, but no longer its tensors (--keep all keeps both)"
    assert f"recomputing {original[:12]}: {why}" in said
    assert values(collected(sweep.targets, store)) == values(collected(sweep.targets, whole))
    assert states(store) == set(), "and they are dropped again"


def test_a_further_level_makes_each_missing_state_again_once(store: Store) -> None:
    """Everything that the second levels build on has a result, and none has its tensors."""
    both = {"technique": ["fine-tuning", "lr-rewinding"], "retrain-epochs": 1}
    one, two = (sweep_of(both | {"levels": {"keep": 0.5, "count": count}}, recipe="Watched") for count in (1, 2))
    run(one, store)
    ENTERED.clear()
    said = run(two, store)
    assert len(said) == len(set(said)) == 3, "the dense run and both first levels"
    assert ENTERED.count(Position(0, 0)) == 1
    assert states(store) == set()


def test_what_another_worker_has_made_again_used_and_dropped_is_not_made_a_third_time(store: Store) -> None:
    once = {"technique": "fine-tuning", "retrain-epochs": 1}
    one, two = (sweep_of(once | {"levels": {"keep": 0.5, "count": count}}) for count in (1, 2))
    run(one, store)
    work = plan(two.targets)
    watch = Watch(work, store)
    assert watch.again
    run(two, store)
    assert states(store) == set()
    assert all(watch.has_ended(work.by_key[key]) for key in watch.again)


@pytest.mark.slow
def test_what_several_workers_would_say_is_said_once(store: Store) -> None:
    sweep = sweep_of(FINE_TUNING, trials=(1, 2))
    run(sweep, store)
    starved = sweep_of(FINE_TUNING | {"density": [0.02, 0.01]}, trials=(1, 2))
    said = run(starved, store, jobs=2)
    assert sum(line.startswith("recomputing ") for line in said) == 2, "both dense runs"
    assert sum(line.startswith("warning: less than 1% of the weights are left") for line in said) == 1


def test_warnings_of_another_kind_are_said_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, steps = Tiny.loss, iter(range(1, 10**9))

    def warned(recipe: Tiny, model: nn.Module, batch: Batch) -> Tensor:
        warnings.warn(f"{next(steps)} steps have been taken", stacklevel=2)
        return loss(recipe, model, batch)

    monkeypatch.setattr(Tiny, "loss", warned)
    said = run(sweep_of(FINE_TUNING | {"density": [0.02, 0.01]}), store)
    assert said[0] == "warning: 1 steps have been taken (more such warnings are not shown)"
    assert said[1].startswith("warning: less than 1% of the weights are left")
    assert len(said) == 2, "one of each kind, whatever numbers and layers they name"


@pytest.mark.parametrize("kind", ["result", "state"])
def test_damage_is_found_set_aside_and_repaired(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = list[str]()
    store = Store(tmp_path / "store", said.append)
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
    said += run(sweep, store, keep_all=True)
    assert sum(line.startswith(f"damaged: {path.name} is not what was written; set aside as ") for line in said) == 1
    assert (store.root / "damaged" / path.name).exists()
    assert timeless(collected(sweep.targets, store)) == timeless(before)
    said.clear()
    assert run(sweep, store, keep_all=True) == said == []
    assert capsys.readouterr().out == "", "all is said by whom it was given"
