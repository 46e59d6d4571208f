"""A pack carries a half-done sweep to another store, where it ends as it would have at home."""

import errno
import gzip
import tarfile
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest
import torch

import rewound.experiments.plans.execution
from command_line import Rewound
from rewound.experiments.executors.local import run
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import Plan, plan
from rewound.experiments.plans.remaining import pack_store, to_recompute, todo
from rewound.experiments.sweeps.targets import dense, run_of
from rewound.foundations.errors import InputError
from rewound.states.storage import packs
from rewound.states.storage.artifacts import Notes, artifact_at
from rewound.states.storage.merging import unpack_store
from rewound.states.storage.packs import read_packs
from rewound.states.storage.store import Store
from rewound.tasks.recipe import Position
from rewound.tasks.recipes.digits import Digits
from rewound.tasks.training import State, begin
from stored import merged
from tiny_sweeps import EVERYTHING, sweep_of

RECIPE = Digits(epochs=1.0, widths=(4, 8))


@pytest.fixture
def targets() -> tuple:
    chain = run_of(RECIPE, "weight-rewinding", 0.5, [0.5, 0.25], iterative=True).targets(1)
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
    outcome = unpack_store(read_packs(list(reversed(pieces))), away)
    assert outcome.added > len(first_levels(whole, 1).nodes)  # results, and the tensors still to be read
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
    outcome = unpack_store(read_packs(pack), home)
    assert outcome.added == outcome.damaged == 0
    assert {path: path.stat().st_mtime_ns for path in home.root.rglob("*.json")} == before


