"""A run in a user's own loop: what was asked for (`Course`), and that with what it trains and how far it has come.

A loop counts epochs or steps: its unit. What the schedule does is recorded and replayed part by part. A part is one
epoch; where steps are counted it is as long as it can be, from one step that a level goes back to up to the next.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, takewhile
from math import inf
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import Diverged, InputError, as_whole, check_kind, few, shown
from rewound.foundations.quantities import counted
from rewound.loops import ranks
from rewound.loops.checkpoints import Folder
from rewound.loops.optimizers import members, optimizer_kind, stepped_parameters, trained_parameters, trained_weights
from rewound.loops.progress import Progress, check_unit, progress_of
from rewound.loops.recording import Recording, with_rule
from rewound.loops.snapshot import Subjects
from rewound.loops.structure import Structure
from rewound.method.algorithm import Level, levels, longest_time
from rewound.method.choices import Choices
from rewound.method.pruner import check_memory
from rewound.method.pruning.counts import Counts, counts_of, parameter_count
from rewound.method.pruning.mask import Mask
from rewound.method.pruning.prunable import prunable_weights
from rewound.method.technique import MaskUpdate

Init = Callable[[nn.Module], object]
Unit = Literal["epoch", "step"]


@dataclass(frozen=True, kw_only=True)
class Course(Choices):
    """A run as it was asked for, checked; its times are in the unit that the loop counts."""

    unit: Unit = "epoch"
    training_time: int
    retraining_time: int | None = None
    """By default the longest that the technique allows."""
    adopt: bool
    init: Init | None

    def __post_init__(self) -> None:
        longest = longest_time(self.the_technique, as_whole(f"training_{self.unit}s", self.training_time, self.order))
        if self.retraining_time is None:
            object.__setattr__(self, "retraining_time", max(1, int(longest)))
        for name, field in self._times.items():
            object.__setattr__(self, field, as_whole(name, getattr(self, field)))
        super().__post_init__()
        check_kind("adopt", self.adopt, bool, "give True or False")
        if self.init is not None and not callable(self.init):
            raise InputError(
                f"init must be a function that draws fresh weights for a model in place, not {shown(self.init)}"
            )
        if self.training_time < 1:
            raise InputError(f"training takes at least 1 {self.unit}, not {self.training_time}")
        if preset := self.the_pruner.preset:
            raise InputError(
                f"preset {preset} is for the paper's networks, in rewound.prune and sweeps; give a pruner without it"
            )
        if self.the_pruner.rates:
            raise InputError("a table of rates is for rewound.prune and sweeps; give a pruner without it")
        if self.the_pruner.needs_batches:
            raise InputError(
                f"score {self.the_pruner.score!r} is measured on batches, which a loop does not give; use another "
                "score, or rewound.prune and sweeps"
            )
        if self.unit == "step":
            self.levels[0].updates(self.levels[0].length)  # an error if gradual pruning has too few steps
        source = self.levels[0].weights_from
        if self.adopt and isinstance(source, int):
            raise InputError(
                f"cannot use {self.technique} on an adopted network: its weights at {self.unit} {source} were not "
                "kept; use lr-rewinding or fine-tuning"
            )
        if source == "fresh" and self.init is None:
            raise InputError(f"{self.technique} needs init=, a function that draws fresh weights for a model in place")

    @property
    def order(self) -> str:
        """The order of the arguments, for a message about a wrong one."""
        return f"the order is {self.unit}s(training_{self.unit}s, model, optimizer, scheduler)"

    @property
    def _times(self) -> dict[str, str]:
        """The arguments that are times, with the names of their fields."""
        return {f"training_{self.unit}s": "training_time", f"retrain_{self.unit}s": "retraining_time"}

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """What each level prunes to, starts from and trains."""
        assert self.retraining_time is not None
        return tuple(
            levels(self.the_technique, self.retraining_time, self.training_time, self.densities, unit=self.unit)
        )

    @property
    def dense(self) -> Level:
        """The dense run as level 0; it is empty for an adopted network, which was trained before."""
        return Level(density=1.0, weights_from=0, schedule_from=0, length=0 if self.adopt else self.training_time)

    @property
    def length(self) -> int:
        """How long the whole run is."""
        return sum(level.length for level in (self.dense, *self.levels))

    @property
    def rewound_to(self) -> set[int]:
        """The epochs, or steps, of the dense run whose weights the technique goes back to."""
        source = self.levels[0].weights_from
        return {0} if source == "fresh" and not self.adopt else {source} if isinstance(source, int) else set()

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """Where the parts of the dense run begin."""
        T, level = self.training_time, self.levels[0]
        if self.unit == "epoch":
            return tuple(range(T))
        rewound_to = {at for at in (level.weights_from, level.schedule_from) if isinstance(at, int)}
        return tuple(sorted(at for at in {0, *rewound_to} if at < T))

    @property
    def part_lengths(self) -> list[int]:
        """How long each part of the dense run is."""
        return [stop - start for start, stop in pairwise((*self._starts, self.training_time))]

    def part(self, position: int) -> tuple[int, float]:
        """The part of the recording in which a position of the schedule lies, and the position at which it ends."""
        if self.unit == "epoch":  # also after the dense run
            return position, position + 1
        ends = (*self._starts[1:], self.training_time, inf)
        number = bisect_right(ends, position)
        return number, ends[number]

    def described(self, done: int, network_compression: float) -> str:
        """One line about the whole run, of which so many units are done."""
        dense = f"{counted(self.dense.length, f'dense {self.unit}')}, then " if self.dense.length else ""
        levels = f"{counted(len(self.levels), 'level')} of {counted(self.levels[0].length, self.unit)}"
        whole = counted(self.length, self.unit) + (f", {done:,} of them done" if done else "")
        goal = f"{self.compression:g}x ({network_compression:.2f}x of the whole network)"
        return f"rewound: {dense}{levels} by {self.technique} to {goal}: {whole}"

    def arguments(self, model: nn.Module, optimizer: Optimizer) -> dict[str, object]:
        """The arguments that must be the same when a run is continued, as plain data."""
        plain = ("compression", "technique", "rate", "one_shot", "final", "adopt")
        pruner = {name: list(v) if isinstance(v, tuple) else v for name, v in self.the_pruner.settings.items()}
        return {
            **{name: getattr(self, field) for name, field in self._times.items()},
            **{name: getattr(self, name) for name in plain},
            "pruner": pruner,
            "slim": self.slim,
            "optimizer": optimizer_kind(optimizer),
            "weights": {name: list(weight.shape) for name, weight in prunable_weights(model).items()},
        }

    def check(self, model: nn.Module, optimizer: Optimizer) -> None:
        """An error if this model cannot be pruned while this optimizer trains it."""
        check_memory(model)
        weights = prunable_weights(model)
        wrapped = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
        if wrapped or any(hasattr(weight, "device_mesh") for weight in weights.values()):  # a DTensor
            how = "FullyShardedDataParallel" if wrapped else "fully_shard"
            raise InputError(
                f"cannot prune sharded parameters ({how}): a rank sees only its part of the weights, but all "
                "are ranked together; use DistributedDataParallel"
            )
        self.the_pruner.check(name for name, _ in model.named_parameters(remove_duplicate=False))
        if not self.the_pruner.by_units:
            self.the_pruner.check_zeros_stay(model, weights)
        trained = trained_weights(model, optimizer)
        selected = self.the_pruner.selected(weights, model)
        if selected and not any(name in trained for name in selected):
            raise InputError(
                "the optimizer trains none of the model's prunable weights: give the one that trains it, and unfreeze "
                "what is to be pruned"
            )
        if not self.the_pruner.by_units:  # otherwise `structure` checks it, once the units are known
            shapes = {name: tuple(weight.shape) for name, weight in trained.items()}
            self.the_pruner.kept(shapes, self.levels[-1].density, model=model)

    def counts(self, model: nn.Module, optimizer: Optimizer) -> Counts:
        """The weights that pruning would choose from, all of them kept so far, and all parameters."""
        trained = trained_weights(model, optimizer)
        selected = sum(trained[name].numel() for name in self.the_pruner.selected(trained, model))
        return Counts(selected, selected, parameter_count(model))

    def untrained(self, model: nn.Module, optimizer: Optimizer) -> list[str]:
        """The names of the weights that would be pruned if the optimizer trained them."""
        trained = trained_weights(model, optimizer)
        return [name for name in self.the_pruner.selected(prunable_weights(model), model) if name not in trained]


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
                f"{self.course.technique} prunes after so many steps, but the schedule of this adopted network has one "
                "step per epoch, which does not show how many the loop takes; give a rewound.Schedule or "
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
        counts = counts_of(self.subjects.model, mask)
        return counts if self.structure is None else counts._replace(network=self.structure.parameters)

    @property
    def unseen(self) -> dict[str, nn.Parameter]:
        """The parameters in the optimizer that no gradient has reached yet.

        Only the dense run is watched for them, and the first level of an adopted network.
        """
        if self.progress.gradients is None or self.level > (1 if self.course.adopt else 0):
            return {}
        stepped = stepped_parameters(self.subjects.model, self.subjects.optimizer)
        return {name: p for name, p in stepped.items() if name not in self.progress.gradients}

    @property
    def without_gradient(self) -> list[str]:
        """The weights that would be pruned if a gradient had reached them (law 11).

        Empty where no parameter at all had a gradient: the optimizer then works without.
        """
        model, optimizer, seen = self.subjects.model, self.subjects.optimizer, self.progress.gradients
        if self.structure is not None:
            return [name for name in trained_parameters(model, optimizer) if name not in seen] if seen else []
        selected = self.course.the_pruner.selected(trained_weights(model, optimizer), model)
        return [name for name in selected if name not in seen] if seen else []

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
