"""One worker: it does what it can of a plan until every node has ended, or until it has to stop.

Workers share nothing but the store, whoever started them: `local` on this machine, the engine of a cluster, or a person
with `rewound work`. A worker on another machine is given an `Assignment`: the sweep as it was declared, from which it
makes the plan itself, and the digest of the driver's plan. If its own is another, it refuses to work.
"""

import hashlib
import json
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from rewound import __version__
from rewound.experiments.executors.leading import check_processes, leading
from rewound.experiments.executors.walking import Headway, Watch, walk
from rewound.experiments.plans import planning
from rewound.experiments.plans.execution import Worker
from rewound.experiments.plans.options import Options, Paused, Stop
from rewound.experiments.plans.planning import Node, Plan
from rewound.experiments.plans.provenance import sources_of
from rewound.experiments.plans.remaining import tidy
from rewound.experiments.sweeps.declaration import Declaration
from rewound.experiments.sweeps.sweep import parse_sweep
from rewound.foundations.errors import InputError
from rewound.foundations.names import path_of
from rewound.foundations.owners import host_name, this_host
from rewound.states.history import own_functions
from rewound.states.storage.backend import as_location, where_writable
from rewound.states.storage.store import Say, Store, is_store
from rewound.tasks.devices import device_named
from rewound.tasks.feed import given_limit
from rewound.tasks.parallel import check_divisible
from rewound.tasks.recipe import Recipe

STOPPED = 75
"""The exit code of a worker that stopped before the end, and may be started again: EX_TEMPFAIL of sysexits.h."""
_TELL = 0.5  # seconds between updates of the progress bar


def work(
    plan: Plan,
    store: Store,
    options: Options,
    *,
    say: Say = print,
    tick: Callable[[Headway], None] = lambda _: None,
    stop: Stop | None = None,
    most_deaths: int | None = None,
) -> bool:
    """Be a worker until every node of the plan has ended; False: it had to stop before, and has kept drafts.

    `most_deaths` is how many workers in a row may die at a node before it counts as failed: for an engine that starts
    dead workers again for ever.
    """
    watch = looked_at(plan, store, options)
    alive = telling(watch, tick)
    own = Store(store.backend, say, store.known)
    stop = stop or Stop(options.minutes)
    worker = Worker(store=own, options=options, say=say, alive=alive, stop=stop, most_deaths=most_deaths)
    if watch.open and not do_nodes(plan, worker, first_of_each(say)):
        return False  # at once: who asked it to stop may kill it soon
    tick(watch.headway(exact=True))
    tidy(plan, store, keep_all=options.keep_all)
    return True


def looked_at(plan: Plan, store: Store, options: Options) -> Watch:
    """What of the plan is done, once it is known that the rest can be done here."""
    device_named(options.device)
    check_processes(options)
    with where_writable():
        store.sweep_up()  # what killed workers left may be what fills the disk
    store.known.clear()  # since the last run another command may have forgotten some, or a disk have damaged them
    watch = Watch(plan, store)
    for recipe in {node.recipe for node in watch.open}:
        check_runnable(recipe, options)
    _check_importable(watch.open, options)
    return watch


def check_runnable(recipe: Recipe, options: Options) -> None:
    """An error for what would fail later: no data, a model that does not take its example, indivisible batches."""
    given_limit()
    recipe.check_data()
    _ = recipe.profile
    check_divisible(recipe, options.gpus_per_run)


def _check_importable(nodes: Iterable[Node], options: Options) -> None:
    """Refuse what other processes cannot import: it was defined in a notebook, a console or the script itself."""
    if (processes := options.jobs * options.gpus_per_run) == 1:
        return
    for node in nodes:
        for path in (path_of(type(node.recipe)), *own_functions(node.state)):
            if path.startswith("__main__:"):
                name = path.removeprefix("__main__:")
                remedy = "give jobs=1" if options.jobs > 1 else "give gpus_per_run=1"
                raise InputError(
                    f"{name} is defined in the notebook or script itself, and {processes} worker processes cannot "
                    f"import it from there; move it into a module, or {remedy}"
                )


def telling(watch: Watch, tick: Callable[[Headway], None]) -> Callable[[], None]:
    """A function to call often: it passes how far the plan is to `tick`, now and then at most every half second."""
    last = 0.0

    def tell() -> None:
        nonlocal last
        if time.monotonic() - last > _TELL:  # looking costs as much as a small network's epoch
            tick(watch.headway())
            last = time.monotonic()

    tell()  # an epoch may take minutes
    return tell


def do_nodes(plan: Plan, worker: Worker, warn: Say) -> bool:
    """Do nodes until all have ended; False: the worker had to stop before."""
    with one_thread(), _warnings_said(warn), worker.store.alive():
        try:
            with leading(worker.options) as train:
                walk(plan, replace(worker, train=train))
        except Paused:
            return False
    return True


