"""Every backend does what a store relies on: the conformance suite, and what is special to one of them."""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.planning import plan
from rewound.experiments.plans.remaining import pack_store
from rewound.states.storage.artifacts import Artifact, Kind
from rewound.states.storage.backend import Backend
from rewound.states.storage.conformance import CHECKS, Opener
from rewound.states.storage.folder import Folder
from rewound.states.storage.merging import unpack_store
from rewound.states.storage.packs import NewPack, read_packs
from rewound.states.storage.store import Store
from stored import KEY, RESULT
from table_backend import Table
from tiny_sweeps import EVERYTHING, run, sweep_of, timeless

BACKENDS: dict[str, Callable[[Path], Backend]] = {"folder": Folder, "table": Table}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", BACKENDS)
def test_a_backend_conforms(
    kind: str, check: Callable[[Opener], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "support"), *sys.path]))
    check(lambda: BACKENDS[kind](tmp_path / "store"))


@pytest.mark.slow
def test_a_sweep_runs_in_any_backend(tmp_path: Path, whole: Store) -> None:
    """And is packed, and goes on in another."""
    sweep, store = sweep_of(*EVERYTHING), Store(Table(tmp_path / "table"))
    run(sweep, store, keep_all=True)
    assert timeless(collected(sweep.targets, store)) == timeless(collected(sweep.targets, whole))
    assert store.claims() == {}
    away = Store(Table(tmp_path / "away"))
    outcome = unpack_store(read_packs(pack_store(plan(sweep.targets), store, tmp_path / "pack")), away)
    assert (outcome.added, outcome.damaged) == (len(store.finished()), 0)
    assert timeless(collected(sweep.targets, away)) == timeless(collected(sweep.targets, whole))


def test_a_file_system_without_hard_links_creates_once_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*paths: Path) -> NoReturn:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", refused)
    backend = Folder(tmp_path / "store")
    assert backend.create("claims/x.1", b"mine")
    assert not backend.create("claims/x.1", b"yours")
    assert backend.read("claims/x.1", 100) == b"mine"
    assert backend.list("claims/").keys() == {"claims/x.1"}


def test_a_link_is_not_followed_to_somebody_elses_file(tmp_path: Path) -> None:
    """Whatever lies in the place of a file: what is written replaces it."""
    precious, backend = tmp_path / "precious", Folder(tmp_path / "store")
    precious.write_text("of somebody else")
    assert backend.create("claims/y.1", b"mine")
    (tmp_path / "store" / "claims" / "x.1").symlink_to(precious)
    assert not backend.create("claims/x.1", b"mine")
    backend.write("claims/x.1", b"mine")
    backend.remove("claims/x.1")
    assert precious.read_text() == "of somebody else"


@pytest.mark.parametrize("what", ["link", "pipe"])
@pytest.mark.parametrize("kind", ["result", "state"])
def test_what_is_no_plain_file_is_set_aside_without_a_look_at_what_it_leads_to(
    what: str, kind: Kind, tmp_path: Path
) -> None:
    """In a shared folder, somebody else may put a link to a file of the reader's there, to have it copied."""
    said: list[str] = []
    store, secret = Store(tmp_path / "store", said.append), tmp_path / "secret"
    secret.write_text("of the reader")
    path = tmp_path / "store" / Artifact(kind, KEY).path
    path.parent.mkdir(parents=True)
    if what == "link":
        path.symlink_to(secret)
    else:
        os.mkfifo(path)  # reading it would wait for a writer
    with NewPack(tmp_path / "pack") as pack:
        pack.add(Artifact(kind, KEY).path, store.backend)
    assert read_packs(pack.files) == [], "nor does a pack take it along"
    assert (store.result(KEY) if kind == "result" else store.load(KEY)) is None
    assert [line.partition(";")[0] for line in said] == [f"damaged: {path.name} is not what was written"]
    assert not os.path.lexists(path), "so that it can be computed again"
    assert [file.read_bytes() for file in (tmp_path / "store" / "damaged").iterdir()] == [b""]
    assert secret.read_text() == "of the reader"


def test_files_that_are_no_artifacts_do_not_disturb(store: Store) -> None:
    store.publish(KEY, RESULT)
    for folder in ("results/01", "states/01", "drafts"):
        for name in ("notes", "a\x1b[31mb", KEY[1:], KEY.upper(), "x" * 32):
            for suffix in (".json", ".safetensors"):
                (store.root / folder).mkdir(parents=True, exist_ok=True)
                (store.root / folder / f"{name}{suffix}").touch()
    assert store.finished() == {KEY}
    assert store.drafts() == set()
