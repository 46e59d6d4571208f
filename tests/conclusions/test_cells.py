"""Cells: the trials of a setting, the dense networks they are measured from, and the spread they share."""

from dataclasses import replace

import pytest

from rewound.conclusions.cells import Baseline, Cell, Line, baselines, cells, failures, neighbours, pooled, spreads
from rewound.conclusions.tables import Row
from rewound.foundations.errors import InputError
from rewound.foundations.metric import Metric

LINE = Line("digits", "unstructured", True, "lr-rewinding")


def row(density: float, t: float, trial: int, val: float | None, test: float | None) -> Row:
    return Row(*LINE, density, t, trial, val, test, search_epochs=t)


def dense(*tests: float) -> list[Row]:
    return [Row("digits", "", False, "", 1, None, trial, test, test) for trial, test in enumerate(tests)]


def test_a_cell_is_the_finished_trials_of_one_setting() -> None:
    rows = [row(0.5, 4, 1, 0.9, 0.8), row(0.5, 4, 2, 0.7, 0.6), row(0.5, 4, 3, None, None), row(0.5, 8, 1, 0.9, 0.9)]
    first, second = cells([*dense(1.0), *rows])
    assert (first.low, first.median, first.high, first.val) == (0.6, pytest.approx(0.7), 0.8, pytest.approx(0.8))
    assert (first.line, first.density, first.compression, first.search_epochs) == (LINE, 0.5, 2, 4)
    assert (second.retrain_epochs, second.tests) == (8, (0.9,))
    assert failures(rows) == {(LINE, 0.5): 1}
    assert cells([row(0.5, 4, 1, None, None)]) == []


def test_a_baseline_knows_its_spread_and_unit() -> None:
    points = baselines(dense(0.90, 0.92))["digits"]
    assert (points.mean, points.n, points.metric, points.unit) == (pytest.approx(0.91), 2, Metric(), "points")
    assert points.spread == pytest.approx(2**0.5)
    assert points.delta(0.90) == pytest.approx(-1)
    assert (points.named_drop, points.digits) == (1, 2)
    assert baselines(dense(0.9))["digits"] == Baseline(0.9, 0.0, 1)


def test_the_unit_is_that_of_the_table_whatever_the_recipe_is_called() -> None:
    def of(*metric: str) -> Baseline:
        rows = [replace(row, metric=metric[0], unit=metric[1], direction=metric[2]) for row in dense(26.0, 27.0)]
        (found,) = baselines(rows).values()
        return found

    assert (of("BLEU", "BLEU", "higher").delta(26.0), of("BLEU", "BLEU", "higher").unit) == (-0.5, "BLEU")
    assert (of("accuracy", "percent", "higher").delta(26.0), of("accuracy", "percent", "higher").unit) == (
        -0.5,
        "points",
    )
    perplexity = of("perplexity", "perplexity", "lower")
    assert (perplexity.delta(26.0), perplexity.delta(27.0), perplexity.unit) == (0.5, -0.5, "perplexity")
    assert (perplexity.named_drop, perplexity.digits) == (0.265, 2), "one percent of the dense value"
    with pytest.raises(InputError, match=r"wmt16-gnmt has accuracy 26, which is no fraction; state its unit"):
        baselines([replace(row, recipe="wmt16-gnmt") for row in dense(26.0)])


@pytest.mark.parametrize(("loss", "digits", "shown"), [(2.5, 3, "2.500"), (0.031, 5, "0.03100"), (0.0, 2, "0.00")])
def test_a_small_unit_has_digits_for_a_tenth_of_a_percent(loss: float, digits: int, shown: str) -> None:
    baseline = Baseline(loss, 0.0, 1, Metric("loss", "nats", higher_is_better=False))
    assert (baseline.digits, baseline.shown(loss)) == (digits, shown)


def test_the_worst_trial_is_the_highest_where_lower_is_better() -> None:
    (cell,) = cells([replace(row(0.5, 4, n, v, v), unit="nats", direction="lower") for n, v in enumerate((3, 1, 2))])
    assert (cell.worst, cell.median, cell.best, cell.low, cell.high) == (3, 2, 1, 1, 3)


def test_a_recipe_that_mixes_metrics_is_refused() -> None:
    rows = [*dense(0.9), replace(row(0.5, 4, 1, 0.9, 0.9), metric="error", direction="lower")]
    with pytest.raises(InputError, match=r"the rows of digits mix accuracy \(fraction, higher is better\) with error"):
        baselines(rows)


def test_missing_dense_runs_are_named() -> None:
    with pytest.raises(InputError, match="no finished dense run of digits"):
        baselines([row(0.5, 4, 1, 0.9, 0.9)])
    with pytest.raises(InputError, match=r"no dense run of digits has a value, .* lower the learning rate if"):
        baselines([row(0.5, 4, 1, 0.9, 0.9), replace(dense(0.9)[0], val=None, test=None)])


def test_a_single_value_says_nothing_about_spread() -> None:
    assert pooled([(1.0,), (5.0,)]) is None
    assert pooled([]) is None


def test_neighbours_are_the_next_densities_of_the_grid() -> None:
    grid = [0.1, 0.8, 0.4, 0.2]
    assert neighbours(grid, 0.4) == [0.8, 0.4, 0.2]
    assert neighbours(grid, 0.1) == [0.2, 0.1]
    assert neighbours([0.5], 0.5) == [0.5]


def test_a_cells_variance_is_pooled_over_times_and_neighbouring_densities_of_its_line() -> None:
    def cell(density: float, t: float, *tests: float, line: Line = LINE) -> Cell:
        return Cell(line, density, t, tests, tests)

    found = spreads(
        [
            cell(0.8, 8, 1.0, 3.0),  # variance 2
            cell(0.8, 16, 5.0, 5.0),
            cell(0.4, 8, 0.0, 4.0),  # variance 8
            cell(0.2, 8, 0.0, 6.0),  # variance 18
            cell(0.4, 8, 0.0, 100.0, line=LINE._replace(technique="fine-tuning")),
        ]
    )
    assert found[LINE, 0.8] == pytest.approx(((2 + 0 + 8) / 3, 3))
    assert found[LINE, 0.4] == pytest.approx(((2 + 0 + 8 + 18) / 4, 4))
    assert found[LINE, 0.2] == pytest.approx(((8 + 18) / 2, 2))
