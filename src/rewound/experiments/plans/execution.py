"""Doing nodes: read the parents, prune or train, evaluate, publish.

A worker hands nodes of one recipe to a fleet, which advances as many together as the device has room for. A node that
was interrupted continues from its draft; law 1 makes the result the same.
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from rewound.experiments.plans.options import Options, Paused, Stop
from rewound.experiments.plans.planning import Node, Plan
from rewound.experiments.plans.provenance import another, made_by
from rewound.experiments.plans.realisation import (
    Network,
    Realised,
    check_same_data,
    network_of,
    other_data,
    pruned,
    rates,
    realised,
    recomputing,
    stored_state,
)
from rewound.experiments.plans.remaining import is_sufficient, release, sufficient_outcome
from rewound.foundations.errors import Diverged, Failed, InputError, few
from rewound.foundations.owners import host_name, this_host
from rewound.foundations.quantities import spoken
from rewound.method.pruner import Pruner
from rewound.method.pruning.counts import counts_of
from rewound.method.pruning.mask import Mask
from rewound.method.schedule import sliced
from rewound.states.history import Pruned, described
from rewound.states.storage.artifacts import CurvePoint, Failure, LayerCount, Notes, Result, failure_in_words
from rewound.states.storage.claims import HEARTBEAT
from rewound.states.storage.store import Say, Store
from rewound.tasks.devices import device_named
from rewound.tasks.fleets.fleet import Fleet
from rewound.tasks.fleets.place import Run
from rewound.tasks.recipe import Recipe, Scores
from rewound.tasks.training import State, Training, train, untrained_weights

SNAPSHOT = 60.0
"""Seconds between drafts of an unfinished node."""
LOOK = 5.0
"""Seconds after which a run is looked at in the middle of an epoch; at the end of an epoch it always is."""
_NEGLIGIBLE = 0.02  # the share of its time that a run may wait for data before a line says so
_FIRST_LINE, _NEXT_LINE = 30.0, 600.0  # seconds after which a line may say that a run waits


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Where and how nodes are done, and by whom."""

    store: Store
    options: Options
    say: Say
    alive: Callable[[], None]
    """Called now and then; raises when the work should stop."""
    stop: Stop
    train: Training = train
    """What trains a network: this process, or several together."""
    most_deaths: int | None = None
    """How many workers in a row may die at a node before it counts as failed; None: any number."""

    @property
    def device(self) -> torch.device:
        return device_named(self.options.device)


def execute(take: Callable[[], Node | None], plan: Plan, worker: Worker, fleet: Fleet) -> None:
    """Do the nodes that `take` hands out, claimed and ready, until it has no more and all of them are done."""
    jobs: dict[int, Job] = {}
    drafted: set[int] = set()
    looked = time.perf_counter()

    def fill() -> None:
        while fleet.free > 0 and not worker.stop.is_due() and (node := take()) is not None:
            try:
                job = Job(node, plan, worker)
                jobs[fleet.start(job.run)] = job
            except BaseException:
                worker.store.release(node.key)  # or it would block this process's next call for ever
                raise

    try:
        fill()
        for member, outcome, ended in fleet.events():
            job, now = jobs[member], time.perf_counter()
            for each in jobs.values():
                each.seconds += (now - looked) / len(jobs)  # runs that share a device share its time
            if ended and not isinstance(outcome, Diverged) and not _is_finite(outcome, fleet.recipe):
                outcome = Diverged(outcome.position.steps, math.nan)  # as its next loss would be
            if isinstance(outcome, Diverged):
                job.fail(outcome)
            else:
                job.look_at(outcome)
                if ended and (run := job.next_run(outcome)) is not None:
                    fleet.follow(member, run)
                    ended = False
                elif ended:
                    job.publish(outcome, fleet.evaluate(member) if job.node.asked else None)
                elif worker.stop.is_due() and member not in drafted:
                    job.keep_draft(outcome)
                    drafted.add(member)
            looked = time.perf_counter()  # evaluation is nobody's training time
            if ended:
                worker.store.release(jobs.pop(member).node.key)
                fill()
            if worker.stop.is_due() and jobs.keys() <= drafted | fleet.waiting:
                raise Paused
            worker.alive()
    finally:
        for job in jobs.values():
            with suppress(InputError):  # where the store does not answer, a claim ends when it is stale
                worker.store.release(job.node.key)


