"""Cells: the trials of a setting, the dense networks they are measured from, and the spread they share."""

from dataclasses import replace

import pytest

from rewound.conclusions.cells import Baseline, Cell, Line, baselines, cells, failures, neighbours, pooled, spreads
from rewound.conclusions.tables import Row
from rewound.foundations.errors import InputError

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
    assert (points.mean, points.n, points.metric, points.unit) == (pytest.approx(0.91), 2, "accuracy", "points")
    assert points.spread == pytest.approx(2**0.5)
    assert points.delta(0.90) == pytest.approx(-1)
    score = baselines(dense(26.0, 27.0))["digits"]
    assert (score.delta(26.0), score.metric, score.unit) == (-0.5, "score", "points")
    bleu = baselines([replace(row, recipe="wmt16-gnmt") for row in dense(26.0, 27.0)])["wmt16-gnmt"]
    assert (bleu.delta(26.0), bleu.metric, bleu.unit) == (-0.5, "BLEU", "BLEU")
    assert baselines(dense(0.9))["digits"] == Baseline(0.9, 0.0, 1)


def test_missing_dense_runs_are_named() -> None:
    with pytest.raises(InputError, match="no finished dense run of digits"):
        baselines([row(0.5, 4, 1, 0.9, 0.9)])
    with pytest.raises(InputError, match=r"every dense run of digits diverged, .* lower the learning rate"):
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
