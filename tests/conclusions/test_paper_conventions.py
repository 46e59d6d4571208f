"""The paper's figures of any other table: its conventions, and the files they are written to."""

import csv
import html
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drawn_figures import boxes, charts, limits, parts
from paper_panels import FINE, GNMT, LR, NAMES, R20, R50, R56, WEIGHT, in_bleu, shown
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.paper.figures import FIGURES
from rewound.conclusions.paper.panels import measured
from rewound.conclusions.tables import Row, Tables
from rewound.foundations.errors import InputError
from rewound.reports.figures import Drawing, draw_figures, paper_sheets
from rewound.reports.sheets import Sheet, legend_entries, save_sheet


def table(
    recipe: str = "digits",
    techniques: Iterable[str] = (LR, WEIGHT, FINE),
    densities: Iterable[float] = (0.5, 0.25, 0.125),
    pruning: str = "unstructured",
    iterative: bool = False,
) -> list[Row]:
    made = [Row(recipe, "", False, "", 1, None, trial, 0.95, 0.95 + trial / 1000, 1000) for trial in (-1, 0, 1)]
    for technique in techniques:
        for density in densities:
            for t in (4.0, 8.0, 16.0):
                value = 0.95 - 0.0004 / density * (17 / t) ** 0.1
                flops = round(1000 * density)
                setting = (recipe, pruning, iterative, technique, density, t)
                made += [Row(*setting, trial, value, value + trial / 1000, flops) for trial in (-1, 0, 1)]
    return made


# What stands where


def numbers(made: Iterable[Row]) -> list[int]:
    found = measured(Evidence(Tables(made)))
    return [number for number in NAMES if shown(number, found)]


def test_a_recipe_of_ones_own_stands_in_every_figure_it_fits() -> None:
    assert numbers(table()) == [1, 3, 7, 9]
    assert numbers(table(iterative=True)) == [2, 5, 6, 8, 9, 11, 12]
    assert numbers(table(pruning="structured-x")) == [1, 4, 7, 10]
    assert numbers(table() + table(iterative=True)) == [1, 2, 3, 5, 6, 7, 8, 9, 11, 12]


def test_nothing_is_called_retrained_in_full_that_was_not(tmp_path: Path) -> None:
    rows, algorithm_1 = table(iterative=True), Drawing(NAMES[5])
    for epochs, full in ((8.0, {8.0}), (16.0, {16.0}), (32.0, set())):
        found = measured(Evidence(Tables(rows), training_epochs={"digits": epochs}))
        points = [point for panel in shown(5, found) for point in panel.points]
        assert {point.retrain_epochs for point in points} == full
    draw_figures(Evidence(Tables(rows), training_epochs={"digits": 8.0}), tmp_path, print, algorithm_1)
    assert "lr-rewinding,0.5,8," in (tmp_path / "paper" / "points.csv").read_text()
    with pytest.raises(InputError, match="nothing to draw"):
        draw_figures(Evidence(Tables(rows), training_epochs={"digits": 32.0}), tmp_path, print, algorithm_1)


def test_a_network_of_the_appendix_stands_in_the_main_figures_where_they_would_be_empty() -> None:
    assert numbers(table(R20)) == [1, 3, 7, 9]
    found = measured(Evidence(Tables(table(R20) + table(R56))))
    assert [panel.measured.recipe for panel in shown(1, found)] == [R56]
    assert [panel.measured.recipe for panel in shown(7, found)] == [R20, R56]


def test_a_technique_of_ones_own_is_never_hidden() -> None:
    names = (LR, WEIGHT, FINE, "low-lr-weight-rewinding", "reinitialization", "my.package:cyclic")
    found = measured(Evidence(Tables(table(techniques=names) + table(techniques=names, iterative=True))))
    assert set(shown(1, found)[0].curves) == {LR, WEIGHT, FINE, "my.package:cyclic"}
    assert set(shown(7, found)[0].curves) == set(names)
    assert set(shown(5, found)[0].curves) == {LR, "my.package:cyclic"}


def test_one_retraining_time_is_no_curve_and_less_than_t_is_not_algorithm_1() -> None:
    once = [row for row in table(iterative=True) if row.dense or row.retrain_epochs == 16]
    assert numbers(once) == [2, 5, 6, 8, 11, 12]
    partly = [row for row in table(iterative=True) if row.technique in ("", WEIGHT)]
    assert numbers(partly) == [2, 8, 9, 11], "weights rewound to at most .9T alone are nobody's rival"


