"""A declared experiment: a TOML file whose lists are the axes of a grid.

recipe = "digits"                       # or "package.module:Class"
trials = [1, 2, 3]
randomness = "shared"                   # or "independent": technique and time join the seed

[recipe-fields]                         # optional: fields of the recipe; a list is an axis here, too
epochs = 16.0

[[experiment]]
technique = ["fine-tuning", "lr-rewinding"]
retrain-epochs = [4, 16]
density = [0.2, 0.1]                    # one-shot; or, iterative:
# levels = { keep = 0.8, count = 10 }   # or { keep = 0.8, compression = 10 }
pruner = { score = "magnitude", scope = "global" }
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from functools import cached_property
from itertools import product
from pathlib import Path

from rewound.algorithm import KEEP, check_densities, densities
from rewound.errors import InputError, as_whole
from rewound.pruning.pruner import Pruner
from rewound.recipe import Recipe
from rewound.recipes import recipe_named
from rewound.sweeps.declaration import Table, declared
from rewound.sweeps.entries import as_finite, axis_in, check_keys, table_in, text_in
from rewound.sweeps.targets import Target, dense, retrained
from rewound.sweeps.variants import told_apart, variants


@dataclass(frozen=True)
class Experiment:
    """One `[[experiment]]`: every technique at every time, pruner and list of densities."""

    techniques: tuple[str, ...]
    retrain_epochs: tuple[float, ...]
    densities: tuple[tuple[float, ...], ...]
    """The densities of each run: one for a one-shot run, all levels for an iterative one."""
    iterative: bool
    pruners: tuple[Pruner, ...] = (Pruner(),)
    trials: tuple[int, ...] | None = None
    """Which of the sweep's trials; None: all of them."""


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
    trials = _trials(table)
    randomness = table.get("randomness", "shared")
    if randomness not in ("shared", "independent"):
        raise InputError(f'randomness is "shared" or "independent", not {randomness!r}')
    experiments = table.get("experiment", [])
    if not isinstance(experiments, list) or not all(isinstance(e, dict) for e in experiments):
        raise InputError("experiments are declared under [[experiment]], with two brackets")
    made = tuple(_experiment(e, trials) for e in experiments)
    return Sweep(name, recipes[0], trials, made, randomness == "independent", recipes)


def _experiment(table: Table, trials: tuple[int, ...]) -> Experiment:
    check_keys("key of [[experiment]]", table, ("technique", "retrain-epochs", "density", "levels", "pruner", "trials"))
    chosen = _trials(table) if "trials" in table else None
    if chosen and (strange := set(chosen) - set(trials)):
        raise InputError(
            f"trials of an experiment must be among the sweep's, not {', '.join(map(str, sorted(strange)))}"
        )
    if ("density" in table) == ("levels" in table):
        raise InputError("an experiment has either density (one-shot) or levels (iterative)")
    one_shot = "density" in table
    chains: list[tuple[float, ...]]
    if one_shot:
        chains = [(as_finite("density", value),) for value in axis_in(table, "density")]
    else:
        chains = [_levels(value) for value in axis_in(table, "levels")]
    for chain in chains:
        check_densities(chain)
    pruners = tuple(_pruner(value) for value in axis_in(table, "pruner")) if "pruner" in table else (Pruner(),)
    return Experiment(
        tuple(text_in({"technique": value}, "technique") for value in axis_in(table, "technique")),
        tuple(as_finite("retrain-epochs", value) for value in axis_in(table, "retrain-epochs")),
        tuple(chains),
        iterative=not one_shot,
        pruners=pruners,
        trials=chosen,
    )


def _trials(table: Table) -> tuple[int, ...]:
    if isinstance(number := table.get("trials"), int):
        raise InputError(f"trials is a list, not {number}: [{number}] is one trial, [1, 2, 3] are three")
    return tuple(as_whole("a trial", value) for value in axis_in(table, "trials"))


def _levels(value: object) -> tuple[float, ...]:
    if isinstance(value, Mapping):
        check_keys("key of levels", value, ("keep", "count", "compression"))
        keep = as_finite("keep", value.get("keep", KEEP))
        if ("count" in value) == ("compression" in value):
            raise InputError("levels has either count or compression")
        if not 0 < keep < 1:
            raise InputError(f"keep must be between 0 and 1, not {keep:g}")
        if "compression" in value:
            return tuple(densities(as_finite("compression", value["compression"]), keep))
        count = as_whole("count", value["count"])
        if count < 1:
            raise InputError(f"count must be at least 1, not {count}")
        return tuple(keep**i for i in range(1, count + 1))
    raise InputError(f"levels is a table such as {{ keep = 0.8, count = 10 }}, not {value!r}")


def _pruner(value: object) -> Pruner:
    if not isinstance(value, Mapping):
        raise InputError(f'pruner is a table such as {{ score = "magnitude" }}, not {value!r}')
    check_keys("key of pruner", value, [f.name for f in fields_of(Pruner)])
    words = {key: tuple(given) if isinstance(given, list) else given for key, given in value.items()}
    for key, given in words.items():
        default = getattr(Pruner, key)
        if isinstance(default, tuple) and isinstance(given, str):
            raise InputError(f'{key} of pruner is a list; write {key} = ["{given}"]')
        if not isinstance(given, int | float if key == "floor" else type(default)):
            raise InputError(f"{key} of pruner must be like {default!r}, not {given!r}")
    return Pruner(**words)  # type: ignore[arg-type]  # each checked against its default just above
