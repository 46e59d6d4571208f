"""Workers on a Ray cluster: each is one long task, which Ray starts again when its process or its machine is lost.

Ray only starts workers, each with a CPU or a part of a GPU. They find their work in the store, so Ray has as many tasks
as there are workers, and knows nothing of nodes. What they say reaches the driver through an actor (`_messages`).
"""

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from rewound.experiments.executors.driving import drive
from rewound.experiments.executors.walking import Headway
from rewound.experiments.executors.working import (
    Assignment,
    assignment,
    assignment_in,
    declaration_of,
    first_of_each,
    stopped_by_signals,
)
from rewound.experiments.plans.options import Options, Stop
from rewound.experiments.plans.planning import Plan
from rewound.experiments.plans.remaining import todo
from rewound.foundations.errors import Failed, InputError, as_whole, error_from, error_words
from rewound.foundations.owners import host_name, this_host
from rewound.foundations.quantities import counted
from rewound.states.storage.store import Say, Store
from rewound.tasks.devices import device_kind

_ANSWER = 10.0  # seconds for an address to answer
_HEAD = (5.0, 30.0)  # seconds between questions to the head of the cluster, and without an answer: Ray waits for 60
DEATHS = 3
"""How many workers in a row may die at a node: it fails then, since Ray would start them again for ever."""
_GRACE = 60.0  # seconds for a worker to keep its drafts; those before are no older
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent to Ray's makers
    "RAY_enable_metrics_collection": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run`, Ray would copy the current folder, and the store in it
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the default in future; Ray warns of it
    "RAY_gcs_rpc_server_reconnect_timeout_s": "120",  # it ends a process that misses the head for longer than that
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # half a page of text for each worker that dies, across the progress bar
}
_TO_CONNECT = {
    "RAY_NUM_REDIS_GET_RETRIES": "1",  # 20 by default: it would wait a quarter of an hour for a server that is not Ray
    "RAY_py_gcs_connect_timeout_s": f"{_ANSWER:.0f}",
}


@dataclass(frozen=True)
class Ray:
    """Where `rewound.run(sweep, on=Ray(...))` runs: on a Ray cluster, whose machines all reach the store.

    `address` is the host and port of the cluster, or "auto" for the one that this machine belongs to. By default it is
    that of the environment variable RAY_ADDRESS; without that, a cluster is started on this machine, and ended with
    the run. `workers` is how many there are to be: by default one for each CPU of the cluster, and on the device
    "cuda" `per_gpu` for each GPU.
    """

    address: str | None = None
    workers: int | None = None
    per_gpu: int = 1

    def __post_init__(self) -> None:
        for name, number in (("workers", self.workers), ("per-gpu", self.per_gpu)):
            if number is not None and as_whole(name, number) < 1:
                raise InputError(f"{name} must be at least 1, not {number}")
        if self.address is not None and "://" in self.address:
            raise InputError(
                f"address {self.address} is not a host and port, such as 10.0.0.1:6379; to start the run from a "
                "machine outside the cluster, give the whole command to `ray job submit`"
            )

    def __call__(
        self,
        plan: Plan,
        store: Store,
        options: Options,
        *,
        say: Say = print,
        tick: Callable[[Headway], None] = lambda _: None,
    ) -> None:
        """Do whatever of the plan is not done yet; see `Executor`."""
        self._check_options(options)
        given = assignment(plan, store, options)
        if left := len(todo(plan, store)):  # else nothing is started, which takes ten seconds
            forget_earlier_deaths(plan, store)
            with self._started(given, left, say) as workers:
                drive(plan, store, workers, keep_all=options.keep_all, say=say, tick=tick)

    @property
    def wait(self) -> bool:
        """Ray ends the workers of a driver that has ended, so the call waits for them."""
        return True

    def check(self, options: Options) -> None:
        """An error unless a cluster answers at the address, or Ray is there to start one; see `Engine`."""
        self._check_options(options)
        declaration_of(options)
        if (address := self.address or os.environ.get("RAY_ADDRESS")) is None:
            _imported(to_start=True)
            return
        if address != "auto":
            check_answers(address)  # first: a Ray that was imported to connect starts no cluster later
        with connected(self.address, None, lambda line: None):
            pass

    def _check_options(self, options: Options) -> None:
        if options.device not in ("cpu", "cuda"):
            raise InputError(f"device must be cpu or cuda on Ray, not {options.device}; Ray chooses the GPU")
        if self.per_gpu > 1 and device_kind(options.device) == "cpu":
            raise InputError(f"per-gpu {self.per_gpu} goes with device cuda, not with cpu; leave it out")
        if self.per_gpu > 1 and options.gpus_per_run > 1:
            raise InputError(
                f"per-gpu {self.per_gpu} contradicts {options.gpus_per_run} GPUs per run; give one of the two"
            )

    @contextmanager
    def _started(self, given: Assignment, left: int, say: Say) -> Iterator["_Tasks"]:
        """Workers on the cluster, at most as many as nodes are left; a cluster that is started for them ends here."""
        device, per_run = given.options.device, given.options.gpus_per_run
        cpus = self.workers * per_run if self.workers and device == "cpu" else None
        with connected(self.address, cpus, say) as ray:
            machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            room = slots(machines, device, self.per_gpu, per_run)
            if not (count := self.workers or room):
                raise no_room(machines, device, per_run)
            count = min(count, left)
            waiting = f"; the cluster has room for {room} now, and the others wait" if count > room else ""
            say(f"Ray starts {counted(count, 'worker')}{waiting}")
            here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=True
            )
            messages = ray.remote(_messages()).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote()
            task = ray.remote(_work).options(
                name="rewound worker",
                max_retries=-1,
                scheduling_strategy="SPREAD",
                num_cpus=per_run if device == "cpu" else 0,
                num_gpus=0 if device == "cpu" else per_run / self.per_gpu,
            )
            tasks = [task.remote(given.as_json(), number, messages, _folders()) for number in range(1, count + 1)]
            yield _Tasks(ray, tasks, messages, say, Stop(given.options.minutes))


def forget_earlier_deaths(plan: Plan, store: Store) -> None:
    """Clear the claims of processes that died before these workers begin: a person may kill a run any number of times.

    One on another host is known to be dead only after a while, and still counts.
    """
    store.claims()  # sees who is dead
    for node in plan.nodes:
        if store.deaths(node.key) and store.claim(node.key):
            store.release(node.key)


Machines: TypeAlias = Sequence[Mapping[str, float]]
"""What each machine of a cluster has, by Ray's names."""


def slots(machines: Machines, device: str, per_gpu: int, per_run: int = 1) -> int:
    """How many workers a cluster has room for; all processes of a worker are on one machine."""
    return sum(count * per_gpu // per_run for count in _counts(machines, device))


def no_room(machines: Machines, device: str, per_run: int) -> InputError:
    """The error for a cluster on which no worker could begin."""
    kind, most = "CPU" if device == "cpu" else "GPU", max(_counts(machines, device), default=0)
    few = f"no machine with {per_run} {kind}s now, and at most {most}" if most else f"no {kind} now"
    fewer = f"--gpus-per-run {most}, or " if most else ("" if device == "cpu" else "--device cpu, or ")
    return InputError(
        f"the Ray cluster has {few}; give {fewer}--workers for a cluster that adds machines when they are asked for"
    )


def _counts(machines: Machines, device: str) -> list[int]:
    return [int(machine.get("CPU" if device == "cpu" else "GPU", 0)) for machine in machines]


class _Tasks:
    """Tasks of the cluster, each of them one worker."""

    def __init__(self, ray: ModuleType, tasks: list[Any], messages: Any, say: Say, end: Stop) -> None:
        self._ray, self._tasks, self._messages, self._end = ray, tasks, messages, end
        self._say, self._warn, self._said = say, first_of_each(say), set[str]()
        self._head, self._answered = ray.get_runtime_context().gcs_address, time.monotonic()
        self._asked = self._answered

    def living(self) -> int:
        if self._end.is_due():  # for all at once, also for those that were started again in the meantime
            self.stop()
        self._check_head()
        for ended in self._looked():
            if (error := self._error(ended)) is not None:
                raise error
        return len(self._tasks)

    def _check_head(self) -> None:
        """An error when the head has not answered for a while, as long as Ray leaves time for drafts."""
        often, long = _HEAD
        if time.monotonic() - self._asked < often:
            return
        try:
            check_answers(self._head)
            self._answered = time.monotonic()
        except InputError as error:
            if time.monotonic() - self._answered > long:
                raise Failed(
                    f"the head of the Ray cluster at {self._head} has not answered for {long:.0f} s; nothing finished "
                    "is lost, and the same command continues once there is a cluster"
                ) from error
        self._asked = time.monotonic()

    def stop(self) -> None:
        for task in self._tasks:
            self._ray.cancel(task)  # like Ctrl-C in that process
        end = time.monotonic() + _GRACE
        while self._tasks and time.monotonic() < end:
            for ended in self._looked(0.5):
                if (error := self._error(ended)) is not None:
                    self._say(f"note: a worker ended with an error: {error}")
        if self._tasks:
            lost = counted(len(self._tasks), "worker")
            self._say(
                f"note: {lost} did not end within {_GRACE:.0f} s, and will be killed; drafts are at most a minute old"
            )
            for task in self._tasks:
                self._ray.cancel(task, force=True)
            self._tasks = []

    def _looked(self, seconds: float = 0.0) -> list[Any]:
        """The tasks that have ended since the last look; passes on what workers have said until then."""
        ended: list[Any] = []
        if self._tasks:
            ended, self._tasks = self._ray.wait(self._tasks, num_returns=len(self._tasks), timeout=seconds)
        try:
            lines = self._ray.get(self._messages.taken.remote(), timeout=_ANSWER)
        except self._ray.exceptions.RayError:  # its machine is lost; Ray starts it again on another
            lines = []
        for line in lines:
            if line.startswith("failed: ") or line in self._said:  # the driver says failures itself; many say the same
                continue
            self._said.add(line)
            (self._warn if line.startswith("warning: ") else self._say)(line)
        return ended

    def _error(self, ended: Any) -> Exception | None:
        try:
            words: list[str] = self._ray.get(ended)
        except self._ray.exceptions.TaskCancelledError:  # before it began
            return None
        except self._ray.exceptions.RayError as error:
            if "No module named 'rewound" in str(error):
                return InputError("a machine of the Ray cluster does not have rewound; install the same version on all")
            return Failed(f"Ray could not run a worker: {_one_line(error)}")
        return error_from(words) if words else None


# What runs on the cluster


def _messages() -> type:
    """The class of an actor that keeps what workers have said until the driver asks for it.

    A class that is made in a function travels as code: its process need not import this package, and torch with it.
    """

    class Messages:
        def __init__(self) -> None:
            self.lines: list[str] = []
            self.begun: set[int] = set()

        def add(self, line: str) -> None:
            self.lines.append(line)

        def begin(self, number: int, where: str) -> None:
            """Note that a worker begins; if it has before, its process or its machine was lost."""
            if number in self.begun:
                self.lines.append(
                    f"note: worker {number} was killed, or its machine was lost; Ray has started it again {where}"
                )
            self.begun.add(number)

        def taken(self) -> list[str]:
            lines, self.lines = self.lines, []
            return lines

    return Messages


def _work(given: str, number: int, messages: Any, folders: list[str]) -> list[str]:
    """Be one worker; returns the words of the error by which it has ended, if it has."""
    import ray

    stop, where = Stop(), f"on {host_name(this_host())} at {time.strftime('%H:%M:%S')}"
    last = [messages.begin.remote(number, where)]
    ray.wait(last, timeout=_ANSWER)  # a process that is killed takes messages with it that are still on their way

    def say(line: str) -> None:
        last[0] = messages.add.remote(line)

    with stopped_by_signals(stop), _found_from(folders):
        try:
            assignment_in(given).work(say, stop, most_deaths=DEATHS)
        except Exception as error:
            return error_words(error)
        finally:
            ray.wait(last, timeout=_ANSWER)  # the end of a task is known at once, a message takes a while
    return []


def _folders() -> list[str]:
    """Where Python finds the user's code here: the current folder, and those of PYTHONPATH."""
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [str(Path.cwd()), *(str(Path(folder).absolute()) for folder in named if folder)]


@contextmanager
def _found_from(folders: list[str]) -> Iterator[None]:
    """Inside, code and data are found as in the driver's current folder, if this machine has it."""
    before, paths = Path.cwd(), list(sys.path)
    sys.path += [folder for folder in folders if folder not in sys.path and Path(folder).is_dir()]  # last
    if Path(folders[0]).is_dir():
        os.chdir(folders[0])
    try:
        yield
    finally:
        sys.path[:] = paths
        os.chdir(before)


# The cluster


def _imported(*, to_start: bool) -> ModuleType:
    """Ray, as it is to be imported to start a cluster, or to connect to one."""
    # Ray listens on all interfaces of the machine, and runs the code of everybody who reaches it and has the token.
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    for name, value in (_ENVIRONMENT | (secret if to_start else _TO_CONNECT)).items():
        if "ray" not in sys.modules or name in _ENVIRONMENT:  # the others count only when it is imported
            os.environ.setdefault(name, value)
    try:
        import ray
        import ray.util.scheduling_strategies
    except ModuleNotFoundError as error:
        raise InputError(f"--on ray needs {error.name}, which is not installed; pip install 'rewound[ray]'") from error
    return ray  # type: ignore[no-any-return]


@contextmanager
def connected(given: str | None, cpus: int | None, say: Say) -> Iterator[ModuleType]:
    """Inside, this process is connected to a cluster: one that was there, or one that is started with so many CPUs."""
    address = given or os.environ.get("RAY_ADDRESS")
    ray = _imported(to_start=address is None)
    if ray.is_initialized():
        if given is not None:
            raise InputError(
                f"this process is connected to a Ray cluster already; leave out address {given}, or call "
                "ray.shutdown() before"
            )
        yield ray  # the user's own connection stays
        return
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if address is None and "RAY_AUTH_MODE" not in os.environ:
            raise InputError(
                "Ray was imported before it could be told to let nobody else connect to the cluster that it starts; "
                "start Python anew, or call ray.init() yourself"
            )
        if address is None:
            say("starting Ray on this machine, for this run alone; its logs will be in /tmp/ray/session_latest/logs")
            _start(ray, cpus)
        else:
            _connect(ray, address)
            say(f"connected to the Ray cluster at {ray.get_runtime_context().gcs_address}")
        yield ray
    finally:
        ray.shutdown()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray sets one of its own


_QUIETLY: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}


def _start(ray: ModuleType, cpus: int | None) -> None:
    try:
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, object_store_memory=100 << 20, **_QUIETLY)
    except (OSError, RuntimeError, ValueError) as error:
        raise Failed(f"Ray could not be started on this machine: {_one_line(error)}") from error


def _connect(ray: ModuleType, address: str) -> None:
    if address != "auto":
        check_answers(address)
    try:
        ray.init(address=address, **_QUIETLY)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(
            f"cannot connect to a Ray cluster at {address} ({_one_line(error)}); run the command on a machine of the "
            "cluster, for example with `ray job submit`"
        ) from error


def check_answers(address: str) -> None:
    """An error unless somebody listens at the address: Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"address must be a host and port, such as 10.0.0.1:6379, or auto, not {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"no Ray cluster answers at {address} ({error}); give the address that `ray start --head` printed, "
            "or leave it out to start one on this machine"
        ) from error


def _one_line(error: Exception) -> str:
    """An error of Ray in a few words; it may say a page."""
    words = " ".join(str(error).split())
    return words if len(words) <= 300 else f"{words[:300]}..."
