"""What the documentation shows can be done: its Python runs, its commands and sweeps parse.

A block under the line `<!-- no-run -->` is left alone. A page that begins with `<!-- notebook -->` is run by the site's
build, which shows its outputs (`test_site.py`).
"""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import typer
import typer.main

import rewound
from rewound import cli
from rewound.experiments.sweeps.sweep import parse_sweep

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
NOTEBOOKS = {str(p.relative_to(ROOT)) for p in PAGES if p.read_text().startswith("<!-- notebook -->\n")}
WIDTH = 120  # columns of a line of prose, as in the code


UsageError = typer.BadParameter.__mro__[1]  # click's, wherever typer has it from


class Block(NamedTuple):
    """A fenced piece of a page."""

    page: str
    line: int
    language: str
    text: str
    runs: bool


FENCE = re.compile(
    r"^(?P<mark><!-- no-run -->\s*\n\s*)?```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^```\s*$", re.MULTILINE | re.DOTALL
)


def blocks(page: str, text: str) -> Iterator[Block]:
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        yield Block(page, line, match["language"], match["text"], match["mark"] is None)


BLOCKS = [block for page in PAGES for block in blocks(str(page.relative_to(ROOT)), page.read_text())]


def commands(block: Block) -> Iterator[str]:
    """The `rewound ...` lines of a shell block; in a console block, those behind a prompt."""
    text = block.text.replace("\\\n", " ")
    for line in text.splitlines():
        words = line.strip()
        if block.language == "console":
            if not words.startswith("$ "):
                continue
            words = words.removeprefix("$ ")
        if words.startswith("rewound "):
            yield words


COMMANDS = [
    (f"{block.page}:{block.line}: {command}", command)
    for block in BLOCKS
    if block.language in ("console", "sh", "bash", "shell") and block.runs
    for command in commands(block)
]


def parse(command: str) -> None:
    """Parse a command line as the program would, without doing anything."""
    words = shlex.split(command, comments=True)[1:]
    known = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    if words == ["--version"]:
        return
    name, *rest = words
    assert name in known, f"there is no command {name}"
    if "--help" not in rest:
        known[name].make_context(name, rest)


def test_the_readme_shows_python() -> None:
    text = (ROOT / "README.md").read_text()
    if text.strip():
        assert any(b.page == "README.md" and b.language == "python" and b.runs for b in BLOCKS), "no example to run"
        assert any(place.startswith("README.md") for place, _ in COMMANDS), "no command to give"


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({b.page for b in BLOCKS if b.language == "python" and b.runs} - NOTEBOOKS))
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)  # test processes share the cores, and threads that wait for a core spin
    namespace: dict[str, object] = {"__name__": "__documentation__"}
    for block in BLOCKS:
        if block.page == page and block.language == "python" and block.runs:
            # The blank lines make a traceback point at the line of the page.
            exec(compile("\n" * block.line + block.text, str(ROOT / page), "exec"), namespace)


@pytest.mark.parametrize("command", [command for _, command in COMMANDS], ids=[place for place, _ in COMMANDS])
def test_commands_parse(command: str) -> None:
    parse(command)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "toml"], ids=lambda b: f"{b.page}:{b.line}")
def test_sweeps_are_sweeps(block: Block) -> None:
    assert parse_sweep(tomllib.loads(block.text), block.page).targets


def prose(text: str) -> Iterator[tuple[int, str]]:
    """The numbered lines of a page that can be wrapped: none of a fenced block, of a table, or of a picture."""
    fenced = False
    for number, line in enumerate(text.splitlines(), start=1):
        fence = line.lstrip().startswith("```")
        if not (fenced or fence or line.startswith(("|", "!["))):
            yield number, line
        fenced ^= fence


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("results/*/*.md")], ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_are_not_longer_than_those_of_code(page: Path) -> None:
    assert [number for number, line in prose(page.read_text()) if len(line) > WIDTH] == []


def test_the_map_of_the_paper_names_what_is_there() -> None:
    text = (ROOT / "docs" / "paper.md").read_text().partition("## The recipes")[0]
    files = re.findall(r"`([\w/]+\.py)`", text)
    assert len(files) > 10
    for name, file in re.findall(r"`([\w.]+)`(?: in|) \(?`([\w/]+\.py)`", text):
        assert file in files
        assert hasattr(rewound, name.removeprefix("rewound."))
    assert not [file for file in files if not (ROOT / "src" / "rewound" / file).is_file()]


# The test itself


SAMPLE = """
# Title

```python
print(1)
```

<!-- no-run -->
```python
train_for_weeks()
```

```console
$ rewound run digits --jobs 2   # two workers
rewound is what it prints
$ ls
```

```sh
rewound prune digits \\
    --compression 10
```
"""


def test_blocks_are_found() -> None:
    found = list(blocks("sample.md", SAMPLE))
    assert [(block.language, block.line, block.runs) for block in found] == [
        ("python", 4, True),
        ("python", 9, False),
        ("console", 13, True),
        ("sh", 19, True),
    ]
    assert [list(commands(block)) for block in found[2:]] == [
        ["rewound run digits --jobs 2   # two workers"],
        ["rewound prune digits      --compression 10"],
    ]


def test_prose_is_what_is_not_fenced_in_a_table_or_a_picture() -> None:
    text = SAMPLE + "\n| a | b |\n![picture](x.png)\nThe end.\n"
    assert [line for _, line in prose(text) if line] == ["# Title", "<!-- no-run -->", "The end."]


def test_what_parses_and_what_does_not() -> None:
    for good in ("rewound run digits --jobs 2 # two", "rewound plan x --help", "rewound --version", "rewound show"):
        parse(good)
    with pytest.raises(AssertionError, match="there is no command fly"):
        parse("rewound fly")
    for bad in ("rewound run", "rewound run digits --jbos 2", "rewound prune digits --compression ten"):
        with pytest.raises(UsageError):
            parse(bad)
