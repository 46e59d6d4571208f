"""Trust: verdicts have a range and a cost, and a weak table is called weak."""

from dataclasses import replace

import pytest

from rewound.conclusions.cells import Line, baselines, cells
from rewound.conclusions.evidence import weaknesses
from rewound.conclusions.findings import Reaches, reaches
from rewound.conclusions.tables import Row

LINE = Line("digits", "unstructured", True, "lr-rewinding")
LEVELS = {0.5: 0.95, 0.25: 0.949, 0.125: 0.947, 0.0625: 0.938}


def table(noise: tuple[float, ...] = (-0.001, 0.0, 0.001), dense: int = 3) -> list[Row]:
    """Levels that cost 16 epochs each; dense networks have 95 ± 0.2 points."""
    rows = [Row("digits", "", False, "", 1, None, n, 0.9, 0.95 + 0.002 * (n - 1)) for n in range(dense)]
    for level, (density, test) in enumerate(LEVELS.items(), start=1):
        for trial, off in enumerate(noise):
            rows.append(Row(*LINE, density, 16, trial, 0.9, test + off, search_epochs=16.0 * level))
    return rows


def reached(rows: list[Row]) -> dict[Line, Reaches]:
    return reaches(cells(rows), baselines(rows))


def test_a_verdict_has_a_range_and_a_cost() -> None:
    found = reached(table())[LINE]
    # Deltas 0, -0.1, -0.3, -1.2; the standard error is 0.134: a median of 3 with sigma 0.1, a dense mean of 3 with 0.2.
    assert (found.no_drop.compression, found.no_drop.range, found.no_drop.search_epochs) == (4, (2, 8), 32)
    assert (found.one_drop.compression, found.one_drop.range, found.one_drop.search_epochs) == (8, (8, 8), 48)
    assert found.tried == 16


def test_more_trials_narrow_the_range() -> None:
    many = table(noise=(-0.001, 0.0, 0.001) * 20)
    many += [replace(row, trial=n) for row in many if row.dense for n in range(3, 60)]
    found = reached(many)[LINE]
    assert found.no_drop.range == (4, 4)


def test_a_technique_that_always_loses_may_reach_nothing() -> None:
    rows = [replace(row, test=(row.test or 0) - 0.05) if row.technique else row for row in table()]
    found = reached(rows)[LINE].no_drop
    assert (found.compression, found.range, found.search_epochs) == (None, (None, None), None)


def test_a_single_trial_has_no_range() -> None:
    found = reached(table(noise=(0.0,)))[LINE]
    assert (found.no_drop.compression, found.no_drop.range) == (4, None)


def test_a_sound_table_has_no_weakness() -> None:
    assert weaknesses(table()) == []


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (table(noise=(0.0, 0.001)), "digits: 4 of 4 cells have fewer than 3 trials"),
        ([replace(row, val=None) for row in table()], "digits: no validation split"),
        ([replace(row, val=row.test) for row in table()], "digits: no validation split"),
        (table(dense=1), "digits: one dense run"),
        (
            [replace(row, test=None) if row.trial == 0 and row.density == 0.5 else row for row in table()],
            "1 of 4 cells",
        ),
    ],
)
def test_a_weak_table_says_so(rows: list[Row], says: str) -> None:
    (said,) = weaknesses(rows)
    assert said.startswith(says) or says in said


def test_no_rows_have_no_weakness() -> None:
    assert weaknesses([]) == []
    assert weaknesses([row for row in table() if row.dense]) == []
