"""The algorithm in a user's own training loop: epochs that somebody else trains, with pruning and rewinding in between.

It yields the T epochs of the dense run and records what the schedule does to the optimizer. Then, for each of
`algorithm.levels`, it prunes, puts back what the technique rewinds, and yields again, with the mask attached and the
recorded learning rates set before every step; the scheduler itself rests until the loop ends.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rewound.algorithm import Level, check_final
from rewound.errors import InputError, few
from rewound.loops import ranks
from rewound.loops.checkpoints import level_name, opened, progress_in, rewind_name
from rewound.loops.course import Course
from rewound.loops.epoch import recorded, replayed
from rewound.loops.joint import members
from rewound.loops.progress import Progress, Reached
from rewound.loops.recording import Recording
from rewound.loops.resumption import begun
from rewound.loops.rewinding import pruned
from rewound.loops.rules import read_by
from rewound.loops.schedulers import resting
from rewound.loops.snapshot import Subjects

SAVE_SECONDS = 60.0
"""How much work a killed process loses, at most, beside the epoch it was in."""


@dataclass
class Run:
    """What is trained, how, and how far it has come."""

    course: Course
    subjects: Subjects
    progress: Progress
    path: Path | None
    """The folder of its checkpoints; without one they last as long as the run."""
    resumes: bool
    """Whether it goes on from them; a trainer that resumes by itself hands over how far it has come."""
    speak: Callable[[str], None]
    handed_over: bool = False
    _saved_at: float = field(default_factory=time.monotonic)

    @property
    def levels(self) -> tuple[Level, ...]:
        """All of them, the dense run first."""
        return (self.course.dense, *self.course.levels)

    @property
    def level(self) -> int:
        """The number of the present one."""
        return self.progress.level

    @property
    def present(self) -> Level:
        """The one that is trained now."""
        return self.levels[self.level]

    def epochs(self) -> Generator[int]:
        """The epochs of the whole run, from where it has been left."""
        with opened(self.path) as self._folder:
            self._start()
            try:
                yield from self._train()
                while not self.is_over(self.progress):
                    self._prune()
                    yield from self._train()
            except GeneratorExit:
                self._say(self.progress.told_when_left(len(self.levels) - 1, self.course.epochs, self._is_resumable))
                raise
            self._give_back()

    def _train(self) -> Iterator[int]:
        """Train^t(W, m, g), by somebody else: the epochs that are left of the present level."""
        progress, subjects = self.progress, self.subjects
        recording, start = progress.recording, 0
        if self.level:
            optimizers = len(members(subjects.optimizer))
            recording, start = read_by(self.present, self.course.how, self._recording, progress.facts, optimizers)
        with ExitStack() as level:
            if progress.mask is not None:
                level.enter_context(progress.mask.attached(subjects.model, members(subjects.optimizer)))
                level.enter_context(resting(subjects.schedulers, subjects.optimizer))
            while progress.done < self.present.length:
                if not progress.steps:  # else it is resumed in its middle
                    self._begin_epoch()
                with self._epoch(recording, start + progress.done):
                    yield progress.epoch
                self._end_epoch()
        if len(progress.reached) == self.level:
            self._end_level()

    def _prune(self) -> None:
        progress, level, recording = self.progress, self.levels[self.level + 1], self._recording
        if not self.level:
            check_final(self.course.how, recording.schedule())
            self._tell_of_frozen()
        progress.mask, progress.facts = pruned(level, self.course, self.subjects, self._folder, progress.mask)
        progress.level, progress.done, progress.accuracy = self.level + 1, 0, None
        progress.densities.append(level.density)

    def is_over(self, progress: Progress) -> bool:
        """Whether nothing is pruned after this."""
        return progress.level == len(self.levels) - 1 or progress.has_dropped(self.course.max_drop)

    # An epoch, a level and the run: how they begin and end

    def _start(self) -> None:
        course, subjects = self.course, self.subjects
        self.progress = begun(self.progress, course, subjects, self._folder, self._say, self.resumes, self.handed_over)
        self.progress.check_reports(course.max_drop, self.path)
        self._say(course.told(self.progress.epoch))
        self._untrained = course.untrained(subjects.model, subjects.optimizer)
        if self.progress.mask is None and self._untrained:
            why = "not trained by this optimizer, and so not pruned unless that changes before the first pruning"
            self._say(f"{why}: {few(self._untrained)}")
        if course.adopt and not self.progress.epoch and not subjects.optimizer.state:
            self._say("the optimizer has no state: momentum and its like start empty")

    def _tell_of_frozen(self) -> None:
        """Name what was trained at the start and is left out now, as by a GAN's loop that freezes its critic."""
        now = self.course.untrained(self.subjects.model, self.subjects.optimizer)
        if frozen := [name for name in now if name not in self._untrained]:
            why = "frozen when the dense run ended, and so not pruned; unfreeze at the end of an epoch what is to be"
            self._say(f"{why}: {few(frozen)}")

    def _begin_epoch(self) -> None:
        progress = self.progress
        if not self.level:
            if progress.done in self.course.rewound_to:
                self._folder.write(rewind_name(progress.done), self.subjects, progress)
            progress.recording.begin_epoch()

    def _epoch(self, recording: Recording, epoch: int) -> AbstractContextManager[None]:
        optimizer, progress = self.subjects.optimizer, self.progress
        if self.level:
            return replayed(optimizer, progress, recording, epoch, self.subjects.schedulers)
        checks = self.resumes and not progress.epoch  # a trainer steps its schedulers when it likes
        return recorded(optimizer, progress, self.subjects.schedulers if checks else ())

    @property
    def _recording(self) -> Recording:
        """What the schedule did, with the declared final rate after its end."""
        recording, final = self.progress.recording, self.course.final
        return recording if final is None else recording.ending_at(final)

    def _end_epoch(self) -> None:
        self.progress.end_epoch()
        overdue = ranks.from_first(time.monotonic() - self._saved_at > SAVE_SECONDS)
        if self._is_resumable and overdue and self.progress.done < self.present.length:
            self._folder.write("latest", self.subjects, self.progress)
            self._saved_at = time.monotonic()

    def _end_level(self) -> None:
        progress, max_drop = self.progress, self.course.max_drop
        progress.agree()
        if max_drop is not None and progress.accuracy is None and not progress.epoch:
            raise InputError(
                "max_drop needs run.report(accuracy=...) of the adopted network, before the loop; report it, on rank 0 "
                "at least"
            )
        progress.reached.append(Reached(self.level, self.present.density, progress.epoch, progress.accuracy))
        self._keep_level(progress.returned(max_drop))
        self._saved_at = time.monotonic()
        self._say(progress.reached[-1].told(len(self.levels) - 1, self.course.epochs, progress.metric))
        progress.check_reports(max_drop, self.path)  # by now the level is in the folder

    def _keep_level(self, returned: int) -> None:
        """Write the end of the level, for whoever may come back to it, and remove what nobody will."""
        if self.path is not None:
            # A larger compression goes on from the level before a last, smaller step, or from the dense run.
            kept = {0, self.level - 1, self.level, returned}
        else:  # the folder ends with the run
            kept = set() if self.course.max_drop is None else {returned}
        if self.level in kept:
            self._folder.write(level_name(self.level), self.subjects, self.progress)
        self._folder.keep(kept)

    @property
    def _is_resumable(self) -> bool:
        return self.resumes and self.path is not None

    def _give_back(self) -> None:
        """Leave the model at the returned level."""
        if (chosen := self.progress.returned(self.course.max_drop)) != self.level:
            content = self._folder.read(level_name(chosen))
            if content is None:  # of a run that went on from an earlier level, and was worse this time
                raise InputError(f"{self._folder.path} no longer holds level {chosen}; train anew in another folder")
            self.subjects.rewind(content)
            self.progress.mask = progress_in(content).mask
            self._say(f"returned: {f'level {chosen}' if chosen else 'the dense network'}, the last within max_drop")

    def _say(self, text: str) -> None:
        if ranks.rank() == 0:
            self.speak(text)
