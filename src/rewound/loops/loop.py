"""`rewound.epochs` and `rewound.steps`: what a user's own training loop calls and iterates over.

What the script gives is unwrapped, checked and made into a run, before the first epoch:

run = rewound.epochs(90, model, optimizer, scheduler, compression=10, checkpoint="run/")
for epoch in run:  # was: for epoch in range(90)
    train_one_epoch(...)
    scheduler.step()
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Unpack

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import InputError, as_path, as_whole, check_kind, shown
from rewound.loops.course import Course, Init
from rewound.loops.example import Example, given_example
from rewound.loops.iteration import iterated
from rewound.loops.looprun import LoopRun
from rewound.loops.optimizers import Scheduler
from rewound.loops.progress import Progress, Reached
from rewound.loops.recording import Recording, adopted, scheduled
from rewound.loops.snapshot import Stateful, Subjects
from rewound.loops.structure import Structure
from rewound.loops.subjects import check_subjects, given_subjects
from rewound.method.choices import Chosen, takes_choices
from rewound.method.pruning.mask import Mask
from rewound.method.schedule import Schedule


@takes_choices
def epochs(
    training_epochs: int,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    scheduler: Scheduler | Schedule | Sequence[Scheduler] | None = None,
    *,
    retrain_epochs: int | None = None,
    checkpoint: str | Path | None = None,
    also: Sequence[Stateful | torch.Generator] = (),
    init: Init | None = None,
    adopt: bool = False,
    steps_per_epoch: int = 1,
    example_inputs: object = None,
    example_keywords: Mapping[str, object] | None = None,
    resume: bool = True,
    say: Callable[[str], None] = print,
    **chosen: Unpack[Chosen],
) -> "Epochs":
    """The epochs of training `model` and pruning it to `compression`: by default the paper's Algorithm 1.

    It yields 0, 1, 2, ... through the dense run and all levels, no number twice; `run.schedule_epoch` is the epoch of
    the original schedule. Each level prunes `rate` of the remaining weights; `one_shot` prunes all at once, and
    `technique="gradual"` in many small steps while it trains. A level takes `retrain_epochs`, by default
    `training_epochs`, and 0.9 of them where weights are rewound.

    `optimizer` may be a list (Muon for matrices, AdamW for the rest), if the loop steps them always in the same order.
    `also` takes objects with a `state_dict` that belong to the weights (an EMA, a GradScaler, a critic that is trained
    and not pruned), which are saved and rewound with them; and generators that the loop draws from, which are saved and
    not rewound. `init` draws fresh weights in place, for reinitialization. `max_drop` ends the run once two levels in a
    row were reported worse than the dense network by more than that. `final` is the learning rate that holds after the
    end of the schedule.

    `checkpoint` is a folder: when the same script is run again, it continues there, also after `kill -9`. A larger
    `compression` continues, too; other arguments (from `training_epochs` to `pruner`, `final` and `adopt`), another
    kind of optimizer or other shapes of weights are an error. Its folder `levels/` holds every level as a ticket, with
    a table.

    `adopt` takes a network that was trained elsewhere: there is no dense run. The schedule is then a `Schedule`, or
    what a new `scheduler` does when it is stepped `steps_per_epoch` times an epoch, once by default; without such a
    scheduler that number is an error. With `resume=False` the caller (a Trainer) restores model and optimizer, and
    calls `load_state_dict`.

    A `pruner` of pattern "unit" or "filter" removes whole units of the network (`units`), which are found by running it
    on an example: what the loop calls the model with in its first pass, or `example_inputs` (and `example_keywords`),
    which an adopted and a compiled network need. With `slim`, model, optimizer and averages in `also` become small in
    place when a level begins; they stay the same objects.

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
    course = Course(
        unit="epoch", training_time=training_epochs, retraining_time=retrain_epochs, adopt=adopt, init=init, **chosen
    )
    subjects = given_subjects(course, model, optimizer, scheduler, also)
    example = given_example(example_inputs, example_keywords)
    return Epochs(_run(course, subjects, scheduler, steps_per_epoch, example, checkpoint, resume, say))


