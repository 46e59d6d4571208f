"""`rewound gc` and `rewound verify`: what nobody needs goes, what is damaged is found and computed again."""

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import rewound.states.storage.claims
from command_line import SWEEP, Rewound
from object_server import ObjectServer, serving
from rewound.experiments.executors import local
from rewound.experiments.housekeeping import damages, leftovers, remove
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import Plan, plan
from rewound.foundations.errors import InputError
from rewound.foundations.owners import Owner, this_host
from rewound.states.storage.artifacts import Artifact
from rewound.states.storage.claims import Leases
from rewound.states.storage.conformance import _kill, _process, _take
from rewound.states.storage.store import Store
from stored import KEY, OTHER, a_mask, a_state
from tiny_sweeps import EVERYTHING, FINE_TUNING, run, states, sweep_of, timeless

NOTES = {"curve": [], "seconds": 0.0}


@pytest.fixture
def copy(whole: Store, tmp_path: Path) -> Store:
    """Everything of the tiny sweep, with all tensors."""
    shutil.copytree(whole.root, tmp_path / "copy")
    return Store(tmp_path / "copy")


def begun(store: Store, *experiments: dict[str, object]) -> Plan:
    """A sweep of which only the first node, the dense run, is done; the others will read its tensors."""
    whole = plan(sweep_of(*experiments).targets)
    local.run(Plan(whole.targets, whole.nodes[:1], whole.readers), store, Options())
    assert states(store) == {whole.nodes[0].key}
    return whole


def results(store: Store) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.root.glob("results/*/*.json")}


# What nobody needs


def test_tensors_that_a_named_sweep_will_read_stay(store: Store) -> None:
    whole = begun(store, FINE_TUNING)
    store.save(whole.nodes[1].key, a_state(), a_mask(), draft=NOTES)  # type: ignore[arg-type]
    store.save(OTHER, a_state(), a_mask(), draft=NOTES)  # type: ignore[arg-type]
    found = leftovers([whole], store, print)
    assert (found.drafts.keys(), found.states, found.claims) == ({OTHER}, {}, {})
    before = results(store)
    remove(found, store)
    assert store.drafts() == {whole.nodes[1].key}
    other = plan(sweep_of().targets)  # the dense run alone, which has its result
    found = leftovers([other], store, print)
    assert found.states == {whole.nodes[0].key: found.states[whole.nodes[0].key]}
    assert found.states[whole.nodes[0].key] > 1000
    assert leftovers([other, whole], store, print).states == {}, "what any of them needs"
    remove(found, store)
    assert states(store) == set()
    assert store.drafts() == set()
    assert results(store) == before, "results stay"


def test_what_is_kept_for_good_goes_only_if_that_is_said(copy: Store) -> None:
    kept, before = states(copy), results(copy)
    found = leftovers([plan(sweep_of(*EVERYTHING).targets)], copy, print)
    assert (found.states, found.for_good.keys()) == ({}, kept)
    remove(found, copy)
    assert states(copy) == kept
    remove(found, copy, even_if_for_good=True)
    assert states(copy) == set()
    assert results(copy) == before


def test_without_a_sweep_nothing_is_known_of_tensors(copy: Store) -> None:
    copy.save(KEY, a_state(), a_mask(), draft=NOTES)  # type: ignore[arg-type]
    assert leftovers([], copy, print) == ({}, {}, {}, {})


