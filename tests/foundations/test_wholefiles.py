"""Files that are whole or not there, with the mode that any new file gets."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import rewound
from rewound import Mask
from rewound.experiments.compression import LevelReport, PrunedNetwork
from rewound.foundations.csvfiles import write_table
from rewound.foundations.owners import this_process
from rewound.foundations.wholefiles import default_cache, remove_unfinished, replacing, unfinished, write_whole
from rewound.states.storage.store import Store
from stored import KEY, RESULT, a_mask, a_state


@pytest.fixture(params=[0o022, 0o077, 0o002], ids="{:03o}".format)
def mode(request: pytest.FixtureRequest) -> Iterator[int]:
    """What a new file gets by the umask that is set."""
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def test_all_that_is_written_follows_the_umask(tmp_path: Path, mode: int) -> None:
    network = torch.nn.Linear(2, 1)
    mask = Mask.full({"weight": network.weight})
    about = {"recipe": "digits", "fields": {}, "technique": "fine-tuning", "retrain_epochs": 1.0}
    level = LevelReport(0, 1.0, 1.0, 0.5, 0.5, 2, 0.0, KEY, 1.0)
    PrunedNetwork(network, mask, network, (level,), 0, about).save(tmp_path / "pruned")
    store = Store(tmp_path / "store")
    store.publish(KEY, RESULT)
    store.save(KEY, a_state(), a_mask())
    store.claim(KEY)
    write_table(["a"], [[1]], tmp_path / "tables" / "results.csv.gz")
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
    assert len(files) == 11
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {path.name: oct(mode) for path in files}


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    with suppress(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_bytes(b"half of the n")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_file_that_was_to_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder") as caught:
        write_whole(tmp_path / "folder", b"")
    assert caught.value.filename == str(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_a_killed_script_left_half_written_is_gone_when_it_runs_again(tmp_path: Path) -> None:
    dead = this_process()._replace(birth="1")  # a process of this number that ended before this one began
    left = tmp_path / f".0123456789abcdef.{dead.as_word()}.part"
    left.write_bytes(b"half a snapshot")
    model = torch.nn.Linear(4, 2)
    run = rewound.epochs(1, model, torch.optim.SGD(model.parameters(), lr=0.1), checkpoint=tmp_path, compression=2)
    for _ in run:
        assert not left.exists()
        break


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("REWOUND_CACHE", raising=False)
    assert default_cache() == Path("/home/ada/.cache/rewound")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/xdg")
    assert default_cache() == Path("/var/xdg/rewound")
    monkeypatch.setenv("REWOUND_CACHE", "~/data")
    assert default_cache() == Path("/home/ada/data")


def test_what_safetensors_still_writes_for_somebody_elsewhere_stays(tmp_path: Path) -> None:
    theirs = tmp_path / ".tmpAb12Cd"
    (made,) = _unfinished_name(tmp_path)
    ours = tmp_path / made.replace(this_process().as_word(), "0123abcd-17-5")
    for path in (ours, theirs):
        path.touch()
    os.utime(ours, (0, 0))  # as it was made: safetensors writes only to its own file
    remove_unfinished(tmp_path, after=60.0)
    assert ours.exists()
    assert theirs.exists()
    os.utime(theirs, (0, 0))
    remove_unfinished(tmp_path, after=60.0)
    assert not ours.exists()
    assert not theirs.exists()


def _unfinished_name(folder: Path) -> list[str]:
    with unfinished(folder) as file:
        return [file.name]
