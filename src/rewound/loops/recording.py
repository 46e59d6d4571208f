"""The learning rates of a training run, step by step, so that they can be used again from any epoch.

Whatever sets a learning rate (a scheduler, a warm-up, a line in the loop) leaves it in the optimizer's groups before
each step. A `Recording` keeps, for every group and every hyperparameter that moves (the rate; under OneCycle also
momentum or betas), its value at each step, by epoch and step in the epoch. Reading it from an earlier epoch is
rewinding the learning rate; beyond its end the last values hold: the paper's S[g > T] = S[T]. Where a loop counts
steps, "epoch" means here a part of the run (`course`).

A recording comes from one of four sources: the steps of a dense run (`hooks`); schedulers that are run through without
training (`rehearsed`), for a network that was trained elsewhere; a `Schedule` (`scheduled`); or a rule (`with_rule`),
which draws the rates of a level.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, pairwise, repeat
from typing import Any

from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import InputError
from rewound.loops.course import Course
from rewound.loops.optimizers import (
    Scheduler,
    Value,
    bare_scheduler,
    hyperparameters,
    members,
    rate_of,
    required_argument,
    scheduler_kind,
    steps_counted,
)
from rewound.loops.snapshot import Subjects
from rewound.method.algorithm import check_final
from rewound.method.schedule import Piece, Schedule, Segment, merged, sliced
from rewound.method.technique import Facts, Rule, drawn_by

Runs = list[tuple[Value, int]]  # (value, for so many steps)


class Recording:
    """The hyperparameters of every step of a training run: `groups[i][name][epoch]` are runs of equal values."""

    def __init__(
        self, groups: Sequence[Mapping[str, Sequence[Runs]]] = (), epochs: int = 0, declared_final: float | None = None
    ) -> None:
        self.groups = _copied(groups)
        self.epochs = epochs
        self.declared_final = declared_final
        """The rate that was declared to hold after the end; the last epoch then consists of it."""
        self._set_by_optimizer: set[tuple[int, str]] = set()
        """The (group, name) of numbers that the optimizer changes in its own steps; they are not recorded."""

    def begin_epoch(self) -> None:
        """Record the next epoch from here on."""
        self.epochs += 1
        for group in self.groups:
            for track in group.values():
                track.append([])

    def before_step(self, optimizer: Optimizer) -> list[dict[str, Value]]:
        """Record what the next step will use, and return it, by group."""
        found = [hyperparameters(group) for group in optimizer.param_groups]
        for number, values in enumerate(found):
            if number == len(self.groups):  # the first step of all, or a group that was added later
                self.groups.append({})
            tracks = self.groups[number]
            for name, value in values.items():
                if (number, name) in self._set_by_optimizer:
                    continue
                if name not in tracks:
                    tracks[name] = [[] for _ in range(self.epochs)]
                _note(tracks[name][-1], value)
        return found

    def inside_step(self, optimizer: Optimizer, before: Sequence[Mapping[str, Value]]) -> None:
        """Correct what differs from `before`: the current step has set it since, and before its update."""
        for group, tracks, was in zip(optimizer.param_groups, self.groups, before, strict=True):
            for name, value in hyperparameters(group).items():
                if name in tracks and was.get(name) != value:
                    runs = tracks[name][-1]
                    noted, steps = runs.pop()
                    if steps > 1:
                        runs.append((noted, steps - 1))
                    _note(runs, value)

    def after_step(self, optimizer: Optimizer) -> None:
        """Drop the numbers that the step itself has changed: an optimizer uses them internally, like Prodigy's d."""
        for number, (group, tracks) in enumerate(zip(optimizer.param_groups, self.groups, strict=True)):
            for name, value in hyperparameters(group).items():
                if name != "lr" and name in tracks and tracks[name][-1][-1][0] != value:
                    del tracks[name]
                    self._set_by_optimizer.add((number, name))

    def replayed(self, epoch: int, after: int = 0) -> Iterator[list[dict[str, Value]]]:
        """What to set before each step of an epoch, from its step `after` on, by group; the last values repeat."""
        self._check_rates()
        groups = [{name: track for name, track in group.items() if _moves(name, track)} for group in self.groups]
        streams = [{name: _values(track, epoch, after) for name, track in group.items()} for group in groups]
        while True:
            yield [{name: next(stream) for name, stream in group.items()} for group in streams]

    def steps(self, epoch: int) -> int:
        """How many steps of an epoch were recorded; 0 beyond the end."""
        tracks = [group["lr"][epoch : epoch + 1] for group in self.groups if "lr" in group]
        return max((sum(count for _, count in runs) for track in tracks for runs in track), default=0)

    def rates(self) -> list[list[float]]:
        """All learning rates that occurred, by group, the last one last."""
        self._check_rates()
        return [[rate_of(value) for runs in group["lr"] for value, _ in runs] for group in self.groups]

    def peaks(self) -> list[float]:
        """The largest learning rate, by group."""
        return [max(rates) for rates in self.rates()]

    def ending_at(self, final: float) -> "Recording":
        """The same, followed by the rate `final` for the group with the largest rate; the others in proportion."""
        return self.extended([[Segment(final, 1)]], final)

    def extended(self, epochs: Sequence[Sequence[Segment]], declared_final: float | None = None) -> "Recording":
        """The same with more epochs, at these rates for the group with the largest; the others in proportion."""
        groups: list[dict[str, list[Runs]]] = []
        for group, peak in zip(self.groups, peaks := self.peaks(), strict=True):
            scale = peak / max(peaks)
            more: list[Runs] = [[(rate * scale, steps) for rate, steps in epoch] for epoch in epochs]
            groups.append({**group, "lr": [*group["lr"], *more]})  # of all else the last value holds
        return Recording(groups, self.epochs + len(epochs), declared_final)

    @property
    def trained_epochs(self) -> int:
        """How many epochs were trained: all but the one that `declared_final` adds."""
        return self.epochs - (self.declared_final is not None)

    def schedule(self) -> Schedule:
        """The learning rate of the group with the largest, step by step."""
        peaks = self.peaks()
        track = self.groups[peaks.index(max(peaks))]["lr"][: self.trained_epochs]
        pieces: list[Piece] = []
        steps = 0
        for rate, count in merged([Segment(rate_of(value), count) for runs in track for value, count in runs]):
            steps += count
            pieces.append(Piece(steps, rate, rate))
        return Schedule(steps, tuple(pieces), self.declared_final)

    def _check_rates(self) -> None:
        for number, group in enumerate(self.groups):
            if not any(group.get("lr", [])):
                raise InputError(
                    f"no learning rate was recorded for parameter group {number}, so none can be rewound; "
                    "train the dense run anew, with a number as the lr of every group"
                )

    def state_dict(self) -> dict[str, Any]:
        """The recording as plain data, with what has not moved yet, since it still may."""
        return {"epochs": self.epochs, "groups": _copied(self.groups), "declared": self.declared_final}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "Recording":
        """The inverse of `state_dict`."""
        return cls(state["groups"], state["epochs"], state.get("declared"))


