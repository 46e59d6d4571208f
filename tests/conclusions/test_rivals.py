"""Differences between techniques: means, intervals that scipy agrees with, and pairs only where there are pairs."""

from dataclasses import replace

import pytest
from scipy import stats

from rewound.conclusions.rivals import Difference, differences, t_quantile
from rewound.conclusions.tables import Row

BETTER, WORSE = (0.92, 0.93, 0.91, 0.925, 0.915), (0.90, 0.90, 0.89, 0.905, 0.91)


def trials(
    technique: str, tests: tuple[float, ...], *, key: str = "k", iterative: bool = True, **other: float
) -> list[Row]:
    at = {"density": 0.1, "t": 16.0} | other
    setting = ("digits", "unstructured", iterative, technique, at["density"], at["t"])
    return [Row(*setting, n, test, test, key=f"{key}{technique}{n}" if key else "") for n, test in enumerate(tests)]


def dense(n: int, key: str = "k") -> list[Row]:
    return [Row("digits", "", False, "", 1, None, trial, 0.95, 0.95, key=f"{key}dense{trial}") for trial in range(n)]


def only(rows: list[Row], **options: float) -> Difference:
    (found,) = differences(rows, "lr-rewinding", "fine-tuning", **options)
    return found


def both(first: tuple[float, ...], second: tuple[float, ...], **how: object) -> list[Row]:
    return trials("lr-rewinding", first, **how) + trials("fine-tuning", second, **how)  # type: ignore[arg-type]


def test_trials_of_one_dense_run_are_paired() -> None:
    found = only(dense(5) + both(BETTER, WORSE))
    expected = stats.ttest_rel(BETTER, WORSE).confidence_interval(0.95)
    assert (found.paired, found.n, found.df) == (True, 5, 4)
    assert (found.low, found.high) == (pytest.approx(100 * expected.low), pytest.approx(100 * expected.high))
    assert found.mean == pytest.approx(1.9)


def test_below_five_pairs_the_extremes_are_given() -> None:
    found = only(dense(4) + both(BETTER[:4], WORSE[:4]))
    assert (found.paired, found.n, found.df) == (True, 4, None)
    assert (found.low, found.mean, found.high) == pytest.approx((2, 2.25, 3))


@pytest.mark.parametrize(
    "rows",
    [
        both(BETTER, WORSE),  # no dense run to have come from
        dense(5) + dense(5, key="other") + both(BETTER, WORSE),  # two stores in one table
        dense(4) + both(BETTER, WORSE),  # one trial's dense run is missing
        both(BETTER, WORSE, key=""),  # the authors' iterative rows
        dense(5) + trials("lr-rewinding", BETTER) + trials("fine-tuning", WORSE, key=""),
    ],
)
def test_what_shares_no_dense_run_is_not_paired(rows: list[Row]) -> None:
    found = only(rows)
    expected = stats.ttest_ind(BETTER, WORSE, equal_var=False)
    assert (found.paired, found.n, found.df) == (False, 5, int(expected.df))
    half = (
        stats.t.ppf(0.975, int(expected.df))
        * (expected.confidence_interval(0.95).high - 0.019)
        / stats.t.ppf(0.975, expected.df)
    )
    assert (found.mean, found.high - found.mean) == (pytest.approx(1.9), pytest.approx(100 * half))


def test_the_authors_one_shot_rows_are_paired_by_trial() -> None:
    assert only(both(BETTER, WORSE, key="", iterative=False)).paired


def test_pairs_have_a_partner_each_or_there_are_none() -> None:
    more = dense(8) + both(BETTER, (*WORSE, 0.9, 0.9, 0.9))
    assert (only(more).paired, only(more).n) == (True, 5), "the larger side's other trials are left out"
    moved = [
        replace(row, trial=row.trial + 2) if row.technique == "fine-tuning" else row for row in both(BETTER, WORSE)
    ]
    assert not only(dense(8) + moved).paired


def test_variance_is_pooled_over_times_and_neighbouring_densities() -> None:
    noisy, calm = (0.80, 0.90, 0.85), (0.90, 0.90, 0.90)
    alone = both((0.92, 0.93, 0.91), (0.90, 0.90, 0.89))
    assert only(alone).df == 3
    near = both(calm, calm, density=0.2) + both(calm, calm, t=8.0)
    found = {d.cell.density: d for d in differences(alone + near, "lr-rewinding", "fine-tuning")}[0.1]
    assert (found.df or 0) > 3
    assert found.high - found.low < only(alone).high - only(alone).low
    far = both(calm, calm, density=0.2) + both(noisy, noisy, density=0.4)
    assert {d.cell.density: d.high - d.low for d in differences(alone + far, "lr-rewinding", "fine-tuning")}[0.1] < 10
    pairs = dense(5) + both(BETTER, WORSE) + both(BETTER, WORSE, t=8.0) + both(BETTER, WORSE, density=0.2)
    assert {d.df for d in differences(pairs, "lr-rewinding", "fine-tuning")} == {12}


def test_each_technique_is_taken_at_its_best_time_or_at_the_asked_one() -> None:
    rows = both((0.92, 0.92), (0.90, 0.90)) + trials("fine-tuning", (0.91, 0.91), t=8.0)
    assert only(rows).mean == pytest.approx(1)
    assert only(rows).minus.retrain_epochs == 8
    assert only(rows, retrain_epochs=16).mean == pytest.approx(2)
    assert differences(rows, "lr-rewinding", "fine-tuning", retrain_epochs=8) == []


def test_single_trials_have_a_difference_and_no_interval() -> None:
    found = only(both((0.92,), (0.90,)))
    assert (found.df, found.n) == (None, 1)
    assert (found.low, found.mean, found.high) == pytest.approx((2, 2, 2))


def test_the_control_and_lonely_techniques_have_none() -> None:
    assert differences(both(BETTER, WORSE, density=1.0), "lr-rewinding", "fine-tuning") == []
    assert differences(trials("lr-rewinding", BETTER), "lr-rewinding", "fine-tuning") == []
    assert differences([], "lr-rewinding", "fine-tuning") == []


def test_the_papers_claim_with_its_interval(authors: list[Row]) -> None:
    rows = [row for row in authors if row.recipe == "imagenet-resnet50" and not row.dense]
    iterative = differences([row for row in rows if row.iterative], "lr-rewinding", "fine-tuning")
    assert not any(found.paired for found in iterative)
    assert all(found.low > 0 for found in iterative if found.cell.compression > 4), "LR rewinding is better, surely"
    one_shot = differences([row for row in rows if not row.iterative], "lr-rewinding", "fine-tuning")
    assert all(found.paired and found.df is None for found in one_shot)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 30, 61, 1000])
@pytest.mark.parametrize("coverage", [0.5, 0.95, 0.999])
def test_t_is_students(df: int, coverage: float) -> None:
    assert t_quantile(df, coverage) == pytest.approx(stats.t.ppf((1 + coverage) / 2, df), rel=1e-9)
