"""A declared experiment: a TOML file whose lists, at any depth, are the axes of a grid.

recipe = "digits"                       # or "package.module:Class"
trials = [1, 2, 3]
randomness = "shared"                   # or "independent": technique and time join the seed

[recipe-fields]                         # optional: fields of the recipe
epochs = 16.0

[[experiment]]
technique = ["fine-tuning", "lr-rewinding"]
retrain-epochs = [4, 16]
density = [0.2, 0.1]                    # one-shot; or, iterative:
# levels = { keep = 0.8, count = 10 }   # or { keep = 0.8, compression = 10 }
pruner = { score = "magnitude", scope = "global" }
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path

from rewound.errors import InputError
from rewound.recipe import Recipe
from rewound.recipes import recipe_named
from rewound.sweeps.declaration import Table, declared
from rewound.sweeps.entries import check_keys, table_in, text_in
from rewound.sweeps.experiment import Experiment, experiment_in, trials_in
from rewound.sweeps.targets import Target, dense, retrained
from rewound.sweeps.variants import told_apart, variants


@dataclass(frozen=True)
class Sweep:
    """A recipe, its trials and what to do with them."""

    name: str
    recipe: Recipe
    trials: tuple[int, ...]
    experiments: tuple[Experiment, ...]
    independent: bool = False
    variants: tuple[Recipe, ...] = ()
    """The recipe with all combinations of its fields, where they are axes of the grid."""

    @property
    def recipes(self) -> dict[Recipe, str]:
        """The recipe, or its variants, with what tells them apart."""
        return told_apart(self.variants or (self.recipe,))

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        """Every row that the sweep asks for, dense runs of a recipe first; the same row asked for twice counts once."""
        rows: dict[tuple[object, ...], Target] = {}
        for target in self._targets():
            if rows.setdefault(_label(target), target).state.key != target.state.key:
                raise InputError(
                    f"two runs of {target.technique} reach density {target.density:g} in different ways, and would "
                    "share a row of the tables; declare them in two sweeps"
                )
        return tuple(rows.values())

    def _targets(self) -> Iterator[Target]:
        for recipe, variant in self.recipes.items():
            targets = self._of(recipe)
            yield from (replace(target, variant=variant) for target in targets) if variant else targets

    def _of(self, recipe: Recipe) -> Iterator[Target]:
        yield from (dense(recipe, trial) for trial in self.trials)
        for e in self.experiments:
            for technique, epochs, chain, pruner, trial in product(
                e.techniques, e.retrain_epochs, e.densities, e.pruners, e.trials or self.trials
            ):
                yield from retrained(
                    recipe,
                    trial,
                    technique,
                    epochs,
                    chain,
                    pruner,
                    iterative=e.iterative,
                    independent=self.independent,
                )


def _label(target: Target) -> tuple[object, ...]:
    """What tells one row of the tables from another."""
    density = f"{target.density:.10g}"
    line = (target.variant, target.pruning, target.iterative, target.technique)
    return *line, density, target.retrain_epochs, target.trial


def load_sweep(name: str | Path) -> Sweep:
    """The sweep in a TOML file, or the shipped one of that name."""
    found = declared(name)
    return parse_sweep(found.table, found.name)


def parse_sweep(table: Table, name: str) -> Sweep:
    """The sweep that a TOML table declares; an error names the sweep."""
    try:
        return _parsed(table, name)
    except InputError as error:
        raise InputError(f"sweep {name}: {error}") from error


def _parsed(table: Table, name: str) -> Sweep:
    check_keys("key", table, ("recipe", "trials", "randomness", "recipe-fields", "experiment"))
    recipes = variants(recipe_named(text_in(table, "recipe")), table_in(table, "recipe-fields"))
    trials = trials_in(table)
    randomness = table.get("randomness", "shared")
    if randomness not in ("shared", "independent"):
        raise InputError(f'randomness is "shared" or "independent", not {randomness!r}')
    experiments = table.get("experiment", [])
    if not isinstance(experiments, list) or not all(isinstance(e, dict) for e in experiments):
        raise InputError("experiments are declared under [[experiment]], with two brackets")
    made = tuple(experiment_in(e, trials) for e in experiments)
    return Sweep(name, recipes[0], trials, made, randomness == "independent", recipes)
