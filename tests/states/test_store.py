"""The store: what is put in comes out, in one step or not at all."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch

import rewound.states.storage.statefile
from rewound.experiments.housekeeping import Leftovers, remove
from rewound.method.pruning.mask import Mask
from rewound.states.storage.artifacts import CurvePoint, Notes
from rewound.states.storage.store import Store
from rewound.tasks.recipe import Position
from rewound.tasks.training import State
from sameness import assert_same
from stored import KEY, OTHER, RESULT, a_mask, a_state, parts

# What is put in comes out


def test_results_come_back(store: Store) -> None:
    assert store.result(KEY) is None
    assert store.finished() == set()
    store.publish(KEY, RESULT)
    assert store.result(KEY) == RESULT
    assert Store(store.root).result(KEY) == RESULT, "also for the next process"
    assert store.finished() == {KEY}
    assert not store.publish(KEY, {**RESULT, "val": 0.2}), "what was measured is not overwritten"
    assert store.result(KEY) == RESULT
    store.forget(KEY)
    store.forget(KEY)
    assert store.result(KEY) is None


@pytest.mark.parametrize("mask", [None, a_mask()], ids=["dense", "masked"])
def test_states_come_back(store: Store, mask: Mask | None) -> None:
    assert store.load(KEY) is None
    assert not store.has_state(KEY)
    store.save(KEY, a_state(), mask)
    assert store.has_state(KEY)
    assert store.size() > 0
    found = store.load(KEY)
    assert found is not None
    assert_same(found.state, a_state())
    assert (found.mask is None) == (mask is None)
    if mask is not None and found.mask is not None:
        assert torch.equal(found.mask["conv.weight"], mask["conv.weight"])
    assert found.notes == {"curve": [], "seconds": 0.0}
    store.drop(KEY)
    store.drop(KEY)
    assert store.load(KEY) is None
    assert store.size() == 0


def test_a_mask_that_keeps_everything_is_not_no_mask(store: Store) -> None:
    store.save(KEY, a_state(), Mask.full({"conv.weight": torch.ones(4, 3)}))
    found = store.load(KEY)
    assert found is not None
    assert found.mask is not None
    assert found.mask.density == 1


def test_drafts_live_beside_states(store: Store) -> None:
    notes = Notes(curve=[CurvePoint(5, 0.1, 2.5)], seconds=3.5)
    store.save(KEY, a_state(), a_mask(), draft=notes)
    assert store.load(KEY) is None, "a draft is not a published state"
    (store.root / "drafts" / "notes.txt").write_text("of somebody who looked")
    assert store.drafts() == {KEY}
    assert not store.has_state(KEY)
    found = store.load(KEY, draft=True)
    assert found is not None
    assert found.notes == notes
    assert isinstance(found.notes["curve"][0], CurvePoint)
    assert_same(found.state, a_state())
    store.drop(KEY, draft=True)
    assert store.load(KEY, draft=True) is None


def test_what_is_kept_without_slots_is_not_trained_from(store: Store) -> None:
    store.save(KEY, a_state(), a_mask(), slots=False)
    assert store.load(KEY) is None
    assert store.has_state(KEY)
    assert not store.has_state(KEY, to_train=True)
    found = store.load(KEY, to_train=False)
    assert found is not None
    assert found.state.slots == {}
    assert torch.equal(found.state.model["conv.weight"], a_state().model["conv.weight"])
    store.save(KEY, a_state(), a_mask())
    assert store.has_state(KEY, to_train=True)


def test_views_are_kept_as_they_look(store: Store) -> None:
    weight = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    store.save(KEY, State({"w": weight, "t": weight.transpose(1, 2)}, {}, 1, Position(0, 0)), None)
    found = store.load(KEY)
    assert found is not None
    assert torch.equal(found.state.model["w"], weight)
    assert torch.equal(found.state.model["t"], weight.transpose(1, 2))


def test_tied_weights_are_kept_under_both_names(tmp_path: Path) -> None:
    weight = torch.randn(3, 4)
    state = State({"encoder.weight": weight, "decoder.weight": weight}, {}, 1, Position(0, 0))
    store = Store(tmp_path / "store")
    store.save("0" * 32, state, None)
    stored = store.load("0" * 32)
    assert stored is not None
    assert torch.equal(stored.state.model["encoder.weight"], weight)
    assert torch.equal(stored.state.model["decoder.weight"], weight)


def test_others_may_read_a_shared_store(store: Store) -> None:
    store.save(KEY, State({"w": torch.ones(2)}, {}, 1, Position(0, 0)), None)
    modes = {path.stat().st_mode & 0o777 for path in store.root.rglob("*") if path.is_file() and path.name[0] != "."}
    assert modes == {0o644}


# Publishing is one step


def test_what_is_interrupted_leaves_nothing_to_see(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(KEY, a_state(), None)

    def interrupted(tensors: object, path: Path, metadata: object) -> NoReturn:
        Path(path).write_bytes(b"half")
        assert store.load(KEY) is not None, "the old one is there until the new one is whole"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rewound.states.storage.statefile, "save_file", interrupted)
        for key in (KEY, OTHER):
            with pytest.raises(KeyboardInterrupt):
                store.save(key, a_state(2.0), None)
    found = store.load(KEY)
    assert found is not None
    assert_same(found.state, a_state())
    assert not store.has_state(OTHER)
    assert parts(store) == []


def test_what_a_killed_process_left_is_ignored(store: Store) -> None:
    store.publish(KEY, RESULT)
    store.save(KEY, a_state(), None)
    size = store.size()
    for part in ("results/01", "states/01", "drafts", "claims"):
        (store.root / part).mkdir(exist_ok=True)
        (store.root / part / ".abc123.part").write_bytes(b"half of something")
    assert store.finished() == {KEY}
    assert store.size() == size
    assert store.claims() == {}
    assert store.result(KEY) == RESULT


WRITER = """
import os, sys
from pathlib import Path
from rewound.foundations.wholefiles import replacing
with replacing(Path(sys.argv[1])) as temporary:
    temporary.with_name(".tmpAb3dE9").write_bytes(b"what safetensors has written so far")
    print(temporary, flush=True)
    if sys.argv[2] == "dies":
        os.kill(os.getpid(), 9)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("fate", ["dies", "lives"])
