"""What is done with a sweep: `rewound.plan`, `run`, `results` and `report`. The command line calls these functions.

A sweep is given as the path of a TOML file, the name of one that comes with the package, a dict with the keys of such
a file, or a `Sweep`.
"""

import os
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from rewound.commands.console import progress_lines
from rewound.commands.tables import check_subject, read_tables, report_tables
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.paper.networks import TEST_SHARES
from rewound.conclusions.tables import Row, Tables
from rewound.experiments.executors import Engine, Executor, executor_named, local, working
from rewound.experiments.executors.leading import follow_launched, launched, leading_launched
from rewound.experiments.executors.walking import Headway
from rewound.experiments.executors.working import as_declared, check_plan, digest_of_keys, stopped_by_signals
from rewound.experiments.plans import planning
from rewound.experiments.plans.collection import SweepResults, has_failed, not_run
from rewound.experiments.plans.options import Options, Stop, keeps_all
from rewound.experiments.plans.outlook import SweepPlan, estimate, outdated, parts_pruned
from rewound.experiments.plans.remaining import todo
from rewound.experiments.sweeps.declaration import as_table, declared
from rewound.experiments.sweeps.sweep import Sweep, parse_sweep
from rewound.foundations.collector import collector_paused
from rewound.foundations.errors import InputError, as_whole, check_kind, shown
from rewound.foundations.owners import usable_cores
from rewound.reports.figures import DEFAULT, Drawing, Say
from rewound.reports.page import Origin
from rewound.reports.trackers import tracker_named
from rewound.reports.writing import Report, report_folder, write_report
from rewound.states.storage.artifacts import DEFAULT_STORE, Summary
from rewound.states.storage.backend import Location, as_location
from rewound.states.storage.claims import Claim
from rewound.states.storage.store import Store, is_store
from rewound.tasks.devices import device_kind

AnySweep: TypeAlias = str | Path | Mapping[str, object] | Sweep
Progress: TypeAlias = Callable[[float, float], None]


def plan(
    sweep: AnySweep, *, store: str | Path = DEFAULT_STORE, jobs: int = 0, device: str = "cpu", say: Say = print
) -> SweepPlan:
    """What a run of a sweep would do, and what it would cost; it runs nothing and needs no data.

    `jobs` and `device` are those of `run`, for the time that it would take. `say` takes a line where a file in the
    store is damaged.

    >>> sweep = {"recipe": "digits", "trials": [1], "experiment": [
    ...     {"technique": ["fine-tuning", "lr-rewinding"], "retrain-epochs": [4, 16], "density": 0.2}]}
    >>> plan(sweep, store="no-store", jobs=1).naive_epochs
    40.0
    """
    root = as_location("store", store)
    workers = worker_count(jobs, device)
    found, _ = as_sweep(sweep, root)
    planned = planning.plan(found.targets)
    for counts in parts_pruned(planned):
        counts.warn_of_small_part()
    return estimate(found.name, planned, Store(root, say) if is_store(root) else None, device, workers)


