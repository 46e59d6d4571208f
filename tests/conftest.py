"""What tests of several files are given: one thread, a store, the command, a browser, and work done once for all."""

import gc
import importlib.util
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch

from command_line import DIGITS_SWEEP, SWEEP, Outcome, Rewound, printed
from rewound import cli
from rewound.commands.console import console
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.paper.networks import METRICS
from rewound.conclusions.tables import Row, Tables, read_rows
from rewound.foundations import names
from rewound.reports.page import Origin, write_page
from rewound.states.storage.store import Store
from tiny import ENTERED, POISON
from tiny_sweeps import EVERYTHING, run, sweep_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def pytest_collection_finish() -> None:
    """What has been imported and collected stays: libraries that look for cycles do not look there each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _forgetful() -> Iterator[None]:
    """What tiny recipes were told and have noted ends with the test."""
    yield
    POISON.clear()
    ENTERED.clear()


@pytest.fixture(scope="session")
def paper() -> Path:
    """The folder of what the authors published, where it lies beside the repository."""
    folder = Path(__file__).parents[2] / "shared" / "paper"
    if not folder.exists():
        pytest.skip(f"the authors' tables are not at {folder}")
    return folder


@pytest.fixture(scope="session")
def authors(paper: Path) -> list[Row]:
    """All rows of the authors' tables, dense networks first; not to be changed."""
    return [row for kind in ("dense", "pruned") for row in read_rows(paper / f"published-{kind}.csv.gz", METRICS)]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Equal runs are equal bit for bit with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def float64() -> Iterator[None]:
    """What is made without a type is float64, for comparisons that rounding must not decide."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Everything of the tiny sweep, with all tensors; not to be changed."""
    store = Store(tmp_path_factory.mktemp("whole") / "store")
    run(sweep_of(*EVERYTHING), store, keep_all=True)
    return store


@pytest.fixture
def rewound_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Rewound:
    """Runs the command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "width", 200)
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*words: object) -> Outcome:
        monkeypatch.setattr(sys, "path", [*sys.path])  # a command that looks up a name adds the folder it runs in
        monkeypatch.setattr(names, "_FOLDER", None)
        monkeypatch.setattr(sys, "argv", ["rewound", *map(str, words)])
        capsys.readouterr()
        try:
            cli.main()
            code: object = 0
        except SystemExit as end:
            code = end.code or 0
        assert isinstance(code, int)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the sweep has run, with all tensors; not to be changed."""
    folder = tmp_path_factory.mktemp("done")
    (folder / "tiny.toml").write_text(SWEEP)
    printed(folder, "run", "tiny.toml", "--jobs", "1", "--keep", "all", "--out", "report")
    return folder


@pytest.fixture(scope="session")
def bit_flips() -> ModuleType:
    """The script `benchmarks/bit_flips.py`, which damages what is kept on disk."""
    path = Path(__file__).parents[1] / "benchmarks" / "bit_flips.py"
    spec = importlib.util.spec_from_file_location("bit_flips", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["bit_flips"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """A Chromium: the one named in REWOUND_CHROMIUM, or the one installed."""
    from playwright.sync_api import sync_playwright  # here, as only pages need it

    chromium = os.environ.get("REWOUND_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium: install one (apt-get install chromium), or name it in REWOUND_CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def digits_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a small sweep of digits; not to be changed."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "small.toml").write_text(DIGITS_SWEEP)
    printed(folder, "run", "small.toml", "--jobs", "1", "--out", "report")
    return folder / "report" / "index.html"


@pytest.fixture(scope="session")
def published_page(authors: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the authors' tables."""
    path = tmp_path_factory.mktemp("published") / "index.html"
    return write_page(Evidence(Tables(authors)), path, Origin("published"))


@pytest.fixture
def looks_at_ends_of_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a small network's epoch may take longer than runs go without a look."""
    monkeypatch.setattr("rewound.experiments.plans.execution.LOOK", math.inf)
