"""Workers on this machine: one process or several, sharing nothing but the store."""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeAlias

from rewound.experiments.executors.leading import check_processes
from rewound.experiments.executors.walking import POLL, Headway
from rewound.experiments.executors.working import check_runnable, do_nodes, first_of_each, looked_at, telling, work
from rewound.experiments.plans.execution import Worker
from rewound.experiments.plans.options import Options, Stop
from rewound.experiments.plans.planning import Plan
from rewound.experiments.plans.remaining import tidy, todo
from rewound.foundations.errors import Failed, error_from, error_words
from rewound.foundations.owners import interrupts_held, script_hidden
from rewound.states.storage.artifacts import Outcome
from rewound.states.storage.backend import Backend, Location
from rewound.states.storage.store import Say, Store, is_store
from rewound.tasks.devices import device_named
from rewound.tasks.recipe import Recipe

_CHUNK = 1 << 16  # bytes that are read at a time, as many as a pipe holds


def run(
    plan: Plan, store: Store, options: Options, *, say: Say = print, tick: Callable[[Headway], None] = lambda _: None
) -> None:
    """Do whatever of the plan is not done yet; returns when all of it is finished, failed or skipped."""
    if options.jobs == 1:
        work(plan, store, options, say=say, tick=tick)
        return
    watch = looked_at(plan, store, options)
    be_worker = partial(_be_worker, plan, store.backend, options, store.known)
    try:
        if watch.open:  # a process takes seconds to start
            run_processes(options.jobs, be_worker, say, first_of_each(say), telling(watch, tick))
    except WorkersDied as death:
        if todo(plan, store):
            raise
        say(f"note: {death}; the others have done the work")
    tick(watch.headway(exact=True))
    tidy(plan, store, keep_all=options.keep_all)


def opened(root: Location, recipes: Iterable[Recipe], options: Options, say: Say) -> Store:
    """The store to run in; none is made for what cannot begin here."""
    device_named(options.device)
    check_processes(options)
    if not is_store(root):
        for recipe in recipes:
            check_runnable(recipe, options)
    return Store(root, say)


def _be_worker(
    plan: Plan,
    place: Backend,
    options: Options,
    known: dict[str, Outcome],
    say: Say,
    warn: Say,
    alive: Callable[[], None],
) -> None:
    """Be one of several workers, in a process of its own."""
    store = Store(place, say, known)
    do_nodes(plan, Worker(store=store, options=options, say=say, alive=alive, stop=Stop(options.minutes)), warn)


# Processes that do the same work: started together, listened to, and ended together

Work: TypeAlias = Callable[[Say, Say, Callable[[], None]], None]
"""Takes what to say things with, what to warn with, and what to call now and then to learn that it has to end."""


class WorkersDied(Failed):
    """Some processes were killed; the others have gone on to the end."""


def run_processes(jobs: int, work: Work, say: Say, warn: Say, tick: Callable[[], None]) -> None:
    """Let as many processes do the work, and return when all of them have.

    The first error ends them all; so does the end of the process that started them. Each has a pipe of its own and
    writes lines of JSON into it: one that is killed in the middle of a line holds nothing that the others wait for.
    """
    context = multiprocessing.get_context("spawn")
    workers, pipes = list[BaseProcess](), dict[Connection, bytes]()
    errors: list[Exception] = []
    heard: dict[str, Callable[..., object]] = {"say": say, "warning": warn}

    def listen(seconds: float = 0.0) -> None:
        for pipe in wait(list(pipes), seconds):
            assert isinstance(pipe, Connection)
            if not (read := os.read(pipe.fileno(), _CHUNK)):
                del pipes[pipe]  # its worker has ended; a message that it was killed in is no line and is left out
                continue
            *lines, pipes[pipe] = (pipes[pipe] + read).split(b"\n")
            for kind, *what in map(json.loads, lines):
                if kind in heard:
                    heard[kind](*what)
                else:
                    errors.append(error_from([kind, *what]))

    try:
        with interrupts_held(), script_hidden():
            for _ in range(jobs):
                reading, writing = context.Pipe(duplex=False)
                pipes[reading] = b""
                workers.append(context.Process(target=_process, args=(work, writing, os.getpid()), daemon=True))
                workers[-1].start()
                writing.close()  # only the worker has it now, so that its end is seen
        while any(worker.is_alive() for worker in workers) and not errors:
            listen(POLL)
            tick()
            if not pipes:
                time.sleep(POLL)
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
        for worker in workers:
            worker.join()
    while pipes:
        listen()
    if errors:
        raise errors[0]
    if crashed := [worker for worker in workers if worker.exitcode]:
        raise WorkersDied(f"{len(crashed)} of {len(workers)} workers died (exit code {crashed[0].exitcode})")


def _process(work: Work, pipe: Connection, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, lambda *_: _stop())
    one_at_a_time = threading.Lock()

    def alive() -> None:
        if os.getppid() != parent:
            _stop()

    def send(kind: str, *what: str) -> None:
        line = json.dumps((kind, *what)).encode() + b"\n"
        with one_at_a_time:
            try:
                while line:
                    line = line[os.write(pipe.fileno(), line) :]
            except BrokenPipeError:  # nobody listens any more
                _stop()

    try:
        work(partial(send, "say"), partial(send, "warning"), alive)
    except Exception as error:
        send(*error_words(error))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends by itself now; what runs at exit would be interrupted


def _stop() -> None:
    raise SystemExit(0)
