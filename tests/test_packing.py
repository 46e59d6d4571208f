"""A pack carries a half-done sweep to another store, where it ends as it would have at home."""

import gzip
import tarfile
from pathlib import Path

import pytest

from command_line import Rewound
from rewound.collection import collected
from rewound.errors import InputError
from rewound.executors.local import Options, run
from rewound.packing import pack_store, read_packs, unpack_store
from rewound.planning import Plan, plan
from rewound.recipes.digits import Digits
from rewound.storage.store import Store
from rewound.targets import dense, retrained

RECIPE = Digits(epochs=1.0, widths=(4, 8))


@pytest.fixture
def targets() -> tuple:
    chain = retrained(RECIPE, 1, "weight-rewinding", 0.5, [0.5, 0.25], iterative=True)
    return (dense(RECIPE, 1), *chain)


def first_levels(whole: Plan, levels: int) -> Plan:
    return Plan(whole.targets, tuple(node for node in whole.nodes if node.state.prunings <= levels), whole.readers)


def test_a_half_done_sweep_continues_elsewhere(tmp_path: Path, targets: tuple) -> None:
    whole = plan(targets)
    home, away = Store(tmp_path / "home"), Store(tmp_path / "away")
    run(first_levels(whole, 1), home, Options())
    pieces = pack_store(whole, home, tmp_path / "pack", split_bytes=4096)
    assert len(pieces) > 1
    assert all(piece.stat().st_size <= 4096 for piece in pieces)
    merged = unpack_store(read_packs(list(reversed(pieces))), away)
    assert merged.added > len(first_levels(whole, 1).nodes)  # results, and the tensors still to be read
    messages: list[str] = []
    run(whole, away, Options(), say=messages.append)
    run(whole, home, Options())
    assert not [text for text in messages if "recomputing" in text]
    scores = [[(row.key, row.val, row.test) for row in collected(targets, store).rows] for store in (home, away)]
    assert scores[0] == scores[1]


def test_nothing_is_overwritten(tmp_path: Path, targets: tuple) -> None:
    whole, home = plan(targets), Store(tmp_path / "home")
    run(first_levels(whole, 0), home, Options())
    pack = pack_store(whole, home, tmp_path / "pack")
    before = {path: path.stat().st_mtime_ns for path in home.root.rglob("*.json")}
    merged = unpack_store(read_packs(pack), home)
    assert merged.added == merged.damaged == 0
    assert {path: path.stat().st_mtime_ns for path in home.root.rglob("*.json")} == before


def test_a_damaged_artifact_is_set_aside(tmp_path: Path, targets: tuple) -> None:
    whole, home, away = plan(targets), Store(tmp_path / "home"), Store(tmp_path / "away")
    run(first_levels(whole, 0), home, Options())
    key = whole.nodes[0].key
    for path in home.artifacts(key):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        assert away.merge(str(path.relative_to(home.root)), bytes(content)) == "damaged"
    assert away.artifacts(key) == []


def test_a_missing_piece_is_an_error_that_names_it(tmp_path: Path, targets: tuple) -> None:
    whole, home = plan(targets), Store(tmp_path / "home")
    run(first_levels(whole, 0), home, Options())
    pieces = pack_store(whole, home, tmp_path / "pack", split_bytes=2048)
    assert len(pieces) > 3
    for number in (0, 1, 2):
        with pytest.raises(InputError, match=rf"the piece before it, .*/pack\.00{number}, is missing"):
            read_packs([*pieces[:number], *pieces[number + 1 :]])
    with pytest.raises(InputError, match=rf"it goes on after {pieces[-2].name}; give all pieces"):
        read_packs(pieces[:-1])


def test_several_packs_at_once(tmp_path: Path) -> None:
    stores, plans = [Store(tmp_path / name) for name in "ab"], [plan((dense(RECIPE, trial),)) for trial in (1, 2)]
    for work, store in zip(plans, stores, strict=True):
        run(work, store, Options())
    (one,) = pack_store(plans[0], stores[0], tmp_path / "one.pack")
    two = pack_store(plans[1], stores[1], tmp_path / "two.pack", split_bytes=600)
    size = [unpack_store(read_packs(files), Store(tmp_path / "alone")).added for files in ([one], two)]
    assert min(size) > 0
    for number, files in enumerate(([*two, one], [one, *reversed(two)], [two[-1], one, one, *two[:-1]])):
        assert unpack_store(read_packs(files), Store(tmp_path / f"all-{number}")).added == sum(size)
    joined, renamed = tmp_path / "joined", [tmp_path / f"part-{number:03}" for number in range(len(two))]
    joined.write_bytes(one.read_bytes() + b"".join(piece.read_bytes() for piece in two))
    assert unpack_store(read_packs([joined]), Store(tmp_path / "all-joined")).added == sum(size)
    for path, piece in zip(renamed, two, strict=True):
        path.write_bytes(piece.read_bytes())
    assert unpack_store(read_packs(renamed), Store(tmp_path / "all-renamed")).added == size[1]


@pytest.mark.parametrize("what", ["text", "gzip of text", "tar of text", "half a pack", "a pack with a bit flipped"])
def test_what_is_no_pack_leaves_no_store(tmp_path: Path, what: str, rewound_command: Rewound) -> None:
    work, home, file = plan((dense(RECIPE, 1),)), Store(tmp_path / "home"), tmp_path / "file"
    Path("text").write_text("hello")
    if what == "tar of text":
        with tarfile.open(file, "w:gz") as archive:
            archive.add("text")
    elif what in ("text", "gzip of text"):
        file.write_bytes(b"hello" if what == "text" else gzip.compress(b"hello"))
    else:
        run(work, home, Options())
        content = bytearray(pack_store(work, home, file)[0].read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content if "bit" in what else content[: len(content) // 2])
    code, out, err = rewound_command("unpack", file, "--store", "away")
    assert (code, out) == (2, "")
    assert err.startswith("error: cannot read")
    assert not Path("away").exists()


def test_more_than_a_thousand_pieces(tmp_path: Path, targets: tuple) -> None:
    whole, home = plan(targets), Store(tmp_path / "home")
    run(first_levels(whole, 0), home, Options())
    size = pack_store(whole, home, tmp_path / "pack")[0].stat().st_size
    pieces = pack_store(whole, home, tmp_path / "pack", split_bytes=size // 1001)
    assert len(pieces) > 1000
    assert pieces == sorted(pieces)
    assert unpack_store(read_packs(pieces), Store(tmp_path / "away")).added > 0


def test_a_store_that_takes_nothing_is_not_blamed_on_the_pack(tmp_path: Path, targets: tuple) -> None:
    whole, home, away = plan(targets), Store(tmp_path / "home"), Store(tmp_path / "away")
    run(first_levels(whole, 0), home, Options())
    pack = pack_store(whole, home, tmp_path / "pack")
    (away.root / "results").rmdir()
    (away.root / "results").write_text("a file")
    with pytest.raises(InputError, match=r"^cannot use store"):
        unpack_store(read_packs(pack), away)


def test_only_artifacts_are_merged(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with pytest.raises(ValueError, match="not an artifact"):
        store.merge("../evil.json", b"{}")