@contextmanager
def one_thread() -> Iterator[None]:
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


def first_of_each(say: Say) -> Say:
    """Passes on the first of several similar lines: every worker may give the same warning hundreds of times."""
    said: set[str] = set()

    def first(text: str) -> None:
        kind = re.sub(r"\d[\d,.]*", "", text)[:40]  # the same words about another number, or another layer
        if kind not in said:
            said.add(kind)
            say(text)

    return first


@contextmanager
def stopped_by_signals(stop: Stop) -> Iterator[None]:
    """Inside, SIGTERM, SIGUSR1 and Ctrl-C ask the worker to stop, as the engines of clusters do before they kill it."""
    if threading.current_thread() is not threading.main_thread():  # Python lets only that one handle signals
        yield
        return
    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {each: signal.signal(each, lambda *_: stop.ask()) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


# Workers on other machines


@dataclass(frozen=True)
class Assignment:
    """What a driver gives to workers on other machines."""

    name: str
    table: dict[str, object]
    """The sweep's name and table, as they were declared."""
    store: str
    """The URL of a bucket, or the full path of a folder."""
    plan: str
    """The digest of the driver's plan."""
    options: Options
    """Those of one worker."""

    def as_json(self) -> str:
        """What `assignment_in` reads."""
        return json.dumps(asdict(self))

    def command(self, sweep: str) -> list[str]:
        """The words after `rewound` that do the same, with the file in which the sweep's table is."""
        options = self.options
        words = ["work", sweep, "--store", self.store, "--device", options.device, "--plan", self.plan]
        words += ["--keep", "all"] if options.keep_all else []
        words += ["--minutes", f"{options.minutes:g}"] if options.minutes is not None else []
        words += ["--gpus-per-run", str(options.gpus_per_run)] if options.gpus_per_run > 1 else []
        words += ["--fleet", str(options.fleet)] if options.fleet is not None else []
        return [*words, *(["--plain"] if options.plain else [])]

    def work(self, say: Say, stop: Stop | None = None, most_deaths: int | None = None) -> bool:
        """Be one of the workers that it is for; see `work`."""
        plan = planning.plan(parse_sweep(self.table, self.name).targets)
        check_plan(plan, self.plan)
        if not is_store(place := as_location("store", self.store)):  # to make one here would hide its results
            raise InputError(
                f"the driver's store {self.store} is not there on {host_name(this_host())}; give a folder that all "
                "machines share, or a bucket"
            )
        return work(plan, Store(place, say), self.options, say=say, stop=stop, most_deaths=most_deaths)


def declaration_of(options: Options) -> Declaration:
    """The sweep as it was declared; an error if workers on other machines cannot be given it."""
    if options.declaration is None:
        raise InputError(
            "workers on other machines read the sweep themselves, and this one exists only as objects of this process; "
            "give a TOML file, the name of a shipped sweep, or a dict that names its recipe as package.module:name"
        )
    return options.declaration


def assignment(plan: Plan, store: Store, options: Options) -> Assignment:
    """What workers on other machines are given to do this plan."""
    name, table = declaration_of(options)
    place = store.name if "://" in store.name else str(Path(store.name).absolute())
    return Assignment(name, dict(table), place, digest_of(plan), replace(options, jobs=1, declaration=None))


def assignment_in(text: str) -> Assignment:
    """The assignment that `Assignment.as_json` wrote."""
    given = json.loads(text)
    return Assignment(**{**given, "options": Options(**given["options"])})


def as_declared(name: str, table: object) -> Declaration | None:
    """A sweep's table, if it is one that other machines can be given as text."""
    if table is None:  # a sweep that was put together as an object
        return None
    try:
        return Declaration(name, json.loads(json.dumps(table)))
    except (TypeError, ValueError):  # a recipe as an object, or a date
        return None


def digest_of(plan: Plan) -> str:
    """What two processes have in common that would do the same work: rewound's version, all keys, and the code."""
    sources = {source for node in plan.nodes for source in sources_of(node).values()}
    return f"{__version__}-{_digest([*plan.by_key, *sources])}"


def digest_of_keys(plan: Plan) -> str:
    """What two plans of the same nodes have in common, whatever code does them."""
    return _digest(plan.by_key)


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()[:16]


def check_plan(plan: Plan, expected: str) -> None:
    """An error unless the plan of the driver has this digest, too."""
    found = digest_of(plan)
    if found == expected:
        return
    version, _, _ = expected.rpartition("-")
    if version != __version__:
        raise InputError(
            f"the driver has rewound {version or expected}, and this worker {__version__}; "
            "install the same version on both"
        )
    raise InputError(
        f"this worker's plan of the sweep differs from the driver's ({found}, not {expected}); "
        "give both the same sweep and the same code of its recipes"
    )
