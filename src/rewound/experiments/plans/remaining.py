"""What of a plan is still to do, and which tensors that needs: the store says what is there, the plan who reads it."""

from collections.abc import Iterable

from rewound.experiments.plans.planning import Node, Plan
from rewound.states.storage.records import Result
from rewound.states.storage.refusals import where_writable
from rewound.states.storage.store import Store


def answers(node: Node, result: Result | None) -> bool:
    """Whether a result says all that is asked: another sweep may have passed the state without evaluating it."""
    return result is not None and ("val" in result or "failed" in result or not node.asked)


def todo(plan: Plan, store: Store) -> list[Node]:
    """What there is to do: nodes without a result, and those whose tensors such a node needs and the store dropped.

    What failed, and what builds on it, is not to be done.
    """
    finished, missing = store.finished(), set[str]()
    results = {node.key: store.result(node.key) for node in plan.nodes if node.key in finished}
    done = {node.key for node in plan.nodes if answers(node, results.get(node.key))}
    lost = plan.lost([key for key, result in results.items() if result and "failed" in result], done)
    for node in reversed(plan.nodes):  # children before parents
        if node.key in lost:
            continue
        needed = not missing.isdisjoint(plan.readers.get(node.key, ()))
        if node.key not in done or (needed and not store.has_state(node.key, to_train=True)):
            missing.add(node.key)
    return [node for node in plan.nodes if node.key in missing]


def to_recompute(open_nodes: Iterable[Node], store: Store) -> list[Node]:
    """Among nodes to do, those that have a result: they are done again for their tensors alone."""
    return [node for node in open_nodes if answers(node, store.result(node.key))]


def steps_to_do(node: Node, store: Store) -> int:
    """How many steps of an unfinished node are left, after those that its draft has done."""
    draft, begin = store.drafted(node.key), node.after.steps if node.after else 0
    return node.steps - max(0, draft.steps - begin) if draft else node.steps


def release(node: Node, plan: Plan, store: Store) -> None:
    """Drop the tensors that the node has read, unless a node that is still to be done reads them, too."""
    if _others_work(plan, store):
        return
    for key in node.needs:
        if not _is_needed(key, plan, store):
            store.drop(key)


def _others_work(plan: Plan, store: Store) -> bool:
    """Whether somebody is at a node of another plan, which may be about to read the same tensors."""
    return not store.claims().keys() <= plan.by_key.keys()


def _is_needed(key: str, plan: Plan, store: Store) -> bool:
    """Whether the tensors are read by a node without an answer, or by one that is done again since its own are."""
    waiting, seen = [key], {key}
    while waiting:
        for reader in reversed(plan.readers.get(waiting.pop(), ())):  # what is done last is most often still to do
            # A part of a plan keeps what the rest will read.
            if reader not in plan.by_key or not answers(plan.by_key[reader], store.result(reader)):
                return True
            if reader not in seen and not store.has_state(reader, to_train=True):
                seen.add(reader)
                waiting.append(reader)
    return False


def tidy(plan: Plan, store: Store, *, keep_all: bool = False) -> None:
    """Drop what nobody needs: drafts of what is finished or lost, tensors that nothing planned reads any more."""
    over = plan.by_key.keys() - {node.key for node in todo(plan, store)}
    with where_writable():
        store.sweep_up()
        for key in over:
            store.drop(key, draft=True)
        if keep_all or _others_work(plan, store):
            return
        for node in plan.nodes:
            if node.key in plan.readers and over.issuperset(plan.readers[node.key]):
                store.drop(node.key)
