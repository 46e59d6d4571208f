"""Variants of one recipe: the fields that a sweep's `[recipe-fields]` give, where a list is an axis of the grid.

A field that is itself a list, as `widths = [4, 8]`, has a list of lists for an axis. Variants are told apart by the
fields in which they differ.
"""

from collections.abc import Sequence
from dataclasses import fields
from itertools import product

from rewound.hyperparameters import field_word
from rewound.recipe import Recipe
from rewound.sweeps.declaration import Table
from rewound.sweeps.entries import axis_in


def variants(task: type[Recipe], table: Table) -> tuple[Recipe, ...]:
    """The recipe with every combination of the fields given, each once."""
    defaults = {field.name.replace("_", "-"): field.default for field in fields(task)}

    def values(key: str) -> list[object]:
        default = defaults.get(key.replace("_", "-"))  # None: unknown, or of any kind
        return axis_in(table, key) if default is not None and _depth(table[key]) > _depth(default) else [table[key]]

    made = (task.with_fields(dict(zip(table, given, strict=True))) for given in product(*map(values, table)))
    return tuple(dict.fromkeys(made))


def told_apart(recipes: Sequence[Recipe]) -> dict[Recipe, str]:
    """What tells variants of one recipe apart, as "width=4"; nothing where there is one.

    >>> from rewound.recipes.digits import Digits
    >>> list(told_apart(variants(Digits, {"batch-size": [32, 64], "epochs": 4})).values())
    ['batch-size=32', 'batch-size=64']
    """
    names = [field.name for field in fields(recipes[0])]
    differing = [name for name in names if len({getattr(recipe, name) for recipe in recipes}) > 1]
    return {recipe: " ".join(field_word(name, getattr(recipe, name)) for name in differing) for recipe in recipes}


def _depth(value: object) -> int:
    """How many lists are around a value."""
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list | tuple) else 0
