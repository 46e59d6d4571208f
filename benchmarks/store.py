"""What the store costs per node beside the training, in a store with 200 and with 20,000 finished nodes.

A worker walks a plan in which so many nodes have ended and 200 are to be done, as `rewound run --jobs 1` does: it looks
for a node, claims it, publishes a result and gives the claim up; nothing is trained. Goal: at most 7 ms per node, and
with 20,000 finished nodes at most 1.3 times as much as with 200.

    python benchmarks/store.py             # two minutes
    python benchmarks/store.py 200 5500    # other numbers of finished nodes
    python benchmarks/store.py --store s3://bucket/empty-prefix    # in a bucket; goal: 150 ms
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple
from unittest.mock import patch

import rewound.experiments.executors.walking
from global_pruning import machine
from rewound.experiments.executors import local
from rewound.experiments.plans.execution import Options, Worker
from rewound.experiments.plans.planning import Node, Plan, plan
from rewound.experiments.plans.remaining import release
from rewound.experiments.sweeps.targets import dense, run_of
from rewound.states.storage.artifacts import Artifact, CurvePoint, LayerCount, Result, encoded
from rewound.states.storage.backend import as_place
from rewound.states.storage.store import Store
from rewound.tasks.recipe import Recipe
from rewound.tasks.recipes.digits import Digits

TO_DO, REPEATS = 200, 5
RECIPE = Digits(epochs=1.0, widths=(4, 8))


class Measured(NamedTuple):
    """What a walk took."""

    start: float
    """Seconds until the first node had ended."""
    per_node: float
    """Milliseconds for each of the others."""


def result_of(node: Node) -> Result:
    """A result of the usual size: a curve of 20 epochs, 20 layers."""
    return Result(
        recipe="digits",
        history=[f"train -> {node.key[:12]}"],
        after=None,
        steps=10,
        seconds=1.0,
        curve=[CurvePoint(step, 0.1, 1.0) for step in range(1, 21)],
        made={"torch": "2"},
        val=0.5,
        test=0.5,
        flops=1,
        layers={f"layer{number}": LayerCount(kept=1, total=2, flops=3) for number in range(20)},
    )


class NoFleet:
    """Stands for a fleet, which is not asked for anything."""

    def __init__(self, recipe: Recipe, *given: object, **named: object) -> None:
        self.recipe = recipe


def measured(work: Plan, store: Store) -> Measured:
    """Walk the plan without training."""
    ends = list[float]()

    def execute(take: Callable[[], Node | None], plan: Plan, worker: Worker, fleet: object) -> None:
        while (node := take()) is not None:
            assert worker.store.holds(node.key)
            worker.store.publish(node.key, result_of(node))
            worker.store.drop(node.key, draft=True)
            release(node, plan, worker.store)
            worker.store.release(node.key)
            worker.alive()
            ends.append(time.perf_counter())

    walking = rewound.experiments.executors.walking
    with patch.object(walking, "execute", execute), patch.object(walking, "Fleet", NoFleet):
        began = time.perf_counter()
        local.run(work, store, Options(), say=lambda text: None)
    return Measured(ends[0] - began, 1e3 * (ends[-1] - ends[0]) / (len(ends) - 1))


def walks(finished: int, given: str | None) -> list[Measured]:
    """Several walks in one store, each of which leaves it as it was."""
    trials = range(1, (finished + TO_DO) // 2 + 1)
    pruned = [run_of(RECIPE, "lr-rewinding", 0.5, [0.5], iterative=False).targets(trial) for trial in trials]
    targets = [target for trial in trials for target in (dense(RECIPE, trial), *pruned[trial - 1])]
    work = plan(tuple(targets))
    left = {target.state.key for target in targets[-TO_DO:]}
    with tempfile.TemporaryDirectory() as folder:
        store = Store(as_place("--store", f"{given}/{finished}" if given else Path(folder, "store")))
        for node in work.nodes:
            if node.key not in left:
                path = Artifact("result", node.key).path
                store.backend.write(path, encoded(node.key, result_of(node)), durable=False)
        found = []
        for _ in range(REPEATS):
            found.append(measured(work, store))
            for key in left:
                store.forget(key)
    return found


def main() -> None:
    """Print what a node costs in a small store and in a large one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("finished", nargs="*", type=int, default=[200, 20_000])
    parser.add_argument("--store", help="a folder or bucket with nothing in it")
    asked = parser.parse_args()
    print(machine())
    typical = list[float]()
    for finished in asked.finished:
        found = walks(finished, asked.store)
        times = sorted(walk.per_node for walk in found)
        typical.append(median(times))
        print(
            f"{finished:,} nodes finished, {TO_DO} to do: {typical[-1]:.2f} ms per node ({times[0]:.2f} to "
            f"{times[-1]:.2f}, {REPEATS} walks); the first after {median(walk.start for walk in found):.2f} s"
        )
    goal = "150 ms" if asked.store else "7 ms"
    print(f"the last of them takes {typical[-1] / typical[0]:.2f} times the first (goal: at most 1.3, and {goal})")


if __name__ == "__main__":
    main()
