"""Mistakes in a user's recipe, rule or score: told once, with the user's lines, or in one sentence."""

import traceback
from pathlib import Path

import pytest
import torch

from command_line import SWEEP, Rewound
from rewound.commands.console import exits
from rewound.foundations import errors
from rewound.foundations.errors import Failed

TASK = """
from dataclasses import dataclass
import torch
from tiny import Tiny

@dataclass(frozen=True)
class Task(Tiny):
"""
BAD_LOSS = """
    def loss(self, model, batch):
        return batch[0] @ torch.zeros(3, 3)
"""
BAD_SCORE = """
def score(weight, name, seed):
    return weight.no_such_thing()
"""


def written(name: str, code: str) -> None:
    """A module of the user's, and a sweep of its recipe."""
    Path(f"{name}.py").write_text(TASK + code)
    Path("x.toml").write_text(SWEEP.replace("tiny:Tiny", f"{name}:Task"))


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_error_in_a_recipe_is_told_once_with_the_users_lines(rewound_command: Rewound, jobs: int) -> None:
    written(f"bad_loss_{jobs}", BAD_LOSS)
    code, _, err = rewound_command("run", "x.toml", "--jobs", jobs)
    assert code == 1
    file, line, *_, sentence = err.splitlines()
    assert file.endswith(f'bad_loss_{jobs}.py", line 10, in loss')
    assert line == "    return batch[0] @ torch.zeros(3, 3)"
    assert sentence.startswith("failed: RuntimeError: ")
    assert len(err.splitlines()) < 6


def test_in_python_a_traceback_has_the_users_lines_though_a_worker_has_failed() -> None:
    fault = errors.Fault("ValueError: bad", '  File "mine.py", line 3, in loss')
    assert "".join(traceback.format_exception_only(fault)).endswith(
        'ValueError: bad\n  File "mine.py", line 3, in loss\n'
    )


def test_an_error_in_a_score(rewound_command: Rewound) -> None:
    Path("bad_score.py").write_text(BAD_SCORE)
    code, _, err = rewound_command("prune", "tiny:Tiny", "--score", "bad_score:score")
    assert code == 1
    assert 'bad_score.py", line 3, in score\n' in err
    assert err.endswith("\nfailed: AttributeError: 'Tensor' object has no attribute 'no_such_thing'\n")


@pytest.mark.parametrize(
    ("name", "given", "shown"),
    [("one_number", "0.5", "0.5"), ("three_numbers", "(1, 2, 3)", "(1, 2, 3)"), ("nothing", "None", "None")],
)
def test_what_evaluate_must_return(rewound_command: Rewound, name: str, given: str, shown: str) -> None:
    written(name, f"    def evaluate(self, model):\n        return {given}\n")
    code, _, err = rewound_command("run", "x.toml", "--jobs", 1)
    assert code == 2
    assert err == (f"error: evaluate of recipe {name}:Task must return two numbers, Scores(val, test), not {shown}\n")


def test_tensors_are_numbers(rewound_command: Rewound) -> None:
    written("tensors", "    def evaluate(self, model):\n        return torch.tensor(0.5), torch.tensor(0.25)\n")
    code, _, err = rewound_command("run", "x.toml", "--jobs", 1)
    assert (code, err) == (0, "")
    assert ",0.5,0.25," in Path("rewound-report/x/results.csv").read_text()


def test_an_example_that_the_model_does_not_take(rewound_command: Rewound) -> None:
    written("bad_example", "    def example(self):\n        return (torch.zeros(1, 3, 8, 8),)\n")
    code, out, err = rewound_command("run", "x.toml", "--jobs", 2)
    assert code == 2
    assert err.startswith("error: the model of recipe bad_example:Task does not take its example(): ")
    assert err.count("\n") == 1
    assert out == "", "nothing was trained"


def test_an_example_for_which_the_memory_does_not_suffice(rewound_command: Rewound) -> None:
    written("large_example", "    def example(self):\n        return (torch.zeros(2**48),)\n")  # a petabyte
    code, _, err = rewound_command("run", "x.toml", "--jobs", 2)
    assert (code, err) == (
        2,
        "error: the memory does not suffice to run the model of recipe large_example:Task on its example() (it asks "
        "for another 1048576.0 GiB); give smaller inputs, such as a smaller image-size, or use a machine with more "
        "memory\n",
    )


def test_a_module_with_a_syntax_error(rewound_command: Rewound) -> None:
    Path("bad_syntax.py").write_text("def f(:\n")
    code, _, err = rewound_command("prune", "bad_syntax:Task")
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot import recipe 'bad_syntax:Task': invalid syntax (bad_syntax.py, line 1)" in err


def test_what_nobody_foresaw_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(errors, "_NOT_THEIRS", ("<", "/"))  # as if these lines were the package's
    with pytest.raises(RuntimeError, match="inconsistent tensor size"), exits():
        torch.ones(2) @ torch.ones(3)
    with pytest.raises(RecursionError), exits():
        raise RecursionError("too deep")
    with pytest.raises(SystemExit), exits():
        raise Failed("two of two workers died")
    assert capsys.readouterr().err == "failed: two of two workers died\n"
