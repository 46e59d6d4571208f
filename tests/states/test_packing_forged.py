"""Forged packs: whatever they declare, memory stays bounded, and nothing is written that was not checked."""

import gzip
import io
import json
import shutil
import struct
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save

from command_line import Rewound
from rewound.foundations.errors import InputError
from rewound.states.storage.artifacts import LONGEST_RESULT, digest
from rewound.states.storage.merging import unpack_store
from rewound.states.storage.packs import read_packs
from rewound.states.storage.statefile import tensor_digest
from rewound.states.storage.store import Store
from stored import KEY, RESULT

NAME = {"result": f"results/01/{KEY}.json", "state": f"states/01/{KEY}.safetensors"}
GOOD: dict[str, Any] = {"key": KEY, **RESULT}


def pack(path: Path, *members: tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def result(**changes: object) -> bytes:
    """A result with its checksum, and with something else in it than belongs there."""
    content = {name: value for name, value in {**GOOD, **changes}.items() if value is not ...}
    return json.dumps({**content, "checksum": digest(content)}).encode()


def state(tensors: dict[str, torch.Tensor] | None = None, **changes: object) -> bytes:
    """A state with its checksums, likewise."""
    tensors = {"model/w": torch.ones(3)} if tensors is None else tensors
    facts = {"key": KEY, "seed": 1, "position": [0, 5], "shapes": {}, "masked": False, "slots": True}
    facts |= {"for_good": False, "draft": None, **changes}
    text = json.dumps({name: value for name, value in facts.items() if value is not ...}, sort_keys=True)
    checksums = {"checksum": tensor_digest(tensors, text), "header-checksum": digest(text)}
    return save(tensors, {"rewound": text, **checksums})


def sparse(path: Path) -> bytes:
    """A sparse file of 64 GB that takes no room in the archive."""
    block = bytearray(header(NAME["state"], 0, tarfile.GNUTYPE_SPARSE))
    block[483:495] = b"%011o\0" % 2**33  # what it says that it is in full
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + 8 * 32 + sum(block[156:]))
    return gzip.compress(bytes(block) + bytes(1024))


FORGED: dict[str, Callable[[Path], bytes]] = {
    "a sparse file of 8 GB": sparse,
    "a file of 64 GB that is not there": lambda _: gzip.compress(header(NAME["state"], 2**36) + bytes(1024)),
    "a name of 4 GB": lambda _: gzip.compress(header("x", 2**32, tarfile.GNUTYPE_LONGNAME) + bytes(1024)),
    "notes of 4 GB": lambda _: gzip.compress(header("x", 2**32, tarfile.XHDTYPE) + bytes(1024)),
    "a size below zero": lambda _: gzip.compress(header(NAME["state"], -512) + bytes(1024)),
    "a link": lambda _: gzip.compress(header(NAME["result"], 0, tarfile.SYMTYPE) + bytes(1024)),
    "a folder": lambda _: gzip.compress(header(NAME["result"], 0, tarfile.DIRTYPE) + bytes(1024)),
    "global notes": lambda _: gzip.compress(header("x", 0, tarfile.XGLTYPE) + bytes(1024)),
}


@pytest.mark.parametrize("what", FORGED)
def test_what_pack_does_not_write_is_no_pack(tmp_path: Path, what: str, rewound_command: Rewound) -> None:
    (tmp_path / "file").write_bytes(FORGED[what](tmp_path))
    assert (tmp_path / "file").stat().st_size < 1000
    code, out, err = rewound_command("unpack", tmp_path / "file", "--store", "away")
    assert (code, out) == (2, "")
    assert err.startswith("error: cannot read pack")
    assert not Path("away").exists()


@pytest.mark.parametrize("kind", ["result", "state"])
def test_a_bomb_is_neither_held_in_memory_nor_written(tmp_path: Path, kind: str, store: Store) -> None:
    """128 MiB of zeros in 128 KiB."""
    size, path = 2**27, tmp_path / "pack"
    with gzip.open(path, "wb") as file:
        file.write(header(NAME[kind], size))
        for _ in range(128):
            file.write(bytes(2**20))
        file.write(bytes(1024))
    tracemalloc.start()
    assert unpack_store(read_packs([path]), store) == (0, 0, 1, 0)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held < 2**23
    assert not [found for found in store.root.rglob("*") if found.is_file() and found.name != "version"]


def test_a_state_that_the_disk_has_no_room_for_is_not_begun(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pack(tmp_path / "pack", (NAME["state"], state({"model/w": torch.zeros(2**20)})))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**20))
    with pytest.raises(InputError, match="the disk is full"):
        unpack_store(read_packs([path]), store)
    assert not [found for found in store.root.rglob("*") if found.is_file() and found.name != "version"]


