"""From what was asked for and what was measured to the rows of results.csv, layers.csv and curves.csv."""

import math

from rewound.history import Pruned, lineage
from rewound.plans import planning
from rewound.storage.records import Result
from rewound.storage.store import Store
from rewound.sweeps.targets import Target
from rewound.tables.folder import Tables
from rewound.tables.results import CurveRow, LayerRow, Row


def collected(targets: tuple[Target, ...], store: Store) -> Tables:
    """The tables of these targets, as far as the store knows them."""
    reader = _Reader(store)
    rows, layers, curves = list[Row](), list[LayerRow](), list[CurveRow]()
    missing, seen, lost = 0, set[str](), _lost(targets, reader)
    for target in targets:
        result = reader.result(target.state.key)
        failed = target.state.key in lost or not is_measured(result)
        if not failed and (result is None or "val" not in result):
            missing += 1
            continue
        rows.append(_row(target, None if failed else result, reader))
        if result is not None and not failed and target.state.key not in seen:
            seen.add(target.state.key)
            layers.extend(_layers(target.state.key, result))
            curves.extend(reader.curve(target.state.key))
    return Tables(rows, layers, curves, missing)


def is_measured(result: Result | None) -> bool:
    """Whether its metric, if it has been evaluated, is a number; what continues the run may still have one."""
    return result is None or all(map(math.isfinite, (result.get("val", 0.0), result.get("test", 0.0))))


def _lost(targets: tuple[Target, ...], reader: "_Reader") -> set[str]:
    """The keys of what failed, or builds on what did."""
    plan = planning.plan(targets)
    results = {node.key: result for node in plan.nodes if (result := reader.result(node.key)) is not None}
    return plan.lost([key for key, result in results.items() if "failed" in result], results)


class _Reader:
    """Results of the store, each read once."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.known: dict[str, Result | None] = {}

    def result(self, key: str) -> Result | None:
        if key not in self.known:
            self.known[key] = self.store.result(key)
        return self.known[key]

    def chain(self, key: str) -> list[Result]:
        """The results of the nodes under one mask that lead to `key`, first to last."""
        result = self.result(key)
        if result is None:
            return []
        return [*(self.chain(result["after"]) if result["after"] else []), result]

    def seconds(self, key: str) -> float:
        return sum(result["seconds"] for result in self.chain(key))

    def curve(self, key: str) -> list[CurveRow]:
        rows = []
        for result in self.chain(key):
            *before, last = result["curve"]
            rows += [CurveRow(key, *point) for point in before]
            rows.append(CurveRow(key, *last, result.get("val")))
        return rows


def _row(target: Target, result: Result | None, reader: _Reader) -> Row:
    retraining = [level for level in lineage(target.state) if isinstance(level.parent, Pruned)] or [target.state]
    return Row(
        recipe=target.task,
        pruning=target.pruning,
        iterative=target.iterative,
        technique=target.technique,
        density=target.density,
        retrain_epochs=target.retrain_epochs,
        trial=target.trial,
        val=result["val"] if result else None,
        test=result["test"] if result else None,
        flops=result["flops"] if result else None,
        search_epochs=target.search_epochs,
        seconds=round(sum(reader.seconds(level.key) for level in retraining), 3),
        key=target.state.key,
    )


def _layers(key: str, result: Result) -> list[LayerRow]:
    return [LayerRow(key, name, n["kept"], n["total"], n["flops"]) for name, n in result["layers"].items()]
