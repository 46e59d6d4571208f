"""How a worker walks the plan: it takes the first node that is ready and unclaimed, and does it.

Any number of workers, started by one command or by several at once, share the work; no node is done twice. A worker
knows of the others only what the store says. Looking at the store costs what has changed since the last look: a result
stays, so it is read once; and only a node that is ready can end, so the others are not looked for.
"""

import heapq
import random
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

from rewound.experiments.plans.execution import Worker, execute, fail_for_deaths
from rewound.experiments.plans.options import Paused
from rewound.experiments.plans.planning import Node, Plan
from rewound.experiments.plans.provenance import made_by
from rewound.experiments.plans.remaining import steps_to_do, sufficient_outcome, to_recompute, todo
from rewound.states.storage.artifacts import Outcome
from rewound.states.storage.store import Store
from rewound.tasks.fleets.fleet import Fleet
from rewound.tasks.recipe import Recipe

POLL = 0.1  # seconds between looks at what others do
_CROWD = 16  # nodes among which a worker chooses, once another was faster to claim one
_SHARE = 0.005  # of the time that a process may spend on listing everything


class Headway(NamedTuple):
    """How far a plan is, in steps and in nodes."""

    steps: float
    nodes: int
    failed: int


class Watch:
    """What of a plan is done, as the store has it; `status` says of each node that ended whether it succeeded.

    `outcomes` are those of the plan, if they have just been read.
    """

    def __init__(self, plan: Plan, store: Store, outcomes: Mapping[str, Outcome] | None = None) -> None:
        self.plan, self.store = plan, store
        outcomes = store.outcomes(plan.by_key.keys()) if outcomes is None else outcomes
        self.open = todo(plan, store, outcomes)
        # A leaf is not done again for its tensors: one that has a result was published since `todo` looked.
        self.again = {node.key for node in to_recompute(self.open, store) if node.key in plan.readers}
        drafts = store.drafts()
        self.drafted = {n.key: n.steps - steps_to_do(n, store) for n in self.open if n.key in drafts}
        self.status: dict[str, bool] = {}
        self._steps = self._failed = 0
        self._places = {node.key: place for place, node in enumerate(plan.nodes)}
        recipes = {recipe: number for number, recipe in enumerate(dict.fromkeys(node.recipe for node in plan.nodes))}
        self._recipes = [recipes[node.recipe] for node in plan.nodes]
        self._ready: list[list[int]] = [[] for _ in recipes]
        """For each recipe the places of the nodes that have not ended, and whose parents have; in order."""
        self._awaits = {node.key: len(node.needs) for node in plan.nodes}
        self._unfinished = {node.key for node in self.open}
        self._claimed: set[str] = set()
        self._listed, self._took = 0.0, 0.0  # when all was listed, and how long that took
        for place, node in enumerate(plan.nodes):
            if not node.needs:
                self._ready[self._recipes[place]].append(place)
        self._see(outcomes.keys())

    def look(self) -> None:
        """See whatever has ended, wherever it was done."""
        began = time.monotonic()
        self._see(self.store.finished())
        self._listed = time.monotonic()
        self._took = self._listed - began

    def _see(self, finished: Set[str]) -> None:
        """Note which of the nodes that have a result have ended."""
        new = finished & (self._places.keys() - self.status.keys())
        # Children first: nobody awaits what was done again for them.
        for key in sorted(new, key=lambda key: -self._places[key]):
            self.has_ended(self.plan.by_key[key])

    def has_ended(self, node: Node) -> bool:
        """Whether a node has ended, by its result alone."""
        key = node.key
        if key in self.status:
            return True
        if (outcome := sufficient_outcome(node, self.store)) is None:
            return False
        if key in self.again and not self.store.has_state(key, to_train=True):
            # They are not made yet, or another worker has dropped them because all that reads them has ended.
            for reader in self._unfinished.intersection(self.plan.readers[key]):
                self.has_ended(self.plan.by_key[reader])
            if self._is_awaited(key):
                return False
        self._settle(key, outcome != "failed")
        return True

    def free(self, recipe: Recipe | None, taken: Collection[str], most: int) -> list[Node]:
        """The first nodes that are ready to be done, as far as is known here, and not taken."""
        nodes = self.plan.nodes
        chosen = [ready for ready in self._ready if ready and recipe in (None, nodes[ready[0]].recipe)]
        places = (place for place in heapq.merge(*chosen) if nodes[place].key not in taken)
        return [nodes[place] for place in islice(places, most)]

    def _settle(self, key: str, succeeded: bool) -> None:
        """Note that a node has ended; what builds on one that failed fails with it."""
        waiting = [key]
        while waiting:
            key = waiting.pop()
            if key in self.status:
                continue
            self.status[key] = succeeded
            self._failed += not succeeded
            self._unfinished.discard(key)
            node, place = self.plan.by_key[key], self._places[key]
            self._steps += node.steps
            ready = self._ready[self._recipes[place]]
            if (at := bisect_left(ready, place)) < len(ready) and ready[at] == place:
                del ready[at]
            for reader in self.plan.readers.get(key, ()):
                if reader not in self._places or reader in self.status:
                    continue
                self._awaits[reader] -= 1
                if not succeeded:
                    waiting.append(reader)
                elif not self._awaits[reader]:
                    insort(self._ready[self._recipes[self._places[reader]]], self._places[reader])
            if succeeded:  # nobody awaits what would be done again for this one alone
                waiting += [need for need in node.needs if need in self.again and not self._is_awaited(need)]

    def _is_awaited(self, key: str) -> bool:
        """Whether a node that is to be done, again or for the first time, reads these tensors."""
        return not self._unfinished.isdisjoint(self.plan.readers[key])

    def headway(self, *, exact: bool = False) -> Headway:
        """How far the plan is; unless `exact`, nodes that others did in a moment may be counted a little later."""
        claimed = {key: claim.steps for key, claim in self.store.claims().items()}
        is_due = exact or time.monotonic() - self._listed > self._took / _SHARE
        if is_due and len(self.status) < len(self.plan.nodes):
            self.look()
        else:
            for key in (self._claimed - claimed.keys()) & self._places.keys():
                self.has_ended(self.plan.by_key[key])
        self._claimed = {*claimed}
        begun = ((claimed.keys() | self.drafted.keys()) & self._places.keys()) - self.status.keys()
        # Before its first heartbeat a claim says nothing of the draft that it goes on from.
        under_way = sum(max(claimed.get(key, 0), self.drafted.get(key, 0)) for key in begun)
        return Headway(self._steps + under_way, len(self.status), self._failed)


