"""One epoch of a user's own loop, followed step by step through hooks on the optimizer.

In the dense run it is recorded: what each step uses is noted, whoever has set it. In a level it replays an epoch of the
recording: each step uses what the same step did there, whatever the loop has set.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, islice

from torch.optim.optimizer import Optimizer

from rewound.attachment import untraced
from rewound.errors import InputError
from rewound.progress import Progress
from rewound.recording import Recording, Value, assign
from rewound.schedulers import Scheduler

Step = Callable[[Optimizer], None]


@contextmanager
def recorded(optimizer: Optimizer, progress: Progress, schedulers: Sequence[Scheduler] = ()) -> Iterator[None]:
    """An epoch of the dense run: its steps go into the recording; at its end `schedulers` must have moved."""
    before = _positions(schedulers)
    with _counted(optimizer, progress, progress.recording.observe, progress.recording.disown):
        yield
    for scheduler, was, now in zip(schedulers, before, _positions(schedulers), strict=True):
        if was is not None and was == now:
            raise InputError(
                f"{type(scheduler).__name__} was not stepped in epoch {progress.epoch}: call scheduler.step() in the "
                "loop, or leave the scheduler out if something else sets the learning rate"
            )


@contextmanager
def replayed(optimizer: Optimizer, progress: Progress, recording: Recording, epoch: int) -> Iterator[None]:
    """An epoch of a level: its steps use what those of the recording's `epoch` did."""
    rest = islice(recording.replayed(epoch), progress.steps, None)
    first = next(rest)
    _assign(optimizer, first)  # for a loop that looks at its learning rate before it steps
    values = chain((first,), rest)
    with _counted(optimizer, progress, lambda optimizer: _assign(optimizer, next(values))):
        yield


@contextmanager
def _counted(optimizer: Optimizer, progress: Progress, before: Step, after: Step | None = None) -> Iterator[None]:
    """Inside, `before` and `after` are called around every step; an epoch without any is an error."""

    def begin_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
        progress.steps += 1
        before(optimizer)

    def end_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
        if after is not None:
            after(optimizer)

    with ExitStack() as hooks:
        hooks.callback(optimizer.register_step_pre_hook(untraced(begin_step)).remove)
        hooks.callback(optimizer.register_step_post_hook(untraced(end_step)).remove)
        yield
    if not progress.steps:
        raise InputError(
            f"no optimizer step was taken in epoch {progress.epoch}: give rewound.epochs the optimizer of the loop"
        )


def _positions(schedulers: Sequence[Scheduler]) -> list[object]:
    return [getattr(scheduler, "last_epoch", None) for scheduler in schedulers]


def _assign(optimizer: Optimizer, values: Sequence[dict[str, Value]]) -> None:
    for group, mine in zip(optimizer.param_groups, values, strict=False):
        assign(group, mine)
