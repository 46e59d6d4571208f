"""One epoch of a user's own loop, followed step by step through hooks on the optimizer.

In the dense run it is recorded: what each step uses is noted, whoever has set it. In a level it replays an epoch of the
recording: each step uses what the same step did there, whatever the loop has set. A step uses what its closure leaves,
or where it has none what stands before it; a learning rate that the step itself moves is refused, since nobody can tell
which one its update has used.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice

from torch.optim import LBFGS
from torch.optim.optimizer import Optimizer

from rewound.errors import InputError, warn
from rewound.loops.groups import Value, assign, hyperparameters
from rewound.loops.joint import members
from rewound.loops.progress import Progress
from rewound.loops.recording import Recording
from rewound.loops.schedulers import Scheduler, followed
from rewound.pruning.attachment import untraced

Step = Callable[[Optimizer], None]
Closed = Callable[[Optimizer, Sequence[Mapping[str, Value]]], None]
Closure = Callable[[], object]
Args = tuple[object, ...]
Kwargs = dict[str, object]


@contextmanager
def recorded(optimizer: Optimizer, progress: Progress, schedulers: Sequence[Scheduler] = ()) -> Iterator[None]:
    """An epoch of the dense run: its steps go into the recording; at its end `schedulers` must have moved."""
    before, recording = _positions(schedulers), progress.recording
    with _counted(optimizer, progress, recording.observe, recording.amend, recording.disown):
        yield
    for scheduler, was, now in zip(schedulers, before, _positions(schedulers), strict=True):
        if was is not None and was == now:
            raise InputError(
                f"{type(scheduler).__name__} was not stepped in epoch {progress.epoch}: call scheduler.step() in the "
                "loop, or leave the scheduler out if something else sets the learning rate"
            )


@contextmanager
def replayed(
    optimizer: Optimizer, progress: Progress, recording: Recording, epoch: int, schedulers: Sequence[Scheduler] = ()
) -> Iterator[None]:
    """An epoch of a level: its steps use what those of the recording's `epoch` did, while `schedulers` rest."""
    values = islice(recording.replayed(epoch), progress.steps, None)
    present = coming = next(values)
    _assign(optimizer, coming)  # for a loop that looks at its learning rate before it steps
    moves = 0

    def begin(optimizer: Optimizer) -> None:
        nonlocal present, coming
        present, coming = coming, next(values)
        _assign(optimizer, present)

    def move() -> None:  # when the loop steps a scheduler, its learning rate moves on
        nonlocal moves
        moves += 1
        _assign(optimizer, coming)

    with (
        followed(schedulers, move),
        _counted(optimizer, progress, begin, lambda optimizer, before: _assign(optimizer, present)),
    ):
        yield
    taken = len(members(optimizer))  # steps with every batch
    if recording.steps(0) == taken < progress.steps <= moves:
        raise InputError(
            f"{type(schedulers[0]).__name__} is stepped with every batch ({moves // taken:,} times in epoch "
            f"{progress.epoch}), but was run through once an epoch; give steps_per_epoch={progress.steps // taken}, "
            "or where Lightning counts them 'interval': 'step' beside the scheduler"
        )


@contextmanager
def _counted(
    optimizer: Optimizer, progress: Progress, begin: Step, closed: Closed, end: Step | None = None
) -> Iterator[None]:
    """Inside, `begin` and `end` are called around every step, `closed` after its closure; an epoch needs a step."""
    used: list[object] | None = None
    idle = set(members(optimizer))

    def begin_step(member: Optimizer, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        nonlocal used
        progress.steps += 1
        idle.discard(member)
        begin(optimizer)
        used = _rates(optimizer)
        return _with_closure(args, kwargs, close)

    def close(closure: Closure) -> object:
        nonlocal used
        before = [hyperparameters(group) for group in optimizer.param_groups]
        loss = closure()
        closed(optimizer, before)
        used = _rates(optimizer)
        return loss

    def end_step(member: Optimizer, args: object, kwargs: object) -> None:
        nonlocal used
        if used is not None and used != _rates(optimizer):
            raise InputError(
                f"{type(member).__name__} moved its learning rate from {used} to {_rates(optimizer)} inside its own "
                "step, where it can be neither recorded nor rewound; move it in the loop, with a scheduler say"
            )
        used = None  # a step inside a step, of a class that calls its parent's: the inner one has told
        if end is not None:
            end(optimizer)

    with ExitStack() as hooks:
        for member in members(optimizer):
            hooks.callback(member.register_step_pre_hook(untraced(begin_step)).remove)  # type: ignore[arg-type]
            after = member.register_step_post_hook(untraced(end_step))
            hooks.callback(after.remove)
            # First of all: a hook of the loop's own may step a scheduler.
            member._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]
        yield
    if not progress.steps:
        raise InputError(
            f"no optimizer step was taken in epoch {progress.epoch}: give rewound.epochs the optimizer of the loop"
        )
    if idle and not progress.epoch:
        names = " + ".join(type(member).__name__ for member in idle)
        warn(f"{names} took no step in epoch 0: give rewound.epochs the optimizers of the loop, or leave it out")


def _positions(schedulers: Sequence[Scheduler]) -> list[object]:
    return [getattr(scheduler, "last_epoch", None) for scheduler in schedulers]


def _assign(optimizer: Optimizer, values: Sequence[dict[str, Value]]) -> None:
    for group, mine in zip(optimizer.param_groups, values, strict=False):
        assign(group, mine)


def _rates(optimizer: Optimizer) -> list[object]:
    return [hyperparameters(group).get("lr") for group in optimizer.param_groups]


def _with_closure(args: Args, kwargs: Kwargs, close: Callable[[Closure], object]) -> tuple[Args, Kwargs] | None:
    """The arguments of a step (the first is the optimizer) with `close` around their closure, where there is one."""
    if isinstance(args[0], LBFGS):  # it reads its learning rate before its closure
        return None
    if callable(closure := kwargs.get("closure")):
        return args, {**kwargs, "closure": partial(close, closure)}
    if len(args) > 1 and callable(closure := args[1]):
        return (args[0], partial(close, closure), *args[2:]), kwargs
    return None
