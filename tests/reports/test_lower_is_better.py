"""A metric of which less is better, from the recipe to the page: the better network is called better everywhere."""

import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from browser_pages import opened, points
from command_line import printed
from rewound.conclusions.cells import Baseline, Cell, Line, baselines, cells
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.findings import best_over_time, reaches
from rewound.conclusions.paper.panels import best, measured
from rewound.conclusions.rivals import differences
from rewound.conclusions.tables import Row, Tables, read_rows
from rewound.foundations.metric import Metric
from rewound.reports.look import window

SWEEP = """
recipe = "tiny:Surprised"
trials = [1, 2]

[[experiment]]
technique = ["lr-rewinding", "fine-tuning"]
retrain-epochs = [0.5, 2]
density = [0.5, 0.2]
"""
LOSS = Metric("cross-entropy", "nats", higher_is_better=False)
LINE = Line("mine", "unstructured", True, "lr-rewinding")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a sweep that was run by the command line, with what it printed."""
    folder = tmp_path_factory.mktemp("loss")
    (folder / "loss.toml").write_text(SWEEP)
    said = printed(folder, "run", "loss.toml", "--jobs", "1", "--out", "report")
    (folder / "report" / "printed").write_text(said)
    return folder / "report"


def by_setting(rows: list[Row]) -> dict[tuple[str, float, float], tuple[float, float]]:
    """Median validation and test loss of every setting."""
    found: dict[tuple[str, float, float], list[Row]] = defaultdict(list)
    for row in rows:
        if not row.dense:
            found[row.technique, row.density, row.retrain_epochs or 0].append(row)
    return {
        at: (median(row.val or 0 for row in own), median(row.test or 0 for row in own)) for at, own in found.items()
    }


def test_the_table_says_what_it_holds(report: Path) -> None:
    rows = read_rows(report / "results.csv")
    assert {row.measured_by for row in rows} == {LOSS}
    assert all((row.test or 0) > 0.5 for row in rows), "they are losses"


def test_the_best_time_has_the_lowest_validation_loss(report: Path) -> None:
    rows = read_rows(report / "results.csv")
    losses = by_setting(rows)
    for cell in best_over_time(cells(rows)):
        place = (cell.line.technique, cell.density)
        lowest = min(val for at, (val, _) in losses.items() if at[:2] == place)
        assert losses[*place, cell.retrain_epochs][0] == lowest == cell.val


def test_figures_show_a_lower_loss_higher_up(report: Path) -> None:
    assert {path.name for path in report.glob("*.png")} == {
        f"tiny-Surprised-unstructured-{n}.png" for n in ("best", "times")
    }
    rows = read_rows(report / "results.csv")
    (found,) = measured(Evidence(Tables(rows)))
    (panel,) = best(found)
    dense = fmean(row.test or 0 for row in rows if row.dense)
    losses = by_setting(rows)
    for technique, curve in panel.curves.items():
        for point in curve:
            assert point.median == pytest.approx(dense - losses[technique, point.density, point.retrain_epochs][1])
            assert point.low <= point.median <= point.high


def test_terminal_and_headline_call_a_rise_worse(report: Path) -> None:
    printed = " ".join((report / "printed").read_text().split())
    assert "no rise range cost 1% rise range cost" in printed
    assert "A lower cross-entropy is better: a delta is the dense value minus the pruned one" in printed
    assert "“1% rise” one percent of its cross-entropy" in printed
    rows = read_rows(report / "results.csv")
    dense = [row.test or 0 for row in rows if row.dense]
    kept: dict[str, float] = {}
    for cell in best_over_time(cells(rows)):
        if cell.median <= fmean(dense) + stdev(dense):
            kept[cell.line.technique] = max(kept.get(cell.line.technique, 0), 1 / cell.density)
    found = reaches(cells(rows), baselines(rows))
    assert {line.technique: reach.no_drop.compression for line, reach in found.items()} == {
        technique: kept.get(technique) for technique in ("lr-rewinding", "fine-tuning")
    }


def test_the_page_is_of_losses(report: Path, browser: Browser) -> None:
    rows = read_rows(report / "results.csv")
    dense = fmean(row.test or 0 for row in rows if row.dense)
    with opened(browser, report / "index.html") as page:
        kept = reaches(cells(rows), baselines(rows))[Line("tiny:Surprised", "unstructured", False, "lr-rewinding")]
        sentence = f"learning rate rewinding keeps dense cross-entropy to (at least )?{kept.no_drop.compression:.2f}×"
        expect(page.locator(".sentence")).to_contain_text(re.compile(sentence))
        expect(page.locator("#accuracy h2")).to_have_text("Cross-entropy against compression")
        assert page.locator("#accuracy svg text", has_text="−Δ cross-entropy (nats)").count() == 1
        said = {tuple(text.split(", ")[:2]): text for text in (text.replace(". ", ", ") for text in points(page))}
        for (technique, density, _), (_, test) in best_losses(rows).items():
            label = {"lr-rewinding": "Learning rate rewinding", "fine-tuning": "Fine-tuning"}[technique]
            shown = float(re.findall(r"([+−]?[\d.]+) nats", said[label, f"{1 / density:.2f}×"])[0].replace("−", "-"))
            assert shown == pytest.approx(dense - test, abs=0.0006)
        assert "“1% rise” one percent of its cross-entropy" in (page.locator("#reach").text_content() or "")
        expect(page.locator("#reach th", has_text="No rise")).to_have_count(1)


def best_losses(rows: list[Row]) -> dict[tuple[str, float, float], tuple[float, float]]:
    chosen = {(cell.line.technique, cell.density, cell.retrain_epochs) for cell in best_over_time(cells(rows))}
    return {at: losses for at, losses in by_setting(rows).items() if at in chosen}


def losses(technique: str, *tests: float, density: float = 0.5) -> list[Row]:
    setting = ("mine", "unstructured", True, technique, density, 4.0)
    stated: dict[str, Any] = {"metric": "loss", "unit": "nats", "direction": "lower"}
    return [Row(*setting, trial, test, test, **stated) for trial, test in enumerate(tests)]


def test_the_technique_with_the_lower_loss_is_the_better_one() -> None:
    rows = [*losses("lr-rewinding", 0.20, 0.21), *losses("fine-tuning", 0.30, 0.33)]
    (found,) = differences(rows, "lr-rewinding", "fine-tuning")
    assert (found.mean, found.low <= found.mean <= found.high) == (pytest.approx(0.11), True)
    (found,) = differences(rows, "fine-tuning", "lr-rewinding")
    assert found.mean == pytest.approx(-0.11)


@pytest.mark.parametrize(("pruned", "bottom"), [((0.21, 0.25), -0.05), ((0.21, 9.0), -0.2), ((3.0, 9.0), -5.6)])
def test_an_axis_of_losses_shows_a_doubling_and_the_best_network(pruned: tuple[float, ...], bottom: float) -> None:
    metric = Metric("loss", "nats", higher_is_better=False)
    made = [Cell(LINE, 0.5**n, 4, (loss,), (loss,), metric=metric) for n, loss in enumerate(pruned, start=1)]
    dense = Baseline(0.2, 0.0, 1, metric)
    low, high = window(made, lambda cell: cell.density, dense, deepest=2)
    assert low == pytest.approx(bottom - 0.06 * (0 - bottom), rel=1e-6)
    assert high >= 0
