"""Pooled variances and Student's t, against scipy and by hand."""

import pytest
from scipy import stats

from rewound.conclusions.cell import Cell, Line
from rewound.conclusions.intervals import neighbours, pooled, spreads, t_quantile

LINE = Line("digits", "unstructured", True, "lr-rewinding")


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 30, 61, 1000])
@pytest.mark.parametrize("coverage", [0.5, 0.95, 0.999])
def test_t_is_students(df: int, coverage: float) -> None:
    assert t_quantile(df, coverage) == pytest.approx(stats.t.ppf((1 + coverage) / 2, df), rel=1e-9)


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