def test_a_dense_control_is_no_point_of_the_paper() -> None:
    found = measured(Evidence(Tables(table(densities=(1.0, 0.5)))))
    assert [panel.density for panel in shown(9, found)] == [0.5]


# A table to compare with


def test_a_compared_table_stands_in_every_figure_as_ours_does() -> None:
    both = table() + table(iterative=True) + table(pruning="structured-x")
    found = measured(Evidence(Tables(both), both))
    panels = [panel for number in NAMES for panel in shown(number, found)]
    assert {(panel.x, panel.y) for panel in panels} == {
        ("compression", "delta"),
        ("time", "delta"),
        ("compression", "speed-up"),
    }
    assert all(panel.theirs == panel.curves for panel in panels)
    assert not any(panel.theirs for number in NAMES for panel in shown(number, measured(Evidence(Tables(both)))))


def test_deltas_and_speedups_of_a_compared_table_are_to_its_own_dense_networks() -> None:
    def worse(row: Row) -> Row:
        return replace(row, test=(row.test or 0) - 0.02, flops=3 * (row.flops or 0))

    found = measured(Evidence(Tables(table(iterative=True)), [worse(row) for row in table(iterative=True)]))
    for number in (2, 11):
        (panel,) = shown(number, found)
        ours, theirs = ([point.median for point in curves[LR]] for curves in (panel.curves, panel.theirs))
        assert theirs == pytest.approx(ours)


def test_only_what_both_tables_have_is_compared() -> None:
    theirs = [row for row in table(densities=(0.5, 0.25, 0.1)) if row.dense or row.retrain_epochs != 16]
    (panel,) = shown(1, measured(Evidence(Tables(table()), theirs + table("another"))))
    assert {(point.density, point.retrain_epochs) for point in panel.points} == {(d, 16) for d in (0.5, 0.25, 0.125)}
    compared = {(point.density, point.retrain_epochs) for curve in panel.theirs.values() for point in curve}
    assert compared == {(0.5, 8), (0.25, 8)}, "at their best time of those that ours has too"


def test_a_compared_table_without_dense_networks_stays_where_it_is() -> None:
    theirs = [replace(row, test=(row.test or 0) - 0.02) for row in table() if not row.dense]
    (panel,) = shown(1, measured(Evidence(Tables(table()), theirs)))
    assert [point.median for point in panel.theirs[LR]] == pytest.approx([p.median - 2 for p in panel.curves[LR]])


# How it is drawn


def drawn(made: Iterable[Row], number: int, theirs: Sequence[Row] = ()) -> Sheet:
    return next(paper_sheets(Evidence(Tables(list(made)), theirs), [FIGURES[NAMES[number]]]))


@pytest.mark.parametrize("number", [1, 3, 6, 9, 11])
def test_a_compared_table_is_hollow_and_seen(number: int) -> None:
    made = table() + table(iterative=True)
    theirs = [row if row.dense else replace(row, test=(row.test or 0) + 0.01) for row in made]
    sheet = drawn(made, number, theirs)
    assert "The compared table" in legend_entries(sheet)
    for panel, chart in zip(sheet.panels, charts(sheet), strict=True):
        points = points_of(chart, "transparent")
        assert {point["technique"] for point in points} == set(panel.theirs) == {LR, WEIGHT, FINE}
        bottom, top = limits(chart, "y")
        assert all(bottom < point["value"] < top for point in points)
    assert "The compared table" not in legend_entries(drawn(made, number))


def test_the_horizontal_axis_is_compression_and_logarithmic() -> None:
    sheet = drawn(table(R56, iterative=True), 2)
    (chart,) = charts(sheet)
    left, right = limits(chart, "x")
    assert left < 2 < 8 < 33 < right, "other works reach 33.33x"
    assert {x["scale"]["type"] for x in parts(chart, "x") if "scale" in x} == {"log"}
    assert limits(chart, "y") == (-3, 1), "the authors' limits"
    _, found = boxes(sheet)
    assert [box.text for box in sorted(found) if "×" in box.text] == ["2.00×", "4.00×", "8.00×"]


