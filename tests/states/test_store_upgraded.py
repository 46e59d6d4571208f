"""A store and a pack of version 1 (`tests/support/version-1.tar.gz`, written by its code): all of it is read on."""

import tarfile
from pathlib import Path

import pytest

import rewound.states.storage.claims
from command_line import Rewound
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.planning import plan
from rewound.experiments.plans.remaining import todo
from rewound.states.storage.merging import unpack_store
from rewound.states.storage.packs import read_packs
from rewound.states.storage.store import VERSION, Store, _version_line
from tiny_sweeps import ITERATIVE, run, sweep_of

SWEEP = sweep_of({"technique": "fine-tuning", "retrain-epochs": [1, 4], "density": 0.5}, ITERATIVE)
FINISHED = {
    "2508d1694e799e563523ffe3db57e4d1": 0.12777777777777777,
    "97505b8c0fd11c13de6fdff6b54a5aec": 0.08333333333333333,
    "d4e7b5a49010cde633f6f67ef89c36c3": None,
}
"""What it had measured, on the validation images."""
DRAFT = "addb56bc21ab82b2625ca9fae9b11844"


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """The folder with a half-done sweep of version 1: three nodes of seven, a draft, and another host's claim on it."""
    with tarfile.open(Path(__file__).parents[1] / "support" / "version-1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def measured(store: Store) -> dict[str, float | None]:
    results = {key: store.result(key) for key in store.finished()}
    return {key: result.get("val") for key, result in results.items() if result is not None}


def test_a_store_of_version_1_is_upgraded_and_continued(before: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewound.states.storage.claims, "STALE", 0.2)
    store = Store(before / "store")
    assert (before / "store" / "version").read_bytes() == _version_line(VERSION)
    assert measured(store) == FINISHED
    assert store.drafts() == store.claims().keys() == {DRAFT}
    assert store.claims()[DRAFT].host_name == "gone"
    assert len(todo(plan(SWEEP.targets), store)) == len(plan(SWEEP.targets).nodes) - len(FINISHED)
    said = run(SWEEP, store)
    assert not [line for line in said if "recomputing" in line or "damaged" in line]
    assert collected(SWEEP.targets, store).missing == 0
    assert measured(store).items() >= FINISHED.items()
    assert store.backend.list("claims/") == store.backend.list("drafts/") == {}


def test_a_pack_of_version_1_is_merged(before: Path) -> None:
    store = Store(before / "away")
    outcome = unpack_store(read_packs([before / "pack"]), store)
    assert (outcome.present, outcome.damaged, outcome.unbound) == (0, 0, 0)
    assert measured(store) == FINISHED
    assert store.drafts() == {DRAFT}
    run(SWEEP, store)
    assert collected(SWEEP.targets, store).missing == 0
    assert measured(store).items() >= FINISHED.items()


def test_a_command_that_only_looks_upgrades_too(before: Path, rewound_command: Rewound) -> None:
    code, out, err = rewound_command("show", "--store", before / "store")
    assert (code, err) == (0, "")
    assert f"{DRAFT[:12]} by gone:4711" in out
    assert (before / "store" / "version").read_bytes() == _version_line(VERSION)
