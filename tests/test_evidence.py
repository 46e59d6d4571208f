"""What a report is about: how long each recipe trains, and how near its table comes to another."""

from dataclasses import replace

import pytest

from rewound.conclusions.evidence import Evidence
from rewound.errors import InputError
from rewound.tables.folder import Tables
from rewound.tables.results import Row

DENSE = [Row("digits", "", False, "", 1, None, n, 0.9, 0.9 + n / 1000) for n in (1, 2, 3)]
PRUNED = [Row("digits", "unstructured", False, "fine-tuning", 0.5, t, 1, 0.9, 0.9) for t in (4, 8)]


def test_without_being_told_the_longest_retraining_time_is_taken_for_the_training() -> None:
    failed = replace(PRUNED[0], retrain_epochs=16, val=None, test=None)
    assert Evidence(Tables([*DENSE, *PRUNED])).epochs == {"digits": 8}
    assert Evidence(Tables([*DENSE, *PRUNED, failed])).epochs == {"digits": 16}, "also where all of its runs failed"
    assert Evidence(Tables(DENSE)).epochs == {"digits": 0}


def test_what_is_known_of_the_training_counts() -> None:
    others = [replace(row, recipe="other") for row in PRUNED]
    evidence = Evidence(Tables([*DENSE, *PRUNED, *others]), training_epochs={"digits": 32.0})
    assert evidence.epochs == {"digits": 32.0, "other": 8}


def test_there_are_cards_where_there_is_another_table() -> None:
    ours = Tables([*DENSE, *PRUNED])
    assert Evidence(ours).cards == []
    assert [card.recipe for card in Evidence(ours, DENSE).cards] == ["digits"]
    with pytest.raises(InputError, match="nothing to compare"):
        _ = Evidence(ours, [replace(row, recipe="other") for row in DENSE]).cards
