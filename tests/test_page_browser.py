"""The page in a real Chromium: no error, no request; it answers to pointer, finger and keyboard, in light and dark.

Needs a browser: `apt-get install chromium`, or the path of one in the variable REWOUND_CHROMIUM.
"""

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

import test_page
from rewound.conclusions.comparison import compare
from rewound.pages.page import Origin, write_page
from rewound.tables.folder import Tables
from rewound.tables.results import Row

pytestmark = pytest.mark.slow

expect.set_options(timeout=15_000)  # a busy machine is slow, not wrong
CHROMIUM = os.environ.get("REWOUND_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
SWEEP = """
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium: install one (apt-get install chromium), or name it in REWOUND_CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a small sweep of digits, run for this test."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "small.toml").write_text(SWEEP)
    rewound("run", "small.toml", "--jobs", "1", "--out", "report", cwd=folder)
    return folder / "report" / "index.html"


@pytest.fixture(scope="module")
def published(authors: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the authors' tables."""
    path = tmp_path_factory.mktemp("published") / "index.html"
    return write_page(Tables(authors, [], [], 0), path, Origin("published"))


def rewound(*arguments: str, cwd: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "rewound", *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@contextmanager
def opened(browser: Browser, path: Path, address: str = "", **options: object) -> Iterator[Page]:
    """An open page that is ready; any error, warning or request of it fails the test."""
    context = browser.new_context(**options)  # type: ignore[arg-type]
    page, wrong = context.new_page(), []
    page.on("console", lambda message: wrong.append(f"console {message.type}: {message.text}"))
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or wrong.append(request.url))
    page.goto(f"{path.as_uri()}{address}")
    page.locator("html[data-ready=yes]").wait_for()
    yield page
    expect(page.locator("html")).to_have_attribute("data-ready", "yes")
    context.close()
    assert wrong == []


def points(page: Page, figure: str = "accuracy") -> list[str]:
    """What the marks of a figure say of themselves."""
    marks = page.locator(f"#{figure} .points_marks path")
    return [mark.get_attribute("aria-label") or "" for mark in marks.all()]


def drawn(page: Page) -> None:
    """Wait until every panel is drawn."""
    expect(page.locator("#figures .panel:visible:not([data-drawn])")).to_have_count(0, timeout=20_000)


def test_a_technique_that_is_unticked_leaves_every_figure_and_the_table(browser: Browser, digits: Path) -> None:
    with opened(browser, digits) as page:
        drawn(page)
        kinds = ("accuracy", "cost", "speed", "curves")
        assert all(any("Fine-tuning" in text for text in points(page, kind)) for kind in kinds)
        maps = page.locator("#layers .panel:visible")
        assert maps.count() == 2
        page.get_by_role("checkbox", name="Fine-tuning").uncheck(force=True)
        expect(maps).to_have_count(1)
        for kind in kinds:
            expect(page.locator(f"#{kind} .points_marks path[aria-label^='Fine-tuning']")).to_have_count(0)
            assert any("Learning rate rewinding" in text for text in points(page, kind))
        assert "Fine-tuning" not in page.locator("#runs tbody").inner_text()
        assert "hide=fine-tuning" in page.url
        with opened(browser, digits, f"#{page.url.partition('#')[2]}") as shared:
            assert not shared.get_by_role("checkbox", name="Fine-tuning").is_checked(), (
                "a link shows what its sender saw"
            )


def test_the_spread_of_trials_can_be_hidden(browser: Browser, digits: Path) -> None:
    with opened(browser, digits) as page:
        bars = page.locator("#accuracy .mark-rule line")
        before = bars.count()
        page.get_by_role("checkbox", name="Min to max of trials").uncheck(force=True)
        expect(bars).not_to_have_count(before)


def test_a_compared_table_can_be_hidden_and_is_judged(browser: Browser, tmp_path: Path) -> None:
    worse = [replace(row, val=0.88, test=0.88) if row.density == 0.1 else row for row in test_page.ROWS]
    tables, cards = Tables(test_page.ROWS, [], [], 0), compare(test_page.ROWS, worse)
    path = write_page(tables, tmp_path / "index.html", Origin("digits"), theirs=worse, cards=cards)
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


def test_differences_are_a_figure_and_a_table(browser: Browser, digits: Path) -> None:
    with opened(browser, digits) as page:
        assert page.locator("#conformance").count() == 0, "nothing was compared"
        assert page.get_by_role("checkbox", name="Compared table").count() == 0
        drawn(page)
        said = points(page, "differences")
        assert all(re.search(r"minus Fine-tuning.* points. Min to max, 2 pairs$", text) for text in said)
        page.locator("#differences summary").click()
        assert re.search(r"2\.00×\t\S+ \(\S+, \S+\)", page.locator("#differences table").first.inner_text())
        page.get_by_role("checkbox", name="Learning rate rewinding").uncheck(force=True)
        expect(page.locator("#differences .panel:visible")).to_have_count(0)


def test_pointing_shows_values_and_a_click_opens_the_run(browser: Browser, digits: Path) -> None:
    with opened(browser, digits) as page:
        mark = page.locator("#accuracy .points_marks path").first
        page.locator("#accuracy").scroll_into_view_if_needed()
        page.wait_for_timeout(200)  # scrolling hides what is said about a mark
        mark.hover()
        tip = page.locator("#tip")
        expect(tip).to_be_visible()
        assert re.search(r"points \(.+ to .+, 2 trials\)", tip.inner_text())
        mark.click()
        expect(page.get_by_role("dialog")).to_be_visible()
        text = page.get_by_role("dialog").inner_text()
        assert "rewound run small.toml" in text
        assert re.search(r"rewound show [0-9a-f]{12}", text)
        assert {"Lineage", "Training curve", "Kept of each layer"} <= set(text.splitlines())
        page.get_by_role("dialog").locator(".panel[data-drawn]").nth(1).wait_for()
        page.get_by_role("button", name="Close").click()
        expect(page.get_by_role("dialog")).to_be_hidden()


def test_cells_that_are_the_same_run_say_so(browser: Browser, digits: Path) -> None:
    with opened(browser, digits) as page:
        page.get_by_role("searchbox").fill("lr iterative ratio=2 trial=1")
        page.locator("#runs tr[data-number]").first.click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("The same run as")
        dialog.get_by_role("button", name="Learning rate rewinding, one-shot, t = 1").click()
        expect(dialog.locator("header")).to_contain_text("2.00×, one-shot, t = 1")


def test_the_table_filters_sorts_and_opens(browser: Browser, digits: Path) -> None:
    with opened(browser, digits) as page:
        status, rows = page.locator("#runs [role=status]"), page.locator("#runs tr[data-number]")
        expect(status).to_have_text("34 runs")
        page.get_by_role("searchbox").fill("lr iterative compression>=4")
        expect(status).to_have_text("2 of 34 runs")
        assert all("4.00×" in text for text in rows.all_inner_texts())
        page.get_by_role("searchbox").fill("nothing like it")
        expect(page.locator("#runs")).to_contain_text("No run matches. Words are looked for in technique")
        for wrong in ("foo=3", "delta>", "key=d79"):
            page.get_by_role("searchbox").fill(f"lr {wrong}")
            expect(page.locator("#runs")).to_contain_text(f"“{wrong}” is no limit. Limits are compression, ratio")
        page.get_by_role("searchbox").fill("")
        page.get_by_role("button", name="Test", exact=True).click()
        tests = [float(text.split("\t")[5]) for text in rows.all_inner_texts()]
        assert tests == sorted(tests, reverse=True)
        page.get_by_role("button", name="Test", exact=True).click()
        assert float(rows.first.inner_text().split("\t")[5]) < tests[0]


def test_a_link_names_a_run_by_its_key(browser: Browser, digits: Path, tmp_path: Path) -> None:
    with opened(browser, digits) as page:
        page.get_by_role("searchbox").fill("lr one-shot ratio=2 t=1 trial=2")
        page.locator("#runs tr[data-number]").first.click()
        assert re.search(r"run=[0-9a-f]{12}", page.url)
        title = page.get_by_role("dialog").locator("header").inner_text()
        with opened(browser, digits, f"#{page.url.partition('#')[2]}") as shared:
            assert shared.get_by_role("dialog").locator("header").inner_text() == title
    more = [replace(test_page.DENSE[0], trial=-5, key="another"), *test_page.ROWS]  # what comes later has other places
    for rows in (test_page.ROWS, more):
        path = write_page(Tables(rows, [], [], 0), tmp_path / "index.html", Origin("digits"))
        with opened(browser, path, "#run=dense1") as page:
            expect(page.get_by_role("dialog")).to_contain_text("Dense network, trial 1")
    with opened(browser, path, "#run=0") as page:
        expect(page.get_by_role("dialog")).to_contain_text("Fine-tuning")


def test_axes_say_what_they_show(browser: Browser, digits: Path) -> None:
    titles = {
        "accuracy": ("Δ accuracy (points)", "Compression ratio"),
        "differences": ("Difference in points", "Compression ratio"),
        "cost": ("Δ accuracy (points)", "Retraining epochs"),
        "speed": ("Times fewer FLOPs", "Compression ratio"),
        "layers": ("Compression ratio",),
        "curves": ("Steps",),
    }
    with opened(browser, digits) as page:
        drawn(page)
        for figure, said in titles.items():
            texts = page.locator(f"#{figure} .panel").first.locator("svg text").all_text_contents()
            assert set(said) <= set(texts), figure


def test_the_keyboard_reaches_everything(browser: Browser, digits: Path) -> None:
    with opened(browser, digits) as page:
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the figures")).to_be_focused()
        page.get_by_role("checkbox", name="Fine-tuning").focus()
        page.keyboard.press("Space")
        assert not page.get_by_role("checkbox", name="Fine-tuning").is_checked()
        page.locator("#accuracy .panel").first.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        expect(page.locator("#tip")).to_be_visible()
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_be_hidden()
        page.locator("#runs .window").focus()
        page.keyboard.press("End")
        expect(page.locator("#runs tr.active")).to_contain_text("Dense network")
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_contain_text("Dense network, trial 2")


def test_the_keyboards_mark_stays_pointed_at_while_marks_move(browser: Browser, digits: Path) -> None:
    with opened(browser, digits) as page:
        drawn(page)
        page.locator("#accuracy .panel").first.focus()
        page.wait_for_timeout(300)  # for the page to have scrolled there
        page.keyboard.press("ArrowRight")
        tip = page.locator("#tip")
        expect(tip).to_be_visible()
        for moves in ("document.querySelector('input[type=checkbox]').click()", "scrollBy(0, 60)"):
            page.evaluate(moves)
            page.wait_for_timeout(500)  # for all panels to have drawn it
            expect(tip).to_be_visible()
        page.keyboard.press("Escape")
        expect(tip).to_be_hidden()


def test_light_and_dark(browser: Browser, digits: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    labels = "document.querySelector('.role-axis-label text').getAttribute('fill')"
    with opened(browser, digits, color_scheme="dark") as page:
        dark, faint = page.evaluate(background), page.evaluate(labels)
        assert max(map(int, re.findall(r"\d+", dark))) < 60
        page.get_by_role("button", name="Switch to light colours").click()
        assert min(map(int, re.findall(r"\d+", page.evaluate(background)))) > 200
        page.wait_for_timeout(500)
        assert page.evaluate(labels) != faint, "charts follow"


def test_a_phone_scrolls_only_downwards(browser: Browser, digits: Path, published: Path) -> None:
    for path in (digits, published):
        phone = {"width": 390, "height": 844}
        with opened(browser, path, viewport=phone, has_touch=True, is_mobile=True) as page:
            drawn(page)
            assert page.evaluate("document.documentElement.scrollWidth") == 390
            page.locator("#accuracy .points_marks path").first.tap()
            expect(page.locator("#tip")).to_be_visible()
            page.locator("#accuracy .points_marks path").first.tap()
            expect(page.get_by_role("dialog")).to_be_visible()
            assert page.evaluate("document.getElementById('run').scrollWidth") <= 390


def test_a_phone_shows_all_of_the_verdicts_and_that_the_runs_go_on(browser: Browser, published: Path) -> None:
    with opened(browser, published, viewport={"width": 390, "height": 844}) as page:
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
    path = write_page(Tables([*dense, *pruned], [], [], 0), tmp_path / "index.html", Origin("limits"))
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


def test_one_recipe_at_a_time(browser: Browser, published: Path) -> None:
    with opened(browser, published) as page:
        assert page.get_by_role("radio").count() == 12
        expect(page.locator("#accuracy h2")).to_have_text("Accuracy against compression")
        page.get_by_role("radio", name=re.compile("gnmt")).check(force=True)
        expect(page.locator("#accuracy h2")).to_have_text("BLEU against compression")
        expect(page.locator("#runs [role=status]")).to_have_text("6,760 runs")
        assert page.locator("#runs tr[data-number]").count() < 60, "only what can be seen is in the document"
        page.locator("#runs .window").evaluate("element => { element.scrollTop = element.scrollHeight }")
        expect(page.locator("#runs tr[data-number]").last).to_contain_text("Dense network")
        page.get_by_label("BLEU against search cost: which runs").select_option("Iterative")
        expect(page.locator("#cost .panel")).to_have_count(25)
        drawn(page)
        page.get_by_role("radio", name="cifar10-vgg16").check(force=True)
        expect(page.locator("#figures")).to_contain_text("Nothing to draw yet")


def test_names_that_contain_html_are_shown_and_do_nothing(browser: Browser, tmp_path: Path) -> None:
    name = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    rows = [replace(row, recipe=name, technique=row.technique and f"{row.technique}{name}") for row in test_page.ROWS]
    path = write_page(Tables(rows, [], [], 0), tmp_path / "index.html", Origin(name))
    with opened(browser, path) as page:
        drawn(page)
        page.locator("#accuracy .points_marks path").first.click()
        assert name in page.get_by_role("dialog").inner_text()
        assert page.evaluate("window.hacked") is None
        assert page.locator("img").count() == 0
        assert name in page.locator("#findings").inner_text(), "a warning says it as it is"


def test_little_or_nothing_is_a_page_too(browser: Browser, tmp_path: Path) -> None:
    empty = write_page(Tables([], [], [], 0), tmp_path / "empty.html", Origin("nothing", (), "rewound run digits"))
    with opened(browser, empty) as page:
        expect(page.locator("#findings")).to_contain_text("No results yet")
        expect(page.locator("#findings")).to_contain_text("rewound run digits")
    one = [row for row in test_page.ROWS if row.trial == 0]
    one = [replace(row, val=None, test=None) if row.technique == "lr-rewinding" else row for row in one]
    with opened(browser, write_page(Tables(one, [], [], 0), tmp_path / "one.html", Origin("one trial"))) as page:
        page.locator("#accuracy").scroll_into_view_if_needed()
        page.wait_for_timeout(200)
        page.locator("#accuracy .points_marks path").first.hover()
        expect(page.locator("#tip")).to_contain_text("(one trial)")
        expect(page.locator("#reach")).to_contain_text("its spread is unknown")
        page.get_by_role("searchbox").fill("failed")
        page.locator("#runs tr[data-number]").first.click()
        expect(page.get_by_role("dialog")).to_contain_text("This run failed")


def test_the_authors_rows_are_interactive_within_3_seconds(browser: Browser, published: Path) -> None:
    assert published.stat().st_size < 6_000_000
    taken = []
    for _ in range(4):  # the best of a few, as a busy machine only adds to it
        with opened(browser, published) as page:
            taken.append(page.evaluate("performance.getEntriesByName('ready')[0].startTime") / 1000)
            page.get_by_role("checkbox", name="Fine-tuning").uncheck(force=True)
            expect(page.locator("#accuracy .points_marks path[aria-label^='Fine-tuning']")).to_have_count(0)
        if min(taken) < 3:
            break
    assert min(taken) < 3


def test_the_authors_rows_are_reported_within_a_gigabyte_and_a_half(paper: Path, tmp_path: Path) -> None:
    # How long it takes is a matter of the machine: benchmarks/report.py measures it.
    pruned, dense = (str(paper / f"published-{kind}.csv.gz") for kind in ("pruned", "dense"))
    rewound("report", "--results", pruned, "--dense", dense, "--out", "report", cwd=tmp_path)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 1.5 * 2**20
    assert (tmp_path / "report" / "index.html").stat().st_size < 6_000_000