def walk(plan: Plan, worker: Worker) -> None:
    """Take ready nodes until none is left; `Paused` when the worker has to stop before."""
    watch = Watch(plan, worker.store)
    for opened in watch.open:
        made_by(opened, worker.options)  # looks at the sources now: they may be edited while their code runs
    fleet: Fleet | None = None
    while len(watch.status) < len(plan.nodes):
        if worker.stop.is_due():
            raise Paused
        if (node := _take(watch, worker, None)) is None:
            if len(watch.status) < len(plan.nodes):
                time.sleep(POLL)
        else:
            with _handing_out(node, watch, worker) as take:
                if fleet is None or fleet.recipe != node.recipe:
                    fleet = None  # first: a device has memory for the places of one recipe
                    fleet = Fleet(
                        node.recipe,
                        worker.device,
                        at_most=worker.options.fleet,
                        plain=worker.options.plain,
                        by=worker.train,
                    )
                execute(take, plan, worker, fleet)
        worker.alive()


@contextmanager
def _handing_out(first: Node, watch: Watch, worker: Worker) -> Iterator[Callable[[], Node | None]]:
    """Gives `first`, then whatever else of its recipe is ready, claimed as it is taken."""
    waiting = [first]
    is_alone = _is_last_chance(first, worker)
    try:
        yield lambda: waiting.pop() if waiting else None if is_alone else _take(watch, worker, first.recipe)
    finally:
        for node in waiting:  # the time was up, or the fleet could not be made
            worker.store.release(node.key)


def _is_last_chance(node: Node, worker: Worker) -> bool:
    """Whether the node fails if one more worker dies at it: it is then done alone, so that no other dies with it."""
    return worker.most_deaths is not None and worker.store.deaths(node.key) >= worker.most_deaths - 1


def _take(watch: Watch, worker: Worker, recipe: Recipe | None) -> Node | None:
    """Claim the first node that is ready and that nobody holds; one of the first, where other workers are faster.

    With a recipe, it is a node of that recipe, which is done together with others.
    """
    store = worker.store
    taken, is_crowded = {*store.claims()}, False
    while free := watch.free(recipe, taken, _CROWD if is_crowded else 1):
        node = random.choice(free)
        taken.add(node.key)
        if watch.has_ended(node):  # somebody has done it
            continue
        if recipe is not None and _is_last_chance(node, worker):
            continue
        if not store.claim(node.key):
            is_crowded = True
            continue
        try:
            if not watch.has_ended(node):
                if worker.most_deaths is None or store.deaths(node.key) < worker.most_deaths:
                    return node
                fail_for_deaths(node, worker)
                watch.has_ended(node)
        except BaseException:
            store.release(node.key)
            raise
        store.release(node.key)  # it has failed, or somebody finished it just before the claim
    return None
