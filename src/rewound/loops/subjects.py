"""What a script gives to `rewound.epochs`: unwrapped, and checked before the first epoch."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import InputError, check_kind
from rewound.loops.averages import averages, check_also, check_averages
from rewound.loops.course import Course
from rewound.loops.optimizers import (
    Scheduler,
    add_missing_hooks,
    bare_optimizer,
    bare_scheduler,
    check_onecycle_given,
    check_rates,
    joined,
    scheduler_kind,
)
from rewound.loops.snapshot import Stateful, Subjects
from rewound.method.pruning.mask import bare_model
from rewound.method.schedule import Schedule
from rewound.tasks import ranks

Thing = TypeVar("Thing")


def given_subjects(
    course: Course,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    scheduler: Scheduler | Schedule | Sequence[Scheduler] | None,
    also: Sequence[Stateful | torch.Generator],
) -> Subjects:
    """What the script gives, unwrapped, if each has the right type."""
    check_kind("also", also, (list, tuple), "give a list of objects with a state_dict")
    optimizers = [bare_optimizer(each) for each in _as_list(optimizer)]
    _check_types(model, optimizers, course.order)
    if course.slim and (ranks.world() > 1 or isinstance(model, DistributedDataParallel | DataParallel)):
        raise InputError(
            "slim networks are trained by one process, since DistributedDataParallel and DataParallel rely on the "
            "shapes that a model has at the start; leave out slim, and call rewound.slim after the run"
        )
    return Subjects(
        model=bare_model(model),
        optimizer=joined(optimizers),
        schedulers=() if scheduler is None or isinstance(scheduler, Schedule) else _as_list(scheduler),
        also=[thing for thing in also if not isinstance(thing, torch.Generator)],
        generators=[thing for thing in also if isinstance(thing, torch.Generator)],
        is_compiled=_is_compiled(model),
    )


def check_subjects(course: Course, subjects: Subjects) -> None:
    """An error for subjects that cannot be pruned, rewound or saved."""
    _check_schedulers(subjects)
    check_rates(subjects.optimizer)
    if not course.adopt:
        check_onecycle_given(subjects.schedulers, subjects.optimizer)
    course.check(subjects)
    course.counts(subjects).warn_of_small_part()
    subjects.check()
    check_also(subjects)
    trained = subjects.trained_weights
    weights = {name: trained[name] for name in course.the_pruner.selected(trained, subjects.model)}
    check_averages(averages(subjects), weights, subjects.model, slim=course.slim)


def _check_types(model: nn.Module, optimizers: Sequence[Optimizer], order: str) -> None:
    """An error for a model or optimizer of the wrong type, and for parameters in several optimizers."""
    check_kind("model", model, nn.Module, order)
    for optimizer in optimizers:
        check_kind("optimizer", optimizer, Optimizer, order)
        add_missing_hooks(optimizer)
    stepped = [{id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
    if len(set().union(*stepped)) < sum(map(len, stepped)):
        raise InputError(
            "two optimizers share parameters, and both would update them; give each parameter to one of them"
        )


def _check_schedulers(subjects: Subjects) -> None:
    """An error for a scheduler that moves the rate of another optimizer."""
    groups = {id(group) for group in subjects.optimizer.param_groups}
    for scheduler in subjects.schedulers:
        moved = bare_optimizer(getattr(bare_scheduler(scheduler), "optimizer", subjects.optimizer))
        if isinstance(moved, Optimizer) and groups.isdisjoint(map(id, moved.param_groups)):
            raise InputError(
                f"{scheduler_kind(scheduler)} drives another optimizer ({type(moved).__name__}) than the one "
                "given, whose rate would never move; give the scheduler made for this optimizer"
            )


def _is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile is around the model or a part of it."""
    parts = model.modules()
    return any(hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) for part in parts)


def _as_list(given: Thing | Sequence[Thing]) -> Sequence[Thing]:
    """One object, or several; a text, which is wrong here, is one object and not one for each letter."""
    return given if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
