"""A pack carries a half-done sweep to another store, where it ends as it would have at home."""

from pathlib import Path

import pytest

from rewound.collection import collected
from rewound.errors import InputError
from rewound.executors.local import Options, run
from rewound.packing import pack_store, unpack_store
from rewound.planning import Plan, plan
from rewound.recipes.digits import Digits
from rewound.store import Store
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
    merged = unpack_store(list(reversed(pieces)), away)
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
    merged = unpack_store(pack, home)
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


def test_a_missing_piece_is_an_error(tmp_path: Path, targets: tuple) -> None:
    whole, home = plan(targets), Store(tmp_path / "home")
    run(first_levels(whole, 0), home, Options())
    pieces = pack_store(whole, home, tmp_path / "pack", split_bytes=2048)
    with pytest.raises(InputError, match="all pieces"):
        unpack_store(pieces[1:], Store(tmp_path / "away"))


def test_more_than_a_thousand_pieces(tmp_path: Path, targets: tuple) -> None:
    whole, home = plan(targets), Store(tmp_path / "home")
    run(first_levels(whole, 0), home, Options())
    size = pack_store(whole, home, tmp_path / "pack")[0].stat().st_size
    pieces = pack_store(whole, home, tmp_path / "pack", split_bytes=size // 1001)
    assert len(pieces) > 1000
    assert pieces == sorted(pieces)
    assert unpack_store(pieces, Store(tmp_path / "away")).added > 0


def test_a_store_that_takes_nothing_is_not_blamed_on_the_pack(tmp_path: Path, targets: tuple) -> None:
    whole, home, away = plan(targets), Store(tmp_path / "home"), Store(tmp_path / "away")
    run(first_levels(whole, 0), home, Options())
    pack = pack_store(whole, home, tmp_path / "pack")
    (away.root / "results").rmdir()
    (away.root / "results").write_text("a file")
    with pytest.raises(InputError, match=r"^cannot use store"):
        unpack_store(pack, away)


def test_only_artifacts_are_merged(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with pytest.raises(ValueError, match="not an artifact"):
        store.merge("../evil.json", b"{}")
