"""What schedulers will do, or did, found by running through it: no optimizer takes a step, and all end as they were.

That is the recording of a training run that happened elsewhere, and the end of a schedule before its dense run has been
trained, for techniques that need a rate to retrain at.
"""

import warnings
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from itertools import accumulate, pairwise

from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import InputError
from rewound.loops.groups import hyperparameters, rate_of
from rewound.loops.joint import members
from rewound.loops.recording import Recording, Runs
from rewound.loops.schedulers import Scheduler, needed, position, scheduler_kind
from rewound.loops.snapshot import Subjects
from rewound.loops.unwrapping import bare_scheduler
from rewound.method.algorithm import check_final
from rewound.method.schedule import Piece, Schedule
from rewound.method.technique import Technique


def adopted(
    optimizer: Optimizer, scheduler: Schedule | Sequence[Scheduler], lengths: Sequence[int], unit: str, steps: int
) -> Recording:
    """The recording of a run that followed this schedule, or these schedulers, which take so many steps in a unit.

    `lengths` are those of the parts of the run (`course`).
    """
    if isinstance(scheduler, Schedule):
        return scheduled(optimizer, scheduler, lengths, unit)
    if len(scheduler) != (count := len(members(optimizer))):
        wanted = "one new scheduler" if count == 1 else "one new scheduler for each optimizer"
        raise InputError(
            f"adopt=True needs the schedule that trained the network, {wanted} or a Schedule, "
            f"not {len(scheduler)} schedulers"
        )
    for each in scheduler:
        if (stands_at := position(each)) > 0:
            raise InputError(
                f"the scheduler of an adopted network must be new, not at step {stands_at}: it is run through from its "
                "start"
            )
        if needs := needed(each):
            raise InputError(
                f"{scheduler_kind(each)} is stepped with {needs}, which is known only in training, so adopt=True "
                "cannot run through it; give the learning rates it took as a rewound.Schedule"
            )
    return rehearsed(optimizer, scheduler, [length * steps for length in lengths])


def rehearsed(optimizer: Optimizer, schedulers: Sequence[Scheduler], steps: Sequence[int]) -> Recording:
    """What schedulers would do over parts of so many steps."""
    before = [deepcopy(each.state_dict()) for each in schedulers]  # which may be its live lists
    groups = [dict(group) for group in optimizer.param_groups]
    tensors = [{name: v.clone() for name, v in group.items() if isinstance(v, Tensor)} for group in groups]
    recording = Recording()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of scheduler steps without optimizer steps
            for count in steps:
                recording.begin_epoch()
                for _ in range(count):
                    for _ in members(optimizer):  # each takes a step
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


def check_final_ahead(technique: Technique, subjects: Subjects, epochs: int, done: Recording | None = None) -> None:
    """An error for a schedule that will end too low for the technique, where that can be known.

    A loop is taken to step its schedulers once an epoch; after the first epoch, which is `done`, as often as it did in
    that one. A schedule that was made for another number of steps may end anywhere, so nothing is said of it.
    """
    optimizer, schedulers = subjects.optimizer, [bare_scheduler(each) for each in subjects.schedulers]
    taken_over = any("swa_lr" in group for group in optimizer.param_groups)  # the end may be a SWALR's
    if technique.lr != "final" or taken_over or len(schedulers) != len(members(optimizer)):
        return
    steps = 1 if done is None else min(map(position, schedulers))
    lengths = [_length(each) for each in schedulers]
    if not steps or any(length is None or abs(length - epochs * steps) > steps for length in lengths):
        return
    try:
        S = rehearsed(optimizer, schedulers, [steps] * (epochs - (done is not None))).schedule()
    except ValueError:  # of a OneCycleLR beyond its end, which the loop will meet, too
        return
    if done is not None:
        pieces = [piece._replace(until=piece.until + steps) for piece in S.pieces]
        S = Schedule(S.steps + steps, (Piece(steps, peak := max(done.peaks()), peak), *pieces))
    check_final(technique, S)


_LENGTHS = {
    lr_scheduler.CosineAnnealingLR: "T_max",
    lr_scheduler.LinearLR: "total_iters",
    lr_scheduler.OneCycleLR: "total_steps",
    lr_scheduler.PolynomialLR: "total_iters",
}


def _length(scheduler: object) -> int | None:
    """How many steps a scheduler of torch's or transformers' was made for; None where it does not say.

    Nor where a function of the script's own is behind it: it may count how often it is called.
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
    """The recording of a schedule with so many steps to each unit, one at least; groups keep their ratios."""
    steps, rest = divmod(schedule.steps, sum(lengths))
    if rest or not steps:
        raise InputError(
            f"a schedule of {schedule.steps:,} steps does not divide into {sum(lengths):,} {unit}s; "
            f"give it one step per {unit}, or the same number in each"
        )
    rates = [rate_of(hyperparameters(group)["lr"]) for group in optimizer.param_groups]
    taken = len(members(optimizer))  # steps of one batch
    ratios = [rate / max(rates) if max(rates) else 1.0 for rate in rates]
    ends = accumulate((length * steps for length in lengths), initial=0)
    cuts = [schedule.segments(start, stop) for start, stop in pairwise(ends)]
    groups: list[dict[str, list[Runs]]] = [
        {"lr": [[(rate * ratio, count * taken) for rate, count in cut] for cut in cuts]} for ratio in ratios
    ]
    recording = Recording(groups, len(lengths))
    return recording if schedule.declared_final is None else recording.ending_at(schedule.declared_final)
