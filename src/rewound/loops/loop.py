"""The algorithm around a user's own training loop: an iterator over epochs that prunes and rewinds between them.

It yields the T epochs of the dense run and records what the schedule does to the optimizer. Then, for each of
`algorithm.levels`, it prunes, puts back what the technique rewinds, and yields again, with the mask attached and the
recorded learning rates set before every step; the scheduler itself rests until the loop ends.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from rewound.algorithm import check_final
from rewound.errors import InputError, few
from rewound.loops import ranks
from rewound.loops.checkpoints import level_name, opened, progress_in, rewind_name
from rewound.loops.course import Course
from rewound.loops.epoch import recorded, replayed
from rewound.loops.joint import members
from rewound.loops.progress import Progress, Reached
from rewound.loops.recording import Recording
from rewound.loops.resumption import begun, epochs_in
from rewound.loops.rewinding import pruned
from rewound.loops.rules import read_by
from rewound.loops.schedulers import resting
from rewound.loops.snapshot import Subjects
from rewound.pruning.mask import Mask

SAVE_SECONDS = 60.0
"""How much work a killed process loses, at most, beside the epoch it was in."""


class Epochs:
    """A run in a user's own loop: iterate over it once. `epochs` makes it."""

    def __init__(
        self,
        course: Course,
        subjects: Subjects,
        progress: Progress,
        folder: Path | None,
        resume: bool,
        say: Callable[[str], None],
    ) -> None:
        self._course, self._subjects, self._progress = course, subjects, progress
        self._path, self._resumes, self._speak = folder, resume, say
        self._levels = (course.dense, *course.levels)
        self._begun = self._handed_over = False
        self._saved_at = time.monotonic()

    # The algorithm

    def __iter__(self) -> Generator[int]:
        if self._begun:
            raise InputError("this run has been iterated over; make a new one with rewound.epochs to go on")
        self._begun = True
        return self._run()

    def _run(self) -> Generator[int]:
        with opened(self._path) as self._folder:
            self._start()
            try:
                yield from self._train()
                while not self._is_over(self._progress):
                    self._prune()
                    yield from self._train()
            except GeneratorExit:
                self._say(self._progress.told_when_left(len(self._levels) - 1, len(self), self._is_resumable))
                raise
            self._give_back()

    def _train(self) -> Iterator[int]:
        """Train^t(W, m, g), by somebody else: the epochs that are left of the present level."""
        progress, subjects = self._progress, self._subjects
        recording, start = progress.recording, 0
        if self.level:
            present, optimizers = self._levels[self.level], len(members(subjects.optimizer))
            recording, start = read_by(present, self._course.how, self._recording, progress.facts, optimizers)
        with ExitStack() as level:
            if progress.mask is not None:
                level.enter_context(progress.mask.attached(subjects.model, members(subjects.optimizer)))
                level.enter_context(resting(subjects.schedulers, subjects.optimizer))
            while progress.done < self._levels[self.level].length:
                if not progress.steps:  # else it is resumed in its middle
                    self._begin_epoch()
                with self._epoch(recording, start + progress.done):
                    yield progress.epoch
                self._end_epoch()
        if len(progress.reached) == self.level:
            self._end_level()

    def _prune(self) -> None:
        progress, level, recording = self._progress, self._levels[self.level + 1], self._recording
        if not self.level:
            check_final(self._course.how, recording.schedule())
            self._tell_of_frozen()
        progress.mask, progress.facts = pruned(level, self._course, self._subjects, self._folder, progress.mask)
        progress.level, progress.done, progress.accuracy = self.level + 1, 0, None
        progress.densities.append(level.density)

    def _is_over(self, progress: Progress) -> bool:
        return progress.level == len(self._levels) - 1 or progress.has_dropped(self._course.max_drop)

    # An epoch, a level and the run: how they begin and end

    def _start(self) -> None:
        course, subjects = self._course, self._subjects
        self._progress = begun(
            self._progress, course, subjects, self._folder, self._say, self._resumes, self._handed_over
        )
        self._progress.check_reports(course.max_drop, self._path)
        self._say(course.told(self._progress.epoch))
        self._untrained = course.untrained(subjects.model, subjects.optimizer)
        if self.mask is None and self._untrained:
            why = "not trained by this optimizer, and so not pruned unless that changes before the first pruning"
            self._say(f"{why}: {few(self._untrained)}")
        if course.adopt and not self._progress.epoch and not subjects.optimizer.state:
            self._say("the optimizer has no state: momentum and its like start empty")

    def _tell_of_frozen(self) -> None:
        """Name what was trained at the start and is left out now, as by a GAN's loop that freezes its critic."""
        now = self._course.untrained(self._subjects.model, self._subjects.optimizer)
        if frozen := [name for name in now if name not in self._untrained]:
            why = "frozen when the dense run ended, and so not pruned; unfreeze at the end of an epoch what is to be"
            self._say(f"{why}: {few(frozen)}")

    def _begin_epoch(self) -> None:
        progress = self._progress
        if not self.level:
            if progress.done in self._course.rewound_to:
                self._folder.write(rewind_name(progress.done), self._subjects, progress)
            progress.recording.begin_epoch()

    def _epoch(self, recording: Recording, epoch: int) -> AbstractContextManager[None]:
        optimizer, progress = self._subjects.optimizer, self._progress
        if self.level:
            return replayed(optimizer, progress, recording, epoch, self._subjects.schedulers)
        checks = self._resumes and not progress.epoch  # a trainer steps its schedulers when it likes
        return recorded(optimizer, progress, self._subjects.schedulers if checks else ())

    @property
    def _recording(self) -> Recording:
        """What the schedule did, with the declared final rate after its end."""
        recording, final = self._progress.recording, self._course.final
        return recording if final is None else recording.held(final)

    def _end_epoch(self) -> None:
        self._progress.end_epoch()
        overdue = ranks.from_first(time.monotonic() - self._saved_at > SAVE_SECONDS)
        if self._is_resumable and overdue and self._progress.done < self._levels[self.level].length:
            self._folder.write("latest", self._subjects, self._progress)
            self._saved_at = time.monotonic()

    def _end_level(self) -> None:
        progress, max_drop = self._progress, self._course.max_drop
        progress.agree()
        if max_drop is not None and progress.accuracy is None and not progress.epoch:
            raise InputError(
                "max_drop needs run.report(accuracy=...) of the adopted network, before the loop; report it, on rank 0 "
                "at least"
            )
        progress.reached.append(Reached(self.level, self.density, progress.epoch, progress.accuracy))
        self._keep_level(progress.returned(max_drop))
        self._saved_at = time.monotonic()
        self._say(progress.reached[-1].told(len(self._levels) - 1, len(self), progress.metric))
        progress.check_reports(max_drop, self._path)  # by now the level is in the folder

    def _keep_level(self, returned: int) -> None:
        """Write the end of the level, for whoever may come back to it, and remove what nobody will."""
        if self._path is not None:
            # A larger compression goes on from the level before a last, smaller step, or from the dense run.
            kept = {0, self.level - 1, self.level, returned}
        else:  # the folder ends with the run
            kept = set() if self._course.max_drop is None else {returned}
        if self.level in kept:
            self._folder.write(level_name(self.level), self._subjects, self._progress)
        self._folder.keep(kept)

    @property
    def _is_resumable(self) -> bool:
        return self._resumes and self._path is not None

    def _give_back(self) -> None:
        """Leave the model at the returned level."""
        if (chosen := self._progress.returned(self._course.max_drop)) != self.level:
            content = self._folder.read(level_name(chosen))
            if content is None:  # of a run that went on from an earlier level, and was worse this time
                raise InputError(f"{self._folder.path} no longer holds level {chosen}; train anew in another folder")
            self._subjects.rewind(content)
            self._progress.mask = progress_in(content).mask
            self._say(f"returned: {f'level {chosen}' if chosen else 'the dense network'}, the last within max_drop")

    def _say(self, text: str) -> None:
        if ranks.rank() == 0:
            self._speak(text)

    # What a loop may ask

    def __repr__(self) -> str:
        last, done = len(self._levels) - 1, self._progress.epoch
        return (
            f"Epochs({done:,} of {len(self):,} epochs done, level {self.level} of {last}, density {self.density:.4g})"
        )

    def __len__(self) -> int:
        """All epochs, those already done included; `max_drop` may end the run sooner."""
        return self._course.epochs

    @property
    def ends(self) -> tuple[int, ...]:
        """How many epochs are done when each level ends, the dense run first."""
        return tuple(accumulate(level.length for level in self._levels))

    @property
    def epochs_done(self) -> int:
        """How many epochs are done; before the loop, after how many it will go on: `tqdm(run, initial=...)`."""
        if self._path is None or not self._resumes or self._begun or self._handed_over:
            return self._progress.epoch
        return epochs_in(self._path, self._course)

    @property
    def level(self) -> int:
        """The present level; 0 is the dense run."""
        return self._progress.level

    @property
    def density(self) -> float:
        """What the present level was asked to prune to; 1 in the dense run."""
        return self._levels[self.level].density

    @property
    def schedule_epoch(self) -> int:
        """The epoch of the original schedule whose learning rates are used now; from T on, its final ones.

        Where a rule draws the rates of a level, it is the epoch of the level.
        """
        return (self._levels[self.level].schedule_from or 0) + self._progress.done

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
        """Whether the run ends with the present epoch, by what this process has reported in its level so far."""
        progress = self._progress
        if progress.done + 1 < self._levels[self.level].length:
            return False
        reached = Reached(self.level, self.density, progress.epoch + 1, progress.accuracy)
        return self._is_over(replace(progress, reached=[*progress.reached, reached]))

    def report(self, accuracy: float, *, higher_is_better: bool = True, metric: str | None = None) -> None:
        """Tell how good the network is now; what is told last in a level counts for the level.

        `metric` is what it is called: "accuracy", or "loss" where lower is better. Of several processes rank 0's word
        counts, and the others need not report.
        """
        self._progress.report(accuracy, higher_is_better, metric or ("accuracy" if higher_is_better else "loss"))

    def state_dict(self, *, epoch_ended: bool = True) -> dict[str, object]:
        """How far the run has come, and what is in `also`, of which a trainer's own checkpoints know nothing else.

        An epoch in which a step was taken counts as done; with `epoch_ended=False` as begun, so that a run that loads
        this yields it again and goes on after the steps it has taken.
        """
        progress = replace(self._progress)
        if epoch_ended and progress.steps:
            progress.end_epoch()
        return {**progress.state_dict(), "also": [thing.state_dict() for thing in self._subjects.also]}

    def load_state_dict(self, state: dict[str, object], /) -> None:
        """Go on from there; model and optimizer are restored by whoever saved them."""
        if self._begun:
            raise InputError("this run is being iterated over; load its state before the loop")
        progress = Progress.from_state_dict(state)
        asked = [level.density for level in self._levels[1:]][: len(progress.densities)]
        if progress.densities != asked:
            raise InputError(
                f"this state was pruned to densities {progress.densities}, not {asked}; give the same arguments"
            )
        self._subjects.restore_also(state)
        self._progress, self._handed_over = progress, True
