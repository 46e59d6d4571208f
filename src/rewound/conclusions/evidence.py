"""What a report is about: tables, a table to compare them with, and what is known of the recipes."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from rewound.conclusions.cells import Baseline, baselines, cells
from rewound.conclusions.comparison import Card, compare
from rewound.conclusions.tables import Row, Tables, is_structured, with_common_densities
from rewound.method.pruning.presets import PRESETS

LEAST_TRIALS: Final = 3


@dataclass(frozen=True)
class Evidence:
    """All that figures, page and summary are drawn from."""

    tables: Tables
    compared_with: Sequence[Row] = ()
    """The rows to compare with, if there are any."""
    training_epochs: Mapping[str, float] = field(default_factory=dict)
    """T by recipe, as far as it is known: tables do not say it."""
    test_shares: Mapping[str, float] = field(default_factory=dict)
    """The fraction of the held-out images that is the test set, for recipes that are compared on all of them."""

    @cached_property
    def rows(self) -> list[Row]:
        """Our results, those that were asked for at one density under one density."""
        return with_common_densities(self.tables.rows)

    @cached_property
    def theirs(self) -> list[Row]:
        """The rows to compare with, likewise."""
        return with_common_densities(self.compared_with)

    @cached_property
    def baselines(self) -> dict[str, Baseline]:
        """The dense networks of every recipe in our table."""
        return baselines(self.rows)

    @property
    def only_dense(self) -> bool:
        """Whether nothing was pruned."""
        return all(row.dense for row in self.rows)

    @cached_property
    def guessed(self) -> dict[str, float]:
        """T of the recipes for which it is not known: their longest retraining time is taken for it."""
        longest: dict[str, float] = {}
        for row in self.rows:
            if row.recipe not in self.training_epochs:
                longest[row.recipe] = max(longest.get(row.recipe, 0), row.retrain_epochs or 0)
        return longest

    @cached_property
    def epochs(self) -> dict[str, float]:
        """T of every recipe, as far as it is known; of the others as it is guessed.

        >>> row = Row("digits", "unstructured", False, "fine-tuning", 0.1, 4, 1, 0.9, 0.9)
        >>> Evidence(Tables([row])).epochs, Evidence(Tables([row]), training_epochs={"digits": 16}).epochs
        ({'digits': 4}, {'digits': 16})
        """
        return self.guessed | dict(self.training_epochs)

    @property
    def weaknesses(self) -> list[str]:
        """What makes the conclusions from our table weak, one sentence each."""
        sentences = [*weaknesses(self.rows), *uneven_units(self.tables), *missed_densities(self.tables.rows)]
        if guesses := [f"{recipe}: T = {longest:g}" for recipe, longest in sorted(self.guessed.items()) if longest]:
            sentences.append(
                "the table does not say how long a recipe trains, so its longest retraining time is taken for that "
                f"({', '.join(guesses)})"
            )
        return sentences

    @cached_property
    def cards(self) -> list[Card]:
        """How near our table comes to theirs, a card for every recipe in both; an error where there is none."""
        return compare(self.rows, self.theirs, self.training_epochs, self.test_shares) if self.theirs else []


def weaknesses(rows: Iterable[Row]) -> list[str]:
    """What makes the conclusions from a table weak, one sentence each."""
    rows = [row for row in rows if row.test is not None]
    sentences = []
    for recipe in sorted({row.recipe for row in rows if not row.dense}):
        own_rows = [row for row in rows if row.recipe == recipe]
        own_cells, dense = cells(own_rows), sum(row.dense for row in own_rows)
        few = [cell for cell in own_cells if len(cell.tests) < LEAST_TRIALS]
        if few:
            sentences.append(
                f"{recipe}: {len(few)} of {len(own_cells)} cells have fewer than {LEAST_TRIALS} trials; "
                "their medians may be luck"
            )
        if all(row.val is None or row.val == row.test for row in own_rows if not row.dense):
            sentences.append(
                f"{recipe}: no validation split; retraining times are chosen on the test set and look too good"
            )
        if dense == 1:
            sentences.append(f"{recipe}: one dense run; its spread is unknown, and taken as 0")
    return sentences


def uneven_units(tables: Tables) -> list[str]:
    """Where units are pruned whose sizes differ, a density that was asked for is not that of the weights.

    A preset's density is that of the network without its filters, so that fewer weights are masked by design.
    """
    rows = [row for row in tables.rows if is_structured(row.pruning) and row.asked_density is None and not row.dense]
    rows = [row for row in rows if row.pruning.split(" ")[0] not in PRESETS]
    keys, kept, total = {row.key for row in rows}, Counter[str](), Counter[str]()
    for layer in tables.layers if keys else ():
        if layer.key in keys:
            kept[layer.key] += layer.kept
            total[layer.key] += layer.total
    found = [(row, row.density, kept[row.key] / total[row.key]) for row in rows if total[row.key]]
    return [
        f"{recipe}, {pruning}: density {density:g} leaves {weights:.3g} of the weights in layers.csv, as units of "
        "unequal sizes count alike, or not all of these layers are pruned"
        for recipe, pruning, density, weights in _furthest_off(found)
    ]


def missed_densities(rows: Iterable[Row]) -> list[str]:
    """Where whole units are pruned: how far the networks are from the densities that were asked for, beyond 1%.

    A density of operations is another matter than that of weights.
    """
    found = [
        (row, row.asked_density, row.density)
        for row in rows
        if row.asked_density is not None and "of=flops" not in row.pruning.split(" ")
    ]
    return [
        f"{recipe}, {pruning}: whole units cannot meet every density exactly; furthest off is {density:.3g} where "
        f"{asked:g} was asked for, and networks with the same target are compared at their median density"
        for recipe, pruning, asked, density in _furthest_off(found)
    ]


def _furthest_off(found: Iterable[tuple[Row, float, float]]) -> list[tuple[str, str, float, float]]:
    """For each recipe and pruning, the density asked for and the one found that differ most, by more than 1%."""
    worst: dict[tuple[str, str], tuple[float, float, float]] = {}
    for row, asked, density in found:
        place, off = (row.recipe, row.pruning), abs(density / asked - 1)
        worst[place] = max(worst.get(place, (0.01, 0.0, 0.0)), (off, asked, density))
    return [(*place, asked, density) for place, (_, asked, density) in sorted(worst.items()) if asked]
