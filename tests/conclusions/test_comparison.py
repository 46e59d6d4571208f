"""Comparing tables: the same cells are found, differences are judged by the rule, and what cannot be compared says why.

The criteria themselves are tried on replicas drawn from the authors' results: perfect ones pass, worse ones do not.
"""

import csv
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import pytest
from rich.console import Console

from rewound.conclusions.cells import Cell, cells, pooled
from rewound.conclusions.comparison import Card, compare, matched, overlay, write_comparison
from rewound.conclusions.paper.networks import TEST_SHARES
from rewound.conclusions.tables import Row, read_rows
from rewound.foundations.errors import InputError
from rewound.reports.terminal import conformance_card
from rewound.reports.words import note, remarks

RESULTS = Path(__file__).parents[2] / "results"


def dense(*tests: float, recipe: str = "digits") -> list[Row]:
    return [Row(recipe, "", False, "", 1, None, trial, test, test) for trial, test in enumerate(tests)]


def trials(
    *tests: float | None,
    technique: str = "lr-rewinding",
    density: float = 0.1,
    t: float = 16,
    iterative: bool = True,
    recipe: str = "digits",
) -> list[Row]:
    setting = (recipe, "unstructured", iterative, technique, density, t)
    return [Row(*setting, trial, test, test) for trial, test in enumerate(tests)]


def in_nats(rows: list[Row]) -> list[Row]:
    return [replace(row, metric="loss", unit="nats", direction="lower") for row in rows]


PERCENT_OF_VAL = [replace(row, val=100 * (row.test or 0)) for row in trials(0.9)]


def card(ours: list[Row], theirs: list[Row]) -> Card:
    (made,) = compare(ours, theirs, {}, TEST_SHARES)
    return made


# Matching


def test_densities_match_to_the_four_decimals_of_a_one_shot_row() -> None:
    ours = [row for level in range(1, 26) for row in trials(0.9, density=0.8**level)]
    theirs = [row for level in range(1, 26) for row in trials(0.9, density=round(0.8**level, 4))]
    assert len(matched(ours, theirs)) == 25
    assert [b.density for _, b in matched(trials(0.9, density=0.9574), [*trials(0.9, density=0.9562)])] == []
    near = [*trials(0.9, density=0.00052), *trials(0.8, density=0.00054)]
    assert all(a == b for a, b in matched(near, near)), "the nearest one, where two are near"


def test_a_cell_needs_the_same_recipe_setting_technique_and_time() -> None:
    ours = trials(0.9, 0.91)
    assert len(matched(ours, ours)) == 1
    for other in (
        trials(0.9, technique="fine-tuning"),
        trials(0.9, t=8),
        trials(0.9, iterative=False),
        trials(0.9, recipe="other"),
        [replace(row, pruning="structured-a") for row in ours],
    ):
        assert matched(ours, other) == []


# Values and margins


@pytest.mark.parametrize("recipe", ["digits", "mine:Task", "wmt16-gnmt"])
def test_values_are_what_the_tables_call_test(recipe: str) -> None:
    ours = [replace(row, val=0.50) for row in trials(0.90, recipe=recipe)]
    made = card(ours, trials(0.90, 0.92, recipe=recipe))
    assert made.measure == "test"
    assert (made.cells[0].ours, made.cells[0].theirs) == (pytest.approx(90), pytest.approx(91))


@pytest.mark.parametrize("recipe", ["cifar10-resnet20", "cifar10-resnet56 batch-size=64", "imagenet-resnet50"])
def test_the_papers_networks_are_compared_on_all_held_out_images(recipe: str) -> None:
    ours = [replace(row, val=0.80) for row in trials(0.90, recipe=recipe)]
    (cell,) = card(ours, trials(0.90, 0.92, recipe=recipe)).cells
    assert (cell.ours, cell.theirs) == (pytest.approx(88), pytest.approx(91))
    assert (cell.n, cell.m, cell.low, cell.high) == (1, 2, pytest.approx(90), pytest.approx(92))
    assert card(ours, trials(0.90, recipe=recipe)).measure == "80% test + 20% validation"


