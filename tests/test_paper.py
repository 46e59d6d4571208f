"""The paper's figures: its own numbers from the authors' tables, and its conventions on any other table."""

import csv
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from rich.console import Console

from rewound.drawing import Drawing, draw_figures
from rewound.errors import InputError
from rewound.literature import AGAINST_TIME
from rewound.pages.paper import Sheet, draw_sheet, save_sheet, sheets
from rewound.panels import Experiment, Panel, Point, experiments
from rewound.paper import FIGURES, panels
from rewound.results import Row, read_rows

PAPER = Path(__file__).parents[2] / "shared" / "paper"
R20, R56, R110 = "cifar10-resnet20", "cifar10-resnet56", "cifar10-resnet110"
R34, R50, GNMT = "imagenet-resnet34", "imagenet-resnet50", "wmt16-gnmt"
LR, WEIGHT, FINE = "lr-rewinding", "weight-rewinding", "fine-tuning"
NAMES = {int(name.split("-")[1]): name for name in FIGURES}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    if not PAPER.exists():
        pytest.skip(f"the authors' tables are not at {PAPER}")
    return read_rows(PAPER / "published-dense.csv.gz") + read_rows(PAPER / "published-pruned.csv.gz")


@pytest.fixture(scope="module")
def published(rows: list[Row]) -> list[Experiment]:
    return experiments(rows)


def shown(number: int, found: Iterable[Experiment]) -> list[Panel]:
    return panels(FIGURES[NAMES[number]], found)


def panel_of(number: int, found: Iterable[Experiment], recipe: str, pruning: str = "unstructured") -> Panel:
    (panel,) = (
        panel
        for panel in shown(number, found)
        if (panel.experiment.recipe, panel.experiment.pruning) == (recipe, pruning)
    )
    return panel


def at(panel: Panel, technique: str, compression: float) -> Point:
    (point,) = (p for p in panel.curves[technique] if abs(1 / p.density / compression - 1) < 0.005)
    return point


# The paper's numbers. Sources: "notes 7" are the fidelity notes, section 7; "tex" is the paper's source.


@pytest.mark.parametrize(
    ("figure", "recipe", "technique", "compression", "delta", "source"),
    [
        (2, R50, LR, 5.96, 0.00, "notes 7; tex, section 3: matches the original network at 5.96x"),
        (2, R50, WEIGHT, 5.96, -0.40, "notes 7"),
        (2, R56, LR, 9.31, +0.10, "notes 7"),
        (2, R56, LR, 22.7, -0.89, "notes 7"),
        (2, R56, FINE, 9.31, -1.26, "notes 7"),
        (2, GNMT, LR, 5.96, +0.17, "notes 7"),
        (2, GNMT, LR, 9.31, -0.62, "notes 7"),
        (2, GNMT, FINE, 9.31, -1.29, "notes 7"),
        (5, R50, LR, 5.96, 0.00, "tex, section 5: the same results without a search; t = 90 in notes 7"),
        (8, R56, LR, 9.31, +0.10, "the same panel in the appendix"),
    ],
)
def test_deltas(
    published: list[Experiment],
    figure: int,
    recipe: str,
    technique: str,
    compression: float,
    delta: float,
    source: str,
) -> None:
    point = at(panel_of(figure, published, recipe), technique, compression)
    assert point.median == pytest.approx(delta, abs=0.005), source
    assert point.low <= point.median <= point.high
    assert point.trials == 3


@pytest.mark.parametrize(
    ("compression", "technique", "speedup", "source"),
    [
        (5.96, LR, 4.83, "tex, appendix F: 4.8x at the accuracy of the original network"),
        (1.95, FINE, 1.71, "tex, appendix F: a similarly accurate fine-tuned network, 1.7x"),
    ],
)
def test_speedups(published: list[Experiment], compression: float, technique: str, speedup: float, source: str) -> None:
    point = at(panel_of(11, published, R50), technique, compression)
    assert point.median == pytest.approx(speedup, abs=0.005), source


