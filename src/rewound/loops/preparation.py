"""Before the first epoch of a user's own loop: what its script gave is unwrapped, checked and made into a run.

run = rewound.epochs(90, model, optimizer, scheduler, compression=10, checkpoint="run/")
for epoch in run:  # was: for epoch in range(90)
    train_one_epoch(...)
    scheduler.step()
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import InputError, as_path, as_whole, check_kind, shown
from rewound.loops.averages import warn_of_dense
from rewound.loops.beside import averages, check_beside
from rewound.loops.course import Course, Init, Unit, trained_weights
from rewound.loops.groups import check_rates
from rewound.loops.joint import complete, joint
from rewound.loops.loop import Epochs, Steps
from rewound.loops.progress import Progress
from rewound.loops.recording import Recording
from rewound.loops.rehearsal import adopted
from rewound.loops.run import Run
from rewound.loops.schedulers import Scheduler, check_given, scheduler_kind
from rewound.loops.snapshot import Stateful, Subjects
from rewound.loops.unwrapping import bare_model, bare_optimizer, bare_scheduler, is_compiled, listed
from rewound.method.algorithm import COMPRESSION, RATE, TECHNIQUE, by_compression, longest_time
from rewound.method.pruning.pruner import Pruner, as_pruner
from rewound.method.schedule import Schedule
from rewound.method.technique import technique_named


@by_compression
def epochs(
    training_epochs: int,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    scheduler: Scheduler | Schedule | Sequence[Scheduler] | None = None,
    *,
    compression: float = COMPRESSION,
    technique: str = TECHNIQUE,
    retrain_epochs: int | None = None,
    rate: float = RATE,
    one_shot: bool = False,
    pruner: Pruner | None = None,
    checkpoint: str | Path | None = None,
    also: Sequence[Stateful | torch.Generator] = (),
    init: Init | None = None,
    max_drop: float | None = None,
    final: float | None = None,
    adopt: bool = False,
    steps_per_epoch: int = 1,
    resume: bool = True,
    say: Callable[[str], None] = print,
) -> Epochs:
    """The epochs of training `model` and pruning it to `compression`: the paper's Algorithm 1 unless told otherwise.

    It yields 0, 1, 2, ... through the dense run and all levels, no number twice; `run.schedule_epoch` is the epoch of
    the original schedule. Each level prunes `rate` of the remaining weights; `one_shot` prunes all at once. A level
    takes `retrain_epochs`, by default `training_epochs`, and 0.9 of them where weights are rewound.

    `optimizer` may be a list (Muon for matrices, AdamW for the rest), if the loop steps them always in the same order.
    `also` takes objects with a `state_dict` that belong to the weights (an EMA, a GradScaler, a critic that is trained
    and not pruned), which are saved and rewound with them; and generators that the loop draws from, which are saved and
    not rewound. `init` draws fresh weights in place, for reinitialization. `max_drop` ends the run once two levels in a
    row were reported worse than the dense network by more than that. `final` is the learning rate that holds after the
    end of the schedule.

    `checkpoint` is a folder: the same script run again continues there, after `kill -9` too. A larger `compression`
    goes on, too; other arguments (from `training_epochs` to `pruner`, `final` and `adopt`), another kind of optimizer
    or other shapes of weights are an error. Its folder `levels/` holds every level as a ticket, with a table.

    `adopt` takes a network that was trained elsewhere: there is no dense run. The schedule is then a `Schedule`, or
    what a new `scheduler` does when it is stepped `steps_per_epoch` times an epoch, once by default; without
    such a scheduler that number is an error. With `resume=False` somebody else (a Trainer) restores model and
    optimizer, and calls `load_state_dict`.

    >>> model = nn.Linear(8, 4)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> run = epochs(2, model, sgd, compression=1.5)
    >>> for epoch in run:
    ...     model(torch.randn(16, 8)).square().mean().backward()
    ...     sgd.step()
    rewound: 2 dense epochs, then 2 levels of 2 epochs by lr-rewinding to 1.5x (1.44x of the whole network): 6 epochs
    dense, epoch 2 of 6
    level 1 of 2: 1.25x (density 0.8), 1.24x of the whole network, epoch 4 of 6
    level 2 of 2: 1.50x (density 0.6667), 1.44x of the whole network, epoch 6 of 6
    >>> run.mask
    Mask(1 tensors, 21 of 32 weights kept, density 0.6562)
    """
    run = _prepared(
        "epoch",
        training_epochs,
        retrain_epochs,
        model,
        optimizer,
        scheduler,
        compression=compression,
        technique=technique,
        rate=rate,
        one_shot=one_shot,
        pruner=pruner,
        checkpoint=checkpoint,
        also=also,
        init=init,
        max_drop=max_drop,
        final=final,
        adopt=adopt,
        steps_per_epoch=steps_per_epoch,
        resume=resume,
        say=say,
    )
    return Epochs(run)


@by_compression
def steps(
    training_steps: int,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    scheduler: Scheduler | Schedule | Sequence[Scheduler] | None = None,
    *,
    compression: float = COMPRESSION,
    technique: str = TECHNIQUE,
    retrain_steps: int | None = None,
    rate: float = RATE,
    one_shot: bool = False,
    pruner: Pruner | None = None,
    checkpoint: str | Path | None = None,
    also: Sequence[Stateful | torch.Generator] = (),
    init: Init | None = None,
    max_drop: float | None = None,
    final: float | None = None,
    adopt: bool = False,
    resume: bool = True,
    say: Callable[[str], None] = print,
) -> Steps:
    """The same as `epochs` for a loop that counts steps: it yields 0, 1, 2, ... through the dense run and all levels.

    `run.schedule_step` is the step of the original schedule. A level takes `retrain_steps`, by default
    `training_steps`, and 0.9 of them where weights are rewound. The other arguments are those of `epochs`.

    A step may have several optimizer steps, or none, as where gradients are accumulated or a GradScaler skips one. A
    run with a `checkpoint` is saved every minute and when a level ends, after a step with an optimizer step. A resumed
    one yields the number of the first step that is not done: the loop takes its batch by that number, since where a
    data loader stood is not saved. A new scheduler that is given with `adopt` is taken for one stepped in every step.

    >>> model = nn.Linear(8, 4)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> run = steps(50, model, sgd, compression=1.5, technique="fine-tuning", retrain_steps=40)
    >>> for step in run:
    ...     sgd.zero_grad()
    ...     model(torch.randn(16, 8)).square().mean().backward()
    ...     sgd.step()
    rewound: 50 dense steps, then 2 levels of 40 steps by fine-tuning to 1.5x (1.44x of the whole network): 130 steps
    dense, step 50 of 130
    level 1 of 2: 1.25x (density 0.8), 1.24x of the whole network, step 90 of 130
    level 2 of 2: 1.50x (density 0.6667), 1.44x of the whole network, step 130 of 130
    >>> run.mask
    Mask(1 tensors, 21 of 32 weights kept, density 0.6562)
    """
    run = _prepared(
        "step",
        training_steps,
        retrain_steps,
        model,
        optimizer,
        scheduler,
        compression=compression,
        technique=technique,
        rate=rate,
        one_shot=one_shot,
        pruner=pruner,
        checkpoint=checkpoint,
        also=also,
        init=init,
        max_drop=max_drop,
        final=final,
        adopt=adopt,
        steps_per_epoch=1,
        resume=resume,
        say=say,
    )
    return Steps(run)


def _prepared(
    unit: Unit,
    training_time: int,
    retraining_time: int | None,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    scheduler: Scheduler | Schedule | Sequence[Scheduler] | None,
    *,
    compression: float,
    technique: str,
    rate: float,
    one_shot: bool,
    pruner: Pruner | None,
    checkpoint: str | Path | None,
    also: Sequence[Stateful | torch.Generator],
    init: Init | None,
    max_drop: float | None,
    final: float | None,
    adopt: bool,
    steps_per_epoch: int,
    resume: bool,
    say: Callable[[str], None],
) -> Run:
    """The run that was asked for, if all that it needs is there."""
    order = f"the order is {unit}s(training_{unit}s, model, optimizer, scheduler)"
    longest = longest_time(technique_named(technique), as_whole(f"training_{unit}s", training_time, order))
    course = Course(
        unit=unit,
        training_time=training_time,
        compression=compression,
        technique=technique,
        retraining_time=max(1, int(longest)) if retraining_time is None else retraining_time,
        rate=rate,
        one_shot=one_shot,
        pruner=as_pruner(pruner),
        final=final,
        adopt=adopt,
        max_drop=max_drop,
        init=init,
    )
    _check_arguments(scheduler, adopt, steps_per_epoch, resume, say)
    folder = None if checkpoint is None else as_path("checkpoint", checkpoint)
    subjects = _subjects(model, optimizer, scheduler, also, order)
    _check_subjects(course, subjects)
    progress = Progress()
    if adopt:
        progress.recording = _adopted(course, subjects, scheduler, steps_per_epoch)
    return Run(course, subjects, progress, folder, resume, say)


def _check_arguments(scheduler: object, adopt: bool, steps_per_epoch: int, resume: bool, say: object) -> None:
    """Whether what is neither of the course nor a subject can be used."""
    if isinstance(scheduler, Schedule) and not adopt:
        raise InputError("a Schedule is for adopt=True; a dense run is recorded, so give the scheduler that drives it")
    if as_whole("steps_per_epoch", steps_per_epoch) < 1:
        raise InputError(f"steps_per_epoch={steps_per_epoch}: a scheduler is stepped at least once an epoch")
    if steps_per_epoch != 1 and (not adopt or isinstance(scheduler, Schedule)):
        raise InputError(
            f"steps_per_epoch={steps_per_epoch} says how often an adopted network's new scheduler is stepped, which a "
            f"{'Schedule says itself' if adopt else 'dense run records'}; leave it out"
        )
    check_kind("resume", resume, bool, "give True or False")
    if not callable(say):
        raise InputError(f"say must be a function of a text, not {shown(say)}; for silence give lambda text: None")


def _subjects(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    scheduler: Scheduler | Schedule | Sequence[Scheduler] | None,
    also: Sequence[Stateful | torch.Generator],
    order: str,
) -> Subjects:
    """What is trained, out of what is around it; each is of its kind."""
    check_kind("also", also, (list, tuple), "give a list of objects with a state_dict")
    optimizers = [bare_optimizer(each) for each in listed(optimizer)]
    _check_kinds(model, optimizers, order)
    return Subjects(
        model=bare_model(model),
        optimizer=joint(optimizers),
        schedulers=() if scheduler is None or isinstance(scheduler, Schedule) else listed(scheduler),
        also=[thing for thing in also if not isinstance(thing, torch.Generator)],
        generators=[thing for thing in also if isinstance(thing, torch.Generator)],
        is_compiled=is_compiled(model),
    )


def _check_subjects(course: Course, subjects: Subjects) -> None:
    """Whether they can be pruned, rewound and saved."""
    _check_schedulers(subjects)
    check_rates(subjects.optimizer)
    if not course.adopt:
        check_given(subjects.schedulers, subjects.optimizer)
    course.check(subjects.model, subjects.optimizer)
    course.counts(subjects.model, subjects.optimizer).warn_of_small_part()
    subjects.check()
    check_beside(subjects)
    trained = trained_weights(subjects.model, subjects.optimizer)
    weights = {name: trained[name] for name in course.pruner.selected(trained, subjects.model)}
    warn_of_dense(averages(subjects), weights, subjects.model)


def _adopted(course: Course, subjects: Subjects, scheduler: object, steps_per_epoch: int) -> Recording:
    """What the dense run of an adopted network did."""
    schedule = scheduler if isinstance(scheduler, Schedule) else subjects.schedulers
    if isinstance(schedule, Schedule) and course.final is not None:
        schedule = replace(schedule, declared_final=None)  # `final` says what holds after its end
    return adopted(subjects.optimizer, schedule, course.part_lengths, course.unit, steps_per_epoch)


def _check_kinds(model: nn.Module, optimizers: Sequence[Optimizer], order: str) -> None:
    """Whether each thing is what its place asks for, and each parameter in one optimizer alone."""
    check_kind("model", model, nn.Module, order)
    for optimizer in optimizers:
        check_kind("optimizer", optimizer, Optimizer, order)
        complete(optimizer)
    stepped = [{id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
    if len(set().union(*stepped)) < sum(map(len, stepped)):
        raise InputError(
            "two optimizers share parameters, and both would update them; give each parameter to one of them"
        )


def _check_schedulers(subjects: Subjects) -> None:
    """Whether the schedulers move this optimizer's rate."""
    groups = {id(group) for group in subjects.optimizer.param_groups}
    for scheduler in subjects.schedulers:
        moved = bare_optimizer(getattr(bare_scheduler(scheduler), "optimizer", subjects.optimizer))
        if isinstance(moved, Optimizer) and groups.isdisjoint(map(id, moved.param_groups)):
            raise InputError(
                f"{scheduler_kind(scheduler)} drives another optimizer ({type(moved).__name__}) than the one "
                "given, whose rate would never move; give the scheduler made for this optimizer"
            )
