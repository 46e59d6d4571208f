"""The command line: the functions users import, with words for arguments.

What a command does is in `commands/*`, imported when it runs: help, tables and misspelt sweeps need no torch.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from rewound import __version__
from rewound.cli import networks, stores, sweeps
from rewound.commands.console import console, exits
from rewound.foundations.names import look_in

_COMMANDS: Final[dict[str, Callable[..., None]]] = {
    "run digits --jobs 2": sweeps.run_command,
    "work digits --store s3://bucket/runs": sweeps.work_command,
    "plan cifar10-resnet20-grid": sweeps.plan_command,
    "report digits --out report/": sweeps.report_command,
    "diff results.csv published-pruned.csv.gz published-dense.csv.gz": sweeps.diff_command,
    "prune digits --compression 10 --field epochs=8": networks.prune_command,
    "show digits": stores.show_command,
    "watch digits": sweeps.watch_command,
    "gc digits --dry-run": stores.gc_command,
    "verify digits --repair": stores.verify_command,
    "inspect rewound-pruned/digits/ticket.safetensors": networks.inspect_command,
    "bench rewound-pruned/digits --batch 64 --threads 1": networks.bench_command,
    "export rewound-pruned/digits --to onnx --out digits.onnx": networks.export_command,
    "data cifar10 --from cifar-10-python.tar.gz": sweeps.data_command,
    "pack cifar10-resnet20-algorithm1 --out run.pack --split-mb 16": stores.pack_command,
    "unpack run.pack.000 run.pack.001": stores.unpack_command,
}
"""All commands, in the order of the help, each under an example that its own help ends with."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Prune neural networks and get their accuracy back.",
    epilog="Example: rewound run digits",
)
for _example, _command in _COMMANDS.items():
    app.command(_example.split()[0], epilog=f"Example: rewound {_example}")(_command)


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