def _copied(groups: Sequence[Mapping[str, Sequence[Runs]]]) -> list[dict[str, list[Runs]]]:
    return [{name: [list(runs) for runs in track] for name, track in group.items()} for group in groups]


def _note(runs: Runs, value: Value) -> None:
    if runs and runs[-1][0] == value:
        runs[-1] = (value, runs[-1][1] + 1)
    else:
        runs.append((value, 1))


def _moves(name: str, track: Sequence[Runs]) -> bool:
    # The learning rate is always replayed: a loop that sets it by hand would go on past the end of its own schedule.
    return name == "lr" or len({value for runs in track for value, _ in runs}) > 1


def _values(track: Sequence[Runs], epoch: int, after: int) -> Iterator[Value]:
    """The values of an epoch's steps; beyond the recording, and in an epoch without steps, the last one before it."""
    runs = track[epoch] if epoch < len(track) else []
    if not runs:
        earlier = [r for r in track[:epoch] if r]
        return repeat(earlier[-1][-1][0] if earlier else next(r for r in track if r)[0][0])
    ends = list(accumulate(steps for _, steps in runs))
    left = [repeat(value, min(steps, max(0, end - after))) for (value, steps), end in zip(runs, ends, strict=True)]
    return chain(*left, repeat(runs[-1][0]))


