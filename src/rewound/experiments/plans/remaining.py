"""What of a plan is still to do, and which tensors that needs: the store says what is there, the plan who reads it."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rewound.experiments.plans.planning import Node, Plan
from rewound.states.storage.artifacts import Artifact, Outcome
from rewound.states.storage.backend import where_writable
from rewound.states.storage.packs import NewPack
from rewound.states.storage.store import Store


def sufficient_outcome(node: Node, store: Store) -> Outcome | None:
    """The outcome of a node, if it is sufficient; it is read once."""
    known = store.known.get(node.key)
    outcome = known if is_sufficient(node, known) else store.outcome(node.key)
    return outcome if is_sufficient(node, outcome) else None


def is_sufficient(node: Node, outcome: Outcome | None) -> bool:
    """Whether nothing more is asked of a node: one that another sweep only trained through may have to be measured."""
    return outcome is not None and (outcome != "passed" or not node.asked)


def todo(plan: Plan, store: Store, outcomes: Mapping[str, Outcome] | None = None) -> list[Node]:
    """What there is to do: nodes without a result, and those whose tensors such a node needs and the store dropped.

    What failed, and what builds on it, is not to be done. `outcomes` are those of the plan, if they are known.
    """
    outcomes, missing = store.outcomes(plan.by_key.keys()) if outcomes is None else outcomes, set[str]()
    done = {node.key for node in plan.nodes if is_sufficient(node, outcomes.get(node.key))}
    lost = plan.lost([key for key, outcome in outcomes.items() if outcome == "failed"], done)
    for node in reversed(plan.nodes):  # children before parents
        if node.key in lost:
            continue
        needed = not missing.isdisjoint(plan.readers.get(node.key, ()))
        if node.key not in done or (needed and not store.has_state(node.key, to_train=True)):
            missing.add(node.key)
    return [node for node in plan.nodes if node.key in missing]


def to_recompute(open_nodes: Iterable[Node], store: Store) -> list[Node]:
    """Among nodes to do, those that have a result: they are done again for their tensors alone."""
    return [node for node in open_nodes if sufficient_outcome(node, store)]


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
    """Whether the tensors are read by an unfinished node, or by one that is done again because its own are read."""
    waiting, seen = [key], {key}
    while waiting:
        for reader in reversed(plan.readers.get(waiting.pop(), ())):  # what is done last is most often still to do
            # A part of a plan keeps what the rest will read.
            if reader not in plan.by_key or sufficient_outcome(plan.by_key[reader], store) is None:
                return True
            if reader not in seen and not store.has_state(reader, to_train=True):
                seen.add(reader)
                waiting.append(reader)
    return False


def tidy(plan: Plan, store: Store, *, keep_all: bool = False) -> None:
    """Drop what nobody needs: drafts of finished or failed nodes, and tensors that no planned node reads any more."""
    with where_writable():
        store.sweep_up()
    drafts = store.drafts() & plan.by_key.keys()
    states = set[str]() if keep_all else store.states() & plan.by_key.keys() & plan.readers.keys()
    if not (drafts or states):
        return
    over = plan.by_key.keys() - {node.key for node in todo(plan, store)}
    with where_writable():
        for key in over & drafts:
            store.drop(key, draft=True)
        if _others_work(plan, store):
            return
        for key in states:
            if over.issuperset(plan.readers[key]):
                store.drop(key)


def pack_store(plan: Plan, store: Store, out: Path, split_bytes: int | None = None) -> list[Path]:
    """Write what is needed to continue `plan` elsewhere, in one file or several; returns them in order.

    Others may work on the plan meanwhile: what they finish while it is packed is added, until nothing is missing.
    """
    with NewPack(out, split_bytes) as pack:
        while missing := [path for path in _needed_elsewhere(plan, store) if path not in pack.paths]:
            for path in missing:
                pack.add(path, store.backend)
    return pack.files


def _needed_elsewhere(plan: Plan, store: Store) -> Iterator[str]:
    """The paths of what a plan is continued from: its results, the tensors that nodes to do will read, drafts."""
    open_nodes = {node.key for node in todo(plan, store)}
    for node in plan.nodes:
        read_later = not open_nodes.isdisjoint(plan.readers.get(node.key, ()))
        yield from (found.path for found in store.artifacts(node.key) if found.kind != "state" or read_later)
    yield from sorted(_continued(plan, store))


def _continued(plan: Plan, store: Store) -> set[str]:
    """The paths of results at which another plan has divided a run of this one; they have its time and curve so far."""
    found = dict[str, str]()
    for node in plan.nodes:
        result = store.result(node.key)
        # Not beyond a node of the plan, which has its own turn, or what was found before: each result is read once.
        while result is not None and (key := result["after"]) and key not in plan.by_key and key not in found:
            found[key] = Artifact("result", key).path
            result = store.result(key)
    return set(found.values())