class Job:
    """One node on its way: where it starts, what was seen of it, what it publishes."""

    def __init__(self, node: Node, plan: Plan, worker: Worker) -> None:
        self.node, self.plan, self.worker = node, plan, worker
        self.beaten = self.saved = self.looked = time.perf_counter()
        self.begin = node.after.steps if node.after else 0
        self.after = node.after.key if node.after else None
        self.curve, self.seconds, self.waited = list[CurvePoint](), 0.0, 0.0
        self.waits = _Waits()
        self.is_lost = False
        self.is_again = is_sufficient(node, worker.store.known.get(node.key))  # for its tensors alone
        recipe = node.recipe
        # From here on every weight that trains has done so; pruned networks come from dense ones that were checked.
        self.trains_by = math.inf if node.state.prunings else min(recipe.steps_per_epoch, recipe.schedule.steps)
        check_same_data(node.state, worker.store, f"compute {node.key[:12]} again")
        for later in plan.continued(node):  # published by another plan, which did not stop here
            check_same_data(later.state, worker.store, f"compute {node.key[:12]} on the way to {later.key[:12]}")
        if self.is_again:  # said here, not when a run begins: another may drop the tensors meanwhile
            worker.say(recomputing(node.key))
        state, self.mask, facts = self._start()
        self.rates = rates(node.state, facts, *self._source)
        run = self.next_run(state)
        assert run is not None  # a node has at least one step to do
        self.run = run

    @property
    def _source(self) -> tuple[Store, torch.device, Say]:
        """What functions of `realisation` need: where tensors are kept and computed, and what takes lines."""
        return self.worker.store, self.worker.device, self.worker.say

    def _start(self) -> Realised:
        """Where training goes on: at the draft, or at what the node reads."""
        node, worker = self.node, self.worker
        draft = stored_state(node.state, worker.store, draft=True)
        others = other_data(node.recipe, draft.notes.get("made", {})) if draft is not None else []
        # A sweep that has grown may have cut the run anew: what is published is then further than the draft.
        if draft is not None and not others and draft.state.position.steps > self.begin:
            self._take_over(draft.notes)
            return Realised(draft.state, draft.mask)
        if node.after:
            check_same_data(node.after, worker.store, f"go on from {node.after.key[:12]}")
        if others:
            made = ", ".join(map(another, others))
            worker.say(f"note: {node.key[:12]} begins anew, as its draft was made with {made}")
        return realised(node.after or node.state.root, *self._source)

    def next_run(self, state: State) -> Run | None:
        """What to train next, from where training is; None: nothing, the node has ended.

        Where the mask is updated, one run ends and the next begins.
        """
        done = state.position.steps
        stage = next((stage for stage in self.node.state.stages if stage.steps > done), None)
        if stage is None:
            return None
        if isinstance(update := stage.parent, Pruned) and update.runs_on and update.steps == done:
            state, self.mask, _ = pruned(update, Realised(state.clone(), self.mask), *self._source)
        ends, self.network = _epoch_ends(self.node.recipe, done, stage.steps), network_of(self.node.state, self.mask)
        recipe, mask = self.network
        return Run(state, mask, sliced(self.rates, done, stage.steps), ends, self.is_due, recipe)

    def _take_over(self, notes: Notes) -> None:
        """Go on with what a draft has noted, from where it began: another plan may have cut the run elsewhere."""
        if "begin" in notes:
            self.begin, self.after = notes["begin"], notes.get("after")
        self.curve, self.seconds = [point for point in notes["curve"] if point.step > self.begin], notes["seconds"]
        self.waited = notes.get("waited", 0.0)
        self.waits.seconds, self.waits.waited = self.seconds, self.waited
        today, made = made_by(self.node, self.worker.options), notes.get("made", {})
        if differing := [name for name in made if today.get(name) != made[name]]:
            before = ", ".join(map(another, differing))
            self.worker.say(f"note: {self.node.key[:12]} goes on from a draft that was made with {before}")

    def is_due(self) -> bool:
        """Whether to look at the run now, in the middle of an epoch too: an epoch may take an hour."""
        return time.perf_counter() - self.looked > LOOK or self.worker.stop.is_due()

    def look_at(self, state: State) -> None:
        """Note where training is; now and then say so, and keep a draft."""
        store, key, now, step = self.worker.store, self.node.key, time.perf_counter(), state.position.steps
        self.looked = now
        self.waited += state.waited
        if line := self.waits.line(self.seconds, self.waited):
            self.worker.say(f"note: {key[:12]} {line}")
        self._note(CurvePoint(step, sliced(self.rates, step - 1, step)[0].rate, state.loss))
        if step >= self.trains_by:
            self._check_trains(state)
        if now - self.beaten > HEARTBEAT:
            if not store.beat(key, step - (self.node.after.steps if self.node.after else 0)) and not self.is_lost:
                self._lose()
            self.beaten = now
        if now - self.saved > SNAPSHOT and step < self.node.state.steps:
            self.keep_draft(state)

    def _note(self, point: CurvePoint) -> None:
        """Add a point to the curve; of an epoch that was looked at several times, one point is kept."""
        if self.curve and self.curve[-1].step % epoch_steps(self.node.recipe):
            last = self.curve.pop()
            begin = self.curve[-1].step if self.curve else self.begin
            losses = (last.step - begin) * last.loss + (point.step - last.step) * point.loss
            point = point._replace(loss=losses / (point.step - begin))
        self.curve.append(point)

    def _check_trains(self, state: State) -> None:
        """Law 11, once in a dense node: an error for weights that are not trained and would be pruned."""
        recipe, self.trains_by = self.node.recipe, math.inf
        pruners = [pruner for pruned, pruner in self.plan.prunings if pruned == recipe] or [Pruner()]
        untrained = untrained_weights(recipe, state, self.worker.device)
        selected = {name for pruner in pruners for name in pruner.selected(untrained, recipe.skeleton)}
        if missed := [name for name in untrained if name in selected]:
            raise InputError(
                f"recipe {recipe.label()} does not train {few(missed)}: in {state.position.steps:,} steps no gradient "
                "has arrived there, or the optimizer does not have it, so it must not be pruned; leave it out of the "
                "recipe's prunable(), or name it in the pruner's skip"
            )

    def keep_draft(self, state: State) -> None:
        """Keep where training is, to be resumed from."""
        notes = Notes(
            curve=self.curve,
            seconds=self.seconds,
            begin=self.begin,
            after=self.after,
            made=made_by(self.node, self.worker.options),
        )
        if self.waited:
            notes["waited"] = self.waited
        if self._is_owner():
            self.worker.store.save(self.node.key, state, self.mask, draft=notes, is_wanted=self._is_owner)
            self.worker.store.forget_deaths(self.node.key)
        self.saved = time.perf_counter()

    def _is_owner(self) -> bool:
        """Law 10: whether the node is still this worker's; one that was taken for dead keeps and publishes nothing."""
        if not self.is_lost and not self.worker.store.holds(self.node.key):
            self._lose()
        return not self.is_lost

    def _lose(self) -> None:
        self.is_lost = True
        self._say_unused("was taken over by another process, as this one gave no sign of life")

    def _say_unused(self, why: str = "was published by another process meanwhile") -> None:
        self.worker.say(f"note: {self.node.key[:12]} {why}; what this one did there is not used")

    def publish(self, state: State, scores: Scores | None) -> None:
        """Keep what was measured, and the tensors if a planned node needs them."""
        node, store, keeps_all = self.node, self.worker.store, self.worker.options.keep_all
        result = self._result()
        if scores is not None:
            result["val"], result["test"] = scores
            if scores.others:
                result["others"] = dict(scores.others)
            _count(result, node.recipe, self.mask, self.network)
        if (read := node.key in self.plan.readers) or keeps_all:
            store.save(node.key, state, self.mask, slots=read, for_good=keeps_all, is_wanted=self._is_owner)
        if not self._is_owner():
            return
        if sufficient_outcome(node, store) is None:
            if not store.publish(node.key, result):
                self._say_unused()
                return
        elif not self.is_again:
            self._say_unused()
        store.drop(node.key, draft=True)
        if not keeps_all:
            release(node, self.plan, store)

    def fail(self, failure: Diverged) -> None:
        """Keep that it diverged, and where."""
        if not self._is_owner():
            return
        result = self._result()
        result["failed"] = Failure(step=failure.step, loss=str(failure.loss))
        if not _published_failure(self.node, self.worker, result, self.is_again):
            self._say_unused()

    def _result(self) -> Result:
        result = _begun_result(self.node, self.worker, self.begin, self.after, self.seconds, self.curve)
        if self.waited:
            result["waited"] = self.waited
        return result


