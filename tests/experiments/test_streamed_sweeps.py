"""Sweeps whose data is streamed: what they say of waiting, and what another decoder means for them."""

from collections.abc import Callable
from pathlib import Path

import pytest

import rewound
import rewound.experiments.plans.execution
from ragged_recipe import Ragged, Slow
from rewound.commands.stores import show_store
from rewound.experiments.executors import local
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.execution import Options, _Waits
from rewound.experiments.plans.planning import Plan, plan
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


def said_by_run(work: Plan, store: Store) -> list[str]:
    said: list[str] = []
    local.run(work, store, Options(), say=said.append)
    return said


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


def test_results_of_another_decoder_are_noted(
    store: Store, sweep: Sweep, streaming: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    streaming()
    said_by_run(plan(sweep.targets), store)
    monkeypatch.setattr(Ragged, "decoder", "decoder 2")
    said: list[str] = []
    rewound.run(TABLE, store=store.root, jobs=1, say=said.append)
    assert any("stored results were made with another decoder (2 of them)" in line for line in said)
