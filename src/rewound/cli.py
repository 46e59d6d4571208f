"""The command line: the functions users import, with words for arguments.

What a command does is in `commands/*`, imported when it runs: help, tables and misspelt sweeps need no torch.
"""

import re
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rewound import __version__
from rewound.commands.console import console, exits, print_report, progress_of, say, two_columns
from rewound.commands.tables import check_subject, compared, read_tables, report_tables
from rewound.experiments.sweeps.declaration import declared
from rewound.foundations.errors import InputError
from rewound.foundations.names import look_in
from rewound.method.choices import HELP, Choices
from rewound.reports.figures import Drawing
from rewound.reports.live import HOST, PORT
from rewound.reports.writing import comparison_cards, report_folder
from rewound.states.storage.artifacts import DEFAULT_STORE
from rewound.states.storage.backend import Location, as_location
from rewound.tasks.datasets import DATA_SETS
from rewound.tasks.hyperparameters import fields_in

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Prune neural networks and get their accuracy back.",
    epilog="Example: rewound run digits",
)


def _store(given: str) -> Location:
    return as_location("--store", given)


SweepName = Annotated[str, typer.Argument(help="a TOML file, or the name of a shipped sweep such as digits")]
StoreLocation = Annotated[
    str,
    typer.Option("--store", help="the folder or bucket (s3://bucket/prefix) that holds all results", callback=_store),
]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Jobs = Annotated[int, typer.Option(help="worker processes; 0 means one per core (one on a GPU)")]
Fields = Annotated[list[str] | None, typer.Option("--field", help="a field of the recipe, e.g. epochs=8; repeatable")]
FleetSize = Annotated[
    int | None,
    typer.Option("--fleet", help="on a GPU: networks that a worker trains side by side", show_default="up to 12"),
]
GpusPerRun = Annotated[int, typer.Option(help="GPUs that train one network together, each by a process of its own")]
Keep = Annotated[str, typer.Option(help="tensors to keep: needed, or all")]


@app.command("run", epilog="Example: rewound run digits --jobs 2")
def run_command(
    sweep: SweepName,
    store: StoreLocation = str(DEFAULT_STORE),
    jobs: Jobs = 0,
    device: Device = "cpu",
    on: Annotated[str, typer.Option(help="where to run: local, ray, slurm, or package.module:name")] = "local",
    workers: Annotated[
        int | None,
        typer.Option(help="on Ray and Slurm: number of workers", show_default="Ray: one per CPU or GPU; Slurm: 4"),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="on Ray: host:port of the cluster, or auto", show_default="RAY_ADDRESS, else a new one on this machine"
        ),
    ] = None,
    per_gpu: Annotated[
        int | None, typer.Option(help="on Ray, with --device cuda: workers on each GPU", show_default="1")
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="on Slurm: time limit of a worker, e.g. 90 (minutes) or 4:00:00")
    ] = None,
    sbatch: Annotated[str | None, typer.Option(help="on Slurm: more options of sbatch, in quotes")] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="on Slurm: return once workers are in the queue")] = False,
    keep: Keep = "needed",
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="run failed nodes again")] = False,
    minutes: Annotated[float | None, typer.Option(help="stop after this time; the same command continues")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="on a GPU: no CUDA graphs, nothing compiled")] = False,
    gpus_per_run: GpusPerRun = 1,
    fleet: FleetSize = None,
    out: Annotated[Path | None, typer.Option(help="folder for tables, figures and the page")] = None,
) -> None:
    """Run whatever of a sweep is not done yet, then report."""
    name = declared(sweep).name  # a misspelt one is refused before torch is imported
    folder = report_folder(out, name)
    from rewound.commands.sweeps import report_results, run
    from rewound.experiments.executors import executor_named

    executor = executor_named(
        on,
        workers=workers,
        address=address,
        per_gpu=per_gpu,
        time=time,
        sbatch=sbatch,
        wait=False if no_wait else None,
    )
    with progress_of(name) as progress:
        results = run(
            sweep,
            store=store,
            jobs=jobs,
            device=device,
            on=executor,
            keep=keep,
            retry_failed=retry_failed,
            minutes=minutes,
            plain=plain,
            gpus_per_run=gpus_per_run,
            fleet=fleet,
            say=say,
            progress=progress,
        )
    if results.rows:
        print_report(report_results(results, folder, say=say))