def test_rewinding_is_faster_than_fine_tuning(published: list[Experiment]) -> None:
    resnet50 = panel_of(12, published, R50)
    assert at(resnet50, LR, 5.96).median == pytest.approx(4.827 / 3.893, abs=0.001)
    assert {point.median for point in resnet50.curves[FINE]} == {1.0}
    assert [panel.experiment.recipe for panel in shown(12, published)] == [R56, R110, R50], "as the paper's figure has"


@pytest.mark.parametrize(
    ("figure", "recipe", "pruning", "ratios"),
    [
        (3, R56, "unstructured", ["4.77", "9.31"]),
        (3, R50, "unstructured", ["3.05", "5.96"]),
        (3, GNMT, "unstructured", ["3.82", "5.96"]),
        (4, R56, "structured-b", ["1.15", "1.70"]),
        (4, R34, "structured-a", ["1.08", "1.26"]),
    ],
)
def test_panels_of_the_main_text_by_search_cost(
    published: list[Experiment], figure: int, recipe: str, pruning: str, ratios: list[str]
) -> None:
    """Notes 7, "Main-text panels": found by the paper's definitions of no drop and of 1% or 1 BLEU."""
    found = [p for p in shown(figure, published) if (p.experiment.recipe, p.experiment.pruning) == (recipe, pruning)]
    assert [f"{1 / (panel.density or 1):.2f}" for panel in found] == ratios
    assert {panel.experiment.recipe for panel in shown(figure, published)} <= {R56, R50, GNMT, R34}
    assert all(set(panel.curves) == {LR, WEIGHT, FINE} for panel in found)


@pytest.mark.parametrize(
    ("recipe", "mean", "spread", "source"),
    [
        (R20, 91.71, 0.23, "tex, table 2"),
        (R56, 93.46, 0.21, "tex, table 1"),
        (R110, 93.78, 0.23, "notes 8.5 (the paper prints 93.77)"),
        (R34, 73.50, 0.26, "notes 8.5 (the paper prints the median, 73.60); rows stand twice"),
        (R50, 76.17, 0.14, "tex, table 1"),
        (GNMT, 26.87, 0.23, "tex, table 1"),
    ],
)
def test_dense_networks(published: list[Experiment], recipe: str, mean: float, spread: float, source: str) -> None:
    dense = next(each.baseline for each in published if each.recipe == recipe)
    assert dense.mean * dense.scale == pytest.approx(mean, abs=0.005), source
    assert dense.spread == pytest.approx(spread, abs=0.005), source


DOTS = {  # notes 7, "Black dots": (ratio, delta, error)
    R56: {("6.68", -0.06, None), ("10.00", +0.16, None), ("20.00", -0.65, None), ("33.33", -1.35, None)},
    R50: {("5.13", -0.02, None)},
    GNMT: {("5.00", +0.09, None), ("6.67", -0.25, None), ("10.00", -0.58, None)},
}
LIU = {
    (R56, "structured-a"): ("1.086", -0.05, 0.14),
    (R56, "structured-b"): ("1.148", -0.09, 0.18),
    (R110, "structured-a"): ("1.023", +0.11, 0.22),
    (R110, "structured-b"): ("1.454", +0.46, 0.25),
    (R34, "structured-a"): ("1.082", -0.28, None),
    (R34, "structured-b"): ("1.119", -0.40, None),
}


def test_black_dots(published: list[Experiment]) -> None:
    for recipe, dots in DOTS.items():
        for figure in (2, 5, 6, 8):
            found = panel_of(figure, published, recipe).published
            assert {(f"{1 / dot.density:.2f}", dot.delta, dot.error) for dot in found} == dots
    for setting, dot in LIU.items():
        (found,) = panel_of(7, published, *setting).published
        assert (f"{1 / found.density:.3f}", found.delta, found.error) == dot
    for figure in (1, 3, 4, 9):
        assert not any(panel.published for panel in shown(figure, published))
    times = [panel for panel in shown(10, published) if panel.published]
    assert [panel.rank for panel in times] == [0] * 6, "only at the mildest pruning"
    assert {dot for panel in times for dot in panel.published} == set(AGAINST_TIME)


