"""How far the axis of deltas reaches: to the paper's floor, but a bar that ends just below it is not cut."""

import pytest

from rewound.conclusions.cells import Baseline, Cell, Line
from rewound.reports.look import window


@pytest.mark.parametrize(
    ("lowest", "bottom"),
    [(-2.0, -2.0), (-3.0, -3.0), (-3.3, -3.3), (-3.5, -3.5), (-3.7, -3.0), (-9.0, -3.0)],
)
def test_what_ends_a_little_below_the_floor_is_shown_whole(lowest: float, bottom: float) -> None:
    line = Line("task", "unstructured", iterative=True, technique="fine-tuning")
    trials = (0.9, 0.9, 0.9 + lowest / 100)
    low, high = window([Cell(line, 0.1, 8, trials, trials)], lambda cell: cell.density, Baseline(0.9, 0.001, 3))
    assert (low, high) == pytest.approx((bottom - 0.06 * (0.1 - bottom), 0.1 + 0.06 * (0.1 - bottom)), abs=1e-6)