def run(
    sweep: AnySweep,
    *,
    store: str | Path = DEFAULT_STORE,
    jobs: int = 0,
    device: str = "cpu",
    on: str | Executor = "local",
    keep: str = "needed",
    retry_failed: bool = False,
    minutes: float | None = None,
    plain: bool = False,
    gpus_per_run: int = 1,
    fleet: int | None = None,
    say: Say = print,
    progress: Progress | None = None,
) -> SweepResults:
    """Run whatever of a sweep is not done yet, and give its rows, which are read from the store when they are used.

    `jobs` is the number of worker processes on this machine; 0 means one per core, and one on a GPU. `on` says where to
    run: the name of an executor, or one with its options. `keep`, the tensors to keep, is "needed" or "all". With
    `minutes` it stops after that time. The same call continues what was stopped so, or by Ctrl-C, which raises
    `KeyboardInterrupt` here; nothing that was finished is lost. With `gpus_per_run`, so many processes train each
    network together, every one on a GPU of its own. `fleet` is how many networks a worker trains side by side on a GPU,
    at most.

    `say` takes lines for a person. `progress` takes how many steps are done, and of how many; without it, `say` gets a
    line at the beginning and one every 30 seconds. Other processes import the recipe, so that one defined in a
    notebook or in the script itself runs with `jobs=1` only.
    """
    executor = executor_named(on) if isinstance(on, str) else on
    if not callable(executor):
        raise InputError(f"on must be the name of an executor, or one with its options, not {shown(on)}")
    engine = executor if isinstance(executor, Engine) else None
    if jobs and engine is not None:
        raise InputError(f"jobs is for processes of this machine; on a cluster give workers={jobs} instead")
    root, all_kept = as_location("store", store), keeps_all(keep)
    found, again = as_sweep(sweep, root)
    options = Options(
        jobs=worker_count(jobs, device, gpus_per_run),
        device=device,
        keep_all=all_kept,
        minutes=minutes,
        plain=plain,
        gpus_per_run=gpus_per_run,
        fleet=fleet,
        declaration=as_declared(found.name, found.table),
    )
    if gpus_per_run > 1 and launched() is not None:
        raise InputError(
            f"{gpus_per_run} GPUs per run: `rewound run` starts its processes itself, so leave out torchrun, or let it "
            "start `rewound work`"
        )
    here = executor is local.run  # another executor looks for device and data where it works
    planned = planning.plan(found.targets)
    if engine is not None and not is_store(root):
        engine.check(options)
    opened = local.opened(root, found.recipes, options, say) if here else Store(root, say)
    if retry_failed:
        results = opened.summaries(planned.by_key.keys())
        for key in [key for key, result in results if has_failed(result)]:
            opened.forget(key)
    for line in (*_renewed(found, planned, opened), *outdated(planned, opened, options if here else None)):
        say(line)
    for counts in parts_pruned(planned):
        counts.warn_of_small_part()
    show, steps = progress or progress_lines(found.name, say), planned.steps
    ended = 0

    def tick(headway: Headway) -> None:
        nonlocal ended
        ended = headway.nodes
        show(headway.steps, steps)

    try:
        executor(planned, opened, options, say=say, tick=tick)
    except KeyboardInterrupt as stop:
        stop.add_note("nothing finished is lost; the same call continues")
        raise
    is_waited_for = engine is None or engine.wait  # else others have just begun
    if ended < len(planned.nodes) and is_waited_for and (left := todo(planned, opened)):
        say(f"{len(left)} of {len(planned.nodes)} nodes are still to do; run it again to continue")
    return SweepResults(found, root, again, planned, say)


def work(
    sweep: AnySweep,
    *,
    store: str | Path = DEFAULT_STORE,
    device: str = "cpu",
    keep: str = "needed",
    minutes: float | None = None,
    plain: bool = False,
    gpus_per_run: int = 1,
    fleet: int | None = None,
    plan: str | None = None,
    say: Say = print,
    progress: Progress | None = None,
) -> bool:
    """Be one worker of a sweep: do nodes that nobody else is at, until all of them have ended, and return True.

    Any number of workers on any number of machines share the sweep by its store. SIGTERM, SIGUSR1 and Ctrl-C let a
    worker keep a draft of everything under way and return False; so does the end of `minutes`. `plan` is the digest of
    the plan that the worker is meant to have; it refuses another. The other options are those of `run`. Where torchrun
    has started `gpus_per_run` processes, the first is the worker, and the others take part in its training; they return
    True when it has ended, and whether work is left is for the first to say.
    """
    root, all_kept = as_location("store", store), keeps_all(keep)
    options = Options(
        device=device, keep_all=all_kept, minutes=minutes, plain=plain, gpus_per_run=gpus_per_run, fleet=fleet
    )
    stop = Stop(minutes)
    with stopped_by_signals(stop):
        if (share := launched()) is not None and gpus_per_run > 1 and share.number:
            follow_launched(share, options)
            return True
        if share is not None and gpus_per_run == 1 and "TORCHELASTIC_RUN_ID" in os.environ:
            raise InputError(
                f"torchrun has started {share.of} processes, and each would be a worker of its own on the same device; "
                f"give --gpus-per-run {share.of}, or leave out torchrun"
            )
        with leading_launched(options):
            found, _ = as_sweep(sweep, root)
            planned = planning.plan(found.targets)
            if plan is not None:
                check_plan(planned, plan)
            opened = local.opened(root, found.recipes, options, say)
            for line in (*_renewed(found, planned, opened), *outdated(planned, opened, options)):
                say(line)
            show, steps = progress or progress_lines(found.name, say), planned.steps
            return working.work(
                planned, opened, options, say=say, tick=lambda headway: show(headway.steps, steps), stop=stop
            )


