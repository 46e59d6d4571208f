"""The index of a store: it saves reading, and changes nothing of what is read."""

import hashlib
import json
import shutil
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rewound.experiments.executors.walking import Watch
from rewound.experiments.housekeeping import damages
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.planning import plan
from rewound.experiments.plans.remaining import outcomes_of
from rewound.foundations.errors import InputError
from rewound.states.storage import index
from rewound.states.storage.artifacts import Failure, Result, summary_of
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
    assert dict(opened(store.root).results(KEYS)) == {key: result_of(key) for key in KEYS}
    assert len(segments(store.root)) == 1
    return store.root


def test_what_is_in_the_index_is_not_read_again(root: Path) -> None:
    store = opened(root)
    assert dict(store.results(KEYS)) == {key: store.result(key) for key in KEYS}
    assert reads(store) == len(KEYS), "by the line before, to compare"
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
    assert dict(opened(root).results(KEYS[:1])) == {KEYS[0]: result_of(KEYS[0])}
    assert opened(root).outcomes([KEYS[1], 32 * "f"]) == {KEYS[1]: "measured"}


def test_a_result_that_was_replaced_is_read_from_its_file(root: Path) -> None:
    failed = result_of(KEYS[0])
    del failed["val"]
    failed["failed"] = Failure(step=3, loss="nan")
    opened(root).publish(KEYS[0], failed, replace=True)
    assert opened(root).outcomes(KEYS) == {**dict.fromkeys(KEYS, "measured"), KEYS[0]: "failed"}
    assert dict(opened(root).results(KEYS))[KEYS[0]] == failed


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
    assert dict(store.results(KEYS)) == {key: result_of(key) for key in KEYS}
    assert reads(store) == len(KEYS)
    again = opened(root)
    assert dict(again.results(KEYS)) == {key: result_of(key) for key in KEYS}
    assert reads(again) == 0, "it was written anew"


def forged(root: Path, body: bytes, header: object = None) -> None:
    """Put a segment into a store whose checksum is right, and whose content is not."""
    (segment,) = segments(root)
    (key, stamp, _, summary), *_ = json.loads(zlib.decompressobj().decompress(segment.read_bytes()))
    rows = [[key, stamp, len(body), summary]]
    content = zlib.compress(json.dumps(rows if header is None else header).encode()) + zlib.compress(body)
    segment.with_name(hashlib.blake2b(content, digest_size=16).hexdigest()).write_bytes(content)
    segment.unlink()


@pytest.mark.parametrize("body", [b"{}", b"[]", b"3", b"\xff", b'{"checksum": "0", "history": 3}'])
def test_what_is_no_result_in_a_segment_is_read_from_its_file(root: Path, body: bytes) -> None:
    forged(root, body)
    assert dict(opened(root).results(KEYS)) == {key: result_of(key) for key in KEYS}


@pytest.mark.parametrize(
    "header",
    [3, {}, [3], [[KEYS[0]]], [["x", "s", 1, {}]], [[KEYS[0], "s", 1, "measured"]], [[KEYS[0], "s", -1, {}]]],
)
def test_a_segment_that_makes_no_sense_is_left_out(root: Path, header: object) -> None:
    forged(root, b"x", header)
    assert dict(opened(root).summaries(KEYS)) == {key: summary_of(result_of(key)) for key in KEYS}
    assert dict(opened(root).results(KEYS)) == {key: result_of(key) for key in KEYS}


def test_a_segment_of_an_earlier_version_is_replaced(root: Path) -> None:
    (segment,) = segments(root)
    body = json.dumps(result_of(KEYS[0])).encode()
    content = zlib.compress(json.dumps([[KEYS[0], "1-1 1", "measured", len(body)]]).encode() + b"\n" + body)
    segment.unlink()
    segment.with_name(hashlib.blake2b(content, digest_size=16).hexdigest()).write_bytes(content)
    assert dict(opened(root).results(KEYS)) == {key: result_of(key) for key in KEYS}
    assert segments(root) == [segment]


@pytest.mark.parametrize("change", [{"made": 3}, {"seconds": "1"}, {"steps": -1}, {"recipe": "\ud800"}, {"failed": 1}])
def test_what_is_no_summary_in_a_segment_is_read_from_its_file(root: Path, change: dict[str, object]) -> None:
    (segment,) = segments(root)
    unpacking = zlib.decompressobj()
    (key, stamp, size, summary), *others = json.loads(unpacking.decompress(segment.read_bytes()))
    header = json.dumps([(key, stamp, size, {**summary, **change}), *others])
    content = zlib.compress(header.encode()) + unpacking.unused_data
    segment.unlink()
    segment.with_name(hashlib.blake2b(content, digest_size=16).hexdigest()).write_bytes(content)
    store = opened(root)
    assert dict(store.summaries(KEYS)) == {key: summary_of(result_of(key)) for key in KEYS}
    assert reads(store) == 1


def test_a_summary_says_what_a_result_says_but_curves_and_layers(root: Path) -> None:
    with_index = dict(opened(root).summaries(KEYS))
    shutil.rmtree(root / "index")
    assert dict(opened(root).summaries(KEYS)) == with_index
    for key, result in opened(root).results(KEYS):
        rest = {name: value for name, value in result.items() if name not in ("history", "curve", "layers")}
        assert with_index[key] == rest


def test_a_segment_that_unpacks_to_any_amount_is_left_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_MOST_BYTES", 2000)
    forged(root, 10_000 * b" ")
    assert dict(opened(root).results(KEYS)) == {key: result_of(key) for key in KEYS}


def test_the_index_of_a_copied_store_is_made_anew(root: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(root, copied)
    before, store = segments(copied), opened(copied)
    assert dict(store.results(KEYS)) == {key: result_of(key) for key in KEYS}
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

    def read(_: int) -> dict[str, Result]:
        store = opened(root)
        together.wait()
        return dict(store.results(KEYS))

    with ThreadPoolExecutor(4) as threads:
        assert all(found == {key: result_of(key) for key in KEYS} for found in threads.map(read, range(4)))
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
    assert dict(store.results(KEYS)) == {key: result_of(key) for key in KEYS}
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

    assert dict(Store(Full(root)).results(KEYS)) == {key: result_of(key) for key in KEYS}


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
    outcomes, tables = outcomes_of(work, with_index), collected(sweep.targets, with_index)
    assert reads(with_index) == 0
    shutil.rmtree(store.root / "index")
    without = opened(store.root)
    assert collected(sweep.targets, without) == tables
    assert reads(without) == len(work.nodes)
    assert outcomes_of(work, opened(store.root)) == outcomes


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