def test_bleu_and_tables_without_validation_are_compared_on_test() -> None:
    known = {"recipe": "wmt16-gnmt", "val": 20.0, "metric": "BLEU", "unit": "BLEU"}
    bleu = card(*([replace(row, **known) for row in trials(value)] for value in (26.0, 26.5)))  # type: ignore[arg-type]
    assert (bleu.unit, bleu.measure, bleu.cells[0].difference) == ("BLEU", "test", pytest.approx(-0.5))
    rows = trials(0.9, recipe="cifar10-resnet20")
    plain = card([replace(row, val=None) for row in rows], [replace(row, val=0.5) for row in rows])
    assert (plain.unit, plain.measure, plain.cells[0].difference) == ("points", "test", 0)


def test_a_card_of_noisy_trials_says_that_its_limits_are_for_others() -> None:
    quiet, noisy = trials(0.900, 0.902, 0.904), trials(0.90, 0.91, 0.92)
    assert card(quiet, quiet).noise == pytest.approx(0.2)
    assert remarks(card(quiet, quiet)) == ""
    assert remarks(card(quiet, noisy)) == (
        "Limits are for trials that differ by 0.2 to 0.4 points; here 1.0: replicas may miss them."
    )


def test_sigma_is_theirs_pooled_over_retraining_times() -> None:
    theirs = [*trials(0.90, 0.91, 0.92), *trials(0.90, 0.90, 0.90, t=8), *trials(0.5, 0.9, t=16, density=0.2)]
    (cell,) = card(trials(0.93, 0.90), theirs).cells
    assert cell.sigma == pytest.approx(math.sqrt(0.5))  # variances 1 and 0, of two degrees of freedom each
    assert cell.margin == pytest.approx(2.5 * math.sqrt(0.5) * math.sqrt(1 / 2 + 1 / 3))


def test_sigma_is_ours_where_they_have_one_trial_and_never_below_its_least() -> None:
    assert card(trials(0.90, 0.92), trials(0.90)).cells[0].sigma == pytest.approx(math.sqrt(2))
    assert card(trials(0.90, 0.90), trials(0.90)).cells[0].sigma == 0.15
    assert card(trials(0.90), trials(0.90)).cells[0].sigma == 0.15


def test_inside_is_two_and_a_half_standard_errors() -> None:
    theirs, margin = trials(0.9, 0.9, 0.9), 2.5 * 0.15 * math.sqrt(2 / 3) / 100
    assert card(trials(*[0.9 + 0.99 * margin] * 3), theirs).cells[0].inside
    assert not card(trials(*[0.9 - 1.01 * margin] * 3), theirs).cells[0].inside


def test_the_dense_mean_is_within_its_error_and_a_tenth() -> None:
    theirs = dense(0.918, 0.920, 0.922)  # sd 0.2
    margin = (2.5 * 0.2 / math.sqrt(4) + 0.1) / 100
    for shift, conforms in ((0.99 * margin, True), (-0.99 * margin, True), (1.01 * margin, False)):
        made = card(dense(*[0.92 + shift] * 4), theirs)
        assert made.dense_conforms is conforms
        assert made.dense is not None
        assert made.dense.margin == pytest.approx(100 * margin)


def test_a_replica_needs_cells_inside_and_no_bias_of_a_curve_or_of_all() -> None:
    def shifted(*points: float, technique: str = "lr-rewinding") -> tuple[list[Row], list[Row]]:
        grid = [0.8**level for level in range(1, 1 + len(points))]
        made = [trials(*[0.9 + p / 100] * 3, density=d, technique=technique) for d, p in zip(grid, points, strict=True)]
        return sum(made, dense(0.92, 0.92)), sum(
            (trials(*[0.9] * 3, density=d, technique=technique) for d in grid), dense(0.92, 0.92)
        )

    assert card(*shifted(*[0.0] * 9, 0.4)).cells_conform, "nine of ten are inside"
    assert card(*shifted(*[0.0] * 8, 0.4, 0.4)).cells_conform is False
    assert card(*shifted(0.24, 0.24)).curves_conform
    assert card(*shifted(0.26, 0.26)).curves_conform is False, "all cells together"
    ours, theirs = shifted(0.5)
    rest = [row for level in range(2, 9) for row in trials(0.9, 0.9, 0.9, density=0.8**level, technique="fine-tuning")]
    both = card(ours + rest, theirs + rest)
    assert (both.bias, both.curves_conform) == (pytest.approx(0.5 / 8), False), "one curve of two"
    ours, theirs = shifted(0.5, technique="low-lr-weight-rewinding")
    excepted = card(ours + rest, theirs + rest)
    assert excepted.curves_conform, "low-LR is excepted"
    assert [note(curve) for curve in excepted.curves] == ["", "not judged: a control whose trials scatter"]
    assert card(*shifted(0.0)).conforms
    assert card(*(rows[2:] for rows in shifted(0.0))).conforms is None, "no dense runs"
    assert card(*(rows[2:] for rows in shifted(0.5))).conforms is False


