"""What every backend of a store has to do: checks that anybody runs on their own.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_backend(check, tmp_path):
        check(lambda: MyBackend(tmp_path / "store"))

A check is given a function that opens one and the same empty place, each time as another client would; it returns, or
raises an AssertionError. Some start processes, which open the place by a pickled backend, and kill them.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, NoReturn, TypeAlias

from rewound.foundations.owners import Owner
from rewound.states.storage.artifacts import CurvePoint, LayerCount, Result
from rewound.states.storage.backend import Backend
from rewound.states.storage.claims import STALE, Leases

Opener: TypeAlias = Callable[[], Backend]
_KEY, _OTHER = "0123456789abcdef" * 2, "fedcba9876543210" * 2
_LARGE = 1 << 20  # bytes that no system writes at once


# Files


def check_what_is_not_there(opened: Opener) -> None:
    """Nothing is found in an empty place, and nothing is wrong with removing nothing."""
    backend = opened()
    assert backend.read("results/ab/x.json", 10) is None
    assert backend.fetch("results/ab/x.json") is None
    assert backend.list("results/") == {}
    backend.remove("results/ab/x.json")


def check_what_is_written_is_read(opened: Opener) -> None:
    """By every client, from bytes and from a function, as a whole and its beginning; a new version each time."""
    one, other = opened(), opened()
    one.write("states/ab/x", b"0123456789")
    assert other.read("states/ab/x", 100) == b"0123456789"
    assert other.read("states/ab/x", 4) == b"0123"
    before = other.list("states/")["states/ab/x"]
    assert before.size == 10
    assert other.list("states/")["states/ab/x"] == before, "the version changes with a write alone"
    one.write("states/ab/x", b"9876543210")
    assert other.list("states/")["states/ab/x"].version != before.version
    one.write("states/ab/z", b"")
    assert other.read("states/ab/z", 100) == b"", "somebody's editor may leave an empty one"
    one.remove("states/ab/z")
    one.write("states/ab/y", lambda to: to.write_bytes(_LARGE * b"y"))
    file = other.fetch("states/ab/y")
    assert file is not None
    assert file.read_bytes() == _LARGE * b"y"
    one.remove("states/ab/y")
    assert other.read("states/ab/y", 1) is None
    assert other.fetch("states/ab/y") is None
    assert other.list("states/").keys() == {"states/ab/x"}


def check_listing(opened: Opener) -> None:
    """All files below a prefix, wherever they are, and no others."""
    backend = opened()
    paths = ["results/ab/1.json", "results/cd/2.json", "claims/x.1", "claims/x.12", "claims/xy.1", "version"]
    for path in paths:
        assert backend.create(path, path.encode())
    for prefix in ("results/", "results/ab/", "claims/", "claims/x.", "claims/x.1", "drafts/"):
        assert backend.list(prefix).keys() == {path for path in paths if path.startswith(prefix)}, prefix


def check_threads(opened: Opener) -> None:
    """Several threads read, write and list at once, as by a worker's sign of life and where reading is slow."""
    backend = opened()

    def written_and_read(number: int) -> bool:
        path, content = f"results/ab/{number}.json", 1000 * str(number).encode()
        backend.write(path, content)
        return backend.read(path, len(content) + 1) == content and path in backend.list("results/")

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(written_and_read, range(40)))


def check_a_write_that_fails_leaves_what_was(opened: Opener) -> None:
    """Half a file is never seen, and none is left."""
    backend = opened()
    backend.write("states/x", b"before")

    def fails(to: Path) -> NoReturn:
        to.write_bytes(b"half")
        assert opened().read("states/x", 100) == b"before"
        raise KeyboardInterrupt

    for path in ("states/x", "states/y"):
        with suppress(KeyboardInterrupt):
            backend.write(path, fails)
    assert opened().read("states/x", 100) == b"before"
    assert opened().list("states/").keys() == {"states/x"}


def check_a_killed_writer_leaves_what_was(opened: Opener) -> None:
    """The same if the process ends in the middle of a write."""
    opened().write("states/x", b"before")
    for path in ("states/x", "states/y"):
        with _process(_write_half, opened(), path) as (process, pipe):
            assert pipe.recv() == "half"
            _kill(process.pid)
            process.join()
    assert opened().read("states/x", 100) == b"before"
    assert opened().list("states/").keys() == {"states/x"}
    opened().sweep_up()
    assert opened().list("states/").keys() == {"states/x"}


