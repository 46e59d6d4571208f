"""What is known about a plan before it runs: what it would cost, and whether stored results were made otherwise."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import Node, Plan
from rewound.experiments.plans.provenance import another, made_by, sources_of
from rewound.experiments.plans.remaining import steps_to_do, to_recompute, todo
from rewound.foundations.errors import few
from rewound.foundations.notebook import html_table
from rewound.foundations.quantities import counted, sized, spoken
from rewound.method.pruning.counts import Counts
from rewound.states.history import own_functions
from rewound.states.storage.artifacts import Summary
from rewound.states.storage.store import Store
from rewound.tasks.devices import device_kind
from rewound.tasks.recipe import Recipe, changed_fields, selected_counts


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """What a run of a sweep would do, and what it would cost; printed, it is the table of `rewound plan`."""

    name: str
    rows: int
    """Networks to measure."""
    nodes: int
    """Pieces of training, each done once."""
    nodes_to_do: int
    dense_epochs: float
    naive_epochs: float
    """Epochs of retraining as if nothing were shared."""
    shared_epochs: float
    """Epochs of retraining where what is common to several rows is done once."""
    epochs_to_do: float
    seconds_to_do: float | None
    """None: unknown, since the recipe has not run on this device yet."""
    lines: tuple[tuple[str, str], ...] = field(repr=False)
    """All of it in words: what, and how much."""

    def __repr__(self) -> str:
        to_do = f"{self.nodes_to_do:,} of {self.nodes:,} nodes and {self.epochs_to_do:,.0f} epochs to do"
        time = "" if self.seconds_to_do is None else f", about {spoken(self.seconds_to_do)}"
        return f"SweepPlan({self.name}: {counted(self.rows, 'row')}, {to_do}{time})"

    def __str__(self) -> str:
        width = max(len(what) for what, _ in self.lines)
        return "\n".join([f"plan of {self.name}", *(f"{what:{width}}  {value}" for what, value in self.lines)])

    def _repr_html_(self) -> str:
        return html_table(self.lines, title=f"plan of {self.name}")


def estimate(name: str, plan: Plan, store: Store | None, device: str, jobs: int) -> SweepPlan:
    """What the plan of the sweep of that name would cost."""
    left = todo(plan, store) if store else list(plan.nodes)
    again = to_recompute(left, store) if store else []
    done = len(plan.nodes) - len(left)
    drafts = store.drafts() if store else set()
    steps = {node.key: steps_to_do(node, store) if store and node.key in drafts else node.steps for node in left}
    drafted = sum((node.steps - steps[node.key]) / node.recipe.steps_per_epoch for node in left)
    epochs, time = _epochs(plan, left) - drafted, _time(plan, left, steps, store, device, jobs)
    dense, shared = plan.epochs(dense=True), plan.epochs(dense=False)
    kept = [node for node in left if plan.readers.get(node.key)]
    size = sum(_bytes(node.recipe) for node in kept)
    in_drafts = f" (and {drafted:,.0f} done, in drafts)" if drafted else ""
    recomputed = f"{_epochs(plan, again):,.0f}, since their tensors were dropped"
    pruned = ((f"weights that may be pruned{label}", counts) for counts, label in parts_pruned(plan).items())
    lines = (
        ("rows (networks to measure)", f"{len(plan.targets):,}"),
        *((what, f"{counts.selected:,} of {counts.network:,} parameters") for what, counts in pruned),
        ("nodes (pieces of training)", f"{len(plan.nodes):,} ({done:,} done, {len(left):,} to do)"),
        ("dense epochs", _shown(dense)),
        ("retraining epochs, naive", _shown(plan.naive_epochs)),
        ("retraining epochs, shared", _shown(shared)),
        ("epochs to do", f"{_shown(epochs)}{in_drafts}"),
        *([("of them to recompute", recomputed)] if again else []),
        ("time to do", time.words),
        ("tensors kept while needed", f"at most {sized(size)} ({counted(len(kept), 'state')})"),
    )
    return SweepPlan(
        name=name,
        rows=len(plan.targets),
        nodes=len(plan.nodes),
        nodes_to_do=len(left),
        dense_epochs=dense,
        naive_epochs=plan.naive_epochs,
        shared_epochs=shared,
        epochs_to_do=epochs,
        seconds_to_do=time.seconds,
        lines=lines,
    )


def parts_pruned(plan: Plan) -> dict[Counts, str]:
    """What compression counts, of how much; with a label for each recipe and way of pruning where there are several."""
    labels: dict[Counts, dict[str, None]] = {}
    for recipe, pruner in plan.prunings:
        words = " ".join([recipe.label(), *changed_fields(recipe), *pruner.words.values()])
        labels.setdefault(selected_counts(recipe, pruner), {})[words] = None
    return {counts: "" if len(labels) == 1 else f" ({few(list(words))})" for counts, words in labels.items()}


def _epochs(plan: Plan, nodes: list[Node]) -> float:
    return plan.epochs(nodes, dense=True) + plan.epochs(nodes, dense=False)


class _Time(NamedTuple):
    """How long a plan takes, and the same in words."""

    seconds: float | None
    words: str


def _time(plan: Plan, left: list[Node], steps: dict[str, int], store: Store | None, device: str, jobs: int) -> _Time:
    if not left:
        return _Time(0.0, "nothing")
    seconds, sources = 0.0, list[str]()
    for task in dict.fromkeys(type(node.recipe) for node in left):
        open_nodes = [node for node in left if type(node.recipe) is task]
        keys = {node.key for node in plan.nodes if type(node.recipe) is task}
        results = [result for _, result in store.summaries(keys)] if store else []
        pace = _pace(open_nodes[0].recipe, results, device)
        if pace is None:
            return _Time(None, f"unknown: {task.label()} has not run on {device} yet")
        seconds += pace.per_step * sum(steps[node.key] for node in open_nodes)
        sources.append(pace.source)
    known_from = ", ".join(dict.fromkeys(sources))
    return _Time(seconds / jobs, f"about {spoken(seconds / jobs)} with {counted(jobs, 'job')} ({known_from})")


def seconds_left(steps: Iterable[tuple[Node, int]], results: Iterable[tuple[Node, Summary]]) -> float | None:
    """How long one worker takes for the steps that are left, on whatever devices the results were made.

    None: unknown, since nothing of some recipe has ended yet.
    """
    left, paces = Counter[type[Recipe]](), dict[type[Recipe], list[float]]()
    for node, count in steps:
        left[type(node.recipe)] += count
    for node, result in results:
        paces.setdefault(type(node.recipe), []).extend(_seconds_of_steps([result]))
    if any(count and not paces.get(task) for task, count in left.items()):
        return None
    return sum(count * median(paces[task]) for task, count in left.items() if count)


class _Pace(NamedTuple):
    """Seconds of one step, and where they are known from."""

    per_step: float
    source: str


def _pace(recipe: Recipe, results: list[Summary], device: str) -> _Pace | None:
    kind = device_kind(device)
    there = [result for result in results if (result["made"].get("device") == "cpu") == (kind == "cpu")]
    if measured := _seconds_of_steps(there):
        return _Pace(median(measured), f"from what has run on {device} in this store")
    if kind in recipe.epoch_seconds:
        return _Pace(recipe.epoch_seconds[kind] / recipe.steps_per_epoch, f"typical for {recipe.label()} on {device}")
    return None


def _seconds_of_steps(results: Iterable[Summary]) -> list[float]:
    return [each["seconds"] / each["steps"] for each in results if each["steps"] and each["seconds"]]


def _bytes(recipe: Recipe) -> int:
    parameters = sum(p.numel() * p.element_size() for p in recipe.skeleton.parameters())
    return 2 * parameters + parameters // 32  # weights, one slot each, a bit of mask per weight


def outdated(plan: Plan, store: Store, options: Options | None) -> list[str]:
    """The lines that a run says before it goes on with stored results and states.

    Without options it is not known which libraries and device the work is done with, as when another machine does it.
    """
    return [*_made_otherwise(plan, store, options), *_unbound(plan, store)]


def _unbound(plan: Plan, store: Store) -> list[str]:
    held = (store.states() | store.drafts()) & plan.by_key.keys()
    count = sum(len(store.unbound(key)) for key in held)
    return [unbound_note(count)] if count else []


def unbound_note(count: int) -> str:
    """The line about tensors whose files do not hold their keys: only the names of the files say what they are."""
    return (
        f"note: {counted(count, 'state')} (or drafts) were kept by a version that did not write keys into them; "
        "they are used if seed, position and shapes are right"
    )


def _shown(epochs: float) -> str:
    """Epochs with a digit after the point, where halves were asked for; steps are whole, so that 16 may be 16.05.

    >>> _shown(2.5), _shown(40.5), _shown(16.05), _shown(3217.8)
    ('2.5', '40.5', '16', '3,218')
    """
    return f"{epochs:,.1f}" if epochs < 1000 and 0.25 < epochs % 1 < 0.75 else f"{epochs:,.0f}"


def _made_otherwise(plan: Plan, store: Store, options: Options | None) -> list[str]:
    """One line where stored results were made by another source, library, device or kind of CPU than today's."""
    differing: Counter[str] = Counter()
    found: dict[tuple[object, ...], dict[str, str]] = {}  # what nodes of the same code are made with today
    for key, result in store.summaries(plan.by_key.keys()):
        node, made = plan.by_key[key], result["made"]
        code = (node.recipe, *own_functions(node.state))
        if (today := found.get(code)) is None:
            today = found[code] = made_by(node, options) if options else sources_of(node)
        if made != today:
            differing.update(name for name in today if made.get(name, today[name]) != today[name])
    if not differing:
        return []
    counts = ", ".join(f"{another(name)} ({count} of them)" for name, count in differing.items())
    remedies = ["give another store", *(["raise the recipe's version"] if "source" in differing else [])]
    remedies += [f"rename {name}" for name in differing if ":" in name]
    return [
        f"note: stored results were made with {counts}; they are used as they are, "
        f"to compute them anew {' or '.join(remedies)}"
    ]
