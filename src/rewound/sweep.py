"""A declared experiment: a TOML file whose lists are the axes of a grid.

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

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from functools import cached_property
from itertools import product
from pathlib import Path

from rewound.algorithm import KEEP, check_densities, densities
from rewound.declaration import Table, declared
from rewound.errors import InputError, as_number
from rewound.names import unknown
from rewound.pruner import Pruner
from rewound.recipe import Recipe
from rewound.recipes import recipe_named
from rewound.targets import Target, dense, retrained


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

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        """Every row that the sweep asks for, dense runs first; the same row asked for twice counts once."""
        return tuple({_label(target): target for target in self._targets()}.values())

    def _targets(self) -> Iterator[Target]:
        yield from (dense(self.recipe, trial) for trial in self.trials)
        for e in self.experiments:
            for technique, epochs, chain, pruner, trial in product(
                e.techniques, e.retrain_epochs, e.densities, e.pruners, e.trials or self.trials
            ):
                yield from retrained(
                    self.recipe,
                    trial,
                    technique,
                    epochs,
                    chain,
                    pruner,
                    iterative=e.iterative,
                    independent=self.independent,
                )


def _label(target: Target) -> tuple[object, ...]:
    return target.iterative, target.technique, target.density, target.retrain_epochs, target.trial, target.state.key


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
    _known("key", table, ("recipe", "trials", "randomness", "recipe-fields", "experiment"))
    recipe = recipe_named(_text(table, "recipe")).with_fields(_table(table, "recipe-fields"))
    trials = _trials(table)
    randomness = table.get("randomness", "shared")
    if randomness not in ("shared", "independent"):
        raise InputError(f'randomness is "shared" or "independent", not {randomness!r}')
    experiments = table.get("experiment", [])
    if not isinstance(experiments, list) or not all(isinstance(e, dict) for e in experiments):
        raise InputError("experiments are declared under [[experiment]], with two brackets")
    return Sweep(name, recipe, trials, tuple(_experiment(e, trials) for e in experiments), randomness == "independent")


def _experiment(table: Table, trials: tuple[int, ...]) -> Experiment:
    _known("key of [[experiment]]", table, ("technique", "retrain-epochs", "density", "levels", "pruner", "trials"))
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
        chains = [(_number("density", value),) for value in _axis(table, "density")]
    else:
        chains = [_levels(value) for value in _axis(table, "levels")]
    for chain in chains:
        check_densities(chain)
    pruners = tuple(_pruner(value) for value in _axis(table, "pruner")) if "pruner" in table else (Pruner(),)
    return Experiment(
        tuple(_text({"technique": value}, "technique") for value in _axis(table, "technique")),
        tuple(_number("retrain-epochs", value) for value in _axis(table, "retrain-epochs")),
        tuple(chains),
        iterative=not one_shot,
        pruners=pruners,
        trials=chosen,
    )


def _trials(table: Table) -> tuple[int, ...]:
    if isinstance(number := table.get("trials"), int):
        raise InputError(f"trials is a list, not {number}: [{number}] is one trial, [1, 2, 3] are three")
    return tuple(_whole("trials", value) for value in _axis(table, "trials"))


def _levels(value: object) -> tuple[float, ...]:
    if isinstance(value, Mapping):
        _known("key of levels", value, ("keep", "count", "compression"))
        keep = _number("keep", value.get("keep", KEEP))
        if ("count" in value) == ("compression" in value):
            raise InputError("levels has either count or compression")
        if not 0 < keep < 1:
            raise InputError(f"keep must be between 0 and 1, not {keep:g}")
        if "compression" in value:
            return tuple(densities(_number("compression", value["compression"]), keep))
        count = _whole("count", value["count"])
        if count < 1:
            raise InputError(f"count must be at least 1, not {count}")
        return tuple(keep**i for i in range(1, count + 1))
    raise InputError(f"levels is a table such as {{ keep = 0.8, count = 10 }}, not {value!r}")


def _pruner(value: object) -> Pruner:
    if not isinstance(value, Mapping):
        raise InputError(f'pruner is a table such as {{ score = "magnitude" }}, not {value!r}')
    _known("key of pruner", value, [f.name for f in fields_of(Pruner)])
    words = {key: tuple(given) if isinstance(given, list) else given for key, given in value.items()}
    for key, given in words.items():
        default = getattr(Pruner, key)
        if isinstance(default, tuple) and isinstance(given, str):
            raise InputError(f'{key} of pruner is a list; write {key} = ["{given}"]')
        if not isinstance(given, int | float if key == "floor" else type(default)):
            raise InputError(f"{key} of pruner must be like {default!r}, not {given!r}")
    return Pruner(**words)  # type: ignore[arg-type]  # each checked against its default just above


def _known(kind: str, table: Table, names: Iterable[str]) -> None:
    for key in table:
        if key not in names:
            raise InputError(unknown(kind, key, names))


def _axis(table: Table, key: str) -> list[object]:
    if key not in table:
        raise InputError(_missing(key))
    value = table[key]
    values = value if isinstance(value, list) else [value]
    if not values:
        raise InputError(f"{key} is an empty list")
    return values


def _missing(key: str) -> str:
    examples = {"recipe": '"digits"', "trials": "[1, 2, 3]", "technique": '["lr-rewinding"]', "retrain-epochs": "[16]"}
    return f"the key {key} is missing; give it, for example {key} = {examples[key]}"


def _text(table: Table, key: str) -> str:
    if not isinstance(value := table.get(key), str):
        raise InputError(_missing(key) if value is None else f"{key} must be a text, not {value!r}")
    return value


def _table(table: Table, key: str) -> Table:
    if not isinstance(value := table.get(key, {}), Mapping):
        raise InputError(f"{key} must be a table, not {value!r}")
    return value


def _number(name: str, value: object) -> float:
    if not math.isfinite(found := as_number(name, value)):
        raise InputError(f"{name} must be a finite number, not {value}")
    return found


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name} must be whole numbers, not {value!r}")
    return value
