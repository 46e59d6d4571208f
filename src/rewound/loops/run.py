"""A run in a user's own training loop: what is trained, how, how far it has come, and what may be asked of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import NotRequired

from rewound.algorithm import Level
from rewound.errors import InputError
from rewound.loops import ranks
from rewound.loops.checkpoints import Folder, progress_in
from rewound.loops.course import Course
from rewound.loops.progress import Progress, ProgressState, Reached
from rewound.loops.recording import Recording
from rewound.loops.snapshot import StateDict, Subjects


class HandedOver(ProgressState):
    """What a trainer's own checkpoint keeps of a run."""

    also: NotRequired[list[StateDict]]  # missing in earlier states


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
    has_begun: bool = False
    handed_over: bool = False

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

    @property
    def recording(self) -> Recording:
        """What the schedule did, with the declared final rate after its end."""
        recording, final = self.progress.recording, self.course.final
        return recording if final is None else recording.ending_at(final)

    @property
    def is_resumable(self) -> bool:
        """Whether the same script, run again, goes on."""
        return self.resumes and self.path is not None

    @property
    def epochs_done(self) -> int:
        """How many there are, also before a run goes on from its folder."""
        if self.path is None or not self.resumes or self.has_begun or self.handed_over:
            return self.progress.epoch
        content = Folder(self.path).resumable(self.course.densities)
        return 0 if content is None else progress_in(content).epoch

    @property
    def is_over(self) -> bool:
        """Whether nothing is pruned after the present level."""
        return self._ends_with(self.progress)

    @property
    def is_in_last_epoch(self) -> bool:
        """Whether the run ends with the present epoch, by what this process has reported in its level so far."""
        progress = self.progress
        if progress.done + 1 < self.present.length:
            return False
        reached = Reached(self.level, self.present.density, progress.epoch + 1, progress.accuracy)
        return self._ends_with(replace(progress, reached=[*progress.reached, reached]))

    def _ends_with(self, progress: Progress) -> bool:
        return progress.level == len(self.levels) - 1 or progress.has_dropped(self.course.max_drop)

    def begin(self) -> None:
        """A run is iterated over once."""
        if self.has_begun:
            raise InputError("this run has been iterated over; make a new one with rewound.epochs to go on")
        self.has_begun = True

    def state_dict(self, *, epoch_ended: bool) -> dict[str, object]:
        """What a trainer's own checkpoint needs; an epoch in which a step was taken may count as done."""
        progress = replace(self.progress)
        if epoch_ended and progress.steps:
            progress.end_epoch()
        return {**progress.state_dict(), "also": [thing.state_dict() for thing in self.subjects.also]}

    def take_over(self, state: HandedOver) -> None:
        """Go on from there; model and optimizer are restored by whoever saved them."""
        if self.has_begun:
            raise InputError("this run is being iterated over; load its state before the loop")
        progress = Progress.from_state_dict(state)
        self._check_is_on_the_way(progress)
        self.subjects.restore_also(state.get("also", []))
        self.progress, self.handed_over = progress, True

    def _check_is_on_the_way(self, progress: Progress) -> None:
        """An error for a state that was pruned otherwise; a larger compression shares the first levels."""
        if progress.is_on_the_way(self.course.densities):
            return
        reached, asked = progress.densities, self.course.densities[: len(progress.densities)]
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(reached, asked, strict=False))
        epochs = sum(level.length for level in self.levels[: 1 + len(list(shared))])
        earlier = f", or a state from the first {epochs:,} epochs, which are the same in both" if epochs else ""
        made, wanted = (", ".join(f"{density:.4g}" for density in each) for each in (reached, asked))
        raise InputError(f"this state was pruned to densities {made}, not {wanted}; give the same arguments{earlier}")

    def say(self, text: str) -> None:
        """Tell a person, once."""
        if ranks.rank() == 0:
            self.speak(text)
