"""From the states asked for to the work that makes them: shared prefixes merged, parents first, cost known.

All states under one mask form a tree of learning-rate sequences. It is cut wherever a state is asked for, or where two
sequences part; each piece is a node, done once. Fine-tuning for 10 epochs is a piece of fine-tuning for 182, ten
reinitialization runs are one, and LR rewinding within the final rate is fine-tuning: nothing in here knows that, it
follows from the keys. Updates of the mask within a level (gradual pruning) belong to its sequence: a hundred of
them are one node.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rewound.experiments.sweeps.targets import Target
from rewound.foundations.collector import collector_paused
from rewound.method.pruner import Pruner
from rewound.method.schedule import Segment
from rewound.states.history import Pruned, Start, Trained, start_of
from rewound.tasks.recipe import Recipe


@dataclass(frozen=True)
class Node:
    """A chain of operations between two published states."""

    state: Trained
    """What it publishes."""
    after: Trained | None
    """The published state under the same mask that it continues; None: it starts at the pruning (or at W_0)."""
    steps: int
    """How many steps it trains."""
    needs: tuple[str, ...]
    """The keys of the published states it reads."""
    asked: bool
    """Whether a target asks for it (and it is evaluated), or it is only a branch point."""

    @property
    def key(self) -> str:
        return self.state.key

    @cached_property
    def recipe(self) -> Recipe:
        return start_of(self.state).recipe


@dataclass(frozen=True)
class Plan:
    """Nodes in an order in which parents come first and long chains begin early."""

    targets: tuple[Target, ...]
    nodes: tuple[Node, ...]
    readers: dict[str, tuple[str, ...]] = field(repr=False)
    """For each key, the nodes that read its tensors."""

    @cached_property
    def by_key(self) -> dict[str, Node]:
        """The nodes by the keys of what they publish."""
        return {node.key: node for node in self.nodes}

    def continued(self, node: Node) -> Iterator[Node]:
        """The nodes whose training passes through what a node publishes, without a pruning in between."""
        waiting = [node.key]
        while waiting:
            key = waiting.pop()
            later = [self.by_key[reader] for reader in self.readers.get(key, ()) if reader in self.by_key]
            further = [each for each in later if each.after is not None and each.after.key == key]
            yield from further
            waiting += [each.key for each in further]

    @property
    def steps(self) -> int:
        """The steps of all nodes."""
        return sum(node.steps for node in self.nodes)

    @cached_property
    def prunings(self) -> tuple[tuple[Recipe, Pruner], ...]:
        """The different recipes and ways to prune them among the targets."""
        roots = ((target.recipe, target.state.parent) for target in self.targets)
        # By identity first: few objects stand in very many rows, and to hash one takes as long as to plan a row.
        objects = {
            (id(recipe), id(root.pruner)): (recipe, root.pruner) for recipe, root in roots if isinstance(root, Pruned)
        }
        return tuple(dict.fromkeys(objects.values()))

    @property
    def naive_epochs(self) -> float:
        """Retraining epochs as if nothing were shared: every target by itself, with the levels before it once a run."""
        return sum(_own_epochs(target) for target in self.targets if target.state.prunings)

    def epochs(self, nodes: Iterable[Node] | None = None, *, dense: bool) -> float:
        """Epochs of the given nodes (default: all), of dense training or of retraining."""
        chosen = [n for n in (self.nodes if nodes is None else nodes) if isinstance(n.state.root, Start) is dense]
        return sum(self._until(n.state) - (self._until(n.after) if n.after else 0) for n in chosen)

    def _until(self, state: Trained) -> float:
        """Epochs since its level began."""
        # A target's own where it is one: its steps are rounded up, and what is shared would seem to cost more.
        return self._nominal.get(state.key, state.steps / start_of(state).recipe.steps_per_epoch)

    @cached_property
    def _nominal(self) -> dict[str, float]:
        return {target.state.key: _own_epochs(target) for target in self.targets}

    def lost(self, failed: Collection[str], finished: Collection[str]) -> set[str]:
        """The nodes that failed and, among the unfinished ones, all that build on them."""
        lost = set(failed)
        for node in self.nodes:  # parents come first, so failure spreads in one pass
            if node.key not in finished and not lost.isdisjoint(node.needs):
                lost.add(node.key)
        return lost


def _own_epochs(target: Target) -> float:
    """The epochs of the target's own level; its run's other rows account for those before it."""
    levels = target.state.prunings
    return target.search_epochs / levels if levels else target.recipe.training_epochs


@collector_paused()
def plan(targets: Sequence[Target]) -> Plan:
    """The work that makes the targets."""
    wanted = _with_ancestors(targets)
    asked = {target.state.key for target in targets}
    by_root: dict[str, list[Trained]] = defaultdict(list)
    for state in wanted.values():
        by_root[state.root.key].append(state)
    nodes = [node for states in by_root.values() for node in _cut(states, asked)]
    readers = _readers(nodes)
    return Plan(tuple(targets), tuple(_ordered(nodes, readers)), readers)


def _with_ancestors(targets: Sequence[Target]) -> dict[str, Trained]:
    wanted: dict[str, Trained] = {}
    waiting = [target.state for target in targets]
    while waiting:
        state = waiting.pop()
        if state.key in wanted:
            continue
        wanted[state.key] = state
        if isinstance(root := state.root, Pruned):
            waiting += [s for s in (root.weights, root.source) if isinstance(s, Trained)]
    return wanted


def _cut(states: list[Trained], asked: set[str]) -> list[Node]:
    """The nodes of all states under one root: the tree of their rates, cut where they end or part."""
    nodes: list[Node] = []
    path: list[Trained] = []  # the nodes from the root to the previous state
    # Sorted by runs, sequences with a common beginning are neighbours; where neighbours part is a branch point.
    for state in sorted(states, key=_course):
        common = _common(path[-1], state) if path else 0
        split: Trained | None = None
        while path and path[-1].steps > common:
            split = path.pop()
        if split is not None and common > (path[-1].steps if path else 0) and common < state.steps:
            branch = state.until(common)
            _insert(nodes, split, branch, path[-1] if path else None, asked)
            path.append(branch)
        nodes.append(_node(state, path[-1] if path else None, asked))
        path.append(state)
    return nodes


def _insert(nodes: list[Node], split: Trained, branch: Trained, before: Trained | None, asked: set[str]) -> None:
    """Cut the node that leads to `split` in two at `branch`."""
    index = next(i for i in range(len(nodes) - 1, -1, -1) if nodes[i].state is split)
    nodes[index] = _node(split, branch, asked)
    nodes.append(_node(branch, before, asked))


def _node(state: Trained, after: Trained | None, asked: set[str]) -> Node:
    parents: list[str] = [after.key] if after else []
    if not after and isinstance(root := state.root, Pruned):
        parents = [s.key for s in (root.weights, root.source) if isinstance(s, Trained)]
    steps = state.steps - (after.steps if after else 0)
    return Node(state, after, steps, tuple(dict.fromkeys(parents)), state.key in asked)


class _Update(Segment):
    """An update of the mask within a sequence of learning rates: takes no steps, and equals only itself."""


def _course(state: Trained) -> tuple[Segment, ...]:
    """The rates of a state since its level began, with the updates of its mask in between."""
    if state.root is state.parent:
        return state.rates.known
    first, *others = state.stages
    course = list(first.rates.known)
    for stage in others:
        course += [_Update(-1.0, int(stage.parent.key, 16)), *stage.rates.known]
    return tuple(course)


def _common(one: Trained, other: Trained) -> int:
    """How many steps two states under one root share."""
    steps = 0
    for first, second in zip(_course(one), _course(other), strict=False):
        if first.rate != second.rate:
            break
        steps += 0 if isinstance(first, _Update) else min(first.steps, second.steps)
        if first.steps != second.steps:
            break
    return steps


def _readers(nodes: Sequence[Node]) -> dict[str, tuple[str, ...]]:
    readers: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        for key in node.needs:
            readers[key].append(node.key)
    return {key: tuple(keys) for key, keys in readers.items()}


def _ordered(nodes: Sequence[Node], readers: Mapping[str, Sequence[str]]) -> list[Node]:
    """Longest remaining chain first: a parent's chain includes its children's, so parents come first too."""
    by_key = {node.key: node for node in nodes}
    tail: dict[str, int] = {}
    waiting = [node.key for node in nodes]
    while waiting:
        key = waiting[-1]
        missing = [reader for reader in readers.get(key, ()) if reader not in tail]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        tail[key] = by_key[key].steps + max((tail[reader] for reader in readers.get(key, ())), default=0)
    return sorted(nodes, key=lambda node: -tail[node.key])