def results(sweep: AnySweep, *, store: str | Path = DEFAULT_STORE, say: Say = print) -> SweepResults:
    """The rows of a sweep, as far as it has run; `say` takes a line where a file in the store is damaged."""
    root = as_location("store", store)
    return _collected(*as_sweep(sweep, root), root, say)


@collector_paused()
def report(
    sweep: AnySweep | None = None,
    *,
    store: str | Path = DEFAULT_STORE,
    results: str | Path | None = None,
    dense: str | Path | None = None,
    compare: str | Path | Sequence[str | Path] = (),
    out: str | Path | None = None,
    figures: str = "default",
    formats: Sequence[str] = ("png",),
    to: str | None = None,
    say: Say = print,
) -> Report:
    """Write tables, figures and a page for the browser, of a sweep or of a table of results.

    Instead of a sweep, `results` may be the file of a table, and `dense` one with its dense runs. `compare` is another
    table to compare with, in one file or several. `out` is the folder, `rewound-report/NAME` by default; `figures` is
    "default", "paper" (all of the paper's), "none", or the name of one, and `formats` are those of "png", "svg" and
    "pdf". With `to`, "tensorboard" or "mlflow", the runs are also written there. `say` takes a line for what the report
    leaves out.
    """
    check_subject(sweep, results, dense)
    check_kind("formats", formats, (str, list, tuple), "give those of png, svg and pdf that are wanted")
    check_kind("compare", compare, (str, Path, list, tuple), "give the path of a table, or leave it out")
    drawing = Drawing(figures, tuple([formats] if isinstance(formats, str) else formats))
    theirs = read_tables([compare] if isinstance(compare, str | Path) else compare)
    if results is not None:
        return report_tables(results, dense, out, theirs, drawing, say, to)
    assert sweep is not None  # as checked just above
    root = as_location("store", store)
    found, again = as_sweep(sweep, root)
    folder, tracked = report_folder(out, found.name), tracker_named(to) if to is not None else None
    made = report_results(_collected(found, again, root, say), folder, theirs, drawing, say)
    if tracked:
        say(tracked(found.name, made.evidence.tables, folder))
    return made


@collector_paused()
def report_results(
    gathered: SweepResults, folder: Path, theirs: Sequence[Row] = (), drawing: Drawing = DEFAULT, say: Say = print
) -> Report:
    """Write the report on a sweep's results into a folder."""
    sweep, tables = gathered.sweep, gathered.tables
    if tables.missing:
        say(f"{tables.missing} of {len(sweep.targets)} rows are not there yet")
    if sweep.joined:
        say(
            f"note: the levels of {', '.join(sweep.joined)} are more than one ladder of densities, joined into one "
            "curve here; declare a sweep for each to see them apart"
        )
    origin = origin_of(sweep, tables, gathered.store, gathered.again)
    size, *others = {recipe.test_size for recipe in sweep.recipes}
    return write_report(evidence_of(sweep, tables, theirs), folder, origin, drawing, say, None if others else size)


def evidence_of(sweep: Sweep, tables: Tables, theirs: Sequence[Row] = ()) -> Evidence:
    """What is concluded from a sweep's tables: a sweep knows how long its recipes train."""
    recipes = {target.task: target.recipe for target in sweep.targets}
    return Evidence(tables, theirs, {task: recipe.training_epochs for task, recipe in recipes.items()}, TEST_SHARES)


