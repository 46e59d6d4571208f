"""`rewound watch` in a real Chromium: the results of another process arrive, and what the reader chose stays."""

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from command_line import command, environment

pytestmark = pytest.mark.slow
PATIENCE = 90_000  # milliseconds: a busy machine is slow, not wrong
SWEEP = """
recipe = "digits"
trials = [1, 2]

[recipe-fields]
epochs = 2.0

[[experiment]]
technique = ["fine-tuning", "lr-rewinding"]
retrain-epochs = [1, 2]
density = [0.5, 0.1]
"""


@contextmanager
def watching(folder: Path, port: str) -> Iterator[str]:
    """The address of a page that is watched; at the end the watcher is interrupted."""
    words = command("watch", "small.toml", "--port", port)
    with subprocess.Popen(words, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        try:
            yield found[0]
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate()


def run(folder: Path) -> subprocess.Popen[bytes]:
    words = command("run", "small.toml", "--jobs", "1", "--out", "report")
    return subprocess.Popen(words, cwd=folder, env=environment(), stdout=subprocess.DEVNULL)


def test_a_sweep_arrives_without_a_reload_and_the_reader_keeps_place_and_choices(
    browser: Browser, tmp_path: Path
) -> None:
    (tmp_path / "small.toml").write_text(SWEEP)
    context = browser.new_context(viewport={"width": 1100, "height": 700})
    page, wrong = context.new_page(), list[str]()
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("console", lambda message: wrong.append(message.text))
    with watching(tmp_path, "0") as url:
        outside = list[str]()
        page.on("request", lambda request: request.url.startswith(url) or outside.append(request.url))
        page.goto(url)
        status = page.locator("#live h2")
        expect(status).to_have_text("Nothing has run yet.", timeout=PATIENCE)
        expect(page.locator("#findings")).to_contain_text("No results yet")
        page.evaluate(_NOTED)
        sweep = run(tmp_path)
        runs = page.locator("#runs [role=status]")
        expect(runs).to_have_text(re.compile(r"^\d+ runs?$"), timeout=PATIENCE)
        expect(page.locator("#accuracy")).to_be_visible(timeout=PATIENCE)
        page.locator("#live summary").click()
        page.get_by_role("searchbox").fill("trial=1")
        menu = page.locator("#curves select")
        expect(menu).to_be_visible(timeout=PATIENCE)  # from the second compression on
        chosen = menu.locator("option").last.inner_text()
        menu.select_option(chosen)
        menu.focus()
        menu.evaluate("element => { element.scrollIntoView({ block: 'center' }); element.known = true; }")
        assert sweep.wait() == 0
        expect(status).to_have_text(re.compile(r"^Finished: \d+ of \d+ nodes\.$"), timeout=PATIENCE)
        expect(runs).to_have_text("9 of 18 runs", timeout=PATIENCE)
        assert page.title() == "100% · small"
        seen = page.evaluate("window.noted")
        assert {"waiting", "working", "finished"} <= set(seen), "it was seen as it happened, by a page loaded once"
        assert page.locator("#live details").evaluate("element => element.open"), "what was open stays open"
        expect(page.get_by_role("searchbox")).to_have_value("trial=1")
        expect(menu).to_have_value(chosen)
        expect(menu).to_be_focused()
        assert menu.evaluate("element => element.known"), "an open menu is not replaced"
        expect(menu).to_be_in_viewport()
        page.locator("#accuracy .points_marks path").first.wait_for()
        _sleeps_in_the_background(page)
        assert outside == []
        assert wrong == []
    expect(page.locator("#live .warning")).to_contain_text("The watcher does not answer", timeout=PATIENCE)
    expect(page.locator("#live .warning")).to_contain_text("rewound watch small.toml --port 0")
    expect(page.locator("#live .quiet").first).to_contain_text("Last seen")
    with watching(tmp_path, url.rstrip("/").rpartition(":")[2]):
        expect(page.locator("#live .warning")).to_have_count(0, timeout=PATIENCE)
    context.close()


def _sleeps_in_the_background(page: Page) -> None:
    """A page that nobody sees asks nothing, and asks at once when it is seen again."""
    page.evaluate("Object.defineProperty(document, 'hidden', { configurable: true, get: () => true })")
    page.wait_for_timeout(3000)  # the question that was under way, and one more
    asked = list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(3000)
    assert asked == []
    with page.expect_request("**/now"):
        page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")


_NOTED = """() => {
  window.noted = [document.getElementById("live").dataset.state];
  const note = () => window.noted.push(document.getElementById("live").dataset.state);
  new MutationObserver(note).observe(document.getElementById("live"), { attributes: true });
}"""
