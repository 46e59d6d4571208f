"""Contents are bound to their keys: a file that lies under another name is damaged, whatever its checksum says."""

from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.outlook import outdated
from rewound.experiments.plans.planning import plan
from rewound.experiments.plans.remaining import pack_store
from rewound.states.storage.artifacts import Notes
from rewound.states.storage.merging import unpack_store
from rewound.states.storage.packs import read_packs
from rewound.states.storage.store import Store
from sameness import assert_same
from stored import KEY, OTHER, RESULT, a_mask, a_state, swap, unbind, unbind_all
from tiny_sweeps import FINE_TUNING, ITERATIVE, run, sweep_of, timeless

SWEEP = sweep_of(FINE_TUNING, ITERATIVE, trials=(1, 2))


def paths(store: Store, kind: str, *keys: str) -> list[Path]:
    return [next(store.root.glob(f"{kind}/**/{key}.*")) for key in keys]


def trials(store: Store, trial: int) -> list[str]:
    """The keys of a trial's nodes that a store has the states of, in the order of the plan."""
    nodes = plan([target for target in SWEEP.targets if target.trial == trial]).nodes
    return [node.key for node in nodes if store.has_state(node.key)]


@pytest.fixture(scope="module")
def half_done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Store]:
    """A store with everything, and one in which only the dense states and results are there; not to be changed."""
    whole, half = (Store(tmp_path_factory.mktemp(name) / "store") for name in ("whole", "half"))
    run(SWEEP, whole, keep_all=True)
    dense = [node.key for node in plan(SWEEP.targets).nodes if not node.state.prunings]
    for kind in ("results", "states"):
        for path in paths(whole, kind, *dense):
            copy = half.root / path.relative_to(whole.root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    return whole, half


@pytest.fixture
def half(half_done: tuple[Store, Store], tmp_path: Path) -> Store:
    return copied(half_done[1], tmp_path)


def copied(store: Store, folder: Path) -> Store:
    for path in store.root.rglob("*"):
        if path.is_file():
            copy = folder / "copy" / path.relative_to(store.root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    return Store(folder / "copy")


def test_two_results_that_are_swapped_are_set_aside(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.publish(KEY, RESULT)
    store.publish(OTHER, {**RESULT, "val": 0.9})
    swap(*paths(store, "results", KEY, OTHER))
    assert store.result(KEY) is store.result(OTHER) is None
    said = capsys.readouterr().out
    assert f"damaged: {KEY}.json holds the result of another key ({OTHER}); set aside" in said
    assert f"damaged: {OTHER}.json holds the result of another key ({KEY}); set aside" in said
    assert len(list((store.root / "damaged").iterdir())) == 2, "and nothing is lost"


@pytest.mark.parametrize("draft", [False, True], ids=["states", "drafts"])
def test_two_states_that_are_swapped_are_set_aside(
    store: Store, draft: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = Notes(curve=[], seconds=1.0) if draft else None
    store.save(KEY, a_state(), a_mask(), draft=notes)
    store.save(OTHER, a_state(2.0), a_mask(), draft=notes)
    swap(*paths(store, "drafts" if draft else "states", KEY, OTHER))
    assert store.load(KEY, draft=draft) is store.load(OTHER, draft=draft) is None
    assert capsys.readouterr().out.count("holds the state of another key") == 2


def test_a_draft_is_no_state_and_a_state_no_draft(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.save(KEY, a_state(), a_mask(), draft=Notes(curve=[], seconds=1.0))
    store.save(KEY, a_state(2.0), a_mask())
    for bound in (True, False):
        drafted, published = paths(store, "drafts", KEY) + paths(store, "states", KEY)
        contents = drafted.read_bytes(), published.read_bytes()
        swap(drafted, published)
        assert store.load(KEY) is store.load(KEY, draft=True) is None
        said = capsys.readouterr().out
        assert "holds a draft, not a state" in said
        assert "holds a state, not a draft" in said
        drafted.write_bytes(contents[0])
        published.write_bytes(contents[1])
        for path in (drafted, published) if bound else ():
            unbind(path)


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])
@pytest.mark.parametrize("kind", ["results", "states"])
def test_a_swap_changes_no_row(
    half: Store, half_done: tuple[Store, Store], kind: str, bound: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of files without a key, too: results are known by their histories, states of two trials by their seeds."""
    if not bound:
        unbind_all(half)
    swap(*paths(half, kind, trials(half, 1)[-1], trials(half, 2)[-1]))
    said = run(SWEEP, half)
    assert timeless(collected(SWEEP.targets, half)) == timeless(collected(SWEEP.targets, half_done[0]))
    assert len([line for line in [*said, *capsys.readouterr().out.splitlines()] if "set aside as" in line]) == 2


def test_a_state_of_another_position_is_set_aside(
    half: Store, half_done: tuple[Store, Store], capsys: pytest.CaptureFixture[str]
) -> None:
    unbind_all(half)
    early, late = paths(half, "states", *trials(half, 1))
    late.write_bytes(early.read_bytes())
    said = [*run(SWEEP, half), *capsys.readouterr().out.splitlines()]
    assert [line for line in said if "holds a state after 0 prunings and" in line]
    assert timeless(collected(SWEEP.targets, half)) == timeless(collected(SWEEP.targets, half_done[0]))


def test_a_state_of_another_model_is_set_aside(half: Store, capsys: pytest.CaptureFixture[str]) -> None:
    *_, key = trials(half, 1)
    kept = half.load(key)
    assert kept is not None
    strange = type(kept.state)({"other": a_state().model["half"]}, {}, kept.state.seed, kept.state.position)
    half.save(key, strange, None)
    said = [*run(SWEEP, half), *capsys.readouterr().out.splitlines()]
    assert [line for line in said if "holds other tensors than the model of tiny:Tiny has" in line]


def test_what_is_not_bound_is_read_and_said_once(half: Store, half_done: tuple[Store, Store], tmp_path: Path) -> None:
    """A store of the version before goes on to the same tables; nothing of it is set aside."""
    unbind_all(half)
    work = plan(SWEEP.targets)
    (line,) = outdated(work, half, Options())
    assert line.startswith("note: 4 states (or drafts) were kept by a version that did not write keys into them; ")
    assert [*half.root.glob("damaged/*")] == []
    pieces = pack_store(work, half, tmp_path / "pack")
    away = Store(tmp_path / "away")
    outcome = unpack_store(read_packs(pieces), away)
    assert (outcome.unbound, outcome.damaged) == (4, 0)
    for store in (half, away):
        run(SWEEP, store)
        assert timeless(collected(SWEEP.targets, store)) == timeless(collected(SWEEP.targets, half_done[0]))
        assert [*store.root.glob("damaged/*")] == []
    assert outdated(work, half_done[0], Options()) == []


def test_what_is_set_aside_twice_is_kept_twice(store: Store) -> None:
    for content in (b"one", b"two", b"three"):
        store.publish(KEY, RESULT)
        paths(store, "results", KEY)[0].write_bytes(content)
        assert store.result(KEY) is None
    assert {path.read_bytes() for path in store.root.glob("damaged/*")} == {b"one", b"two", b"three"}


def test_what_is_bound_comes_back(store: Store) -> None:
    store.publish(KEY, RESULT)
    store.save(KEY, a_state(), a_mask())
    assert store.result(KEY) == RESULT
    found = store.load(KEY)
    assert found is not None
    assert_same(found.state, a_state())
    assert store.unbound(KEY) == []


@pytest.mark.slow
def test_no_flipped_bit_and_no_swapped_file_gives_another_table_in_silence(
    bit_flips: ModuleType, one_thread: None
) -> None:
    """A few of the 1,000 tries that docs/limits.md tells of."""
    counts = Counter(came for came, _, _ in bit_flips.outcomes(bit_flips.KINDS["store"], 20, seed=1))
    assert set(counts) <= {"identical", "identical, told"}
    assert counts["identical, told"] > 10
