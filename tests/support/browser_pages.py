"""Pages opened in a real Chromium: each is ready before it is looked at, and makes no mistake."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

expect.set_options(timeout=15_000)  # a busy machine is slow, not wrong


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
