"""Artifacts of another store: merged if they are intact and better than what is here.

What was measured is never overwritten; a result without a measurement gives way to one that has it. Tensors are only
where training goes on from, and whichever are used, the results are the same: a draft gives way to one of more steps, a
state without the optimizer's slots to one with them.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from safetensors import SafetensorError

from rewound.errors import InputError
from rewound.storage.artifact import Damaged, digest
from rewound.storage.layout import DAMAGED, artifact_at
from rewound.storage.statefile import Kept, read_state
from rewound.storage.store import Store


def merge(store: Store, name: str, content: bytes) -> Literal["added", "present", "damaged"]:
    """Take an artifact of another store, named as it is there."""
    artifact, path = artifact_at(name), store.root / name
    if artifact is None:
        raise InputError(f"{name!r} is not an artifact of a store")
    kind, key = artifact
    if kind == "result":
        if (mine := store.result(key)) is not None and (
            "val" in mine or "failed" in mine or not _is_evaluated(content)
        ):
            return "present"
        store.write(path, content)
        return "damaged" if store.result(key) is None else "added"
    arriving = _read(content)
    if arriving is None:
        store.write(store.root / DAMAGED / path.name, content)
        return "damaged"
    has = _has_further if kind == "draft" else _has_state
    if has(store, key, arriving):
        return "present"
    store.write(path, content)
    return "added"


def _is_evaluated(content: bytes) -> bool:
    """Whether a result that arrives has been measured; one that is damaged has not."""
    try:
        result = json.loads(content)
        return "val" in result and result.pop("checksum") == digest(result)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def _has_state(store: Store, key: str, arriving: Kept) -> bool:
    return store.has_state(key, to_train=arriving.has_slots)


def _has_further(store: Store, key: str, arriving: Kept) -> bool:
    """Whether the node has ended here, or is at least as far."""
    if store.result(key) is not None:
        return True
    mine = store.load(key, draft=True)  # all of it: one that is damaged gives way
    return mine is not None and mine.state.position >= arriving.state.position


def _read(content: bytes) -> Kept | None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "arriving")
        path.write_bytes(content)
        try:
            return read_state(path)
        except (Damaged, SafetensorError, ValueError, KeyError):
            return None
