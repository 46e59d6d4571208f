"""The page in a real Chromium shows what it should: figures, verdicts, names; in light and dark; soon, and safely."""

import re
import resource
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import test_page
from playwright.sync_api import Browser, expect

from browser_pages import drawn, opened, points
from command_line import command, environment
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.tables import CurveRow, LayerRow, Row, Tables
from rewound.reports.page import Origin, write_page

pytestmark = pytest.mark.slow


def test_a_compared_table_can_be_hidden_and_is_judged(browser: Browser, tmp_path: Path) -> None:
    worse = [replace(row, val=0.88, test=0.88) if row.density == 0.1 else row for row in test_page.ROWS]
    path = write_page(Evidence(Tables(test_page.ROWS), worse), tmp_path / "index.html", Origin("digits"))
    with opened(browser, path) as page:
        drawn(page)
        theirs = page.locator("#accuracy .outlines_marks path")
        assert theirs.count() == 8, "two compressions of three curves, one of them also as a rival of Algorithm 1"
        assert page.locator("#cost .outlines_marks path").count() > 0
        page.locator("#accuracy").scroll_into_view_if_needed()
        page.wait_for_timeout(200)
        theirs.last.hover()
        expect(page.locator("#tip")).to_contain_text("compared table")
        page.get_by_role("checkbox", name="Fine-tuning").uncheck(force=True)
        expect(theirs).to_have_count(2)
        page.get_by_role("checkbox", name="Compared table").uncheck(force=True)
        expect(theirs).to_have_count(0)
        assert any("Learning rate rewinding" in text for text in points(page)), "ours stay"
        assert "compared=no" in page.url
        card = page.locator("#conformance")
        expect(card).to_contain_text("digits does not conform.")
        outside = card.locator(".window tbody tr")
        expect(outside).to_have_count(6)
        assert all("outside" in text for text in outside.all_inner_texts())
        card.get_by_text("All 12 cells").click()
        expect(outside).to_have_count(18)


def test_differences_are_a_figure_and_a_table(browser: Browser, digits_page: Path) -> None:
    with opened(browser, digits_page) as page:
        assert page.locator("#conformance").count() == 0, "nothing was compared"
        assert page.get_by_role("checkbox", name="Compared table").count() == 0
        drawn(page)
        said = points(page, "differences")
        assert said
        assert all(re.search(r"minus Fine-tuning.* points. Min to max, 2 pairs$", text) for text in said)
        page.locator("#differences summary").click()
        assert re.search(r"2\.00×\t\S+ \(\S+, \S+\)", page.locator("#differences table").first.inner_text())
        page.get_by_role("checkbox", name="Learning rate rewinding").uncheck(force=True)
        expect(page.locator("#differences .panel:visible")).to_have_count(0)


def test_axes_say_what_they_show(browser: Browser, digits_page: Path) -> None:
    titles = {
        "accuracy": ("Δ accuracy (points)", "Compression ratio"),
        "differences": ("Difference in points", "Compression ratio"),
        "cost": ("Δ accuracy (points)", "Retraining epochs"),
        "speed": ("Times fewer FLOPs", "Compression ratio"),
        "layers": ("Compression ratio", "stage2.block1.conv2"),
        "curves": ("Steps",),
    }
    with opened(browser, digits_page) as page:
        drawn(page)
        for figure, said in titles.items():
            texts = page.locator(f"#{figure} .panel").first.locator("svg text").all_text_contents()
            assert set(said) <= set(texts), figure