@pytest.mark.parametrize("faster", [0.5, 1.0, 2.0])
def test_a_speedup_beyond_the_authors_limits_is_shown(faster: float) -> None:
    slow = [replace(row, flops=2 * (row.flops or 0)) for row in table(R56, iterative=True)]
    made = [replace(row, flops=round((row.flops or 0) / faster)) if row.technique == LR else row for row in slow]
    assert limits(charts(drawn(made, 12))[0], "y") == (min(0.9, faster), max(1.3, faster))
    low, high = limits(charts(drawn([replace(row, recipe="digits") for row in made], 12))[0], "y")
    assert low < min(1, faster) and high > max(1, faster), "the data's, for a recipe of one's own"  # noqa: PT018


def points_of(chart: dict[str, Any], fill: str) -> list[dict[str, Any]]:
    """The data of a chart's points with this fill."""
    layers = [layer for layer in chart["layer"] if "mark" in layer and "data" in layer]
    (found,) = (layer["data"]["values"] for layer in layers if layer["mark"].get("fill") == fill)
    return list(found)


def test_other_works_are_black_dots_and_named() -> None:
    sheet = drawn(table(R56, iterative=True) + table(R50, iterative=True), 2)
    assert [len(points_of(chart, "black")) for chart in charts(sheet)] == [4, 1]
    _, found = boxes(sheet)
    assert {"Carreira-Perpiñán &", "He et al. (2018)"} <= {box.text for box in found}
    sheet = drawn(table(R56, pruning="structured-b", densities=(0.8711749789, 0.7)), 10)
    assert len(points_of(charts(sheet)[0], "black")) == 2
    assert "Liu et al. (2019)" in legend_entries(sheet)


def test_a_line_ends_where_it_leaves_the_axis() -> None:
    """One technique falls from -1 at 2x to -5 at 8x, and the axis ends at -3: halfway on a logarithmic axis, at 4x."""
    deltas = {0.5: -1.0, 0.125: -5.0, 0.0625: -5.0, 0.03125: -1.0}
    made = [
        row if row.dense else replace(row, val=0.95, test=0.95 + deltas[row.density] / 100)
        for row in table(R56, [FINE], deltas, iterative=True)
    ]
    sheet = drawn(made, 2)
    (chart,) = charts(sheet)
    (layer,) = (layer for layer in chart["layer"] if layer.get("mark", {}).get("type") == "line" and "data" in layer)
    corners = sorted((point["compression"], point["value"]) for point in layer["data"]["values"])
    assert [value for _, value in corners] == pytest.approx([-1, -3, None, None, -3, -1])
    assert [at for at, _ in corners] == pytest.approx([2, 4, 8, 16, 16 * 2**0.5, 32])
    assert "Median below the axis" in legend_entries(sheet)


def test_what_is_left_out_or_failed_is_counted() -> None:
    made = table(GNMT, densities=(0.5, 0.02, 0.01))
    made = [in_bleu(row) for row in made]
    made[-1] = replace(made[3], val=None, test=None)  # a trial of density 0.5
    sheet = drawn(made, 1)
    assert [point.density for point in sheet.panels[0].points] == [0.5] * 3
    _, found = boxes(sheet)
    (subtitle,) = (box.text for box in found if "trials" in box.text)
    assert (
        subtitle == "Median and min to max of 3 trials; 1 failed not drawn; 2 higher ratios left out, as in the paper"
    )


def test_one_trial_is_enough() -> None:
    sheet = drawn([row for row in table() if row.trial == 1], 1)
    _, found = boxes(sheet)
    assert "1 trial" in {box.text for box in found}
    assert not any("Dense" in name for name in legend_entries(sheet)), "its spread is unknown"


@pytest.mark.parametrize("name", ["a recipe whose name is long, and longer, and longer still, " * 2, "$x_1$ & <b>"])
def test_names_are_whole_and_fit(name: str, tmp_path: Path) -> None:
    sheet = drawn(table(name), 9)
    (width, _), found = boxes(sheet)
    (title,) = (box for box in found if name.strip() in box.text)
    assert 0 <= title.left < title.right <= width
    (path,) = save_sheet(sheet, tmp_path, ["svg"])
    assert html.escape(name.strip(), quote=False) in path.read_text()


# Files


def draw(made: list[Row], out: Path, drawing: Drawing, theirs: Sequence[Row] = ()) -> tuple[list[str], str]:
    said: list[str] = []
    paths = draw_figures(Evidence(Tables(made), theirs), out, said.append, drawing)
    assert all(path.stat().st_size > 100 for path in paths)
    return [str(path.relative_to(out)) for path in paths], "\n".join(said)


