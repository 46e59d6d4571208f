"""Who is working on what: a lease per node, made of two primitives of a backend, `create` and `write`.

The claim of a node is the file `claims/KEY.N` of the highest number N, with its owner's host, process and how far the
work is. Who creates it owns the node; writing it again is the owner's sign of life; taking over from a dead owner
creates N + 1. The files of the dead stay until the node is given up, or has a new draft: they tell how many owners in a
row have died at it. An owner counts as dead if its process on this host is, or if an observer has seen the same version
of the claim for `STALE` seconds of its own monotonic clock: no clock is compared with another's. An owner that was
taken for dead and wakes up finds a newer claim, or none, and is refused (law 10).

Versions before this one kept one file `claims/KEY.json`, which counts as number 0.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from rewound.foundations.errors import InputError
from rewound.foundations.owners import Owner, host_name, is_process_number, this_process
from rewound.states.storage.backend import Backend

HEARTBEAT = 2.0
"""Seconds between two notes of how far the work is."""
STALE = 120.0
"""Seconds without a sign of life after which a claim is taken over whose owner cannot be seen from here."""
_LONGEST = 4096  # bytes of a claim; one has about a hundred
_FOLDER = "claims/"
_PATH = re.compile(rf"{_FOLDER}(?P<key>[0-9a-f]{{32}})\.(?P<number>json|[1-9][0-9]{{0,8}})")


class Claim(NamedTuple):
    """Who works on a node, and how many steps it has done."""

    host: str
    pid: int
    birth: str | None
    steps: int

    @property
    def owner(self) -> Owner:
        return Owner(self.host, self.pid, self.birth)

    @property
    def host_name(self) -> str:
        return host_name(self.host)


@dataclass(frozen=True)
class _Seen:
    """A claim as an observer has seen it."""

    number: int
    version: str
    since: float
    """When this version was seen for the first time, by the observer's clock."""
    claim: Claim | None
    """None: what the file holds makes no sense, and is nobody's claim."""
    older: tuple[str, ...] = ()
    """The paths of the claims that it has succeeded."""


