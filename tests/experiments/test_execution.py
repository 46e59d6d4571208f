"""Doing the work: what is measured, nothing twice, and each part where it should begin."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from rewound.conclusions.tables import ordered, read_rows, write_rows
from rewound.experiments.executors import local
from rewound.experiments.plans import provenance
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.outlook import outdated
from rewound.experiments.plans.planning import plan
from rewound.experiments.plans.remaining import todo
from rewound.method.pruning.cutting import kept_count
from rewound.states.history import Pruned
from rewound.states.storage.store import Store
from rewound.tasks.devices import cpu_kind
from stored import KEY
from tiny import ENTERED, Tiny
from tiny_sweeps import EVERYTHING, FINE_TUNING, run, sweep_of, targets_of, values

# What is measured


def test_every_target_has_a_row_with_values_flops_and_cost(whole: Store) -> None:
    sweep = sweep_of(*EVERYTHING)
    tables = collected(sweep.targets, whole)
    assert (len(tables.rows), tables.missing) == (1 + 5 * 2 + 2, 0)
    first = tables.rows[0]
    assert first.dense
    assert (first.technique, first.density, first.retrain_epochs, first.search_epochs) == ("", 1.0, None, 0.0)
    assert first.flops == sweep.recipe.profile.total(None)
    for row in tables.rows:
        assert row.recipe == "tiny:Tiny"
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


def test_further_test_sets_are_a_column_of_the_table(store: Store, tmp_path: Path) -> None:
    sweep = sweep_of(FINE_TUNING, recipe="Elsewhere")
    run(sweep, store)
    rows = collected(sweep.targets, store).rows
    assert len({row.others for row in rows}) == len(rows) > 1
    for row in rows:
        name, _, value = row.others.partition("=")
        assert name == "upside_down"
        assert float(value) > 0
    write_rows(rows, tmp_path / "results.csv")
    assert [row.others for row in read_rows(tmp_path / "results.csv")] == [row.others for row in ordered(rows)]


def test_the_layers_of_a_row_add_up_to_its_weights(whole: Store) -> None:
    sweep = sweep_of(*EVERYTHING)
    tables = collected(sweep.targets, whole)
    total = sum(torch.Size(shape).numel() for shape in sweep.recipe.shapes.values())
    for row in tables.rows:
        layers = [layer for layer in tables.layers if layer.key == row.key]
        assert [layer.layer for layer in layers] == list(sweep.recipe.shapes)
        assert sum(layer.total for layer in layers) == total
        assert sum(layer.kept for layer in layers) == (total if row.dense else kept_count(total, row.density))
        assert sum(layer.flops or 0 for layer in layers) <= (row.flops or 0)


def test_a_curve_has_the_ends_of_epochs_and_of_its_run(whole: Store) -> None:
    sweep = sweep_of(*EVERYTHING)
    tables = collected(sweep.targets, whole)
    (target,) = targets_of(sweep, technique="fine-tuning", retrain_epochs=2.0)
    curve = [point for point in tables.curves if point.key == target.state.key]
    assert [point.step for point in curve] == [9, 18, 19], "not the tenth step, where a shorter run ends"
    assert {point.lr for point in curve} == {sweep.recipe.schedule.final}
    row = next(row for row in tables.rows if row.key == target.state.key)
    assert [point.val for point in curve] == [None, None, row.val]
    dense_curve = [point for point in tables.curves if point.key == tables.rows[0].key]
    assert dense_curve[-1].step == sweep.recipe.schedule.steps
    assert [point.lr for point in dense_curve] == [sweep.recipe.schedule.at(point.step - 1) for point in dense_curve]
    assert all(point.loss > 0 for point in tables.curves)


def test_pruned_weights_are_exactly_zero_and_stay_so(whole: Store) -> None:
    sweep = sweep_of(*EVERYTHING)
    for target in sweep.targets:
        stored = whole.load(target.state.key, to_train=False)
        assert stored is not None
        assert (stored.mask is None) == (not target.technique)
        for name, kept in (stored.mask or {}).items():
            assert stored.state.model[name][~kept].count_nonzero() == 0
            assert stored.state.model[name][kept].count_nonzero() > 0


def test_a_result_says_what_made_it_and_a_changed_source_is_told(whole: Store, monkeypatch: pytest.MonkeyPatch) -> None:
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
            "cpu": cpu_kind(),
        }
        assert result["history"][0] == "start tiny:Tiny seed 1"
        assert result["steps"] == node.steps
        assert ("val" in result) == node.asked, "what nobody asks for is not evaluated"
    assert outdated(work, whole, Options()) == []
    monkeypatch.setattr(Tiny, "source_digest", lambda self: "another")
    (line,) = outdated(work, whole, Options())
    assert "another source" in line
    assert str(len(work.nodes)) in line


@pytest.mark.parametrize("model", ["AMD EPYC 7B13", "Intel(R) Xeon(R) Processor @ 2.80GHz"])
def test_results_of_another_kind_of_cpu_are_told_and_used(
    whole: Store, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """They differ in their last bits, and the key cannot say so."""
    work = plan(sweep_of(*EVERYTHING).targets)
    monkeypatch.setattr(provenance, "cpu_kind", lambda: f"{model}, AVX2")
    (line,) = outdated(work, whole, Options())
    assert line.startswith(
        f"note: stored results were made with another cpu ({len(work.nodes)} of them); they are used"
    )
    assert todo(work, whole) == []


def test_results_of_other_data_are_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    work = plan(sweep_of(FINE_TUNING).targets)
    monkeypatch.setattr(Tiny, "made_with", lambda self: {"text": "one", "data": "one"})
    local.run(work, store, Options(), say=lambda _: None)
    assert outdated(work, store, Options()) == []
    monkeypatch.setattr(Tiny, "made_with", lambda self: {"text": "another", "data": "one"})
    (line,) = outdated(work, store, Options())
    many = f"({len(work.nodes)} of them)"
    assert line.startswith(f"note: stored results were made with another text {many}; they are used")
    monkeypatch.setattr(Tiny, "made_with", lambda self: {"text": "another", "data": "another"})
    (line,) = outdated(work, store, Options())
    assert line.startswith(f"note: stored results were made with another text {many}, other data {many}; they are used")


def test_a_kind_of_cpu_is_its_model_and_the_instructions_that_torch_uses() -> None:
    said = subprocess.run(
        [sys.executable, "-c", "from rewound.tasks.devices import cpu_kind; print(cpu_kind())"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "ATEN_CPU_CAPABILITY": "default"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert said.rstrip().endswith(", DEFAULT")
    assert said.partition(", ")[0] == cpu_kind().partition(", ")[0]


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
    assert values(tables) == values(expected)


# Parts of a run that nobody asked for by name


def test_every_technique_starts_where_it_should(store: Store) -> None:
    sweep = sweep_of(*EVERYTHING, recipe="Watched")
    run(sweep, store)
    retraining = [node for node in plan(sweep.targets).nodes if isinstance(node.state.parent, Pruned)]
    starts = Counter((node.state.prunings, node.after.steps if node.after else 0) for node in retraining)
    assert Counter(tuple(position) for position in ENTERED if position.prunings) == starts


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
    assert values(collected(sweep.targets, store)) == values(collected(sweep.targets, other))
    assert run(sweep, store) == []


def test_progress_is_that_of_the_sweep_and_not_of_others_in_the_store(store: Store) -> None:
    store.claim(KEY)
    store.beat(KEY, 1_000_000)
    work, seen = plan(sweep_of(FINE_TUNING).targets), list[float]()
    local.run(work, store, Options(), say=lambda text: None, tick=lambda progress: seen.append(progress.steps))
    assert seen[0] == 0
    assert seen[-1] == sum(node.steps for node in work.nodes)
