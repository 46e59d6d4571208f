"""Several processes that do the same work: started together, listened to, and ended together.

The first error ends them all; so does the end of the process that started them.
"""

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import TypeAlias

from rewound.errors import Failed, InputError
from rewound.executors.walking import POLL
from rewound.faults import Fault, fault_of
from rewound.storage.store import Say

Work: TypeAlias = Callable[[Say, Say, Callable[[], None]], None]
"""Takes what to say things with, what to warn with, and what to call now and then to learn that it has to end."""


class WorkersDied(Failed):
    """Some processes were killed; the others have gone on to the end."""


def run_processes(jobs: int, work: Work, say: Say, warn: Say, tick: Callable[[], None]) -> None:
    """Let as many processes do the work, and return when all of them have."""
    context = multiprocessing.get_context("spawn")
    messages = context.SimpleQueue()
    workers: list[BaseProcess] = [
        context.Process(target=_process, args=(work, messages, os.getpid()), daemon=True) for _ in range(jobs)
    ]
    errors: list[Exception] = []
    heard = {"say": say, "warning": warn}
    kinds: dict[str, Callable[..., Exception]] = {"error": InputError, "failed": Failed, "fault": Fault}

    def listen() -> None:
        while not messages.empty():
            kind, *what = messages.get()
            if kind in heard:
                heard[kind](*what)
            else:
                errors.append(kinds[kind](*what))

    try:
        with _interrupts_held():
            for worker in workers:
                worker.start()
        while any(worker.is_alive() for worker in workers) and not errors:
            listen()
            tick()
            time.sleep(POLL)
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
        raise WorkersDied(f"{len(crashed)} of {len(workers)} workers died (exit code {crashed[0].exitcode})")


def _process(work: Work, messages, parent: int) -> None:  # type: ignore[no-untyped-def]  # SimpleQueue has no public type
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, lambda *_: _stop())

    def alive() -> None:
        if os.getppid() != parent:
            _stop()

    def tell(kind: str) -> Say:
        return lambda text: messages.put((kind, text))

    try:
        work(tell("say"), tell("warning"), alive)
    except InputError as error:
        tell("error")(str(error))
    except Failed as error:
        tell("failed")(str(error))
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