def test_leads_are_those_of_full_retraining_from_four_times_on() -> None:
    def table(lr: float, weight: float, tuned: float) -> list[Row]:
        rows = []
        for level in range(1, 11):
            at = {"density": 0.8**level}
            rows += trials(0.90 + lr / 100 * level, t=16, **at) + trials(0.5, t=8, **at)
            rows += trials(0.90 + weight / 100 * level, t=14, technique="weight-rewinding", **at)
            rows += trials(0.90 + tuned / 100 * level, t=16, technique="fine-tuning", **at)
        return rows

    leads = card(table(-0.1, -0.1, -0.3), table(0, -0.1, -0.4)).leads
    assert [(lead.line.technique, lead.over, lead.levels) for lead in leads] == [
        ("lr-rewinding", "fine-tuning", 4),
        ("weight-rewinding", "fine-tuning", 4),
        ("lr-rewinding", "weight-rewinding", 4),
    ]
    assert [lead.ours for lead in leads] == pytest.approx([1.7, 1.7, 0])  # levels 7 to 10, mean 8.5
    assert [lead.theirs for lead in leads] == pytest.approx([3.4, 2.55, 0.85])
    one_shot = [replace(row, iterative=False) for row in table(0, 0, 0)]
    assert card(one_shot, one_shot).leads == ()


# What cannot be compared


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        (
            trials(0.9),
            trials(0.9, t=8),
            "nothing to compare: one table has 1 cell of digits, the other 1 cell of digits",
        ),
        (trials(0.9), trials(0.9, recipe="other"), "1 cell of digits, the other 1 cell of other"),
        (trials(0.9), trials(None), "nothing to compare"),
        (trials(0.9), [], "the other no rows"),
        (dense(0.9), trials(0.9), "nothing to compare"),
        (trials(0.9), in_nats(trials(0.9)), r"cannot compare digits: one table has accuracy .* the other loss \(nats"),
        (dense(0.9) + in_nats(trials(0.9)), trials(0.9), "the rows of digits mix accuracy .* with loss"),
        (dense(0.9, 91.0), dense(0.9), "digits has accuracy 91, which is no fraction"),
        (PERCENT_OF_VAL, PERCENT_OF_VAL, "digits has accuracy 90, which is no fraction"),
        (in_nats(trials(0.9)), in_nats(trials(0.9)), "percent of the dense loss, which is in neither table"),
    ],
)
def test_what_cannot_be_compared_says_why(ours: list[Row], theirs: list[Row], says: str) -> None:
    with pytest.raises(InputError, match=says):
        compare(ours, theirs)


def test_a_metric_without_a_hundred_is_compared_in_percent_of_the_dense_value() -> None:
    ours, theirs = in_nats(dense(0.2) + trials(0.33)), in_nats(dense(0.2) + trials(0.30))
    found = card(ours, theirs)
    (cell,) = found.cells
    assert (cell.ours, cell.theirs, cell.difference) == pytest.approx((165, 150, 15))
    assert (found.unit, found.conforms) == ("% of the dense loss", False)
    assert "In % of the dense loss, of test, means over trials." in " ".join(shown([found]).split())
    assert card(ours, ours).conforms


def test_failed_and_lonely_cells_are_counted() -> None:
    ours = trials(0.9, None, 0.92) + trials(0.9, density=0.2) + trials(None, density=0.3)
    made = card(ours, trials(0.9, 0.92) + trials(0.9, density=0.4) + trials(0.9, density=0.5))
    assert (made.cells[0].n, made.alone, made.failed) == (2, (1, 2), (2, 0))