def test_claims_of_dead_workers_go(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    assert store.claim(KEY)
    with _process(_take, store.backend, OTHER) as (process, pipe):
        assert pipe.recv() is True
        assert leftovers([], store, print).claims == {}, "both live"
        _kill(process.pid)
        process.join()
    found = leftovers([], store, print)
    assert found.claims.keys() == {OTHER}
    remove(found, store)
    assert store.backend.list("claims/").keys() == {f"claims/{KEY}.1"}


def test_a_worker_on_another_machine_is_given_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is dead if it gives no sign of life for as long as a lease lasts."""
    monkeypatch.setattr(rewound.states.storage.claims, "STALE", 1.0)
    alive, dead = (Leases(store.backend, Owner(host, 1, "1")) for host in ("alive", "dead"))
    assert alive.take(KEY)
    assert dead.take(OTHER)
    stop, lines = threading.Event(), list[str]()

    def beat() -> None:
        while not stop.wait(0.1):
            alive.beat(KEY, 1)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert leftovers([], store, lines.append).claims.keys() == {OTHER}
    finally:
        stop.set()
        thread.join()
    assert lines == ["looking for signs of life from alive, dead, for two minutes at most"]


def test_nothing_goes_while_somebody_is_at_another_sweep(store: Store) -> None:
    whole = begun(store, FINE_TUNING)
    assert Leases(store.backend).take(OTHER)
    with pytest.raises(InputError, match="is at work on a sweep that is not named; name that sweep, too, or wait"):
        leftovers([whole], store, print)


# What is damaged


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    path.write_bytes(content)


def test_every_kind_of_damage_is_found_and_nothing_changed(copy: Store) -> None:
    copy.save(KEY, a_state(), a_mask(), draft=NOTES)  # type: ignore[arg-type]
    assert list(damages(copy)) == []
    key, *_, other = sorted(states(copy))
    swapped = Artifact("result", other).path
    for artifact in (Artifact("result", key), Artifact("state", key), Artifact("draft", KEY)):
        flipped(copy.root / artifact.path)
    shutil.copy(copy.root / Artifact("state", other).path, copy.root / "states" / "not-ours.safetensors")
    (copy.root / swapped).write_bytes(b"{}")
    found = {damage.path: damage.reason for damage in damages(copy)}
    damaged = {Artifact("result", key).path, Artifact("state", key).path, Artifact("draft", KEY).path, swapped}
    assert found.keys() == damaged
    assert set(found.values()) == {"is not what was written"}
    assert not (copy.root / "damaged").exists()


def test_a_damaged_sweep_is_repaired(rewound_command: Rewound, copy: Store, whole: Store, tmp_path: Path) -> None:
    """Exactly what is damaged is computed again, as far as a named sweep has it."""
    sweep = sweep_of(*EVERYTHING)
    Path("tiny.toml").write_text(TINY)
    leaf, parent = (
        next(n.key for n in plan(sweep.targets).nodes if (n.key in plan(sweep.targets).readers) is has)
        for has in (False, True)
    )
    flipped(copy.root / Artifact("result", leaf).path)
    flipped(copy.root / Artifact("state", parent).path)
    words = ["--store", copy.root]
    code, out, err = rewound_command("verify", *words)
    assert code == 1
    assert "2 damaged files in" in err
    assert "rewound verify SWEEP --store" in err
    assert Artifact("state", parent).path in out + err
    code, out, err = rewound_command("verify", "tiny.toml", "--repair", "--jobs", 1, *words)
    assert code == 0, err
    assert (copy.root / "damaged" / f"{leaf}.json").exists()
    assert "is what was written" in rewound_command("verify", *words).out
    assert timeless(collected(sweep.targets, copy)) == timeless(collected(sweep.targets, whole))
    assert states(copy) == states(whole)
    assert copy.is_kept_for_good(parent), "as it was before"


TINY = """
recipe = "tiny:Tiny"
trials = [1]

[[experiment]]
technique = ["fine-tuning", "weight-rewinding", "lr-rewinding", "low-lr-weight-rewinding", "reinitialization"]
retrain-epochs = [1, 2]
density = 0.5

[[experiment]]
technique = "weight-rewinding"
retrain-epochs = 1
levels = { keep = 0.5, count = 2 }
"""


# The commands


def test_gc_says_what_it_removes(rewound_command: Rewound, copy: Store) -> None:
    Path("tiny.toml").write_text(TINY)
    (copy.root / "damaged").mkdir()
    (copy.root / "damaged" / "x.json").write_text("{}")
    words = ["--store", copy.root]
    kept = states(copy)
    code, out, _ = rewound_command("gc", "tiny.toml", "--all", "--dry-run", *words)
    assert code == 0
    assert "not needed in" in out
    assert f"│ {len(kept)} " in out
    assert "1 damaged file (2 bytes) are in" in out
    assert states(copy) == kept
    _, out, _ = rewound_command("gc", *words)
    assert "name sweeps to keep for" in out
    _, out, _ = rewound_command("gc", "tiny.toml", *words)
    assert f"{len(kept)} states (" in out
    assert "were kept for good; --all removes them, too" in out
    assert states(copy) == kept
    assert "removed in" in rewound_command("gc", "tiny.toml", "--all", *words).out
    assert states(copy) == set()
    assert "0 to do" in rewound_command("plan", "tiny.toml", *words).out


def test_show_says_how_far_a_sweep_is(rewound_command: Rewound, store: Store) -> None:
    Path("tiny.toml").write_text(SWEEP)
    whole = begun(store, {"technique": ["lr-rewinding", "fine-tuning"], "retrain-epochs": [1, 2], "density": 0.5})
    assert Leases(store.backend, Owner("far-away/x", 1, "1")).take(plan(sweep_of(FINE_TUNING).targets).nodes[1].key)
    code, out, _ = rewound_command("show", "tiny.toml", "--store", store.root)
    assert code == 0
    assert f"1 of {len(whole.nodes)} have ended" in out
    here = this_host().partition("/")[0]
    lines = {line.split("│")[1].strip(): line for line in out.splitlines() if line.count("│") == 5}
    assert [cell.strip() for cell in lines[here].split("│")[2:5:2]] == ["1", "0"]
    assert [cell.strip() for cell in lines["far-away"].split("│")[2:5:2]] == ["0", "1"]
    code, _, err = rewound_command("show", "digit", "--store", store.root)
    assert code == 2
    assert "digits" in err, "what is not a key is a sweep"
    assert rewound_command("show", "abc", "--store", store.root).err.startswith("error: no key begins with 'abc'")


@pytest.fixture(scope="module")
def servers() -> Iterator[ObjectServer]:
    with serving() as server:
        yield server


def test_in_a_bucket(
    servers: ObjectServer, rewound_command: Rewound, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**servers.environment, "REWOUND_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    Path("tiny.toml").write_text(SWEEP.replace('"lr-rewinding", ', ""))
    url = f"{servers.new_bucket()}/runs"
    store, sweep = Store(url), sweep_of(FINE_TUNING)
    run(sweep, store, keep_all=True)
    path = Artifact("result", sweep.targets[0].state.key).path
    assert "is what was written" in rewound_command("verify", "--store", url).out
    store.backend.write(path, b"{}")
    code, out, err = rewound_command("verify", "--store", url)
    assert (code, path in out) == (1, True)
    assert f"1 damaged file in {url}; to set them aside" in err
    assert rewound_command("verify", "tiny.toml", "--store", url, "--repair", "--jobs", 1).code == 0
    assert store.result(sweep.targets[0].state.key) is not None
    rewound_command("gc", "tiny.toml", "--all", "--store", url)
    assert store.size() == 0
