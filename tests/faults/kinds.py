"""The kinds of faults: each is a generator of rounds that it has disturbed.

`much` is 1 in a long campaign, and less in a short one. What a kind needs and is not here raises `Missing`.
"""

import getpass
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

from nursery import Child
from rounds import STALE, Ground, Round, until
from surroundings import Missing, Proxy, Server, clock, container, disk, environment_of, moto, seaweedfs, slurm
from watched_process import Strike

Kind: TypeAlias = Callable[[Ground, random.Random, float], Iterator[Round]]


def kill(on: Ground, draw: random.Random, much: float, *, elsewhere: bool = False) -> Iterator[Round]:
    """SIGKILL of workers at random moments; three are at work, and the dead are replaced."""
    left = max(3, round(150 * much))
    while left > 0:
        this = Round(on, draw)
        workers = [this.start(f"machine-{number}" if elsewhere else None) for number in range(3)]
        while left > 0 and any(worker.code is None for worker in workers):
            this.pause(0, 0.6 if elsewhere else 0.2)  # elsewhere a lease must end before others take over
            number = draw.randrange(3)
            if this.hit(workers[number], signal.SIGKILL, "SIGKILL"):
                left -= 1
                workers[number].wait()
                workers[number] = this.start(f"machine-{len(this.children)}" if elsewhere else None)
        yield this


def kill_elsewhere(on: Ground, draw: random.Random, much: float) -> Iterator[Round]:
    """The same with workers on machines that cannot see each other's processes."""
    return kill(on, draw, much / 2, elsewhere=True)


def strike_each_call(on: Ground, draw: random.Random, much: float, *, how: str) -> Iterator[Round]:
    """One worker is struck at one of its calls that change the store, another round for each of them."""
    calls = _calls_of_small_sweep(on, draw)
    for call in (
        range(1, calls + 1) if much >= 1 else sorted(draw.sample(range(1, calls + 1), max(2, int(calls * much))))
    ):
        this = Round(on, draw, sweeps=("small",))
        struck = this.start("first", strike=Strike(call, after=False, how=how))
        if how == "stop":
            until(partial(_has_stopped, struck))
            this.start("second").wait()  # it takes the lease over, and does all of the work
            this.hit(struck, signal.SIGCONT, "frozen past the lease, and woken")
        else:
            struck.wait()
            this.done["SIGKILL" if how == "kill" else "SIGTERM"] += struck.code != 0
        yield this


def _has_stopped(worker: Child) -> bool:
    return worker.is_stopped() or worker.code is not None


def _calls_of_small_sweep(on: Ground, draw: random.Random) -> int:
    """How many calls a worker makes that change the store, in a sweep that nobody disturbs."""
    this = Round(on, draw, sweeps=("small",))
    assert this.start().wait() == 0
    events = [json.loads(line) for line in (this.folder / "journal").read_text().splitlines()]
    begun = [event for event in events if event.get("phase") == "begins" and "path" in event]
    return len([event for event in begun if event["what"] != "write" or not event["path"].startswith("claims/")])


def freeze(on: Ground, draw: random.Random, much: float) -> Iterator[Round]:
    """SIGSTOP at random moments, for longer than the lease; the others, elsewhere, take over."""
    left = max(1, round(25 * much))
    while left > 0:
        this = Round(on, draw)
        workers = [this.start(f"machine-{number}") for number in range(3)]
        while left > 0 and any(worker.code is None for worker in workers):
            this.pause(0, 0.3)
            frozen = workers[draw.randrange(3)]
            if this.hit(frozen, signal.SIGSTOP, "frozen past the lease, and woken"):
                left -= 1
                time.sleep(draw.uniform(1.2, 2) * STALE)
                frozen.signal(signal.SIGCONT)
        yield this


def terminate(on: Ground, draw: random.Random, much: float) -> Iterator[Round]:
    """SIGTERM at random moments, as the engines of clusters send it: workers keep drafts and end."""
    left = max(1, round(50 * much))
    while left > 0:
        this = Round(on, draw)
        worker = this.start()
        while left > 0 and worker.code is None:
            this.pause(0, 0.4)
            if this.hit(worker, signal.SIGTERM, "SIGTERM"):
                left -= 1
                worker.wait()
                worker = this.start()
        yield this


