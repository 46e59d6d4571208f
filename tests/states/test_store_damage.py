"""Damage in a store: it is named, set aside, and counts as absent."""

import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

import rewound.states.storage.statefile
from command_line import Rewound
from rewound.foundations.errors import InputError
from rewound.states.storage.artifacts import Notes
from rewound.states.storage.store import VERSION, Store, _version_line
from sameness import assert_same
from stored import KEY, RESULT, a_mask, a_state, artifact, flip


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


def test_damage_after_a_state_was_read_does_not_reach_it(store: Store) -> None:
    """What was checked is what is used, whatever becomes of the file."""
    store.save(KEY, a_state(), a_mask())
    kept = store.load(KEY)
    path = artifact(store, "states")
    with path.open("r+b") as file:  # in place, as a disk or rsync does it
        file.write(bytes(path.stat().st_size))
    assert kept is not None
    assert_same(kept.state, a_state())


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


@pytest.mark.slow
def test_no_flipped_bit_of_a_state_goes_unnoticed(store: Store) -> None:
    store.save(KEY, a_state(), a_mask())
    path = artifact(store, "states")
    content = path.read_bytes()
    for index in range(len(content)):
        flip(path, index, bit=index % 8)
        if (found := store.load(KEY)) is not None:  # white space may change without harm
            assert_same(found.state, a_state())
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


def test_what_cannot_be_read_now_is_not_damaged(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(KEY, a_state(), a_mask())

    def busy(*args: object, **kwargs: object) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(rewound.states.storage.statefile, "safe_open", busy)
        with pytest.raises(InputError, match=r"cannot use store .*Too many open files"):
            store.load(KEY)
    found = store.load(KEY)
    assert found is not None
    assert_same(found.state, a_state())


def test_what_is_dropped_meanwhile_is_absent_and_not_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store.save(KEY, a_state(), a_mask())
    opened = rewound.states.storage.statefile.safe_open

    def late(path: Path, framework: str) -> object:
        path.unlink()
        return opened(path, framework=framework)

    monkeypatch.setattr(rewound.states.storage.statefile, "safe_open", late)
    assert store.load(KEY) is None
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"\xb1\n", b"2\n", b"999\n", b"later\n", b"-1\n", b"1" * 5000, b"1 \xff"]
)
def test_a_damaged_version_is_set_aside_and_written_anew(
    store: Store, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """A number above 1 has a checksum beside it: without one, it is no newer version."""
    store.publish(KEY, RESULT)
    (store.root / "version").write_bytes(content)
    assert Store(store.root).result(KEY) == RESULT
    assert "damaged: version is not what was written; set aside as" in capsys.readouterr().out
    assert (store.root / "damaged" / "version").read_bytes() == content
    assert (store.root / "version").read_bytes() == _version_line(VERSION)
    Store(store.root)
    assert capsys.readouterr().out == ""


def test_no_flipped_bit_of_a_version_closes_a_store(store: Store) -> None:
    for version in (1, VERSION):
        for bit in range(8 * len(_version_line(version))):
            (store.root / "version").write_bytes(_version_line(version))
            flip(store.root / "version", bit // 8, bit % 8)
            Store(store.root)
            assert (store.root / "version").read_bytes().split() == _version_line(VERSION).split()


@pytest.mark.parametrize("draft", [False, True], ids=["state", "draft"])
def test_no_flipped_bit_of_a_header_is_believed(store: Store, draft: bool) -> None:
    """Headers are also read alone: to plan, to see how far a draft is, and before a state is dropped."""
    store.save(KEY, a_state(), a_mask(), draft=Notes(curve=[], seconds=1.0) if draft else None, for_good=True)
    path = artifact(store, "drafts" if draft else "states")
    content = path.read_bytes()
    for index in range(0, 8 + int.from_bytes(content[:8], "little"), 3):
        for look in (
            lambda: store.has_state(KEY, to_train=True) in (True, False),
            lambda: store.drafted(KEY) in (None, a_state().position),
            lambda: store.unbound(KEY) == [],
            lambda: store.drop(KEY, draft=draft) is None and (path.exists() or any(store.root.glob("damaged/*"))),
        ):
            path.write_bytes(content)
            flip(path, index, bit=index % 8)
            assert look(), f"byte {index}"
            for aside in store.root.glob("damaged/*"):
                aside.unlink()


def means_the_same(one: bytes, other: bytes) -> bool:
    """Whether two contents differ in white space at most."""
    try:
        return bool(json.loads(one) == json.loads(other))
    except (ValueError, RecursionError):
        return False


def damages(path: Path) -> Iterator[bytes]:
    """What may become of a file: bits flipped all over it, its end lost, nothing left of it, other bytes."""
    content = path.read_bytes()
    for index in (0, 9, len(content) // 2, len(content) - 2):
        flipped = bytearray(content)
        flipped[min(index, len(content) - 1)] ^= 4
        yield bytes(flipped)
    yield from (content[: len(content) // 2], b"", bytes(len(content)), b"[" * 50_000, b'{"checksum": 3}')


@pytest.mark.parametrize("kind", ["results", "states", "drafts", "claims", "version"])
def test_damage_ends_no_command_with_a_traceback(
    done: Path, tmp_path: Path, kind: str, rewound_command: Rewound
) -> None:
    """`rewound_command` passes on what is no sentence; what is damaged is named, and the rest is used."""
    store, sweep = Store(tmp_path / "store", lambda text: None), done / "tiny.toml"
    where = ("--store", store.root)
    plan_line = rewound_command("plan", sweep, "--store", done / "rewound-store").out
    shutil.rmtree(store.root)
    shutil.copytree(done / "rewound-store", store.root)
    key = min(store.finished())
    if kind == "drafts":
        kept = store.load(key)
        assert kept is not None
        store.save(key, kept.state, kept.mask, draft=Notes(curve=[], seconds=1.0))
    store.claim(key)
    path = store.root / kind if kind == "version" else min(store.root.glob(f"{kind}/**/*{key}*"))
    content = path.read_bytes()
    for number, damaged in enumerate(damages(path)):
        for words in (("show",), ("show", key), ("plan", sweep), ("pack", sweep, "--out", tmp_path / "pack")):
            path.write_bytes(damaged)
            code, out, err = rewound_command(*words, *where)
            assert code in (0, 2), (number, words, err)
            if kind in ("results", "version") and words != ("show", key):
                assert "damaged" in out or means_the_same(damaged, content), (number, words)
            if words[0] == "plan" and kind != "results":
                assert plan_line.splitlines()[2:] == out.splitlines()[2 + ("damaged" in out) :]
        path.write_bytes(content)