DENSITIES = {  # of structured pruning, notes 4
    (R56, "structured-a"): [0.92092, 0.84525, 0.77800, 0.71628, 0.66436],
    (R56, "structured-b"): [0.87117, 0.77631, 0.69986, 0.63810, 0.58790],
    (R110, "structured-a"): [0.97726, 0.96589, 0.96021, 0.95737, 0.95620],
    (R110, "structured-b"): [0.68759, 0.47899, 0.33837, 0.24681, 0.18307],
    (R34, "structured-a"): [0.92464, 0.87203, 0.83551, 0.80937, 0.79138],
    (R34, "structured-b"): [0.89372, 0.83317, 0.79867, 0.77835, 0.76671],
}


def test_appendix_panels(published: list[Experiment]) -> None:
    """As many as the pages of figures 9 and 10 have (tex, lines 799 to 998)."""
    counts = dict.fromkeys((R20, R56, R110, R50), 20) | {GNMT: 28}
    for recipe, count in counts.items():
        mine = [panel for panel in shown(9, published) if panel.experiment.recipe == recipe]
        assert len(mine) == count
        assert [panel.experiment.iterative for panel in mine] == [False, True] * (count // 2), "in pairs"
        assert all(len(panel.curves) >= 3 for panel in mine)
    for setting, densities in DENSITIES.items():
        mine = [p for p in shown(10, published) if (p.experiment.recipe, p.experiment.pruning) == setting]
        assert [panel.density for panel in mine] == pytest.approx(densities, abs=1e-5)
    assert len(shown(10, published)) == 30


def test_algorithm_1_retrains_in_full(published: list[Experiment]) -> None:
    """Notes 7, force_single: t = T, weight rewinding at the largest t up to .9T."""
    for recipe, full, most in ((R56, 182, 150), (R50, 90, 81), (GNMT, 5, 4.5)):
        curves = panel_of(6, published, recipe).curves
        assert {point.retrain_epochs for technique in (LR, FINE) for point in curves[technique]} == {full}
        assert {point.retrain_epochs for point in curves[WEIGHT]} == {most}
        assert set(panel_of(5, published, recipe).curves) == {LR}


def test_main_figures_leave_out_ablations_and_appendix_networks(published: list[Experiment]) -> None:
    main = [(p.experiment.recipe, p.experiment.pruning) for p in shown(1, published)]
    unstructured = "unstructured"
    assert main == [
        *((R56, unstructured), (R56, "structured-b"), (R50, unstructured)),
        *((R34, "structured-a"), (GNMT, unstructured)),
    ]
    assert [p.experiment.recipe for p in shown(2, published)] == [R56, R50, GNMT]
    assert [p.experiment.recipe for p in shown(8, published)] == [R20, R56, R110, R50, GNMT]
    assert all(set(p.curves) == {LR, WEIGHT, FINE} for n in (1, 2, 8) for p in shown(n, published))
    assert len(shown(7, published)) == 11
    assert all(len(panel.curves) == 5 for panel in shown(7, published))


def test_every_figure_and_panel_has_a_file(rows: list[Row]) -> None:
    made = list(sheets(rows))
    assert {sheet.figure.name for sheet in made} == set(FIGURES)
    assert sum(not sheet.alone for sheet in made) == 18, "ten figures, and figures 9 and 10 by network"
    assert sum(len(sheet.panels) for sheet in made if not sheet.alone) == sum(sheet.alone for sheet in made) == 186
    assert len({sheet.name for sheet in made}) == len(made)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn(rows: list[Row], tmp_path: Path, name: str) -> None:
    made = list(sheets(rows, [FIGURES[name]]))
    for sheet in (made[0], made[-1]):
        (path,) = save_sheet(sheet, tmp_path, ["svg"])
        texts = re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text())
        assert sheet.title in texts
        assert any(re.match(r"Median and min to max of (1 to )?3 trials", text) for text in texts)


