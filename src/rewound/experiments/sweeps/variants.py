"""Variants of a recipe: the fields that a sweep's `[recipe-fields]` give, where a list is an axis of the grid.

A field that is itself a list, as `widths = [4, 8]`, has a list of lists for an axis. Variants are told apart by the
fields in which they differ.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from math import inf

from rewound.experiments.sweeps.declaration import Table
from rewound.experiments.sweeps.entries import combinations, depth
from rewound.foundations.errors import InputError
from rewound.foundations.names import path_of
from rewound.tasks.hyperparameters import field_word
from rewound.tasks.recipe import Recipe


def variants(task: type[Recipe], table: Table) -> tuple[Recipe, ...]:
    """The recipe with every combination of the fields given, each once."""
    defaults = {field.name.replace("_", "-"): field.default for field in fields(task)}
    given = {key: defaults.get(key.replace("_", "-")) for key in table}  # None: unknown, or of any kind
    depths = {key: inf if default is None else depth(default) for key, default in given.items()}
    return tuple(dict.fromkeys(task.with_fields(chosen) for chosen in combinations(table, depths)))


def told_apart(recipes: Sequence[Recipe]) -> dict[Recipe, str]:
    """What tells variants of one recipe apart, as "width=4"; nothing where there is one.

    >>> from rewound.tasks.recipes.digits import Digits
    >>> list(told_apart(variants(Digits, {"batch-size": [32, 64], "epochs": 4})).values())
    ['batch-size=32', 'batch-size=64']
    """
    words: dict[Recipe, str] = {}
    for task in dict.fromkeys(map(type, recipes)):
        mine = [recipe for recipe in recipes if type(recipe) is task]
        names = [field.name for field in fields(task)]
        differing = [name for name in names if len({getattr(recipe, name) for recipe in mine}) > 1]
        words |= {recipe: " ".join(field_word(name, getattr(recipe, name)) for name in differing) for recipe in mine}
    return words


def check_labels(tasks: Iterable[type[Recipe]]) -> None:
    """An error for two tasks that go by one name, in the tables and in every address."""
    known: dict[str, type[Recipe]] = {}
    for task in tasks:
        if (other := known.setdefault(task.label(), task)) is not task:
            raise InputError(
                f"{path_of(other)} and {path_of(task)} are both called {task.label()} in the tables; "
                "give one of them another name"
            )
