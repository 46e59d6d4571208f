"""The index of a store: it saves reading, and changes nothing of what is read."""

import hashlib
import json
import math
import shutil
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from rewound.experiments.executors.walking import Watch
from rewound.experiments.housekeeping import damages
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.planning import plan
from rewound.foundations.errors import InputError
from rewound.states.storage import index
from rewound.states.storage.artifacts import CurvePoint, Failure, Measurements, Result, measurements_of, summary_of
from rewound.states.storage.backend import Listed, ReadOnly, contents_of
from rewound.states.storage.folder import Folder
from rewound.states.storage.store import Store
from stored import RESULT, flip
from tiny_sweeps import FINE_TUNING, run, sweep_of

KEYS = [f"{number:032x}" for number in range(6)]


class Counting(Folder):
    """A folder that counts the results whose files are read, and how often all are listed."""

    reads = lists = 0

    def list(self, prefix: str) -> dict[str, Listed]:
        self.lists += prefix == "results/"
        return super().list(prefix)

    def read(self, path: str, most: int) -> bytes | None:
        self.reads += path.startswith("results/")
        return super().read(path, most)


def opened(root: Path) -> Store:
    return Store(Counting(root), lambda line: None)


def reads(store: Store) -> int:
    assert isinstance(store.backend, Counting)
    return store.backend.reads


def result_of(key: str, **changed: object) -> Result:
    number = int(key, 16)
    return {**RESULT, "history": [f"train -> {key[:12]}"], "val": number / 8, **changed}  # type: ignore[typeddict-item]


def measured(key: str, **changed: object) -> Measurements:
    """What tables need of a result."""
    return measurements_of(result_of(key, **changed))


def segments(root: Path) -> list[Path]:
    return sorted(root.joinpath("index").iterdir()) if root.joinpath("index").exists() else []


