"""Sweeps whose data is streamed: what they say of waiting, and what another decoder means for them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rewound
import rewound.experiments.plans.execution
from ragged_recipe import Ragged, Slow
from rewound.commands.stores import show_store
from rewound.experiments.executors import local
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.execution import _Waits
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import Plan, plan
from rewound.experiments.plans.realisation import realised
from rewound.experiments.sweeps.sweep import Sweep, parse_sweep
from rewound.foundations.errors import InputError
from rewound.states.storage.store import Store
from tiny_sweeps import values

pytestmark = pytest.mark.usefixtures("one_thread")
TABLE = {
    "recipe": "ragged_recipe:Ragged",
    "trials": [1],
    "experiment": [{"technique": "fine-tuning", "retrain-epochs": 1, "density": 0.5}],
}


class Interrupted(Exception):
    """Stands for Ctrl-C."""


@pytest.fixture
def sweep() -> Sweep:
    return parse_sweep(TABLE, "ragged")


@pytest.fixture
def streaming(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setenv("REWOUND_RESIDENT_GB", "0")


def said_by_run(work: Plan, store: Store, *, keep_all: bool = False) -> list[str]:
    said: list[str] = []
    local.run(work, store, Options(keep_all=keep_all), say=said.append)
    return said


def planned(**changes: object) -> Plan:
    experiment = {"technique": "fine-tuning", "retrain-epochs": 1, "density": 0.5} | changes
    return plan(parse_sweep(TABLE | {"experiment": [experiment]}, "ragged").targets)


def files(store: Store) -> dict[str, bytes]:
    found = (path for path in store.root.rglob("*") if path.is_file())
    return {str(path.relative_to(store.root)): path.read_bytes() for path in found}


def test_whether_data_stays_on_the_device_changes_no_result(
    store: Store, sweep: Sweep, streaming: Callable[[], None]
) -> None:
    said_by_run(plan(sweep.targets), store)
    resident = collected(sweep.targets, store)
    assert {row.waited for row in resident.rows} == {None}
    streaming()
    other = Store(store.root.with_name("other"))
    said_by_run(plan(sweep.targets), other)
    assert values(collected(sweep.targets, other)) == values(resident)


def test_a_wrong_limit_is_refused_before_anything_begins(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWOUND_RESIDENT_GB", "much")
    with pytest.raises(InputError, match="must be a number of GB that is at least 0, not 'much'"):
        rewound.run(sweep, store=tmp_path / "store", jobs=1)
    assert not (tmp_path / "store").exists()


def test_seconds_of_waiting_are_said_and_kept(
    store: Store,
    sweep: Sweep,
    streaming: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    streaming()
    monkeypatch.setattr(Ragged, "slow", Slow(seconds=0.005))
    monkeypatch.setattr("rewound.experiments.plans.execution._FIRST_LINE", 0.0)
    said = said_by_run(plan(sweep.targets), store)
    assert any("waited for data in" in line for line in said)
    rows = collected(sweep.targets, store).rows
    assert all(row.waited is not None and row.seconds is not None and 0 < row.waited < row.seconds for row in rows)
    show_store(store.root, rows[0].key)
    assert "waited for data" in capsys.readouterr().out


def test_waiting_is_said_now_and_then_and_only_where_it_counts() -> None:
    waits = _Waits()
    assert waits.line(29, 20) == ""  # too early to tell
    assert waits.line(40, 4) == "waited for data in 10% of the last 40 seconds"
    assert waits.line(600, 400) == ""  # was said not long ago
    assert waits.line(640, 304) == "waited for data in 50% of the last 10 minutes"
    assert waits.line(1_300, 310) == ""  # hardly at all


def test_a_draft_of_another_decoder_is_not_resumed(
    store: Store, sweep: Sweep, streaming: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    streaming()
    work = plan(sweep.targets)
    monkeypatch.setattr(rewound.experiments.plans.execution, "SNAPSHOT", -1.0)  # a draft at the end of every epoch

    def interrupted(_: object) -> None:
        if store.drafts():
            raise Interrupted

    monkeypatch.setattr("rewound.experiments.executors.working._TELL", -1.0)
    with pytest.raises(Interrupted):
        local.run(work, store, Options(), say=lambda text: None, tick=interrupted)
    key = work.nodes[0].key
    assert store.drafted(key) is not None
    monkeypatch.setattr(Ragged, "decoder", "decoder 2")
    said = said_by_run(work, store)
    assert f"note: {key[:12]} begins anew, as its draft was made with another decoder" in said
    result = store.result(key)
    assert result is not None
    assert result["made"]["decoder"] == "decoder 2"


def test_a_run_goes_on_from_a_rewinding_point_with_its_decoder_only(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = planned(technique="weight-rewinding")
    point, rest, _ = work.nodes
    assert rest.after is point.state
    said_by_run(replace(work, nodes=(point,)), store)
    before = files(store)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(Ragged, "decoder", "decoder 2")
        with pytest.raises(InputError) as refused:
            said_by_run(work, store)
    assert str(refused.value) == (
        f"cannot go on from {point.key[:12]}: {point.key[:12]} was made with decoder decoder 1, and this machine has "
        "decoder decoder 2; install or prepare the same decoder here, run it on a machine that has it, or give another "
        "store"
    )
    assert files(store) == before  # the claim is released, too
    said_by_run(work, store)
    at_once = Store(store.root.with_name("other"))
    said_by_run(work, at_once)
    assert values(collected(work.targets, store)) == values(collected(work.targets, at_once))


@pytest.mark.parametrize("keep_all", [True, False], ids=["tensors kept", "tensors dropped"])
@pytest.mark.parametrize("times", [1, [1, 2]], ids=["one point", "two points"])
def test_a_rewinding_point_is_that_of_the_dense_network_which_is_pruned(
    times: object, keep_all: bool, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dense network was trained by a plan that did not stop there, with another decoder."""
    said_by_run(planned(), store, keep_all=keep_all)
    work, before = planned(technique="weight-rewinding", **{"retrain-epochs": times}), files(store)
    dense, first = next(node for node in work.nodes if node.key in store.finished()), work.nodes[0]
    assert dense in work.continued(first)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(Ragged, "decoder", "decoder 2")
        refused = f"cannot compute {first.key[:12]} on the way to {dense.key[:12]}: {dense.key[:12]} was made with dec"
        with pytest.raises(InputError, match=refused):
            said_by_run(work, store)
    assert files(store) == before
    said_by_run(work, store)
    at_once = Store(store.root.with_name("other"))
    said_by_run(work, at_once)
    assert values(collected(work.targets, store)) == values(collected(work.targets, at_once))


