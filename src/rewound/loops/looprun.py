"""A run in a user's own loop: what was asked for (`Course`), what it trains, and how far it has come."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch import nn

from rewound.foundations.errors import Diverged, InputError, check_kind, few
from rewound.loops.checkpoints import Folder
from rewound.loops.course import Course
from rewound.loops.optimizers import members
from rewound.loops.progress import Progress, check_unit, progress_of
from rewound.loops.recording import Recording, with_rule
from rewound.loops.snapshot import Subjects
from rewound.loops.structure import Structure
from rewound.method.algorithm import Level
from rewound.method.pruning.counts import Counts, counts_of
from rewound.method.pruning.mask import Mask
from rewound.method.technique import MaskUpdate
from rewound.tasks import ranks


@dataclass
class LoopRun:
    """A run in a user's own loop: what is trained, how, and how far it has come."""

    course: Course
    subjects: Subjects
    progress: Progress
    path: Path | None
    """The folder of its checkpoints; without one they last as long as the run."""
    resumes: bool
    """Whether it goes on from its checkpoints; a trainer that resumes by itself calls `load_state` instead."""
    speak: Callable[[str], None]
    structure: Structure | None = None
    """The units of the network, where the pruner removes those."""
    has_begun: bool = False
    was_loaded: bool = False
    """Whether a trainer has loaded how far it had come."""

    @property
    def levels(self) -> tuple[Level, ...]:
        """All levels, the dense run first."""
        return (self.course.dense, *self.course.levels)

    @property
    def level(self) -> int:
        """The number of the present level."""
        return self.progress.level

    @property
    def present(self) -> Level:
        """The level that is trained now."""
        return self.levels[self.level]

    @property
    def part(self) -> tuple[int, int]:
        """The number of the recording's part that comes now, and how many units of the level are done at its end."""
        course, level, done = self.course, self.present, self.progress.done
        if level.schedule_from is None:  # a rule has drawn it, after the dense run
            first = self.recording.epochs
            return (first + done, done + 1) if course.unit == "epoch" else (first, level.length)
        number, end = course.part(level.schedule_from + done)
        return number, int(min(level.length, end - level.schedule_from))

    @property
    def recording(self) -> Recording:
        """What the schedule did in the dense run, followed by the declared final rate."""
        recording, final = self.progress.recording, self.course.final
        return recording if final is None else recording.ending_at(final)

    @property
    def level_recording(self) -> Recording:
        """The recording that the present level reads: of the dense run, followed by what a rule draws for the level."""
        course, level, facts = self.course, self.present, self.progress.facts
        if not self.level:
            return self.progress.recording
        if level.schedule_from is not None:
            return self.recording
        assert callable(course.the_technique.lr)
        assert facts is not None  # of the pruning before the level
        parts = [1] * level.length if course.unit == "epoch" else [level.length]
        optimizers = len(members(self.subjects.optimizer))
        return with_rule(course.the_technique.lr, self.recording, facts, course.training_time, parts, optimizers)

    def updates_of(self, level: Level) -> list[MaskUpdate]:
        """The prunings on the way through a level: after steps of the loop, or of the optimizer if it counts epochs.

        How many steps an epoch has is known from the dense run, as far as it has come.
        """
        recording, taken = self.progress.recording, len(members(self.subjects.optimizer))
        if level.gradual is None or self.course.unit == "step":
            return level.updates(level.length)
        epochs = [recording.steps(epoch) // taken for epoch in range(recording.trained_epochs)]
        if self.course.adopt and max(epochs) == 1:
            raise InputError(
                f"{self.course.technique} prunes after a number of steps, but the schedule of this adopted network has "
                "one step per epoch, which does not show how many the loop takes; give a rewound.Schedule or "
                "steps_per_epoch= with as many as it does (under Lightning 'interval': 'step'), or use rewound.steps"
            )
        average, start = round(sum(epochs) / len(epochs)), level.schedule_from or 0
        later = max(0, start + level.length - len(epochs)) - max(0, start - len(epochs))
        return level.updates(sum(epochs[start : start + level.length]) + later * average)

    @property
    def is_resumable(self) -> bool:
        """Whether the same script goes on when it is run again."""
        return self.resumes and self.path is not None

    @property
    def done(self) -> Progress:
        """How far the run has come; before the loop begins, as its folder has it."""
        if self.path is None or not self.resumes or self.has_begun or self.was_loaded:
            return self.progress
        newest, _ = Folder(self.path).newest(self.course.densities)
        return Progress() if newest is None else newest.progress

    @property
    def position(self) -> int:
        """The position in the original schedule; in a level whose rates a rule draws, the position in the level."""
        return (self.present.schedule_from or 0) + self.progress.done

    @property
    def is_over(self) -> bool:
        """Whether the present level is the last."""
        return self._ends_with(self.progress)

    @property
    def is_in_last_epoch(self) -> bool:
        """Whether the present epoch is the last, by what this process has reported in the level so far."""
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
        """Whether a level that diverges ends the run and an earlier one is returned; otherwise it is an error."""
        return self.level > 0 and self.course.max_drop is not None

    def check_finite(self) -> None:
        """An error if any rank has weights that are not finite, which are never saved."""
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
        """Note how good the network is; a value that is not finite cannot be compared with `max_drop`."""
        check_kind("higher_is_better", higher_is_better, bool, "give True or False")
        check_kind("metric", metric, str, "give its name")
        try:
            value = float(given)  # type: ignore[arg-type]  # a number of any kind, also a tensor
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
        elif not self.ends_when_diverged:  # otherwise the end of the level reports it
            raise self._diverged(names)

    @property
    def attached_mask(self) -> Mask | None:
        """The mask that is attached in the present level; a small network has other shapes than the mask of the run."""
        mask = self.progress.mask
        return mask if mask is None or self.structure is None else self.structure.held(mask)

    def counts(self, mask: Mask) -> Counts:
        """The counts of the large network under a mask."""
        if (structure := self.structure) is None:
            return counts_of(self.subjects.model, mask)
        return counts_of(self.subjects.model, mask, structure.counted)._replace(network=structure.parameters)

    @property
    def unseen(self) -> dict[str, nn.Parameter]:
        """The parameters in the optimizer that no gradient has reached yet.

        Only the dense run is watched for them, and the first level of an adopted network.
        """
        if self.progress.gradients is None or self.level > (1 if self.course.adopt else 0):
            return {}
        stepped = self.subjects.stepped_parameters
        return {name: p for name, p in stepped.items() if name not in self.progress.gradients}

    @property
    def without_gradient(self) -> list[str]:
        """The weights that would be pruned if a gradient had reached them (law 11).

        Empty where no parameter at all had a gradient: the optimizer then works without.
        """
        subjects, seen = self.subjects, self.progress.gradients
        if not seen:
            return []
        if self.structure is not None:
            return [name for name in subjects.trained_parameters if name not in seen]
        selected = self.course.the_pruner.selected(subjects.trained_weights, subjects.model)
        return [name for name in selected if name not in seen]

    def begin(self) -> None:
        """Begin the loop; a run is iterated over once."""
        if self.has_begun:
            raise InputError(
                f"this run has been iterated over; make a new one with rewound.{self.course.unit}s to go on"
            )
        self.has_begun = True

    def state_dict(self, *, epoch_ended: bool) -> dict[str, object]:
        """What a trainer's own checkpoint needs; with `epoch_ended`, an epoch with a step in it counts as done."""
        progress = replace(self.progress)
        if epoch_ended and progress.has_stepped:
            progress.end_epoch(part_ended=progress.done + 1 == self.part[1])
        return {**progress.state_dict(), "also": [thing.state_dict() for thing in self.subjects.also]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a trainer's checkpoint; the trainer restores model and optimizer."""
        if self.has_begun:
            raise InputError("this run is being iterated over; load its state before the loop")
        try:
            progress = progress_of(state)
        except InputError as error:
            raise InputError(f"this is no state of a run: {error}; load what run.state_dict() gave") from error
        self._check_densities(progress)
        if self.structure is not None and self.path is not None:
            self.structure.read(Folder(self.path))
            self.structure.fit(progress.mask)
        self.subjects.restore_also(state.get("also", []))
        self.progress, self.was_loaded = progress, True

    def _check_densities(self, progress: Progress) -> None:
        """An error for a state that was pruned to other densities; a larger compression shares the first levels."""
        if progress.leads_to(self.course.densities):
            return
        reached, asked = progress.densities, self.course.densities[: len(progress.densities)]
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(reached, asked, strict=False))
        epochs = sum(level.length for level in self.levels[: 1 + len(list(shared))])
        earlier = (
            f", or a state from the first {epochs:,} {self.course.unit}s, which are the same in both" if epochs else ""
        )
        pruned, wanted = (", ".join(f"{density:.4g}" for density in each) for each in (reached, asked))
        raise InputError(f"this state was pruned to densities {pruned}, not {wanted}; give the same arguments{earlier}")

    def say(self, text: str) -> None:
        """Tell the user, on rank 0 only."""
        if ranks.rank() == 0:
            self.speak(text)
