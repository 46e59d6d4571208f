"""A short campaign: one round of each kind of fault. `make test-faults` is the long one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from campaign import run
from checks import Evidence, computed_again, left_behind, published_twice, written_late
from kinds import KINDS
from rewound.states.storage import claims
from rewound.states.storage.store import Store
from rounds import Ground, ground
from stored import RESULT as RESULT_OF_A_NODE
from surroundings import Missing

LONG = {"killed-server", "containers", "drivers", "drivers-on-ray", "drivers-on-slurm"}
"""What takes long to start; `test_kill`, `test_owners` and those of the engines have short tests of the same."""


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with ground(tmp_path_factory.mktemp("faults")) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - LONG))
def test_faults_change_nothing(on: Ground, kind: str) -> None:
    try:
        done, rounds, faults = run(on, kind, seed=1, much=0.01)
    except Missing as missing:
        pytest.skip(str(missing))
    assert faults == []
    assert rounds > 0
    assert done.total() > 0, "it was disturbed"


KEY = 32 * "a"
RESULT, STATE, CLAIM = f"results/aa/{KEY}.json", f"states/aa/{KEY}.safetensors", f"claims/{KEY}"


def call(what: str, path: str, pid: int, **facts: object) -> list[dict[str, object]]:
    """A call as it is noted in a journal."""
    ended = {"done": True, "digest": "0", "outcome": "measured", **facts}
    return [
        {"what": what, "path": path, "pid": pid, "phase": "begins"},
        {"what": what, "path": path, "pid": pid, "phase": "ends", **ended},
    ]


def job(phase: str, pid: int, step: int = 0) -> dict[str, object]:
    return {"what": "job", "key": KEY, "phase": phase, "pid": pid, "step": step}


WRONG: dict[str, list[dict[str, object]]] = {
    "created twice": [*call("create", RESULT, 1), *call("create", RESULT, 2)],
    "was replaced": [*call("create", RESULT, 1), *call("write", RESULT, 2)],
    "nothing had damaged it": [*call("create", RESULT, 1), *call("remove", RESULT, 2)],
    "had taken it over": [*call("create", f"{CLAIM}.1", 1), *call("create", f"{CLAIM}.2", 2), *call("write", STATE, 1)],
    "computed again": [*call("create", RESULT, 1), job("begins", 2)],
    "had a draft of 5 steps": [job("drafted", 1, 5), job("begins", 2)],
}


@pytest.mark.parametrize("finding", WRONG)
def test_the_checks_see_what_is_wrong(store: Store, finding: str) -> None:
    evidence = Evidence([], store, Path(), "")
    found = [
        fault for check in (published_twice, written_late, computed_again) for fault in check(WRONG[finding], evidence)
    ]
    assert len(found) == 1
    assert finding in found[0]


def test_the_checks_see_what_is_left_behind_and_damaged(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.publish(KEY, RESULT_OF_A_NODE)
    (store.root / RESULT).write_text("{}")
    (store.root / "states").mkdir()
    (store.root / "states" / ".forgotten").touch()
    monkeypatch.setattr(claims, "STALE", 0.0)
    found = list(left_behind([], Evidence([], store, Path(), "")))
    assert [RESULT in found[0], found[1:]] == [True, ["states/.forgotten is left behind"]]
