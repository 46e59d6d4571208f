"""What a report is about: how long each recipe trains, and how near its table comes to another."""

from dataclasses import replace

import pytest

from rewound.conclusions.evidence import Evidence
from rewound.conclusions.tables import Row, Tables
from rewound.foundations.errors import InputError

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


def test_that_the_training_time_is_guessed_is_said_once_for_all_recipes() -> None:
    others = [replace(row, recipe="other", retrain_epochs=16) for row in PRUNED]
    said = "so its longest retraining time is taken for that (digits: T = 8, other: T = 16)"
    evidence = Evidence(Tables([*DENSE, *PRUNED, *others]))
    assert [sentence for sentence in evidence.weaknesses if "how long" in sentence] == [evidence.weaknesses[-1]]
    assert evidence.weaknesses[-1].endswith(said)
    for known in (Evidence(evidence.tables, (), {"digits": 32, "other": 32}), Evidence(Tables(DENSE))):
        assert not any("how long" in sentence for sentence in known.weaknesses)


def test_a_lead_is_of_networks_that_were_retrained_for_all_of_the_training() -> None:
    techniques = ("lr-rewinding", "fine-tuning")
    rows = [replace(row, iterative=True, technique=name, density=0.1) for row in PRUNED for name in techniques]
    for known, leads in (({}, 1), ({"digits": 8.0}, 1), ({"digits": 32.0}, 0)):
        (card,) = Evidence(Tables([*DENSE, *rows]), [*DENSE, *rows], known).cards
        assert len(card.leads) == leads


def test_there_are_cards_where_there_is_another_table() -> None:
    ours = Tables([*DENSE, *PRUNED])
    assert Evidence(ours).cards == []
    assert [card.recipe for card in Evidence(ours, DENSE).cards] == ["digits"]
    with pytest.raises(InputError, match="nothing to compare"):
        _ = Evidence(ours, [replace(row, recipe="other") for row in DENSE]).cards
