"""What is known about a plan before it runs: what it would cost, and whether stored results were made otherwise."""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from statistics import median
from typing import NamedTuple

from rewound.experiments.plans.execution import made_by
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import Node, Plan
from rewound.experiments.plans.remaining import steps_to_do, to_recompute, todo
from rewound.foundations.errors import few
from rewound.foundations.quantities import counted, sized, spoken
from rewound.method.pruning.counts import Counts
from rewound.method.pruning.pruner import Pruner
from rewound.states.history import Pruned
from rewound.states.storage.records import Result
from rewound.states.storage.store import Store
from rewound.tasks.devices import device_kind
from rewound.tasks.recipe import Recipe, changed_fields, selected_counts


def estimate(plan: Plan, store: Store | None, device: str, jobs: int) -> Iterator[tuple[str, str]]:
    """What a plan would cost, line by line."""
    left = todo(plan, store) if store else list(plan.nodes)
    again = to_recompute(left, store) if store else []
    yield "rows (networks to measure)", f"{len(plan.targets):,}"
    for counts, label in parts_pruned(plan).items():
        yield f"weights that may be pruned{label}", f"{counts.selected:,} of {counts.network:,} parameters"
    yield (
        "nodes (pieces of training)",
        f"{len(plan.nodes):,} ({len(plan.nodes) - len(left):,} done, {len(left):,} to do)",
    )
    yield "dense epochs", f"{plan.epochs(dense=True):,.0f}"
    yield "retraining epochs, naive", f"{plan.naive_epochs:,.0f}"
    yield "retraining epochs, shared", f"{plan.epochs(dense=False):,.0f}"
    drafted = sum((node.steps - steps_to_do(node, store)) / node.recipe.steps_per_epoch for node in left if store)
    more = f" (and {drafted:,.0f} done, in drafts)" if drafted else ""
    yield "epochs to do", f"{_epochs(plan, left) - drafted:,.0f}{more}"
    if again:
        yield "of them to recompute", f"{_epochs(plan, again):,.0f}, since their tensors were dropped"
    yield "time to do", _time(plan, left, store, device, jobs)
    kept = [node for node in left if plan.readers.get(node.key)]
    size = sum(_bytes(node.recipe) for node in kept)
    yield "tensors kept while needed", f"at most {sized(size)} ({counted(len(kept), 'state')})"


def parts_pruned(plan: Plan) -> dict[Counts, str]:
    """What compression counts, of how much; with a label for each recipe and way of pruning where there are several."""
    labels: dict[Counts, dict[str, None]] = {}
    for target in plan.targets:
        if isinstance(pruned := target.state.parent, Pruned):
            words = " ".join([target.recipe.label(), *changed_fields(target.recipe), *pruned.pruner.words.values()])
            labels.setdefault(_selected(target.recipe, pruned.pruner), {})[words] = None
    return {counts: "" if len(labels) == 1 else f" ({few(list(words))})" for counts, words in labels.items()}


@lru_cache(maxsize=4096)
def _selected(recipe: Recipe, pruner: Pruner) -> Counts:
    return selected_counts(recipe, pruner)


def _epochs(plan: Plan, nodes: list[Node]) -> float:
    return plan.epochs(nodes, dense=True) + plan.epochs(nodes, dense=False)


def _time(plan: Plan, left: list[Node], store: Store | None, device: str, jobs: int) -> str:
    if not left:
        return "nothing"
    seconds, sources = 0.0, list[str]()
    for task in dict.fromkeys(type(node.recipe) for node in left):
        mine = [node for node in left if type(node.recipe) is task]
        keys = [node.key for node in plan.nodes if type(node.recipe) is task]
        pace = _pace(mine[0].recipe, [result for key in keys if store and (result := store.result(key))], device)
        if pace is None:
            return f"unknown: {task.label()} has not run on {device} yet"
        seconds += pace.per_step * sum(steps_to_do(node, store) if store else node.steps for node in mine)
        sources.append(pace.source)
    return f"about {spoken(seconds / jobs)} with {counted(jobs, 'job')} ({', '.join(dict.fromkeys(sources))})"


class _Pace(NamedTuple):
    """Seconds of one step, and where they are known from."""

    per_step: float
    source: str


def _pace(recipe: Recipe, results: list[Result], device: str) -> _Pace | None:
    kind = device_kind(device)
    measured = [
        result["seconds"] / result["steps"]
        for result in results
        if result["steps"] and result["seconds"] and (result["made"].get("device") == "cpu") == (kind == "cpu")
    ]
    if measured:
        return _Pace(median(measured), f"from what has run on {device} in this store")
    if kind in recipe.epoch_seconds:
        return _Pace(recipe.epoch_seconds[kind] / recipe.steps_per_epoch, f"typical for {recipe.label()} on {device}")
    return None


def _bytes(recipe: Recipe) -> int:
    parameters = sum(p.numel() * p.element_size() for p in recipe.skeleton.parameters())
    return 2 * parameters + parameters // 32  # weights, one slot each, a bit of mask per weight


def outdated(plan: Plan, store: Store, options: Options) -> list[str]:
    """What a run that goes on with stored results and states should say of them before it does."""
    return [*_made_otherwise(plan, store, options), *_unbound(plan, store)]


def _unbound(plan: Plan, store: Store) -> list[str]:
    count = sum(len(store.unbound(node.key)) for node in plan.nodes)
    return [unbound_note(count)] if count else []


def unbound_note(count: int) -> str:
    """What is said of tensors that only the names of their files bind to their keys."""
    return (
        f"note: {counted(count, 'state')} (or drafts) were kept by a version that did not write keys into them; "
        "they are used if seed, position and shapes are right"
    )


def _made_otherwise(plan: Plan, store: Store, options: Options) -> list[str]:
    """One line where stored results were made by another source, library, device or kind of CPU than today's."""
    differing: Counter[str] = Counter()
    for node in plan.nodes:
        if (result := store.result(node.key)) is not None:
            today, made = made_by(node, options), result["made"]
            differing.update(name for name in today if made.get(name, today[name]) != today[name])
    if not differing:
        return []
    said = ", ".join(f"{name} ({count} of them)" for name, count in differing.items())
    remedies = ["give another --store", *(["raise the recipe's version"] if "source" in differing else [])]
    remedies += [f"rename {name}" for name in differing if ":" in name]
    return [
        f"note: stored results were made with another {said}; they are used as they are, "
        f"to compute them anew {' or '.join(remedies)}"
    ]
