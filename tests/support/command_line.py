"""The `rewound` command as tests give it: in this process or in one of its own, on sweeps and tables of a few lines."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import typer.main

from rewound import cli

APP = typer.main.get_command(cli.app)
COMMANDS = APP.commands  # type: ignore[attr-defined]
SWEEP = """
recipe = "tiny:Tiny"
trials = [1]

[[experiment]]
technique = ["lr-rewinding", "fine-tuning"]
retrain-epochs = [1, 2]
density = 0.5
"""
DIGITS_SWEEP = """
recipe = "digits"
trials = [1, 2]

[recipe-fields]
epochs = 1.0

[[experiment]]
technique = ["fine-tuning", "lr-rewinding", "reinitialization"]
retrain-epochs = [0.25, 1]
density = [0.5, 0.1]

[[experiment]]
technique = ["fine-tuning", "lr-rewinding"]
retrain-epochs = 1
levels = { keep = 0.5, count = 2 }
"""
HEADER = "recipe,pruning,iterative,technique,density,retrain_epochs,trial,val,test,flops"


def row(t: float = 4, test: object = 0.9) -> str:
    return f"{HEADER}\na,unstructured,0,fine-tuning,0.5,{t},1,{test},{test},\n"


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Rewound = Callable[..., Outcome]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "rewound", *words]


def environment() -> dict[str, str]:
    paths = [str(Path(__file__).parent), *sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MPLBACKEND": "agg", "NO_COLOR": "1", "COLUMNS": "200"}


def snapshot(folder: Path) -> dict[Path, tuple[int, int]]:
    return {
        path: (path.stat().st_mtime_ns, path.stat().st_size)
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
