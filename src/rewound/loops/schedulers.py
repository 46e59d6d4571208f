"""Other people's schedulers: where one stands, and how it rests while recorded learning rates are used again."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Protocol, SupportsIndex

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import InputError
from rewound.loops.unwrapping import bare_scheduler


class Scheduler(Protocol):
    """What moves the learning rate of an optimizer: any scheduler of torch's, or of a library around it."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state: dict[str, object], /) -> object: ...


def scheduler_kind(scheduler: Scheduler) -> str:
    """What kind of scheduler it is, for a person."""
    return type(bare_scheduler(scheduler)).__name__


def position(scheduler: Scheduler) -> int:
    """How often it has been stepped; 0 where it does not tell."""
    inside = bare_scheduler(scheduler)
    chained: Sequence[Scheduler] = getattr(inside, "_schedulers", ())  # torch's ChainedScheduler does not count
    known = getattr(inside, "last_epoch", None)
    return max((position(link) for link in chained), default=0) if known is None else int(known)


def needed(scheduler: Scheduler) -> str | None:
    """What its `step` must be told, like the loss that ReduceLROnPlateau watches; None where nothing."""
    asked = signature(bare_scheduler(scheduler).step).parameters.values()
    return next((p.name for p in asked if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD), None)


def check_given(schedulers: Sequence[Scheduler], optimizer: Optimizer) -> None:
    """An error for a OneCycleLR that only the loop knows: it would not rest, and raise past its end."""
    marks = {"initial_lr", "max_lr", "min_lr"}  # what it leaves in the groups; so does a state loaded after it
    if not schedulers and not optimizer.state and any(marks <= group.keys() for group in optimizer.param_groups):
        raise InputError(
            "a OneCycleLR moves this optimizer's rate, and raises when it is stepped past its end; "
            "give it as the scheduler, so that it rests after the dense run"
        )


def check_none_forgotten(schedulers: Sequence[Scheduler], optimizer: Optimizer) -> None:
    """An error for a dense run that may be resumed while a scheduler drives it that was not given.

    All there are in the process are looked at: torch's mark on the optimizer stays when its scheduler is gone, and
    ReduceLROnPlateau leaves none.
    """
    groups = {id(group) for group in optimizer.param_groups}
    driving = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), LRScheduler) and not groups.isdisjoint(map(id, _groups_moved_by(each)))
    ]
    if driving and not schedulers:
        raise InputError(
            f"a {scheduler_kind(driving[0])} moves this optimizer's rate and was not given, so that it would begin "
            "anew when the run is resumed from its checkpoint; give it to rewound.epochs after the optimizer, or do "
            "not make it"
        )


def _groups_moved_by(scheduler: LRScheduler) -> Sequence[object]:
    groups: Sequence[object] = getattr(vars(scheduler).get("optimizer"), "param_groups", ())
    return groups


def check_new(schedulers: Sequence[Scheduler]) -> None:
    """An error for a scheduler that has driven a training run: another one would follow what is left of it."""
    for scheduler in schedulers:
        if (steps := position(scheduler)) > 0:
            raise InputError(
                f"{scheduler_kind(scheduler)} has been stepped before ({steps:,} times), so the dense run "
                "would not follow its schedule from the start; make a new optimizer and scheduler, or give adopt=True "
                "for a network that is trained already"
            )


@contextmanager
def resting(schedulers: Sequence[Scheduler], optimizer: Optimizer) -> Iterator[None]:
    """Inside, `scheduler.step()` does nothing: OneCycle raises past its end, a list behind LambdaLR runs out.

    `get_last_lr()` tells the present rate.
    """

    def step(scheduler: Scheduler, *args: object, **kwargs: object) -> None:
        type(scheduler).on_step()  # type: ignore[attr-defined]  # of the class below

    def get_last_lr(scheduler: Scheduler) -> list[object]:
        return _rates_moved_by(scheduler, optimizer)

    methods = {"step": step, "get_last_lr": get_last_lr, "on_step": staticmethod(lambda: None)}
    with _changed(schedulers, lambda kind: methods):
        yield


def tell_rates(schedulers: Sequence[Scheduler], optimizer: Optimizer) -> None:
    """Let schedulers at rest hold the rates that the optimizer has as the last they set: it is what they save."""
    for scheduler in schedulers:
        inside = bare_scheduler(scheduler)
        if hasattr(inside, "_last_lr"):
            inside._last_lr = _rates_moved_by(scheduler, optimizer)


def _rates_moved_by(scheduler: Scheduler, optimizer: Optimizer) -> list[object]:
    own = getattr(bare_scheduler(scheduler), "optimizer", optimizer)
    rates = [group["lr"] for group in own.param_groups]
    return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]


@contextmanager
def counting_steps(schedulers: Sequence[Scheduler]) -> Iterator[Counter[int]]:
    """Inside, how often a loop steps each of the schedulers, which move as ever, by their identity.

    Where a scheduler stands does not tell: `step(epoch)` and `step(epoch + batch / batches)` leave it at 0 in epoch 0.
    """
    counts: Counter[int] = Counter()

    def counting(kind: type[Scheduler]) -> dict[str, object]:
        def step(scheduler: Scheduler, *args: object, **kwargs: object) -> None:
            counts[id(scheduler)] += 1
            kind.step(scheduler, *args, **kwargs)

        return {"step": step}

    with _changed(schedulers, counting):
        yield counts


@contextmanager
def _changed(
    schedulers: Sequence[Scheduler], methods: Callable[[type[Scheduler]], Mapping[str, object]]
) -> Iterator[None]:
    """Inside, the schedulers have the methods made for their classes.

    The class is changed and not the object, whose attributes are what its `state_dict` saves; it is pickled as one of
    its own class.
    """

    def reduce(scheduler: Scheduler, protocol: SupportsIndex) -> str | tuple[object, ...]:
        awake: Scheduler = object.__new__(type(scheduler).__bases__[0])
        awake.__dict__ = scheduler.__dict__
        return awake.__reduce_ex__(1)  # later protocols insist on the class that the object has now

    kinds = [type(scheduler) for scheduler in schedulers]
    for scheduler, kind in zip(schedulers, kinds, strict=True):
        scheduler.__class__ = type(kind.__name__, (kind,), {**methods(kind), "__reduce_ex__": reduce})
    try:
        yield
    finally:
        for scheduler, kind in zip(schedulers, kinds, strict=True):
            scheduler.__class__ = kind


@contextmanager
def followed(schedulers: Sequence[Scheduler], on_step: Callable[[], None]) -> Iterator[None]:
    """Inside, `on_step` is called when a loop steps one of the schedulers, which are at rest."""
    kinds = {type(scheduler): vars(type(scheduler))["on_step"] for scheduler in schedulers}
    for kind in kinds:
        kind.on_step = staticmethod(on_step)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for kind, before in kinds.items():
            kind.on_step = before  # type: ignore[attr-defined]