@pytest.mark.parametrize("number", [2, 7, 10])
def test_nothing_overlaps(rows: list[Row], number: int) -> None:
    made = list(sheets(rows, [FIGURES[NAMES[number]]]))
    for sheet in (made[0], made[-1]):
        figure = draw_sheet(sheet)
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
        boxes = [axes.get_tightbbox(renderer) for axes in figure.axes if axes.get_visible()]
        boxes += [text.get_window_extent(renderer) for text in figure.texts]
        boxes += [legend.get_window_extent(renderer) for legend in figure.legends]
        found = [(box.x0, box.y0, box.x1, box.y1) for box in boxes if box is not None]
        for index, (left, low, right, high) in enumerate(found):
            assert left >= 0 and low >= 0, sheet.name  # noqa: PT018
            assert right <= figure.bbox.width + 1 and high <= figure.bbox.height + 1, sheet.name  # noqa: PT018
            for x0, y0, x1, y1 in found[:index]:
                assert min(right, x1) - max(left, x0) <= 1 or min(high, y1) - max(low, y0) <= 1, sheet.name


# Conventions, on small tables


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


def numbers(made: Iterable[Row]) -> list[int]:
    found = experiments(made)
    return [number for number in NAMES if shown(number, found)]


def test_a_recipe_of_ones_own_stands_in_every_figure_it_fits() -> None:
    assert numbers(table()) == [1, 3, 7, 9]
    assert numbers(table(iterative=True)) == [2, 5, 6, 8, 9, 11, 12]
    assert numbers(table(pruning="structured-x")) == [1, 4, 7, 10]
    assert numbers(table() + table(iterative=True)) == [1, 2, 3, 5, 6, 7, 8, 9, 11, 12]


def test_a_network_of_the_appendix_stands_in_the_main_figures_where_they_would_be_empty() -> None:
    assert numbers(table(R20)) == [1, 3, 7, 9]
    found = experiments(table(R20) + table(R56))
    assert [panel.experiment.recipe for panel in shown(1, found)] == [R56]
    assert [panel.experiment.recipe for panel in shown(7, found)] == [R20, R56]


def test_a_technique_of_ones_own_is_never_hidden() -> None:
    names = (LR, WEIGHT, FINE, "low-lr-weight-rewinding", "reinitialization", "my.package:cyclic")
    found = experiments(table(techniques=names) + table(techniques=names, iterative=True))
    assert set(shown(1, found)[0].curves) == {LR, WEIGHT, FINE, "my.package:cyclic"}
    assert set(shown(7, found)[0].curves) == set(names)
    assert set(shown(5, found)[0].curves) == {LR, "my.package:cyclic"}


def test_one_retraining_time_is_no_curve_and_less_than_t_is_not_algorithm_1() -> None:
    once = [row for row in table(iterative=True) if row.dense or row.retrain_epochs == 16]
    assert numbers(once) == [2, 5, 6, 8, 11, 12]
    partly = [row for row in table(iterative=True) if row.technique in ("", WEIGHT)]
    assert numbers(partly) == [2, 8, 9, 11], "weights rewound to at most .9T alone are nobody's rival"


def test_a_dense_control_is_no_point_of_the_paper() -> None:
    found = experiments(table(densities=(1.0, 0.5)))
    assert [panel.density for panel in shown(9, found)] == [0.5]


def drawn(made: Iterable[Row], number: int) -> tuple[Sheet, Figure]:
    sheet = next(sheets(made, [FIGURES[NAMES[number]]]))
    return sheet, draw_sheet(sheet)


