"""Theoretical speed-up: ratios of FLOPs at the best retraining time, over the dense network and over fine-tuning."""

from dataclasses import replace

import pytest

from rewound.conclusions.findings import Speedup, over_dense, over_fine_tuning
from rewound.conclusions.tables import Row

DENSE = [Row("digits", "", False, "", 1, None, trial, 0.9, 0.9, flops=1200) for trial in (1, 2)]


def trials(technique: str, t: float, val: float, *flops: int | None) -> list[Row]:
    setting = ("digits", "unstructured", True, technique, 0.1, t)
    return [Row(*setting, trial, val, val, count) for trial, count in enumerate(flops)]


ROWS = [*DENSE, *trials("fine-tuning", 4, 0.8, 500, 600, 800), *trials("lr-rewinding", 4, 0.8, 400, 300, 200)]


def numbers(found: list[Speedup]) -> dict[str, tuple[float, float, float]]:
    return {each.line.technique: (each.median, each.low, each.high) for each in found}


def test_over_dense_is_the_ratio_to_the_median_with_the_slowest_and_the_fastest_trial() -> None:
    found = over_dense(ROWS)
    assert numbers(found) == {"fine-tuning": (2, 1.5, 2.4), "lr-rewinding": (4, 3, 6)}
    assert {(each.density, each.retrain_epochs, each.trials) for each in found} == {(0.1, 4, 3)}


def test_over_fine_tuning_is_the_ratio_of_medians_at_one_density() -> None:
    assert numbers(over_fine_tuning(ROWS)) == {"fine-tuning": (1, 500 / 800, 800 / 500), "lr-rewinding": (2, 1.25, 4)}
    alone = [row for row in ROWS if row.technique != "fine-tuning"]
    assert over_fine_tuning(alone) == []


def test_the_time_that_validates_best_is_chosen_among_runs_with_known_flops() -> None:
    rows = [*ROWS, *trials("lr-rewinding", 8, 0.85, 240), *trials("lr-rewinding", 16, 0.9, None)]
    (found,) = (each for each in over_dense(rows) if each.line.technique == "lr-rewinding")
    assert (found.retrain_epochs, found.median, found.trials) == (8, 5, 1)


def test_what_has_no_flops_or_failed_is_left_out() -> None:
    assert over_dense([replace(row, flops=None) for row in ROWS]) == []
    assert over_dense([replace(row, flops=None) if row.dense else row for row in ROWS]) == []
    failed = replace(ROWS[-1], val=None, test=None, flops=1)
    assert numbers(over_dense([*ROWS[:-1], failed]))["lr-rewinding"] == (pytest.approx(1200 / 350), 3, 4)
    assert over_dense([*DENSE, *trials("fine-tuning", 4, 0.8, 0)]) == [], "a count of nothing is unknown, not endless"
