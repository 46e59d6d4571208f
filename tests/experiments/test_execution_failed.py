"""Runs that diverge: each fails alone, what builds on it is skipped, and both stay so until told otherwise."""

from pathlib import Path

import pytest

import rewound.experiments.plans.execution
from rewound.conclusions.tables import read_rows
from rewound.experiments.executors import local
from rewound.experiments.executors.walking import Headway
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import Plan, plan
from rewound.experiments.sweeps.sweep import Sweep, parse_sweep
from rewound.foundations.errors import Failed, InputError
from rewound.states.storage.artifacts import Result
from rewound.states.storage.store import Store
from tiny import ENTERED, POISON
from tiny_sweeps import FINE_TUNING, ITERATIVE, run, sweep_of, timeless

pytestmark = pytest.mark.usefixtures("looks_at_ends_of_epochs")


def failing(trials: tuple[int, ...] = (1, 2)) -> Sweep:
    return sweep_of(FINE_TUNING, ITERATIVE, recipe="Watched", trials=trials)


def results(work: Plan, store: Store) -> dict[str, Result | None]:
    return {node.key: store.result(node.key) for node in work.nodes}


def test_a_run_that_turns_nan_fails_alone(store: Store) -> None:
    POISON[2, 1] = 3  # trial 2 after its first pruning: fine-tuning and level 1, and all that builds on them
    sweep = failing()
    work = plan(sweep.targets)
    said: list[str] = []
    seen: list[Headway] = []
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


def test_a_metric_that_is_no_number_is_a_failed_row(store: Store, tmp_path: Path) -> None:
    sweep = sweep_of({"technique": "fine-tuning", "retrain-epochs": [1, 2], "density": [0.8, 0.5]}, recipe="Unmeasured")
    run(sweep, store)
    tables = collected(sweep.targets, store)
    assert {row.density for row in tables.rows if row.test is not None} == {1.0, 0.8}
    assert all(row.val is None and row.flops is None for row in tables.rows if row.density == 0.5)
    tables.write(tmp_path)
    assert read_rows(tmp_path / "results.csv"), "what is written can be read"


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


def test_what_was_measured_stays_if_it_diverges_when_it_is_computed_again(store: Store) -> None:
    run(failing((1,)), store)
    POISON[1, 0] = 3  # as another device or library may do
    more = sweep_of({"technique": "fine-tuning", "retrain-epochs": 3, "density": 0.25}, recipe="Watched")
    dense = next(target.state.key for target in more.targets if not target.state.prunings)
    before = store.result(dense)
    with pytest.raises(Failed, match="was measured before, and fails now that it is computed again"):
        run(more, store)
    assert store.result(dense) == before
    assert store.claims() == {}
    POISON.clear()
    run(more, store)
    assert collected(more.targets, store).missing == 0


def test_weights_that_are_infinite_fail_although_the_loss_was_a_number(store: Store) -> None:
    sweep = sweep_of({"technique": "fine-tuning", "retrain-epochs": 1, "density": 0.5}, recipe="Exploding")
    said = run(sweep, store)
    assert any(line.startswith("failed: ") for line in said)
    tables = collected(sweep.targets, store)
    assert [row.val for row in tables.rows] == [None, None]


def test_a_failed_node_leaves_no_draft(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewound.experiments.executors.working._TELL", -1.0)  # look at every epoch
    monkeypatch.setattr(rewound.experiments.plans.execution, "SNAPSHOT", -1.0)
    POISON[2, 0] = 12
    run(failing((2,)), store)
    assert list(store.root.glob("drafts/*")) == []


# What does not train is not pruned (law 11)


def spare(why: str, momentum: float = 0.9, recipe: str = "Spare", **experiment: object) -> Sweep:
    table = {
        "recipe": f"tiny:{recipe}",
        "recipe-fields": {"why": why, "momentum": momentum, "nesterov": False},
        "trials": [1],
    }
    return parse_sweep({**table, "experiment": [{**FINE_TUNING, **experiment}]}, "spare")


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("why", ["uncalled", "frozen", "outside"])
def test_a_dense_run_that_does_not_train_a_weight_to_prune_names_it(why: str, momentum: float, store: Store) -> None:
    sweep = spare(why, momentum)
    with pytest.raises(
        InputError,
        match=r"recipe tiny:Spare does not train spare: .* out of the recipe's prunable\(\), or .* skip",
    ):
        run(sweep, store)
    assert all(result is None for result in results(plan(sweep.targets), store).values())
    with pytest.raises(InputError, match="does not train"):  # nothing has been published, as it would be if it diverged
        run(sweep, store)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_a_gradient_of_zero_is_one(momentum: float, store: Store) -> None:
    run(spare("zero", momentum), store)


def test_what_nobody_prunes_need_not_train(store: Store) -> None:
    run(spare("uncalled", recipe="SpareLeftOut"), store)
    skipping = spare("uncalled", pruner={"skip": [["spare"]]})
    run(skipping, store)
    tables = collected(skipping.targets, store)
    assert {(layer.kept, layer.total) for layer in tables.layers if layer.layer == "spare"} == {(64, 64)}


def test_a_dense_run_without_pruning_is_told_too(store: Store) -> None:
    dense = Plan((), tuple(n for n in plan(spare("uncalled").targets).nodes if not n.state.prunings), {})
    with pytest.raises(InputError, match="does not train"):
        local.run(dense, store, Options(), say=print)