def adopted(optimizer: Optimizer, schedulers: Sequence[Scheduler], steps: Sequence[int]) -> Recording:
    """The recording of a run that followed these new schedulers, over parts of so many steps."""
    if len(schedulers) != (count := len(members(optimizer))):
        wanted = "one new scheduler" if count == 1 else "one new scheduler for each optimizer"
        raise InputError(
            f"adopt=True needs the schedule that trained the network, {wanted} or a Schedule, "
            f"not {len(schedulers)} schedulers"
        )
    for scheduler in schedulers:
        if (taken := steps_counted(scheduler)) > 0:
            raise InputError(
                f"the scheduler of an adopted network must be new, not at step {taken}: it is run through from its "
                "start"
            )
        if needed := required_argument(scheduler):
            raise InputError(
                f"{scheduler_kind(scheduler)} is stepped with {needed}, which is known only in training, so "
                "adopt=True cannot run through it; give the learning rates it took as a rewound.Schedule"
            )
    return rehearsed(optimizer, schedulers, steps)


def rehearsed(optimizer: Optimizer, schedulers: Sequence[Scheduler], steps: Sequence[int]) -> Recording:
    """What schedulers would do over parts of so many steps; no optimizer steps, and all objects end as they were."""
    before = [deepcopy(each.state_dict()) for each in schedulers]  # deep, as a state may hold the scheduler's own lists
    groups = [dict(group) for group in optimizer.param_groups]
    tensors = [{name: v.clone() for name, v in group.items() if isinstance(v, Tensor)} for group in groups]
    recording = Recording()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of scheduler steps without optimizer steps
            for count in steps:
                recording.begin_epoch()
                for _ in range(count):
                    for _ in members(optimizer):  # each would take a step
                        recording.before_step(optimizer)
                    for scheduler in schedulers:
                        scheduler.step()
    finally:
        for scheduler, state in zip(schedulers, before, strict=True):
            scheduler.load_state_dict(state)
        for group, held, copies in zip(optimizer.param_groups, groups, tensors, strict=True):
            group.update(held)
            for name, copy in copies.items():
                held[name].copy_(copy)
    return recording


def check_final_ahead(course: Course, subjects: Subjects, first: Recording | None = None) -> None:
    """An error for a schedule that will end too low for the technique, where that can be known before the dense run.

    Without the recording of the `first` epoch, schedulers are assumed to be stepped once an epoch; with it, as often as
    in that one. A schedule that was made for another number of steps may end anywhere, so it is not checked.
    """
    technique, optimizer, epochs = course.the_technique, subjects.optimizer, course.training_time
    schedulers = [bare_scheduler(each) for each in subjects.schedulers]
    swa_may_end_it = any("swa_lr" in group for group in optimizer.param_groups)
    is_known = course.final is None and technique.lr == "final" and not swa_may_end_it
    if not is_known or len(schedulers) != len(members(optimizer)):
        return
    steps = 1 if first is None else min(map(steps_counted, schedulers))
    lengths = [_length(each) for each in schedulers]
    if not steps or any(length is None or abs(length - epochs * steps) > steps for length in lengths):
        return
    try:
        S = rehearsed(optimizer, schedulers, [steps] * (epochs - (first is not None))).schedule()
    except ValueError:  # a OneCycleLR beyond its end; the loop will get the same error
        return
    if first is not None:
        pieces = [piece._replace(until=piece.until + steps) for piece in S.pieces]
        S = Schedule(S.steps + steps, (Piece(steps, peak := max(first.peaks()), peak), *pieces))
    check_final(technique, S)


