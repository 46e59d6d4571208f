"""SECURITY.md: every promise names a test that is there, and what no other file tests of files from elsewhere."""

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rewound
from command_line import Rewound, row
from rewound.commands.named import named_network
from rewound.foundations.errors import InputError
from rewound.states.storage.store import Store
from stored import KEY, RESULT

TESTS = Path(__file__).parent
POLICY = (TESTS.parent / "SECURITY.md").read_text()
ROWS = [line for line in POLICY.splitlines() if line.startswith("| ") and not line.startswith("| promise")]


def test_every_promise_names_a_test_that_is_there() -> None:
    defined = {name for path in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    named = [re.findall(r"`(test_\w+)`", line.rpartition(" | ")[2]) for line in ROWS]
    assert len(named) > 20
    assert all(named), "a promise without a test"
    assert {name for names in named for name in names} <= defined


PLANTED = "raise SystemExit('a module of a folder from elsewhere was imported')"


@pytest.mark.parametrize("command", ["diff", "report", "inspect", "show", "verify", "gc", "unpack", "bench"])
def test_no_module_beside_a_file_is_imported(command: str, rewound_command: Rewound) -> None:
    """A package that is not installed could otherwise be taken from a folder that came with the file."""
    Path("not_installed.py").write_text(PLANTED)
    Path("x.csv").write_text(row())
    Store(Path("rewound-store")).publish(KEY, RESULT)
    rewound.save(torch.nn.Linear(2, 2), rewound.Mask({}), "x.safetensors", {"recipe": "not_installed:Task"})
    words: dict[str, tuple[str, ...]] = {
        "diff": ("x.csv", "x.csv"),
        "report": ("--results", "x.csv", "--out", "out", "--figures", "none"),
        "unpack": ("x.csv",),
        **dict.fromkeys(("inspect", "bench"), ("x.safetensors",)),
    }
    code, _, err = rewound_command(command, *words.get(command, ()))
    assert (code, err) == (0, "") or err.startswith("error: ")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("not_installed")


def test_a_recipe_that_a_store_names_is_not_imported(tmp_path: Path) -> None:
    Store(tmp_path).publish(KEY, {**RESULT, "recipe": "this:Task", "history": ["start this:Task seed 1"]})
    with pytest.raises(InputError, match="made by recipe this:Task, which cannot be built from what the store says"):
        named_network(KEY, store=tmp_path)
    assert "this" not in sys.modules


DEEP: dict[str, Callable[[str], str]] = {
    "x.toml": lambda nested: f"recipe = {nested}",
    "x.json": lambda nested: f'{{"recipe": {nested}}}',
}


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("depth", [100, 100_000])
def test_a_sweep_that_nests_deeply_is_one_sentence(name: str, depth: int, rewound_command: Rewound) -> None:
    Path(name).write_text(DEEP[name]("[" * depth + "]" * depth))
    code, out, err = rewound_command("plan", name)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_summary_that_nests_deeply_is_one_sentence(rewound_command: Rewound) -> None:
    Path("out").mkdir()
    Path("out/summary.json").write_text(json.dumps({"x": 1})[:-2] + "[" * 100_000 + "]" * 100_000 + "}")
    code, _, err = rewound_command("prune", "digits", "--compression", 2, "--out", "out")
    assert (code, err.count("\n")) == (2, 1)
    assert "a summary.json that cannot be read" in err
