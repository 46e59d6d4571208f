"""The recording of a training run that happened elsewhere, from the schedule it followed."""

import warnings
from collections.abc import Sequence
from copy import deepcopy

from torch import Tensor
from torch.optim.optimizer import Optimizer

from rewound.errors import InputError
from rewound.loops.groups import hyperparameters, rate_of
from rewound.loops.joint import members
from rewound.loops.recording import Recording, Runs
from rewound.loops.schedulers import Scheduler, needed, position, scheduler_kind
from rewound.schedule import Schedule


def adopted(
    optimizer: Optimizer, scheduler: Schedule | Sequence[Scheduler], epochs: int, steps_per_epoch: int
) -> Recording:
    """The recording of a run that followed this schedule, or these schedulers."""
    if isinstance(scheduler, Schedule):
        return scheduled(optimizer, scheduler, epochs)
    if len(scheduler) != (count := len(members(optimizer))):
        wanted = "one new scheduler" if count == 1 else "one new scheduler for each optimizer"
        raise InputError(
            f"adopt=True needs the schedule that trained the network, {wanted} or a Schedule, "
            f"not {len(scheduler)} schedulers"
        )
    for each in scheduler:
        if (steps := position(each)) > 0:
            raise InputError(
                f"the scheduler of an adopted network must be new, not at step {steps}: it is run through from its "
                "start"
            )
        if needs := needed(each):
            raise InputError(
                f"{scheduler_kind(each)} is stepped with {needs}, which is known only in training, so adopt=True "
                "cannot run through it; give the learning rates it took as a rewound.Schedule"
            )
    return rehearsed(optimizer, scheduler, epochs, steps_per_epoch)


def rehearsed(optimizer: Optimizer, schedulers: Sequence[Scheduler], epochs: int, steps_per_epoch: int) -> Recording:
    """What new schedulers would do over a whole training run, found by running through it; all end as they were."""
    before = [deepcopy(each.state_dict()) for each in schedulers]  # which may be its live lists
    groups = [dict(group) for group in optimizer.param_groups]
    tensors = [{name: v.clone() for name, v in group.items() if isinstance(v, Tensor)} for group in groups]
    recording = Recording()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of scheduler steps without optimizer steps
        for _ in range(epochs):
            recording.begin_epoch()
            for _ in range(steps_per_epoch):
                for _ in members(optimizer):  # each takes a step
                    recording.before_step(optimizer)
                for scheduler in schedulers:
                    scheduler.step()
    for scheduler, state in zip(schedulers, before, strict=True):
        scheduler.load_state_dict(state)
    for group, held, copies in zip(optimizer.param_groups, groups, tensors, strict=True):
        group.update(held)
        for name, copy in copies.items():
            held[name].copy_(copy)
    return recording


def scheduled(optimizer: Optimizer, schedule: Schedule, epochs: int) -> Recording:
    """The recording of a schedule whose steps are epochs, or so many steps to each epoch; groups keep their ratios."""
    steps, rest = divmod(schedule.steps, epochs)
    if rest:
        raise InputError(
            f"a schedule of {schedule.steps:,} steps does not divide into {epochs} epochs; "
            "give it one step per epoch, or the same number in each"
        )
    rates = [rate_of(hyperparameters(group)["lr"]) for group in optimizer.param_groups]
    taken = len(members(optimizer))  # steps of one batch
    ratios = [rate / max(rates) if max(rates) else 1.0 for rate in rates]
    cuts = [schedule.segments(epoch * steps, (epoch + 1) * steps) for epoch in range(epochs)]
    groups: list[dict[str, list[Runs]]] = [
        {"lr": [[(rate * ratio, count * taken) for rate, count in cut] for cut in cuts]} for ratio in ratios
    ]
    recording = Recording(groups, epochs)
    return recording if schedule.declared_final is None else recording.ending_at(schedule.declared_final)
