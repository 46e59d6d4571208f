"""How a worker walks the plan: it takes the first node that is ready and unclaimed, and does it.

Any number of workers, started by one command or by several at once, share the work; no node is done twice.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rewound.experiments.executors.watch import Watch
from rewound.experiments.plans.execution import Paused, Worker, execute, made_by
from rewound.experiments.plans.planning import Node, Plan
from rewound.states.storage.store import Store
from rewound.tasks.fleets.fleet import Fleet
from rewound.tasks.recipe import Recipe

POLL = 0.1  # seconds between looks at what others do


def walk(plan: Plan, worker: Worker) -> None:
    """Take ready nodes until none is left; `Paused` when the worker's time is up."""
    watch = Watch(plan, worker.store)
    for opened in watch.open:
        made_by(opened, worker.options)  # looks at the sources now: they may be edited while their code runs
    watch.look()
    fleet: Fleet | None = None
    while len(watch.status) < len(plan.nodes):
        if time.monotonic() > worker.until:
            raise Paused
        if (node := _take(watch, worker.store, None)) is None:
            time.sleep(POLL)
        else:
            with _handing_out(node, watch, worker.store) as take:
                if fleet is None or fleet.recipe != node.recipe:
                    fleet = None  # first: a device has memory for the places of one recipe
                    fleet = Fleet(node.recipe, worker.device, plain=worker.options.plain)
                execute(take, plan, worker, fleet)
        worker.alive()
        watch.look()


@contextmanager
def _handing_out(first: Node, watch: Watch, store: Store) -> Iterator[Callable[[], Node | None]]:
    """Gives `first`, then whatever else of its recipe is ready, claimed as it is taken."""
    waiting = [first]
    try:
        yield lambda: waiting.pop() if waiting else _take(watch, store, first.recipe)
    finally:
        for node in waiting:  # the time was up, or the fleet could not be made
            store.release(node.key)


def _take(watch: Watch, store: Store, recipe: Recipe | None) -> Node | None:
    """Claim the first node that is open and ready."""
    watch.look()
    for node in watch.plan.nodes:
        if node.key in watch.status or recipe not in (None, node.recipe):
            continue
        if all(watch.status.get(key) for key in node.needs) and store.claim(node.key):
            try:
                watch.look()
            except BaseException:
                store.release(node.key)
                raise
            if node.key not in watch.status:
                return node
            store.release(node.key)  # somebody finished it just before the claim
    return None
