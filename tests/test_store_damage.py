"""Damage in a store: it is named, set aside, and counts as absent."""

import errno
from pathlib import Path
from typing import NoReturn

import pytest

import rewound.storage.statefile
from rewound.errors import InputError
from rewound.storage.records import Notes
from rewound.storage.store import Store
from stored import KEY, RESULT, a_mask, a_state, artifact, assert_same, flip


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
        patch.setattr(rewound.storage.statefile, "safe_open", busy)
        with pytest.raises(InputError, match=r"cannot use store .*Too many open files"):
            store.load(KEY)
    found = store.load(KEY)
    assert found is not None
    assert_same(found.state, a_state())


def test_what_is_dropped_meanwhile_is_absent_and_not_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store.save(KEY, a_state(), a_mask())
    opened = rewound.storage.statefile.safe_open

    def late(path: Path, framework: str) -> object:
        path.unlink()
        return opened(path, framework=framework)

    monkeypatch.setattr(rewound.storage.statefile, "safe_open", late)
    assert store.load(KEY) is None
    assert not capsys.readouterr().out
