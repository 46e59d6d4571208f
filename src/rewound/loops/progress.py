"""How far a run in a user's own loop has come: all that is needed to go on, except the tensors it trains."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from rewound.foundations.errors import InputError, warn
from rewound.loops.recording import Recording
from rewound.method.algorithm import has_dropped, returned
from rewound.method.pruning.mask import Mask
from rewound.method.technique import Facts
from rewound.tasks import ranks


class Reached(NamedTuple):
    """The end of one level; level 0 is the dense run."""

    level: int
    density: float
    """The density that the level was pruned to: of the weights, or of the FLOPs if the pruner counts those."""
    done: int
    """How many epochs, or steps if the loop counts those, were done by then, the dense run included."""
    value: float | None
    """The last value that was reported in the level; None where none was."""
    metric: str = "accuracy"
    """The name of the value."""
    higher_is_better: bool = True
    network_compression: float | None = None
    """Compression of all parameters. None in earlier checkpoints."""
    measured_density: float | None = None
    """The fraction of the prunable weights that is left. None in earlier checkpoints."""
    flops_left: float | None = None
    """The fraction of the FLOPs that is left, if the pruner counts those."""

    @property
    def compression(self) -> float:
        """How many times fewer of the prunable weights are left."""
        return 1 / (self.density if self.measured_density is None else self.measured_density)

    def described(self, levels: int, length: int, unit: str = "epoch") -> str:
        """One line for a person.

        >>> Reached(3, 0.512, 360, 0.912, network_compression=1.9).described(levels=11, length=1080)
        'level 3 of 11: 1.95x (density 0.512), 1.90x of the whole network, epoch 360 of 1,080, accuracy 0.912'
        >>> Reached(1, 0.5, 10, None, measured_density=0.625, flops_left=0.48).described(levels=1, length=10)
        'level 1 of 1: 2.08x of the FLOPs, 1.60x of the weights (density 0.625), epoch 10 of 10'
        """
        weights = "" if self.flops_left is None else f"{1 / self.flops_left:.2f}x of the FLOPs, "
        weights += f"{self.compression:.2f}x" + (" of the weights" if weights else "")
        level = f"level {self.level} of {levels}: {weights} (density {1 / self.compression:.4g})"
        if self.network_compression is not None:
            level += f", {self.network_compression:.2f}x of the whole network"
        value = "" if self.value is None else f", {self.metric} {self.value:g}"
        return f"{level if self.level else 'dense'}, {unit} {self.done:,} of {length:,}{value}"


class Operations(TypedDict):
    """The operations of one forward pass of the dense network, as in `flops.Profile`, and its number of examples."""

    weights: dict[str, list[int]]
    fixed: int
    examples: int


@dataclass
class Progress:
    """Where a run stands; level 0 is the dense run.

    Where the loop counts steps, "epoch" means here one of those steps, and a part of the run (`course`) has many.
    """

    level: int = 0
    done: int = 0
    """Epochs done in the present level."""
    epoch: int = 0
    """Epochs done in all, which is the number of the next one."""
    steps: int = 0
    """Optimizer steps taken in the present part of the run; a part is an epoch, unless the loop counts steps."""
    began: int = 0
    """How many of these `steps` had been taken when the present step of the loop began, if the loop counts steps."""
    steps_done: int = 0
    """Optimizer steps taken in all."""
    level_steps: int = 0
    """Optimizer steps taken in the present level."""
    updates: int = 0
    """How often the mask was updated in the present level, where it prunes gradually."""
    mask: Mask | None = None
    recording: Recording = field(default_factory=Recording)
    reached: list[Reached] = field(default_factory=list)
    densities: list[float] = field(default_factory=list)
    """The densities that the levels so far were pruned to."""
    facts: Facts | None = None
    """What a learning-rate rule may know of the present level's pruning, if there is a rule."""
    gradients: set[str] | None = field(default_factory=set)
    """The parameters that a gradient has reached in the dense run; None if an earlier version did not record them."""
    value: float | None = None
    """The last value that was reported in the present level."""
    higher_is_better: bool = True
    metric: str = "accuracy"
    run: str = ""
    """The name of the run in its files; drawn when the run begins, and the same after each resumption."""
    operations: Operations | None = None

    def report(self, value: float, higher_is_better: bool, metric: str) -> None:
        """Note how good the network is."""
        known = any(score is not None for score in (*self._scores, self.value))
        if known and higher_is_better != self.higher_is_better:
            raise InputError(
                f"higher_is_better was {self.higher_is_better} in earlier reports and is {higher_is_better} now; "
                "report one metric throughout"
            )
        self.value, self.higher_is_better, self.metric = value, higher_is_better, metric

    def agree(self) -> None:
        """Take rank 0's report on every rank, and the parameters that a gradient has reached on any rank.

        Other ranks may have evaluated other data, or nothing.
        """
        reported = (self.value, self.higher_is_better, self.metric)
        self.value, self.higher_is_better, self.metric = ranks.from_first(reported)
        if self.gradients is not None:
            self.gradients = set().union(*ranks.gathered(self.gradients))

    def reached_at(self, density: float, epochs: int) -> Reached:
        """The end of the present level, if it ends after so many epochs in all."""
        return Reached(self.level, density, epochs, self.value, self.metric, self.higher_is_better)

    def check_reports(self, max_drop: float | None, folder: Path | None) -> None:
        """An error if the reports cannot be compared with `max_drop`: a level has none, or one in another unit."""
        if max_drop is None:
            return
        for reached in self.reached:
            if reached.value is not None:
                check_unit(reached.value, reached.metric, max_drop)
        unreported = next((reached.level for reached in self.reached if reached.value is None), None)
        if unreported is not None:
            which = f"level {unreported}" if unreported else "the dense run"
            remedy = "" if folder is None else " and train anew in another folder, or go on without max_drop"
            raise InputError(
                "max_drop needs run.report(accuracy=...) in every level, on rank 0 at least, but "
                f"{which} ended without one; report it{remedy}"
            )

    def begin_level(self, density: float, mask: Mask, facts: Facts | None) -> None:
        """Note that the next level has been pruned."""
        self.level, self.done, self.value = self.level + 1, 0, None
        self.level_steps = self.updates = 0
        self.mask, self.facts = mask, facts
        self.densities.append(density)

    def begin_step(self) -> None:
        """Count a step that an optimizer takes."""
        self.steps, self.steps_done, self.level_steps = self.steps + 1, self.steps_done + 1, self.level_steps + 1

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer step was taken in the present epoch."""
        return self.steps > self.began

    def end_epoch(self, *, part_ended: bool = True) -> None:
        """Count the present epoch as done."""
        self.done, self.epoch, self.steps = self.done + 1, self.epoch + 1, 0 if part_ended else self.steps
        self.began = self.steps

    def leads_to(self, densities: Sequence[float]) -> bool:
        """Whether a run to these densities can go on from here: they begin with those pruned to so far."""
        return self.densities == list(densities[: len(self.densities)])

    def has_dropped(self, max_drop: float | None) -> bool:
        """Whether the reports of the last levels end the run."""
        return has_dropped(self._scores, max_drop, higher_is_better=self.higher_is_better)

    def returned(self, max_drop: float | None) -> int:
        """The level that would be returned now."""
        return returned(self._scores, max_drop, higher_is_better=self.higher_is_better)

    @property
    def _scores(self) -> list[float | None]:
        return [reached.value for reached in self.reached]

    def state_dict(self) -> dict[str, Any]:
        """Plain data that torch's `weights_only` loader can read back; named tuples become plain ones."""
        mask = None
        if self.mask is not None:
            mask = {"bits": self.mask.packed(), "shapes": {name: tuple(m.shape) for name, m in self.mask.items()}}
        return {
            **{name: getattr(self, name) for name in (*_ALWAYS, *_LATER)},
            "mask": mask,
            "recording": self.recording.state_dict(),
            "reached": [reached[:] for reached in self.reached],
            "densities": self.densities[:],
            "facts": self.facts and self.facts[:],
            "accuracy": self.value,
            "gradients": None if self.gradients is None else sorted(self.gradients),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "Progress":
        """The inverse of `state_dict`, for the files of earlier versions too."""
        mask, facts, names = state["mask"], state.get("facts"), state.get("gradients")
        recording = Recording.from_state_dict(state["recording"])
        metric = (state.get("metric", "accuracy"), state["higher_is_better"])  # earlier files lack it in each level
        found = {name: state[name] for name in _ALWAYS} | {name: state[name] for name in _LATER if name in state}
        if "steps_done" not in found:
            found["steps_done"] = _steps_before(state, recording)
        return cls(
            **found,
            mask=None if mask is None else Mask.unpacked(mask["bits"], mask["shapes"]),
            recording=recording,
            reached=[Reached(*reached[:4], *(reached[4:] or metric)) for reached in state["reached"]],
            densities=state["densities"][:],
            facts=facts and Facts(*facts),
            value=state["accuracy"],
            gradients=None if names is None else set(names),
        )


# The fields of a progress that a file has as they are; those of `_LATER` are missing in the files of earlier versions.
_ALWAYS = ("level", "done", "epoch", "steps", "higher_is_better")
_LATER = ("began", "steps_done", "level_steps", "updates", "metric", "run", "operations")
_SHARES = frozenset({"f1", "precision", "recall", "auc", "auroc", "iou", "miou", "dice", "top1", "top5"})
_UNITS = frozenset({"%", "percent", "percentage", "pct", "point", "points"})


def _steps_before(state: Mapping[str, Any], recording: Recording) -> int:
    """The optimizer steps by an earlier file, which has only those of the dense run: levels took as many an epoch."""
    recorded, reached = sum(map(recording.steps, range(recording.trained_epochs))), state["reached"]
    if not state["level"]:
        return recorded if not reached or reached[0][2] else 0  # an adopted network has had no dense run
    dense = reached[0][2]
    per_epoch = round(recorded / recording.trained_epochs)
    return int((recorded if dense else 0) + (state["epoch"] - dense) * per_epoch + state["steps"])


def check_unit(value: float, metric: str, max_drop: float) -> None:
    """An error if a value and `max_drop` seem to have different units, as percent and fractions.

    >>> check_unit(97.28, "accuracy percent", max_drop=0.5), check_unit(23.4, "perplexity", max_drop=0.5)
    (None, None)
    """
    words = set(re.findall(r"%|[a-z]+[0-9]*", metric.lower()))
    if words & _UNITS or not any(word in _SHARES or word.startswith("acc") for word in words):
        return
    if value > 1 and 0 < max_drop < 1:
        raise InputError(
            f"{metric} {value:g} is above 1, so max_drop={max_drop:g} would be {max_drop:g} points of it; report a "
            f"fraction ({value / 100:g}), give max_drop in points ({100 * max_drop:g}), or name the unit in the metric "
            f"({metric + ' percent'!r})"
        )
    if value <= 1 <= max_drop:
        warn(
            f"no fraction can drop by max_drop={max_drop:g}: if {metric} is one, give max_drop={max_drop / 100:g} to "
            "end the run before it falls"
        )


def progress_of(state: object) -> Progress:
    """The progress in a file or a trainer's checkpoint, which anybody may have written; an error says what is wrong."""
    if not isinstance(state, Mapping):
        raise InputError(f"how far the run had come is a {type(state).__name__}, not a dict")
    try:
        progress = Progress.from_state_dict(state)
        _check(progress)
    except KeyError as error:
        raise InputError(f"it does not say {error}") from error
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise InputError(f"what it says of the run's progress is not as it was written ({error})") from error
    return progress


def _check(progress: Progress) -> None:
    """A ValueError where fields have the wrong type or contradict each other."""
    numbers = (progress.level, progress.done, progress.epoch, progress.steps, progress.began, progress.recording.epochs)
    if not all(type(number) is int and number >= 0 for number in (*numbers, progress.level_steps, progress.updates)):
        raise ValueError(f"level, epochs and steps are {numbers}")
    if not all(isinstance(density, float) and 0 < density <= 1 for density in progress.densities):
        raise ValueError(f"the densities are {progress.densities}")
    if len(progress.densities) != progress.level or (progress.mask is None) != (progress.level == 0):
        raise ValueError(f"level {progress.level} with densities {progress.densities}")
    if len(progress.reached) not in (progress.level, progress.level + 1):
        raise ValueError(f"level {progress.level} with {len(progress.reached)} levels reached")
    if any(type(each.done) is not int or not isinstance(each.value, float | None) for each in progress.reached):
        raise ValueError(f"the levels reached are {progress.reached}")
    for group in progress.recording.groups:
        for track in group.values():
            if not all(isinstance(steps, int) for runs in track for _, steps in runs):
                raise ValueError("the recording counts no steps")
    if (counted := progress.operations) is not None and not (
        isinstance(counted["weights"], dict) and type(counted["fixed"]) is type(counted["examples"]) is int
    ):
        raise ValueError("its operations are not counted")
    if not all(isinstance(name, str) for name in (progress.run, progress.metric, *(progress.gradients or ()))):
        raise ValueError("its names are no text")