@pytest.fixture(autouse=True)
def few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "ENOUGH", 3)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store whose results have been read once, and are in the index."""
    store = opened(tmp_path / "store")
    for key in KEYS:
        store.publish(key, result_of(key))
    assert dict(opened(store.root).results(KEYS)) == {key: measured(key) for key in KEYS}
    assert len(segments(store.root)) == 1
    return store.root


def test_what_is_in_the_index_is_not_read_again(root: Path) -> None:
    store = opened(root)
    assert dict(store.results(KEYS)) == {key: measured(key) for key in KEYS}
    assert reads(store) == 0
    fresh = opened(root)
    assert fresh.outcomes(KEYS) == dict.fromkeys(KEYS, "measured")
    assert fresh.known == dict.fromkeys(KEYS, "measured")
    assert reads(fresh) == 0


def test_few_results_are_read_without_an_index(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    for key in KEYS[:2]:
        store.publish(key, result_of(key))
    assert len(dict(store.results(KEYS))) == 2
    assert segments(store.root) == []


def test_only_what_is_asked_for_is_given(root: Path) -> None:
    assert dict(opened(root).results(KEYS[:1])) == {KEYS[0]: measured(KEYS[0])}
    assert opened(root).outcomes([KEYS[1], 32 * "f"]) == {KEYS[1]: "measured"}


def test_a_result_that_was_replaced_is_read_from_its_file(root: Path) -> None:
    failed = result_of(KEYS[0])
    del failed["val"]
    failed["failed"] = Failure(step=3, loss="nan")
    opened(root).publish(KEYS[0], failed, replace=True)
    assert opened(root).outcomes(KEYS) == {**dict.fromkeys(KEYS, "measured"), KEYS[0]: "failed"}
    assert dict(opened(root).results(KEYS))[KEYS[0]] == measurements_of(failed)


def test_a_result_that_was_forgotten_is_not_given(root: Path) -> None:
    opened(root).forget(KEYS[0])
    assert opened(root).outcomes(KEYS).keys() == {*KEYS[1:]}
    assert dict(opened(root).results(KEYS)).keys() == {*KEYS[1:]}


def test_a_result_that_was_damaged_since_is_set_aside(root: Path) -> None:
    flip(root / "results" / KEYS[0][:2] / f"{KEYS[0]}.json", 40)
    said: list[str] = []
    assert Store(root, said.append).outcomes(KEYS).keys() == {*KEYS[1:]}
    assert "damaged" in said[0]
    assert (root / "damaged" / f"{KEYS[0]}.json").exists()


@pytest.mark.parametrize("harm", ["flipped", "cut", "empty", "removed", "renamed"])
def test_a_segment_that_is_not_what_was_written_is_left_out(root: Path, harm: str) -> None:
    (segment,) = segments(root)
    if harm == "flipped":
        flip(segment, 30)
    elif harm in ("cut", "empty"):
        segment.write_bytes(segment.read_bytes()[:-1] if harm == "cut" else b"")
    elif harm == "removed":
        segment.unlink()
    else:
        segment.rename(segment.with_name("0" * 32))
    store = opened(root)
    assert dict(store.results(KEYS)) == {key: measured(key) for key in KEYS}
    assert reads(store) == len(KEYS)
    again = opened(root)
    assert dict(again.results(KEYS)) == {key: measured(key) for key in KEYS}
    assert reads(again) == 0, "it was written anew"


def unpacked(segment: Path) -> tuple[list[list[Any]], dict[str, list[Any]]]:
    """The two parts of a segment: summaries, and columns of curves and layers."""
    unpacking = zlib.decompressobj()
    header = json.loads(unpacking.decompress(segment.read_bytes()))
    return header, json.loads(zlib.decompress(unpacking.unused_data))


def forged(root: Path, header: object, body: bytes) -> None:
    """Put a segment into a store whose checksum is right, and whose content may not be, in the place of its own."""
    (segment,) = segments(root)
    segment.unlink()
    content = zlib.compress(json.dumps(header).encode()) + zlib.compress(body)
    segment.with_name(hashlib.blake2b(content, digest_size=16).hexdigest()).write_bytes(content)


@pytest.mark.parametrize("body", [b"{}", b"[]", b"3", b"\xff", b'{"points": 3}'])
def test_a_segment_without_its_columns_is_left_out(root: Path, body: bytes) -> None:
    forged(root, unpacked(segments(root)[0])[0], body)
    store = opened(root)
    assert dict(store.results(KEYS)) == {key: measured(key) for key in KEYS}
    assert reads(store) == len(KEYS)


OTHERS: dict[str, list[object]] = {
    "points": [-1, 3, "1"],
    "step": [-1, 1.0, None],
    "lr": ["0.1"],
    "loss": [None, []],
    "network": [1, -1, None, "0"],
    "networks": ["conv", [3], ["\ud800"], ["conv", "fc"]],
    "kept": [-1],
    "total": [2**63],
    "flops": [True],
}


@pytest.mark.parametrize(("column", "first"), [(name, value) for name, values in OTHERS.items() for value in values])
def test_columns_with_something_else_in_them_are_left_out(root: Path, column: str, first: object) -> None:
    header, columns = unpacked(segments(root)[0])
    columns[column][0] = first
    forged(root, header, json.dumps(columns).encode())
    store = opened(root)
    assert dict(store.results(KEYS)) == {key: measured(key) for key in KEYS}
    assert reads(store) == len(KEYS)


@pytest.mark.parametrize("column", OTHERS)
def test_a_column_that_is_too_short_is_noticed(root: Path, column: str) -> None:
    header, columns = unpacked(segments(root)[0])
    columns[column].pop()
    forged(root, header, json.dumps(columns).encode())
    assert dict(opened(root).results(KEYS)) == {key: measured(key) for key in KEYS}


@pytest.mark.parametrize(
    "header", [3, {}, [3], [[KEYS[0]]], [["x", "s", {}]], [[KEYS[0], "s", "measured"]], [[KEYS[0], 3, {}]]]
)
def test_a_segment_that_makes_no_sense_is_left_out(root: Path, header: object) -> None:
    forged(root, header, b"x")
    assert dict(opened(root).summaries(KEYS)) == {key: summary_of(result_of(key)) for key in KEYS}
    assert dict(opened(root).results(KEYS)) == {key: measured(key) for key in KEYS}


def test_a_segment_of_an_earlier_version_is_replaced(root: Path) -> None:
    """It had the files themselves in its second part, and their sizes in its first."""
    (segment,) = segments(root)
    body = json.dumps(result_of(KEYS[0])).encode()
    forged(root, [[key, stamp, len(body), summary] for key, stamp, summary in unpacked(segment)[0]], body)
    assert dict(opened(root).summaries(KEYS)) == {key: summary_of(result_of(key)) for key in KEYS}
    assert segments(root) == [segment]
    assert dict(opened(root).results(KEYS)) == {key: measured(key) for key in KEYS}


@pytest.mark.parametrize("change", [{"made": 3}, {"seconds": "1"}, {"steps": -1}, {"recipe": "\ud800"}, {"failed": 1}])
def test_what_is_no_summary_in_a_segment_is_read_from_its_file(root: Path, change: dict[str, object]) -> None:
    ((key, stamp, summary), *others), columns = unpacked(segments(root)[0])
    forged(root, [(key, stamp, {**summary, **change}), *others], json.dumps(columns).encode())
    store = opened(root)
    assert dict(store.summaries(KEYS)) == {key: summary_of(result_of(key)) for key in KEYS}
    assert dict(store.results(KEYS)) == {key: measured(key) for key in KEYS}
    assert reads(store) == 2


@pytest.mark.parametrize("lost", ["test", "flops"])
def test_a_result_that_is_evaluated_in_part_is_read_from_its_file(root: Path, lost: str) -> None:
    ((key, stamp, summary), *others), columns = unpacked(segments(root)[0])
    forged(root, [(key, stamp, {**summary, lost: 1}), *others], json.dumps(columns).encode())
    assert dict(opened(root).results(KEYS))[key][lost] == 1, "what is a result is taken from the index"  # type: ignore[literal-required]
    del summary[lost]
    forged(root, [(key, stamp, summary), *others], json.dumps(columns).encode())
    store = opened(root)
    assert dict(store.results(KEYS)) == {key: measured(key) for key in KEYS}
    assert reads(store) == 1


def test_whatever_a_result_may_say_is_the_same_in_the_index(tmp_path: Path) -> None:
    """Curves of any length with numbers of any kind, results without layers, and networks of other layers."""
    odd = [CurvePoint(1, 0, math.inf), CurvePoint(2**62, 1e-300, -0.0), CurvePoint(3, 0.1, 5)]
    passed = {name: value for name, value in result_of(KEYS[2]).items() if name not in ("val", "test", "layers")}
    layers = {"b": {"kept": 2**62, "total": 0, "flops": 7}, "a": {"kept": 1, "total": 2, "flops": 3}}
    given = {
        KEYS[0]: result_of(KEYS[0], curve=odd),
        KEYS[1]: result_of(KEYS[1], curve=[], failed={"step": 3, "loss": "nan"}),
        KEYS[2]: cast(Result, passed),
        KEYS[3]: result_of(KEYS[3], layers=layers, others={"newstest": 1.5}, host="x"),
        KEYS[4]: result_of(KEYS[4], layers={}),
    }
    store = opened(tmp_path / "store")
    for key, result in given.items():
        store.publish(key, result)
    files, again = dict(store.results(given)), opened(store.root)
    indexed = dict(again.results(given))
    assert files == indexed == {key: measurements_of(result) for key, result in given.items()}
    assert reads(again) == 0
    assert repr({key: files[key]["curve"] for key in given}) == repr({key: indexed[key]["curve"] for key in given})
    assert list(indexed[KEYS[3]]["layers"]) == ["b", "a"]


def test_a_summary_says_what_a_result_says_but_curves_and_layers(root: Path) -> None:
    with_index = dict(opened(root).summaries(KEYS))
    shutil.rmtree(root / "index")
    assert dict(opened(root).summaries(KEYS)) == with_index
    for key, result in opened(root).results(KEYS):
        rest = {name: value for name, value in result.items() if name not in ("curve", "layers")}
        assert with_index[key] == rest


def test_a_segment_that_unpacks_to_any_amount_is_left_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header, columns = unpacked(segments(root)[0])
    most = len(json.dumps(header)) + len(json.dumps(columns))
    monkeypatch.setattr(index, "_MOST_BYTES", most)
    forged(root, header, json.dumps(columns).encode() + most * b" ")
    assert dict(opened(root).results(KEYS)) == {key: measured(key) for key in KEYS}


def test_the_index_of_a_copied_store_is_made_anew(root: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(root, copied)
    before, store = segments(copied), opened(copied)
    assert dict(store.results(KEYS)) == {key: measured(key) for key in KEYS}
    assert reads(store) == len(KEYS)
    assert len(segments(copied)) == 1
    assert segments(copied) != before


def test_many_results_are_divided_into_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_RESULTS", 4)
    store = opened(tmp_path / "store")
    for key in KEYS:
        store.publish(key, result_of(key))
    list(store.results(KEYS))
    assert len(segments(store.root)) == 2
    assert opened(store.root).outcomes(KEYS).keys() == {*KEYS}


def test_readers_at_once_write_one_segment(root: Path) -> None:
    shutil.rmtree(root / "index")
    together = threading.Barrier(4)

    def read(_: int) -> dict[str, Measurements]:
        store = opened(root)
        together.wait()
        return dict(store.results(KEYS))

    with ThreadPoolExecutor(4) as threads:
        assert all(found == {key: measured(key) for key in KEYS} for found in threads.map(read, range(4)))
    assert len(segments(root)) == 1


def test_segments_that_overlap_give_each_result_once(root: Path) -> None:
    late = f"{99:032x}"
    opened(root).publish(late, result_of(late, val=0.5))
    (segment,) = segments(root)
    hidden = segment.rename(root / segment.name)
    dict(opened(root).results([*KEYS, late]))
    hidden.rename(segment)
    assert len(segments(root)) == 2
    assert sorted(key for key, _ in opened(root).results([*KEYS, late])) == sorted([*KEYS, late])


def test_a_store_that_can_only_be_read_gets_no_index(root: Path) -> None:
    class Locked(Counting):
        def create(self, path: str, content: bytes, *, durable: bool = True) -> bool:
            raise ReadOnly("it can only be read")

        def remove(self, path: str) -> None:
            raise ReadOnly("it can only be read")

    (segment,) = segments(root)
    segment.write_bytes(b"damaged")
    store = Store(Locked(root))
    assert dict(store.results(KEYS)) == {key: measured(key) for key in KEYS}
    assert segments(root) == [segment]


def test_a_cache_that_cannot_be_used_is_no_reason_to_fail(root: Path) -> None:
    class Full(Counting):
        """Its disk is full, and the index belongs to somebody else."""

        def create(self, path: str, content: bytes, *, durable: bool = True) -> bool:
            raise InputError("the disk is full")

        def read(self, path: str, most: int) -> bytes | None:
            if path.startswith("index/"):
                raise InputError("it is not readable")
            return super().read(path, most)

    assert dict(Store(Full(root)).results(KEYS)) == {key: measured(key) for key in KEYS}


def test_verify_starts_from_the_files_alone(root: Path) -> None:
    assert segments(root)
    assert list(damages(opened(root))) == []
    assert segments(root) == []


def test_tables_are_the_same_with_an_index_and_without(tmp_path: Path) -> None:
    sweep, store = sweep_of(FINE_TUNING, trials=(1, 2)), opened(tmp_path / "store")
    run(sweep, store)
    collected(sweep.targets, store)
    assert segments(store.root)
    work, with_index = plan(sweep.targets), opened(store.root)
    outcomes, tables = with_index.outcomes(work.by_key.keys()), collected(sweep.targets, with_index)
    assert reads(with_index) == 0
    shutil.rmtree(store.root / "index")
    without = opened(store.root)
    assert collected(sweep.targets, without) == tables
    assert reads(without) == len(work.nodes)
    assert opened(store.root).outcomes(work.by_key.keys()) == outcomes


def test_a_finished_sweep_is_listed_once_to_see_that_it_is(tmp_path: Path) -> None:
    sweep, backend = sweep_of(FINE_TUNING), Counting(tmp_path / "store")
    run(sweep, Store(backend))
    work, backend.lists = plan(sweep.targets), 0
    watch = Watch(work, Store(backend))
    assert watch.headway(exact=True).nodes == len(work.nodes)
    assert (watch.open, backend.lists) == ([], 1)


def test_slow_files_are_read_several_at_once(tmp_path: Path) -> None:
    at_once, most, lock = 0, 0, threading.Lock()

    class Slow(Folder):
        def read(self, path: str, most_bytes: int) -> bytes | None:
            nonlocal at_once, most
            with lock:
                at_once, most = at_once + 1, max(most, at_once + 1)
            time.sleep(0.001)
            with lock:
                at_once -= 1
            return super().read(path, most_bytes)

    paths = {str(number): f"results/{number}" for number in range(60)}
    for name, path in paths.items():
        Folder(tmp_path).write(path, name.encode())
    expected = {name: name.encode() for name in paths}
    assert dict(contents_of(Slow(tmp_path), paths, 10)) == expected
    assert most > 1
    assert dict(contents_of(Folder(tmp_path), paths, 10)) == expected
    assert dict(contents_of(Folder(tmp_path), {"gone": "results/gone"}, 10)) == {"gone": None}
