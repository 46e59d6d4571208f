"""Where things lie below the root of a store; nothing else knows it.

results/ab/abcd....json          what was measured; kept for ever
states/ab/abcd....safetensors    tensors; kept while a planned node needs them
drafts/abcd....safetensors       where an unfinished node can be resumed
claims/abcd....json              who is working on what
damaged/                         what failed its checksum, set aside
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final, Literal, NamedTuple, TypeAlias

from rewound.foundations.errors import InputError

Kind: TypeAlias = Literal["result", "state", "draft"]

_ARTIFACTS: Final[Mapping[Kind, str]] = {
    "result": "results/{key:.2}/{key}.json",
    "state": "states/{key:.2}/{key}.safetensors",
    "draft": "drafts/{key}.safetensors",
}
CLAIMS: Final = "claims"
DAMAGED: Final = "damaged"
FOLDERS: Final = (*(path.split("/")[0] for path in _ARTIFACTS.values()), CLAIMS, DAMAGED)

_KEY = re.compile(r"[0-9a-f]{32}")


class Artifact(NamedTuple):
    """What is kept of a node under its key."""

    kind: Kind
    key: str

    @property
    def path(self) -> str:
        return _ARTIFACTS[self.kind].format(key=checked(self.key))


def artifacts(key: str) -> list[Artifact]:
    """All that there may be of a node."""
    return [Artifact(kind, key) for kind in _ARTIFACTS]


def artifact_at(path: str) -> Artifact | None:
    """The artifact that lies at a path below a store; None: no such path is an artifact's.

    >>> artifact_at("drafts/" + 32 * "0" + ".safetensors")
    Artifact(kind='draft', key='00000000000000000000000000000000')
    """
    key = PurePosixPath(path).stem
    return next((found for found in artifacts(key) if is_key(key) and found.path == path), None)


def keys_below(root: Path, kind: Kind) -> set[str]:
    """The keys of all artifacts of a kind; not by pathlib's glob, which takes ten times as long."""
    folder, suffix = _ARTIFACTS[kind].split("/")[0], PurePosixPath(_ARTIFACTS[kind]).suffix
    names = (name for _, _, names in os.walk(root / folder) for name in names)
    # What is being written begins with a point; an editor's or a copy's file ends otherwise.
    return {name.removesuffix(suffix) for name in names if name.endswith(suffix) and not name.startswith(".")}


def pattern(kind: Kind) -> str:
    """What to glob for, to find all of a kind."""
    return _ARTIFACTS[kind].format(key="*")


def is_key(value: object) -> bool:
    """Whether something is a key of a state."""
    return isinstance(value, str) and _KEY.fullmatch(value) is not None


def checked(key: str) -> str:
    """A key, if it is one."""
    if not is_key(key):
        raise InputError(f"{key!r} is not a key: keys have 32 hexadecimal digits")
    return key
