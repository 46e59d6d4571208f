"""What the values of a table are: fractions, which are shown in points, or scores as they are, never a mixture.

A table does not name its unit, so it is judged by size: no fraction is above 1, no useful BLEU or percentage below.
Which scores are BLEU is judged by the recipe's name.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from rewound.conclusions.tables.rows import Row
from rewound.foundations.errors import InputError

LARGEST_FRACTION: Final = 1.5
_TRANSLATION: Final = ("bleu", "gnmt", "translat", "wmt")


def shown_scale(value: float) -> float:
    """From a table's value to the shown one: a fraction is shown in points (x 100), anything larger as it is.

    >>> shown_scale(0.93), shown_scale(26.8)
    (100.0, 1.0)
    """
    return 100.0 if value <= LARGEST_FRACTION else 1.0


def metric_of(recipe: str, scale: float) -> str:
    """What the values of a recipe are called: accuracy where they are fractions, else BLEU or a score.

    >>> metric_of("digits", 100.0), metric_of("wmt16-gnmt", 1.0), metric_of("mypackage.tasks:Squad", 1.0)
    ('accuracy', 'BLEU', 'score')
    """
    if scale == 100:
        return "accuracy"
    return "BLEU" if any(word in recipe.lower() for word in _TRANSLATION) else "score"


def unit_of(metric: str) -> str:
    """The unit of its shown differences."""
    return "BLEU" if metric == "BLEU" else "points"


def scales(rows: Iterable[Row]) -> dict[str, float]:
    """The scale of every recipe with a finished run; a recipe whose rows mix fractions and others is an error."""
    telling_of: dict[str, list[float]] = defaultdict(list)
    pruned: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        for part, value in (("val", row.val), ("test", row.test)) if row.test is not None else ():
            if value is not None:
                (telling_of[row.recipe] if row.dense else pruned[row.recipe, part]).append(value)
    for (recipe, _), values in pruned.items():
        # A network pruned to ruin may score 0.3 BLEU, a dense one does not: among pruned ones only the best counts.
        telling_of[recipe].append(max(values))
    found = {}
    for recipe, telling in telling_of.items():
        if shown_scale(min(telling)) != shown_scale(max(telling)):
            raise InputError(
                f"the rows of {recipe} mix fractions ({min(telling):g}) with other values ({max(telling):g}); "
                "give all of them in one unit"
            )
        found[recipe] = shown_scale(max(telling))
    return found
