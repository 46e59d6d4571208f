"""Thousands of retraining times under one mask, and thousands of levels: no work depends on the depth of the stack."""

from collections.abc import Collection, Iterator
from typing import cast

import pytest
import torch

from rewound.experiments.plans import realisation
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.planning import Node, Plan, plan
from rewound.experiments.plans.realisation import Realised, realised
from rewound.experiments.plans.remaining import pack_store, release
from rewound.states.history import Pruned, Start
from rewound.states.storage.artifacts import CurvePoint, Outcome, Result, outcome_of
from rewound.states.storage.store import Store
from stored import RESULT, a_state
from tiny import Tiny
from tiny_sweeps import sweep_of

MANY = 1_500
TIMES = {
    "technique": "fine-tuning",
    "retrain-epochs": [n / Tiny().steps_per_epoch for n in range(1, MANY + 1)],
    "density": 0.5,
}


def result_of(node: Node) -> Result:
    result, after = RESULT.copy(), node.after
    result["after"], result["steps"] = after.key if after else None, node.steps
    result["curve"], result["seconds"] = [CurvePoint(node.state.steps, 0.1, 1.0)], 1.0
    return result


class Finished:
    """Stands for a store in which a whole plan has run and no tensors were kept, without the thousands of files."""

    def __init__(self, work: Plan) -> None:
        self.found, self.dropped = {node.key: result_of(node) for node in work.nodes}, list[str]()
        self.known = dict[str, Outcome]()

    def result(self, key: str) -> Result | None:
        return self.found.get(key)

    def results(self, keys: Collection[str]) -> Iterator[tuple[str, Result]]:
        return ((key, self.found[key]) for key in keys if key in self.found)

    def outcome(self, key: str) -> Outcome | None:
        return outcome_of(self.found[key]) if key in self.found else None

    def has_state(self, key: str, *, to_train: bool) -> bool:
        return False

    def claims(self) -> dict[str, object]:
        return {}

    def drop(self, key: str) -> None:
        self.dropped.append(key)


def test_a_report_on_thousands_of_retraining_times() -> None:
    targets = sweep_of(TIMES).targets
    work = plan(targets)
    tables = collected(targets, cast(Store, Finished(work)))
    assert len(tables.rows) == len(work.nodes) == 1 + MANY
    longest = tables.rows[-1]
    assert longest.seconds == MANY, "each of the nodes that lead to it took a second"
    steps = [point.step for point in tables.curves if point.key == longest.key]
    assert steps == [*range(9, MANY, 9), MANY], "the ends of epochs, and its own"


def test_what_thousands_of_finished_nodes_have_read_is_dropped() -> None:
    work = plan(sweep_of(TIMES).targets)
    store = Finished(work)
    second = next(node for node in work.nodes if node.after is None and node.state.prunings)
    release(second, work, cast(Store, store))
    assert store.dropped == [work.nodes[0].key]


def test_a_pack_reads_each_result_of_a_long_chain_a_few_times(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    work = plan(sweep_of(TIMES | {"retrain-epochs": cast(list[float], TIMES["retrain-epochs"])[:100]}).targets)
    for node in work.nodes:
        store.publish(node.key, result_of(node))
    read, times = Store.result, list[str]()

    def counted(self: Store, key: str) -> Result | None:
        times.append(key)
        return read(self, key)

    monkeypatch.setattr(Store, "result", counted)
    pack_store(work, store, store.root.with_name("pack"))
    assert len(times) <= 5 * len(work.nodes)


def test_thousands_of_levels_are_made_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `states` was emptied: the walk alone, without the training."""
    levels = {"technique": "lr-rewinding", "retrain-epochs": 2, "levels": {"keep": 0.9985, "count": MANY}}
    last, made = sweep_of(levels).targets[-1].state, list[str]()

    def remembered(past: Pruned, before: Realised, *_: object) -> Realised:
        made.append(past.key)
        return before

    monkeypatch.setattr(realisation, "begin", lambda recipe, seed, *, fresh: a_state())
    monkeypatch.setattr(realisation, "_trained", remembered)
    monkeypatch.setattr(realisation, "pruned", remembered)
    realised(last, store, torch.device("cpu"), print)
    assert len(made) == 1 + 2 * MANY, "the dense run, then a pruning and a training for each level"
    assert made[-1] == last.key
    assert isinstance(last.parent, Pruned)
    assert not isinstance(last.parent.source, Start)
