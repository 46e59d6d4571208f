"""The site builds without a warning; links lead somewhere; nothing is loaded from elsewhere; numbers are right."""

import re
import runpy
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import rewound
from rewound.conclusions.tables import Row

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """The anchors of a page, where its links lead, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value is not None}
        self.anchors |= {found["id"]} if "id" in found else set()
        self.links |= {found["href"]} if tag == "a" and "href" in found else set()
        self.loads |= {found["src"]} if "src" in found else set()
        is_loaded = tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload")
        self.loads |= {found["href"]} if is_loaded else set()


def build(docs: Path, out: Path) -> "subprocess.CompletedProcess[str]":
    """What `make docs` does."""
    command = ["sphinx", "--fail-on-warning", "--keep-going", "--fresh-env", "--write-all", "--quiet", docs, out]
    return subprocess.run([sys.executable, "-m", *map(str, command)], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    out = tmp_path_factory.mktemp("site")
    built = build(DOCS, out)
    assert built.returncode == 0, built.stderr
    return {path: Page(path) for path in out.rglob("*.html")}


def test_every_public_name_is_in_the_reference(pages: dict[Path, Page]) -> None:
    described = {anchor for path, page in pages.items() if path.parent.name == "api" for anchor in page.anchors}
    assert {f"rewound.{name}" for name in rewound.__all__} <= described


def test_every_example_is_on_the_site_and_no_default_is_an_object_in_memory(pages: dict[Path, Page]) -> None:
    shown = "".join(path.read_text() for path in pages)
    for script in (ROOT / "examples").glob("*.py"):
        assert f"python examples/{script.name}" in shown
    assert not [path.name for path in pages if "&lt;function" in path.read_text()]


def test_the_notebook_shows_what_its_code_gives(pages: dict[Path, Page]) -> None:
    (path,) = (path for path in pages if path.name == "notebook.html")
    page, text = pages[path], path.read_text()
    assert text.count('class="notebook-output"') == 3, "a plan, the results of a run, and a report"
    for output in ("plan of sweep", "results of sweep: 9 rows", ">lr-rewinding</td>", "InputError", "trials is a list"):
        assert output in text
    assert re.search(r"sweep: 0 of \d+ steps", text)
    assert "(9, 11, 36.0)" in unescape(re.sub(r"<[^>]*>", "", text)), "the value of a cell"
    assert sum(loaded.startswith("data:image/png;base64,") for loaded in page.loads) == 2


def test_every_link_leads_somewhere(pages: dict[Path, Page]) -> None:
    assert len(pages) > 10
    for path, page in pages.items():
        for link in page.links:
            address = urlsplit(link)
            if not address.scheme:
                target = path if not address.path else (path.parent / unquote(address.path)).resolve()
                assert target.is_file(), f"{path.name} links to {link}"
                if target in pages:
                    assert unquote(address.fragment) in pages[target].anchors, f"{path.name} links to {link}"


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert page.loads, path
        assert not [loaded for loaded in page.loads if urlsplit(loaded).netloc], path


def test_what_is_broken_breaks_the_build(tmp_path: Path) -> None:
    (tmp_path / "conf.py").write_text((DOCS / "conf.py").read_text())
    (tmp_path / "_static").mkdir()
    (tmp_path / "index.md").write_text(
        "# Title\n\n[page](nowhere.md) and [heading](#nothing)\n\n"
        "```{literalinclude} ../examples/none.py\n```\n\n```{eval-rst}\n:py:func:`rewound.fly`\n```\n"
    )
    (tmp_path / "cells.md").write_text("<!-- notebook -->\n# Cells\n\n```python\nprint(1)\n1 / 0\n```\n")
    built = build(tmp_path, tmp_path / "out")
    assert built.returncode != 0
    for fault in ("nowhere.md", "nothing", "none.py", "rewound.fly", "the notebook stops: ZeroDivisionError"):
        assert fault in built.stderr, built.stderr


def test_the_tables_of_the_techniques_page_are_the_authors_numbers(authors: list[Row]) -> None:
    made = runpy.run_path(str(DOCS / "published.py"))
    shown = (DOCS / "techniques.md").read_text()
    for table, length in (("techniques_table", 5), ("times_table", 5), ("shortfalls_table", 8)):
        lines = list(made[table](authors))
        assert len(lines) == length
        assert "\n".join(lines) in shown
    compared = [difference for *_, difference in made["in_the_safe_zone"](authors)]
    assert f"{sum(each < 0 for each in compared)} of {len(compared):,} comparisons" in shown
