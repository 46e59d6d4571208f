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
# slim = true                           # with pattern "unit" or "filter", or a preset: smaller networks
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import product
from pathlib import Path

from rewound.experiments.sweeps.declaration import (
    Table,
    as_finite,
    axis_in,
    axis_of,
    check_keys,
    combinations,
    declared,
    depth,
    table_in,
)
from rewound.experiments.sweeps.targets import Target, dense, run_of
from rewound.foundations.collector import collector_paused
from rewound.foundations.errors import InputError, as_whole, shown
from rewound.foundations.names import path_of
from rewound.method.algorithm import KEEP, MOST_LEVELS, check_densities, densities
from rewound.method.choices import density_meant
from rewound.method.pruner import Pruner
from rewound.tasks.hyperparameters import field_word
from rewound.tasks.recipe import Recipe, check_recipe
from rewound.tasks.recipes import recipe_named

RANDOMNESS = ("shared", "independent")
_LISTS = {field.name: 1 for field in fields(Pruner) if field.name in ("only", "skip")}
_TWO_WAYS = "density = {density:.6g} (one-shot) or levels = {{ compression = {compression:.6g} }} (iterative)"


@dataclass(frozen=True)
class Experiment:
    """Every technique at every time, pruner and list of densities."""

    techniques: tuple[str, ...]
    retrain_epochs: tuple[float, ...]
    densities: tuple[tuple[float, ...], ...]
    """The densities of each run: one for a one-shot run, all levels for an iterative one; none for a preset."""
    iterative: bool
    pruners: tuple[Pruner, ...] = (Pruner(),)
    slim: tuple[bool, ...] = (False,)
    """Whether networks are trained without the units that are pruned, or with a mask."""
    trials: tuple[int, ...] | None = None
    """Which of the sweep's trials; None: all of them."""
    final: float | None = None
    """The learning rate that holds after the end of the schedule; None: the recipe's own."""


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
    table: Table | None = field(default=None, compare=False, repr=False)
    """What it was parsed from."""

    @property
    def recipe(self) -> Recipe:
        """The recipe; the first, where there are several."""
        return self.recipes[0]

    @cached_property
    @collector_paused()
    def targets(self) -> tuple[Target, ...]:
        """Every row that the sweep asks for, dense runs of a recipe first; the same row asked for twice counts once."""
        rows: dict[tuple[object, ...], Target] = {}
        for target in self._targets():
            if rows.setdefault(_label(target), target).state.key != target.state.key:
                raise InputError(
                    f"two {_runs_of(target)} in different ways, and would share a row of the tables; "
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
        for (recipe, variant), randomness in product(differing_fields(self.recipes).items(), self.randomness):
            words = (variant, f"randomness={randomness}" if len(self.randomness) > 1 else "")
            label = " ".join(filter(None, words))
            targets = self._of(recipe, independent=randomness == "independent")
            yield from (replace(target, variant=label) for target in targets) if label else targets

    def _of(self, recipe: Recipe, *, independent: bool) -> Iterator[Target]:
        yield from (dense(recipe, trial) for trial in self.trials)
        for e in self.experiments:
            for technique, epochs, chain, pruner, slim in product(
                e.techniques, e.retrain_epochs, e.densities, e.pruners, e.slim
            ):
                how = {"iterative": e.iterative, "slim": slim, "independent": independent}
                run = run_of(recipe, technique, epochs, chain, pruner, **how, final=e.final)
                for trial in e.trials or self.trials:
                    yield from run.targets(trial)


def _is_one_ladder(chains: Collection[tuple[float, ...]]) -> bool:
    """Whether the shorter ones are beginnings of the longest."""
    longest = max(chains, key=len)
    return all(chain == longest[: len(chain)] for chain in chains)


def _label(target: Target) -> tuple[object, ...]:
    """What tells one row of the tables from another."""
    density = f"{target.density:.10g}"
    line = (target.task, target.pruning, target.iterative, target.technique)
    return *line, density, target.retrain_epochs, target.trial


def _runs_of(target: Target) -> str:
    """Runs of the target's row, in a sentence about two of them."""
    if not target.technique:
        return f"dense networks of {target.task} are trained"
    return f"runs of {target.technique} reach density {target.density:g}"


def load_sweep(name: str | Path) -> Sweep:
    """The sweep in a TOML file, or the shipped one of that name."""
    found = declared(name)
    return parse_sweep(found.table, found.name)


def parse_sweep(table: Table, name: str = "sweep") -> Sweep:
    """The sweep that a TOML table declares; an error names the sweep."""
    try:
        return _parsed(table, name)
    except InputError as error:
        raise InputError(f"{name if name == 'sweep' else f'sweep {name}'}: {error}") from error


def _parsed(table: Table, name: str) -> Sweep:
    check_keys("key", table, ("recipe", "trials", "randomness", "recipe-fields", "experiment"))
    given = table_in(table, "recipe-fields")
    recipes = dict.fromkeys(recipe for value in axis_in(table, "recipe") for recipe in _recipes(value, given))
    _check_labels(type(recipe) for recipe in recipes)
    trials = _trials(table)
    randomness = axis_in(table, "randomness") if "randomness" in table else ["shared"]
    for word in randomness:
        if word not in RANDOMNESS:
            raise InputError(f'randomness is "shared" or "independent", not {word!r}')
    experiments = table.get("experiment", [])
    if not isinstance(experiments, list) or not all(isinstance(e, dict) for e in experiments):
        kind = "a table" if isinstance(experiments, Mapping) else shown(experiments)
        raise InputError(f"experiment is a list of tables ([[experiment]], with two brackets), not {kind}")
    grids = tuple(_experiment(e, trials) for e in experiments)
    chosen = tuple(word for word in RANDOMNESS if word in randomness)
    return Sweep(name, tuple(recipes), trials, grids, chosen, table)


def _recipes(value: object, given: Table) -> tuple[Recipe, ...]:
    """The recipes that one value of `recipe` stands for: a name, or in a dict the recipe itself."""
    if isinstance(value, str):
        return variants(recipe_named(value), given)
    if not isinstance(value, Recipe | type):
        raise InputError(f"recipe must be a text, or in Python a Recipe, not {value!r}")
    check_recipe(value)
    assert isinstance(value, Recipe)  # as checked just above
    if given:
        names = ", ".join(given)
        raise InputError(f"recipe-fields go with the name of a recipe; give {names} to {type(value).__name__} itself")
    return (value,)


def variants(task: type[Recipe], table: Table) -> tuple[Recipe, ...]:
    """The recipe with every combination of the fields given, each once: a list is an axis of the grid.

    A field that is itself a list, as `widths = [4, 8]`, has a list of lists for an axis.
    """
    defaults = {field.name.replace("_", "-"): field.default for field in fields(task)}
    given = {key: defaults.get(key.replace("_", "-")) for key in table}  # None: unknown, or of any kind
    depths = {key: math.inf if default is None else depth(default) for key, default in given.items()}
    return tuple(dict.fromkeys(task.with_fields(chosen) for chosen in combinations(table, depths)))


def differing_fields(recipes: Sequence[Recipe]) -> dict[Recipe, str]:
    """The fields in which variants of one recipe differ, as "width=4"; no text where there is one variant.

    >>> from rewound.tasks.recipes.digits import Digits
    >>> list(differing_fields(variants(Digits, {"batch-size": [32, 64], "epochs": 4})).values())
    ['batch-size=32', 'batch-size=64']
    """
    words: dict[Recipe, str] = {}
    for task in dict.fromkeys(map(type, recipes)):
        of_task = [recipe for recipe in recipes if type(recipe) is task]
        names = [field.name for field in fields(task)]
        differing = [name for name in names if len({getattr(recipe, name) for recipe in of_task}) > 1]
        words |= {recipe: " ".join(field_word(name, getattr(recipe, name)) for name in differing) for recipe in of_task}
    return words


def _check_labels(tasks: Iterable[type[Recipe]]) -> None:
    """Refuse two tasks with one name: tables and keys of states could not tell them apart."""
    known: dict[str, type[Recipe]] = {}
    for task in tasks:
        if (other := known.setdefault(task.label(), task)) is not task:
            raise InputError(
                f"{path_of(other)} and {path_of(task)} are both called {task.label()} in the tables; "
                "give one of them another name"
            )


def _experiment(table: Table, trials: tuple[int, ...]) -> Experiment:
    """The experiment that a table declares, in a sweep with these trials."""
    _check_no_synonyms(table, {"sparsity": "density = {density:.6g}", "compression": _TWO_WAYS})
    keys = ("technique", "retrain-epochs", "density", "levels", "pruner", "slim", "final", "trials")
    check_keys("key of [[experiment]]", table, keys)
    chosen = _trials(table) if "trials" in table else None
    if chosen and (strange := set(chosen) - set(trials)):
        raise InputError(
            f"trials of an experiment must be among the sweep's, not {', '.join(map(str, sorted(strange)))}"
        )
    pruners = [pruner for value in axis_in(table, "pruner") for pruner in _pruners(value)] if "pruner" in table else []
    chains = _densities_of_runs(table, pruners)
    return Experiment(
        tuple(axis_of(table, "technique", str, "a text")),
        tuple(as_finite("retrain-epochs", value) for value in axis_in(table, "retrain-epochs")),
        tuple(chains),
        iterative="levels" in table,
        pruners=tuple(pruners or [Pruner()]),
        slim=tuple(dict.fromkeys(axis_of(table, "slim", bool, "true or false"))) if "slim" in table else (False,),
        trials=chosen,
        final=as_finite("final", table["final"]) if "final" in table else None,
    )


def _densities_of_runs(table: Table, pruners: Sequence[Pruner]) -> list[tuple[float, ...]]:
    """The densities of each run of an experiment: one, those of its levels, or none if its pruners have their own."""
    given = "density" in table or "levels" in table
    # A preset, a table of rates, and N:M say how much goes; only N:M may have its own density given all the same.
    if say_it := [p.sets_density for p in pruners if p.sets_density and not (given and p.fixed_density)]:
        if given or len(say_it) < len(pruners):
            raise InputError(
                f"{say_it[0]} says itself how much goes: its experiment has neither density nor levels, nor other "
                "pruners"
            )
        return [()]
    if ("density" in table) == ("levels" in table):
        raise InputError("an experiment has either density (one-shot) or levels (iterative)")
    chains: list[tuple[float, ...]]
    if "density" in table:
        chains = [(as_finite("density", value),) for value in axis_in(table, "density")]
    else:
        chains = [chain for value in axis_in(table, "levels") for chain in _chains(value)]
    for chain in chains:
        check_densities(chain)
    return chains


def _check_no_synonyms(table: Table, remedies: Mapping[str, str]) -> None:
    """Refuse another word for how much is pruned than the one this table has, and say what to write instead."""
    for word, remedy in remedies.items():
        if word in table:
            density = density_meant(word, axis_in(table, word)[0])
            written = remedy.format(density=density, compression=1 / density)
            raise InputError(f"{word} is not a key here; for {100 * (1 - density):.6g}% sparsity write {written}")


def _trials(table: Table) -> tuple[int, ...]:
    """The trials that a table lists."""
    if isinstance(number := table.get("trials"), int) and not isinstance(number, bool):
        raise InputError(f"trials is a list, not {number}: [{number}] is one trial, [1, 2, 3] are three")
    return tuple(as_whole("a trial", value) for value in axis_in(table, "trials"))


def _chains(value: object) -> Iterator[tuple[float, ...]]:
    """The densities of the runs that one table of `levels` stands for."""
    if not isinstance(value, Mapping):
        raise InputError(f"levels is a table such as {{ keep = 0.8, count = 10 }}, not {value!r}")
    _check_no_synonyms(value, dict.fromkeys(("sparsity", "density"), "compression = {compression:.6g}"))
    check_keys("key of levels", value, ("keep", "count", "compression"))
    if ("count" in value) == ("compression" in value):
        raise InputError("levels has either count or compression")
    return map(_chain, combinations(value))


def _chain(levels: Table) -> tuple[float, ...]:
    keep = as_finite("keep", levels.get("keep", KEEP))
    if not 0 < keep < 1:
        raise InputError(f"keep must be between 0 and 1, not {keep:g}")
    if "compression" in levels:
        return tuple(densities(as_finite("compression", levels["compression"]), keep))
    count = as_whole("count", levels["count"])
    if not 1 <= count <= MOST_LEVELS:
        raise InputError(f"count must be from 1 to {MOST_LEVELS:,} levels, not {count}")
    return tuple(keep**i for i in range(1, count + 1))


def _pruners(value: object) -> Iterator[Pruner]:
    """The pruners that one table of `pruner` stands for."""
    if not isinstance(value, Mapping):
        raise InputError(f'pruner is a table such as {{ score = "magnitude" }}, not {value!r}')
    table = {key.replace("-", "_"): given for key, given in value.items()}
    check_keys("key of pruner", table, [f.name for f in fields(Pruner)])
    return map(_pruner, combinations(table, _LISTS))


def _pruner(table: Table) -> Pruner:
    words = {key: tuple(given) if isinstance(given, list) else given for key, given in table.items()}
    for key, given in words.items():
        default = getattr(Pruner, key)
        if key == "rates":
            continue  # a table, which `Pruner` checks
        if isinstance(default, tuple) and isinstance(given, str):
            raise InputError(f'{key} of pruner is a list; write {key} = ["{given}"]')
        if not isinstance(given, int | float if key == "floor" else type(default)):
            raise InputError(f"{key} of pruner must be like {default!r}, not {given!r}")
    return Pruner(**words)  # type: ignore[arg-type]  # each checked against its default just above
