"""The store: what is put in comes out, what is damaged is found out, and nothing that happens loses what is there."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors import SafetensorError

import rewound.artifact
import rewound.claims
import rewound.store
from rewound.claims import STALE, Claim
from rewound.errors import InputError
from rewound.mask import Mask
from rewound.recipe import Position
from rewound.records import Notes, Point, Result
from rewound.store import Store
from rewound.training import State

KEY, OTHER = "0123456789abcdef" * 2, "fedcba9876543210" * 2
RESULT: Result = {
    "recipe": "digits",
    "history": ["start digits seed 1", "train 10 steps"],
    "after": None,
    "steps": 10,
    "seconds": 1.25,
    "curve": [Point(5, 0.1, 2.5), Point(10, 0.01, 1.5)],
    "made": {"torch": "2"},
    "val": 0.1,
    "test": 1 / 3,
    "flops": 100,
    "layers": {"conv": {"kept": 1, "total": 2, "flops": 3}},
}


def a_state(scale: float = 1.0, size: int = 3) -> State:
    model = {
        "conv.weight": scale * torch.arange(4.0 * size).reshape(4, size),
        "norm.running_var": torch.ones(4, dtype=torch.float64),
        "norm.num_batches_tracked": torch.tensor(7),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "nothing": torch.empty(0, 3),
    }
    slots = {"momentum_buffer/conv.weight": model["conv.weight"] + 1, "step/half": torch.tensor(3.0)}
    return State(model, slots, 2**62 + 1, Position(2, 10))


def a_mask() -> Mask:
    return Mask({"conv.weight": torch.tensor([[True, False, True]] * 4)})


def assert_same(found: State, expected: State) -> None:
    assert (found.seed, found.position) == (expected.seed, expected.position)
    for mine, yours in ((found.model, expected.model), (found.slots, expected.slots)):
        assert mine.keys() == yours.keys()
        for name, tensor in yours.items():
            assert (mine[name].dtype, mine[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(mine[name], tensor), name


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def artifact(store: Store, part: str) -> Path:
    """The only file of one kind."""
    (path,) = [path for path in store.root.joinpath(part).rglob("*") if path.is_file() and path.name != ".lock"]
    return path


def flip(path: Path, index: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[index] ^= 1 << bit
    path.write_bytes(content)


# What is put in comes out


def test_results_come_back(store: Store) -> None:
    assert store.result(KEY) is None
    assert store.finished() == set()
    store.publish(KEY, RESULT)
    assert store.result(KEY) == RESULT
    assert Store(store.root).result(KEY) == RESULT, "also for the next process"
    assert store.finished() == {KEY}
    store.publish(KEY, {**RESULT, "val": 0.2})
    assert store.result(KEY) == {**RESULT, "val": 0.2}
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
    assert_same(found[0], a_state())
    assert (found[1] is None) == (mask is None)
    if mask is not None and found[1] is not None:
        assert torch.equal(found[1]["conv.weight"], mask["conv.weight"])
    assert found[2] == {"curve": [], "seconds": 0.0}
    store.drop(KEY)
    store.drop(KEY)
    assert store.load(KEY) is None
    assert store.size() == 0


def test_a_mask_that_keeps_everything_is_not_no_mask(store: Store) -> None:
    store.save(KEY, a_state(), Mask.full({"conv.weight": torch.ones(4, 3)}))
    found = store.load(KEY)
    assert found is not None
    assert found[1] is not None
    assert found[1].density == 1


def test_drafts_live_beside_states(store: Store) -> None:
    notes = Notes(curve=[Point(5, 0.1, 2.5)], seconds=3.5)
    store.save(KEY, a_state(), a_mask(), draft=notes)
    assert store.load(KEY) is None, "a draft is not a published state"
    assert not store.has_state(KEY)
    found = store.load(KEY, draft=True)
    assert found is not None
    assert found[2] == notes
    assert isinstance(found[2]["curve"][0], Point)
    assert_same(found[0], a_state())
    store.drop(KEY, draft=True)
    assert store.load(KEY, draft=True) is None


def test_what_is_kept_without_slots_is_not_trained_from(store: Store) -> None:
    store.save(KEY, a_state(), a_mask(), slots=False)
    assert store.load(KEY) is None
    assert store.has_state(KEY)
    assert not store.has_state(KEY, to_train=True)
    found = store.load(KEY, to_train=False)
    assert found is not None
    assert found[0].slots == {}
    assert torch.equal(found[0].model["conv.weight"], a_state().model["conv.weight"])
    store.save(KEY, a_state(), a_mask())
    assert store.has_state(KEY, to_train=True)


def test_views_are_kept_as_they_look(store: Store) -> None:
    weight = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    store.save(KEY, State({"w": weight, "t": weight.transpose(1, 2)}, {}, 1, Position(0, 0)), None)
    found = store.load(KEY)
    assert found is not None
    assert torch.equal(found[0].model["w"], weight)
    assert torch.equal(found[0].model["t"], weight.transpose(1, 2))


# Damage is named, set aside, and counts as absent


def test_a_damaged_result_is_named_and_set_aside(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.publish(KEY, RESULT)
    path = artifact(store, "results")
    text = path.read_text()
    path.write_text(text.replace('"val": 0.1', '"val": 0.9'))
    assert store.result(KEY) is None
    said = capsys.readouterr().out
    assert KEY in said
    assert "set aside" in said
    assert store.finished() == set(), "it will be computed again"
    assert (store.root / "damaged" / f"{KEY}.json").read_text() == text.replace('"val": 0.1', '"val": 0.9')
    store.publish(KEY, RESULT)
    assert store.result(KEY) == RESULT


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b'"text"', b"{}", b"\xff\xfe", b"{", b'{"checksum": "0"}'])
def test_what_is_no_result_is_set_aside(store: Store, content: bytes) -> None:
    store.publish(KEY, RESULT)
    artifact(store, "results").write_bytes(content)
    assert store.result(KEY) is None
    assert (store.root / "damaged" / f"{KEY}.json").read_bytes() == content


def test_no_flipped_bit_of_a_result_goes_unnoticed(store: Store) -> None:
    store.publish(KEY, RESULT)
    path = artifact(store, "results")
    content = path.read_bytes()
    for index in range(len(content)):
        flip(path, index, bit=index % 8)
        assert store.result(KEY) in (None, RESULT), f"byte {index}"  # white space may change without harm
        path.write_bytes(content)


@pytest.mark.parametrize("draft", [False, True], ids=["state", "draft"])
@pytest.mark.parametrize("place", ["length", "header", "metadata", "checksum", "tensor", "last byte"])
def test_a_damaged_state_is_named_and_set_aside(
    store: Store, place: str, draft: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    store.save(KEY, a_state(), a_mask(), draft=Notes(curve=[], seconds=1.0) if draft else None)
    path = artifact(store, "drafts" if draft else "states")
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    index = {
        "length": 1,
        "header": content.index(b"conv.weight"),
        "metadata": content.index(b"position"),
        "checksum": content.index(b"checksum") + 14,
        "tensor": header + 21,
        "last byte": len(content) - 1,
    }[place]
    flip(path, index)
    assert store.load(KEY, draft=draft) is None
    assert f"damaged: {path.name}" in capsys.readouterr().out
    assert not path.exists()
    assert (store.root / "damaged" / path.name).stat().st_size == len(content)
    store.save(KEY, a_state(), a_mask())
    assert store.load(KEY) is not None


def test_no_flipped_bit_of_a_state_goes_unnoticed(store: Store) -> None:
    store.save(KEY, a_state(), a_mask())
    path = artifact(store, "states")
    content = path.read_bytes()
    for index in range(len(content)):
        flip(path, index, bit=index % 8)
        if (found := store.load(KEY)) is not None:  # white space may change without harm
            assert_same(found[0], a_state())
        path.write_bytes(content)


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_a_cut_off_state_is_set_aside(store: Store, size: int) -> None:
    store.save(KEY, a_state(), a_mask())
    path = artifact(store, "states")
    path.write_bytes(path.read_bytes()[:size])
    assert store.load(KEY) is None
    assert not store.has_state(KEY)


def test_two_that_find_the_same_damage_do_not_stumble(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.publish(KEY, RESULT)
    path = artifact(store, "results")
    flip(path, 20)
    damaged = path.read_text()
    path.unlink()  # the other one was faster
    monkeypatch.setattr(Path, "read_text", lambda self: damaged)
    assert store.result(KEY) is None


# Places that cannot be a store


@pytest.mark.parametrize("below", ["", "inside", "deep/inside"])
def test_a_store_path_that_is_a_file(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(InputError, match=r"cannot use store .*file"):
        Store(tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("version", ["2", "999", "later", ""])
def test_a_store_of_a_newer_version(store: Store, version: str) -> None:
    store.publish(KEY, RESULT)
    (store.root / "version").write_text(f"{version}\n")
    with pytest.raises(InputError, match="newer version") as caught:
        Store(store.root)
    assert "upgrade" in str(caught.value)
    assert store.result(KEY) == RESULT, "and nothing in it was touched"


def refusing(code: int) -> Callable[..., NoReturn]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.EACCES, "it is not writable; choose another with --store"),
        (errno.EPERM, "it is not writable"),
        (errno.EROFS, "read-only file system; choose another with --store"),
        (errno.ENOSPC, "the disk is full; free some space and run the same command again, nothing stored is lost"),
        (errno.EDQUOT, "quota"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_what_the_system_refuses_is_said(store: Store, monkeypatch: pytest.MonkeyPatch, code: int, says: str) -> None:
    store.publish(KEY, RESULT)
    store.save(KEY, a_state(), a_mask())
    with monkeypatch.context() as patch:
        patch.setattr(rewound.artifact.tempfile, "mkstemp", refusing(code))
        attempts: list[Callable[[], object]] = [
            lambda: store.publish(KEY, {**RESULT, "val": 0.5}),
            lambda: store.save(KEY, a_state(2.0), None),
            lambda: store.claim(KEY),
            lambda: Store(store.root.with_name("new")),
        ]
        for attempt in attempts:
            with pytest.raises(InputError) as caught:
                attempt()
            assert str(caught.value).startswith(f"cannot use store {store.root.parent}")
            assert says in str(caught.value)
    assert store.result(KEY) == RESULT
    found = store.load(KEY)
    assert found is not None
    assert_same(found[0], a_state())


def parts(store: Store) -> list[Path]:
    return list(store.root.rglob("*.part"))


def test_a_disk_that_fills_up_while_writing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.publish(KEY, RESULT)
    store.save(KEY, a_state(), a_mask())

    def half(tensors: object, path: Path, metadata: object) -> NoReturn:
        Path(path).write_bytes(b"half a header")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(rewound.store, "save_file", half)
        patch.setattr(rewound.artifact.os, "fsync", refusing(errno.ENOSPC))
        for attempt in (lambda: store.save(KEY, a_state(2.0), None), lambda: store.publish(KEY, RESULT)):
            with pytest.raises(InputError, match="the disk is full"):
                attempt()
    assert parts(store) == [], "half a file takes no room"
    assert store.result(KEY) == RESULT
    assert store.load(KEY) is not None


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 200 kB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", folder], capture_output=True)
    if mounting.returncode:
        pytest.skip(f"cannot mount a small disk: {mounting.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_full(tiny_disk: Path) -> None:
    store = Store(tiny_disk / "store")

    def fill() -> None:
        for number in range(100):
            store.save(f"{number:032x}", a_state(number, size=2000), a_mask())
            store.publish(f"{number:032x}", RESULT)

    with pytest.raises(InputError, match="the disk is full"):
        fill()
    kept = len(store.finished())
    assert kept > 0
    assert parts(store) == []
    with pytest.raises(InputError, match="the disk is full"):
        store.publish(OTHER, {**RESULT, "history": ["x" * 200_000]})
    assert store.finished() == {f"{number:032x}" for number in range(kept)}
    for number in range(kept):
        found = store.load(f"{number:032x}")
        assert found is not None
        assert_same(found[0], a_state(number, size=2000))
        assert store.result(f"{number:032x}") == RESULT
    store.drop(f"{0:032x}")
    store.save(f"{kept:032x}", a_state(kept, size=2000), a_mask())  # goes on once there is room


def test_a_disk_that_is_read_only(tiny_disk: Path) -> None:
    store = Store(tiny_disk / "store")
    store.publish(KEY, RESULT)
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    again = Store(store.root)  # reading is fine
    assert again.result(KEY) == RESULT
    for attempt in (lambda: again.publish(KEY, RESULT), lambda: again.claim(KEY), lambda: Store(tiny_disk / "new")):
        with pytest.raises(InputError, match="read-only file system"):
            attempt()


def test_a_folder_that_is_not_writable(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere; the same is simulated above")
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(InputError, match="it is not writable"):
            Store(tmp_path / "store")
    finally:
        tmp_path.chmod(0o755)


BAD_KEYS = ["", "../../evil", "ab/cd", f"../{KEY}", f"{KEY}/x", KEY.upper(), KEY[:-1], f"{KEY}\n", "..", "\0" * 32]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_keys_are_no_paths(store: Store, key: str) -> None:
    notes = Notes(curve=[], seconds=0.0)
    attempts: list[Callable[[], Any]] = [
        lambda: store.result(key),
        lambda: store.publish(key, RESULT),
        lambda: store.forget(key),
        lambda: store.load(key),
        lambda: store.load(key, draft=True),
        lambda: store.save(key, a_state(), None),
        lambda: store.save(key, a_state(), None, draft=notes),
        lambda: store.has_state(key),
        lambda: store.drop(key),
        lambda: store.drop(key, draft=True),
        lambda: store.claim(key),
        lambda: store.beat(key, 1),
        lambda: store.release(key),
    ]
    for attempt in attempts:
        with pytest.raises(InputError, match="is not a key: keys have 32 hexadecimal digits"):
            attempt()
    files = {path.relative_to(store.root.parent) for path in store.root.parent.rglob("*") if path.is_file()}
    assert files <= {Path("store/version"), Path("store/claims/.lock")}


# Publishing is one step


def test_what_is_interrupted_leaves_nothing_to_see(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(KEY, a_state(), None)

    def interrupted(tensors: object, path: Path, metadata: object) -> NoReturn:
        Path(path).write_bytes(b"half")
        assert store.load(KEY) is not None, "the old one is there until the new one is whole"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rewound.store, "save_file", interrupted)
        for key in (KEY, OTHER):
            with pytest.raises(KeyboardInterrupt):
                store.save(key, a_state(2.0), None)
    found = store.load(KEY)
    assert found is not None
    assert_same(found[0], a_state())
    assert not store.has_state(OTHER)
    assert parts(store) == []


def test_what_a_killed_process_left_is_ignored(store: Store) -> None:
    store.publish(KEY, RESULT)
    store.save(KEY, a_state(), None)
    size = store.size()
    for part in ("results/01", "states/01", "drafts", "claims"):
        (store.root / part / ".abc123.part").write_bytes(b"half of something")
    assert store.finished() == {KEY}
    assert store.size() == size
    assert store.claims() == {}
    assert store.result(KEY) == RESULT


# Claims


def test_one_owner_at_a_time(store: Store) -> None:
    assert store.claim(KEY)
    assert not store.claim(KEY), "not even for the owner itself"
    assert store.claim(OTHER)
    store.beat(KEY, 17)
    claims = store.claims()
    assert claims.keys() == {KEY, OTHER}
    assert (claims[KEY].host, claims[KEY].pid, claims[KEY].steps) == (socket.gethostname(), os.getpid(), 17)
    store.release(KEY)
    store.release(KEY)
    assert store.claims().keys() == {OTHER}
    assert store.claim(KEY)


OWNER = """
import sys, time
from pathlib import Path
from rewound.store import Store
store = Store(Path(sys.argv[1]))
print(store.claim(sys.argv[2]), flush=True)
time.sleep(600)
"""


def test_a_dead_owner_is_succeeded_at_once(store: Store) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, store.root, KEY],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "True\n"
            assert not store.claim(KEY), "its owner lives"
            assert store.claims()[KEY].pid == owner.pid
            os.kill(owner.pid, signal.SIGKILL)
            os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)  # dead, though not yet buried
            assert store.claims() == {}
            assert store.claim(KEY)
        finally:
            owner.kill()
    assert store.claims()[KEY].pid == os.getpid()


def write_claim(store: Store, *owner: object, age: float = 0.0) -> None:
    path = store.root / "claims" / f"{KEY}.json"
    path.write_text(json.dumps(owner))
    os.utime(path, (time.time() - age, time.time() - age))


def test_another_hosts_owner_is_succeeded_when_its_heart_stops(store: Store) -> None:
    write_claim(store, "elsewhere", 1, "123", 5, age=STALE - 20)
    assert not store.claim(KEY)
    assert store.claims()[KEY] == Claim("elsewhere", 1, "123", 5)
    write_claim(store, "elsewhere", 1, "123", 5, age=STALE + 20)
    assert store.claims() == {}
    assert store.claim(KEY)


def test_a_process_number_used_again_is_not_its_owner(store: Store) -> None:
    write_claim(store, socket.gethostname(), os.getpid(), "born long ago", 5)
    assert store.claims() == {}
    assert store.claim(KEY)


@pytest.mark.parametrize("content", ["", "{", "[]", '["host"]', "3"])
def test_an_unreadable_claim_is_nobodys(store: Store, content: str) -> None:
    (store.root / "claims" / f"{KEY}.json").write_text(content)
    assert store.claims() == {}
    assert store.claim(KEY)


def test_a_claim_that_is_given_up_meanwhile(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write_claim(store, "elsewhere", 1, "123", 5)
    read = rewound.claims.read_claim

    def read_then_released(path: Path) -> Claim | None:
        claim = read(path)
        store.release(KEY)
        return claim

    for module in (rewound.claims, rewound.store):
        monkeypatch.setattr(module, "read_claim", read_then_released)
    assert store.claims() == {}
    write_claim(store, "elsewhere", 1, "123", 5)
    assert store.claim(KEY)


def test_tied_weights_are_kept_under_both_names(tmp_path: Path) -> None:
    weight = torch.randn(3, 4)
    state = State({"encoder.weight": weight, "decoder.weight": weight}, {}, 1, Position(0, 0))
    store = Store(tmp_path / "store")
    store.save("0" * 32, state, None)
    stored = store.load("0" * 32)
    assert stored is not None
    assert torch.equal(stored[0].model["encoder.weight"], weight)
    assert torch.equal(stored[0].model["decoder.weight"], weight)


def test_others_may_read_a_shared_store(store: Store) -> None:
    store.save(KEY, State({"w": torch.ones(2)}, {}, 1, Position(0, 0)), None)
    modes = {path.stat().st_mode & 0o777 for path in store.root.rglob("*") if path.is_file() and path.name[0] != "."}
    assert modes == {0o644}


def test_what_killed_writers_left_is_swept_up_after_an_hour(store: Store) -> None:
    old, new = store.root / "states" / ".old.part", store.root / "states" / ".new.part"
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    store.sweep_up()
    assert not old.exists()
    assert new.exists()
