"""A declared experiment: a TOML file whose lists, at any depth, are the axes of a grid.

recipe = "digits"                       # or "package.module:Class"; several share all that follows
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

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path

from rewound.experiments.sweeps.declaration import Table, declared
from rewound.experiments.sweeps.entries import axis_in, check_keys, table_in, texts_in
from rewound.experiments.sweeps.experiment import Experiment, experiment_in, trials_in
from rewound.experiments.sweeps.targets import Target, dense, retrained
from rewound.experiments.sweeps.variants import check_labels, told_apart, variants
from rewound.foundations.errors import InputError
from rewound.method.pruning.pruner import Pruner
from rewound.tasks.recipe import Recipe
from rewound.tasks.recipes import recipe_named

RANDOMNESS = ("shared", "independent")


@dataclass(frozen=True)
class Sweep:
    """Recipes, their trials and what to do with them."""

    name: str
    recipes: tuple[Recipe, ...]
    """Each with all combinations of its fields, where they are axes of the grid."""
    trials: tuple[int, ...]
    experiments: tuple[Experiment, ...]
    randomness: tuple[str, ...] = ("shared",)
    """What the seed depends on; with "independent", on technique and time, too."""

    @property
    def recipe(self) -> Recipe:
        """The recipe; the first, where there are several."""
        return self.recipes[0]

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        """Every row that the sweep asks for, dense runs of a recipe first; the same row asked for twice counts once."""
        rows: dict[tuple[object, ...], Target] = {}
        for target in self._targets():
            if rows.setdefault(_label(target), target).state.key != target.state.key:
                raise InputError(
                    f"two {_called(target)} in different ways, and would share a row of the tables; "
                    "declare them in two sweeps"
                )
        return tuple(rows.values())

    @property
    def joined(self) -> list[str]:
        """Techniques whose levels are several ladders, as by two values of `keep`: one curve in a report."""
        ladders: dict[tuple[str, Pruner], set[tuple[float, ...]]] = defaultdict(set)
        for e in self.experiments:
            for place in product(e.techniques, e.pruners) if e.iterative else ():
                ladders[place].update(e.densities)
        return sorted({technique for (technique, _), found in ladders.items() if not _is_one_ladder(found)})

    def _targets(self) -> Iterator[Target]:
        for (recipe, variant), randomness in product(told_apart(self.recipes).items(), self.randomness):
            words = (variant, f"randomness={randomness}" if len(self.randomness) > 1 else "")
            label = " ".join(filter(None, words))
            targets = self._of(recipe, independent=randomness == "independent")
            yield from (replace(target, variant=label) for target in targets) if label else targets

    def _of(self, recipe: Recipe, *, independent: bool) -> Iterator[Target]:
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
                    independent=independent,
                )


def _is_one_ladder(chains: Collection[tuple[float, ...]]) -> bool:
    """Whether the shorter ones are beginnings of the longest."""
    longest = max(chains, key=len)
    return all(chain == longest[: len(chain)] for chain in chains)


def _label(target: Target) -> tuple[object, ...]:
    """What tells one row of the tables from another."""
    density = f"{target.density:.10g}"
    line = (target.task, target.pruning, target.iterative, target.technique)
    return *line, density, target.retrain_epochs, target.trial


def _called(target: Target) -> str:
    """Runs of the target's row, in a sentence about two of them."""
    if not target.technique:
        return f"dense networks of {target.task} are trained"
    return f"runs of {target.technique} reach density {target.density:g}"


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
    tasks, fields = [recipe_named(word) for word in texts_in(table, "recipe")], table_in(table, "recipe-fields")
    check_labels(tasks)
    recipes = dict.fromkeys(recipe for task in tasks for recipe in variants(task, fields))
    trials = trials_in(table)
    randomness = axis_in(table, "randomness") if "randomness" in table else ["shared"]
    for word in randomness:
        if word not in RANDOMNESS:
            raise InputError(f'randomness is "shared" or "independent", not {word!r}')
    experiments = table.get("experiment", [])
    if not isinstance(experiments, list) or not all(isinstance(e, dict) for e in experiments):
        raise InputError("experiments are declared under [[experiment]], with two brackets")
    made = tuple(experiment_in(e, trials) for e in experiments)
    return Sweep(name, tuple(recipes), trials, made, tuple(word for word in RANDOMNESS if word in randomness))
