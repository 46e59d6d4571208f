"""Headlines: one sentence per experiment that a person would say, computed from nothing but its table."""

from dataclasses import replace

import pytest

from rewound.conclusions.cells import Cell, Line, baselines, cells
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.findings import priced, reaches
from rewound.conclusions.tables import Row, Tables
from rewound.foundations.metric import ACCURACY, Metric
from rewound.reports.words import headlines


def rows(losses: dict[str, tuple[float, ...]], metric: Metric = ACCURACY, *, iterative: bool = True) -> list[Row]:
    """Techniques that lose so much at 2x, 4x, 8x, ..., as shown; dense runs have 90, with a deviation of 0.5."""
    stated = {"metric": metric.name, "unit": metric.unit, "direction": metric.direction}

    def row(*setting: object, shown: float) -> Row:
        return Row("task", *setting, shown / metric.scale, shown / metric.scale, **stated)  # type: ignore[arg-type]

    made = [row("", False, "", 1, None, n, shown=90 + d) for n, d in enumerate((-0.5, 0, 0.5))]
    for technique, points in losses.items():
        for level, loss in enumerate(points, start=1):
            made.append(row("unstructured", iterative, technique, 0.5**level, 16, 1, shown=90 - metric.gain(loss)))
    return made


def told(table: list[Row]) -> dict[tuple[str, str], str]:
    made, dense = priced(cells(table), Evidence(Tables(table)).epochs), baselines(table)
    return headlines(made, dense, reaches(made, dense))


def said(losses: dict[str, tuple[float, ...]], metric: Metric = ACCURACY, *, iterative: bool = True) -> str:
    (sentence,) = told(rows(losses, metric, iterative=iterative)).values()
    return sentence


def test_techniques_are_named_from_the_best_to_the_worst_with_their_cost() -> None:
    losses = {"fine-tuning": (0, 2, 4, 8), "lr-rewinding": (0, 0, 0, 3), "weight-rewinding": (0, 0, 3, 4)}
    assert said(losses) == (
        "Pruned iteratively, learning rate rewinding keeps dense accuracy to 8.00× for 48 epochs of search, "
        "weight rewinding to 4.00× for 32, fine-tuning to 2.00× for 16."
    )


def test_what_may_go_further_is_at_least() -> None:
    assert "learning rate rewinding keeps dense accuracy to at least 4.00×" in said({"lr-rewinding": (0, 0)})


def test_who_keeps_nothing_is_named_too() -> None:
    sentence = said({"lr-rewinding": (0, 5), "fine-tuning": (3, 5), "weight-rewinding": (3, 5)}, iterative=False)
    assert sentence == (
        "Pruned in one shot, learning rate rewinding keeps dense accuracy to 2.00× for 16 epochs of search; "
        "fine-tuning and weight rewinding at no compression tried."
    )


@pytest.mark.parametrize(("spread", "doubtful"), [(0.001, False), (0.02, True)])
def test_an_order_that_could_be_chance_is_said_to_be(spread: float, doubtful: bool) -> None:
    table = rows({"lr-rewinding": (0, 0, 0, 3), "weight-rewinding": (0, 0, 1, 4)})
    trials = [
        replace(row, trial=n, val=value, test=value)
        for row in table
        for n in (1, 2, 3)
        if not row.dense and (value := (row.test or 0) + (n - 2) * spread)
    ]
    (sentence,) = told([row for row in table if row.dense] + trials).values()
    assert "learning rate rewinding keeps dense accuracy to 8.00×" in sentence
    assert sentence.endswith(" This order may be chance: it changes if results move by one standard error.") == doubtful


def test_when_none_keeps_it_the_nearest_is_named() -> None:
    assert said({"lr-rewinding": (1.5, 5), "fine-tuning": (3, 5)}) == (
        "Pruned iteratively, no technique keeps dense accuracy at 2.00×, the smallest compression tried; "
        "learning rate rewinding comes closest, at −1.50 points."
    )


def test_ablations_stay_out_unless_there_is_nothing_else_and_a_technique_of_ones_own_keeps_its_name() -> None:
    losses = {"reinitialization": (0, 0), "My technique": (0, 5)}
    assert said(losses).startswith("Pruned iteratively, My technique keeps dense accuracy to 2.00×")
    assert "Reinitializing keeps" in said({"reinitialization": (0, 5)})


def test_the_metric_is_named() -> None:
    assert "keeps dense BLEU to 2.00×" in said({"lr-rewinding": (0, 5)}, Metric("BLEU", "BLEU"))


def test_where_lower_is_better_a_rise_is_a_loss() -> None:
    loss = Metric("loss", "nats", higher_is_better=False)
    assert "learning rate rewinding keeps dense loss to 2.00×" in said({"lr-rewinding": (0, 5)}, loss)
    worse = said({"lr-rewinding": (5, 9), "fine-tuning": (7, 9)}, loss)
    assert worse.endswith("learning rate rewinding comes closest, 5.00 nats above it.")


def test_the_cost_of_a_table_that_does_not_know_it_follows_the_papers_rule() -> None:
    def costs(technique: str, *, iterative: bool) -> list[float | None]:
        line = Line("task", "unstructured", iterative, technique)
        made = [Cell(line, density, t, (0.9,), (0.9,)) for density in (0.8, 0.64) for t in (8, 16)]
        return [cell.search_epochs for cell in priced(made, {"task": 32})]

    assert costs("fine-tuning", iterative=True) == [8, 16, 16, 32]
    assert costs("fine-tuning", iterative=False) == [8, 16, 8, 16]
    assert costs("reinitialization", iterative=False) == [40, 48, 40, 48], "T + t"
    known = Cell(Line("task", "unstructured", True, "fine-tuning"), 0.8, 8, (0.9,), (0.9,), search_epochs=5)
    assert priced([known], {}) == [known], "what the table knows stays"


def test_the_papers_headline(authors: list[Row]) -> None:
    sentence = told(authors)["cifar10-resnet56", "unstructured"]
    assert "learning rate rewinding to 9.31× for 1,820" in sentence
    assert "fine-tuning to 1.95×" in sentence
