"""From what was asked for and what was measured to the rows of results.csv, layers.csv and curves.csv.

`SweepResults` is what `rewound.run` and `rewound.results` return: the rows of a sweep, as far as it has run.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rewound.conclusions.tables import COLUMNS, CurveRow, LayerRow, Row, Tables, ordered
from rewound.experiments.plans import planning
from rewound.experiments.plans.execution import epoch_steps
from rewound.experiments.sweeps.sweep import Sweep
from rewound.experiments.sweeps.targets import Target
from rewound.foundations.collector import collector_paused
from rewound.foundations.errors import InputError
from rewound.foundations.metric import ACCURACY
from rewound.foundations.names import optional
from rewound.foundations.notebook import html_line, html_table, text_table
from rewound.foundations.quantities import counted
from rewound.states.history import Past, Pruned, Trained
from rewound.states.storage.artifacts import CurvePoint, Measurements, Summary
from rewound.states.storage.backend import Location
from rewound.states.storage.store import Say, Store, is_store

if TYPE_CHECKING:
    import pandas


_SHOWN = 20  # rows of a table that are shown, of how many there may be


class Results(Protocol):
    """Where results are: a store, or what was read of one."""

    def result(self, key: str) -> Measurements | None:
        """What was measured at `key`, or None."""

    def results(self, keys: Collection[str]) -> Iterator[tuple[str, Measurements]]:
        """What was measured at these keys, in any order."""


@collector_paused()
def collected(targets: tuple[Target, ...], store: Results, plan: planning.Plan | None = None) -> Tables:
    """The tables of these targets, as far as the store knows them; `plan` is theirs, if it has been made."""
    reader = _Reader(store)
    rows, layers, curves, made = list[Row](), list[LayerRow](), list[CurveRow](), dict[str, Counter[str]]()
    missing, seen, lost = 0, set[str](), _lost(plan or planning.plan(targets), reader)
    for target in targets:
        end = target.state
        result = reader.result(end.key)
        failed = end.key in lost or (result is not None and is_no_number(result))
        if not failed and (result is None or "val" not in result):
            missing += 1
            continue
        rows.append(_row(target, None if failed else result, reader))
        if result is None or end.key in seen:
            continue
        seen.add(end.key)
        for name, value in result["made"].items():
            made.setdefault(name, Counter())[value] += 1
        if not failed:
            layers += [
                LayerRow(end.key, name, each["kept"], each["total"], each["flops"])
                for name, each in result["layers"].items()
            ]
            curves.extend(reader.way(target, end.key).curve(end.key, end.steps, result["val"]))
    return Tables(rows, layers, curves, missing, made)


def is_no_number(result: Summary) -> bool:
    """Whether the metric was evaluated and is not finite; later in the run it may be finite again."""
    return not all(map(math.isfinite, (result.get("val", 0.0), result.get("test", 0.0))))


def has_failed(result: Summary) -> bool:
    """Whether the run failed, or its metric is no number."""
    return "failed" in result or is_no_number(result)


def _lost(plan: planning.Plan, reader: "_Reader") -> set[str]:
    """The keys of the nodes that failed, and of those that build on them."""
    results = reader.read(plan.by_key.keys())
    return plan.lost([key for key, result in results.items() if "failed" in result], results)


class _Reader:
    """Results of the store, each read once."""

    def __init__(self, store: Results) -> None:
        self.store = store
        self.known: dict[str, Measurements | None] = {}
        self.ways: dict[str, _Way] = {}
        self.spent: dict[str, tuple[float, float]] = {}

    def result(self, key: str) -> Measurements | None:
        if key not in self.known:
            self.known[key] = self.store.result(key)
        return self.known[key]

    def read(self, keys: Collection[str]) -> dict[str, Measurements]:
        """Those of many keys, which are read together."""
        found = dict(self.store.results(keys))
        self.known |= dict.fromkeys(keys) | found
        return found

    def way(self, target: Target, key: str) -> "_Way":
        """What is known of the nodes under one mask that lead to `key`."""
        if key in self.ways:
            return self.ways[key]
        missing, following, every = dict[str, Measurements](), key, epoch_steps(target.recipe)
        while following not in self.ways and following not in missing and (result := self.result(following)):
            missing[following] = result
            if (before := result["after"]) is None:
                break
            following = before
        way = self.ways.get(following, _Way())
        for node, result in reversed(missing.items()):  # each node once, however many runs go through it
            way = self.ways[node] = way.then(result, every)
        return way

    def spent_on(self, target: Target) -> tuple[float, float]:
        """The seconds of a target's levels, and how many of them training waited for data.

        A dense run has its own; to what is pruned they are no cost.
        """
        past: Past = target.state
        if not past.prunings:
            return (way := self.way(target, past.key)).seconds, way.waited
        levels = list[Trained]()
        while isinstance(past, Trained) and isinstance(root := past.root, Pruned) and past.key not in self.spent:
            levels.append(past)
            past = root.source
        seconds, waited = self.spent.get(past.key, (0.0, 0.0))
        for level in reversed(levels):  # each level once, however many levels follow it
            way = self.way(target, level.key)
            seconds, waited = seconds + way.seconds, waited + way.waited
            self.spent[level.key] = seconds, waited
        return seconds, waited


class _Way(NamedTuple):
    """How long a run took up to some node, and its curve: the ends of epochs, each with the mean loss since the last.

    A curve depends on its run alone: where another run has cut it, the loss noted there is part of the next mean.
    Losses are summed in float64, so a mean has the same seven digits however its steps were divided.
    """

    seconds: float = 0.0
    points: tuple[CurvePoint, ...] = ()
    steps: int = 0
    """Steps since the last point."""
    losses: float = 0.0
    """The sum of the losses of these steps."""
    lr: float = 0.0
    waited: float = 0.0

    def then(self, result: Measurements, every: int) -> "_Way":
        """The way on through the node that has this result."""
        _, points, steps, losses, lr, waited = self
        noted = result["curve"]
        begins = [noted[-1].step - result["steps"], *(point.step for point in noted)] if noted else []
        for begin, (step, lr, loss) in zip(begins, noted, strict=False):
            steps, losses = steps + step - begin, losses + (step - begin) * loss
            if step % every == 0 and steps:
                points, steps, losses = (*points, CurvePoint(step, lr, _mean(losses, steps))), 0, 0.0
        return _Way(self.seconds + result["seconds"], points, steps, losses, lr, waited + result.get("waited", 0.0))

    def curve(self, key: str, end: int, val: float) -> Iterator[CurveRow]:
        """The rows of a run that ends here; its validation value stands in the last."""
        last = CurvePoint(end, self.lr, _mean(self.losses, self.steps)) if self.steps else None
        for point in (*self.points, *([last] if last else [])):
            yield CurveRow(key, *point, val if point.step == end else None)


def _mean(losses: float, steps: int) -> float:
    return float(f"{losses / steps:.7g}")


def _row(target: Target, result: Measurements | None, reader: _Reader) -> Row:
    metric, root = target.recipe.metric, target.state.root
    by_units = isinstance(root, Pruned) and root.pruner.by_units
    seconds, waited = reader.spent_on(target)
    others = result.get("others", {}) if result else {}
    return Row(
        recipe=target.task,
        pruning=target.pruning,
        iterative=target.iterative,
        technique=target.technique,
        density=measured_density(target, result) if result else target.density,
        retrain_epochs=target.retrain_epochs,
        trial=target.trial,
        val=result["val"] if result else None,
        test=result["test"] if result else None,
        flops=result["flops"] if result else None,
        search_epochs=target.search_epochs,
        seconds=round(seconds, 3),
        key=target.state.key,
        metric=metric.name,
        unit=metric.unit,
        direction=metric.direction,
        asked_density=target.density if by_units else None,
        parameters=parameters_left(result) if result else None,
        others=" ".join(f"{name}={value:.10g}" for name, value in others.items()),
        waited=round(waited, 3) or None,
    )


def parameters_left(result: Measurements) -> int | None:
    """How many parameters the network of a result has; None where an early version has not counted them."""
    if "parameters_left" in result or "parameters" not in result:
        return result.get("parameters_left")
    return result["parameters"] - sum(layer["total"] - layer["kept"] for layer in result["layers"].values())


def measured_density(target: Target, result: Measurements) -> float:
    """The fraction of the prunable weights that is left; where it is exactly what was asked for, that.

    Units differ in size, so that removing whole ones meets a density only nearly. A preset's is the paper's own count.
    """
    root = target.state.root
    if not isinstance(root, Pruned) or not root.pruner.by_units:
        return target.density
    names = root.pruner.counted(result["layers"], target.recipe.skeleton)
    layers = [result["layers"][name] for name in names]
    return sum(layer["kept"] for layer in layers) / sum(layer["total"] for layer in layers)


def not_run(sweep: Sweep, root: Location, again: str) -> InputError:
    """The error for a sweep of which nothing is in the store."""
    return InputError(f"nothing of {sweep.name} has run yet in {root}; run it with: {again}")


@dataclass(frozen=True, repr=False)
class SweepResults:
    """The rows of a sweep, as far as it has run: its dense networks, and every retrained one."""

    sweep: Sweep
    store: Location
    again: str
    """The command, or the call, that runs what is missing."""
    plan: planning.Plan = field(compare=False)
    """The work that makes the rows."""
    say: Say = field(default=print, compare=False)
    """Takes a line where a file in the store is damaged."""
    _folder: Path = field(default_factory=Path.cwd, init=False, compare=False)
    """From which the store's path counts, wherever the script goes before it looks."""

    @cached_property
    def tables(self) -> Tables:
        """The rows, with what is known of layers and curves, as `report` writes them.

        They are read from the store when somebody first looks at them: a hundred thousand rows take a while.
        """
        place = self._folder / self.store if isinstance(self.store, Path) else self.store
        if not is_store(place):
            raise not_run(self.sweep, self.store, self.again)
        return collected(self.sweep.targets, Store(place, self.say), self.plan)

    @cached_property
    def rows(self) -> list[Row]:
        """One for each network that has been measured, or has failed, in the order of `results.csv`."""
        return ordered(self.tables.rows)

    @property
    def missing(self) -> int:
        """How many rows have not run yet."""
        return self.tables.missing

    @property
    def failed(self) -> list[Row]:
        """The rows whose run diverged, or builds on one that did: they have no values."""
        return [row for row in self.rows if row.test is None]

    def to_pandas(self) -> "pandas.DataFrame":
        """The rows as a data frame, with the columns of `results.csv`; needs pandas."""
        library = optional("pandas", "to_pandas needs pandas, which is not installed; pip install pandas")
        frame: pandas.DataFrame = library.DataFrame([vars(row) for row in self.rows], columns=list(COLUMNS))
        return frame

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __repr__(self) -> str:
        return f"SweepResults({self.sweep.name}: {self._counts()})"

    def __str__(self) -> str:
        lines = [f"results of {self.sweep.name}: {self._counts()}"]
        return "\n".join([*lines, *([text_table(*self._shown())] if self.rows else []), *self._rest()])

    def _repr_html_(self) -> str:
        title = f"results of {self.sweep.name}: {self._counts()}"
        table = html_table(*self._shown(), title) if self.rows else html_line(title)
        return table + "".join(map(html_line, self._rest()))

    def _counts(self) -> str:
        failed = f", {len(self.failed):,} failed" if self.failed else ""
        missing = f", {self.missing:,} not run yet" if self.missing else ""
        return f"{counted(len(self.rows), 'row')}{failed}{missing}"

    def _rest(self) -> list[str]:
        """What the table does not show."""
        hidden = len(self.rows) - _SHOWN
        return [f"and {counted(hidden, 'more row')}; rows and to_pandas() have all"] if hidden > 0 else []

    def _shown(self) -> tuple[list[list[str]], list[str]]:
        """The rows for a person, with what is the same in all of them left out, and the names of the columns."""
        columns = {
            "recipe": [row.recipe for row in self.rows],
            "pruning": [row.pruning for row in self.rows],
            "levels": ["iterative" if row.iterative else "" if row.dense else "one-shot" for row in self.rows],
            "technique": [row.technique or "dense" for row in self.rows],
            "density": [f"{row.density:.4g}" for row in self.rows],
            "retrain epochs": ["" if row.retrain_epochs is None else f"{row.retrain_epochs:g}" for row in self.rows],
            "trial": [str(row.trial) for row in self.rows],
            "metric": [row.metric if row.measured_by == ACCURACY else row.measured_by.described() for row in self.rows],
            "val": [_value(row.val) for row in self.rows],
            "test": [_value(row.test) for row in self.rows],
        }
        same = {name for name in ("recipe", "pruning", "levels", "trial") if len(set(columns[name]) - {""}) < 2}
        if set(columns["metric"]) == {"accuracy"}:
            same.add("metric")
        shown = {name: texts for name, texts in columns.items() if name not in same}
        return [list(row) for row in zip(*shown.values(), strict=True)][:_SHOWN], list(shown)


def _value(value: float | None) -> str:
    return "failed" if value is None else f"{value:.4f}"
