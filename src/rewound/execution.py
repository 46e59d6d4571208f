"""Doing one node: read its parents, prune or train, evaluate, publish.

`realised` turns a history into tensors: from the store where they are, by recomputing where they are not (with a line
that says so). A node that was interrupted continues from its draft; law 1 makes the result the same.
"""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from rewound.errors import Diverged, InputError
from rewound.history import Pruned, Ruled, Start, Trained, described, start_of
from rewound.history import State as Past
from rewound.mask import Mask
from rewound.planning import Node, Plan
from rewound.randomness import fold
from rewound.recipe import Recipe
from rewound.schedule import Segment, sliced
from rewound.store import HEARTBEAT, Failure, LayerCount, Point, Result, Store
from rewound.technique import Facts
from rewound.training import State, begin, evaluate, train

SNAPSHOT = 60.0
"""Seconds between drafts of an unfinished node."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Worker:
    """What executing a node needs to know beside the node."""

    store: Store
    device: torch.device
    keep_all: bool = False
    say: Say = print
    alive: Callable[[], None] = lambda: None
    """Called now and then; raises when the work should stop."""


class _Clock:
    """Seconds spent on a node, over all its interruptions."""

    def __init__(self) -> None:
        self.before = 0.0
        self.started = time.perf_counter()

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.started


def execute(node: Node, plan: Plan, worker: Worker) -> None:
    """Make the state of `node` and publish what was measured; a run that diverges is published as failed."""
    store, clock = worker.store, _Clock()
    try:
        state, mask, curve = _trained(node.state, node.after, worker, clock)
    except Diverged as failure:
        result = _record(node, worker, [], clock.seconds)
        store.publish(node.key, {**result, "failed": Failure(step=failure.step, loss=str(failure.loss))})
        worker.say(f"failed: {node.key[:12]}: {failure}; what builds on it is skipped")
        return
    result = _record(node, worker, curve, clock.seconds)
    if node.asked:
        _measure(result, node.recipe, state, mask, worker.device)
        result["seconds"] = clock.seconds
    readers = plan.readers.get(node.key, ())
    if readers or worker.keep_all:
        store.save(node.key, state, mask, slots=bool(readers))
    store.publish(node.key, result)
    store.drop(node.key, draft=True)
    if not worker.keep_all:
        release(node, plan, store)


def release(node: Node, plan: Plan, store: Store) -> None:
    """Drop the tensors that only finished nodes have read."""
    for key in node.needs:
        if all(store.result(reader) is not None for reader in plan.readers[key]):
            store.drop(key)


def tidy(plan: Plan, store: Store) -> None:
    """Drop what a killed run left behind: drafts of finished nodes, tensors that nothing planned needs."""
    finished = store.finished()
    for node in plan.nodes:
        if node.key in finished:
            store.drop(node.key, draft=True)
        if node.key in plan.readers and finished.issuperset(plan.readers[node.key]):
            store.drop(node.key)


def realised(past: Past | Pruned, worker: Worker) -> tuple[State, Mask | None]:
    """The tensors of a history: from the store, else made again."""
    if isinstance(past, Start):
        return begin(past.recipe, past.seed, fresh=past.fresh), None
    if isinstance(past, Pruned):
        return _pruned(past, worker)[:2]
    stored = worker.store.load(past.key)
    if stored is not None:
        return stored[0], stored[1]
    worker.say(f"recomputing {past.key[:12]}: its tensors are no longer in the store")
    state, mask, _ = _trained(past, None, worker, _Clock())
    worker.store.save(past.key, state, mask)
    return state, mask


def _pruned(past: Pruned, worker: Worker) -> tuple[State, Mask, Facts]:
    """W (.) m: the mask pruned from one state, on the weights of another."""
    recipe = start_of(past).recipe
    source, before = realised(past.source, worker)
    weights = {name: source.model[name] for name in recipe.shapes}
    seed = fold(source.seed, past.salt) if past.salt else source.seed
    mask = past.pruner.prune(weights, past.density, before, seed=fold(seed, past.prunings))
    state = source if past.weights.key == past.source.key else realised(past.weights, worker)[0]
    return state.pruned(mask, past.prunings, seed), mask, _facts(weights, before, mask)


def _facts(weights: dict[str, torch.Tensor], before: Mask | None, mask: Mask) -> Facts:
    whole = sum(float(w.double().square().sum()) for w in weights.values())
    left = sum(
        float((w * mask[n]).double().square().sum()) if n in mask else float(w.double().square().sum())
        for n, w in weights.items()
    )
    alive = before.kept if before is not None else mask.total
    return Facts((max(0.0, whole - left) / whole) ** 0.5 if whole else 0.0, (alive - mask.kept) / mask.total)


def _trained(
    past: Trained, after: Trained | None, worker: Worker, clock: _Clock
) -> tuple[State, Mask | None, list[Point]]:
    """The state of `past`, continued from its draft, from `after`, or from where its mask was made."""
    store, recipe = worker.store, start_of(past).recipe
    curve: list[Point] = []
    draft = store.load(past.key, draft=True)
    if draft is not None:
        state, mask, notes = draft
        curve, clock.before = notes["curve"], notes["seconds"]
    else:
        state, mask = realised(after or past.parent, worker)
    rates = _rates(past, worker)
    first, last = after.steps if after else 0, past.steps
    done = state.position.steps
    saved = beaten = time.perf_counter()
    stops = _epoch_ends(recipe, done, last)
    progress = train(recipe, state, mask, lr=sliced(rates, done), stops=stops, device=worker.device)
    for state in progress:
        step, now = state.position.steps, time.perf_counter()
        curve.append(Point(step, sliced(rates, step - 1, step)[0].rate, state.loss))
        if now - beaten > HEARTBEAT:
            worker.alive()
            store.beat(past.key, step - first)
            beaten = now
        if now - saved > SNAPSHOT and step < last:
            store.save(past.key, state, mask, draft={"curve": curve, "seconds": clock.seconds})
            saved = now
    return state, mask, curve


def _rates(past: Trained, worker: Worker) -> Sequence[Segment]:
    if not isinstance(past.rates, Ruled):
        return past.rates
    assert isinstance(past.parent, Pruned)
    return past.rates.realised(_pruned(past.parent, worker)[2])


def _epoch_ends(recipe: Recipe, start: int, end: int) -> list[int]:
    """Where to look up from training: the ends of epochs, in steps from `start`."""
    per_epoch = max(1, round(recipe.steps_per_epoch))
    return [step - start for step in range((start // per_epoch + 1) * per_epoch, end, per_epoch)]


def _measure(result: Result, recipe: Recipe, state: State, mask: Mask | None, device: torch.device) -> None:
    """Add accuracy, FLOPs and kept counts, in all and by layer."""
    result["val"], result["test"] = evaluate(recipe, state, device)
    result["flops"] = recipe.profile.total(mask)
    flops = recipe.profile.layers(mask)
    result["layers"] = {}
    for name, shape in recipe.shapes.items():
        total = torch.Size(shape).numel()
        kept = int(mask[name].count_nonzero()) if mask is not None and name in mask else total
        result["layers"][name] = LayerCount(kept=kept, total=total, flops=flops.get(name, 0))


def _record(node: Node, worker: Worker, curve: list[Point], seconds: float) -> Result:
    return {
        "recipe": node.recipe.label(),
        "history": described(node.state),
        "after": node.after.key if node.after else None,
        "steps": node.steps,
        "seconds": seconds,
        "curve": curve,
        "made": made_by(node.recipe, worker.device),
    }


def made_by(recipe: Recipe, device: torch.device) -> dict[str, str]:
    """What a result depends on beside its address; told when a stored one differs from today's."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "source": recipe.source_digest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": kind,
    }


@cache
def device_named(name: str) -> torch.device:
    """The device of that name, if it is there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"unknown device {name!r}; use cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {name!r} is not there: torch {torch.__version__} sees no CUDA GPU; use --device cpu")
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name!r} is not supported; use cpu or cuda")
    return device