def damage(on: Ground, draw: random.Random, much: float) -> Iterator[Round]:
    """Files are truncated, flipped and emptied while workers read and write them, and between runs."""
    for _ in range(max(1, round(12 * much))):
        this = Round(on, draw)
        this.was_damaged = True
        workers = [this.start(), this.start()]
        store = Path(this.store)
        for number in range(12):
            if number == 8:
                for worker in workers:
                    worker.wait()
            this.pause(0, 0.15)
            files = [path for folder in ("results", "states", "drafts") for path in store.glob(f"{folder}/**/[!.]*.*")]
            if files:
                this.done[_damage(draw.choice(sorted(files)), draw)] += 1
        yield this


def _damage(path: Path, draw: random.Random) -> str:
    how = draw.choice(["truncated", "flipped", "emptied"])
    try:
        content = bytearray(path.read_bytes())
        if how == "flipped" and content:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        with path.open("r+b") as file:  # in place, as a disk does it; not if it was dropped meanwhile
            file.write(content)
            file.truncate(0 if how == "emptied" else len(content) // 2 if how == "truncated" else len(content))
    except FileNotFoundError:
        return "gone before it could be damaged"
    return how


def late_listings(on: Ground, draw: random.Random, much: float) -> Iterator[Round]:
    """Workers that see for a second what was in the store before, as clients of NFS do; one is killed now and then."""
    for _ in range(max(1, round(6 * much))):
        this = Round(on, draw)
        workers = [this.start(f"machine-{number}", listings=0.7) for number in range(3)]
        this.done["workers with late listings"] += 3
        this.pause(0.05, 0.6)
        this.hit(workers[0], signal.SIGKILL, "SIGKILL")
        yield this


def two_drivers(on: Ground, draw: random.Random, much: float) -> Iterator[Round]:
    """Two sweeps that share nodes, in one store: one keeps all tensors, the other what it needs; workers are killed."""
    for _ in range(max(1, round(10 * much))):
        this = Round(on, draw, sweeps=("sweep", "other"))
        settings = [("sweep", True), ("other", False), ("sweep", False)]
        workers = [this.start(sweep=sweep, keep_all=keep_all) for sweep, keep_all in settings]
        for _ in range(6):
            this.pause(0, 0.2)
            number = draw.randrange(3)
            if this.hit(workers[number], signal.SIGKILL, "SIGKILL"):
                workers[number].wait()
                workers[number] = this.start(sweep=settings[number][0], keep_all=settings[number][1])
        for worker in workers:
            worker.wait()
        yield this


def drivers(
    on: Ground,
    draw: random.Random,
    much: float,
    *,
    engine: str = "local",
    kills: int = 10,
    environment: dict[str, str] | None = None,
    commands: Mapping[str, list[str]] = MappingProxyType({}),
    **options: object,
) -> Iterator[Round]:
    """SIGKILL of a driver, of a worker that its engine has started, or of the engine itself; then the driver again.

    `commands` are other things to do to the engine, by their names. What was struck least is struck next.
    """
    for _ in range(max(1, round(kills * much / 5))):
        this = Round(on, draw, environment=environment)
        driver, struck = this.drive(on=engine, **options), Counter[str]()
        try:
            for _ in range(max(1, min(5, round(kills * much)))):
                until(partial(_is_at_work, this, driver), 300)
                this.pause(0, 0.5)
                living = this.processes(driver.pid)
                processes = {what: living[what] for what in ("driver", "worker", "raylet", "head") if living[what]}
                if not (names := [*processes, *commands]):  # the sweep has ended
                    break
                name = draw.choice([name for name in names if struck[name] == min(struck[each] for each in names)])
                struck[name] += 1
                if name in processes:
                    with suppress(ProcessLookupError):
                        os.kill(draw.choice(processes[name]), signal.SIGKILL)
                else:
                    given = {**os.environ, **this.environment}
                    subprocess.run(commands[name], env=given, check=True, capture_output=True)
                this.done[f"SIGKILL of a {name}" if name in processes else name] += 1
                if name == "driver":
                    driver.wait()
                if driver.poll() is not None:
                    driver = this.drive(on=engine, **options)
        finally:
            driver.kill()
            driver.wait()
            for pid in [pid for pids in this.processes(driver.pid).values() for pid in pids]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        yield this


def _is_at_work(this: Round, driver: subprocess.Popen[bytes]) -> bool:
    """Whether the driver has workers, or has ended."""
    return bool(this.processes(driver.pid)["worker"]) or driver.poll() is not None


def ray_drivers(on: Ground, draw: random.Random, much: float) -> Iterator[Round]:
    """The same with workers on Ray, whose head and raylet are killed, too."""
    if find_spec("ray") is None:
        raise Missing("Ray is not installed")
    polite = {"RAY_worker_niceness": "0"}  # 15 by default: on a busy machine they would not come to work for minutes
    yield from drivers(on, draw, much, engine="ray", kills=25, environment=polite)


def slurm_drivers(on: Ground, draw: random.Random, much: float) -> Iterator[Round]:
    """The same with workers as jobs of Slurm; jobs are cancelled, too, and the machine is taken out of service."""
    with slurm(on.folder / f"slurm-{on.count}") as environment:
        host = f"NodeName={socket.gethostname().split('.')[0]}"
        out = shlex.join(["scontrol", "update", host, "State=DOWN", "Reason=faults"])
        back = shlex.join(["scontrol", "update", host, "State=RESUME"])
        commands = {
            "all jobs cancelled": ["scancel", "--user", getpass.getuser()],
            "machine out of service for 2 s": ["sh", "-c", f"{out}; sleep 2; {back} || true"],  # or it is back
        }
        yield from drivers(on, draw, much, engine="slurm", environment=environment, commands=commands)


def full_disk(on: Ground, draw: random.Random, much: float) -> Iterator[Round]:
    """A disk that is full at one moment after the other; each time it grows a little, and the same command goes on."""
    for _ in range(max(1, round(4 * much))):
        with disk(on.folder / f"disk-{on.count}", kilobytes := draw.randrange(40, 80)) as small:
            this = Round(on, draw, store=str(small.folder / "store"))
            while (ended := [worker.wait() for worker in (this.start(), this.start())]) != [0, 0]:
                this.done["workers ended by a full disk"] += len(ended) - ended.count(0)
                assert "the disk is full" in this.said(), this.said()[-2000:]
                assert small.remount(f"size={(kilobytes := kilobytes + draw.randrange(8, 40))}k")
            small.remount("size=64m")
            yield this


def read_only_disk(on: Ground, draw: random.Random, much: float) -> Iterator[Round]:
    """A disk that can only be read from a random moment on, and then be written again."""
    left = max(1, round(12 * much))
    while left > 0:
        with disk(on.folder / f"disk-{on.count}", 64_000) as mounted:
            this, ended = Round(on, draw, store=str(mounted.folder / "store")), [1]
            while left > 0 and any(ended):
                workers = [this.start(), this.start()]
                this.pause(0, 0.3)
                until(lambda: mounted.remount("ro"))
                ended = [worker.wait() or 0 for worker in workers]
                this.done["workers ended by a read-only disk"] += len(ended) - ended.count(0)
                left -= any(ended)
                assert this.start().wait() in (0, 2), "one that starts there says why it cannot work"
                assert mounted.remount("rw")
            yield this


def set_clock(on: Ground, draw: random.Random, much: float) -> Iterator[Round]:
    """One machine's clock is set forth and back by up to a year, while workers run, are killed and started."""
    wrong = clock(on.folder / "clock")
    nurseries = [on.nursery(), on.nursery(wrong.environment)]
    for nursery in nurseries:
        nursery.wait_until_ready()
    for _ in range(max(1, round(6 * much))):
        this = Round(on, draw)
        workers = [this.start(f"machine-{number}", nursery=nurseries[number]) for number in range(2)]
        for number in range(12):
            this.pause(0, 0.15)
            wrong.set(draw.choice([-1, 1]) * draw.choice([3, 600, 7200, 86_400, 31_536_000]))
            this.done["clock set"] += 1
            which = draw.randrange(2)
            if number % 3 == 2 and this.hit(workers[which], signal.SIGKILL, "SIGKILL"):
                workers[which].wait()
                workers[which] = this.start(f"machine-{which}", nursery=nurseries[which])
        for worker in workers:
            worker.wait()
        yield this


def containers(on: Ground, draw: random.Random, much: float) -> Iterator[Round]:
    """Two containers of one host name, whose processes have the same numbers; workers are killed."""
    nurseries = [on.nursery({"CONTAINER": str(number)}, container("pod")) for number in range(2)]
    for nursery in nurseries:
        nursery.wait_until_ready()
    for _ in range(max(1, round(4 * much))):
        this = Round(on, draw)
        workers = [this.start(nursery=nursery) for nursery in nurseries]
        for _ in range(6):
            this.pause(0, 0.3)
            number = draw.randrange(2)
            if this.hit(workers[number], signal.SIGKILL, "SIGKILL"):
                workers[number].wait()
                workers[number] = this.start(nursery=nurseries[number])
        for worker in workers:
            worker.wait()
        yield this


def frozen_server(on: Ground, draw: random.Random, much: float) -> Iterator[Round]:
    """An object server that does not answer for a while (30 s in a long campaign), and goes on."""
    with moto(on.folder / f"moto-{on.count}") as server:
        for number in range(max(1, round(2 * much))):
            this = _in_bucket(on, draw, server, server.endpoint)
            workers = [this.start(f"machine-{number}") for number in range(2)]
            this.pause(0.3, 1.5)
            server.signal(signal.SIGSTOP)
            time.sleep(30 if much >= 1 else 4)
            server.signal(signal.SIGCONT)
            this.done[f"server frozen for {30 if much >= 1 else 4} s"] += 1
            for worker in workers:
                worker.wait()
            yield this


def killed_server(on: Ground, draw: random.Random, much: float) -> Iterator[Round]:
    """An object server that is killed at random moments, and started again."""
    with seaweedfs(on.folder / f"weed-{on.count}") as server:
        for _ in range(max(1, round(2 * much))):
            this = _in_bucket(on, draw, server, server.endpoint)
            workers = [this.start(f"machine-{number}") for number in range(2)]
            for _ in range(3):
                this.pause(0.3, 2)
                server.kill()
                this.done["server killed"] += 1
                time.sleep(draw.uniform(0, 3))
                server.start()
            for worker in workers:
                worker.wait()
            server.wait_until_writable()
            yield this


def lost_answers(on: Ground, draw: random.Random, much: float) -> Iterator[Round]:
    """One answer of twenty of an object server is lost after the request has reached it; workers are killed."""
    with moto(on.folder / f"moto-{on.count}") as server:
        proxy = Proxy(server.port, draw)
        for _ in range(max(1, round(4 * much))):
            this = _in_bucket(on, draw, server, proxy.endpoint)
            proxy.share, proxy.lost = 0.05, 0
            workers = [this.start(f"machine-{number}") for number in range(2)]
            this.pause(0.3, 2)
            this.hit(workers[0], signal.SIGKILL, "SIGKILL")
            for worker in workers:
                worker.wait()
            this.done["answers lost"] += proxy.lost
            proxy.share = 0.0
            yield this
        proxy.close()


def _in_bucket(on: Ground, draw: random.Random, server: Server, endpoint: str) -> Round:
    environment = environment_of(endpoint, on.folder / "cache")
    return Round(on, draw, store=server.new_bucket(f"bucket-{on.count}"), environment=environment)


KINDS: Final[dict[str, Kind]] = {
    "kill": kill,
    "kill-elsewhere": kill_elsewhere,
    "kill-each-call": partial(strike_each_call, how="kill"),
    "terminate": terminate,
    "terminate-each-call": partial(strike_each_call, how="term"),
    "freeze": freeze,
    "freeze-each-call": partial(strike_each_call, how="stop"),
    "full-disk": full_disk,
    "read-only-disk": read_only_disk,
    "clock": set_clock,
    "damage": damage,
    "two-drivers": two_drivers,
    "drivers": partial(drivers, jobs=2),
    "drivers-on-ray": ray_drivers,
    "drivers-on-slurm": slurm_drivers,
    "containers": containers,
    "late-listings": late_listings,
    "frozen-server": frozen_server,
    "killed-server": killed_server,
    "lost-answers": lost_answers,
}
