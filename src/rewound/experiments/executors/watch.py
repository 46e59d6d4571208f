"""How far a plan is, seen in the store alone: whoever does the work, each looks here."""

from typing import NamedTuple

from rewound.experiments.plans.planning import Plan
from rewound.experiments.plans.remaining import answers, steps_to_do, to_recompute, todo
from rewound.states.storage.store import Store


class Headway(NamedTuple):
    """How far a plan is, in steps and in nodes."""

    steps: float
    nodes: int
    failed: int


class Watch:
    """What of a plan is done, as the store has it; `status` says of each node that ended whether it succeeded."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self.plan, self.store = plan, store
        self.open = todo(plan, store)
        # A leaf is not done again for its tensors: one that has a result was published since `todo` looked.
        self.again = {node.key for node in to_recompute(self.open, store) if node.key in plan.readers}
        self.unfinished = {node.key for node in self.open}
        drafts = store.drafts()
        self.drafted = {n.key: n.steps - steps_to_do(n, store) for n in self.open if n.key in drafts}
        self.status: dict[str, bool] = {}

    def look(self) -> None:
        finished = self.store.finished()
        for node in reversed(self.plan.nodes):  # children come first: nobody awaits what was done again for them
            if (key := node.key) in self.status or key not in finished:
                continue
            if key in self.again and self._is_awaited(key) and not self.store.has_state(key, to_train=True):
                continue
            result = self.store.result(key)
            if result is not None and answers(node, result):
                self.status[key] = "failed" not in result
                self.unfinished.discard(key)
        for node in self.plan.nodes:  # parents come first, so failure spreads in one pass
            if node.key not in self.status and any(self.status.get(key) is False for key in node.needs):
                self.status[node.key] = False
                self.unfinished.discard(node.key)

    def _is_awaited(self, key: str) -> bool:
        """Whether a node that is to be done, again or for the first time, reads these tensors."""
        return not self.unfinished.isdisjoint(self.plan.readers[key])

    def headway(self) -> Headway:
        self.look()
        done = sum(self.plan.by_key[key].steps for key in self.status)
        claimed = {key: claim.steps for key, claim in self.store.claims().items()}
        begun = (claimed.keys() | self.drafted.keys()) & (self.plan.by_key.keys() - self.status.keys())
        # Before its first heartbeat a claim says nothing of the draft that it goes on from.
        under_way = sum(max(claimed.get(key, 0), self.drafted.get(key, 0)) for key in begun)
        return Headway(done + under_way, len(self.status), list(self.status.values()).count(False))
