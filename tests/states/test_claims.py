"""Claims: one owner at a time; another takes over when it is dead or gives no sign of life."""

import json
import os
import socket
import time
from pathlib import Path

import pytest

import rewound.foundations.owners
import rewound.states.storage.claims
from rewound.foundations.errors import InputError
from rewound.foundations.owners import this_process
from rewound.states.storage.backend import Listed, Source
from rewound.states.storage.claims import STALE, Claim, Leases
from rewound.states.storage.folder import Folder
from rewound.states.storage.store import Store
from stored import KEY, OTHER


def test_one_owner_at_a_time(store: Store) -> None:
    assert store.claim(KEY)
    assert not store.claim(KEY), "not even for the owner itself"
    assert store.claim(OTHER)
    store.beat(KEY, 17)
    claims = store.claims()
    assert claims.keys() == {KEY, OTHER}
    assert (claims[KEY].host_name, claims[KEY].pid, claims[KEY].steps) == (socket.gethostname(), os.getpid(), 17)
    store.release(KEY)
    store.release(KEY)
    assert store.claims().keys() == {OTHER}
    assert store.claim(KEY)


STRANGE = [
    *(f'["{{host}}", {pid}, "123", 5]' for pid in ("-1", "0", "1" + 300 * "0", "1e3", '"12"', "null", "true", "[]")),
    *(f'["{{host}}", 1, "123", {steps}]' for steps in ("-1", '"5"', "null", "1" + 300 * "0")),
    *('[7, 1, "123", 5]', '["{host}", 1, 123, 5]', '["\\ud800", 1, "123", 5]', 100_000 * "["),
    *('["{host}", 1, "123"]', '["{host}", 1, "123", 5, 6]', "\x00"),
]
"""Claims with something in it that no process writes; {host} is this one."""


