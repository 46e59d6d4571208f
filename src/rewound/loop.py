"""The algorithm around a user's own training loop: an iterator over epochs that prunes and rewinds between them.

    run = rewound.epochs(90, model, optimizer, scheduler, compression=10, checkpoint="run/")
    for epoch in run:  # was: for epoch in range(90)
        train_one_epoch(...)
        scheduler.step()

It yields the T epochs of the dense run and records what the schedule does to the optimizer. Then, for each of
`algorithm.levels`, it prunes, puts back what the technique rewinds, and yields again, with the mask attached and the
recorded learning rates set before every step; the scheduler itself rests until the loop ends.
"""

import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from torch import nn
from torch.optim.optimizer import Optimizer

from rewound import ranks
from rewound.algorithm import KEEP, check_final, has_dropped, returned
from rewound.checkpoints import Folder, level_name, progress_in, rewind_name
from rewound.course import Course, Init, adopted, bare, inner
from rewound.errors import InputError
from rewound.mask import Mask
from rewound.progress import Progress, Reached
from rewound.pruner import Pruner
from rewound.recording import Recording, Scheduler, Value, assign, resting
from rewound.rewinding import pruned
from rewound.schedule import Schedule
from rewound.snapshot import Content, Stateful, Subjects

SAVE_SECONDS = 60.0
"""How much work a killed process loses, at most, beside the epoch it was in."""


def epochs(
    training_epochs: int,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Scheduler | Schedule | Sequence[Scheduler] | None = None,
    *,
    compression: float = 10.0,
    technique: str = "lr-rewinding",
    retrain_epochs: int | None = None,
    rate: float = 1 - KEEP,
    one_shot: bool = False,
    pruner: Pruner | None = None,
    checkpoint: str | Path | None = None,
    also: Sequence[Stateful] = (),
    init: Init | None = None,
    max_drop: float | None = None,
    final: float | None = None,
    adopt: bool = False,
    steps_per_epoch: int = 1,
    resume: bool = True,
    say: Callable[[str], None] = print,
) -> "Epochs":
    """The epochs of training `model` and pruning it to `compression`: the paper's Algorithm 1 unless told otherwise.

    `also` are objects with a `state_dict` that belong to the weights (an EMA, a GradScaler): saved, and rewound with
    them. `checkpoint` is a folder: the same script run again continues there, after `kill -9` too. `init` draws fresh
    weights in place, for reinitialization. `max_drop` ends the run once two levels in a row were reported worse than
    the dense network by more. `final` is the learning rate that holds after the end of the schedule.

    `adopt` takes a network that was trained elsewhere: there is no dense run, and the schedule is what the new
    `scheduler` does, stepped once an epoch or `steps_per_epoch` times, or a `Schedule`. With `resume=False` somebody
    else restores model and optimizer (a Trainer), and calls `load_state_dict`.

    >>> import torch
    >>> model = nn.Linear(8, 4)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> run = epochs(2, model, sgd, compression=1.5)
    >>> for epoch in run:
    ...     model(torch.randn(16, 8)).square().mean().backward()
    ...     sgd.step()
    rewound: 2 dense epochs, then 2 levels of 2 epochs by lr-rewinding to 1.5x: 6 epochs
    dense, epoch 2 of 6
    level 1 of 2: 1.25x (density 0.8), epoch 4 of 6
    level 2 of 2: 1.50x (density 0.6667), epoch 6 of 6
    >>> run.mask
    Mask(1 tensors, 21 of 32 weights kept, density 0.6562)
    """
    course = Course(
        training_epochs,
        compression,
        technique,
        training_epochs if retrain_epochs is None else retrain_epochs,
        rate,
        one_shot,
        pruner or Pruner(),
        final,
        adopt,
        max_drop,
        init,
    )
    schedule = scheduler if isinstance(scheduler, Schedule) else None
    if schedule is not None and not adopt:
        raise InputError("a Schedule is for adopt=True; a dense run is recorded, so give the scheduler that drives it")
    subjects = Subjects(bare(model), inner(optimizer), _several(scheduler), also)
    course.check(subjects.model, subjects.optimizer)
    subjects.check()
    progress = Progress()
    if adopt:
        progress.recording = adopted(
            subjects.optimizer, schedule or subjects.schedulers, training_epochs, steps_per_epoch
        )
    return Epochs(course, model, subjects, progress, None if checkpoint is None else Path(checkpoint), resume, say)


