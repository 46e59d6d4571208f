"""Artifacts of another store: taken if they are whole, and if what is here is not as good.

A result is never overwritten. Tensors are only where training goes on from, and whichever are used, the results are the
same: a draft gives way to one of more steps, a state without the optimizer's slots to one with them.
"""

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from safetensors import SafetensorError

from rewound.errors import InputError
from rewound.storage.artifact import Damaged, write_whole
from rewound.storage.refusals import said_of
from rewound.storage.statefile import Kept, read_state
from rewound.storage.store import Store

_ARTIFACT = re.compile(
    r"(?:results/(?=(..)/\1)../(?P<result>[0-9a-f]{32})\.json|states/(?=(..)/\3)../(?P<state>[0-9a-f]{32})\.safetensors"
    r"|drafts/(?P<draft>[0-9a-f]{32})\.safetensors)"
)


def is_artifact(name: str) -> bool:
    """Whether a path below a store is one of a result, a state or a draft."""
    return _ARTIFACT.fullmatch(name) is not None


def merge(store: Store, name: str, content: bytes) -> Literal["added", "present", "damaged"]:
    """Take an artifact of another store, named as it is there."""
    match = _ARTIFACT.fullmatch(name)
    if match is None:
        raise InputError(f"{name!r} is not an artifact of a store")
    path = store.root / name
    if key := match["result"]:
        if store.result(key) is not None:
            return "present"
        _write(store, path, content)
        return "damaged" if store.result(key) is None else "added"
    arriving = _read(content)
    if arriving is None:
        _write(store, store.root / "damaged" / path.name, content)
        return "damaged"
    if _has_further(store, match["draft"], arriving) if match["draft"] else _has_state(store, match["state"], arriving):
        return "present"
    _write(store, path, content)
    return "added"


def _has_state(store: Store, key: str, arriving: Kept) -> bool:
    return store.has_state(key, to_train=arriving.has_slots)


def _has_further(store: Store, key: str, arriving: Kept) -> bool:
    """Whether the node has ended here, or is at least as far."""
    if store.result(key) is not None:
        return True
    mine = store.load(key, draft=True)
    return mine is not None and mine.state.position >= arriving.state.position


def _read(content: bytes) -> Kept | None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "arriving")
        path.write_bytes(content)
        try:
            return read_state(path)
        except (Damaged, SafetensorError, ValueError, KeyError):
            return None


def _write(store: Store, path: Path, content: bytes) -> None:
    with said_of(store.root):
        write_whole(path, content)
