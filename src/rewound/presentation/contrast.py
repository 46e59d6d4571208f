"""The first technique of an experiment against each of its rivals: differences by density, and how they were taken."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rewound.conclusions.findings import ABLATIONS
from rewound.conclusions.rivals import LEAST_PAIRS, Difference, differences
from rewound.tables.results import Row


@dataclass(frozen=True)
class Contrast:
    """How much one technique is above others, by technique and density."""

    first: str
    over: Mapping[str, Mapping[float, Difference]]

    @cached_property
    def all(self) -> list[Difference]:
        """Every difference."""
        return [difference for column in self.over.values() for difference in column.values()]

    @property
    def densities(self) -> list[float]:
        """Where there is a difference, mildest pruning first."""
        return sorted({difference.cell.density for difference in self.all}, reverse=True)

    @property
    def how(self) -> str:
        """How the differences were taken."""
        paired = {True: "paired by dense run", False: "not paired"}
        how = [paired[flag] for flag in sorted({difference.paired for difference in self.all})]
        if any(difference.df is None for difference in self.all):
            how.append(f"an interval needs {LEAST_PAIRS} pairs")
        return f"Mean test values, {', '.join(how)}."

    @property
    def brackets(self) -> str:
        """What stands in brackets where differences are written."""
        spread = {True: "[ ] 95% t interval", False: "( ) extremes of the pairs"}
        kinds = sorted({difference.df is not None for difference in self.all})
        return f"{', '.join(spread[flag] for flag in kinds)}."


def contrast(rows: Iterable[Row], techniques: Sequence[str]) -> Contrast | None:
    """The first of these techniques against the others, ablations apart; `rows` are of one experiment, and dense ones.

    >>> rows = [
    ...     Row("digits", "unstructured", True, technique, 0.1, 16, trial, test, test)
    ...     for technique, test in (("lr-rewinding", 0.92), ("fine-tuning", 0.90)) for trial in (1, 2)
    ... ]
    >>> found = contrast(rows, ["lr-rewinding", "fine-tuning"])
    >>> found.first, list(found.over), found.densities
    ('lr-rewinding', ['fine-tuning'], [0.1])
    """
    rivals = [name for name in techniques if name not in ABLATIONS]
    if len(rivals) < 2:
        return None
    first, *others = rivals
    rows = list(rows)
    over = {other: {found.cell.density: found for found in differences(rows, first, other)} for other in others}
    return Contrast(first, over) if any(over.values()) else None
