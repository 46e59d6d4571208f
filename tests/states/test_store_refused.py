"""Places that cannot be a store and keys that are none: what is refused is said, and nothing stored is lost."""

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from safetensors import SafetensorError

import rewound.foundations.wholefiles
import rewound.states.storage.statefile
from command_line import Rewound
from rewound.foundations.errors import InputError
from rewound.states.storage.artifacts import Notes
from rewound.states.storage.store import Store, _version_line
from sameness import assert_same
from stored import KEY, OTHER, RESULT, a_mask, a_state, parts


@pytest.mark.parametrize("below", ["", "inside", "deep/inside"])
def test_a_store_path_that_is_a_file(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(InputError, match=r"cannot use store .*file"):
        Store(tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("version", [3, 999])
def test_a_store_of_a_newer_version(store: Store, version: int) -> None:
    store.publish(KEY, RESULT)
    (store.root / "version").write_bytes(_version_line(version))
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
        patch.setattr(rewound.foundations.wholefiles.os, "open", refusing(code))
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
    assert_same(found.state, a_state())


def test_a_disk_that_fills_up_while_writing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.publish(KEY, RESULT)
    store.save(KEY, a_state(), a_mask())

    def half(tensors: object, path: Path, metadata: object) -> NoReturn:
        Path(path).write_bytes(b"half a header")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(rewound.states.storage.statefile, "save_file", half)
        patch.setattr(rewound.foundations.wholefiles.os, "fsync", refusing(errno.ENOSPC))
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
        assert_same(found.state, a_state(number, size=2000))
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


def test_a_finished_sweep_is_reported_from_a_disk_that_is_read_only(
    tiny_disk: Path, done: Path, rewound_command: Rewound
) -> None:
    """Nothing is to be done, so nothing needs to be written: not even where folders or tensors are left over."""
    shutil.copytree(done / "rewound-store", tiny_disk / "store")
    shutil.rmtree(tiny_disk / "store" / "claims", ignore_errors=True)
    key = min(Store(done / "rewound-store").finished())
    (tiny_disk / "store" / "drafts").mkdir(exist_ok=True)
    (tiny_disk / "store" / "drafts" / f"{key}.safetensors").write_bytes(b"of a node that has ended since")
    (tiny_disk / "store" / "results" / key[:2] / ".0123456789abcdef.part").touch()
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    words = (done / "tiny.toml", "--store", tiny_disk / "store")
    for command in (("run", "--out", "run"), ("report", "--out", "report")):
        code, _, err = rewound_command(command[0], *words, *command[1:])
        assert (code, err) == (0, "")
        assert Path(command[2], "results.csv").read_bytes() == (done / "report" / "results.csv").read_bytes()
    for command in (("plan", *words), ("pack", *words, "--out", "pack"), ("show", *words[1:])):
        assert rewound_command(*command).code == 0


def test_damage_on_a_disk_that_is_read_only_is_named(tiny_disk: Path, done: Path, rewound_command: Rewound) -> None:
    shutil.copytree(done / "rewound-store", tiny_disk / "store")
    path = min((tiny_disk / "store").glob("results/*/*.json"))
    path.write_bytes(b"damaged")
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    code, out, err = rewound_command("show", "--store", tiny_disk / "store")
    assert (code, err) == (0, "")
    assert out.count(f"damaged: {path.name} is not what was written; not used, to be recomputed\n") == 1
    code, _, err = rewound_command("run", done / "tiny.toml", "--store", tiny_disk / "store", "--out", "run")
    assert code == 2
    assert "it is on a read-only file system; choose another with --store" in err


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
    assert files <= {Path("store/version")}
