"""Workers on this machine: one process or several, sharing nothing but the store.

Each worker walks the plan, takes the first node that is ready and unclaimed, and does it. Any number of them, started
by one command or by several at once, share the work; no node is done twice.
"""

import math
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from rewound.devices import device_named
from rewound.errors import InputError
from rewound.execution import Paused, Worker, execute
from rewound.executors.watch import Progress, Watch
from rewound.faults import Fault, fault_of
from rewound.fleet import Fleet
from rewound.planning import Node, Plan
from rewound.realisation import recomputing
from rewound.recipe import Recipe
from rewound.remaining import tidy
from rewound.store import Say, Store, is_store

_POLL = 0.1  # seconds between looks at what others do
_TELL = 0.5  # and between updates of the progress bar


@dataclass(frozen=True)
class Options:
    """How to run a plan."""

    jobs: int = 1
    device: str = "cpu"
    keep_all: bool = False
    minutes: float | None = None
    """Stop after this time, with a draft of everything under way; None: run to the end."""
    plain: bool = False
    """On a GPU: the plain loop, one network at a time, nothing captured or compiled."""

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise InputError(f"jobs must be at least 1, not {self.jobs}")
        if self.minutes is not None and not self.minutes > 0:
            raise InputError(f"minutes must be above 0, not {self.minutes:g}; leave them out to run to the end")

    @property
    def until(self) -> float:
        """The end of that time from now."""
        return math.inf if self.minutes is None else time.monotonic() + 60 * self.minutes


def run(
    plan: Plan, store: Store, options: Options, *, say: Say = print, tick: Callable[[Progress], None] = lambda _: None
) -> None:
    """Do whatever of the plan is not done yet; returns when all of it is finished, failed or skipped."""
    device = device_named(options.device)
    watch, told = Watch(plan, store), [0.0]
    for recipe in {node.recipe for node in watch.open}:
        _check(recipe)
    for key in sorted(watch.again):
        say(recomputing(key))

    def alive() -> None:
        if time.monotonic() - told[0] > _TELL:  # looking costs as much as a small network's epoch
            tick(watch.progress())
            told[0] = time.monotonic()

    alive()  # an epoch may take minutes
    if options.jobs == 1:
        worker = Worker(store, device, options.keep_all, say, alive, options.until, options.plain)
        with _one_thread(), _warnings_said(_once(say)), suppress(Paused):
            _work(plan, worker)
    else:
        _run_processes(plan, store, options, say, alive)
    tick(watch.progress())
    if not options.keep_all:
        tidy(plan, store)


def opened(root: Path, recipe: Recipe, device: str) -> Store:
    """The store to run in; none is made for what cannot begin here."""
    device_named(device)
    if not is_store(root):
        _check(recipe)
    return Store(root)


def _check(recipe: Recipe) -> None:
    recipe.check_data()
    _ = recipe.profile  # a model that does not take its example is told before it is trained


def keeps_all(keep: str) -> bool:
    """Whether all tensors are kept, or only those that planned work needs."""
    if keep not in ("needed", "all"):
        raise InputError(f"keep is needed or all, not {keep!r}")
    return keep == "all"


def _work(plan: Plan, worker: Worker) -> None:
    """Take ready nodes until none is left."""
    watch = Watch(plan, worker.store)
    watch.look()
    fleets: dict[Recipe, Fleet] = {}
    while len(watch.status) < len(plan.nodes):
        if time.monotonic() > worker.until:
            raise Paused
        if (node := _take(watch, worker.store, None)) is None:
            time.sleep(_POLL)
        else:
            if node.recipe not in fleets:
                fleets[node.recipe] = Fleet(node.recipe, worker.device, plain=worker.plain)
            execute(_handing_out(node, watch, worker.store), plan, worker, fleets[node.recipe])
        worker.alive()
        watch.look()


def _handing_out(first: Node, watch: Watch, store: Store) -> Callable[[], Node | None]:
    """`first`, then whatever else of its recipe is ready, claimed as it is taken."""
    waiting = [first]
    return lambda: waiting.pop() if waiting else _take(watch, store, first.recipe)


def _take(watch: Watch, store: Store, recipe: Recipe | None) -> Node | None:
    """Claim the first node that is open and ready."""
    watch.look()
    for node in watch.plan.nodes:
        if node.key in watch.status or recipe not in (None, node.recipe):
            continue
        if all(watch.status.get(key) for key in node.needs) and store.claim(node.key):
            watch.look()
            if node.key not in watch.status:
                return node
            store.release(node.key)  # somebody finished it just before the claim
    return None


def _run_processes(plan: Plan, store: Store, options: Options, say: Say, tick: Callable[[], None]) -> None:
    context = multiprocessing.get_context("spawn")
    messages = context.SimpleQueue()
    workers: list[BaseProcess] = [
        context.Process(target=_worker_process, args=(plan, store.root, options, messages, os.getpid()), daemon=True)
        for _ in range(options.jobs)
    ]
    errors: list[Exception] = []
    heard = {"say": say, "warning": _once(say)}

    def listen() -> None:
        while not messages.empty():
            kind, *what = messages.get()
            if kind in heard:
                heard[kind](*what)
            else:
                errors.append(InputError(*what) if kind == "error" else Fault(*what))

    try:
        with _interrupts_held():
            for worker in workers:
                worker.start()
        while any(worker.is_alive() for worker in workers) and not errors:
            listen()
            tick()
            time.sleep(_POLL)
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
        for worker in workers:
            worker.join()
    listen()
    if errors:
        raise errors[0]
    if crashed := [worker for worker in workers if worker.exitcode]:
        raise RuntimeError(f"{len(crashed)} of {len(workers)} workers died (exit code {crashed[0].exitcode})")


def _worker_process(plan: Plan, root: Path, options: Options, messages, parent: int) -> None:  # type: ignore[no-untyped-def]  # SimpleQueue has no public type
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, lambda *_: _stop())

    def alive() -> None:
        if os.getppid() != parent:
            _stop()

    def tell(kind: str) -> Say:
        return lambda text: messages.put((kind, text))

    try:
        with _one_thread(), _warnings_said(_once(tell("warning"))), suppress(Paused):
            device = device_named(options.device)
            worker = Worker(Store(root), device, options.keep_all, tell("say"), alive, options.until, options.plain)
            _work(plan, worker)
    except InputError as error:
        tell("error")(str(error))
    except Exception as error:
        fault = fault_of(error) or Fault("a worker died", traceback.format_exc())
        messages.put(("fault", str(fault), fault.where))


def _stop() -> None:
    raise SystemExit(0)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until the end of the block; a process started in it never sees one, not even while it imports."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Law 1 holds bit for bit with one thread per worker; several workers then also do not fight for cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _warnings_said(say: Say) -> Iterator[None]:
    """Warnings as lines among the others."""
    more = "(more such warnings are not shown; layers.csv has every layer)"
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = lambda message, *_: say(f"warning: {message} {more}")
        yield


def _once(say: Say) -> Say:
    """Says the first of many: a sweep may give hundreds of warnings, some by every worker."""
    said: list[str] = []

    def first(text: str) -> None:
        if not said:
            say(text)
        said.append(text)

    return first
