"""Figures and the terminal's table: every technique, ratio and mark a reader needs is there, and nothing is hidden."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from paper_panels import in_bleu
from rewound.conclusions.cells import Baseline, Cell, Line
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.tables import Row, Tables
from rewound.foundations.errors import InputError
from rewound.reports import figures
from rewound.reports.look import LOOKS, looks, ratios, window
from rewound.reports.page import Origin, story
from rewound.reports.terminal import summary_table
from rewound.reports.writing import write_report

TIMES = (4.0, 8.0, 16.0)


def table(drops: dict[str, float], densities: tuple[float, ...], *, iterative: bool = False) -> list[Row]:
    """Three trials; a technique loses its drop, in points, at every doubling of the compression."""
    rows = [Row("digits", "", False, "", 1, None, trial, 0.95, 0.95 + trial / 1000) for trial in (-1, 0, 1)]
    for technique, drop in drops.items():
        for density in densities:
            for t in TIMES:
                for trial in (-1, 0, 1):
                    value = 0.95 - drop / 100 * (1 / density - 1) * (2 - t / 16) + trial / 1000
                    setting = ("digits", "unstructured", iterative, technique, density, t, trial)
                    rows.append(Row(*setting, val=value, test=value, search_epochs=t))
    return rows


PAPERS = [name for name in LOOKS if name != "gradual"]
MILD = dict.fromkeys(PAPERS, 0.1)
ONE_SHOT = table(MILD, (1.0, 0.5, 0.2, 0.1, 0.05))
ITERATIVE = table({name: 0.1 for name in MILD if name != "reinitialization"}, (0.5, 0.25, 0.125), iterative=True)


def draw(evidence: Evidence, out: Path, formats: Iterable[str] = ("png", "svg")) -> list[Path]:
    return figures.draw_figures(evidence, out, print, figures.Drawing(formats=tuple(formats)))


def texts(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)</text>", svg.read_text())


def svg(rows: list[Row], out: Path, name: str = "best") -> list[str]:
    (path,) = (path for path in draw(Evidence(Tables(rows)), out, formats=["svg"]) if path.stem.endswith(name))
    return texts(path)


def test_figures_and_page_of_a_sweep_have_the_same_training_time(tmp_path: Path) -> None:
    """Nothing was retrained for all of the 32 epochs that the recipe trains, so nothing is Algorithm 1."""
    evidence = Evidence(Tables(ITERATIVE), training_epochs={"digits": 32.0})
    names = {path.name for path in write_report(evidence, tmp_path, Origin("digits")).files}
    assert names == {f"digits-unstructured-{n}.png" for n in ("best", "times")} | {"index.html", "results.csv"}
    assert "Algorithm 1" not in (tmp_path / "index.html").read_text()


def test_the_papers_figures_are_drawn_as_png_and_svg(tmp_path: Path) -> None:
    paths = draw(Evidence(Tables(ONE_SHOT + ITERATIVE)), tmp_path / "figures")
    assert sorted(path.name for path in paths) == [
        f"digits-unstructured-{name}.{suffix}" for name in ("best", "full-time", "times") for suffix in ("png", "svg")
    ]
    assert all(path.stat().st_size > 5_000 for path in paths)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths if path.suffix == ".png")


def test_best_figure_names_techniques_ratios_and_the_dense_runs(tmp_path: Path) -> None:
    shown = svg(ONE_SHOT + ITERATIVE, tmp_path)
    for label in (LOOKS[name].label for name in PAPERS):
        assert label in shown
    assert {"One-shot", "Iterative", "2.00×", "5.00×", "10.00×", "20.00×", "8.00×", "Compression ratio"} <= set(shown)
    assert {"Dense runs, mean ± 1 sd", "Δ accuracy (points)", "digits, unstructured pruning"} <= set(shown)
    assert "1.00×" not in shown, "the dense control compresses nothing"
    assert "Median below the axis" not in shown, "nothing is below it"


def test_times_figure_has_a_panel_per_density_the_control_and_the_safe_zone(tmp_path: Path) -> None:
    shown = svg(ONE_SHOT + ITERATIVE, tmp_path, "times")
    assert {"1.00×, dense control", "2.00×", "5.00×", "10.00×", "20.00×"} <= set(shown)
    assert {"Rewinding safe zone, 0.25T to 0.9T", "Retraining epochs", "4", "8", "16"} <= set(shown)
    assert "8.00×" not in shown, "iterative densities have no panel"


def test_both_ends_of_the_horizontal_axis_have_a_label(tmp_path: Path) -> None:
    for levels in (3, 10, 17):
        rows = table({"lr-rewinding": 0.01}, tuple(0.8**level for level in range(1, levels + 1)), iterative=True)
        shown = [text for text in svg(rows, tmp_path) if "×" in text]
        assert {"1.25×", f"{1.25**levels:.2f}×"} <= set(shown)
        assert len(shown) > 2


def test_one_retraining_time_of_each_technique_is_no_curve(tmp_path: Path) -> None:
    times = {"weight-rewinding": 8}
    once = [row for row in ITERATIVE if row.dense or row.retrain_epochs == times.get(row.technique, 16)]
    names = {path.stem for path in draw(Evidence(Tables(once)), tmp_path, ["svg"])}
    assert names == {"digits-unstructured-best", "digits-unstructured-full-time"}


def test_full_time_figure_says_which_times_it_shows(tmp_path: Path) -> None:
    shown = svg(ITERATIVE, tmp_path, "full-time")
    assert {"Learning rate rewinding, t = 16", "Weight rewinding, t = 8", "Fine-tuning, t = 16"} <= set(shown)
    assert not any("Low-LR" in text for text in shown)
    names = [path.stem for path in draw(Evidence(Tables(ITERATIVE), training_epochs={"digits": 32}), tmp_path, ["svg"])]
    assert "digits-unstructured-full-time" not in names, "no run was retrained for T = 32 epochs"


def test_algorithm_1_prunes_a_fifth_a_level(tmp_path: Path) -> None:
    rows = table({"lr-rewinding": 0.1, "weight-rewinding": 0.1}, (0.8, 0.64, 0.512), iterative=True)
    shown = svg(rows, tmp_path, "algorithm-1")
    assert any(text.startswith("Algorithm 1 and its rivals; median") for text in shown)
    assert {"Learning rate rewinding, t = 16", "Weight rewinding, t = 8"} <= set(shown)


def test_a_point_below_the_axis_is_announced(tmp_path: Path) -> None:
    rows = table({"lr-rewinding": 0.1, "fine-tuning": 10}, (0.5, 0.2, 0.1))
    assert "Median below the axis" in svg(rows, tmp_path)


def test_a_bar_that_goes_on_below_the_axis_is_announced(tmp_path: Path) -> None:
    rows = table({"lr-rewinding": 0.1, "fine-tuning": 0.2}, (0.5, 0.2, 0.1))
    assert "Trials below the axis" not in svg(rows, tmp_path)
    best = [row for row in rows if (row.technique, row.density, row.retrain_epochs) == ("fine-tuning", 0.2, TIMES[-1])]
    collapsed = [replace(row, val=0.2, test=0.2) if row is best[0] else row for row in rows]
    shown = svg(collapsed, tmp_path)
    assert "Trials below the axis" in shown
    assert "Median below the axis" not in shown


def test_a_technique_of_the_user_is_drawn_under_its_own_name(tmp_path: Path) -> None:
    assert "my.package:cyclic" in svg(table({"my.package:cyclic": 0.1, "lr-rewinding": 0.1}, (0.5, 0.1)), tmp_path)
    mine = looks(["c", "b", "a", "fine-tuning"])
    assert list(mine) == ["fine-tuning", "a", "b", "c"]
    assert len({look.colour for look in mine.values()}) == 4


def test_scores_are_drawn_as_they_are(tmp_path: Path) -> None:
    assert "Δ BLEU" in svg([in_bleu(row) for row in ONE_SHOT], tmp_path)


@pytest.mark.parametrize("densities", [(0.1,), (0.5, 0.1), (0.9574, 0.9562, 0.9602, 0.9659, 0.9773, 0.5)])
def test_sparse_tables_are_drawn_too(tmp_path: Path, densities: tuple[float, ...]) -> None:
    rows = [row for row in table({"lr-rewinding": 1}, densities) if row.trial == 1]
    names = {path.stem.rsplit("-", 1)[-1] for path in draw(Evidence(Tables(rows)), tmp_path, ["png"])}
    assert names == {"best", "times"}
    once = [row for row in rows if row.dense or row.retrain_epochs == 4]
    assert len(draw(Evidence(Tables(once)), tmp_path, ["png"])) == 1, "one retraining time is no curve"


def test_a_compared_table_is_drawn_over_ours(tmp_path: Path) -> None:
    theirs = [replace(row, test=(row.test or 0) - 0.002) for row in ONE_SHOT + ITERATIVE]
    with_theirs = draw(Evidence(Tables(ONE_SHOT + ITERATIVE), theirs), tmp_path / "both", ["svg"])
    alone = draw(Evidence(Tables(ONE_SHOT + ITERATIVE)), tmp_path / "alone", ["svg"])
    assert len(with_theirs) == 3
    for drawn, plain in zip(with_theirs, alone, strict=True):
        assert "The compared table" in texts(drawn)
        assert "The compared table" not in texts(plain)
        assert drawn.read_text().count("<path") > plain.read_text().count("<path")
    elsewhere = [replace(row, recipe="other") for row in theirs]
    assert all(
        "The compared table" not in texts(path)
        for path in draw(Evidence(Tables(ONE_SHOT), elsewhere), tmp_path, ["svg"])
    )


def test_failed_runs_are_counted_not_drawn(tmp_path: Path) -> None:
    rows = [replace(row, val=None, test=None) if row.trial == 0 and not row.dense else row for row in ONE_SHOT]
    assert any("median and min to max of 2 trials; 75 failed not drawn" in text for text in svg(rows, tmp_path))


def test_the_same_rows_give_the_same_svg_and_awkward_names_a_good_path(tmp_path: Path) -> None:
    rows = [replace(row, recipe="my.tasks:Digits/2") for row in ONE_SHOT]
    first, *_ = draw(Evidence(Tables(rows)), tmp_path / "a", ["svg"])
    again, *_ = draw(Evidence(Tables(rows[::-1])), tmp_path / "b", ["svg"])
    assert first.name == "my.tasks-Digits-2-unstructured-best.svg"
    assert first.read_bytes() == again.read_bytes()


def test_nothing_to_show_is_an_error_that_says_so(tmp_path: Path) -> None:
    dense = [row for row in ONE_SHOT if row.dense]
    with pytest.raises(InputError, match="nothing to draw: none of the 3 rows"):
        draw(Evidence(Tables(dense)), tmp_path)
    with pytest.raises(InputError, match="nothing to summarise"):
        summary_table(Evidence(Tables(dense)))
    with pytest.raises(InputError, match="no finished dense run of digits"):
        draw(Evidence(Tables([row for row in ONE_SHOT if not row.dense])), tmp_path)


def test_ratios_that_would_read_the_same_get_more_digits() -> None:
    assert list(ratios([0.8, 0.1074]).values()) == ["1.25×", "9.31×"]
    assert list(ratios([0.960211, 0.957369]).values()) == ["1.041×", "1.045×"]


@pytest.mark.parametrize(
    ("lowest", "bottom"),
    [(-2.0, -2.0), (-3.0, -3.0), (-3.3, -3.3), (-3.5, -3.5), (-3.7, -3.0), (-9.0, -3.0)],
)
def test_what_ends_a_little_below_the_floor_is_shown_whole(lowest: float, bottom: float) -> None:
    line = Line("task", "unstructured", iterative=True, technique="fine-tuning")
    trials = (0.9, 0.9, 0.9 + lowest / 100)
    low, high = window([Cell(line, 0.1, 8, trials, trials)], lambda cell: cell.density, Baseline(0.9, 0.001, 3))
    assert (low, high) == pytest.approx((bottom - 0.06 * (0.1 - bottom), 0.1 + 0.06 * (0.1 - bottom)), abs=1e-6)


def printed(rows: list[Row], test_examples: int | None = None) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(summary_table(Evidence(Tables(rows)), test_examples))
    return capture.get()


def test_the_terminal_shows_medians_deltas_times_costs_and_conclusions() -> None:
    shown = printed(table({"lr-rewinding": 0.05, "fine-tuning": 0.5}, (0.5, 0.25, 0.1)), test_examples=360)
    assert re.search(r"^lr-rewinding +2.00× +94.95 +94.85 +95.05 +-0.05 +16 +16 *$", shown, re.MULTILINE)
    assert re.search(r"^fine-tuning +10.00× +90.50 +90.40 +90.60 +-4.50 +16 +16 *$", shown, re.MULTILINE)
    assert re.search(r"^lr-rewinding +2.00× +none–4.00× +16 +≥10.00× +≥10.00× +16 *$", shown, re.MULTILINE)
    assert re.search(r"^fine-tuning +none +none +– +2.00× +2.00× +16 *$", shown, re.MULTILINE)
    assert "One test example is 0.28 points of accuracy (360 of them)." in shown
    assert "dense 95.00 ± 0.10 (3 runs)" in " ".join(shown.split())
    assert "failed" not in shown


def test_the_terminal_shows_how_sure_differences_are_and_what_is_weak() -> None:
    rows = table({"fine-tuning": 0.5, "lr-rewinding": 0.05, "reinitialization": 1}, (0.5, 0.1))
    shown = " ".join(printed(rows).split())
    assert "lr-rewinding minus ratio fine-tuning" in shown, "reinitialization is an ablation, not a rival"
    assert "2.00× +0.45 (+0.45, +0.45) 10.00× +4.05 (+4.05, +4.05)" in shown
    assert "Differences of mean test values, paired by their dense network" in shown
    assert "Weak: digits: no validation split" in shown
    unpaired = [replace(row, iterative=True) for row in rows]
    shown = " ".join(printed(unpaired).split())
    assert "Differences of mean test values, not paired" in shown
    assert "2.00× +0.45 [+0.28, +0.62] 10.00×" in shown  # t of 24 degrees of freedom times 0.0816


def test_terminal_and_page_say_the_same_search_cost_of_a_table_that_does_not_know_it() -> None:
    levels = table({"lr-rewinding": 0.01, "fine-tuning": 1}, (0.5, 0.25, 0.125), iterative=True)
    rows = [replace(row, search_epochs=None) for row in levels]
    shown = printed(rows)
    assert re.search(r"^lr-rewinding +8.00× +94.93 .* +16 +48 *$", shown, re.MULTILINE), "16 epochs at each of 3 levels"
    assert re.search(r"^lr-rewinding +≥8.00× +\S+ +48 +≥8.00× +\S+ +48 *$", shown, re.MULTILINE)
    (subject,) = story(Evidence(Tables(rows)))["subjects"]
    assert subject["sentence"].startswith("Pruned iteratively, learning rate rewinding keeps dense accuracy to")
    assert "for 48 epochs of search" in subject["sentence"]
    assert {reach["no_drop"]["cost"] for reach in subject["reach"]} == {48, None}
    assert [reach["one"]["cost"] for reach in subject["reach"]] == [16, 48]


@pytest.mark.parametrize(
    ("stated", "no", "one"),
    [
        (("accuracy", "fraction", "higher"), "no drop", "1% drop"),
        (("BLEU", "BLEU", "higher"), "no drop", "1 BLEU drop"),
        (("F1", "percent", "higher"), "no drop", "1% drop"),
        (("error", "fraction", "lower"), "no rise", "1 point rise"),
        (("loss", "nats", "lower"), "no rise", "1% rise"),
    ],
)
def test_the_terminal_names_a_drop_of_one_in_its_unit(stated: tuple[str, str, str], no: str, one: str) -> None:
    named = dict(zip(("metric", "unit", "direction"), stated, strict=True))
    rows = [replace(row, **named) for row in ITERATIVE]  # type: ignore[arg-type]
    assert re.findall(f"({no}) +range.* (1.* (?:drop|rise)) +range", printed(rows)) == [(no, one)]
    (subject,) = story(Evidence(Tables(rows)))["subjects"]
    assert subject["drops"] == (no, one), "as on the page"


def test_the_papers_longest_name_fits_the_terminal() -> None:
    rows = [
        row if row.dense else replace(row, search_epochs=1638, test=(row.test or 0) + 0.04 * row.trial)
        for row in table({"low-lr-weight-rewinding": 0.0}, (0.1, 0.05))
    ]
    shown = printed(rows)
    reach = r" +≥20.00× +none–≥20.00× +1638"
    assert re.search(f"^low-lr-weight-rewinding{reach}{reach} *$", shown, re.MULTILINE)


def test_names_are_text_in_the_terminal() -> None:
    shown = printed(table({"<b>[red]mine[/red]</b>": 0.1, "fine-tuning": 0.1}, (0.5,)))
    assert "<b>[red]mine[/red]</b>" in shown


def test_the_terminal_counts_failed_runs_even_where_none_finished() -> None:
    rows = [replace(row, val=None, test=None) if row.density == 0.1 else row for row in table(MILD, (0.5, 0.1))]
    shown = printed(rows)
    assert re.search(r"^fine-tuning +10.00×( +–){6} +9 *$", shown, re.MULTILINE)
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert "…" not in shown, "no number is cut"


@pytest.mark.slow
def test_a_large_table_is_drawn_by_processes_into_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "_WORTH_PROCESSES", 1)
    rows = [*ITERATIVE, *(replace(row, recipe="other") for row in ONE_SHOT)]
    rows += [replace(row, recipe="lost", val=None, test=None) for row in ONE_SHOT if row.technique]
    rows += [replace(row, recipe="lost") for row in ONE_SHOT if not row.technique]
    evidence, asked = Evidence(Tables(rows)), figures.Drawing(formats=("svg",))
    alone = figures.draw_figures(evidence, tmp_path / "alone", print, asked)
    with figures.figures_under_way(evidence, tmp_path / "together", print, asked) as wait:
        together = wait()
    assert {path.name: path.read_bytes() for path in together} == {path.name: path.read_bytes() for path in alone}
    with pytest.raises(InputError, match="bad"), figures.figures_under_way(evidence, tmp_path / "not", print, asked):
        raise InputError("bad")