def test_light_and_dark(browser: Browser, digits_page: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    labels = "document.querySelector('.role-axis-label text').getAttribute('fill')"
    with opened(browser, digits_page, color_scheme="dark") as page:
        dark, faint = page.evaluate(background), page.evaluate(labels)
        assert max(map(int, re.findall(r"\d+", dark))) < 60
        page.get_by_role("button", name="Switch to light colours").click()
        assert min(map(int, re.findall(r"\d+", page.evaluate(background)))) > 200
        page.wait_for_timeout(500)
        assert page.evaluate(labels) != faint, "charts follow"


def test_a_phone_shows_all_of_the_verdicts_and_that_the_runs_go_on(browser: Browser, published_page: Path) -> None:
    with opened(browser, published_page, viewport={"width": 390, "height": 844}) as page:
        inside = page.locator("#reach .scroll").evaluate("element => element.scrollWidth - element.clientWidth")
        assert inside == 0, "no column is cut"
        assert page.locator("#runs tr[data-number]").first.inner_text().split("\t")[2] == "1.25×"
        shadow = page.locator("#runs .window").evaluate("element => getComputedStyle(element).backgroundImage")
        assert shadow.count("linear-gradient") == 4


def test_names_of_limits_that_are_one_and_triangles_have_places_of_their_own(browser: Browser, tmp_path: Path) -> None:
    dense = [Row("task", "unstructured", False, "", 1, None, n, v, v) for n, v in enumerate((0.939, 0.95, 0.96), 1)]
    lost = {"lr-rewinding": (0.95, 0.94, 0.94), "fine-tuning": (0.94, 0.5, 0.6), "weight-rewinding": (0.94, 0.94, 0.4)}
    pruned = [
        Row("task", "unstructured", False, technique, 0.5**level, 4, 1, value, value)
        for technique, values in lost.items()
        for level, value in enumerate(values, start=1)
    ]
    path = write_page(Evidence(Tables([*dense, *pruned])), tmp_path / "index.html", Origin("limits"))
    with opened(browser, path) as page:
        panel = page.locator("#accuracy .panel").first
        names = [panel.locator("svg text", has_text=name).bounding_box() for name in ("no drop", "1% drop")]
        (upper, lower) = sorted((box for box in names if box), key=lambda box: box["y"])
        assert upper["y"] + 0.8 * upper["height"] <= lower["y"], "one line of text is below the other"
        low = panel.locator(".mark-rule + .mark-symbol path")
        marks = sorted((box for box in (mark.bounding_box() for mark in low.all()) if box), key=lambda box: -box["y"])
        bottom = panel.locator(".role-axis-domain line").last.bounding_box()
        assert bottom is not None
        away = [round(bottom["y"] - mark["y"] - mark["height"]) for mark in marks]
        assert away == [1, 1, 9], "on the axis, the second technique at one place above the first"


def test_names_that_contain_html_are_shown_and_do_nothing(browser: Browser, tmp_path: Path) -> None:
    name = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    rows = [
        replace(row, recipe=name, technique=row.technique and f"{row.technique}{name}", key=f"{number}{name}")
        for number, row in enumerate(test_page.ROWS)
    ]
    rows = [replace(row, pruning=f"unstructured {name}", metric=f"metric{name}", unit=f"unit{name}") for row in rows]
    layers = [LayerRow(row.key, f"layer{name}", 1, 2, 3) for row in rows]
    curves = [CurveRow(row.key, step, 0.1, 1.0) for row in rows for step in (1, 2)]
    evidence = Evidence(Tables(rows, layers, curves), [row for row in rows if row.dense or row.iterative])
    path = write_page(evidence, tmp_path / "index.html", Origin(name, ((name, name),), name, name))
    with opened(browser, path) as page:
        drawn(page)
        page.locator("#accuracy .points_marks path").first.click(force=True)  # or one that lies over it
        assert name in page.get_by_role("dialog").inner_text()
        assert f"layer{name}" in page.get_by_role("dialog").inner_text()
        assert page.evaluate("window.hacked") is None
        assert page.locator("img").count() == 0
        assert name in page.locator("#findings").inner_text(), "a warning says it as it is"


def test_little_or_nothing_is_a_page_too(browser: Browser, tmp_path: Path) -> None:
    empty = write_page(Evidence(Tables([])), tmp_path / "empty.html", Origin("nothing", (), "rewound run digits"))
    with opened(browser, empty) as page:
        expect(page.locator("#findings")).to_contain_text("No results yet")
        expect(page.locator("#findings")).to_contain_text("rewound run digits")
    one = [row for row in test_page.ROWS if row.trial == 0]
    one = [replace(row, val=None, test=None) if row.technique == "lr-rewinding" else row for row in one]
    with opened(browser, write_page(Evidence(Tables(one)), tmp_path / "one.html", Origin("one trial"))) as page:
        page.locator("#accuracy").scroll_into_view_if_needed()
        page.wait_for_timeout(200)
        page.locator("#accuracy .points_marks path").first.hover()
        expect(page.locator("#tip")).to_contain_text("(one trial)")
        expect(page.locator("#reach")).to_contain_text("its spread is unknown")
        page.get_by_role("searchbox").fill("failed")
        page.locator("#runs tr[data-number]").first.click()
        expect(page.get_by_role("dialog")).to_contain_text("This run failed")


def test_the_page_of_the_authors_rows_draws_little_before_it_is_ready(browser: Browser, published_page: Path) -> None:
    # The seconds that this takes are a matter of the machine: benchmarks/report.py measures them.
    assert published_page.stat().st_size < 6_000_000
    with opened(browser, published_page) as page:
        assert page.evaluate("document.querySelectorAll('*').length") < 6_000
        page.get_by_role("checkbox", name="Fine-tuning").uncheck(force=True)
        expect(page.locator("#accuracy .points_marks path[aria-label^='Fine-tuning']")).to_have_count(0)


def test_the_authors_rows_are_reported_within_a_gigabyte_and_a_half(paper: Path, tmp_path: Path) -> None:
    # How long it takes is a matter of the machine: benchmarks/report.py measures it.
    pruned, dense = (str(paper / f"published-{kind}.csv.gz") for kind in ("pruned", "dense"))
    words = command("report", "--results", pruned, "--dense", dense, "--out", "report")
    subprocess.run(words, cwd=tmp_path, env=environment(), check=True, capture_output=True)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 1.5 * 2**20
    assert (tmp_path / "report" / "index.html").stat().st_size < 6_000_000