def test_files_are_named_after_the_paper_and_figures_without_data_are_counted(tmp_path: Path) -> None:
    names, said = draw(table("my.tasks:Digits/2", densities=(0.5, 0.1)), tmp_path, Drawing("paper", ("svg",)))
    recipe = "my.tasks-Digits-2"
    alone = "paper/figure-9-app-usability-unstructured"
    assert names == [
        "paper/points.csv",
        "paper/figure-1-sparsity-oneshot.svg",
        "paper/figure-3-usability-unstructured.svg",  # one panel: 10x loses less than 1%, and 2x already something
        "paper/figure-7-app-sparsity-oneshot.svg",
        f"{alone}-{recipe}.svg",
        *(f"{alone}/{recipe}-unstructured-one-shot-{n}.00x.svg" for n in (2, 10)),
    ]
    assert said.strip() == "no data for 8 of the paper's 12 figures: 2, 4, 5, 6, 8, 10, 11, 12"


def test_points_csv_has_every_number_drawn(tmp_path: Path) -> None:
    made, compared = table(R56, iterative=True), table(R56, [LR], iterative=True)
    draw(made, tmp_path, Drawing("figure-2-sparsity-iterative", ("svg",)), compared)
    with (tmp_path / "paper" / "points.csv").open() as file:
        found = list(csv.DictReader(file))
    assert Counter(row["table"] for row in found) == {"ours": 3 * 3, "compared": 3, "published": 4}
    ours = [row for row in found if row["technique"] == LR and row["table"] == "ours"]
    assert ours == [{**row, "table": "ours"} for row in found if row["table"] == "compared"], "the same runs"
    assert [(row["density"], row["retrain_epochs"], row["unit"], row["trials"]) for row in ours] == [
        (density, "16", "points", "3") for density in ("0.5", "0.25", "0.125")
    ]
    assert float(ours[0]["low"]) < float(ours[0]["median"]) < float(ours[0]["high"])
    (theirs,) = (row for row in found if row["density"] == "0.1497")
    assert (theirs["technique"], theirs["median"], theirs["trials"]) == (
        "Carreira-Perpiñán & Idelbayev (2018)",
        "-0.0600",
        "",
    )


def test_one_figure_by_name_in_every_format_and_none_at_all(tmp_path: Path) -> None:
    name = "figure-11-flops"
    names, said = draw(table(iterative=True), tmp_path, Drawing(name, ("png", "svg", "pdf")))
    assert names == ["paper/points.csv", *(f"paper/{name}.{suffix}" for suffix in ("png", "svg", "pdf"))]
    assert said.strip() == ""
    assert (tmp_path / f"paper/{name}.pdf").read_bytes().startswith(b"%PDF")
    assert draw(table(), tmp_path, Drawing("none")) == ([], "")


def test_the_same_rows_give_the_same_files(tmp_path: Path) -> None:
    drawing = Drawing("figure-1-sparsity-oneshot", ("svg", "pdf"))
    for folder, made in (("a", table()), ("b", table()[::-1])):
        draw(made, tmp_path / folder, drawing)
    for path in (tmp_path / "a").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes(), path.name


@pytest.mark.slow
def test_several_processes_draw_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = Drawing("figure-9-app-usability-unstructured", ("svg",))
    names, _ = draw(table(), tmp_path / "one", drawing)
    monkeypatch.setattr("rewound.reports.figures._WORTH_PROCESSES", 2)
    monkeypatch.setattr("rewound.reports.figures.usable_cores", lambda: 2)
    assert draw(table(), tmp_path / "two", drawing) == (names, "")
    assert len(names) == 1 + 1 + 3
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in names)


def test_nothing_to_draw_and_unknown_words_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to draw: none of the 84 rows belongs to figure-11-flops"):
        draw(table(), tmp_path, Drawing("figure-11-flops"))
    with pytest.raises(InputError, match="nothing to draw: none of the 3 rows belongs to the paper's figures"):
        draw(table()[:3], tmp_path, Drawing("paper"))
    with pytest.raises(InputError, match=r"unknown figures 'papers'; known: default, paper, none, figure-1-"):
        Drawing("papers")
    with pytest.raises(InputError, match="unknown format 'jpg' of figures; known: png, svg, pdf"):
        Drawing("paper", ("png", "jpg"))
