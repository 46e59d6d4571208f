"""Commands on a sweep: `run`, `plan` and `report`."""

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from rewound.commands.console import console, progress_of, say, say_files
from rewound.commands.stores import not_run, store_to_read
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.paper.networks import TEST_SHARES
from rewound.conclusions.tables import Row, Tables
from rewound.experiments.executors import executor_named
from rewound.experiments.executors.local import opened
from rewound.experiments.plans import planning
from rewound.experiments.plans.collection import collected, is_measured
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.outlook import estimate, outdated, parts_pruned
from rewound.experiments.plans.remaining import todo
from rewound.experiments.sweeps.declaration import Declaration
from rewound.experiments.sweeps.sweep import Sweep, parse_sweep
from rewound.foundations.errors import InputError
from rewound.reports.figures import DEFAULT, Drawing
from rewound.reports.page import Origin
from rewound.reports.writing import report_folder, show_comparison, show_tables, with_digest, write_tables
from rewound.states.storage.records import DEFAULT_STORE
from rewound.states.storage.store import Store, is_store
from rewound.tasks.devices import device_kind
from rewound.tasks.recipe import Metric


def run_sweep(
    declared: Declaration, root: Path, out: Path | None, options: Options, *, on: str, retry_failed: bool
) -> None:
    """Run what is not done yet, then report."""
    run = executor_named(on)
    folder = report_folder(out, declared.name)
    sweep = _sweep(declared)
    plan, store = planning.plan(sweep.targets), opened(root, sweep.recipes, options.device, say)
    if retry_failed:
        for node in plan.nodes:
            if (result := store.result(node.key)) and ("failed" in result or not is_measured(result)):
                store.forget(node.key)
    for line in outdated(plan, store, options):
        say(line)
    for counts in parts_pruned(plan):
        counts.warn_of_small_part()
    steps = sum(node.steps for node in plan.nodes)
    with progress_of(sweep.name) as show:
        run(plan, store, options, say=say, tick=lambda headway: show(headway.steps, steps))
    if left := todo(plan, store):
        say(f"{len(left)} of {len(plan.nodes)} nodes are still to do; the same command continues")
    if any(store.result(target.state.key) for target in sweep.targets):
        _report(declared, sweep, store, folder)


def plan_sweep(declared: Declaration, root: Path, device: str, jobs: int) -> None:
    """Print what a run would cost."""
    jobs = workers(jobs, device)
    plan, store = planning.plan(_sweep(declared).targets), Store(root, say) if is_store(root) else None
    for counts in parts_pruned(plan):
        counts.warn_of_small_part()
    table = Table(title=f"plan of {declared.name}", show_header=False, title_justify="left")
    for what, value in estimate(plan, store, device, jobs):
        table.add_row(what, value)
    console.print(table)


def report_sweep(declared: Declaration, root: Path, out: Path | None, theirs: Sequence[Row], drawing: Drawing) -> None:
    """Report on a sweep, as far as it has run."""
    folder = report_folder(out, declared.name)
    _report(declared, _sweep(declared), store_to_read(declared, root), folder, theirs, drawing)


def _sweep(declared: Declaration) -> Sweep:
    return parse_sweep(declared.table, declared.name)


def workers(jobs: int, device: str) -> int:
    """How many there are to be: on a GPU, one has a fleet of networks."""
    if jobs < 0:
        raise InputError(f"--jobs must be at least 0, not {jobs}; 0 means one per core (one on a GPU)")
    return jobs or (1 if device_kind(device) == "cuda" else os.cpu_count() or 1)


def _report(
    declared: Declaration,
    sweep: Sweep,
    store: Store,
    out: Path,
    theirs: Sequence[Row] = (),
    drawing: Drawing = DEFAULT,
) -> None:
    tables = collected(sweep.targets, store)
    if not tables.rows:
        raise not_run(declared, store.root)
    recipes = {target.task: target.recipe for target in sweep.targets}
    epochs = {task: recipe.training_epochs for task, recipe in recipes.items()}
    named = {task: recipe.metric.name for task, recipe in recipes.items() if recipe.metric != Metric()}
    evidence = Evidence(tables, theirs, epochs, TEST_SHARES, named)
    paths = write_tables(evidence, out, drawing)
    if tables.missing:
        console.print(f"{tables.missing} of {len(sweep.targets)} rows are not there yet")
    if sweep.joined:
        console.print(
            f"note: the levels of {', '.join(sweep.joined)} are more than one ladder of densities, joined into one "
            "curve here; declare a sweep for each to see them apart"
        )
    lower = [recipe.metric.name for recipe in sweep.recipes if not recipe.metric.higher_is_better]
    if evidence.only_dense or not lower:
        origin = with_digest(paths[0], _origin(declared, store, tables))
        size, *others = {recipe.test_size for recipe in sweep.recipes}
        paths += show_tables(evidence, out, console, origin, drawing, None if others else size)
    else:
        console.print(
            f"wrote tables only: a lower {lower[0]} is better, and a report needs a metric where higher is better; "
            "for figures and a page, return one from evaluate, such as accuracy"
        )
    say_files([*paths, *show_comparison(evidence, out, console)])


def _origin(declared: Declaration, store: Store, tables: Tables) -> Origin:
    """The origin of a sweep's tables."""
    where = [] if store.root == DEFAULT_STORE else ["--store", str(store.root)]
    missing = f", {tables.missing:,} to come" if tables.missing else ""
    facts = (("Sweep", declared.name), ("Rows", f"{len(tables.rows):,}{missing}"), *_computed_with(tables.rows, store))
    again, show = shlex.join(["rewound", "run", declared.word, *where]), shlex.join(["rewound", "show", *where])
    return Origin(declared.name, facts, again, show)


def _computed_with(rows: list[Row], store: Store) -> list[tuple[str, str]]:
    """What the runs were computed with, as their results say; more than one value is counted."""
    seen: dict[str, Counter[str]] = {}
    for key in dict.fromkeys(row.key for row in rows):
        result = store.result(key)
        for name, value in result["made"].items() if result else ():
            seen.setdefault(name, Counter())[value] += 1
    names = {"source": "Source of the recipe", "torch": "PyTorch", "python": "Python", "device": "Device", "cpu": "CPU"}
    return [
        (
            names.get(name, name),
            ", ".join(f"{value} ({n} runs)" if len(counts) > 1 else value for value, n in counts.items()),
        )
        for name, counts in seen.items()
    ]