def origin_of(sweep: Sweep, tables: Tables, root: Location, again: str) -> Origin:
    """What a page says about where the tables of a sweep come from."""
    missing = f", {tables.missing:,} to come" if tables.missing else ""
    facts = (("Sweep", sweep.name), ("Rows", f"{len(tables.rows):,}{missing}"), *_computed_with(tables))
    return Origin(sweep.name, facts, again, shlex.join(["rewound", "show", *store_option(root)]))


def _renewed(sweep: Sweep, planned: planning.Plan, store: Store) -> list[str]:
    """A line if the sweep that last ran under this name was another one."""
    if not store.note_plan(sweep.name, digest_of_keys(planned)):
        return []
    return [
        f"note: the plan of {sweep.name} differs from the one that last ran in {store.name}: the sweep was changed, or "
        "two sweeps have this name; their results do not mix, and with --out their reports do not replace each other"
    ]


def _collected(sweep: Sweep, again: str, root: Location, say: Say) -> SweepResults:
    found = SweepResults(sweep, root, again, planning.plan(sweep.targets), say)
    if not found.tables.rows:
        raise not_run(sweep, root, again)
    return found


def as_sweep(given: AnySweep, root: Location) -> tuple[Sweep, str]:
    """The sweep that was given, and the command or the call that runs it in the store at `root`."""
    if isinstance(given, str | Path):
        declaration = declared(given)
        again = shlex.join(["rewound", "run", str(given), *store_option(root)])
        return parse_sweep(declaration.table, declaration.name), again
    again = f"rewound.run(sweep{f', store={str(root)!r}' if root != DEFAULT_STORE else ''})"
    if isinstance(given, Sweep):
        return given, again
    if isinstance(given, Mapping):
        return parse_sweep(as_table(given)), again
    raise InputError(
        f"a sweep is the path of a TOML file, the name of a shipped one, a dict or a Sweep, not {shown(given)}"
    )


def by_machine(results: Iterable[Summary], claims: Iterable[Claim]) -> list[tuple[str, int, float, int]]:
    """Each machine with the nodes that have ended there, the seconds they took, and the nodes that are under way."""
    nodes, seconds = Counter[str](), defaultdict[str, float](float)
    for result in results:
        host = result.get("host", "not known")
        nodes[host] += 1
        seconds[host] += result["seconds"]
    now = Counter(claim.host_name for claim in claims)
    return [(host, nodes[host], seconds[host], now[host]) for host in sorted(nodes.keys() | now.keys())]


def store_to_read(sweep: Sweep, root: Location, again: str, say: Say) -> Store:
    """The store of a sweep that has run; one that is not there is not made."""
    if not is_store(root):
        raise not_run(sweep, root, again)
    return Store(root, say)


def store_option(root: Location) -> list[str]:
    return [] if root == DEFAULT_STORE else ["--store", str(root)]


def worker_count(jobs: int, device: str, gpus_per_run: int = 1) -> int:
    """How many workers there are to be: on a GPU, one has a fleet of networks; several processes make one worker."""
    if as_whole("jobs", jobs) < 0:
        raise InputError(f"jobs must be at least 0, not {jobs}; 0 means one per core (one on a GPU)")
    return jobs or (1 if device_kind(device) == "cuda" or gpus_per_run > 1 else usable_cores())


def _computed_with(tables: Tables) -> list[tuple[str, str]]:
    """What the runs were computed with, as their results say; more than one value is counted."""
    names = {"source": "Source of the recipe", "torch": "PyTorch", "python": "Python", "device": "Device", "cpu": "CPU"}
    names["process count"] = "Processes per network"
    return [
        (
            names.get(name, name),
            ", ".join(f"{value} ({n} runs)" if len(counts) > 1 else value for value, n in counts.items()),
        )
        for name, counts in tables.made.items()
    ]
