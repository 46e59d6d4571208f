"""Hooks on the optimizer that record each step of a dense run, and replay the recorded values in each step of a level.

In the dense run the values that each step uses are recorded, whoever has set them. In a level each step uses what the
same step of the recording used, whatever the loop has set. A step uses the values that its closure leaves; without a
closure, those before the step. A learning rate that the step itself moves is refused, since it cannot be known which
one its update has used. A step that calls the step of its parent class is one step; where torch has hooks on the
parent's step, too, the values that it finds are the ones used. One part of the run (`course`) is followed at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from torch.optim import LBFGS
from torch.optim.optimizer import Optimizer
from torch.optim.swa_utils import SWALR

from rewound.foundations.errors import InputError, warn
from rewound.loops.looprun import LoopRun
from rewound.loops.optimizers import (
    Scheduler,
    Value,
    assign,
    bare_scheduler,
    counting_steps,
    hyperparameters,
    inner_optimizers,
    members,
    resting,
    set_last_rates,
)
from rewound.loops.recording import Recording
from rewound.method.pruning.attachment import steps_under_way, untraced

Closure = Callable[[], object]
Args = tuple[object, ...]
Kwargs = dict[str, object]
Values = Sequence[Mapping[str, Value]]  # of hyperparameters, by group


@contextmanager
def recorded(run: LoopRun, schedulers: Sequence[Scheduler]) -> Iterator["StepHooks"]:
    """Inside, a part of the dense run is recorded.

    By its end one of the `schedulers` of each optimizer must have been stepped. Others may still wait for their turn,
    as the one after a warm-up does; SWALR may always wait.
    """
    optimizer, progress, unit = run.subjects.optimizer, run.progress, run.course.unit
    schedulers = [scheduler for scheduler in schedulers if not isinstance(scheduler, SWALR)]
    before = _positions(schedulers) if unit == "epoch" else [0] * len(schedulers)
    hooks = StepHooks(run, progress.recording)
    with counting_steps(schedulers) as steps, hooks.attached():
        yield hooks
    moved = {id(s): id(getattr(bare_scheduler(s), "optimizer", optimizer)) for s in schedulers}
    stepped = {
        moved[id(scheduler)]
        for scheduler, was, now in zip(schedulers, before, _positions(schedulers), strict=True)
        if was is None or was != now or steps[id(scheduler)]
    }
    if idle := [scheduler for scheduler in schedulers if moved[id(scheduler)] not in stepped]:
        names = " + ".join(type(scheduler).__name__ for scheduler in idle)
        when = f"epoch {progress.epoch}" if unit == "epoch" else f"{progress.epoch + 1:,} steps"
        raise InputError(
            f"{names} was not stepped in {when}: call scheduler.step() in the loop, or leave the "
            "scheduler out if something else sets the learning rate"
        )


@contextmanager
def replayed(run: LoopRun, recording: Recording, number: int) -> Iterator["StepHooks"]:
    """Inside, the steps of a level use the values of the recording's part `number`, while the schedulers rest.

    The recording of an adopted network was rehearsed: the loop must step the schedulers as often as the rehearsal did.
    """
    optimizer, schedulers, progress = run.subjects.optimizer, run.subjects.schedulers, run.progress
    rehearsed = run.course.adopt
    replay = _Replay(run, recording, number)
    hooks = StepHooks(run, replay)
    with resting(schedulers, optimizer, replay.on_scheduler_step), hooks.attached():
        yield hooks
    taken = len(members(optimizer))  # optimizer steps with every batch
    if run.course.unit == "step":
        if rehearsed and 0 < replay.moves < hooks.units * len(schedulers) / 2:
            raise InputError(
                f"{type(schedulers[0]).__name__} was stepped {replay.moves:,} times in {hooks.units:,} steps, but "
                "adopt=True took it for one stepped in every step; give the rates as a rewound.Schedule"
            )
    elif rehearsed and recording.steps(0) == taken < progress.steps <= replay.moves:
        raise InputError(
            f"{type(schedulers[0]).__name__} is stepped with every batch ({replay.moves // taken:,} times in epoch "
            f"{progress.epoch}), but adopt=True took it for one stepped once per epoch; give "
            f"steps_per_epoch={progress.steps // taken}, or under Lightning 'interval': 'step' beside the scheduler"
        )


class _Replay:
    """Sets the recorded values before each step, and those of the next step when the loop steps its scheduler."""

    def __init__(self, run: LoopRun, recording: Recording, number: int) -> None:
        self.optimizer, self.schedulers, taken = run.subjects.optimizer, run.subjects.schedulers, run.progress.steps
        self.values = recording.replayed(number, taken)
        self.left = recording.steps(number) - taken
        """How many recorded steps of the part are left."""
        self.next_part = next(recording.replayed(number + 1))
        self.present = self.coming = next(self.values)
        self.moves = 0
        """How often the loop has stepped a scheduler."""
        self._set(self.coming)

    def before_step(self, optimizer: Optimizer) -> Values:
        self.present, self.coming = self.coming, next(self.values)
        self.left -= 1
        self._set(self.present)
        return self.present

    def inside_step(self, optimizer: Optimizer, before: Values) -> None:
        self._set(self.present)

    def after_step(self, optimizer: Optimizer) -> None:
        pass  # the next values come when the loop steps its scheduler, or with the next step

    def on_scheduler_step(self) -> None:
        self.moves += 1
        self._set(self.coming if self.left > 0 else self.next_part)

    def _set(self, values: Values) -> None:
        for group, recorded_values in zip(self.optimizer.param_groups, values, strict=False):
            assign(group, recorded_values)
        set_last_rates(self.schedulers, self.optimizer)


_PATIENCE = 100
"""How many steps a loop may count before the first optimizer step."""


class StepHooks:
    """Counts the steps that an optimizer's members take in a part of the run, and passes each to a follower."""

    def __init__(self, run: LoopRun, follower: Recording | _Replay) -> None:
        self.optimizer, self.progress, self.unit = run.subjects.optimizer, run.progress, run.course.unit
        self.follower, self.unseen = follower, run.unseen
        self.idle = set(members(self.optimizer))
        self.on_step: Callable[[], None] = lambda: None
        """What is called after each optimizer step."""
        self.is_first, self.is_resumed = not self.progress.epoch, bool(self.progress.steps)
        self.units = 0
        """How many units the loop has done since this part was begun or resumed."""
        self.least = len(members(self.optimizer)) if self.unit == "step" else 0
        """How many places a unit has in the recording at least."""
        self.found: Values = []
        """What the current step has found in the groups."""
        self.used: list[object] | None = None
        """The learning rates that the current step uses, until it ends."""

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, the hooks are on the optimizers; at the end an error if there was no step."""
        with ExitStack() as hooks:
            for member in members(self.optimizer):
                hooks.callback(member.register_step_pre_hook(untraced(self._begin)).remove)  # type: ignore[arg-type]
                after = member.register_step_post_hook(untraced(self._end))
                hooks.callback(after.remove)
                # Called before the loop's own hooks, which may step a scheduler.
                member._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]
                for name, held in inner_optimizers(member).items():
                    alone = untraced(partial(self._check_is_inside, member, name))
                    hooks.callback(held.register_step_pre_hook(alone).remove)
            yield
        self._check_taken()

    def end_unit(self) -> None:
        """Count a unit of the loop as done: an epoch, or one of its steps.

        A step of the loop without an optimizer step has a place in the recording, too, so that the n-th replays the
        n-th: a GradScaler may skip some steps in the dense run, and others in a level.
        """
        self.units += 1
        for _ in range(self.progress.began + self.least - self.progress.steps):
            self.follower.before_step(self.optimizer)
            self.progress.steps += 1
        if self.units == _PATIENCE and len(self.idle) == self.least and not self.is_resumed:
            raise self._nothing_taken()

    def _begin(self, member: Optimizer, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        if steps_under_way(member) > 1:
            self._go_on(self.found)
            return None
        self.progress.begin_step()
        self.idle.discard(member)
        self._look_for_gradients()
        self.found, self.used = self.follower.before_step(self.optimizer), _rates(self.optimizer)
        return _with_closure(args, kwargs, self._close)

    def _close(self, closure: Closure) -> object:
        before = self._values()
        loss = closure()
        self._look_for_gradients()
        self._go_on(before)
        return loss

    def _go_on(self, before: Values) -> None:
        """The current step uses what is in the groups now; `before` was in them earlier."""
        self.follower.inside_step(self.optimizer, before)
        self.used = _rates(self.optimizer)

    def _values(self) -> Values:
        return [hyperparameters(group) for group in self.optimizer.param_groups]

    def _end(self, member: Optimizer, args: object, kwargs: object) -> None:
        if self.used is not None and self.used != (now := _rates(self.optimizer)):
            raise InputError(
                f"{type(member).__name__} moved its learning rate from {self.used} to {now} inside its own step, "
                "where it can be neither recorded nor rewound; move it in the loop, for example with a scheduler"
            )
        self.used = None  # a rate that moves after this, as when the parent's step has ended, has not been used
        self._look_for_gradients()  # of a closure that `_with_closure` leaves alone
        if steps_under_way(member) == 1:
            self.follower.after_step(self.optimizer)
            self.on_step()

    def _check_is_inside(self, member: Optimizer, name: str, held: Optimizer, args: object, kwargs: object) -> None:
        if not steps_under_way(member):
            kind = type(member).__name__
            raise InputError(
                f"the loop does not call step() of the {kind} that was given: its steps are taken by the "
                f"{type(held).__name__} inside it; give rewound.{self.unit}s that one, the {kind}'s .{name}"
            )

    def _look_for_gradients(self) -> None:
        """Note the parameters that have a gradient, also a zero one; soon none is left to look at."""
        if self.unseen and self.progress.gradients is not None:
            seen = [name for name, parameter in self.unseen.items() if parameter.grad is not None]
            self.progress.gradients.update(seen)
            for name in seen:
                del self.unseen[name]

    def _check_taken(self) -> None:
        if len(self.idle) == len(members(self.optimizer)) and not self.is_resumed:
            raise self._nothing_taken()
        if self.idle and self.is_first:
            names = " + ".join(type(member).__name__ for member in self.idle)
            when = "epoch 0" if self.unit == "epoch" else f"the first {self.units:,} steps"
            warn(
                f"{names} took no step in {when}: give rewound.{self.unit}s the optimizers of the loop, or leave it out"
            )

    def _nothing_taken(self) -> InputError:
        here = self.progress.epoch
        when = f"epoch {here}" if self.unit == "epoch" else f"steps {here + 1 - self.units:,} to {here:,}"
        return InputError(f"no optimizer step was taken in {when}: give rewound.{self.unit}s the optimizer of the loop")


def _positions(schedulers: Sequence[Scheduler]) -> list[object]:
    return [getattr(scheduler, "last_epoch", None) for scheduler in schedulers]


def _rates(optimizer: Optimizer) -> list[object]:
    rates = [group.get("lr") for group in optimizer.param_groups]
    return [rate if type(rate) is float else hyperparameters({"lr": rate}).get("lr") for rate in rates]


def _with_closure(args: Args, kwargs: Kwargs, close: Callable[[Closure], object]) -> tuple[Args, Kwargs] | None:
    """The arguments of a step (the first is the optimizer) with `close` around their closure, if there is one."""
    if isinstance(args[0], LBFGS):  # it reads its learning rate before its closure
        return None
    if callable(closure := kwargs.get("closure")):
        return args, {**kwargs, "closure": partial(close, closure)}
    if len(args) > 1 and callable(closure := args[1]):
        return (args[0], partial(close, closure), *args[2:]), kwargs
    return None