class Epochs:
    """A run in a user's own loop: iterate over it once. `epochs` makes it."""

    def __init__(
        self,
        course: Course,
        model: nn.Module,
        subjects: Subjects,
        progress: Progress,
        folder: Path | None,
        resume: bool,
        say: Callable[[str], None],
    ) -> None:
        self._course, self._model, self._subjects, self._progress = course, model, subjects, progress
        self._path, self._resumes, self._speak = folder, resume, say
        self._levels = course.levels
        self._begun = self._handed_over = False
        self._replay: Iterator[list[dict[str, Value]]] = iter(())
        self._saved_at = time.monotonic()

    # What a loop may ask

    def __len__(self) -> int:
        """All epochs, those already done included; `max_drop` may end the run sooner."""
        return self._course.dense_epochs + sum(level.length for level in self._levels)

    @property
    def level(self) -> int:
        """The present level; 0 is the dense run."""
        return self._progress.level

    @property
    def density(self) -> float:
        """What the present level was asked to prune to; 1 in the dense run."""
        return self._levels[self.level - 1].density if self.level else 1.0

    @property
    def schedule_epoch(self) -> int:
        """The epoch of the original schedule whose learning rates are used now; from T on, its final ones."""
        start = self._levels[self.level - 1].schedule_from if self.level else 0
        return (start or 0) + self._progress.done

    @property
    def mask(self) -> Mask | None:
        """The mask of the present level, after the loop that of the returned one; None for a dense network."""
        return self._progress.mask

    @property
    def levels(self) -> tuple[Reached, ...]:
        """What has been reached so far, the dense run first."""
        return tuple(self._progress.reached)

    @property
    def is_in_last_epoch(self) -> bool:
        """Whether the run ends with the present epoch, by what has been reported in it so far."""
        progress = self._progress
        if progress.done + 1 < self._length:
            return False
        reached = Reached(self.level, self.density, progress.epoch + 1, progress.accuracy)
        return self._is_over(replace(progress, reached=[*progress.reached, reached]))

    def report(self, accuracy: float, *, higher_is_better: bool = True) -> None:
        """Tell how good the network is now; what is told in a level's last epoch counts for the level."""
        self._progress.accuracy = float(accuracy)
        self._progress.higher_is_better = higher_is_better

    def state_dict(self, *, epoch_ended: bool = True) -> dict[str, object]:
        """How far the run has come, without the tensors it trains: for a trainer's own checkpoints.

        An epoch in which a step was taken counts as done; with `epoch_ended=False` as begun, so that a run that loads
        this yields it again and goes on after the steps it has taken.
        """
        progress = self._progress
        if epoch_ended and progress.steps:
            progress = replace(progress, done=progress.done + 1, epoch=progress.epoch + 1, steps=0)
        return progress.state_dict()

    def load_state_dict(self, state: dict[str, object], /) -> None:
        """Go on from there; model and optimizer are restored by whoever saved them."""
        if self._begun:
            raise InputError("this run is being iterated over; load its state before the loop")
        progress = Progress.from_state_dict(state)
        asked = [level.density for level in self._levels[: len(progress.densities)]]
        if progress.densities != asked:
            raise InputError(
                f"this state was pruned to densities {progress.densities}, not {asked}; give the same arguments"
            )
        self._progress, self._handed_over = progress, True

    # The run

    def __iter__(self) -> Generator[int]:
        if self._begun:
            raise InputError("this run has been iterated over; make a new one with rewound.epochs to go on")
        self._begun = True
        return self._run()

    def _run(self) -> Generator[int]:
        with _folder(self._path) as self._folder:
            self._start()
            while True:
                yield from self._train()
                if self._is_over(self._progress):
                    break
                self._prune()
            self._give_back()

    def _start(self) -> None:
        course, progress = self._course, self._progress
        content = self._folder.resumable([level.density for level in self._levels]) if self._resumes else None
        content = None if self._handed_over else content
        past_dense = content is not None and bool(progress_in(content).densities)
        arguments = course.arguments(self._subjects.model, self._subjects.optimizer)
        self._folder.claim(arguments, ["compression"] if past_dense else ["compression", "final"], check=self._resumes)
        if content is not None:
            self._subjects.resume(content)
            self._progress = progress = progress_in(content)
        count, length = len(self._levels), self._levels[0].length
        self._say(
            f"rewound: {f'{course.dense_epochs} dense epochs, then ' if course.dense_epochs else ''}"
            f"{count} level{'s' * (count > 1)} of {length} epochs by {course.technique} to {course.compression:g}x: "
            f"{len(self):,} epochs{f', {progress.epoch:,} of them done' if progress.epoch else ''}"
        )
        if course.adopt and not progress.epoch and not self._subjects.optimizer.state:
            self._say("the optimizer has no state: momentum and its like start empty")

    def _train(self) -> Iterator[int]:
        """The epochs that are left of the present level."""
        progress, optimizer = self._progress, self._subjects.optimizer
        with ExitStack() as hooks:
            if progress.mask is not None:
                hooks.enter_context(progress.mask.attached(self._model, optimizer))
                hooks.enter_context(resting(self._subjects.schedulers, optimizer))
            hooks.callback(optimizer.register_step_pre_hook(self._before_step).remove)
            hooks.callback(optimizer.register_step_post_hook(self._after_step).remove)
            while progress.done < self._length:
                positions = self._begin_epoch()
                yield progress.epoch
                self._end_epoch(positions)
        if len(progress.reached) == self.level:
            self._end_level()

    @property
    def _length(self) -> int:
        return self._levels[self.level - 1].length if self.level else self._course.dense_epochs

    def _begin_epoch(self) -> list[object]:
        progress = self._progress
        resumed = progress.steps > 0  # in the middle of it
        if self.level:
            replay = islice(self._recording.replayed(self.schedule_epoch), progress.steps, None)
            first = next(replay)
            self._assign(first)  # for a loop that looks at its learning rate before it steps
            self._replay = chain((first,), replay)
        elif not resumed:
            if progress.done in self._course.rewound_to:
                self._folder.write(rewind_name(progress.done), self._content())
            progress.recording.begin_epoch()
        if not resumed:
            progress.accuracy = None
        return self._positions()

    def _end_epoch(self, positions: list[object]) -> None:
        progress = self._progress
        if not progress.steps:
            raise InputError(
                f"no optimizer step was taken in epoch {progress.epoch}: give rewound.epochs the optimizer of the loop"
            )
        if self._resumes and not progress.epoch and not self.level:  # a trainer steps its schedulers when it likes
            for scheduler, before, now in zip(self._subjects.schedulers, positions, self._positions(), strict=True):
                if before is not None and before == now:
                    raise InputError(
                        f"{type(scheduler).__name__} was not stepped in epoch 0: call scheduler.step() in the loop, "
                        "or leave the scheduler out if something else sets the learning rate"
                    )
        progress.done, progress.epoch, progress.steps = progress.done + 1, progress.epoch + 1, 0
        overdue = ranks.from_first(time.monotonic() - self._saved_at > SAVE_SECONDS)
        if self._resumes and overdue and progress.done < self._length:
            self._folder.write("latest", self._content())
            self._saved_at = time.monotonic()

    def _positions(self) -> list[object]:
        return [getattr(scheduler, "last_epoch", None) for scheduler in self._subjects.schedulers]

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._progress.steps += 1
        if self.level:
            self._assign(next(self._replay))
        else:
            self._progress.recording.observe(optimizer)

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not self.level:
            self._progress.recording.disown(optimizer)

    def _assign(self, values: list[dict[str, Value]]) -> None:
        for group, mine in zip(self._subjects.optimizer.param_groups, values, strict=False):
            assign(group, mine)

    # Between levels

    def _end_level(self) -> None:
        progress = self._progress
        if self._course.max_drop is not None and progress.accuracy is None:
            raise InputError("max_drop needs run.report(accuracy=...) in the last epoch of every level; report it")
        progress.reached.append(Reached(self.level, self.density, progress.epoch, progress.accuracy))
        self._folder.write(level_name(self.level), self._content())
        # A larger compression goes on from the level before a last, smaller step, or from the dense run.
        self._folder.keep({0, self.level - 1, self.level, self._returned})
        self._saved_at = time.monotonic()
        self._say(progress.reached[-1].told(len(self._levels), len(self)))

    def _is_over(self, progress: Progress) -> bool:
        max_drop, higher = self._course.max_drop, progress.higher_is_better
        return progress.level == len(self._levels) or has_dropped(progress.scores, max_drop, higher_is_better=higher)

    @property
    def _returned(self) -> int:
        progress = self._progress
        return returned(progress.scores, self._course.max_drop, higher_is_better=progress.higher_is_better)

    def _prune(self) -> None:
        progress, level, recording = self._progress, self._levels[self.level], self._recording
        check_final(self._course.how, max(recording.final()), max(recording.peaks()))
        progress.mask = pruned(level, self._course, self._subjects, self._folder, progress.mask)
        progress.level, progress.done, progress.accuracy = self.level + 1, 0, None
        progress.densities.append(level.density)

    @property
    def _recording(self) -> Recording:
        """What the schedule did, with the declared final rate after its end."""
        recording, final = self._progress.recording, self._course.final
        return recording if final is None else recording.held(final)

    def _give_back(self) -> None:
        """Leave the model at the returned level."""
        if (chosen := self._returned) != self.level:
            content = self._folder.read(level_name(chosen))
            assert content is not None  # `_end_level` keeps it
            self._subjects.rewind(content)
            self._progress.mask = progress_in(content).mask
            self._say(f"returned: {f'level {chosen}' if chosen else 'the dense network'}, the last within max_drop")

    def _content(self) -> Content:
        return {**self._subjects.taken(), "progress": self._progress.state_dict()}

    def _say(self, text: str) -> None:
        if ranks.rank() == 0:
            self._speak(text)


def _several(scheduler: Scheduler | Schedule | Sequence[Scheduler] | None) -> Sequence[Scheduler]:
    if scheduler is None or isinstance(scheduler, Schedule):
        return ()
    return scheduler if isinstance(scheduler, Sequence) else (scheduler,)


@contextmanager
def _folder(path: Path | None) -> Iterator[Folder]:
    """The run's folder; a temporary one where nobody asked to resume."""
    if path is not None:
        yield Folder(path)
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Folder(Path(ranks.from_first(temporary)))
        ranks.from_first(None)  # nobody reads it any more
