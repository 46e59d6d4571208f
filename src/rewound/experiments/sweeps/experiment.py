"""One `[[experiment]]` of a sweep, as its table declares it: a list in it, or in a table inside it, is an axis."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of

from rewound.experiments.sweeps.declaration import Table
from rewound.experiments.sweeps.entries import as_finite, axis_in, check_keys, combinations, texts_in
from rewound.foundations.errors import InputError, as_whole
from rewound.method.algorithm import KEEP, check_densities, densities, density_meant
from rewound.method.pruning.pruner import Pruner

_LISTS = {field.name: 1 for field in fields_of(Pruner) if isinstance(field.default, tuple)}  # only and skip
_TWO_WAYS = "density = {density:.6g} (one-shot) or levels = {{ compression = {compression:.6g} }} (iterative)"


@dataclass(frozen=True)
class Experiment:
    """Every technique at every time, pruner and list of densities."""

    techniques: tuple[str, ...]
    retrain_epochs: tuple[float, ...]
    densities: tuple[tuple[float, ...], ...]
    """The densities of each run: one for a one-shot run, all levels for an iterative one."""
    iterative: bool
    pruners: tuple[Pruner, ...] = (Pruner(),)
    trials: tuple[int, ...] | None = None
    """Which of the sweep's trials; None: all of them."""


def experiment_in(table: Table, trials: tuple[int, ...]) -> Experiment:
    """The experiment that a table declares, in a sweep with these trials."""
    check_no_other_words(table, {"sparsity": "density = {density:.6g}", "compression": _TWO_WAYS})
    check_keys("key of [[experiment]]", table, ("technique", "retrain-epochs", "density", "levels", "pruner", "trials"))
    chosen = trials_in(table) if "trials" in table else None
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
        chains = [chain for value in axis_in(table, "levels") for chain in _chains(value)]
    for chain in chains:
        check_densities(chain)
    pruners = [pruner for value in axis_in(table, "pruner") for pruner in _pruners(value)] if "pruner" in table else []
    return Experiment(
        tuple(texts_in(table, "technique")),
        tuple(as_finite("retrain-epochs", value) for value in axis_in(table, "retrain-epochs")),
        tuple(chains),
        iterative=not one_shot,
        pruners=tuple(pruners or [Pruner()]),
        trials=chosen,
    )


def check_no_other_words(table: Table, remedies: Mapping[str, str]) -> None:
    """An error for a word that says how much is pruned and is not the one for its place, with what to write there."""
    for word, remedy in remedies.items():
        if word in table:
            density = density_meant(word, axis_in(table, word)[0])
            written = remedy.format(density=density, compression=1 / density)
            raise InputError(f"{word} is not a key here; for {100 * (1 - density):.6g}% sparsity write {written}")


def trials_in(table: Table) -> tuple[int, ...]:
    """The trials that a table lists."""
    if isinstance(number := table.get("trials"), int):
        raise InputError(f"trials is a list, not {number}: [{number}] is one trial, [1, 2, 3] are three")
    return tuple(as_whole("a trial", value) for value in axis_in(table, "trials"))


def _chains(value: object) -> Iterator[tuple[float, ...]]:
    """The densities of the runs that one table of `levels` stands for."""
    if not isinstance(value, Mapping):
        raise InputError(f"levels is a table such as {{ keep = 0.8, count = 10 }}, not {value!r}")
    check_no_other_words(value, dict.fromkeys(("sparsity", "density"), "compression = {compression:.6g}"))
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
    if count < 1:
        raise InputError(f"count must be at least 1, not {count}")
    return tuple(keep**i for i in range(1, count + 1))


def _pruners(value: object) -> Iterator[Pruner]:
    """The pruners that one table of `pruner` stands for."""
    if not isinstance(value, Mapping):
        raise InputError(f'pruner is a table such as {{ score = "magnitude" }}, not {value!r}')
    check_keys("key of pruner", value, [f.name for f in fields_of(Pruner)])
    return map(_pruner, combinations(value, _LISTS))


def _pruner(table: Table) -> Pruner:
    words = {key: tuple(given) if isinstance(given, list) else given for key, given in table.items()}
    for key, given in words.items():
        default = getattr(Pruner, key)
        if isinstance(default, tuple) and isinstance(given, str):
            raise InputError(f'{key} of pruner is a list; write {key} = ["{given}"]')
        if not isinstance(given, int | float if key == "floor" else type(default)):
            raise InputError(f"{key} of pruner must be like {default!r}, not {given!r}")
    return Pruner(**words)  # type: ignore[arg-type]  # each checked against its default just above