def test_what_a_killed_writer_left_is_swept_up_at_once(store: Store, fate: str) -> None:
    (store.root / "states" / "01").mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, store.root / "states" / "01" / KEY, fate],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as writer:
        assert writer.stdout is not None
        path = Path(writer.stdout.readline().rstrip())
        if fate == "dies":
            writer.wait()
        store.sweep_up()
        names = {path.name for path in (store.root / "states" / "01").iterdir()}
        assert names == ({path.name, ".tmpAb3dE9"} if fate == "lives" else set())
        writer.communicate("end\n" if fate == "lives" else None)


def test_what_writers_elsewhere_left_is_swept_up_after_an_hour(store: Store) -> None:
    """Their processes cannot be seen from here; versions before this one did not say whose a file is."""
    folder = store.root / "states"
    folder.mkdir()
    names = [".0123456789abcdef.part", f".0123456789abcdef.{'0' * 8}-17-123.part"]
    for age in (0, 3700):
        for name in (*names, ".tmpAb3dE9"):
            (folder / name).touch()
            os.utime(folder / name, (time.time() - age, time.time() - age))
        (folder / ".part").touch()
        (folder / ".somebody.part").touch()
        store.sweep_up()
        left = {path.name for path in folder.iterdir()}
        assert left == {".part", ".somebody.part", *((*names, ".tmpAb3dE9") if age == 0 else ())}
    (folder / names[1]).touch()
    os.utime(folder / names[1], (time.time() - 130, time.time() - 130))
    store.sweep_up()
    assert (folder / names[1]).exists()
    remove(Leftovers({}, {}, {}, {}), store)
    assert not (folder / names[1]).exists(), "gc waits no longer than for a claim"


@pytest.mark.parametrize("hours", [-2, 2])
def test_the_age_of_what_writers_left_is_told_by_the_clock_of_the_files(
    store: Store, monkeypatch: pytest.MonkeyPatch, hours: float
) -> None:
    """A machine whose clock is hours ahead must not remove what another is writing."""
    folder = store.root / "states"
    folder.mkdir()
    written = folder / f".0123456789abcdef.{'0' * 8}-17-123.part"
    written.touch()
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 3600 * hours)
    store.sweep_up()
    assert list(folder.iterdir()) == [written]