@takes_choices
def steps(
    training_steps: int,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    scheduler: Scheduler | Schedule | Sequence[Scheduler] | None = None,
    *,
    retrain_steps: int | None = None,
    checkpoint: str | Path | None = None,
    also: Sequence[Stateful | torch.Generator] = (),
    init: Init | None = None,
    adopt: bool = False,
    example_inputs: object = None,
    example_keywords: Mapping[str, object] | None = None,
    resume: bool = True,
    say: Callable[[str], None] = print,
    **chosen: Unpack[Chosen],
) -> "Steps":
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
    course = Course(
        unit="step", training_time=training_steps, retraining_time=retrain_steps, adopt=adopt, init=init, **chosen
    )
    subjects = given_subjects(course, model, optimizer, scheduler, also)
    example = given_example(example_inputs, example_keywords)
    return Steps(_run(course, subjects, scheduler, 1, example, checkpoint, resume, say))


class _Loop:
    """A run in a user's own loop: iterate over it once."""

    def __init__(self, run: LoopRun) -> None:
        self._run = run

    def __iter__(self) -> Generator[int]:
        self._run.begin()
        return iterated(self._run)

    def __repr__(self) -> str:
        last, done, units = len(self._run.levels) - 1, self._run.progress.epoch, f"{self._run.course.unit}s"
        where = f"level {self.level} of {last}, density {self.density:.4g}"
        return f"{units.capitalize()}({done:,} of {len(self):,} {units} done, {where})"

    def __len__(self) -> int:
        """All epochs or steps, those already done included; `max_drop` may end the run sooner."""
        return self._run.course.length

    @property
    def ends(self) -> tuple[int, ...]:
        """How many epochs or steps are done when each level ends, the dense run first."""
        return tuple(accumulate(level.length for level in self._run.levels))

    @property
    def level(self) -> int:
        """The present level; 0 is the dense run."""
        return self._run.level

    @property
    def density(self) -> float:
        """The density that the present level prunes to; 1 in the dense run."""
        return self._run.present.density

    @property
    def mask(self) -> Mask | None:
        """The mask of the present level, after the loop that of the returned level; None for a dense network."""
        return self._run.progress.mask

    @property
    def levels(self) -> tuple[Reached, ...]:
        """The levels that have ended, the dense run first."""
        return tuple(self._run.progress.reached)

    def report(self, accuracy: float, *, higher_is_better: bool = True, metric: str | None = None) -> None:
        """Report how good the network is now; the last report of a level counts for the level.

        `metric` is its name: by default "accuracy", or "loss" where lower is better. `max_drop` is in the same unit:
        0.01 for an accuracy of 0.97, 1 for one of 97 percent. Of several processes, rank 0's report counts, and the
        others need not report.
        """
        self._run.report(accuracy, higher_is_better, metric or ("accuracy" if higher_is_better else "loss"))

    def load_state_dict(self, state: dict[str, object], /) -> None:
        """Go on from a state that `state_dict` gave; whoever saved model and optimizer restores them."""
        self._run.load_state(state)


class Epochs(_Loop):
    """A run in a user's own loop: iterate over it once. `epochs` makes it."""

    @property
    def epochs_done(self) -> int:
        """How many epochs are done; known before the loop, too, for a progress bar: `tqdm(run, initial=...)`."""
        return self._run.done.epoch

    @property
    def steps_done(self) -> int:
        """How many optimizer steps were taken, in the dense run and all levels; known before the loop, too.

        A loop that computes its learning rate from a number of steps should use this one: a counter of its own starts
        again when a run is resumed. Of several optimizers, each step of each counts.
        """
        return self._run.done.steps_done

    @property
    def schedule_epoch(self) -> int:
        """The epoch of the original schedule whose learning rates are used now; from T on, its final ones.

        Where a rule draws the rates of a level, it is the epoch of the level.
        """
        return self._run.position

    @property
    def is_in_last_epoch(self) -> bool:
        """Whether the present epoch is the last of the run, as far as the reports of this process show."""
        return self._run.is_in_last_epoch

    def state_dict(self, *, epoch_ended: bool = True) -> dict[str, object]:
        """How far the run has come, with the states of what is in `also`: for a trainer's own checkpoints.

        An epoch in which a step was taken counts as done; with `epoch_ended=False` as begun, so that a run that loads
        this yields it again and goes on after the steps it has taken.
        """
        return self._run.state_dict(epoch_ended=epoch_ended)


