"""Claims: one owner at a time, succeeded once it is dead or its heart has stopped."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import rewound.foundations.owners
import rewound.states.storage.claims
from rewound.foundations.errors import InputError
from rewound.foundations.owners import this_process
from rewound.states.storage.claims import STALE, Claim
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


OWNER = """
import sys, time
from collections.abc import Iterator
from pathlib import Path
from rewound.states.storage.store import Store
store = Store(Path(sys.argv[1]))
print(store.claim(sys.argv[2]), flush=True)
time.sleep(600)
"""


def test_a_dead_owner_is_succeeded_at_once(store: Store) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, store.root, KEY],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "True\n"
            assert not store.claim(KEY), "its owner lives"
            assert store.claims()[KEY].pid == owner.pid
            os.kill(owner.pid, signal.SIGKILL)
            os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)  # dead, though not yet buried
            assert store.claims() == {}
            assert store.claim(KEY)
        finally:
            owner.kill()
    assert store.claims()[KEY].pid == os.getpid()


STRANGE = [
    *(f'["{{host}}", {pid}, "123", 5]' for pid in ("-1", "0", "1" + 300 * "0", "1e3", '"12"', "null", "true", "[]")),
    *(f'["{{host}}", 1, "123", {steps}]' for steps in ("-1", '"5"', "null", "1" + 300 * "0")),
    *('[7, 1, "123", 5]', '["{host}", 1, 123, 5]', '["\\ud800", 1, "123", 5]', 100_000 * "["),
    *('["{host}", 1, "123"]', '["{host}", 1, "123", 5, 6]', "\x00"),
]
"""Claims with something in it that no process writes; {host} is this one."""


def write_claim(store: Store, *owner: object, age: float = 0.0) -> None:
    path = store.root / "claims" / f"{KEY}.json"
    path.write_text(json.dumps(owner))
    os.utime(path, (time.time() - age, time.time() - age))


def test_another_hosts_owner_is_succeeded_when_its_heart_stops(store: Store) -> None:
    write_claim(store, "elsewhere", 1, "123", 5, age=STALE - 20)
    assert not store.claim(KEY)
    assert store.claims()[KEY] == Claim("elsewhere", 1, "123", 5)
    write_claim(store, "elsewhere", 1, "123", 5, age=STALE + 20)
    assert store.claims() == {}
    assert store.claim(KEY)


def test_a_process_number_used_again_is_not_its_owner(store: Store) -> None:
    assert store.claim(KEY)
    write_claim(store, store.claims()[KEY].host, os.getpid(), "born long ago", 5)
    assert store.claims() == {}
    assert store.claim(KEY)


@pytest.mark.parametrize("content", ["", "{", "[]", '["host"]', "3", *STRANGE])
def test_an_unreadable_claim_is_nobodys(store: Store, content: str) -> None:
    (store.root / "claims" / f"{KEY}.json").write_text(content.replace("{host}", this_process().host))
    assert store.claims() == {}
    assert store.claim(KEY)


def test_a_claim_that_is_given_up_meanwhile(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write_claim(store, "elsewhere", 1, "123", 5)
    read = rewound.states.storage.claims._read

    def read_then_released(path: Path) -> Claim | None:
        claim = read(path)
        path.unlink(missing_ok=True)
        return claim

    monkeypatch.setattr(rewound.states.storage.claims, "_read", read_then_released)
    assert store.claims() == {}
    write_claim(store, "elsewhere", 1, "123", 5)
    assert store.claim(KEY)


def test_a_claim_that_another_has_taken_over_is_left_to_it(store: Store) -> None:
    assert store.claim(KEY)
    write_claim(store, "elsewhere", 1, "123", 5)  # after this process has slept for long
    store.beat(KEY, 7)
    store.release(KEY)
    assert store.claims()[KEY][:2] == ("elsewhere", 1)
    assert store.claims()[KEY].steps == 5


def test_a_disk_that_fails_once_does_not_stop_the_heart(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewound.states.storage.claims, "STALE", 0.04)
    listed, failing = Path.glob, [True]

    def glob(folder: Path, pattern: str) -> Iterator[Path]:
        if failing.pop() if failing else False:
            raise OSError("the disk does not answer")
        return listed(folder, pattern)

    assert store.claim(KEY)
    path = store.root / "claims" / f"{KEY}.json"
    os.utime(path, (0, 0))
    monkeypatch.setattr(Path, "glob", glob)
    with store.alive():
        limit = time.monotonic() + 10
        while not path.stat().st_mtime and time.monotonic() < limit:
            time.sleep(0.01)
    assert not failing
    assert path.stat().st_mtime > 0


def test_a_claim_that_is_gone_does_not_keep_the_heart_from_the_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewound.states.storage.claims, "STALE", 0.04)
    touch, gone = os.utime, list[str]()

    def touched(path: Path) -> None:
        if not gone or gone[0] == path.stem:
            gone.append(path.stem)
            raise FileNotFoundError(path)
        touch(path)

    for key in (KEY, OTHER):
        assert store.claim(key)
        touch(store.root / "claims" / f"{key}.json", (0, 0))
    monkeypatch.setattr(os, "utime", touched)
    with store.alive():
        limit = time.monotonic() + 10
        while not any(path.stat().st_mtime for path in store.root.glob("claims/*.json")) and time.monotonic() < limit:
            time.sleep(0.01)
    (alive,) = {KEY, OTHER} - {*gone}
    assert (store.root / "claims" / f"{alive}.json").stat().st_mtime > 0


def test_what_is_looked_at_is_locked_until_it_is_done(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim may be taken over between the look and the deed, which would then be done to another's."""
    assert store.claim(KEY)
    is_mine, held = rewound.states.storage.claims._is_mine, list[bool]()

    def looked(path: Path) -> bool:
        with (path.parent / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(True)
            else:
                held.append(False)
        return is_mine(path)

    monkeypatch.setattr(rewound.states.storage.claims, "_is_mine", looked)
    store.beat(KEY, 3)
    store.release(KEY)
    assert held == [True, True]
    assert store.claims() == {}


def test_a_container_of_the_same_name_is_another_host(store: Store) -> None:
    """Its process numbers mean nothing here."""
    write_claim(store, f"{socket.gethostname()}/0", 2**30, "123", 5, age=STALE - 20)
    assert not store.claim(KEY)
    write_claim(store, f"{socket.gethostname()}/0", 2**30, "123", 5, age=STALE + 20)
    assert store.claim(KEY)


def test_an_owner_that_is_not_shown_here_lives_by_its_heart(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.claim(KEY)
    mine = store.claims()[KEY]
    monkeypatch.setattr(rewound.foundations.owners, "_PROC", tmp_path / "hidden")  # as for another user, with hidepid
    write_claim(store, *mine, age=STALE - 20)
    assert not store.claim(KEY)
    write_claim(store, *mine, age=STALE + 20)
    assert store.claim(KEY)
    write_claim(store, mine.host, 2**30, "123", 5)
    assert store.claim(KEY), "a number that no process has"


def test_a_link_in_place_of_the_lock_is_refused_and_what_it_points_to_is_left(store: Store, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("of somebody else")
    (store.root / "claims" / ".lock").symlink_to(precious)
    with pytest.raises(InputError, match="a link stands where it keeps a file of its own; remove the link"):
        store.claim(KEY)
    (store.root / "claims" / ".lock").unlink()
    (store.root / "claims" / ".lock").symlink_to(tmp_path / "made")
    with pytest.raises(InputError, match="a link stands"):
        store.claim(KEY)
    assert precious.read_text() == "of somebody else"
    assert not (tmp_path / "made").exists()
