"""What a store could do without, and what in it is damaged: the work of `rewound gc` and `rewound verify`.

Which tensors are needed is known only of sweeps that are named: what none of them will read goes. Results always stay.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeAlias

from rewound.experiments.executors import local
from rewound.experiments.executors.working import one_thread
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import Plan
from rewound.experiments.plans.realisation import realised
from rewound.experiments.plans.remaining import todo
from rewound.foundations.errors import InputError, few
from rewound.states.storage import claims, index
from rewound.states.storage.artifacts import PATHS, Artifact, Damaged, artifact_at, is_key
from rewound.states.storage.store import Say, Store
from rewound.tasks.devices import device_named

Progress: TypeAlias = Callable[[float, float], None]
"""Takes how much is done, and of how much."""
_POLL = 5.0  # seconds between looks for signs of life
_READERS = 8  # files that are checked at a time: a server takes a while to answer


class Leftovers(NamedTuple):
    """What nobody needs, with its bytes."""

    drafts: dict[str, int]
    states: dict[str, int]
    claims: dict[str, int]
    """Of owners that are dead."""
    for_good: dict[str, int]
    """States that no named sweep needs, and that were kept for good."""


def leftovers(plans: Sequence[Plan], store: Store, say: Say) -> Leftovers:
    """What none of the plans needs; without any, only claims are looked at, as nothing is known of tensors and drafts.

    Nobody may be at work on another plan, which could be about to read the same tensors.
    """
    drafts, states = _listed(store, "drafts/"), _listed(store, "states/")  # first: what is written later is needed
    claimed, alive = _claimed(store), _alive(store, say)
    dead = {key: size for key, size in claimed.items() if key not in alive}
    if not plans:
        return Leftovers({}, {}, dead, {})
    planned = {key for plan in plans for key in plan.by_key}
    if strangers := sorted(alive.keys() - planned):
        raise InputError(
            f"{few(sorted({alive[key].host_name for key in strangers}))} is at work on a sweep that is not named; "
            "name that sweep, too, or wait until its run has ended"
        )
    unfinished, needed = {*alive}, set[str]()
    for plan in plans:
        open_keys = {node.key for node in todo(plan, store)}
        unfinished |= open_keys
        needed |= {key for key in plan.by_key if not open_keys.isdisjoint((key, *plan.readers.get(key, ())))}
    unread = {key: size for key, size in states.items() if key not in needed}
    for_good = {key: size for key, size in unread.items() if store.is_kept_for_good(key)}
    return Leftovers(
        {key: size for key, size in drafts.items() if key not in unfinished},
        {key: size for key, size in unread.items() if key not in for_good},
        dead,
        for_good,
    )


def remove(found: Leftovers, store: Store, *, even_if_for_good: bool = False) -> None:
    """Remove what nobody needs, and what killed writers left half-written."""
    store.sweep_up(claims.STALE)  # as long as a claim stays without a sign of life
    for key in found.drafts:
        store.drop(key, draft=True, even_if_for_good=True)
    for key in [*found.states, *(found.for_good if even_if_for_good else ())]:
        store.drop(key, even_if_for_good=True)
    for key in found.claims:
        if store.claim(key):  # as whoever takes the work over does, who may be faster
            store.release(key)


def _listed(store: Store, folder: str) -> dict[str, int]:
    files = store.backend.list(folder).items()
    return {artifact.key: listed.size for path, listed in files if (artifact := artifact_at(path))}


def _claimed(store: Store) -> dict[str, int]:
    """The bytes of all claims on each node."""
    found: dict[str, int] = {}
    for path, listed in store.backend.list("claims/").items():
        key = path.removeprefix("claims/").partition(".")[0]
        if is_key(key):
            found[key] = found.get(key, 0) + listed.size
    return found


def _alive(store: Store, say: Say) -> dict[str, claims.Claim]:
    """Who is at work; whether a process of another machine is, its signs of life have to show."""
    alive, first = store.claims(), store.backend.list("claims/")
    unseen = {key: claim.host_name for key, claim in alive.items() if claim.owner.lives() is None}
    if unseen:
        say(f"looking for signs of life from {few(sorted({*unseen.values()}))}, for two minutes at most")
    until = time.monotonic() + claims.STALE + 1
    while unseen and time.monotonic() < until:
        time.sleep(min(_POLL, claims.STALE / 4))
        same = {path for path, listed in store.backend.list("claims/").items() if first.get(path) == listed}
        unseen = {key: host for key, host in unseen.items() if any(f"/{key}." in path for path in same)}
        alive = store.claims()
    return alive


class Damage(NamedTuple):
    """A file that is not what was written."""

    path: str
    artifact: Artifact
    reason: str
    """It follows the path in a sentence."""


def damages(store: Store, progress: Progress = lambda done, of: None) -> Iterator[Damage]:
    """Read every result, state and draft, and give those that are damaged; only the index is removed, a cache."""
    index.drop(store.backend)
    files = [item for folder in ("results/", "states/", "drafts/") for item in store.backend.list(folder).items()]
    ours = [(path, listed.size, artifact) for path, listed in files if (artifact := artifact_at(path))]

    def reason(path: str, size: int, _: Artifact) -> str | None:
        try:
            store.check(path, size)
        except Damaged as damage:
            return damage.reason
        return None

    progress(0, len(ours))
    with ThreadPoolExecutor(_READERS) as pool:
        for number, found in enumerate(pool.map(reason, *zip(*ours, strict=True)) if ours else (), start=1):
            path, _, artifact = ours[number - 1]
            if found is not None:
                yield Damage(path, artifact, found)
            progress(number, len(ours))


def repair(found: Sequence[Damage], plan: Plan, store: Store, options: Options, say: Say, progress: Progress) -> None:
    """Compute again what was damaged, has been set aside and is of the plan; nothing else of it is done.

    A draft needs nothing: the run that left it begins anew.
    """
    lost = {kind: {d.artifact.key for d in found if d.artifact.kind == kind} & plan.by_key.keys() for kind in PATHS}
    if lost["result"]:
        part = _part(plan, lost["result"])
        steps = part.steps
        local.run(part, store, options, say=say, tick=lambda headway: progress(headway.steps, steps))
    unfinished = {node.key for node in todo(plan, store)}
    with one_thread(), store.alive():
        for node in plan.nodes:
            if node.key in lost["state"] and not store.claim(node.key):
                say(f"note: {node.key[:12]} is not computed again here: another process is at work on it")
            elif node.key in lost["state"]:
                readers = plan.readers.get(node.key, ())
                over = unfinished.isdisjoint(readers)  # it is still there because it was kept for good, then
                try:
                    made = realised(node.state, store, device_named(options.device), say)
                    is_mine = partial(store.holds, node.key)
                    store.save(node.key, made.state, made.mask, slots=bool(readers), for_good=over, is_wanted=is_mine)
                finally:
                    store.release(node.key)


def _part(plan: Plan, keys: set[str]) -> Plan:
    """The nodes of these keys, and all that they build on."""
    wanted = set(keys)
    for node in reversed(plan.nodes):  # children before parents
        if node.key in wanted:
            wanted.update(node.needs)
    return Plan(plan.targets, tuple(node for node in plan.nodes if node.key in wanted), plan.readers)
