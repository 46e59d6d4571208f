"""Optimizers and schedulers as scripts give them: wrapped, several at once, or one inside another.

Accelerate and Lightning wrap an optimizer, Accelerate a scheduler: `bare_optimizer` and `bare_scheduler` unwrap them.
Several optimizers (Muon for matrices and AdamW for the rest, or a generator's and a critic's) are treated as one that
has all their groups and counts all their steps. A loop steps them in the same order again and again, so the n-th step
of an epoch finds the same learning rates in all groups when it is replayed. An optimizer may hold another inside it, as
Lookahead and SAM do. While recorded learning rates are used again, schedulers rest.
"""

import gc
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from inspect import signature
from typing import Any, Protocol, SupportsIndex, TypeVar

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import InputError

StateDict = dict[str, Any]
Thing = TypeVar("Thing")
_WRAPPING = frozenset({"accelerate", "lightning", "lightning_fabric", "pytorch_lightning"})


class Scheduler(Protocol):
    """What moves the learning rate of an optimizer: any scheduler of torch's, or of a library around it."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state: dict[str, object], /) -> object: ...


def bare_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that takes the steps, without what a library has put around it.

    An optimizer like Lookahead holds another one and takes steps of its own: it stays as it is.
    """
    while _is_wrapper(optimizer) and isinstance(within := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = within
    return optimizer


def _is_wrapper(optimizer: object) -> bool:
    libraries = {base.__module__.partition(".")[0] for base in type(optimizer).__mro__}
    return not libraries.isdisjoint(_WRAPPING)


def bare_scheduler(scheduler: Thing) -> Thing:
    """The scheduler that moves the learning rate, without what a library has put around it."""
    within: Thing = getattr(scheduler, "scheduler", scheduler)
    return within


# Several optimizers, and optimizers inside others


class JointOptimizer(Optimizer):
    """Reads and restores all its members as one optimizer; it never steps itself."""

    def __init__(self, members: Sequence[Optimizer]) -> None:  # no super().__init__: it has no groups or slots itself
        self.members = tuple(members)
        self._sizes = [len(member.param_groups) for member in members]

    def __repr__(self) -> str:
        return f"JointOptimizer({', '.join(map(repr, self.members))})"

    @property
    def param_groups(self) -> list[StateDict]:  # type: ignore[override]  # loading a state replaces them
        for member, size in zip(self.members, self._sizes, strict=True):
            if (now := len(member.param_groups)) != size:
                raise InputError(
                    f"{type(member).__name__} had {size} parameter groups and has {now}: of several optimizers, give "
                    "each all of its groups before the first epoch"
                )
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> dict[Tensor, StateDict]:  # type: ignore[override]
        return {parameter: slots for member in self.members for parameter, slots in member.state.items()}

    def state_dict(self) -> StateDict:
        states = [member.state_dict() for member in self.members]
        return {"members": states, "param_groups": [group for state in states for group in state["param_groups"]]}

    def load_state_dict(self, state: StateDict) -> None:
        for member, saved in zip(self.members, state["members"], strict=True):
            member.load_state_dict(saved)


def joined(optimizers: Sequence[Optimizer]) -> Optimizer:
    """One optimizer that stands for all of them; a single one stands for itself."""
    if not optimizers:
        raise InputError("no optimizer is given; give the one that trains the model, or all of them in a list")
    return optimizers[0] if len(optimizers) == 1 else JointOptimizer(optimizers)


def members(optimizer: Optimizer) -> Sequence[Optimizer]:
    """The optimizers that take steps.

    >>> import torch
    >>> pair = [torch.optim.SGD([torch.zeros(1)], lr=rate) for rate in (0.1, 0.2)]
    >>> [group["lr"] for group in joined(pair).param_groups], optimizer_kind(joined(pair)), optimizer_kind(pair[0])
    ([0.1, 0.2], 'SGD + SGD', 'SGD')
    """
    return optimizer.members if isinstance(optimizer, JointOptimizer) else (optimizer,)


def inner_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers that one holds inside it, as Lookahead and SAM do, by the names of its attributes."""
    return {name: held for name, held in vars(optimizer).items() if isinstance(held, Optimizer)}


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """The members and all optimizers inside them, the innermost first."""
    inner = [
        each for member in members(optimizer) for held in inner_optimizers(member).values() for each in with_inner(held)
    ]
    return [*inner, *members(optimizer)]


def unsaved_inner(optimizer: Optimizer) -> list[Optimizer]:
    """The inner optimizers whose slots no `state_dict` has: SAM saves its own slots, but not its base's momentum."""
    return [
        held
        for holder in with_inner(optimizer)
        if type(holder).state_dict is Optimizer.state_dict
        for held in inner_optimizers(holder).values()
        if held.state is not holder.state
    ]


def add_missing_hooks(optimizer: Optimizer) -> None:
    """Add the hooks of `Optimizer.__init__` to an optimizer that does not call it, such as timm's Lookahead."""
    for name in ("step", "state_dict", "load_state_dict"):
        for when in ("pre", "post"):
            if not hasattr(optimizer, attribute := f"_optimizer_{name}_{when}_hooks"):
                setattr(optimizer, attribute, OrderedDict())
    if not hasattr(optimizer, "_zero_grad_profile_name"):
        optimizer._patch_step_function()
    step = vars(optimizer).get("step")  # a scheduler has put it there, around the step that had no hooks
    if step is not None and not hasattr(step, "hooked"):
        hooked = Optimizer.profile_hook_step(lambda _, *args, **kwargs: step(*args, **kwargs))
        optimizer.step = update_wrapper(partial(hooked, optimizer), step)  # type: ignore[method-assign]
        optimizer.step.hooked = True  # type: ignore[attr-defined]


def optimizer_kind(optimizer: Optimizer) -> str:
    """The class of the optimizer, or the classes of its members, for messages."""
    return " + ".join(type(member).__name__ for member in members(optimizer))


# The numbers in parameter groups

Value = float | tuple[float, ...]
Group = dict[str, object]


def hyperparameters(group: Group) -> dict[str, Value]:
    """The numbers of a parameter group; tensors become numbers, names and switches are left out.

    >>> hyperparameters({"params": [], "lr": 0.1, "betas": (0.9, 0.99), "nesterov": True, "dampening": 0})
    {'lr': 0.1, 'betas': (0.9, 0.99), 'dampening': 0.0}
    """
    found: dict[str, Value] = {}
    for name, value in group.items():
        kind = type(value)  # compared first, since that is quick and this runs twice in every step
        if kind is float:
            found[name] = value  # type: ignore[assignment]
        elif kind is bool or kind is list or value is None:
            continue
        elif (isinstance(value, Tensor) and value.ndim == 0) or (
            isinstance(value, int | float) and not isinstance(value, bool)
        ):
            found[name] = float(value)
        elif isinstance(value, tuple) and value and all(isinstance(v, int | float) for v in value):
            found[name] = tuple(map(float, value))
    return found


def check_rates(optimizer: Optimizer) -> None:
    """An error for a group whose learning rate is not a number, as in optimizers that find their own."""
    for number, group in enumerate(optimizer.param_groups):
        if not isinstance(hyperparameters(group).get("lr"), float):
            raise InputError(
                f"parameter group {number} of {optimizer_kind(optimizer)} has lr={group.get('lr')!r}, which can be "
                "neither recorded nor rewound; give each group a number, and a scheduler if it is to move"
            )


def assign(group: Group, values: Mapping[str, Value]) -> None:
    """Set hyperparameters of a group; tensors are filled in place, where a compiled or captured step reads them."""
    for name, value in values.items():
        if isinstance(held := group.get(name), Tensor):
            held.fill_(rate_of(value))
        else:
            group[name] = value


def rate_of(value: Value) -> float:
    """A learning rate, which is one number."""
    if isinstance(value, tuple):
        raise TypeError(f"a learning rate is one number, not {value}")
    return value


# Schedulers


def scheduler_kind(scheduler: Scheduler) -> str:
    """What kind of scheduler it is, for a person."""
    return type(bare_scheduler(scheduler)).__name__


def steps_counted(scheduler: Scheduler) -> int:
    """How often it has been stepped; 0 where it does not count."""
    inside = bare_scheduler(scheduler)
    chained: Sequence[Scheduler] = getattr(inside, "_schedulers", ())  # torch's ChainedScheduler does not count
    known = getattr(inside, "last_epoch", None)
    return max((steps_counted(link) for link in chained), default=0) if known is None else int(known)


def required_argument(scheduler: Scheduler) -> str | None:
    """The argument that its `step` requires, like the loss that ReduceLROnPlateau watches; None where there is none."""
    taken = signature(bare_scheduler(scheduler).step).parameters.values()
    return next((p.name for p in taken if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD), None)


def check_onecycle_given(schedulers: Sequence[Scheduler], optimizer: Optimizer) -> None:
    """An error for a OneCycleLR that was not given: it could not rest in the levels, and would raise past its end."""
    marks = {"initial_lr", "max_lr", "min_lr"}  # it writes them into the groups; so does a state loaded after it
    if not schedulers and not optimizer.state and any(marks <= group.keys() for group in optimizer.param_groups):
        raise InputError(
            "a OneCycleLR moves this optimizer's rate, and raises when it is stepped past its end; "
            "give it as the scheduler, so that it rests after the dense run"
        )


def check_all_given(schedulers: Sequence[Scheduler], optimizer: Optimizer) -> None:
    """An error where a scheduler drives the optimizer of a resumable dense run and was not given.

    All schedulers in the process are looked at. The mark that torch leaves on the optimizer would not do: it stays when
    the scheduler is gone, and ReduceLROnPlateau leaves none.
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
            "anew when the run is resumed from its checkpoint; give it as the scheduler, or do not make "
            "it"
        )


def _groups_moved_by(scheduler: LRScheduler) -> Sequence[object]:
    groups: Sequence[object] = getattr(vars(scheduler).get("optimizer"), "param_groups", ())
    return groups


def check_new(schedulers: Sequence[Scheduler]) -> None:
    """An error for a scheduler that has been stepped: the dense run would get only the rest of its schedule."""
    for scheduler in schedulers:
        if (steps := steps_counted(scheduler)) > 0:
            raise InputError(
                f"{scheduler_kind(scheduler)} has been stepped before ({steps:,} times), so the dense run "
                "would not follow its schedule from the start; make a new optimizer and scheduler, or give adopt=True "
                "for a network that is trained already"
            )


@contextmanager
def resting(
    schedulers: Sequence[Scheduler], optimizer: Optimizer, on_step: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Inside, `scheduler.step()` only calls `on_step`, and `get_last_lr()` returns the rates that the optimizer has.

    Schedulers cannot go on past their end: OneCycleLR raises, and a list behind a LambdaLR runs out.
    """

    def step(scheduler: Scheduler, *args: object, **kwargs: object) -> None:
        on_step()

    def get_last_lr(scheduler: Scheduler) -> list[object]:
        return _rates_moved_by(scheduler, optimizer)

    with _with_methods(schedulers, lambda kind: {"step": step, "get_last_lr": get_last_lr}):
        yield


def set_last_rates(schedulers: Sequence[Scheduler], optimizer: Optimizer) -> None:
    """Let schedulers at rest hold the optimizer's rates as the last that they have set, since they save them."""
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
    """Inside, counts how often the loop steps each scheduler, by its `id`; the schedulers work as always.

    `last_epoch` does not show it: `step(epoch)` and `step(epoch + batch / batches)` leave it at 0 in epoch 0.
    """
    counts: Counter[int] = Counter()

    def counting(kind: type[Scheduler]) -> dict[str, object]:
        def step(scheduler: Scheduler, *args: object, **kwargs: object) -> None:
            counts[id(scheduler)] += 1
            kind.step(scheduler, *args, **kwargs)

        return {"step": step}

    with _with_methods(schedulers, counting):
        yield counts


@contextmanager
def _with_methods(
    schedulers: Sequence[Scheduler], methods: Callable[[type[Scheduler]], Mapping[str, object]]
) -> Iterator[None]:
    """Inside, the schedulers have these methods, made for their classes, in place of their own.

    Each gets a new class; the object is left alone, since its `state_dict` saves all its attributes. It is pickled as
    an object of its old class.
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
