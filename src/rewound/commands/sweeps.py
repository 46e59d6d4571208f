"""Commands on a sweep: `run`, `plan`, `report` and `pack`."""

import os
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from rewound.collection import collected
from rewound.commands.console import console, progress_bar, say_files
from rewound.comparison import compare
from rewound.drawing import DEFAULT, Drawing
from rewound.errors import InputError
from rewound.execution import todo
from rewound.executors import local
from rewound.outlook import estimate, outdated
from rewound.packing import pack_store
from rewound.planning import plan
from rewound.provenance import of_sweep
from rewound.report import show_comparison, show_tables, written_to
from rewound.results import Row
from rewound.store import Store
from rewound.sweep import Sweep, load_sweep


def run_sweep(
    name: str,
    store: Path,
    out: Path | None,
    *,
    jobs: int,
    device: str,
    on: str,
    keep: str,
    retry_failed: bool,
    minutes: float | None,
) -> None:
    """Run what is not done yet, then report."""
    if on != "local":
        raise InputError(f"unknown executor {on!r}; known: local")
    if keep not in ("needed", "all"):
        raise InputError(f"--keep is needed or all, not {keep!r}")
    sweep = load_sweep(name)
    work, place = plan(sweep.targets), Store(store)
    if retry_failed:
        for node in work.nodes:
            if (result := place.result(node.key)) and "failed" in result:
                place.forget(node.key)
    for line in outdated(work, place, device):
        console.print(line)
    workers = jobs or (1 if device != "cpu" else os.cpu_count() or 1)
    options = local.Options(workers, device, keep == "all", minutes)
    with progress_bar() as bar:
        task = bar.add_task(sweep.name, total=sum(node.steps for node in work.nodes))
        local.run(work, place, options, say=bar.console.print, tick=lambda p: bar.update(task, completed=p.steps))
    if left := todo(work, place):
        console.print(f"{len(left)} of {len(work.nodes)} nodes are still to do; the same command continues")
    if any(place.result(target.state.key) for target in sweep.targets):
        _report(sweep, place, out)


def plan_sweep(name: str, store: Path, device: str, jobs: int) -> None:
    """Print what a run would cost."""
    sweep = load_sweep(name)
    table = Table(title=f"plan of {sweep.name}", show_header=False, title_justify="left")
    for what, value in estimate(plan(sweep.targets), Store(store) if store.exists() else None, device, max(1, jobs)):
        table.add_row(what, value)
    console.print(table)


def report_sweep(name: str, store: Path, out: Path | None, theirs: Sequence[Row], drawing: Drawing) -> None:
    """Report on a sweep, as far as it has run."""
    _report(load_sweep(name), Store(store), out, theirs, drawing)


def pack_sweep(name: str, store: Path, out: Path, split_mb: int | None) -> None:
    """Bundle what is needed to continue elsewhere."""
    work, place = plan(load_sweep(name).targets), Store(store)
    for path in pack_store(work, place, out, split_mb * 2**20 if split_mb else None):
        console.print(f"{path} ({path.stat().st_size / 2**20:.1f} MiB)", soft_wrap=True)


def _report(
    sweep: Sweep, store: Store, out: Path | None, theirs: Sequence[Row] = (), drawing: Drawing = DEFAULT
) -> None:
    out = out or Path("rewound-report") / sweep.name
    tables = collected(sweep.targets, store)
    if not tables.rows:
        raise InputError(f"nothing of {sweep.name} has run yet in {store.root}; run it with: rewound run {sweep.name}")
    cards = compare(tables.rows, theirs) if theirs else []
    paths = tables.write(out)
    if tables.missing:
        console.print(f"{tables.missing} of {len(sweep.targets)} rows are not there yet")
    if all(row.dense for row in tables.rows):
        console.print("only dense networks so far: there are no techniques to compare yet")
    else:
        origin = written_to(paths[0], of_sweep(sweep, store, tables))
        epochs = {sweep.recipe.label(): sweep.recipe.training_epochs}
        images = sweep.recipe.test_size
        paths += show_tables(tables, out, console, origin, theirs, cards, drawing, epochs, images)
    say_files([*paths, *show_comparison(cards, tables.rows, out, console)])