def test_the_horizontal_axis_is_density_reversed_and_logarithmic() -> None:
    _, figure = drawn(table(R56, iterative=True), 2)
    (axes,) = figure.axes
    left, right = axes.get_xlim()
    assert (left > right, axes.get_xscale()) == (True, "log")
    assert axes.get_ylim() == (-3, 1), "the authors' limits"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2.00×", "4.00×", "8.00×"]


def test_other_works_are_black_dots_and_named() -> None:
    _, figure = drawn(table(R56, iterative=True) + table(R50, iterative=True), 2)
    for axes, count in zip(figure.axes, (4, 1), strict=True):
        (dots,) = (line for line in axes.lines if to_hex(str(line.get_color())) == "#000000")
        assert len(dots.get_xydata()) == count
        assert len(axes.get_legend().get_texts()) == 1
    _, figure = drawn(table(R56, pruning="structured-b", densities=(0.8711749789, 0.7)), 10)
    assert [len(line.get_xydata()) for line in figure.axes[0].lines if to_hex(str(line.get_color())) == "#000000"] == [
        2
    ]
    assert "Liu et al. (2019)" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_what_is_left_out_or_failed_is_counted() -> None:
    made = table(GNMT, densities=(0.5, 0.02, 0.01))
    made = [replace(row, val=30 * (row.val or 0), test=30 * (row.test or 0)) for row in made]
    made[-1] = replace(made[3], val=None, test=None)  # a trial of density 0.5
    sheet, figure = drawn(made, 1)
    assert [point.density for point in sheet.panels[0].points] == [0.5] * 3
    (subtitle,) = (text.get_text() for text in figure.texts if "trials" in text.get_text())
    assert (
        subtitle == "Median and min to max of 3 trials; 1 failed not drawn; 2 higher ratios left out, as in the paper"
    )


def test_one_trial_is_enough() -> None:
    _, figure = drawn([row for row in table() if row.trial == 1], 1)
    assert "1 trial" in [text.get_text() for text in figure.texts]
    assert not any("Dense" in text.get_text() for text in figure.legends[0].get_texts()), "its spread is unknown"


def draw(made: list[Row], out: Path, drawing: Drawing) -> tuple[list[str], str]:
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        paths = draw_figures(made, out, console, drawing)
    assert all(path.stat().st_size > 100 for path in paths)
    return [str(path.relative_to(out)) for path in paths], capture.get()


def test_files_are_named_after_the_paper_and_figures_without_data_are_counted(tmp_path: Path) -> None:
    names, said = draw(table("my.tasks:Digits/2", densities=(0.5, 0.1)), tmp_path, Drawing("paper", ("svg",)))
    recipe = "my.tasks-Digits-2"
    alone = "paper/figure-9-app-usability-unstructured"
    assert names == [
        "paper/points.csv",
        "paper/figure-1-sparsity-oneshot.svg",
        "paper/figure-3-usability-unstructured.svg",
        *(f"paper/figure-3-usability-unstructured/{recipe}-unstructured-one-shot-{n}.00x.svg" for n in (2, 10)),
        "paper/figure-7-app-sparsity-oneshot.svg",
        f"{alone}-{recipe}.svg",
        *(f"{alone}/{recipe}-unstructured-one-shot-{n}.00x.svg" for n in (2, 10)),
    ]
    assert said.strip() == "no data for 8 of the paper's 12 figures: 2, 4, 5, 6, 8, 10, 11, 12"


def test_points_csv_has_every_number_drawn(tmp_path: Path) -> None:
    draw(table(R56, iterative=True), tmp_path, Drawing("figure-2-sparsity-iterative", ("svg",)))
    with (tmp_path / "paper" / "points.csv").open() as file:
        found = list(csv.DictReader(file))
    assert len(found) == 3 * 3 + 4
    ours = [row for row in found if row["technique"] == LR]
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
    monkeypatch.setattr("rewound.drawing._WORTH_A_PROCESS", 2)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
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