class _Waits:
    """When to say that a run waits for data: soon, and then every ten minutes in which it did."""

    def __init__(self) -> None:
        self.next, self.seconds, self.waited = _FIRST_LINE, 0.0, 0.0

    def line(self, seconds: float, waited: float) -> str:
        """A line after so many seconds of training, of which it waited so many; mostly none."""
        took = seconds - self.seconds
        if took < self.next:
            return ""
        share = (waited - self.waited) / took
        self.next, self.seconds, self.waited = _NEXT_LINE, seconds, waited
        return f"waited for data in {share:.0%} of the last {spoken(took)}" if share > _NEGLIGIBLE else ""


def fail_for_deaths(node: Node, worker: Worker) -> None:
    """Publish that a node, claimed here, has failed: `most_deaths` workers in a row have died at it."""
    begin, after = (node.after.steps, node.after.key) if node.after else (0, None)
    result = _begun_result(node, worker, begin, after, 0.0, [])
    result["failed"] = Failure(step=begin, loss=str(math.nan), deaths=worker.store.deaths(node.key))
    _published_failure(node, worker, result, is_again=is_sufficient(node, worker.store.known.get(node.key)))


def _begun_result(
    node: Node, worker: Worker, begin: int, after: str | None, seconds: float, curve: list[CurvePoint]
) -> Result:
    """What is kept of a node whether it succeeds or fails."""
    return {
        "recipe": node.recipe.label(),
        "history": described(node.state),
        "after": after,
        "steps": node.state.steps - begin,
        "seconds": seconds,
        "curve": curve,
        "made": made_by(node, worker.options),
        "host": host_name(this_host()),
    }