class Leases:
    """The claims of a store, as one owner takes, keeps and observes them."""

    def __init__(
        self, backend: Backend, owner: Owner | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._backend, self._owner, self._clock = backend, owner, clock
        self._held: dict[str, tuple[int, int]] = {}  # number and steps by key
        self._died: dict[str, int] = {}  # owners in a row, by key, as far as was seen
        self._seen: dict[str, _Seen] = {}  # by path
        self._lock = threading.RLock()  # the thread that gives signs of life must not renew what was just given up

    def take(self, key: str) -> bool:
        """Claim a node, unless somebody alive has it."""
        with self._lock:
            last = self._last(key)
            if last is not None and self._lives(last):
                return False
            number = last.number + 1 if last else 1
            if not self._backend.create(_path(key, number), self._content(0), durable=False):
                return False
            self._held[key] = number, 0
            self._died[key] = len(last.older) + 1 if last else 0
            return True

    def deaths(self, key: str) -> int:
        """How many owners in a row have died at a node since its last draft, as `take` or `alive` has seen last."""
        return self._died.get(key, 0)

    def forget_deaths(self, key: str) -> None:
        """Note that the work on a node that is held here is further than those were that have died at it."""
        with self._lock:
            if self._died.pop(key, 0):
                last = self._last(key)
                if last is not None and self._is_held(key, last):
                    for path in last.older:
                        self._backend.remove(path)

    def holds(self, key: str) -> bool:
        """Whether the node is still this owner's, and nobody has taken it over."""
        return self._is_held(key, self._last(key))

    def beat(self, key: str, steps: int) -> bool:
        """Give a sign of life and note how many steps are done; False: another has taken the node over."""
        with self._lock:
            if not self.holds(key):
                return False
            self._renew(key, steps)
            return True

    def give_up(self, key: str) -> None:
        """Let others have the node; what another has taken over is left to it."""
        with self._lock:
            last = self._last(key)
            if last is not None and self._is_held(key, last):
                for path in (*last.older, _path(key, last.number)):  # its own last: it holds the node until then
                    self._backend.remove(path)
            self._held.pop(key, None)
            self._died.pop(key, None)

    def alive(self) -> dict[str, Claim]:
        """The claims that somebody alive holds, by key."""
        with self._lock:
            found = self._look(_FOLDER)
            living = {key: seen.claim for key, seen in found.items() if seen.claim is not None and self._lives(seen)}
            dead = {key: len(seen.older) + 1 for key, seen in found.items() if key not in living}
            self._died = {key: deaths for key, deaths in self._died.items() if key in self._held} | dead
            return living

    @contextmanager
    def kept_alive(self) -> Iterator[None]:
        """Inside, the claims held do not grow stale, however long an epoch or a recomputation takes."""
        stop = threading.Event()

        def beats() -> None:
            while not stop.wait(STALE / 4):
                with suppress(InputError):  # a disk that does not answer: next time, then
                    self._renew_all()

        thread = threading.Thread(target=beats, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _renew_all(self) -> None:
        with self._lock:
            if self._held:
                found = self._look(_FOLDER)
                for key, (_, steps) in list(self._held.items()):
                    if self._is_held(key, found.get(key)):
                        with suppress(InputError):  # the others are renewed none the less
                            self._renew(key, steps)

    def _renew(self, key: str, steps: int) -> None:
        number, _ = self._held[key]
        self._backend.write(_path(key, number), self._content(steps), durable=False)
        self._held[key] = number, steps

    def _content(self, steps: int) -> bytes:
        return json.dumps([*(self._owner or this_process()), steps]).encode()

    def _is_held(self, key: str, last: _Seen | None) -> bool:
        if last is None or last.claim is None or key not in self._held:
            return False
        return last.number == self._held[key][0] and last.claim.owner == (self._owner or this_process())

    def _lives(self, seen: _Seen) -> bool:
        """Whether somebody alive holds the claim."""
        if seen.claim is None:
            return False
        # That a process is there does not say that it still works: one that could not give its claim up lives on.
        return seen.claim.owner.lives() is not False and self._clock() - seen.since <= STALE

    def _last(self, key: str) -> _Seen | None:
        return self._look(f"{_FOLDER}{key}.").get(key)

    def _look(self, prefix: str) -> dict[str, _Seen]:
        """The last claim of each node below a prefix; a claim is read again only where its version has changed."""
        numbered: dict[str, list[tuple[int, str, str]]] = {}
        for path, (version, _) in self._backend.list(prefix).items():
            if matched := _PATH.fullmatch(path):
                number = 0 if matched["number"] == "json" else int(matched["number"])
                numbered.setdefault(matched["key"], []).append((number, path, version))
        found: dict[str, _Seen] = {}
        known: dict[str, _Seen] = {}
        for key, claims in numbered.items():
            *older, (number, path, version) = sorted(claims)
            seen, before = self._seen.get(path), tuple(path for _, path, _ in older)
            if seen is None or seen.version != version:
                if (content := self._backend.read(path, _LONGEST)) is None:  # given up since it was listed
                    continue
                seen = _Seen(number, version, self._clock(), _parsed(content), before)
            elif seen.older != before:
                seen = replace(seen, older=before)
            found[key] = known[path] = seen
        self._seen = known if prefix == _FOLDER else self._seen | known  # what was given up is forgotten
        return found


def _path(key: str, number: int) -> str:
    return f"{_FOLDER}{key}.{number}"


def _parsed(content: bytes) -> Claim | None:
    """The claim in a file; None: it makes no sense."""
    try:
        host, pid, birth, steps = json.loads(content)
        host.encode(), (birth or "").encode()  # half a character pair cannot be printed
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    makes_sense = type(pid) is int and is_process_number(pid) and type(steps) is int and 0 <= steps < 2**63
    return Claim(host, pid, birth, steps) if makes_sense else None