@app.command("work", epilog="Example: rewound work digits --store s3://bucket/runs")
def work_command(
    sweep: SweepName,
    store: StoreLocation = str(DEFAULT_STORE),
    device: Device = "cpu",
    keep: Keep = "needed",
    minutes: Annotated[float | None, typer.Option(help="stop after this time, with drafts")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="on a GPU: no CUDA graphs, nothing compiled")] = False,
    gpus_per_run: GpusPerRun = 1,
    fleet: FleetSize = None,
    plan: Annotated[
        str | None,
        typer.Option(help="digest that the plan must have; drivers pass it to their workers", show_default="any plan"),
    ] = None,
) -> None:
    """Be one worker of a sweep, beside any number of others on any machines that use the same store.

    SIGTERM, SIGUSR1 and Ctrl-C let it keep a draft of everything under way and end. The exit code is 0 when every node
    has ended, and 75 when work is left: start it again.
    """
    declared(sweep)
    from rewound.commands.sweeps import work
    from rewound.experiments.executors.working import STOPPED

    if not work(
        sweep,
        store=store,
        device=device,
        keep=keep,
        minutes=minutes,
        plain=plain,
        gpus_per_run=gpus_per_run,
        fleet=fleet,
        plan=plan,
        say=say,
    ):
        say(f"stopped before the end, with drafts of what was under way (exit code {STOPPED}); start it again to go on")
        raise typer.Exit(STOPPED)


@app.command("plan", epilog="Example: rewound plan cifar10-resnet20-grid")
def plan_command(
    sweep: SweepName,
    store: StoreLocation = str(DEFAULT_STORE),
    device: Device = "cpu",
    jobs: Jobs = 0,
) -> None:
    """Show what would run, and what it would cost; runs nothing and needs no data."""
    declared(sweep)
    from rewound.commands.sweeps import plan

    planned = plan(sweep, store=store, jobs=jobs, device=device, say=say)
    console.print(two_columns(f"plan of {planned.name}", planned.lines))


