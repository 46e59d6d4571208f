"""What must hold after whatever happened to the processes of a sweep: five checks, each a list of what is wrong.

They read the store, the journal of all processes (`watched_process`) and what the processes said. The journal shows
what a store cannot show afterwards: that a result was published once and not replaced, and by whom. Its lines are in
the order of the calls. A process that was killed within a call has a line that it begins and none that it ends; whether
such a call was done, only the store can say.
"""

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rewound.conclusions.tables import Tables
from rewound.experiments.housekeeping import damages, leftovers, remove
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.planning import plan
from rewound.experiments.sweeps.sweep import Sweep
from rewound.states.storage import claims
from rewound.states.storage.store import Store

TABLES = ("results.csv", "layers.csv", "curves.csv")


class Evidence(NamedTuple):
    """What is left of a round."""

    sweeps: Sequence[Sweep]
    store: Store
    journal: Path
    said: str
    """All that the processes said."""
    was_damaged: bool = False
    """Whether files of the store were damaged on purpose."""


def tables_of(sweep: Sweep, store: Store, folder: Path) -> dict[str, bytes]:
    """The tables of a sweep as files, without seconds."""
    found = collected(sweep.targets, store)
    rows = [replace(row, seconds=None) for row in found.rows]
    paths = Tables(rows, found.layers, found.curves, found.missing).write(folder)
    return {path.name: path.read_bytes() for path in paths}


def wrong(evidence: Evidence, expected: dict[str, dict[str, bytes]], folder: Path) -> list[str]:
    """All that is wrong; nothing, if whatever happened has changed nothing."""
    events = [json.loads(line) for line in evidence.journal.read_text().splitlines()]
    return [
        *_other_tables(evidence, expected, folder),
        *published_twice(events, evidence),
        *written_late(events, evidence),
        *computed_again(events, evidence),
        *left_behind(events, evidence),
    ]


def _other_tables(evidence: Evidence, expected: dict[str, dict[str, bytes]], folder: Path) -> Iterator[str]:
    for sweep in evidence.sweeps:
        found = tables_of(sweep, evidence.store, folder)
        yield from (
            f"{name} of {sweep.name} is another" for name in TABLES if found[name] != expected[sweep.name][name]
        )


def published_twice(events: list[dict[str, Any]], evidence: Evidence) -> Iterator[str]:
    """A result is created once, stays as it was created, and gives way only where it had no measurement."""
    made: dict[str, list[dict[str, Any]]] = defaultdict(list)
    open_calls: dict[tuple[int, str], dict[str, Any]] = {}
    for event in events:
        path = event.get("path", "")
        if not path.startswith("results/"):
            continue
        call = event["pid"], path
        if event["phase"] == "begins":
            open_calls[call] = event
        elif event["phase"] == "ends":
            open_calls.pop(call, None)
            if event["what"] == "remove":
                made[path].clear()
                if not evidence.was_damaged:
                    yield f"{path} was removed by process {event['pid']}, and nothing had damaged it"
            elif event["what"] == "create" and event["done"]:
                if made[path]:
                    yield f"{path} was created twice, by processes {made[path][-1]['pid']} and {event['pid']}"
                made[path].append(event)
            elif event["what"] == "write":
                if not made[path] or (made[path][-1]["outcome"], event["outcome"]) != ("passed", "measured"):
                    yield f"{path} was replaced by process {event['pid']}"
                made[path].append(event)
    for path in evidence.store.backend.list("results/"):
        content = evidence.store.backend.read(path, 2**30)
        digest = hashlib.blake2b(content or b"", digest_size=8).hexdigest()
        if made[path]:
            if made[path][-1]["digest"] != digest:
                yield f"{path} is not what process {made[path][-1]['pid']} published"
        elif not any(path == of for _, of in open_calls):
            yield f"{path} was published by nobody"


def written_late(events: list[dict[str, Any]], evidence: Evidence) -> Iterator[str]:
    """Nobody keeps tensors of a node that another process has taken over, not even if it began to do so before."""
    owners: dict[str, tuple[int, int]] = {}
    for event in events:
        path = event.get("path", "")
        folder, _, name = path.partition("/")
        if event.get("phase") != "ends":
            continue
        if folder == "claims":
            key, _, number = name.partition(".")
            if event["what"] == "create" and event["done"]:
                owners[key] = event["pid"], int(number)
            elif event["what"] == "remove" and owners.get(key) == (event["pid"], int(number)):
                owners[key] = 0, 0  # nobody's
        elif folder in ("states", "drafts") and event["what"] == "write":
            key = Path(name).stem
            owner = owners.get(key, (event["pid"], 0))[0]
            if owner != event["pid"] and f"recomputing {key[:12]}" not in evidence.said:
                yield f"{path} was written by process {event['pid']} after process {owner} had taken it over"


def computed_again(events: list[dict[str, Any]], evidence: Evidence) -> Iterator[str]:
    """Whoever computes what was computed before says so."""
    published: set[str] = set()
    drafted: dict[str, int] = {}
    for event in events:
        key = event.get("key") or Path(event.get("path", "").partition("/")[2]).stem
        is_said = f"recomputing {key[:12]}" in evidence.said or f"note: {key[:12]}" in evidence.said
        is_said = is_said or f"damaged: {key}" in evidence.said
        kind, phase = event["what"], event.get("phase")
        if event.get("path", "").startswith("results/") and phase == "ends":
            if kind == "remove":
                published.discard(key)
            elif kind == "write" or event["done"]:
                published.add(key)
        elif kind == "job" and phase == "drafted":
            drafted[key] = event["step"]
        elif kind == "job" and phase == "begins" and not is_said:
            if key in published:
                yield f"{key[:12]} was published, and computed again by process {event['pid']} without a line"
            elif event["step"] < drafted.get(key, 0):
                yield f"{key[:12]} had a draft of {drafted[key]} steps, and went on from {event['step']} without a line"
        elif kind == "recomputes" and not is_said:
            yield f"{key[:12]} was computed again by process {event['pid']} without a line"


def left_behind(_: list[dict[str, Any]], evidence: Evidence) -> Iterator[str]:
    """After `rewound gc` there are results, and nothing else."""
    store = evidence.store
    for damage in damages(store):
        yield f"{damage.path} {damage.reason}"
    if "://" not in store.name and any(store.root.rglob(".*")):
        time.sleep(claims.STALE + 0.1)  # what was written just now may be somebody's whom gc cannot see
    found = leftovers([plan(sweep.targets) for sweep in evidence.sweeps], store, lambda line: None)
    remove(found, store, even_if_for_good=True)
    always = (store.backend.list(f"{folder}/") for folder in ("results", "sweeps", "damaged"))
    kept = {"version", "probe", *(path for listed in always for path in listed)}
    if store.backend.list("damaged/") and not evidence.was_damaged:
        yield f"{', '.join(store.backend.list('damaged/'))}: damaged by nobody"
    if "://" in store.name:
        there = {path for folder in ("claims/", "states/", "drafts/") for path in store.backend.list(folder)}
    else:
        there = {str(path.relative_to(store.root)) for path in store.root.rglob("*") if path.is_file()}
    yield from (f"{path} is left behind" for path in sorted(there - kept))