class Steps(_Loop):
    """A run in a user's own loop that counts steps: iterate over it once. `steps` makes it."""

    @property
    def steps_done(self) -> int:
        """How many steps are done; known before the loop, too, for a progress bar: `tqdm(run, initial=...)`."""
        return self._run.done.epoch

    @property
    def schedule_step(self) -> int:
        """The step of the original schedule whose learning rates are used now; from T on, its final ones.

        Where a rule draws the rates of a level, it is the step of the level.
        """
        return self._run.position

    @property
    def is_in_last_step(self) -> bool:
        """Whether the present step is the last of the run, as far as the reports of this process show."""
        return self._run.is_in_last_epoch

    def state_dict(self) -> dict[str, object]:
        """How far the run has come, with the states of what is in `also`: for a trainer's own checkpoints.

        The present step counts as done if the optimizer has taken one in it.
        """
        return self._run.state_dict(epoch_ended=True)


# Before the first epoch


def _run(
    course: Course,
    subjects: Subjects,
    scheduler: object,
    steps_per_epoch: int,
    example: Example | None,
    checkpoint: str | Path | None,
    resume: bool,
    say: Callable[[str], None],
) -> LoopRun:
    """The run that was asked for, after all checks."""
    _check_arguments(scheduler, course.adopt, steps_per_epoch, resume, say)
    folder = None if checkpoint is None else as_path("checkpoint", checkpoint)
    check_subjects(course, subjects)
    progress = Progress()
    if course.adopt:
        progress.recording = _adopted(course, subjects, scheduler, steps_per_epoch)
    run = LoopRun(course, subjects, progress, folder, resume, say, _structure(course, subjects, example))
    if course.adopt:
        run.updates_of(course.levels[0])  # an error if gradual pruning has too few steps
    return run


def _check_arguments(scheduler: object, adopt: bool, steps_per_epoch: int, resume: bool, say: object) -> None:
    """An error for arguments that are neither of the course nor subjects and cannot be used."""
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


def _adopted(course: Course, subjects: Subjects, scheduler: object, steps_per_epoch: int) -> Recording:
    """The learning rates of the dense run of an adopted network."""
    if not isinstance(scheduler, Schedule):
        steps = [length * steps_per_epoch for length in course.part_lengths]
        return adopted(subjects.optimizer, subjects.schedulers, steps)
    # `final` takes the place of what the schedule declares to hold after its end.
    schedule = scheduler if course.final is None else replace(scheduler, declared_final=None)
    return scheduled(subjects.optimizer, schedule, course.part_lengths, course.unit)


def _structure(course: Course, subjects: Subjects, example: Example | None) -> Structure | None:
    """The units of the network, where the pruner removes those; what an example shows of them is checked."""
    pruner = course.the_pruner
    if not pruner.by_units:
        if example is not None:
            raise InputError(
                f"example_inputs are for pruning whole units, and pattern {pruner.pattern!r} prunes single weights; "
                'leave them out, or give pruner=Pruner(pattern="unit")'
            )
        return None
    if example is None and (course.adopt or subjects.is_compiled):
        why = "there is no dense run to see it in" if course.adopt else "a compiled model does not show it"
        raise InputError(
            f"pattern {pruner.pattern!r} needs to know what the model takes, and {why}; give example_inputs= (and "
            "example_keywords=), a batch of it"
        )
    structure = Structure(subjects, pruner, course.levels[-1].density, example, course.slim)
    if example is not None:
        structure.check()
    return structure