@app.command("report", epilog="Example: rewound report digits --out report/")
def report_command(
    sweep: Annotated[str | None, typer.Argument(help="a sweep; or give --results")] = None,
    store: StoreLocation = str(DEFAULT_STORE),
    results: Annotated[Path | None, typer.Option(help="a results table to report on, instead of a sweep")] = None,
    dense: Annotated[Path | None, typer.Option(help="a table with the dense runs of --results")] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(help="another results table to compare with; repeat it for a table in several files"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder for tables, figures and the page")] = None,
    figures: Annotated[str, typer.Option(help="default, paper (all of the paper's), none, or one by name")] = "default",
    formats: Annotated[str, typer.Option(help="of figures: png, svg and pdf, with commas between")] = "png",
    to: Annotated[
        str | None, typer.Option(help="also write every run to tensorboard, or to mlflow (MLFLOW_TRACKING_URI)")
    ] = None,
) -> None:
    """Make tables, figures and a page for the browser of a sweep or of a results table."""
    check_subject(sweep, results, dense)
    names, theirs = tuple(name.strip() for name in formats.split(",")), tuple(compare or ())
    if results is not None:
        print_report(report_tables(results, dense, out, read_tables(theirs), Drawing(figures, names), say, to))
    elif sweep is not None:
        declared(sweep)
        from rewound.commands.sweeps import report

        made = report(sweep, store=store, compare=theirs, out=out, figures=figures, formats=names, to=to, say=say)
        print_report(made)


@app.command("diff", epilog="Example: rewound diff results.csv published-pruned.csv.gz published-dense.csv.gz")
def diff_command(
    ours: Annotated[Path, typer.Argument(help="a results table")],
    theirs: Annotated[list[Path], typer.Argument(help="the table to compare with, in one file or several")],
    every_cell: Annotated[bool, typer.Option("--all", help="list every cell, not only those that differ")] = False,
) -> None:
    """Compare two results tables cell by cell: is one a replica of the other?"""
    console.print(comparison_cards(compared(ours, theirs), every_cell=every_cell))


@app.command("prune", epilog="Example: rewound prune digits --compression 10 --field epochs=8")
def prune_command(
    recipe: Annotated[str, typer.Argument(help="a recipe such as digits, or package.module:Class")],
    fields: Fields = None,
    compression: Annotated[float, typer.Option(help=HELP["compression"])] = Choices.compression,
    technique: Annotated[str, typer.Option(help=HELP["technique"])] = Choices.technique,
    retrain_epochs: Annotated[
        float | None,
        typer.Option(
            help="epochs per level", show_default="the full training time; 0.9 of it where weights are rewound"
        ),
    ] = None,
    rate: Annotated[float, typer.Option(help=HELP["rate"])] = Choices.rate,
    one_shot: Annotated[bool, typer.Option("--one-shot", help=HELP["one_shot"])] = Choices.one_shot,
    score: Annotated[
        str,
        typer.Option(
            help="what to rank by: magnitude (l1), l2, random, taylor, package.module:name; units: bn-scale, activation"
        ),
    ] = "magnitude",
    scope: Annotated[str, typer.Option(help="what to rank together: global, layer, or package.module:name")] = "global",
    pattern: Annotated[
        str, typer.Option(help="what is pruned as one: weight, unit, filter, 2:4, 'block 4x4', or package.module:name")
    ] = "weight",
    only: Annotated[
        list[str] | None, typer.Option(help="prune only these weights, e.g. 'encoder.*'; repeatable")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(help="never prune these weights; repeatable")] = None,
    floor: Annotated[float, typer.Option(help="minimum fraction kept in each tensor, or group of units")] = 0.0,
    preset: Annotated[
        str, typer.Option(help="the paper's filters in place of all of these: structured-a or structured-b")
    ] = "",
    k: Annotated[int, typer.Option(help="how much the preset prunes, 1 to 5")] = 0,
    round_to: Annotated[int, typer.Option(help="keep a multiple of so many units of each group")] = 1,
    min_units: Annotated[int, typer.Option(help="keep so many units of each group at least")] = 1,
    rates: Annotated[
        list[str] | None,
        typer.Option(help="prune this fraction of each of these weights, e.g. 'stage1.*=0.3'; repeatable"),
    ] = None,
    of: Annotated[str, typer.Option(help="what compression is of: weights, or flops where units go")] = "weights",
    batches: Annotated[int, typer.Option(help="how many batches the scores taylor and activation are measured on")] = 8,
    slim: Annotated[bool, typer.Option("--slim", help=HELP["slim"])] = Choices.slim,
    max_drop: Annotated[float | None, typer.Option(help=HELP["max_drop"])] = Choices.max_drop,
    final: Annotated[float | None, typer.Option(help=HELP["final"])] = Choices.final,
    seed: Annotated[int, typer.Option(help="the seed of the trial")] = 1,
    device: Device = "cpu",
    store: StoreLocation = str(DEFAULT_STORE),
    keep: Annotated[
        str, typer.Option(help="tensors to keep: needed (a larger compression goes on from them), or all")
    ] = "needed",
    out: Annotated[
        Path | None,
        typer.Option(
            help="folder for the pruned network, with a ticket of every level in levels/",
            show_default="rewound-pruned/RECIPE",
        ),
    ] = None,
) -> None:
    """Train a network and prune it: the paper's Algorithm 1 (20% a level, LR rewinding, full time) by default."""
    from rewound.commands.networks import prune_network
    from rewound.experiments.compression import prune
    from rewound.method.pruner import Pruner
    from rewound.method.pruning.settings import rates_in
    from rewound.tasks.recipes import recipe_named

    pruned = partial(
        prune,
        recipe_named(recipe).with_fields(fields_in(fields or ())),
        compression=compression,
        technique=technique,
        retrain_epochs=retrain_epochs,
        rate=rate,
        one_shot=one_shot,
        pruner=Pruner(
            score=score,
            scope=scope,
            pattern=pattern,
            only=tuple(only or ()),
            skip=tuple(skip or ()),
            floor=floor,
            preset=preset,
            k=k,
            round_to=round_to,
            min_units=min_units,
            rates=rates_in(rates or ()),
            of=of,
            batches=batches,
        ),
        slim=slim,
        max_drop=max_drop,
        final=final,
        seed=seed,
        device=device,
        store=store,
        keep=keep,
    )
    prune_network(recipe, pruned, out)


@app.command("show", epilog="Example: rewound show digits")
def show_command(
    word: Annotated[
        str | None, typer.Argument(help="a sweep; or the key of a state, or its first digits: letters a to f, digits")
    ] = None,
    store: StoreLocation = str(DEFAULT_STORE),
) -> None:
    """Show what is in the store, how far a sweep is and who works on it, or everything known about one state."""
    if word is not None and not re.fullmatch("[0-9a-f]{1,32}", word):
        declared(word)
    from rewound.commands.stores import show_store

    show_store(store, word)


@app.command("watch", epilog="Example: rewound watch digits")
def watch_command(
    sweep: SweepName,
    store: StoreLocation = str(DEFAULT_STORE),
    port: Annotated[int, typer.Option(help="of the page; 0 is any that is free")] = PORT,
    host: Annotated[str, typer.Option(help="the address to listen at; the default is for this machine alone")] = HOST,
) -> None:
    """Serve the report's page while a sweep runs: progress, who works on what, failures, and results as they arrive.

    It only reads the store, and may be started before the sweep, on any machine that reaches the store.
    """
    declared(sweep)
    from rewound.commands.watching import watch_sweep

    watch_sweep(sweep, store, host, port)


@app.command("gc", epilog="Example: rewound gc digits --dry-run")
def gc_command(
    sweeps: Annotated[
        list[str] | None, typer.Argument(help="the sweeps that will go on in the store: TOML files or names")
    ] = None,
    store: StoreLocation = str(DEFAULT_STORE),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only show what would be removed")] = False,
    even_if_for_good: Annotated[
        bool, typer.Option("--all", help="also tensors that --keep all and rewound prune have kept")
    ] = False,
) -> None:
    """Remove drafts and tensors that none of the named sweeps needs, and claims of dead workers; results stay.

    Without a name, only claims of dead workers and half-written files are removed.
    """
    for sweep in sweeps or ():
        declared(sweep)
    from rewound.commands.stores import collect_garbage

    collect_garbage(store, sweeps or (), dry_run=dry_run, even_if_for_good=even_if_for_good)


@app.command("verify", epilog="Example: rewound verify digits --repair")
def verify_command(
    sweeps: Annotated[
        list[str] | None, typer.Argument(help="the sweeps to repair the store for: TOML files or names")
    ] = None,
    store: StoreLocation = str(DEFAULT_STORE),
    repair: Annotated[
        bool, typer.Option("--repair", help="set damaged files aside, and compute again what the sweeps have of them")
    ] = False,
    device: Device = "cpu",
    jobs: Jobs = 0,
) -> None:
    """Check every result, state and draft in the store against its checksum; the exit code is 1 if some are damaged."""
    for sweep in sweeps or ():
        declared(sweep)
    from rewound.commands.stores import verify_store

    verify_store(store, sweeps or (), repair=repair, device=device, jobs=jobs)


@app.command("inspect", epilog="Example: rewound inspect rewound-pruned/digits/ticket.safetensors")
def inspect_command(
    file: Annotated[Path, typer.Argument(help="a ticket, as rewound prune and rewound.save write it")],
    recipe: Annotated[
        str | None,
        typer.Option(help="the recipe to count FLOPs with, or package.module:Class", show_default="the ticket's"),
    ] = None,
    fields: Fields = None,
) -> None:
    """Show what a ticket holds: its layers, and what was said about it."""
    if fields and recipe is None:
        raise InputError(f"--field {fields[0]} goes with --recipe, the recipe that has the field; give both")
    from rewound.commands.networks import inspect_ticket

    inspect_ticket(file, recipe, fields_in(fields or ()))


Network = Annotated[
    str,
    typer.Argument(help="a recipe such as digits, a ticket, or the first digits of a key in the store"),
]
ItsRecipe = Annotated[
    str | None,
    typer.Option(
        help="the recipe that builds the network, or package.module:Class", show_default="what the file names"
    ),
]
ItsModel = Annotated[
    str | None,
    typer.Option("--model", help="package.module:name of what makes the network of a ticket that names no recipe"),
]


@app.command("bench", epilog="Example: rewound bench rewound-pruned/digits --batch 64 --threads 1")
def bench_command(
    network: Network,
    batch: Annotated[int, typer.Option(help="examples of a forward pass")] = 64,
    threads: Annotated[
        int | None, typer.Option(help="threads on the CPU", show_default="as many as torch takes")
    ] = None,
    device: Device = "cpu",
    backend: Annotated[
        str, typer.Option(help="eager, compiled (torch.compile) and onnx (ONNX Runtime), with commas between")
    ] = "eager,compiled",
    seconds: Annotated[float, typer.Option(help="about how long each backend is measured, after a warm-up")] = 10.0,
    recipe: ItsRecipe = None,
    fields: Fields = None,
    model: ItsModel = None,
    store: StoreLocation = str(DEFAULT_STORE),
) -> None:
    """Measure a network: dense beside pruned, beside slim where whole units were pruned."""
    from rewound.commands.timing import bench

    found = bench(
        network,
        batch=batch,
        threads=threads,
        device=device,
        backend=backend,
        seconds=seconds,
        recipe=recipe,
        fields=fields_in(fields or ()),
        model=model,
        store=store,
        say=say,
    )
    for line in str(found).splitlines():
        say(line)


@app.command("export", epilog="Example: rewound export rewound-pruned/digits --to onnx --out digits.onnx")
def export_command(
    network: Network,
    out: Annotated[Path, typer.Option(help="the file to write")],
    to: Annotated[
        str | None,
        typer.Option(help="the format: onnx, torch-export or safetensors", show_default="by the ending of the file"),
    ] = None,
    slim: Annotated[bool, typer.Option("--slim", help="leave out the units that the mask removes")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the file if it exists")] = False,
    recipe: ItsRecipe = None,
    fields: Fields = None,
    model: ItsModel = None,
    store: StoreLocation = str(DEFAULT_STORE),
) -> None:
    """Write a network for another runtime; the file is loaded again, run and compared."""
    from rewound.commands.exporting import export

    made = export(
        network,
        out,
        to=to,
        slim=slim,
        overwrite=overwrite,
        recipe=recipe,
        fields=fields_in(fields or ()),
        model=model,
        store=store,
        say=say,
    )
    say(str(made))


@app.command("data", epilog="Example: rewound data cifar10 --from cifar-10-python.tar.gz")
def data_command(
    name: Annotated[str, typer.Argument(help=f"a data set: {', '.join(DATA_SETS)}")],
    source: Annotated[Path | None, typer.Option("--from", help="an archive or folder you have")] = None,
    per_class: Annotated[
        int | None, typer.Option(help="of images, only so many of each class, to try things out")
    ] = None,
) -> None:
    """Prepare a data set in the cache from a copy at hand."""
    from rewound.tasks.datasets import prepare

    prepare(name, source, say, per_class)


@app.command("pack", epilog="Example: rewound pack cifar10-resnet20-algorithm1 --out run.pack --split-mb 16")
def pack_command(
    sweep: SweepName,
    out: Annotated[Path, typer.Option(help="the file to write; pieces get a number appended")],
    store: StoreLocation = str(DEFAULT_STORE),
    split_mb: Annotated[int | None, typer.Option(help="largest size of a piece in MiB")] = None,
) -> None:
    """Bundle what is needed to continue a sweep on another machine."""
    declared(sweep)
    from rewound.commands.stores import pack_sweep

    pack_sweep(sweep, store, out, split_mb)


@app.command("unpack", epilog="Example: rewound unpack run.pack.000 run.pack.001")
def unpack_command(
    files: Annotated[list[Path], typer.Argument(help="packs, whole or in pieces")],
    store: StoreLocation = str(DEFAULT_STORE),
) -> None:
    """Merge packs into the store; no measured result in it is overwritten."""
    from rewound.commands.stores import unpack_files

    unpack_files(files, store)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="print the version", is_eager=True)] = False) -> None:
    if version:
        console.print(f"rewound {__version__}")
        raise typer.Exit


def main() -> None:
    """The `rewound` command."""
    look_in(Path.cwd())  # where `mine:Technique` is found
    with exits():
        sys.exit(app(prog_name="rewound", standalone_mode=False))
