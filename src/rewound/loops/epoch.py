"""One part of a user's own loop, an epoch or many steps (`course`), followed step by step by hooks on the optimizer.

In the dense run it is recorded: what each step uses is noted, whoever has set it. In a level it replays a part of the
recording: each step uses what the same step did there, whatever the loop has set. A step uses what its closure leaves,
or where it has none what stands before it; a learning rate that the step itself moves is refused, since nobody can tell
which one its update has used. A step that calls its parent's is one step; where torch has hooks on the parent's part,
too, it uses what that part finds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Protocol

from torch import nn
from torch.optim import LBFGS
from torch.optim.optimizer import Optimizer
from torch.optim.swa_utils import SWALR

from rewound.foundations.errors import InputError, warn
from rewound.loops.course import Unit
from rewound.loops.groups import Value, assign, hyperparameters
from rewound.loops.joint import held_by, members
from rewound.loops.progress import Progress
from rewound.loops.recording import Recording
from rewound.loops.schedulers import Scheduler, counting_steps, followed, tell_rates
from rewound.loops.unwrapping import bare_scheduler
from rewound.method.pruning.attachment import steps_under_way, untraced

Closure = Callable[[], object]
Args = tuple[object, ...]
Kwargs = dict[str, object]
Values = Sequence[Mapping[str, Value]]  # of hyperparameters, by group
Named = Mapping[str, nn.Parameter]


@contextmanager
def recorded(
    optimizer: Optimizer, progress: Progress, unseen: Named, unit: Unit, schedulers: Sequence[Scheduler] = ()
) -> Iterator["Part"]:
    """A part of the dense run: its steps are recorded; by its end each optimizer needs a step of its `schedulers`.

    Others may wait for their turn, as the one after a warm-up does, and SWALR always. Of the parameters that are
    `unseen`, those that a gradient reaches are noted.
    """
    schedulers = [scheduler for scheduler in schedulers if not isinstance(scheduler, SWALR)]
    before = _positions(schedulers) if unit == "epoch" else [0] * len(schedulers)
    part = Part(optimizer, progress, progress.recording, unseen, unit)
    with counting_steps(schedulers) as steps, part.followed():
        yield part
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
def replayed(
    optimizer: Optimizer,
    progress: Progress,
    unseen: Named,
    unit: Unit,
    recording: Recording,
    number: int,
    schedulers: Sequence[Scheduler] = (),
    rehearsed: bool = False,
) -> Iterator["Part"]:
    """A part of a level: its steps use what those of the recording's part `number` did, while `schedulers` rest.

    Where the recording was `rehearsed`, they must be stepped as often as they were taken to be.
    """
    replay = _Replay(optimizer, schedulers, recording, number, progress.steps)
    part = Part(optimizer, progress, replay, unseen, unit)
    with followed(schedulers, replay.move), part.followed():
        yield part
    taken = len(members(optimizer))  # steps with every batch
    if unit == "step":
        if rehearsed and 0 < replay.moves < part.units * len(schedulers) / 2:
            raise InputError(
                f"{type(schedulers[0]).__name__} was stepped {replay.moves:,} times in {part.units:,} steps, but "
                "adopt=True took it for one stepped in every step; give the rates as a rewound.Schedule"
            )
    elif rehearsed and recording.steps(0) == taken < progress.steps <= replay.moves:
        raise InputError(
            f"{type(schedulers[0]).__name__} is stepped with every batch ({replay.moves // taken:,} times in epoch "
            f"{progress.epoch}), but adopt=True took it for one stepped once per epoch; give "
            f"steps_per_epoch={progress.steps // taken}, or under Lightning 'interval': 'step' beside the scheduler"
        )


class _Follower(Protocol):
    """Who is told of the steps of an epoch: a recording, or the replay of one."""

    def before_step(self, optimizer: Optimizer) -> Values: ...
    def inside_step(self, optimizer: Optimizer, before: Values) -> None: ...
    def after_step(self, optimizer: Optimizer) -> None: ...


class _Replay:
    """Sets what each step is to use, and what a loop sees that looks between them."""

    def __init__(
        self, optimizer: Optimizer, schedulers: Sequence[Scheduler], recording: Recording, epoch: int, taken: int
    ) -> None:
        self.optimizer, self.schedulers = optimizer, schedulers
        self.values = recording.replayed(epoch, taken)
        self.left = recording.steps(epoch) - taken
        """How many recorded steps of the epoch are left."""
        self.following = next(recording.replayed(epoch + 1))
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

    def move(self) -> None:
        self.moves += 1
        self._set(self.coming if self.left > 0 else self.following)

    def _set(self, values: Values) -> None:
        for group, mine in zip(self.optimizer.param_groups, values, strict=False):
            assign(group, mine)
        tell_rates(self.schedulers, self.optimizer)


_PATIENCE = 100
"""So many steps of a loop may go by before the first optimizer step."""


class Part:
    """The steps that the members of an optimizer take in a part of a run: counted, and told to a follower."""

    def __init__(
        self, optimizer: Optimizer, progress: Progress, follower: _Follower, unseen: Named, unit: Unit
    ) -> None:
        self.optimizer, self.progress, self.follower, self.unit = optimizer, progress, follower, unit
        self.unseen = dict(unseen)
        self.idle = set(members(optimizer))
        self.is_first, self.is_resumed = not progress.epoch, bool(progress.steps)
        self.units = 0
        """How many units the loop has done since this part was begun or resumed."""
        self.least = len(members(optimizer)) if unit == "step" else 0
        self.found: Values = []
        """What the step under way has found in the groups."""
        self.used: list[object] | None = None
        """The learning rates that the step under way uses, until it ends."""

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, every step is told of; an epoch needs one."""
        with ExitStack() as hooks:
            for member in members(self.optimizer):
                hooks.callback(member.register_step_pre_hook(untraced(self._begin)).remove)  # type: ignore[arg-type]
                after = member.register_step_post_hook(untraced(self._end))
                hooks.callback(after.remove)
                # First of all: a hook of the loop's own may step a scheduler.
                member._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]
                for name, held in held_by(member).items():
                    alone = untraced(partial(self._check_is_inside, member, name))
                    hooks.callback(held.register_step_pre_hook(alone).remove)
            yield
        self._check_taken()

    def end_unit(self) -> None:
        """A unit of the loop is done: an epoch, or one of its steps.

        Where the loop counts steps, one without an optimizer step has its place in the recording all the same, so that
        the n-th replays the n-th: a GradScaler may skip steps in the dense run, and others in a level.
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
        """The step under way uses what stands in the groups now, and stood there as `before`."""
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
        self.used = None  # what moves after the parent's part, if that was it, has not been used
        self._look_for_gradients()  # of a closure that is not followed
        if steps_under_way(member) == 1:
            self.follower.after_step(self.optimizer)

    def _check_is_inside(self, member: Optimizer, name: str, held: Optimizer, args: object, kwargs: object) -> None:
        if not steps_under_way(member):
            kind = type(member).__name__
            raise InputError(
                f"the loop does not call step() of the {kind} that was given: its steps are taken by the "
                f"{type(held).__name__} inside it; give rewound.epochs that one, the {kind}'s .{name}"
            )

    def _look_for_gradients(self) -> None:
        """Note the parameters that have a gradient, be it zero; soon none is left to look at."""
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
    """The arguments of a step (the first is the optimizer) with `close` around their closure, where there is one."""
    if isinstance(args[0], LBFGS):  # it reads its learning rate before its closure
        return None
    if callable(closure := kwargs.get("closure")):
        return args, {**kwargs, "closure": partial(close, closure)}
    if len(args) > 1 and callable(closure := args[1]):
        return (args[0], partial(close, closure), *args[2:]), kwargs
    return None
