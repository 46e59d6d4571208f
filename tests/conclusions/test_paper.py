"""The paper's figures from the authors' tables: its own numbers, its panels, and every sheet drawn."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from drawn_figures import boxes, charts, layout
from paper_panels import FINE, GNMT, LR, NAMES, R20, R34, R50, R56, R110, WEIGHT, shown
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.paper.figures import FIGURES
from rewound.conclusions.paper.networks import AGAINST_TIME, TRAINING_EPOCHS
from rewound.conclusions.paper.panels import FigurePoint, Measured, Panel, measured
from rewound.conclusions.tables import Row, Tables
from rewound.reports.figures import paper_sheets
from rewound.reports.look import panel_limits
from rewound.reports.sheets import legend_entries, save_sheet
from rewound.tasks.recipes import recipe_named


@pytest.fixture(scope="module")
def published(authors: list[Row]) -> list[Measured]:
    return measured(Evidence(Tables(authors)))


def panel_of(number: int, found: Iterable[Measured], recipe: str, pruning: str = "unstructured") -> Panel:
    (panel,) = (
        panel for panel in shown(number, found) if (panel.measured.recipe, panel.measured.pruning) == (recipe, pruning)
    )
    return panel


def at(panel: Panel, technique: str, compression: float) -> FigurePoint:
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
def test_differences_to_the_dense_network_are_those_the_paper_states(
    published: list[Measured],
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
def test_speedups_are_those_the_paper_states(
    published: list[Measured], compression: float, technique: str, speedup: float, source: str
) -> None:
    point = at(panel_of(11, published, R50), technique, compression)
    assert point.median == pytest.approx(speedup, abs=0.005), source


def test_rewinding_is_faster_than_fine_tuning(published: list[Measured]) -> None:
    resnet50 = panel_of(12, published, R50)
    assert at(resnet50, LR, 5.96).median == pytest.approx(4.827 / 3.893, abs=0.001)
    assert {point.median for point in resnet50.curves[FINE]} == {1.0}
    assert [panel.measured.recipe for panel in shown(12, published)] == [R56, R110, R50], "as the paper's figure has"


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
    published: list[Measured], figure: int, recipe: str, pruning: str, ratios: list[str]
) -> None:
    """Notes 7, "Main-text panels": found by the paper's definitions of no drop and of 1% or 1 BLEU (tex, section 4)."""
    found = [p for p in shown(figure, published) if (p.measured.recipe, p.measured.pruning) == (recipe, pruning)]
    assert [f"{1 / (panel.density or 1):.2f}" for panel in found] == ratios
    assert {panel.measured.recipe for panel in shown(figure, published)} <= {R56, R50, GNMT, R34}
    assert all(set(panel.curves) == {LR, WEIGHT, FINE} for panel in found)


@pytest.mark.parametrize(("recipe", "ratios"), [(R20, ["3.05", "5.96"]), (R110, ["5.96", "9.31"])])
def test_the_same_definitions_choose_the_panels_of_other_networks(
    published: list[Measured], recipe: str, ratios: list[str]
) -> None:
    """Any time counts: at 5.96x, ResNet-20 is within 1% at two of ten times, ResNet-110 without a drop at one."""
    found = shown(3, (each for each in published if each.recipe == recipe))
    assert [f"{1 / (panel.density or 1):.2f}" for panel in found] == ratios


@pytest.mark.parametrize(
    ("recipe", "mean", "spread", "source"),
    [
        (R20, 91.71, 0.23, "tex, table 2"),
        (R56, 93.46, 0.21, "tex, table 1"),
        (R110, 93.78, 0.23, "notes 8.5 (the paper prints 93.77)"),
        (R34, 73.50, 0.29, "notes 8.5 (the paper prints the median, 73.60, and 0.27)"),
        (R50, 76.17, 0.14, "tex, table 1"),
        (GNMT, 26.87, 0.23, "tex, table 1"),
    ],
)
def test_dense_networks_have_the_mean_and_spread_the_paper_states(
    published: list[Measured], recipe: str, mean: float, spread: float, source: str
) -> None:
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


def test_black_dots_are_the_results_of_other_works(published: list[Measured]) -> None:
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