def check_readers_see_whole_files(opened: Opener) -> None:
    """While one client writes a file again and again, another reads the one content or the other."""
    contents, stop = [_LARGE * b"a", (_LARGE + 7) * b"b"], threading.Event()
    opened().write("states/x", contents[0])

    def write() -> None:
        backend, number = opened(), 0
        while not stop.is_set():
            number += 1
            backend.write("states/x", contents[number % 2], durable=False)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        backend = opened()
        for _ in range(50):
            assert backend.read("states/x", 2 * _LARGE) in contents
            if (file := backend.fetch("states/x")) is not None:
                assert file.read_bytes() in contents
    finally:
        stop.set()
        writer.join()


# One creates


def check_one_of_many_threads_creates(opened: Opener) -> None:
    """Of many that create a file at the same time, one succeeds, and the file is its own."""
    threads, paths = 8, [f"claims/{number}" for number in range(20)]
    begin = threading.Barrier(threads)

    def create(name: int) -> list[bool]:
        backend = opened()
        begin.wait()
        return [backend.create(path, str(name).encode(), durable=False) for path in paths]

    with ThreadPoolExecutor(threads) as pool:
        created = list(pool.map(create, range(threads)))
    for number, path in enumerate(paths):
        winners = [name for name in range(threads) if created[name][number]]
        assert len(winners) == 1, f"{len(winners)} have created {path}"
        assert opened().read(path, 100) == str(winners[0]).encode()


def check_one_of_several_processes_creates(opened: Opener) -> None:
    """The same for processes."""
    with _process(_create, opened(), b"1") as (_, one), _process(_create, opened(), b"2") as (_, two):
        for pipe in (one, two):
            assert pipe.recv() == "ready"
        for pipe in (one, two):
            pipe.send("go")
        created = [one.recv(), two.recv()]
    assert [sum(pair) for pair in zip(*created, strict=True)] == len(created[0]) * [1]


# Leases


class _Clock:
    """A monotonic clock that a check sets."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def _leases(opened: Opener, host: str, now: float = 0.0) -> tuple[Leases, _Clock]:
    """The leases of a process on another host, with its clock."""
    clock = _Clock(now)
    return Leases(opened(), Owner(host, 1, "1"), clock), clock


def check_one_owner_at_a_time(opened: Opener) -> None:
    """A node that is claimed is nobody else's, until it is given up."""
    (one, _), (other, _) = _leases(opened, "one"), _leases(opened, "other")
    assert one.take(_KEY)
    assert not other.take(_KEY)
    assert not one.take(_KEY), "not even the owner's own a second time"
    assert other.take(_OTHER)
    assert one.beat(_KEY, 17)
    assert other.alive()[_KEY] == ("one", 1, "1", 17)
    other.give_up(_KEY)
    assert one.holds(_KEY), "only the owner gives it up"
    one.give_up(_KEY)
    assert other.take(_KEY)
    assert not one.holds(_KEY)


def check_a_killed_owner_is_succeeded_at_once(opened: Opener) -> None:
    """A process of this host that is dead holds nothing, and one of several takes over."""
    with _process(_take, opened(), _KEY) as (process, pipe):
        assert pipe.recv() is True
        observer = Leases(opened())
        assert not observer.take(_KEY), "its owner lives"
        _kill(process.pid)
        process.join()
        assert observer.alive() == {}
        assert [Leases(opened()).take(_KEY) for _ in range(3)] == [True, False, False]


def check_a_silent_owner_is_succeeded_after_the_lease(opened: Opener) -> None:
    """By the clock of who waits: how late or early other hosts have it is all the same."""
    for number, ahead in enumerate((0.0, 600.0, -600.0, 1e9)):
        key = f"{number:032x}"
        (owner, _), (observer, clock) = _leases(opened, "owner", ahead), _leases(opened, "observer")
        assert owner.take(key)
        assert not observer.take(key)
        clock.now = STALE - 1
        assert not observer.take(key)
        assert owner.beat(key, 5)
        clock.now = 2 * STALE - 2
        assert not observer.take(key), "its sign of life was seen just now"
        clock.now = 3 * STALE
        assert observer.alive().get(key) is None
        assert observer.take(key)


