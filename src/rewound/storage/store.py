"""Where states live: a folder of content-addressed artifacts (`layout`) that workers share and nothing else.

Every artifact is written to a temporary file and published by one atomic rename, with a checksum inside. A node is
claimed before it is worked on; a claim whose local owner is dead is taken over at once, one from another host when its
heartbeat stops. Nothing is ever unpickled.
"""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

from safetensors import SafetensorError

from rewound.errors import InputError
from rewound.pruning.mask import Mask
from rewound.recipe import Position
from rewound.storage.artifact import Damaged, digest
from rewound.storage.claims import Claim, beat, give_up, heart, take, under_way
from rewound.storage.layout import CLAIMS, DAMAGED, FOLDERS, Artifact, Kind, artifacts, checked, keys_below, pattern
from rewound.storage.records import CurvePoint, Notes, Result
from rewound.storage.refusals import refusal, said_of
from rewound.storage.statefile import Kept, is_for_good, is_to_train_from, position_in, read_state, write_state
from rewound.training import State
from rewound.wholefiles import replacing, write_whole

Say = Callable[[str], None]
VERSION = 1
_TENSORS: Final[tuple[Kind, ...]] = ("state", "draft")


@dataclass(frozen=True)
class Store:
    """The artifacts below one folder; created on first use."""

    root: Path
    say: Say = field(default=print, compare=False, repr=False)
    """Takes a line where a file is damaged."""

    def __post_init__(self) -> None:
        with said_of(self.root):
            for folder in FOLDERS:
                (self.root / folder).mkdir(parents=True, exist_ok=True)
            version = self.root / "version"
            if not version.exists():
                self.write(version, f"{VERSION}\n".encode())
            found = version.read_text().strip()
        if not found.isdigit() or int(found) > VERSION:
            raise InputError(
                f"store {self.root} was written by a newer version ({found}; this one knows {VERSION}); upgrade rewound"
            )

    # Results

    def result(self, key: str) -> Result | None:
        """What was measured at `key`, or None; a damaged file is set aside and counts as absent."""
        path = self._path("result", key)
        try:
            content = json.loads(path.read_text())
            if content.pop("checksum") != digest(content):
                raise Damaged(path)
        except FileNotFoundError:
            return None
        except OSError as error:  # it cannot be read now, which says nothing about what it holds
            raise refusal(self.root, error) from error
        except (Damaged, ValueError, KeyError, AttributeError, TypeError):  # not even an object
            self._set_aside(path)
            return None
        content["curve"] = [CurvePoint(*point) for point in content["curve"]]
        return cast(Result, content)

    def publish(self, key: str, result: Result) -> None:
        """Keep what was measured at `key`."""
        path = self._path("result", key)
        self.write(path, json.dumps({**result, "checksum": digest(result)}, indent=1).encode())

    def finished(self) -> set[str]:
        """The keys of all results, whatever they say."""
        return keys_below(self.root, "result")

    def forget(self, key: str) -> None:
        """Drop a result, so that it is computed again."""
        self._path("result", key).unlink(missing_ok=True)

    # States and drafts

    def save(
        self,
        key: str,
        state: State,
        mask: Mask | None,
        *,
        draft: Notes | None = None,
        slots: bool = True,
        for_good: bool = False,
    ) -> None:
        """Keep a state and its mask: published under its key, or as the draft of the node that will publish `key`.

        What is kept `for_good` outlives the sweep that needs it.
        """
        with said_of(self.root), replacing(self._state_path(key, draft is not None)) as temporary:
            write_state(temporary, state, mask, draft, slots=slots, for_good=for_good)

    def load(self, key: str, *, draft: bool = False, to_train: bool = True) -> Kept | None:
        """What is kept at `key`, or None; a damaged file is set aside and counts as absent.

        A state kept without its optimizer slots is no state `to_train` from.
        """
        path = self._state_path(key, draft)
        if not path.exists():
            return None
        try:
            kept = read_state(path)
        except FileNotFoundError:  # dropped since it was looked for
            return None
        except OSError as error:  # it cannot be read now, which says nothing about what it holds
            raise refusal(self.root, error) from error
        except (Damaged, SafetensorError, ValueError):
            self._set_aside(path)
            return None
        return None if to_train and not kept.has_slots else kept

    def has_state(self, key: str, *, to_train: bool = False) -> bool:
        """Whether the tensors at `key` are here (with the optimizer's slots, if they are `to_train` from)."""
        path = self._state_path(key, False)
        if not path.exists() or not to_train:
            return path.exists()
        return is_to_train_from(path)

    def drop(self, key: str, *, draft: bool = False, even_if_for_good: bool = False) -> None:
        """Remove tensors that nothing needs any more."""
        path = self._state_path(key, draft)
        if even_if_for_good or not is_for_good(path):
            path.unlink(missing_ok=True)

    def sweep_up(self) -> None:
        """Remove what writers that were killed left half-written, an hour after nobody touched it."""
        for path in self.root.rglob(".*.part"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > 3600:
                    path.unlink()

    def drafted(self, key: str) -> Position | None:
        """How far the draft of an unfinished node has come; None without one."""
        return position_in(self._state_path(key, True))

    def drafts(self) -> set[str]:
        """The keys of what is unfinished and can be resumed."""
        return keys_below(self.root, "draft")

    def size(self) -> int:
        """Bytes of tensors held."""
        size = 0
        for path in (path for kind in _TENSORS for path in self.root.glob(pattern(kind))):
            with suppress(FileNotFoundError):  # dropped since it was listed
                size += path.stat().st_size
        return size

    def artifacts(self, key: str) -> list[Artifact]:
        """What there is of `key`: its result, its tensors, its draft."""
        return [artifact for artifact in artifacts(key) if (self.root / artifact.path).exists()]

    # Claims

    def claim(self, key: str) -> bool:
        """Take the work on `key`, unless somebody alive has it."""
        with said_of(self.root):
            return take(self._claim_path(key))

    def beat(self, key: str, steps: int) -> None:
        """Say that the owner of the claim is alive, and how many steps it has done."""
        with said_of(self.root):
            beat(self._claim_path(key), steps)

    def alive(self) -> AbstractContextManager[None]:
        """Inside, the claims of this process stay its own on every host, whatever it is busy with."""
        return heart(self.root / CLAIMS)

    def release(self, key: str) -> None:
        """Give the claim up."""
        give_up(self._claim_path(key))

    def claims(self) -> dict[str, Claim]:
        """The work under way, by key."""
        return under_way(self.root / CLAIMS)

    # Files

    def write(self, path: Path, content: bytes) -> None:
        """Write a file below its root."""
        with said_of(self.root):
            write_whole(path, content)

    def _set_aside(self, path: Path) -> None:
        target = self.root / DAMAGED / path.name
        with said_of(self.root), suppress(FileNotFoundError):  # another worker may have found it, too, and been faster
            path.replace(target)
        self.say(f"damaged: {path.name} is not what was written; set aside as {target}, to be recomputed")

    def _path(self, kind: Kind, key: str) -> Path:
        return self.root / Artifact(kind, key).path

    def _state_path(self, key: str, draft: bool) -> Path:
        return self._path("draft" if draft else "state", key)

    def _claim_path(self, key: str) -> Path:
        return self.root / CLAIMS / f"{checked(key)}.json"


def is_store(root: Path) -> bool:
    """Whether there is one: to look into another folder must not make it one."""
    return (root / "version").exists()