WRONG_RESULTS: dict[str, bytes] = {
    **{
        f"{name} is {value!r}"[:40]: result(**{name: value})
        for name, values in {
            "recipe": (..., None, 3, "\ud800"),
            "history": (..., [], "text", [3], ["\udfff"]),
            "after": (..., 3, "../../etc/passwd", KEY[:-1]),
            "steps": (..., -1, 1.5, True, "9", 2**63),
            "seconds": (..., -1.0, float("nan"), float("inf"), "1", None, 10**400),
            "curve": (..., [], {}, [[1, 2]], [[1, 2, 3, 4]], [["1", 2, 3]], [[1, None, 3]], [3], [[1.5, 2, 3]]),
            "made": (..., [], {"torch": 2}, None, {"\ud800": "2"}),
            "val": (None, "0.5", [], True),
            "test": (..., None, "0.5"),
            "flops": (..., -1, 0.5, None),
            "layers": (..., [], {"a": 3}, {"a": {"kept": 1}}, {"a": {"kept": -1, "total": 2, "flops": 3}}),
            "failed": ({}, None, {"step": 1, "loss": 2}, {"step": 1, "loss": "x"}, {"step": "1", "loss": "nan"}),
            "key": ("fedc" * 8, 3, "text"),
        }.items()
        for value in values
    },
    "too long": result(recipe="x" * LONGEST_RESULT),
    "too deep": b"[" * 100_000,
    "a list": b"[]",
    "nothing": b"",
    "a checksum of something else": result()[:-3] + b'0"}',
}


@pytest.mark.parametrize("what", WRONG_RESULTS)
def test_a_result_of_the_wrong_shape_is_damaged(tmp_path: Path, what: str, store: Store) -> None:
    """Both when it arrives and where it lies in the store already."""
    content = WRONG_RESULTS[what]
    outcome = unpack_store(read_packs([pack(tmp_path / "pack", (NAME["result"], content))]), store)
    assert (outcome.added, outcome.damaged) == (0, 1)
    assert store.finished() == set()
    (store.root / NAME["result"]).parent.mkdir(parents=True, exist_ok=True)
    (store.root / NAME["result"]).write_bytes(content)
    assert store.result(KEY) is None
    assert (store.root / "damaged" / f"{KEY}.json").exists()


def test_a_result_that_is_right_is_taken(tmp_path: Path, store: Store) -> None:
    for content in (result(), result(val=float("nan")), result(failed={"step": 3, "loss": "nan"}, curve=[])):
        outcome = unpack_store(read_packs([pack(tmp_path / "pack", (NAME["result"], content))]), store)
        assert outcome.added == 1
        assert store.result(KEY) is not None
        store.forget(KEY)


MASK = {"model/w": torch.ones(3), "mask/w": torch.tensor([224], dtype=torch.uint8)}
WRONG_STATES: dict[str, bytes] = {
    **{
        f"{name} is {value!r}"[:40]: state(**{name: value})
        for name, values in {
            "seed": (..., "1", 1.5, None, True),
            "position": (..., [1], [1, 2, 3], ["0", 5], [-1, 5], None, {}),
            "shapes": (..., [], {"w": 3}, {"w": [3]}, {"w": ["3"]}),
            "masked": (..., 1, None),
            "slots": (..., "yes"),
            "for_good": (1, None),
            "draft": (..., {"curve": [], "seconds": 1.0}, 3),
            "key": ("fedc" * 8, 3),
        }.items()
        for value in values
    },
    "a mask of other bits": state(MASK, masked=True, shapes={"w": [300]}),
    "a mask that is none": state(MASK, masked=False, shapes={"w": [3]}),
    "a mask of floats": state({**MASK, "mask/w": torch.ones(1)}, masked=True, shapes={"w": [3]}),
    "a mask without end": state(MASK, masked=True, shapes={"w": [2**62, 2**62]}),
    "a tensor of no part": state({"other/w": torch.ones(3)}),
    "a tensor without a part": state({"w": torch.ones(3)}),
    "slots of no parameter": state({"slots/w": torch.ones(3)}),
    "a long header": struct.pack("<Q", 2**40) + b"{}",
    "a header that is none": struct.pack("<Q", 2) + b"[]",
    "a header that is too deep": struct.pack("<Q", 100_000) + 100_000 * b"[",
    "tensors that are not there": (lambda good: good[:-4])(state()),
    "tensors that nobody names": state() + bytes(4),
    "nothing": b"",
    "a few bytes": b"1234",
}


@pytest.mark.parametrize("what", WRONG_STATES)
def test_a_state_of_the_wrong_shape_is_damaged(tmp_path: Path, what: str, store: Store) -> None:
    content = WRONG_STATES[what]
    outcome = unpack_store(read_packs([pack(tmp_path / "pack", (NAME["state"], content))]), store)
    assert (outcome.added, outcome.damaged) == (0, 1)
    assert not store.has_state(KEY)
    (store.root / NAME["state"]).parent.mkdir(parents=True, exist_ok=True)
    (store.root / NAME["state"]).write_bytes(content)
    assert store.load(KEY) is None
    assert (store.root / "damaged" / f"{KEY}.safetensors").exists()


def test_a_state_that_is_right_is_taken(tmp_path: Path, store: Store) -> None:
    content = state(MASK, masked=True, shapes={"w": [3]})
    outcome = unpack_store(read_packs([pack(tmp_path / "pack", (NAME["state"], content))]), store)
    assert (outcome.added, outcome.damaged) == (1, 0)
    assert store.load(KEY) is not None