def test_where_a_run_cannot_go_on_its_draft_is_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    work = planned(**{"retrain-epochs": [1, 3]})
    *others, last = work.nodes
    assert last.after is others[-1].state
    said_by_run(replace(work, nodes=tuple(others)), store)

    def interrupted(_: object) -> None:
        if store.drafts():
            raise Interrupted

    monkeypatch.setattr(rewound.experiments.plans.execution, "SNAPSHOT", -1.0)
    monkeypatch.setattr("rewound.experiments.executors.working._TELL", -1.0)
    with pytest.raises(Interrupted):
        local.run(work, store, Options(), say=lambda text: None, tick=interrupted)
    assert store.drafts() == {last.key}
    before = files(store)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(Ragged, "decoder", "decoder 2")
        with pytest.raises(InputError, match="cannot go on from"):
            said_by_run(work, store)
    assert files(store) == before
    assert not any("anew" in line for line in said_by_run(work, store))
    assert not collected(work.targets, store).missing


def test_a_new_level_may_have_another_decoder(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    said_by_run(planned(), store, keep_all=True)
    monkeypatch.setattr(Ragged, "decoder", "decoder 2")
    work = planned(density=[0.5, 0.25])
    said_by_run(work, store, keep_all=True)
    made = [row["made"]["decoder"] for _, row in store.summaries(work.by_key.keys())]
    assert sorted(made) == ["decoder 1", "decoder 1", "decoder 2"]


def test_what_was_measured_is_not_computed_again_with_another_decoder(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    said_by_run(planned(), store)  # which drops the tensors of the dense network at its end
    work, before = planned(density=[0.5, 0.25]), files(store)
    dense = work.nodes[0]
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(Ragged, "decoder", "decoder 2")
        with pytest.raises(InputError, match=f"cannot compute {dense.key[:12]} again: .* was made with decoder"):
            said_by_run(work, store)
        with pytest.raises(InputError, match=f"cannot compute {dense.key[:12]} again: .* was made with decoder"):
            realised(dense.state, store, torch.device("cpu"), print)  # as a store is repaired
    assert files(store) == before
    said_by_run(work, store)
    assert not collected(work.targets, store).missing


def test_results_of_another_decoder_are_noted(
    store: Store, sweep: Sweep, streaming: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    streaming()
    said_by_run(plan(sweep.targets), store)
    monkeypatch.setattr(Ragged, "decoder", "decoder 2")
    said: list[str] = []
    rewound.run(TABLE, store=store.root, jobs=1, say=said.append)
    assert any("stored results were made with another decoder (2 of them)" in line for line in said)