class Clock:
    """The observer's monotonic clock, set by a test."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def write_claim(store: Store, *content: object, number: object = 1) -> None:
    store.backend.write(f"claims/{KEY}.{number}", json.dumps(content).encode())


def test_a_process_number_used_again_is_not_its_owner(store: Store) -> None:
    write_claim(store, this_process().host, os.getpid(), "born long ago", 5)
    assert store.claims() == {}
    assert store.claim(KEY)


@pytest.mark.parametrize("number", ["json", "1", "17"])
@pytest.mark.parametrize("content", ["", "{", "[]", '["host"]', "3", *STRANGE])
def test_an_unreadable_claim_is_nobodys(store: Store, content: str, number: str) -> None:
    content = content.replace("{host}", this_process().host)
    store.backend.write(f"claims/{KEY}.{number}", content.encode())
    assert store.claims() == {}
    assert store.claim(KEY)
    store.release(KEY)
    assert store.backend.list("claims/") == {}, "and goes with the one that succeeds it"


@pytest.mark.parametrize("name", ["x.1", f"{KEY}.0", f"{KEY}.01", f"{KEY}", f"{KEY}.1.bak", f"{KEY}.-1", ".lock"])
def test_what_is_no_claim_is_left_alone(store: Store, name: str) -> None:
    store.backend.write(f"claims/{name}", b"of somebody who looked")
    assert store.claims() == {}
    assert store.claim(KEY)
    store.release(KEY)
    assert store.backend.read(f"claims/{name}", 100) == b"of somebody who looked"


class Emptied(Folder):
    """A folder in which each claim is given up as soon as it has been listed."""

    def list(self, prefix: str) -> dict[str, Listed]:
        found = super().list(prefix)
        for path in found:
            self.remove(path)
        return found


def test_a_claim_that_is_given_up_meanwhile(store: Store) -> None:
    write_claim(store, "elsewhere", 1, "123", 5)
    assert Store(Emptied(store.root)).claims() == {}
    write_claim(store, "elsewhere", 1, "123", 5)
    assert Store(Emptied(store.root)).claim(KEY)


def test_a_claim_that_another_has_taken_over_is_left_to_it(store: Store) -> None:
    assert store.claim(KEY)
    write_claim(store, "elsewhere", 1, "123", 5, number=2)  # after this process has slept for long
    assert not store.holds(KEY)
    assert not store.beat(KEY, 7)
    store.release(KEY)
    assert store.claims()[KEY] == Claim("elsewhere", 1, "123", 5)


def test_owners_that_die_in_a_row_are_counted(store: Store) -> None:
    assert store.deaths(KEY) == 0
    for number in (1, 2):
        write_claim(store, this_process().host, os.getpid(), "born long ago", 5, number=number)
    assert store.claims() == {}
    assert store.deaths(KEY) == 2
    assert store.claim(KEY)
    assert store.deaths(KEY) == 2
    assert store.claims().keys() == {KEY}
    assert store.deaths(KEY) == 2, "its owner's own claim does not count"
    store.release(KEY)
    assert store.claims() == {}
    assert store.deaths(KEY) == 0, "nobody died who gave it up"
    assert store.claim(KEY)
    assert store.deaths(KEY) == 0


def test_deaths_before_a_draft_do_not_count(store: Store) -> None:
    write_claim(store, this_process().host, os.getpid(), "born long ago", 5)
    observer = Store(store.root)
    assert observer.claims() == {}
    assert store.claim(KEY)
    store.forget_deaths(KEY)
    assert store.holds(KEY)
    assert store.deaths(KEY) == 0
    write_claim(store, this_process().host, os.getpid(), "born long ago", 9, number=2)  # as if that owner had died
    assert observer.claims() == {}
    assert observer.deaths(KEY) == 1


class Failing(Folder):
    """A folder on a disk that does not answer for a while: at the first listing, and at each write to one claim."""

    answers = False
    unwritable = ""

    def list(self, prefix: str) -> dict[str, Listed]:
        if not self.answers:
            self.answers = True
            raise InputError("the disk does not answer")
        return super().list(prefix)

    def write(self, path: str, source: Source, *, durable: bool = True) -> None:
        if path == self.unwritable:
            raise InputError("the disk does not answer")
        super().write(path, source, durable=durable)


def test_a_disk_that_fails_does_not_stop_the_heart(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewound.states.storage.claims, "STALE", 0.04)
    backend = Failing(store.root)
    backend.answers, backend.unwritable = True, f"claims/{KEY}.1"
    shaky = Store(backend)
    assert shaky.claim(KEY)
    assert shaky.claim(OTHER)
    before = store.backend.list("claims/")
    backend.answers = False
    with shaky.alive():
        limit = time.monotonic() + 10
        while store.backend.list("claims/") == before and time.monotonic() < limit:
            time.sleep(0.01)
    after = store.backend.list("claims/")
    assert backend.answers
    assert after[f"claims/{OTHER}.1"] != before[f"claims/{OTHER}.1"]
    assert after[f"claims/{KEY}.1"] == before[f"claims/{KEY}.1"]


def test_what_is_given_up_is_not_renewed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewound.states.storage.claims, "STALE", 0.004)
    with store.alive():
        for _ in range(30):
            assert store.claim(KEY)
            time.sleep(0.002)
            store.release(KEY)
            assert store.backend.list("claims/") == {}
            time.sleep(0.002)
    assert store.backend.list("claims/") == {}


def test_a_container_of_the_same_name_is_another_host(store: Store) -> None:
    """Its process numbers mean nothing here."""
    clock = Clock()
    leases = Leases(store.backend, clock=clock)
    write_claim(store, f"{socket.gethostname()}/0", 2**30, "123", 5)
    assert not leases.take(KEY)
    clock.now = STALE + 1
    assert leases.take(KEY)


def test_a_process_that_lives_on_without_a_sign_of_life_holds_nothing(store: Store) -> None:
    assert store.claim(KEY)  # and its release has failed, as the store did not answer
    clock = Clock()
    leases = Leases(store.backend, clock=clock)
    assert not leases.take(KEY)
    clock.now = STALE + 1
    assert leases.take(KEY)
    assert not store.holds(KEY)


def test_an_owner_that_is_not_shown_here_lives_by_its_heart(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.claim(KEY)
    clock = Clock()
    leases = Leases(store.backend, clock=clock)
    monkeypatch.setattr(rewound.foundations.owners, "_PROC", tmp_path / "hidden")  # as for another user, with hidepid
    assert not leases.take(KEY)
    clock.now = STALE + 1
    assert leases.take(KEY)
    leases.give_up(KEY)
    write_claim(store, this_process().host, 2**30, "123", 5)
    assert leases.take(KEY), "a number that no process has"


@pytest.mark.parametrize("hours", [-1, 1])
def test_no_clock_of_a_file_is_looked_at(store: Store, hours: float) -> None:
    """A host whose clock is ahead, or a file server's: neither is anybody dead at once, nor alive for a day."""
    write_claim(store, "elsewhere", 1, "123", 5)
    path = store.root / "claims" / f"{KEY}.1"
    os.utime(path, (time.time() + 3600 * hours, time.time() + 3600 * hours))
    clock = Clock()
    leases = Leases(store.backend, clock=clock)
    assert not leases.take(KEY)
    clock.now = STALE + 1
    assert leases.take(KEY)
