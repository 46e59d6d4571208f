"""The `rewound` command as tests give it: in this process or in one of its own, on sweeps and tables of a few lines."""

import io
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest
import typer.main

from rewound import cli
from rewound.commands.console import console
from rewound.foundations import names

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


def printed(folder: Path, *words: str) -> str:
    """What the command prints that runs in a folder, in this process: for work that several tests share."""
    with pytest.MonkeyPatch.context() as monkeypatch, redirect_stdout(io.StringIO()) as out:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(console, "width", 200)
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setattr(sys, "path", [*sys.path])  # a command that looks up a name adds the folder it runs in
        monkeypatch.setattr(names, "_FOLDER", None)
        monkeypatch.setattr(sys, "argv", ["rewound", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert not end.value.code, out.getvalue()
    return out.getvalue()


def snapshot(folder: Path) -> dict[Path, tuple[int, int]]:
    return {
        path: (path.stat().st_mtime_ns, path.stat().st_size)
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
