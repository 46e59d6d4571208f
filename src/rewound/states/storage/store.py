"""Where states live: content-addressed artifacts (`artifacts`) that workers share and nothing else.

A store is written on the six primitives of a `backend` alone. Every artifact has its key and a checksum inside: what is
damaged, or lies under another key, is named, set aside below `damaged/` and counts as absent. A node is claimed before
it is worked on (`claims`). What was measured is never overwritten; a result without a measurement gives way to one that
has it. Nothing is ever unpickled.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any, Final, TypeVar

from rewound.foundations.errors import InputError
from rewound.foundations.wholefiles import FORGOTTEN
from rewound.method.pruning.mask import Mask
from rewound.states.storage import index
from rewound.states.storage.artifacts import (
    LONGEST_RESULT,
    PATHS,
    Artifact,
    Damaged,
    Kind,
    Measurements,
    Notes,
    Outcome,
    Result,
    Summary,
    artifact_at,
    checked,
    checked_measurements,
    checked_summary,
    decoded,
    digest,
    encoded,
    keys_in,
    measurements_of,
    outcome_of,
    summary_of,
)
from rewound.states.storage.backend import Backend, Gone, Location, contents_of, copied, refusal, where_writable
from rewound.states.storage.claims import Claim, Leases
from rewound.states.storage.folder import Folder
from rewound.states.storage.statefile import Header, Kept, header_size, read_header, read_state, write_state
from rewound.tasks.recipe import Position
from rewound.tasks.training import State

Say = Callable[[str], None]
VERSION = 2
Part = TypeVar("Part", Measurements, Summary)
_TENSORS: Final[tuple[Kind, ...]] = ("state", "draft")
_HEADER = 1 << 16  # bytes that most headers fit into


class _Unwanted(Exception):
    """What is being written is to be left out."""


class Store:
    """The artifacts and claims in one place: a folder by its path, a bucket by its URL, or any other backend.

    It is made on first use.
    """

    def __init__(self, place: Location | Backend, say: Say = print, known: dict[str, Outcome] | None = None) -> None:
        self.backend: Backend = backend_at(place) if isinstance(place, Path | str) else place
        self.say = say
        """Takes a line where a file is damaged."""
        self.known: dict[str, Outcome] = {} if known is None else known
        """Outcomes that were read or published before, by key: they stay as they are, and are not read again."""
        self._said: set[str] = set()
        self._leases = Leases(self.backend)
        self.backend.probe()
        self._check_version()

    @property
    def name(self) -> str:
        """The place, as it is given for `--store` and named in messages."""
        return self.backend.name

    @property
    def root(self) -> Path:
        """The place, if it is a folder."""
        return Path(self.backend.name)

    def _check_version(self) -> None:
        """Refuse a store of a newer version; one of an older version is marked, so that it refuses this one's."""
        if (found := self.backend.read("version", 100)) is None:
            self.backend.create("version", _version_line(VERSION))
            return
        number = re.match(rb"[0-9]{1,9}", found)
        if number is None or found.strip() != _version_line(int(number[0])).strip():
            self.set_aside("version", "is not what was written", f"store version {VERSION} is taken for it")
        elif int(number[0]) > VERSION:
            raise InputError(
                f"store {self.name} was written by a newer version ({int(number[0])}; this one knows {VERSION}); "
                "upgrade rewound"
            )
        elif int(number[0]) == VERSION:
            return
        with where_writable():
            self.backend.write("version", _version_line(VERSION))

    # Results

    def result(self, key: str) -> Result | None:
        """What was measured at `key`, or None; a damaged file is set aside and counts as absent."""
        self.known.pop(key, None)
        return self._read(key, self.backend.read(Artifact("result", key).path, LONGEST_RESULT + 1))

    def _read(self, key: str, content: bytes | None) -> Result | None:
        """The result in its file's content, of which the outcome is known from now on."""
        if content is None:
            return None
        try:
            result = _decoded(content, key)
        except Damaged as damage:
            self.set_aside(Artifact("result", key).path, damage.reason)
            return None
        self.known[key] = outcome_of(result)
        return result

    def results(self, keys: Collection[str]) -> Iterator[tuple[str, Measurements]]:
        """What was measured at these keys, in any order; as by `result`, and much faster where they are many."""
        return self._found(keys, checked_measurements, measurements_of, whole=True)

    def summaries(self, keys: Collection[str]) -> Iterator[tuple[str, Summary]]:
        """What was measured at these keys but curves and layers, in any order; faster than `results`."""
        return self._found(keys, checked_summary, summary_of, whole=False)

    def _found(
        self, keys: Collection[str], check: Callable[[Any], Part], part: Callable[[Result], Part], *, whole: bool
    ) -> Iterator[tuple[str, Part]]:
        stamps = self._stamps(keys)
        for key, _, found in index.entries(self.backend, stamps, whole=whole):
            try:
                result = check(found)
            except Damaged:  # not by this program: its file decides
                continue
            del stamps[key]  # another segment may have it, too
            self.known[key] = outcome_of(result)
            yield key, result
        yield from ((key, part(result)) for key, result in self._read_files(stamps))

    def outcomes(self, keys: Collection[str]) -> dict[str, Outcome]:
        """What the results of these keys say, in a word each; as by `outcome`, and much faster where they are many."""
        stamps, found = self._stamps(keys), dict[str, Outcome]()
        for key in [key for key in stamps if self.known.get(key, "passed") != "passed"]:
            found[key] = self.known[key]
            del stamps[key]
        if stamps:
            for entry in index.entries(self.backend, stamps):
                found[entry.key] = self.known[entry.key] = outcome_of(entry.result)
                del stamps[entry.key]
            found |= {key: outcome_of(result) for key, result in self._read_files(stamps)}
        return found

    def _stamps(self, keys: Collection[str]) -> dict[str, str]:
        """Those of the keys that have a result, with what tells one version of its file from another."""
        listed = self.backend.list("results/")
        paths = ((key, listed.get(Artifact("result", key).path)) for key in keys)
        return {key: index.stamp_of(found) for key, found in paths if found is not None}

    def _read_files(self, stamps: Mapping[str, str]) -> Iterator[tuple[str, Result]]:
        """The results in their own files; many of them are added to the index."""
        paths, segment = {key: Artifact("result", key).path for key in stamps}, index.Segment()
        is_worth_it = len(stamps) >= index.ENOUGH
        for key, content in contents_of(self.backend, paths, LONGEST_RESULT + 1):
            if (result := self._read(key, content)) is not None and content is not None:
                if is_worth_it:
                    segment.add(key, stamps[key], result, len(content))
                if segment.is_full:
                    segment.write(self.backend)
                    segment = index.Segment()
                yield key, result
        segment.write(self.backend)

    def outcome(self, key: str) -> Outcome | None:
        """What the result of `key` says, in a word; None without one. It is read once."""
        if self.known.get(key, "passed") == "passed":  # which may have been measured since
            return None if (result := self.result(key)) is None else outcome_of(result)
        return self.known[key]

    def publish(self, key: str, result: Result, *, replace: bool = False) -> bool:
        """Keep what was measured at `key`; False: there is a result that says as much, and stays unless `replace`."""
        path, content = Artifact("result", key).path, encoded(key, result)
        if replace:
            self.backend.write(path, content)
        elif not self.backend.create(path, content):
            if (present := self.result(key)) is None:  # damaged, and set aside by now
                return self.publish(key, result)
            if outcome_of(present) != "passed" or "val" not in result:
                return False
            self.backend.write(path, content)
        self.known[key] = outcome_of(result)
        return True

    def finished(self) -> set[str]:
        """The keys of all results, whatever they say."""
        return keys_in(self.backend.list("results/"), "result")

    def forget(self, key: str) -> None:
        """Drop a result, so that it is computed again."""
        self.known.pop(key, None)
        self.backend.remove(Artifact("result", key).path)

    def note_plan(self, sweep: str, plan: str) -> bool:
        """Note the digest of a sweep's plan; whether the sweep of that name had another one when it last ran here."""
        path = f"sweeps/{digest(sweep)}"
        if (found := self.backend.read(path, 100)) == plan.encode():
            return False
        with where_writable():
            self.backend.write(path, plan.encode(), durable=False)
        return found is not None

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
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Keep a state and its mask: published under its key, or as the draft of the node that will publish `key`.

        What is kept `for_good` outlives the sweep that needs it. To write takes a while: False if it was not wanted any
        more afterwards, and nothing was kept.
        """

        def write(to: Path) -> None:
            write_state(to, key, state, mask, draft, slots=slots, for_good=for_good)
            if not is_wanted():
                raise _Unwanted

        try:
            self.backend.write(_tensors(key, draft is not None).path, write)
        except _Unwanted:
            return False
        return True

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
        path = _tensors(key, draft).path
        if (file := self.backend.fetch(path)) is None:
            return None
        try:
            kept = read_state(file, key, draft=draft)
            if (reason := misfit(kept)) is not None:
                raise Damaged(reason)
        except Damaged as damage:
            self.set_aside(path, damage.reason)
            return None
        except (OSError, RuntimeError) as error:  # torch raises the latter where it cannot open or map the file
            if not file.exists():  # dropped since it was looked for, or only its copy in a cache
                return self.load(key, draft=draft, to_train=to_train, misfit=misfit)
            raise refusal(self.backend.name, error) from error  # that it cannot be read now says nothing about it
        return None if to_train and not kept.has_slots else kept

    def _facts(self, key: str, *, draft: bool) -> Header | None:
        """What the header of a state says, or None; a damaged one is set aside."""
        path, most = _tensors(key, draft).path, _HEADER
        while (beginning := self.backend.read(path, most)) is not None:
            try:
                if len(beginning) == most < (size := header_size(beginning)):
                    most = size  # a long one
                    continue
                return read_header(beginning)
            except Damaged as damage:
                self.set_aside(path, damage.reason)
                return None
        return None

    def has_state(self, key: str, *, to_train: bool = False) -> bool:
        """Whether the tensors at `key` are here (with the optimizer's slots, if they are `to_train` from)."""
        if not to_train:
            return self._has(Artifact("state", key))
        facts = self._facts(key, draft=False)
        return facts is not None and facts["slots"]

    def drop(self, key: str, *, draft: bool = False, even_if_for_good: bool = False) -> None:
        """Remove tensors that nothing needs any more."""
        if even_if_for_good or ((facts := self._facts(key, draft=draft)) is not None and not facts["for_good"]):
            self.backend.remove(_tensors(key, draft).path)

    def is_kept_for_good(self, key: str) -> bool:
        """Whether the tensors at `key` are to outlive the sweep that they were kept for."""
        return (facts := self._facts(key, draft=False)) is not None and facts["for_good"]

    def drafted(self, key: str) -> Position | None:
        """How far the draft of an unfinished node has come; None without one."""
        facts = self._facts(key, draft=True)
        return None if facts is None else facts["position"]

    def unbound(self, key: str) -> list[Artifact]:
        """The tensors kept at `key` by a version that did not write the key into them."""
        found = ((_tensors(key, draft), self._facts(key, draft=draft)) for draft in (False, True))
        return [artifact for artifact, facts in found if facts is not None and facts["key"] is None]

    def states(self) -> set[str]:
        """The keys of the tensors that are here."""
        return keys_in(self.backend.list("states/"), "state")

    def drafts(self) -> set[str]:
        """The keys of what is unfinished and can be resumed."""
        return keys_in(self.backend.list("drafts/"), "draft")

    def size(self) -> int:
        """Bytes of tensors held."""
        listed = [self.backend.list(f"{PATHS[kind].split('/')[0]}/") for kind in _TENSORS]
        return sum(found.size for files in listed for path, found in files.items() if artifact_at(path))

    def artifacts(self, key: str) -> list[Artifact]:
        """What there is of `key`: its result, its tensors, its draft."""
        return [artifact for kind in PATHS if self._has(artifact := Artifact(kind, key))]

    def _has(self, artifact: Artifact) -> bool:
        return self.backend.read(artifact.path, 1) is not None

    def sweep_up(self, after: float = FORGOTTEN) -> None:
        """Remove what writers that were killed left half-written; see `Backend.sweep_up`."""
        self.backend.sweep_up(after)

    # Claims

    def claim(self, key: str) -> bool:
        """Take the work on `key`, unless somebody alive has it."""
        return self._leases.take(checked(key))

    def holds(self, key: str) -> bool:
        """Whether the claim on `key` is still this store's: an owner that was taken for dead has lost it."""
        return self._leases.holds(checked(key))

    def beat(self, key: str, steps: int) -> bool:
        """Say that the owner of the claim is alive, and how many steps it has done; False: it has lost the claim."""
        return self._leases.beat(checked(key), steps)

    def deaths(self, key: str) -> int:
        """How many owners in a row have died at `key` since its last draft, as `claim` or `claims` has seen last."""
        return self._leases.deaths(checked(key))

    def forget_deaths(self, key: str) -> None:
        """Note that the work on `key`, claimed here, is further than those were that have died at it."""
        self._leases.forget_deaths(checked(key))

    def alive(self) -> AbstractContextManager[None]:
        """Inside, the claims taken here stay so for every host, whatever this process is busy with."""
        return self._leases.kept_alive()

    def release(self, key: str) -> None:
        """Give the claim up."""
        self._leases.give_up(checked(key))

    def claims(self) -> dict[str, Claim]:
        """The work under way, by key."""
        return self._leases.alive()

    # Damage

    def check(self, path: str, size: int) -> None:
        """`Damaged`, unless what lies at the path of an artifact, of about so many bytes, is what was written there."""
        artifact, most = artifact_at(path), size + 1
        while (content := self.backend.read(path, most)) is not None and len(content) == most:  # it has grown since
            most *= 2
        if artifact is None or content is None:  # nothing of ours, or removed since it was listed
            return
        if artifact.kind == "result":
            _decoded(content, artifact.key)
        else:
            read_state(content, artifact.key, draft=artifact.kind == "draft")

    def set_aside(self, path: str, reason: str, then: str = "to be recomputed") -> None:
        """Move a damaged file away, and say so; from a disk that can only be read it does not go."""
        if (file := self.backend.fetch(path)) is None:  # another worker has found it, too, and was faster
            return
        name = PurePosixPath(path)
        target, number = f"damaged/{name.name}", 1
        taken = self.backend.list(f"damaged/{name.stem}")
        while target in taken:  # an earlier one is kept, too
            number += 1
            target = f"damaged/{name.stem}-{number}{name.suffix}"
        what_became = "not used"
        try:
            with where_writable():
                self.backend.write(target, copied(file))
                self.backend.remove(path)
                what_became = f"set aside as {self.name}/{target}"
        except Gone:
            return
        if (line := f"damaged: {name.name} {reason}; {what_became}, {then}") not in self._said:
            self._said.add(line)
            self.say(line)


def _decoded(content: bytes, key: str) -> Result:
    if len(content) > LONGEST_RESULT:
        raise Damaged(f"is longer than a result can be ({LONGEST_RESULT:,} bytes)")
    return decoded(content, key)


def _tensors(key: str, draft: bool) -> Artifact:
    return Artifact("draft" if draft else "state", key)


def _version_line(version: int) -> bytes:
    """The content of the file `version`: from 2 on with a checksum, so that no damaged 1 is taken for a newer one."""
    return f"{version}\n".encode() if version == 1 else f"{version} {digest(version)}\n".encode()


def is_store(place: Location) -> bool:
    """Whether there is one: to look into another folder must not make it one."""
    return backend_at(place).read("version", 1) is not None


def backend_at(place: Location) -> Backend:
    """What a store is kept in, by its path or URL."""
    if isinstance(place, Path):
        return Folder(place)
    try:
        from rewound.states.storage.objects import Bucket  # here, as few need obstore
    except ModuleNotFoundError as error:
        raise InputError(
            f"store {place} needs {error.name}, which is not installed; pip install 'rewound[s3]'"
        ) from error
    return Bucket(place)