def test_their_cells_are_moved_to_our_dense_mean() -> None:
    ours = dense(0.95) + trials(0.94, density=0.8**5)
    (cell,) = cells(overlay(ours, dense(0.93) + trials(0.90, density=0.3277)))
    assert (cell.density, cell.tests) == (0.8**5, (pytest.approx(0.92),))
    (cell,) = cells(overlay(ours, trials(0.90, density=0.3277)))
    assert cell.tests == (0.90,), "without dense runs they stay where they are"


# What is shown and written


def shown(cards: list[Card], width: int = 80, *, every_cell: bool = False) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(conformance_card(cards, every_cell=every_cell))
    return capture.get()


def test_the_card_fits_and_shows_the_cells_outside() -> None:
    theirs = dense(0.92, 0.92) + trials(0.90, 0.91, 0.91) + trials(0.9, 0.9, 0.9, density=0.2, technique="fine-tuning")
    ours = dense(0.92, 0.92) + trials(0.93, 0.93, 0.93) + trials(0.9, 0.9, 0.9, density=0.2, technique="fine-tuning")
    for width in (80, 120):
        text = shown(compare(ours, theirs), width)
        assert all(len(line) <= width for line in text.splitlines())
        assert "…" not in text
        assert "digits: does not conform" in text
        lines = [" ".join(line.split()) for line in text.splitlines()]
        assert "(i) dense mean 2, 2 92.00 against 92.00: +0.00 ±0.37 yes" in lines
        assert "(ii) cells inside 2 1 (50%) 90% NO" in lines
        assert "(iii) bias of all cells 2 +1.17 ±0.25 NO" in lines
        assert "lr-rewinding, iterative 1 1 +2.33 beyond ±0.45" in lines
        assert "10.00× 16 93.00 90.67 90.00 to 91.00 3, 3 +2.33 ±1.18 outside" in lines
        assert not any(line.startswith("5.00×") for line in lines), "it is inside"
    assert "5.00×" in shown(compare(ours, theirs), every_cell=True)


def test_names_are_text_whatever_they_contain() -> None:
    rows = trials(0.9, 0.91, technique="<b>[red]x[/red]</b>", recipe="[link=a]$r$")
    text = shown(compare(rows, rows), every_cell=True)
    assert "<b>[red]x[/red]</b>, iterative" in text
    assert "[link=a]$r$: no criterion fails, but not all could be judged" in text


def test_compare_csv_has_a_line_per_cell(tmp_path: Path) -> None:
    rows = dense(0.92, 0.93) + trials(0.9, 0.91, 0.92) + trials(0.8, 0.81, 0.82, density=0.8**5)
    write_comparison(compare(rows, rows), tmp_path / "compare.csv")
    with (tmp_path / "compare.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["technique"], line["density"], line["retrain_epochs"]) for line in lines] == [
        ("", "1", ""),
        ("lr-rewinding", "0.32768", "16"),
        ("lr-rewinding", "0.1", "16"),
    ]
    assert lines[2] | {"sigma": "1", "ours": "91", "n": "3", "theirs_min": "90", "inside": "1"} == lines[2]


# The authors' tables


def test_the_authors_conform_to_themselves(authors: list[Row]) -> None:
    cards = compare(authors, authors, {}, TEST_SHARES)
    assert sum(len(made.cells) for made in cards) == 7_530
    assert all(cell.inside and cell.difference == 0 for made in cards for cell in made.cells)
    assert {made.recipe: made.unit for made in cards}["wmt16-gnmt"] == "BLEU"
    values = {made.recipe: made.dense for made in cards}
    for recipe, mean, sd in (("20", 91.63, 0.21), ("56", 93.36, 0.18), ("110", 93.69, 0.21)):
        found = values[f"cifar10-resnet{recipe}"]
        assert found is not None
        assert (found.theirs, found.sigma) == (pytest.approx(mean, abs=0.006), pytest.approx(sd, abs=0.006))


@pytest.mark.parametrize("folder", sorted(RESULTS.glob("cifar10-*")), ids=lambda folder: folder.name)
def test_our_results_conform(authors: list[Row], folder: Path) -> None:
    ours = read_rows(folder / "results.csv")
    made = card(ours, authors)
    assert made.conforms is (None if all(row.dense for row in ours) else True), "without pruned rows, not all is judged"
    assert made.dense_conforms
    assert made.dense is not None
    assert made.dense.n == sum(row.dense for row in ours)
    assert made.alone[0] == 0, "every cell of ours has its counterpart"


