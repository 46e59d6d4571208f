"""Workers on this machine: one process or several, sharing nothing but the store."""

import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from rewound.experiments.executors.processes import WorkersDied, run_processes
from rewound.experiments.executors.walking import walk
from rewound.experiments.executors.watch import Headway, Watch
from rewound.experiments.plans.execution import Paused, Worker
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import Node, Plan
from rewound.experiments.plans.realisation import recomputing
from rewound.experiments.plans.remaining import tidy, todo
from rewound.foundations.errors import InputError
from rewound.foundations.names import path_of
from rewound.states.history import own_functions
from rewound.states.storage.backend import Backend, where_writable
from rewound.states.storage.store import Say, Store, is_store
from rewound.tasks.devices import device_named
from rewound.tasks.recipe import Recipe

_TELL = 0.5  # seconds between updates of the progress bar


def run(
    plan: Plan, store: Store, options: Options, *, say: Say = print, tick: Callable[[Headway], None] = lambda _: None
) -> None:
    """Do whatever of the plan is not done yet; returns when all of it is finished, failed or skipped."""
    device_named(options.device)
    with where_writable():
        store.sweep_up()  # what killed workers left may be what fills the disk
    watch, told = Watch(plan, store), [0.0]
    for recipe in {node.recipe for node in watch.open}:
        _check(recipe)
    if options.jobs > 1:
        _check_importable(watch.open, options.jobs)
    for key in sorted(watch.again):
        say(recomputing(key))

    def alive() -> None:
        if time.monotonic() - told[0] > _TELL:  # looking costs as much as a small network's epoch
            tick(watch.headway())
            told[0] = time.monotonic()

    alive()  # an epoch may take minutes
    work, warn = partial(_work, plan, store.backend, options), _first_of_each(say)
    if options.jobs == 1:
        work(say, warn, alive)
    else:
        try:
            run_processes(options.jobs, work, say, warn, alive)
        except WorkersDied as death:
            if todo(plan, store):
                raise
            say(f"note: {death}; the others have done the work")
    tick(watch.headway())
    tidy(plan, store, keep_all=options.keep_all)


def opened(root: Path, recipes: Iterable[Recipe], device: str, say: Say) -> Store:
    """The store to run in; none is made for what cannot begin here."""
    device_named(device)
    if not is_store(root):
        for recipe in recipes:
            _check(recipe)
    return Store(root, say)


def _check(recipe: Recipe) -> None:
    recipe.check_data()
    _ = recipe.profile  # a model that does not take its example is told before it is trained


def _check_importable(nodes: Iterable[Node], jobs: int) -> None:
    """Refuse what other processes cannot import: it was defined in a notebook, a console or the script itself."""
    for node in nodes:
        for path in (path_of(type(node.recipe)), *own_functions(node.state)):
            if path.startswith("__main__:"):
                name = path.removeprefix("__main__:")
                raise InputError(
                    f"{name} is defined in the notebook or script itself, and {jobs} worker processes cannot import it "
                    "from there; move it into a module, or give jobs=1"
                )


def _work(plan: Plan, place: Backend, options: Options, say: Say, warn: Say, alive: Callable[[], None]) -> None:
    """Be one worker, here or in a process of its own."""
    store = Store(place, say)
    worker = Worker(store=store, options=options, say=say, alive=alive, until=options.until())
    with _one_thread(), _warnings_said(warn), store.alive(), suppress(Paused):
        walk(plan, worker)


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
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = lambda message, *_: say(f"warning: {message} (more such warnings are not shown)")
        yield


def _first_of_each(say: Say) -> Say:
    """Says the first line of each kind: a sweep may give hundreds of one, some by every worker."""
    said: set[str] = set()

    def first(text: str) -> None:
        kind = re.sub(r"\d[\d,.]*", "", text)[:40]  # the same words about another number, or another layer
        if kind not in said:
            said.add(kind)
            say(text)

    return first
