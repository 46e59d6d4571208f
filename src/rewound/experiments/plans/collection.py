"""From what was asked for and what was measured to the rows of results.csv, layers.csv and curves.csv."""

import math
from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple, Protocol

from rewound.conclusions.tables import CurveRow, LayerRow, Row, Tables
from rewound.experiments.plans import planning
from rewound.experiments.plans.execution import epoch_steps
from rewound.experiments.sweeps.targets import Target
from rewound.foundations.collector import collector_paused
from rewound.states.history import Past, Pruned, Trained
from rewound.states.storage.artifacts import CurvePoint, Measurements, Summary


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
    """Whether the metric was evaluated and is no number; that of what continues the run may be one."""
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
    """Steps since the last point, and the sum of their losses."""
    losses: float = 0.0
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
    names = root.pruner.selected(result["layers"], target.recipe.skeleton)
    layers = [result["layers"][name] for name in names]
    return sum(layer["kept"] for layer in layers) / sum(layer["total"] for layer in layers)