@pytest.mark.parametrize(
    ("lead", "ours", "theirs"),
    [
        ("lr-rewinding − fine-tuning", "+1.82", "+1.81"),
        ("weight-rewinding − fine-tuning", "+1.65", "+1.79"),
        ("lr-rewinding − weight-rewinding", "+0.16", "+0.02"),
    ],
)
def test_the_leads_of_our_results_are_those_of_their_readme(
    authors: list[Row], lead: str, ours: str, theirs: str
) -> None:
    folder = RESULTS / "cifar10-resnet20-algorithm1"
    lines = shown([card(read_rows(folder / "results.csv"), authors)]).splitlines()
    assert [line.split(lead)[1].split() for line in lines if lead in line] == [[ours, theirs, "4"]]
    assert f"| {ours} | {theirs} |" in (folder / "README.md").read_text()


def test_our_masks_leave_as_many_flops_as_the_authors(authors: list[Row]) -> None:
    """Where magnitude pruning takes the first fifth is a fingerprint of how the dense network was trained."""
    ours = read_rows(RESULTS / "cifar10-resnet20-algorithm1" / "results.csv")
    left = [first_flops(rows) for rows in (ours, [row for row in authors if row.recipe == "cifar10-resnet20"])]
    mine, theirs = ([flops / 41_886_986 for flops in found] for found in left)
    assert (len(mine), len(theirs)) == (3, 116)
    assert (fmean(theirs), stdev(theirs)) == (pytest.approx(0.8373, abs=5e-5), pytest.approx(0.0021, abs=5e-5))
    assert abs(fmean(mine) - fmean(theirs)) <= 2.5 * stdev(theirs) * math.sqrt(1 / len(mine) + 1 / len(theirs))


def first_flops(rows: list[Row]) -> set[int]:
    """Of each dense network pruned to 0.8: techniques that start from the same one prune it alike."""
    return {row.flops for row in rows if row.iterative and row.density == 0.8 and row.flops is not None}


def test_perfect_replicas_conform_and_worse_ones_do_not(authors: list[Row]) -> None:
    recipe, times = "cifar10-resnet20", {"lr-rewinding": 182.0, "weight-rewinding": 150.0, "fine-tuning": 182.0}
    theirs = [
        row for row in authors if row.recipe == recipe and (row.dense or (row.iterative and row.technique in times))
    ]
    draw = replicas(theirs, lambda cell: cell.retrain_epochs == times.get(cell.line.technique))
    rng = random.Random(1)
    passed = [card(draw(rng, 0.0), theirs).conforms for _ in range(200)]
    assert sum(map(bool, passed)) > 170
    worse = [card(draw(rng, -0.4), theirs).conforms for _ in range(50)]
    assert sum(map(bool, worse)) < 3


def replicas(theirs: list[Row], asked: Callable[[Cell], bool]) -> Callable[[random.Random, float], list[Row]]:
    """Draws what three trials would be, if the truth is what three trials of theirs leave open."""
    samples: dict[tuple[object, float], list[list[float]]] = {}
    for cell in cells(theirs):
        samples.setdefault((cell.line, cell.density), []).append(held_out(cell))
    sigmas = {place: math.sqrt(spread.variance) for place, found in samples.items() if (spread := pooled(found))}
    wanted = [cell for cell in cells(theirs) if asked(cell)]
    runs = [0.8 * (row.test or 0) + 0.2 * (row.val or 0) for row in theirs if row.dense]

    def draw(rng: random.Random, points: float) -> list[Row]:
        rows = dense(*(rng.gauss(fmean(runs), stdev(runs)) + points / 100 for _ in range(3)), recipe=theirs[0].recipe)
        for cell in wanted:
            sigma = sigmas[cell.line, cell.density]
            truth = rng.gauss(fmean(held_out(cell)), sigma / math.sqrt(3)) + points / 100
            for trial in (1, 2, 3):
                value = rng.gauss(truth, sigma)
                rows.append(Row(*cell.line, cell.density, cell.retrain_epochs, trial, value, value))
        return rows

    return draw


def held_out(cell: Cell) -> list[float]:
    return [0.8 * test + 0.2 * val for test, val in zip(cell.tests, cell.vals, strict=True)]
