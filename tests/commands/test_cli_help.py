"""The command line by itself: help with an example for every command, and no torch where none is needed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rewound
from command_line import APP, COMMANDS, Rewound, command, environment, row


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(rewound_command: Rewound, name: str) -> None:
    code, out, err = rewound_command(name, "--help")
    assert (code, err) == (0, "")
    example = re.search(rf"Example: (rewound {name} .*)", out)
    assert example, "no example"
    for option in re.findall(r"--[a-z-]+", example[1]):
        assert option in out.replace(example[0], ""), "the example uses an option that is not there"


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_is_printed_as_it_was_written(
    rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """To rich, `[default: 4]` in a text is a tag, and nothing of it is printed."""
    monkeypatch.setenv("COLUMNS", "1000")
    found = COMMANDS[name] if name else APP
    written = [found.help, found.epilog, *(param.help for param in found.params)]
    written += [param.show_default for param in found.params if isinstance(param.show_default, str)]
    printed = " ".join(rewound_command(*name.split(), "--help").out.split())
    assert [text for text in written if text and " ".join(text.split()) not in printed] == []


def test_the_contract_of_commands() -> None:
    assert {"run", "plan", "report", "diff", "prune", "inspect", "show", "data"} <= set(COMMANDS)


def test_help_and_version(rewound_command: Rewound) -> None:
    code, out, _ = rewound_command("--help")
    assert code == 0
    assert "Example: rewound run digits" in out
    assert all(name in out for name in COMMANDS)
    assert rewound_command("--version") == (0, f"rewound {rewound.__version__}\n", "")


def test_the_help_of_data_says_where_the_cache_is(rewound_command: Rewound) -> None:
    said = " ".join(rewound_command("data", "--help").out.split())
    assert "The cache is the folder that REWOUND_CACHE names, or else ~/.cache/rewound." in said


def test_as_a_module() -> None:
    ran = subprocess.run(command("--version"), env=environment(), capture_output=True, text=True, check=True)
    assert ran.stdout == f"rewound {rewound.__version__}\n"


@pytest.mark.parametrize(
    "words",
    [["--help"], ["prune", "--help"], ["--version"], ["diff", "x.csv", "x.csv"], ["report", "--results", "x.csv"]],
    ids=" ".join,
)
def test_what_needs_no_torch_does_not_import_it(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "x.csv").write_text(f"{row()}a,unstructured,0,,1,,1,0.95,0.95,\n")
    script = "import sys; from rewound.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    started = [sys.executable, "-c", script, *words]
    ran = subprocess.run(started, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("name", ["run", "plan", "report"])
def test_a_misspelt_sweep_is_told_before_torch_is_imported(tmp_path: Path, name: str) -> None:
    script = "import sys; from rewound.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    started = [sys.executable, "-c", script, name, "digts"]
    ran = subprocess.run(started, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("error: unknown sweep 'digts'; did you mean 'digits'")


def test_no_command_at_all_shows_the_help(rewound_command: Rewound) -> None:
    code, out, err = rewound_command()
    assert (code, err) == (2, "")
    assert all(name in out for name in COMMANDS)


def test_names_are_looked_up_in_the_folder_too(tmp_path: Path) -> None:
    """As the installed command starts: without the current folder on Python's path."""
    (tmp_path / "mine.py").write_text("from rewound import TECHNIQUES\n\nOWN = TECHNIQUES['fine-tuning']\n")
    sweep = 'recipe = "digits"\ntrials = [1]\n\n[[experiment]]\ntechnique = "mine:OWN"\ndensity = 0.5\n'
    (tmp_path / "own.toml").write_text(f"{sweep}retrain-epochs = [1]\n")
    start = [sys.executable, "-P", "-c", "from rewound.cli import main; main()", "plan", "own.toml"]
    path = {"PYTHONPATH": str(Path(rewound.__file__).parents[1])}
    done = subprocess.run(start, cwd=tmp_path, env={**environment(), **path}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "plan of own" in done.stdout