_LENGTHS = {
    lr_scheduler.CosineAnnealingLR: "T_max",
    lr_scheduler.LinearLR: "total_iters",
    lr_scheduler.OneCycleLR: "total_steps",
    lr_scheduler.PolynomialLR: "total_iters",
}


def _length(scheduler: object) -> int | None:
    """How many steps a scheduler of torch's or transformers' was made for; None where that is not known.

    It is not known of a function of the script's own, which must not be called either: it may count its calls.
    """
    kind = type(scheduler)
    if name := _LENGTHS.get(kind):
        return int(getattr(scheduler, name))
    if kind is lr_scheduler.SequentialLR:
        lengths = [_length(part) for part in scheduler._schedulers]  # type: ignore[attr-defined]
        return None if None in lengths else scheduler._milestones[-1] + lengths[-1]  # type: ignore[attr-defined]
    if kind is lr_scheduler.LambdaLR:
        functions: list[object] = scheduler.lr_lambdas  # type: ignore[attr-defined]
        known = {_training_steps(function) for function in functions}
        return known.pop() if len(known) == 1 else None
    return None


def _training_steps(function: object) -> int | None:
    if isinstance(function, partial) and function.func.__module__ == "transformers.optimization":
        return function.keywords.get("num_training_steps")
    return None


def scheduled(optimizer: Optimizer, schedule: Schedule, lengths: Sequence[int], unit: str = "epoch") -> Recording:
    """The recording of a schedule over parts of these lengths in units, at least one step each; groups keep ratios."""
    steps, rest = divmod(schedule.steps, sum(lengths))
    if rest or not steps:
        raise InputError(
            f"a schedule of {schedule.steps:,} steps does not divide into {sum(lengths):,} {unit}s; "
            f"give it one step per {unit}, or the same number in each"
        )
    rates = [rate_of(hyperparameters(group)["lr"]) for group in optimizer.param_groups]
    taken = len(members(optimizer))  # optimizer steps with each batch
    ratios = [rate / max(rates) if max(rates) else 1.0 for rate in rates]
    ends = accumulate((length * steps for length in lengths), initial=0)
    cuts = [schedule.segments(start, stop) for start, stop in pairwise(ends)]
    groups: list[dict[str, list[Runs]]] = [
        {"lr": [[(rate * ratio, count * taken) for rate, count in cut] for cut in cuts]} for ratio in ratios
    ]
    recording = Recording(groups, len(lengths))
    return recording if schedule.declared_final is None else recording.ending_at(schedule.declared_final)


def with_rule(
    rule: Rule, recording: Recording, facts: Facts, training_time: int, parts: Sequence[int], optimizers: int
) -> Recording:
    """The recording of a dense run, followed by parts of these lengths at the rates that a rule draws for them.

    A rule `(S, T, t, facts) -> Schedule` counts steps. S is what the dense run did, T its steps, and t has as many
    steps for each epoch of the level as the dense run had on average. (A loop that counts steps has about one
    optimizer step in each.) Several optimizers step together with each batch and count as one step: a rule that warms
    up for 100 steps does so for 100 batches.
    """
    S = _per_batch(recording.schedule(), optimizers)
    steps = max(1, round(S.steps / training_time))
    rates = drawn_by(rule, S, sum(parts) * steps, facts)
    ends = accumulate((length * steps for length in parts), initial=0)
    cuts = [sliced(rates, start, stop) for start, stop in pairwise(ends)]
    return recording.extended([[Segment(rate, count * optimizers) for rate, count in cut] for cut in cuts])


def _per_batch(S: Schedule, optimizers: int) -> Schedule:
    """The schedule with one step where each of the optimizers took one."""
    pieces = tuple(piece._replace(until=piece.until / optimizers) for piece in S.pieces)
    return replace(S, steps=S.steps // optimizers, pieces=pieces)
