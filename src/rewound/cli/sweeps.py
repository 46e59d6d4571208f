"""Commands on sweeps: `run`, `work`, `plan`, `report` and `watch`; on their data (`data`) and their results (`diff`).

Arguments that other commands have in common with these are declared here, too.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from rewound.commands.console import console, print_report, progress_of, say, two_columns
from rewound.commands.tables import check_subject, compared, read_tables, report_tables
from rewound.experiments.sweeps.declaration import declared
from rewound.foundations.owners import torch_log_held
from rewound.reports.figures import Drawing
from rewound.reports.live import HOST, PORT
from rewound.reports.writing import comparison_cards, report_folder
from rewound.states.storage.artifacts import DEFAULT_STORE
from rewound.states.storage.backend import Location, as_location
from rewound.tasks.datasets import DATA_SETS


def _store(given: str) -> Location:
    return as_location("--store", given)


SweepName = Annotated[str, typer.Argument(help="a TOML file, or the name of a shipped sweep such as digits")]
StoreLocation = Annotated[
    str,
    typer.Option("--store", help="the folder or bucket (s3://bucket/prefix) that holds all results", callback=_store),
]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Jobs = Annotated[int, typer.Option(help="worker processes; 0 means one per core (one on a GPU)")]
FleetSize = Annotated[
    int | None,
    typer.Option("--fleet", help="on a GPU: networks that a worker trains side by side", show_default="up to 12"),
]
GpusPerRun = Annotated[int, typer.Option(help="GPUs that train one network together, each by a process of its own")]
Keep = Annotated[str, typer.Option(help="tensors to keep: needed, or all")]


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
    with torch_log_held(gpus_per_run > 1):
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
    with torch_log_held(gpus_per_run > 1 and "WORLD_SIZE" not in os.environ):  # what torchrun starts logs as it says
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


def diff_command(
    ours: Annotated[Path, typer.Argument(help="a results table")],
    theirs: Annotated[list[Path], typer.Argument(help="the table to compare with, in one file or several")],
    every_cell: Annotated[bool, typer.Option("--all", help="list every cell, not only those that differ")] = False,
) -> None:
    """Compare two results tables cell by cell: is one a replica of the other?"""
    console.print(comparison_cards(compared(ours, theirs), every_cell=every_cell))


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


def data_command(
    name: Annotated[str, typer.Argument(help=f"a data set: {', '.join(DATA_SETS)}")],
    source: Annotated[Path | None, typer.Option("--from", help="an archive or folder you have")] = None,
    per_class: Annotated[
        int | None, typer.Option(help="of images, only so many of each class, to try things out")
    ] = None,
) -> None:
    """Prepare a data set in the cache from a copy at hand.

    The cache is the folder that REWOUND_CACHE names, or else ~/.cache/rewound. What was prepared can be copied into the
    cache of another machine.
    """
    from rewound.tasks.datasets import prepare

    prepare(name, source, say, per_class)
