"""A run in a user's own loop as it was asked for.

A loop counts epochs or steps: its unit. What the schedule does is recorded and replayed part by part. A part is one
epoch; where steps are counted it is as long as it can be, from one step that a level goes back to up to the next.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Literal

from torch import nn

from rewound.foundations.errors import InputError, as_whole, check_kind, shown
from rewound.foundations.quantities import counted
from rewound.loops.optimizers import optimizer_kind
from rewound.loops.snapshot import Subjects
from rewound.method.algorithm import Level, levels, longest_time
from rewound.method.choices import Choices
from rewound.method.pruning.counts import Counts, parameter_count
from rewound.method.pruning.mask import check_memory
from rewound.method.pruning.prunable import prunable_weights

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
        self._check_pruner()  # first: without what no loop takes, a compression or a rate may be right
        super().__post_init__()
        check_kind("adopt", self.adopt, bool, "give True or False")
        if self.init is not None and not callable(self.init):
            raise InputError(
                f"init must be a function that draws fresh weights for a model in place, not {shown(self.init)}"
            )
        if self.training_time < 1:
            raise InputError(f"training takes at least 1 {self.unit}, not {self.training_time}")
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

    def _check_pruner(self) -> None:
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

    def described(self, done: int, counts: Counts) -> str:
        """One line about the whole run, of which so many units are done; `counts` are to be reached at its end."""
        dense = f"{counted(self.dense.length, f'dense {self.unit}')}, then " if self.dense.length else ""
        levels = f"{counted(len(self.levels), 'level')} of {counted(self.levels[0].length, self.unit)}"
        whole = counted(self.length, self.unit) + (f", {done:,} of them done" if done else "")
        by_flops = self.the_pruner.of == "flops"  # how many weights are left then is not known before
        least = "at least " if self.the_pruner.by_units else ""  # biases and normalisation of units go along
        rest = "of the FLOPs" if by_flops else f"({least}{counts.network_compression:.2f}x of the whole network)"
        goal = f"{self.compression:g}x {rest}"
        return f"rewound: {dense}{levels} by {self.technique} to {goal}: {whole}"

    def arguments(self, subjects: Subjects) -> dict[str, object]:
        """The arguments that must be the same when a run is continued, as plain data."""
        plain = ("compression", "technique", "rate", "one_shot", "final", "adopt")
        pruner = {name: list(v) if isinstance(v, tuple) else v for name, v in self.the_pruner.settings.items()}
        return {
            **{name: getattr(self, field) for name, field in self._times.items()},
            **{name: getattr(self, name) for name in plain},
            "pruner": pruner,
            "slim": self.slim,
            "optimizer": optimizer_kind(subjects.optimizer),
            "weights": {name: list(weight.shape) for name, weight in prunable_weights(subjects.model).items()},
        }

    def check(self, subjects: Subjects) -> None:
        """An error if the model cannot be pruned while the optimizer trains it."""
        model = subjects.model
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
        trained = subjects.trained_weights
        selected = self.the_pruner.selected(weights, model)
        if selected and not any(name in trained for name in selected):
            raise InputError(
                "the optimizer trains none of the model's prunable weights: give the one that trains it, and unfreeze "
                "what is to be pruned"
            )
        if not self.the_pruner.by_units:  # otherwise `structure` checks it, once the units are known
            shapes = {name: tuple(weight.shape) for name, weight in trained.items()}
            self.the_pruner.kept(shapes, self.levels[-1].density, model=model)

    def counts(self, subjects: Subjects) -> Counts:
        """The weights that a density counts, all of them kept so far, and all parameters."""
        trained = subjects.trained_weights
        selected = sum(trained[name].numel() for name in self.the_pruner.counted(trained, subjects.model))
        return Counts(selected, selected, parameter_count(subjects.model))

    def untrained(self, subjects: Subjects) -> list[str]:
        """The names of the weights that would be pruned if the optimizer trained them."""
        model, trained = subjects.model, subjects.trained_weights
        return [name for name in self.the_pruner.selected(prunable_weights(model), model) if name not in trained]