def _published_failure(node: Node, worker: Worker, result: Result, is_again: bool) -> bool:
    """Publish how a node has failed, and say so; False: another process has published it."""
    store, outcome = worker.store, worker.store.outcome(node.key)
    if is_again and outcome == "measured":  # which stays; and without its tensors nothing can go on from it
        why = failure_in_words(result["failed"])
        raise Failed(
            f"{node.key[:12]} was measured before, and fails now that it is computed again for its tensors ({why}); "
            f"run what builds on it where it was made (rewound show {node.key[:12]})"
        )
    # Else what has no measurement would be tried for ever.
    if not store.publish(node.key, result, replace=is_again or outcome == "passed"):
        return False
    store.drop(node.key, draft=True)
    worker.say(failed_line(node.key, result["failed"]))
    return True


def failed_line(key: str, failure: Failure) -> str:
    """The line that is printed when a node has failed."""
    return f"failed: {key[:12]}: {failure_in_words(failure)}; what builds on it is skipped"


def _is_finite(state: State, recipe: Recipe) -> bool:
    """Whether all parameters are numbers; a buffer may be infinite, as a causal mask is."""
    return all(bool(state.model[name].isfinite().all()) for name, _ in recipe.skeleton.named_parameters())


def epoch_steps(recipe: Recipe) -> int:
    """The steps of an epoch as a whole number: a curve has a point after each multiple of it since the last pruning."""
    return max(1, round(recipe.steps_per_epoch))


def _epoch_ends(recipe: Recipe, start: int, end: int) -> list[int]:
    """Where training is interrupted for a look: the ends of epochs, in steps from `start`."""
    per_epoch = epoch_steps(recipe)
    return [step - start for step in range((start // per_epoch + 1) * per_epoch, end, per_epoch)]


def _count(result: Result, recipe: Recipe, mask: Mask | None, network: Network) -> None:
    """Add FLOPs and kept counts, in all and by layer: of what is trained, and of what the large network has of it."""
    profile, counts = network.recipe.profile, counts_of(recipe.skeleton, mask or Mask({}))
    result["flops"], flops = profile.total(network.mask), profile.layers(network.mask)
    result["parameters"], result["parameters_left"] = counts.network, counts.left
    result["layers"] = {}
    for name, shape in recipe.shapes.items():
        total = torch.Size(shape).numel()
        kept = int(mask[name].count_nonzero()) if mask is not None and name in mask else total
        result["layers"][name] = LayerCount(kept=kept, total=total, flops=flops.get(name, 0))
