"""A run in a user's own training loop: what is trained, how, how far it has come, and what may be asked of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import NotRequired

from torch import nn

from rewound.foundations.errors import Diverged, InputError, few
from rewound.loops import ranks
from rewound.loops.checkpoints import Folder
from rewound.loops.course import Course, stepped_parameters, trained_weights
from rewound.loops.progress import Progress, ProgressState, check_unit, progress_of
from rewound.loops.recording import Recording
from rewound.loops.snapshot import StateDict, Subjects
from rewound.method.algorithm import Level


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
    def part(self) -> tuple[int, int]:
        """The part of the recording that the present level has come to, and how far the level is at its end."""
        course, level, done = self.course, self.present, self.progress.done
        if level.schedule_from is None:  # a rule has drawn it, after the dense run
            first = self.recording.epochs
            return (first + done, done + 1) if course.unit == "epoch" else (first, level.length)
        number, end = course.part(level.schedule_from + done)
        return number, int(min(level.length, end - level.schedule_from))

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
    def done(self) -> Progress:
        """How far it has come, also before a run goes on from its folder."""
        if self.path is None or not self.resumes or self.has_begun or self.handed_over:
            return self.progress
        newest, _ = Folder(self.path).newest(self.course.densities)
        return Progress() if newest is None else newest.progress

    @property
    def position(self) -> int:
        """The position in the original schedule; in a level whose rates a rule draws, that in the level."""
        return (self.present.schedule_from or 0) + self.progress.done

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
        reached = progress.reached_at(self.present.density, progress.epoch + 1)
        if self._ends_with(replace(progress, reached=[*progress.reached, reached])):
            return True
        return self.ends_when_diverged and bool(self.subjects.not_finite())

    def _ends_with(self, progress: Progress) -> bool:
        return progress.level == len(self.levels) - 1 or progress.has_dropped(self.course.max_drop)

    @property
    def ends_when_diverged(self) -> bool:
        """Whether a level that is not finite ends the run with a level before it; else it is an error."""
        return self.level > 0 and self.course.max_drop is not None

    def check_finite(self) -> None:
        """An error if any rank holds weights that are not finite; they are never saved."""
        if names := next(filter(None, ranks.gathered(self.subjects.not_finite())), None):
            raise self._diverged(names)

    def _diverged(self, names: list[str]) -> Diverged:
        which = f"level {self.level} of {len(self.levels) - 1}" if self.level else "the dense run"
        when = f"by {self.course.unit} {self.progress.epoch:,}"
        text = f"{which} diverged: {when} {few(names)} held numbers that are not finite"
        if not self.ends_when_diverged:
            earlier = ", or give max_drop= to get the levels before it" if self.level else ""
            text += f"; lower the learning rate or clip the gradients{earlier}"
        return Diverged(self.progress.epoch, math.nan, text=text)

    def report(self, given: object, higher_is_better: bool, metric: str) -> None:
        """Note how good the network is; what is not finite would be neither within `max_drop` nor beyond it."""
        try:
            value = float(given)  # type: ignore[arg-type]  # whatever a script calls a number, a tensor too
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"run.report takes one number, not {given!r}") from error
        if math.isfinite(value):
            if self.course.max_drop is not None:
                check_unit(value, metric, self.course.max_drop)
            self.progress.report(value, higher_is_better, metric)
        elif not (names := self.subjects.not_finite()):
            raise InputError(
                f"run.report takes a finite number, not {value}: the network was evaluated on nothing, or its outputs "
                "are not finite although its weights are"
            )
        elif not self.ends_when_diverged:  # else the end of the level says so
            raise self._diverged(names)

    @property
    def unseen(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer has and that no gradient has reached, where somebody looks for them.

        That is the dense run, and the first level of an adopted network.
        """
        if self.progress.gradients is None or self.level > (1 if self.course.adopt else 0):
            return {}
        stepped = stepped_parameters(self.subjects.model, self.subjects.optimizer)
        return {name: p for name, p in stepped.items() if name not in self.progress.gradients}

    @property
    def without_gradient(self) -> list[str]:
        """The weights that would be pruned if a gradient had reached them (law 11).

        None where no parameter at all had one: the optimizer then works without.
        """
        model, seen = self.subjects.model, self.progress.gradients
        selected = self.course.pruner.selected(trained_weights(model, self.subjects.optimizer), model)
        return [name for name in selected if name not in seen] if seen else []

    def begin(self) -> None:
        """A run is iterated over once."""
        if self.has_begun:
            raise InputError(
                f"this run has been iterated over; make a new one with rewound.{self.course.unit}s to go on"
            )
        self.has_begun = True

    def state_dict(self, *, epoch_ended: bool) -> dict[str, object]:
        """What a trainer's own checkpoint needs; an epoch in which a step was taken may count as done."""
        progress = replace(self.progress)
        if epoch_ended and progress.has_stepped:
            progress.end_epoch(part_ended=progress.done + 1 == self.part[1])
        return {**progress.state_dict(), "also": [thing.state_dict() for thing in self.subjects.also]}

    def take_over(self, state: HandedOver) -> None:
        """Go on from there; model and optimizer are restored by whoever saved them."""
        if self.has_begun:
            raise InputError("this run is being iterated over; load its state before the loop")
        try:
            progress = progress_of(state)
        except InputError as error:
            raise InputError(f"this is no state of a run: {error}; load what run.state_dict() gave") from error
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
        earlier = (
            f", or a state from the first {epochs:,} {self.course.unit}s, which are the same in both" if epochs else ""
        )
        made, wanted = (", ".join(f"{density:.4g}" for density in each) for each in (reached, asked))
        raise InputError(f"this state was pruned to densities {made}, not {wanted}; give the same arguments{earlier}")

    def say(self, text: str) -> None:
        """Tell a person, once."""
        if ranks.rank() == 0:
            self.speak(text)
