"""Names that hold codes for a terminal, ends of lines or rich's markup are printed as text, wherever they come from."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text

from command_line import HEADER, SWEEP, Rewound
from rewound.commands.console import PlainConsole
from rewound.reports.terminal import plain_table
from rewound.states.storage.artifacts import Result
from rewound.states.storage.store import Store
from stored import KEY, RESULT

NAME = "\x1b[31mred\x1b]0;title\x07\nnext[bold]:boom:\u202e"
SHOWN = r"\x1b[31mred\x1b]0;title\x07\nnext[bold]:boom:\u202e"
TABLE = f"""{HEADER}
"{NAME}",unstructured,0,"a {NAME}",0.5,4,1,0.9,0.9,
"{NAME}",unstructured,0,"a {NAME}",0.5,4,2,0.8,0.8,
"{NAME}",unstructured,0,b,0.5,4,1,0.7,0.7,
"{NAME}",unstructured,0,,1,,1,0.95,0.95,
"{NAME}",unstructured,0,,1,,2,0.96,0.96,
"""


def harmless(text: str) -> bool:
    return re.fullmatch(r"[^\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]*", text) is not None


@pytest.mark.parametrize(
    "words", [("report", "--results", "x.csv", "--out", "out"), ("diff", "x.csv", "x.csv", "--all")]
)
def test_names_in_a_table(rewound_command: Rewound, words: tuple[str, ...]) -> None:
    Path("x.csv").write_text(TABLE)
    code, out, err = rewound_command(*words)
    assert (code, err) == (0, "")
    assert harmless(out)
    assert SHOWN[:20] in out


def test_texts_in_a_store(rewound_command: Rewound) -> None:
    store, text = Store(Path("s")), NAME
    made: Result = {**RESULT, "recipe": text, "history": [text], "host": text, "made": {text: text}}
    store.publish(KEY, {**made, "layers": {text: {"kept": 1, "total": 2, "flops": 3}}})
    for words in (("show",), ("show", KEY), ("bench", KEY), ("verify",), ("gc",)):
        _, out, err = rewound_command(*words, "--store", "s")
        assert harmless(out + err)


def test_the_name_of_a_file(rewound_command: Rewound) -> None:
    name = NAME.replace("/", "")
    Path(f"{name}.toml").write_text(SWEEP)
    code, out, err = rewound_command("plan", f"{name}.toml")
    assert (code, err) == (0, "")
    assert harmless(out)
    assert f"plan of {SHOWN}" in out


@pytest.mark.parametrize(
    "words",
    [("run", NAME), ("prune", NAME), ("show", NAME, "--store", NAME), ("data", NAME), (NAME,), ("run", f"--{NAME}")],
)
def test_names_in_an_error(rewound_command: Rewound, words: tuple[str, ...]) -> None:
    code, out, err = rewound_command(*words)
    assert (code, out) == (2, "")
    assert harmless(err)
    assert err.count("\n") == 1


def test_text_of_every_kind() -> None:
    file = io.StringIO()
    table = Table(NAME, title=NAME, caption=NAME)
    table.add_row(NAME)
    other = plain_table(NAME, NAME)
    other.add_column(Text(NAME))
    other.add_row(Text(NAME, style="red"))
    PlainConsole(file=file, width=300).print(NAME, Group(table, other, NAME, Text(NAME)))
    assert harmless(file.getvalue())
    assert file.getvalue().count(SHOWN) >= 5, "what is given as a str; rich leaves the bell out of a Text itself"


def test_a_traceback_keeps_its_lines(rewound_command: Rewound) -> None:
    Path("mine.py").write_text('raise RuntimeError("a \\x1b[31m b")\n')
    code, _, err = rewound_command("prune", "mine:Task")
    assert code == 1
    assert err.splitlines()[-1] == r"failed: RuntimeError: a \x1b[31m b"
    assert len(err.splitlines()) > 2