def test_the_appendix_has_a_panel_for_each_setting(published: list[Measured]) -> None:
    """As many as the pages of figures 9 and 10 have (tex, lines 799 to 998)."""
    counts = dict.fromkeys((R20, R56, R110, R50), 20) | {GNMT: 28}
    for recipe, count in counts.items():
        mine = [panel for panel in shown(9, published) if panel.measured.recipe == recipe]
        assert len(mine) == count
        assert [panel.measured.iterative for panel in mine] == [False, True] * (count // 2), "in pairs"
        assert all(len(panel.curves) >= 3 for panel in mine)
    for setting, densities in DENSITIES.items():
        mine = [p for p in shown(10, published) if (p.measured.recipe, p.measured.pruning) == setting]
        assert [panel.density for panel in mine] == pytest.approx(densities, abs=1e-5)
    assert len(shown(10, published)) == 30


def test_training_times_are_those_of_the_authors_and_of_the_recipes(authors: list[Row]) -> None:
    """The authors retrained for as long as they trained, too; T is not in their tables."""
    assert Evidence(Tables([row for row in authors if not row.dense])).guessed == TRAINING_EPOCHS
    for recipe in (R20, R56, R110):
        assert recipe_named(recipe)().training_epochs == TRAINING_EPOCHS[recipe]


def test_algorithm_1_retrains_in_full(published: list[Measured]) -> None:
    """Notes 7, force_single: t = T, weight rewinding at the largest t up to .9T."""
    for recipe, full, most in ((R56, 182, 150), (R50, 90, 81), (GNMT, 5, 4.5)):
        curves = panel_of(6, published, recipe).curves
        assert {point.retrain_epochs for technique in (LR, FINE) for point in curves[technique]} == {full}
        assert {point.retrain_epochs for point in curves[WEIGHT]} == {most}
        assert set(panel_of(5, published, recipe).curves) == {LR}


def test_main_figures_leave_out_ablations_and_appendix_networks(published: list[Measured]) -> None:
    main = [(p.measured.recipe, p.measured.pruning) for p in shown(1, published)]
    unstructured = "unstructured"
    assert main == [
        *((R56, unstructured), (R56, "structured-b"), (R50, unstructured)),
        *((R34, "structured-a"), (GNMT, unstructured)),
    ]
    assert [p.measured.recipe for p in shown(2, published)] == [R56, R50, GNMT]
    assert [p.measured.recipe for p in shown(8, published)] == [R20, R56, R110, R50, GNMT]
    assert all(set(p.curves) == {LR, WEIGHT, FINE} for n in (1, 2, 8) for p in shown(n, published))
    assert len(shown(7, published)) == 11
    assert all(len(panel.curves) == 5 for panel in shown(7, published))


def test_the_vertical_axes_reach_as_far_as_the_authors(published: list[Measured]) -> None:
    """Notes 7, "y limits"; of speed-ups those that their plotting code sets, figure 11's upper one is the data's."""
    main = {R56: (-3, 1), R50: (-6, 1), GNMT: (-8, 1.5)}
    accuracy = dict.fromkeys((R20, R56, R110, R50, R34), (-3, 1)) | {GNMT: (-6, 1.5)}
    times = accuracy | {R50: (-5, 1), R34: (-5, 1)}
    structured = dict.fromkeys((R56, R34), (-6, 1))
    relative = dict.fromkeys((R56, R110, R50), (0.9, 1.3))
    theirs = {3: main, 4: structured, 9: times, 10: times, 12: relative} | dict.fromkeys((1, 2, 5, 6, 7, 8), accuracy)
    for number, limits in theirs.items():
        assert all(panel_limits(panel) == limits[panel.measured.recipe] for panel in shown(number, published)), number
    for panel in shown(11, published):
        low, high = panel_limits(panel)
        assert low == 0.1
        assert high > max(point.high for point in panel.points)


def test_what_the_authors_limits_cut_is_marked(authors: list[Row]) -> None:
    """Figure 12's ResNet-110: the bars of ten points leave 0.9x to 1.3x, their medians do not."""
    _, _, resnet110, _ = paper_sheets(Evidence(Tables(authors)), [FIGURES[NAMES[12]]])
    _, marks = layout(resnet110)
    hollow = Counter(mark["shape"] for _, _, mark in marks if mark.get("fill") == "white" and "shape" in mark)
    assert hollow == {"triangle-down": 3 + 1, "triangle-up": 7 + 1}, "and one each in the legend"
    assert list(legend_entries(resnet110))[-2:] == ["Trials below the axis", "Trials above the axis"]


# Every sheet


def test_every_figure_and_panel_has_a_file(authors: list[Row]) -> None:
    made = list(paper_sheets(Evidence(Tables(authors))))
    assert {sheet.figure for sheet in made} == set(FIGURES)
    assert sum(not sheet.alone for sheet in made) == 18, "ten figures, and figures 9 and 10 by network"
    assert sum(len(sheet.panels) for sheet in made if not sheet.alone) == sum(sheet.alone for sheet in made) == 186
    assert len({sheet.name for sheet in made}) == len(made)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn(authors: list[Row], tmp_path: Path, name: str) -> None:
    made = list(paper_sheets(Evidence(Tables(authors)), [FIGURES[name]]))
    for sheet in (made[0], made[-1]):
        (path,) = save_sheet(sheet, tmp_path, ["svg"])
        texts = re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text())
        assert sheet.title in texts
        assert any(re.match(r"Median and min to max of (1 to )?3 trials", text) for text in texts)


@pytest.mark.parametrize("number", [2, 7, 10])
def test_nothing_overlaps(authors: list[Row], number: int) -> None:
    made = list(paper_sheets(Evidence(Tables(authors)), [FIGURES[NAMES[number]]]))
    for sheet in (made[0], made[-1]):
        (width, height), found = boxes(sheet)
        assert len(found) > 10
        for index, box in enumerate(found):
            assert box.left >= 0 and box.top >= 0, (sheet.name, box)  # noqa: PT018
            assert box.right <= width + 1 and box.bottom <= height + 1, (sheet.name, box)  # noqa: PT018
            assert not [other for other in found[:index] if box.overlaps(other)], (sheet.name, box)


def test_panels_of_a_sheet_have_the_same_size(authors: list[Row]) -> None:
    sheet = next(paper_sheets(Evidence(Tables(authors)), [FIGURES[NAMES[7]]]))
    assert len(charts(sheet)) == 11
    assert {(chart["width"], chart["height"]) for chart in charts(sheet)} == {sheet.size}
