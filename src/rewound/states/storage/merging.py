"""From store to store: of the artifacts of another, a store takes those that are intact and better than its own.

A result gives way only if it has no measurement and the one that arrives does: what was measured is never overwritten.
Tensors are where training goes on from: a draft gives way to one of more steps, a state without the optimizer's slots
to one with them. Whichever of two are used, the results are the same on one kind of machine; two kinds differ in the
last bits, and each result says what it was made with (`made`).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from rewound.foundations.errors import InputError
from rewound.states.storage.artifacts import LONGEST_RESULT, Artifact, Damaged, artifact_at, decoded
from rewound.states.storage.backend import Backend, Gone, copied
from rewound.states.storage.packs import Pack
from rewound.states.storage.statefile import read_state
from rewound.states.storage.store import Store

Fate: TypeAlias = Literal["added", "present", "damaged"]
"""What becomes of an artifact that arrives from another store."""


class Merged(NamedTuple):
    """What became of the artifacts of a pack."""

    added: int
    present: int
    damaged: int
    unbound: int
    """Of those added, tensors of a version that did not write their key into them."""


def unpack_store(packs: Iterable[Pack], store: Store) -> Merged:
    """Copy packs into a store, an artifact at a time."""
    counts, unbound = {"added": 0, "present": 0, "damaged": 0}, 0
    for pack in packs:
        with pack:
            for path, listed in pack.list("").items():
                outcome = merge(path, pack, listed.size, store)
                counts[outcome] += 1
                unbound += outcome == "added" and artifact_at(path) in store.unbound(Path(path).stem)
    return Merged(**counts, unbound=unbound)


def merge(path: str, source: Backend, size: int, store: Store) -> Fate:
    """Take an artifact of another store, if it is intact and better than what is in this one."""
    if (artifact := artifact_at(path)) is None:
        raise InputError(f"{path!r} is not an artifact of a store")
    try:
        if artifact.kind == "result":
            is_better = _merge_result(artifact, source, size, store)
        else:
            is_better = _merge_tensors(artifact, source, store)
    except Gone:
        return "present"
    except Damaged as damage:
        store.say(f"damaged: {path} {damage.reason}; left out")
        return "damaged"
    return "added" if is_better else "present"


def _merge_result(artifact: Artifact, source: Backend, size: int, store: Store) -> bool:
    if size > LONGEST_RESULT:
        raise Damaged(f"has {size:,} bytes, and a result at most {LONGEST_RESULT:,}")
    if (content := source.read(artifact.path, LONGEST_RESULT)) is None:
        raise Gone(artifact.path)
    return store.publish(artifact.key, decoded(content, artifact.key))


def _merge_tensors(artifact: Artifact, source: Backend, store: Store) -> bool:
    key, is_draft = artifact.key, artifact.kind == "draft"
    if (file := source.fetch(artifact.path)) is None:
        raise Gone(artifact.path)
    arriving = read_state(file, key, draft=is_draft)
    if is_draft:
        present = store.load(key, draft=True)  # all of it: one that is damaged gives way
        is_further = present is None or arriving.state.position > present.state.position
        is_better = is_further and store.result(key) is None
    else:
        is_better = not store.has_state(key, to_train=arriving.has_slots)
    if is_better:
        store.backend.write(artifact.path, copied(file))
    return is_better
