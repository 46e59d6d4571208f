"""The page in a real Chromium answers to pointer, finger and keyboard: it hides, filters, sorts, opens and links."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import test_page
from playwright.sync_api import Browser, expect

from browser_pages import drawn, opened, points
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.tables import Tables
from rewound.reports.page import Origin, write_page

pytestmark = pytest.mark.slow


def test_a_technique_that_is_unticked_leaves_every_figure_and_the_table(browser: Browser, digits_page: Path) -> None:
    with opened(browser, digits_page) as page:
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
        with opened(browser, digits_page, f"#{page.url.partition('#')[2]}") as shared:
            assert not shared.get_by_role("checkbox", name="Fine-tuning").is_checked(), (
                "a link shows what its sender saw"
            )


def test_the_spread_of_trials_can_be_hidden(browser: Browser, digits_page: Path) -> None:
    with opened(browser, digits_page) as page:
        bars = page.locator("#accuracy .mark-rule line")
        before = bars.count()
        page.get_by_role("checkbox", name="Min to max of trials").uncheck(force=True)
        expect(bars).not_to_have_count(before)


def test_pointing_shows_values_and_a_click_opens_the_run(browser: Browser, digits_page: Path) -> None:
    with opened(browser, digits_page) as page:
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
        page.get_by_role("dialog").locator(".panel").nth(1).scroll_into_view_if_needed()  # drawn when it is seen
        page.get_by_role("dialog").locator(".panel[data-drawn]").nth(1).wait_for()
        page.get_by_role("button", name="Close").click()
        expect(page.get_by_role("dialog")).to_be_hidden()


def test_cells_that_are_the_same_run_say_so(browser: Browser, digits_page: Path) -> None:
    with opened(browser, digits_page) as page:
        page.get_by_role("searchbox").fill("lr iterative ratio=2 trial=1")
        page.locator("#runs tr[data-number]").first.click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("The same run as")
        dialog.get_by_role("button", name="Learning rate rewinding, one-shot, t = 1").click()
        expect(dialog.locator("header")).to_contain_text("2.00×, one-shot, t = 1")


def test_the_table_filters_sorts_and_opens(browser: Browser, digits_page: Path) -> None:
    with opened(browser, digits_page) as page:
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


def test_a_link_names_a_run_by_its_key(browser: Browser, digits_page: Path, tmp_path: Path) -> None:
    with opened(browser, digits_page) as page:
        page.get_by_role("searchbox").fill("lr one-shot ratio=2 t=1 trial=2")
        page.locator("#runs tr[data-number]").first.click()
        assert re.search(r"run=[0-9a-f]{12}", page.url)
        title = page.get_by_role("dialog").locator("header").inner_text()
        with opened(browser, digits_page, f"#{page.url.partition('#')[2]}") as shared:
            assert shared.get_by_role("dialog").locator("header").inner_text() == title
    more = [replace(test_page.DENSE[0], trial=-5, key="another"), *test_page.ROWS]  # what comes later has other places
    for rows in (test_page.ROWS, more):
        path = write_page(Evidence(Tables(rows)), tmp_path / "index.html", Origin("digits"))
        with opened(browser, path, "#run=dense1") as page:
            expect(page.get_by_role("dialog")).to_contain_text("Dense network, trial 1")
    with opened(browser, path, "#run=0") as page:
        expect(page.get_by_role("dialog")).to_contain_text("Fine-tuning")


def test_the_keyboard_reaches_everything(browser: Browser, digits_page: Path) -> None:
    with opened(browser, digits_page) as page:
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


def test_the_keyboards_mark_stays_pointed_at_while_marks_move(browser: Browser, digits_page: Path) -> None:
    with opened(browser, digits_page) as page:
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


def test_a_phone_scrolls_only_downwards(browser: Browser, digits_page: Path, published_page: Path) -> None:
    for path in (digits_page, published_page):
        phone = {"width": 390, "height": 844}
        with opened(browser, path, viewport=phone, has_touch=True, is_mobile=True) as page:
            drawn(page)
            assert page.evaluate("document.documentElement.scrollWidth") == 390
            page.locator("#accuracy .points_marks path").first.tap()
            expect(page.locator("#tip")).to_be_visible()
            page.locator("#accuracy .points_marks path").first.tap()
            expect(page.get_by_role("dialog")).to_be_visible()
            assert page.evaluate("document.getElementById('run').scrollWidth") <= 390


def test_one_recipe_at_a_time(browser: Browser, published_page: Path) -> None:
    with opened(browser, published_page) as page:
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