def check_a_frozen_owner_that_wakes_up_is_refused(opened: Opener) -> None:
    """Law 10: it has lost the node, while the new owner works and after that; it gives no sign of life for it."""
    for number, has_ended in enumerate((False, True)):
        key = f"{number:032x}"
        (frozen, _), (owner, clock), (third, _) = (_leases(opened, name) for name in ("frozen", "owner", "third"))
        assert frozen.take(key)
        assert not owner.take(key)
        clock.now = STALE + 1
        assert owner.take(key)
        if has_ended:
            owner.give_up(key)
        assert not frozen.holds(key)
        assert not frozen.beat(key, 99)
        frozen._renew_all()
        frozen.give_up(key)
        assert owner.holds(key) is not has_ended
        assert third.take(key) is has_ended


def check_a_sign_of_life_that_says_the_same_is_seen(opened: Opener) -> None:
    """A file that is written again has another version, also where its content is the same."""
    owner, observer = opened(), opened()
    owner.write("claims/x.1", b"alive", durable=False)
    before = observer.list("claims/")["claims/x.1"]
    time.sleep(1.1)  # some places count the time of a file in seconds
    owner.write("claims/x.1", b"alive", durable=False)
    assert observer.list("claims/")["claims/x.1"].version != before.version


def check_the_claims_of_versions_before_are_respected(opened: Opener) -> None:
    """One file per node, which its owner touches: taken over as any other, and removed with what succeeds it."""
    backend, (observer, clock) = opened(), _leases(opened, "observer")
    path = f"claims/{_KEY}.json"
    backend.write(path, b'["elsewhere", 1, "123", 5]')
    assert not observer.take(_KEY)
    assert observer.alive()[_KEY] == ("elsewhere", 1, "123", 5)
    clock.now = STALE + 1
    assert observer.take(_KEY)
    observer.give_up(_KEY)
    assert backend.list("claims/") == {}


# The store


def check_a_late_result_is_refused(opened: Opener) -> None:
    """What was measured is published once: the second owner's call says that it was not."""
    from rewound.states.storage.store import Store  # here, as it needs torch, and the processes above do not

    result = _result()
    one, other = Store(opened()), Store(opened())
    assert one.publish(_KEY, {**result, "val": 0.5})
    assert not other.publish(_KEY, {**result, "val": 0.7})
    found = other.result(_KEY)
    assert found is not None
    assert found["val"] == 0.5


def check_tensors_that_others_drop_are_absent(opened: Opener) -> None:
    """A file that is removed between the look at it and its opening is no error."""
    import torch  # here, as the processes above do not need it

    from rewound.states.storage.store import Store
    from rewound.tasks.recipe import Position
    from rewound.tasks.training import State

    state, stop = State({"w": torch.zeros(10_000)}, {}, 1, Position(0, 1)), threading.Event()
    lines: list[str] = []

    def change() -> None:
        store = Store(opened())
        while not stop.is_set():
            store.save(_KEY, state, None)
            store.drop(_KEY)

    writer = threading.Thread(target=change)
    writer.start()
    try:
        store = Store(opened(), lines.append)
        for _ in range(100):
            kept = store.load(_KEY)
            assert kept is None or torch.equal(kept.state.model["w"], state.model["w"])
            assert store.has_state(_KEY, to_train=True) in (True, False)
    finally:
        stop.set()
        writer.join()
    assert lines == [], "nor is it damaged"


def _result() -> Result:
    layers = {"conv": LayerCount(kept=1, total=2, flops=3)}
    return Result(
        recipe="digits",
        history=["train 10 steps"],
        after=None,
        steps=10,
        seconds=1.0,
        curve=[CurvePoint(10, 0.1, 1.0)],
        made={},
        test=0.5,
        flops=3,
        layers=layers,
    )


CHECKS: Final[tuple[Callable[[Opener], None], ...]] = tuple(
    check for name, check in list(globals().items()) if name.startswith("check_")
)


# Processes


@contextmanager
def _process(
    work: Callable[..., None], *given: object
) -> Iterator[tuple[multiprocessing.process.BaseProcess, Connection]]:
    """A process that does this work, and what it is spoken to through."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=work, args=(*given, there), daemon=True)
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        process.kill()
        process.join()


def _kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def _write_half(backend: Backend, path: str, pipe: Connection) -> None:
    def half(to: Path) -> None:
        to.write_bytes(b"half")
        pipe.send("half")
        signal.pause()

    backend.write(path, half)


def _create(backend: Backend, content: bytes, pipe: Connection) -> None:
    pipe.send("ready")
    pipe.recv()
    pipe.send([backend.create(f"claims/{number}", content, durable=False) for number in range(100)])


def _take(backend: Backend, key: str, pipe: Connection) -> None:
    pipe.send(Leases(backend).take(key))
    signal.pause()
