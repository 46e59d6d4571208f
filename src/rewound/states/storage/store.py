"""Where states live: a folder of content-addressed artifacts (`layout`) that workers share and nothing else.

Every artifact is written to a temporary file and published by one atomic rename, with its key and a checksum inside:
what is damaged, or lies under another key, is named, set aside and counts as absent. A node is claimed before it is
worked on; a claim whose local owner is dead is taken over at once, one from another host when its heartbeat stops.
Nothing is ever unpickled.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rewound.foundations.errors import InputError
from rewound.foundations.wholefiles import remove_unfinished, replacing, write_whole
from rewound.method.pruning.mask import Mask
from rewound.states.storage.artifact import Damaged, digest
from rewound.states.storage.claims import Claim, beat, give_up, heart, take, under_way
from rewound.states.storage.layout import (
    CLAIMS,
    DAMAGED,
    FOLDERS,
    Artifact,
    Kind,
    artifacts,
    checked,
    keys_below,
    pattern,
)
from rewound.states.storage.records import Notes, Result
from rewound.states.storage.refusals import refusal, said_of, where_writable
from rewound.states.storage.resultfile import LONGEST_RESULT, decoded, encoded
from rewound.states.storage.statefile import Facts, Kept, read_facts, read_state, write_state
from rewound.tasks.recipe import Position
from rewound.tasks.training import State

Say = Callable[[str], None]
VERSION = 1
_TENSORS: Final[tuple[Kind, ...]] = ("state", "draft")


@dataclass(frozen=True)
class Store:
    """The artifacts below one folder; created on first use."""

    root: Path
    say: Say = field(default=print, compare=False, repr=False)
    """Takes a line where a file is damaged."""
    _told: set[str] = field(default_factory=set, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        with said_of(self.root):
            for folder in FOLDERS:
                with where_writable() if is_store(self.root) else nullcontext():
                    (self.root / folder).mkdir(parents=True, exist_ok=True)
            self._check_version()

    def _check_version(self) -> None:
        path = self.root / "version"
        if not path.exists():
            self.write(path, _version_line(VERSION))
        with path.open("rb") as file:
            found = file.read(100)
        number = re.match(rb"[0-9]{1,9}", found)
        if number is None or found.strip() != _version_line(int(number[0])).strip():
            self._set_aside(path, "is not what was written", f"store version {VERSION} is taken for it")
            with where_writable():
                write_whole(path, _version_line(VERSION))
        elif int(number[0]) > VERSION:
            raise InputError(
                f"store {self.root} was written by a newer version ({int(number[0])}; this one knows {VERSION}); "
                "upgrade rewound"
            )

    # Results

    def result(self, key: str) -> Result | None:
        """What was measured at `key`, or None; a damaged file is set aside and counts as absent."""
        path = self._path("result", key)
        try:
            with path.open("rb") as file:
                if len(content := file.read(LONGEST_RESULT + 1)) > LONGEST_RESULT:
                    raise Damaged(f"is longer than a result can be ({LONGEST_RESULT:,} bytes)")
            return decoded(content, key)
        except FileNotFoundError:
            return None
        except OSError as error:  # it cannot be read now, which says nothing about what it holds
            raise refusal(self.root, error) from error
        except Damaged as damage:
            self._set_aside(path, damage.reason)
            return None

    def publish(self, key: str, result: Result) -> None:
        """Keep what was measured at `key`."""
        self.write(self._path("result", key), encoded(key, result))

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
            write_state(temporary, key, state, mask, draft, slots=slots, for_good=for_good)

    def load(
        self,
        key: str,
        *,
        draft: bool = False,
        to_train: bool = True,
        misfit: Callable[[Kept], str | None] = lambda kept: None,
    ) -> Kept | None:
        """What is kept at `key`, or None; a damaged file is set aside and counts as absent.

        So does one of which `misfit` says why it cannot be the state that is meant. A state kept without its optimizer
        slots is no state `to_train` from.
        """
        path = self._state_path(key, draft)
        if not path.exists():
            return None
        try:
            with self._reading():
                kept = read_state(path, key, draft=draft)
            if (reason := misfit(kept)) is not None:
                raise Damaged(reason)
        except FileNotFoundError:  # dropped since it was looked for
            return None
        except Damaged as damage:
            self._set_aside(path, damage.reason)
            return None
        return None if to_train and not kept.has_slots else kept

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Inside, what cannot be read now is said: that says nothing about what it holds."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise refusal(self.root, error) from error
        except RuntimeError as error:  # torch's own, where it cannot open or map the file
            raise refusal(self.root, OSError(str(error))) from error

    def _facts(self, path: Path) -> Facts | None:
        """What the header of a state says, or None; a damaged one is set aside."""
        try:
            with self._reading():
                return read_facts(path)
        except Damaged as damage:
            self._set_aside(path, damage.reason)
            return None

    def has_state(self, key: str, *, to_train: bool = False) -> bool:
        """Whether the tensors at `key` are here (with the optimizer's slots, if they are `to_train` from)."""
        path = self._state_path(key, False)
        if not path.exists() or not to_train:
            return path.exists()
        facts = self._facts(path)
        return facts is not None and facts["slots"]

    def drop(self, key: str, *, draft: bool = False, even_if_for_good: bool = False) -> None:
        """Remove tensors that nothing needs any more."""
        path = self._state_path(key, draft)
        if not path.exists():  # to remove what is not there is refused by a disk that can only be read
            return
        if even_if_for_good or ((facts := self._facts(path)) is not None and not facts["for_good"]):
            path.unlink(missing_ok=True)

    def sweep_up(self) -> None:
        """Remove what writers that were killed left half-written."""
        for folder in FOLDERS:
            for inside, _, _ in os.walk(self.root / folder):
                remove_unfinished(Path(inside))
        remove_unfinished(self.root)

    def drafted(self, key: str) -> Position | None:
        """How far the draft of an unfinished node has come; None without one."""
        path = self._state_path(key, True)
        facts = self._facts(path) if path.exists() else None
        return None if facts is None else facts["position"]

    def unbound(self, key: str) -> list[Artifact]:
        """The tensors kept at `key` by a version that did not write the key into them."""
        found = [artifact for artifact in self.artifacts(key) if artifact.kind in _TENSORS]
        known = ((artifact, self._facts(self.root / artifact.path)) for artifact in found)
        return [artifact for artifact, facts in known if facts is not None and facts["key"] is None]

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

    def _set_aside(self, path: Path, reason: str, then: str = "to be recomputed") -> None:
        """Move a damaged file away, and say so; from a disk that can only be read it does not go."""
        target = self.root / DAMAGED / path.name
        number = 1
        while target.exists():  # an earlier one is kept, too
            number += 1
            target = target.with_name(f"{path.stem}-{number}{path.suffix}")
        said = "not used"
        with said_of(self.root), where_writable():
            try:
                path.replace(target)
            except FileNotFoundError:  # another worker has found it, too, and was faster
                return
            said = f"set aside as {target}"
        if (line := f"damaged: {path.name} {reason}; {said}, {then}") not in self._told:
            self._told.add(line)
            self.say(line)

    def _path(self, kind: Kind, key: str) -> Path:
        return self.root / Artifact(kind, key).path

    def _state_path(self, key: str, draft: bool) -> Path:
        return self._path("draft" if draft else "state", key)

    def _claim_path(self, key: str) -> Path:
        return self.root / CLAIMS / f"{checked(key)}.json"


def _version_line(version: int) -> bytes:
    """The content of the file `version`: from 2 on with a checksum, so that no damaged 1 is taken for a newer one."""
    return f"{version}\n".encode() if version == 1 else f"{version} {digest(version)}\n".encode()


def is_store(root: Path) -> bool:
    """Whether there is one: to look into another folder must not make it one."""
    return (root / "version").exists()