def test_a_damaged_artifact_is_left_out(tmp_path: Path, targets: tuple) -> None:
    whole, home, away = plan(targets), Store(tmp_path / "home"), Store(tmp_path / "away")
    run(first_levels(whole, 0), home, Options())
    key = whole.nodes[0].key
    for artifact in home.artifacts(key):
        content = bytearray(home.root.joinpath(artifact.path).read_bytes())
        content[len(content) // 2] ^= 1
        assert merged(away, artifact.path, bytes(content)) == "damaged"
    assert away.artifacts(key) == []


def test_a_missing_piece_is_an_error_that_names_it(tmp_path: Path, targets: tuple) -> None:
    whole, home = plan(targets), Store(tmp_path / "home")
    run(first_levels(whole, 0), home, Options())
    pieces = pack_store(whole, home, tmp_path / "pack", split_bytes=2048)
    assert len(pieces) > 3
    for number in (0, 1, 2):
        with pytest.raises(InputError, match=rf"the piece before it, .*/pack\.00{number}, is missing"):
            read_packs([*pieces[:number], *pieces[number + 1 :]])
    with pytest.raises(InputError, match=rf"a piece after {pieces[-2].name} is missing; give all pieces"):
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


def test_two_commands_move_a_sweep(done: Path, rewound_command: Rewound) -> None:
    pack = ("pack", done / "tiny.toml", "--store", done / "rewound-store", "--out")
    code, out, err = rewound_command(*pack, "tiny.pack", "--split-mb", 1)
    assert (code, err) == (0, "")
    assert out.startswith("tiny.pack.000 (")
    code, out, err = rewound_command("unpack", "tiny.pack.000", "--store", "away")
    assert (code, err) == (0, "")
    assert "0 there already, 0 damaged" in out
    code, out, err = rewound_command("report", done / "tiny.toml", "--store", "away", "--out", "report")
    assert (code, err) == (0, "")
    assert Path("report/results.csv").read_bytes() == (done / "report" / "results.csv").read_bytes()
    code, out, err = rewound_command(*pack, "report")
    assert (code, out) == (2, "")
    assert err == "error: cannot write report: it is a folder; give the path of a file for out\n"


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


def test_a_pack_that_fails_leaves_the_one_before(
    tmp_path: Path, targets: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, home, out = plan(targets), Store(tmp_path / "home"), tmp_path / "packs" / "pack[1]"
    run(first_levels(whole, 0), home, Options())
    pieces = pack_store(whole, home, out, split_bytes=2048)
    before = {path: path.read_bytes() for path in pieces}
    run(first_levels(whole, 1), home, Options())
    with monkeypatch.context() as patch:
        copy, calls = packs._copy, iter(range(2))

        def fills_up(source: IO[bytes], target: IO[bytes], size: int) -> None:
            if next(calls, None) is None:
                raise OSError(errno.ENOSPC, "No space left on device")
            copy(source, target, size)

        patch.setattr(packs, "_copy", fills_up)
        with pytest.raises(OSError, match="No space left"):
            pack_store(whole, home, out, split_bytes=2048)
    assert {path: path.read_bytes() for path in out.parent.iterdir()} == before
    again = pack_store(whole, home, out, split_bytes=10**6)
    assert list(out.parent.iterdir()) == again, "and no more pieces than it has"


def test_a_pack_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    work, home, away = plan((dense(RECIPE, 1),)), Store(tmp_path / "home"), Store(tmp_path / "away")
    big = {"noise": torch.randint(-(2**62), 2**62, (2**20,))}  # 8 MiB that no compression makes smaller
    state = State(big, {}, 1, Position(0, 1))
    home.save(work.nodes[0].key, state, None, draft=Notes(curve=[], seconds=1.0))
    tracemalloc.start()
    pieces = pack_store(work, home, tmp_path / "pack", split_bytes=2**22)
    assert len(pieces) == 3
    packs = read_packs(pieces)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held < 2**22
    assert unpack_store(packs, away).added == 1


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
    (away.root / "results").write_text("a file")
    with pytest.raises(InputError, match=r"^cannot use store"):
        unpack_store(read_packs(pack), away)


KEY = "ab" * 16
NAMES = {
    "result": f"results/ab/{KEY}.json",
    "state": f"states/ab/{KEY}.safetensors",
    "draft": f"drafts/{KEY}.safetensors",
}


def after(steps: int) -> State:
    return replace(begin(RECIPE, 1), position=Position(0, steps))


def kept(folder: Path, steps: int, *, draft: bool = False, slots: bool = True) -> tuple[Store, bytes]:
    """A store with one state, and its file."""
    store = Store(folder)
    store.save(KEY, after(steps), None, draft=Notes(curve=[], seconds=1.0) if draft else None, slots=slots)
    return store, (folder / NAMES["draft" if draft else "state"]).read_bytes()


def steps_of(store: Store) -> int:
    draft = store.load(KEY, draft=True)
    assert draft is not None
    return draft.state.position.steps


def test_a_draft_gives_way_to_one_that_is_further_and_to_no_other(tmp_path: Path) -> None:
    home, behind = kept(tmp_path / "home", 10, draft=True)
    away, ahead = kept(tmp_path / "away", 20, draft=True)
    damaged = bytearray(ahead)
    damaged[-1] ^= 1
    assert merged(home, NAMES["draft"], bytes(damaged)) == "damaged"
    assert steps_of(home) == 10
    assert merged(home, NAMES["draft"], ahead) == "added"
    assert merged(away, NAMES["draft"], behind) == merged(away, NAMES["draft"], ahead) == "present"
    assert steps_of(home) == steps_of(away) == 20


def test_a_store_of_drafts_is_not_empty(tmp_path: Path, rewound_command: Rewound) -> None:
    kept(tmp_path / "store", 10, draft=True)
    code, out, err = rewound_command("show", "--store", tmp_path / "store")
    assert (code, err) == (0, "")
    assert out.endswith("KiB of tensors; under way: nothing; to be resumed: 1\n")


def test_a_draft_of_what_has_ended_here_is_of_no_use(tmp_path: Path) -> None:
    work, home, away = plan((dense(RECIPE, 1),)), Store(tmp_path / "home"), Store(tmp_path / "away")
    run(work, home, Options())
    key = work.nodes[-1].key
    away.save(key, after(20), None, draft=Notes(curve=[], seconds=1.0))
    draft = (away.root / f"drafts/{key}.safetensors").read_bytes()
    assert merged(home, f"drafts/{key}.safetensors", draft) == "present"
    assert home.drafts() == set()


def test_a_state_gives_way_to_one_that_can_be_trained_from(tmp_path: Path) -> None:
    home, poor = kept(tmp_path / "home", 10, slots=False)
    away, rich = kept(tmp_path / "away", 10)
    assert merged(away, NAMES["state"], poor) == "present"
    assert merged(home, NAMES["state"], rich) == "added"
    assert home.load(KEY) is not None
    assert away.load(KEY) is not None


def test_a_damaged_file_gives_way_to_a_whole_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home, whole = kept(tmp_path / "home", 10, draft=True)
    path = tmp_path / "home" / NAMES["draft"]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert merged(home, NAMES["draft"], whole) == "added"
    assert steps_of(home) == 10
    assert "is not what was written; set aside" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        *("../evil.json", f"results/../{KEY}.json", f"results/cd/{KEY}.json", f"states/ab/{KEY}.json"),
        *(f"drafts/ab/{KEY}.safetensors", f"drafts/{KEY}.json", f"claims/{KEY}.json", f"{NAMES['result']}\n"),
    ],
)
def test_only_artifacts_are_merged(tmp_path: Path, name: str) -> None:
    assert artifact_at(name) is None
    with pytest.raises(ValueError, match="not an artifact"):
        merged(Store(tmp_path / "store"), name, b"{}")


def test_artifacts_are_known_by_their_names() -> None:
    assert [artifact_at(name) for name in NAMES.values()] == [(kind, KEY) for kind in NAMES]


@pytest.mark.slow
def test_a_pack_that_is_made_while_the_sweep_runs_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever moment it is made at: nothing in it is damaged, and nothing has to be made again elsewhere."""
    monkeypatch.setattr(rewound.experiments.plans.execution, "SNAPSHOT", -1.0)  # drafts come and go at every epoch
    work, home = plan(sweep_of(*EVERYTHING).targets), Store(tmp_path / "home")
    with ThreadPoolExecutor(1) as pool:
        sweep = pool.submit(run, work, home, Options(), say=lambda text: None)
        packs, is_last = 0, False
        while not is_last:
            is_last = sweep.done()
            away = Store(tmp_path / f"away-{packs}")
            outcome = unpack_store(read_packs(pack_store(work, home, tmp_path / "pack")), away)
            assert (outcome.present, outcome.damaged) == (0, 0)
            assert to_recompute(todo(work, away), away) == []
            packs += 1
    assert sweep.exception() is None
    assert packs > 3
    assert todo(work, away) == []
