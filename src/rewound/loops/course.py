"""What a run in a user's own loop will do, checked before it begins: its levels, and what they need.

A loop counts epochs or steps: its unit. What the schedule does is recorded and replayed part by part. A part is one
epoch; where steps are counted it is as long as it can be, from one step that a level goes back to up to the next.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Literal

from torch import nn
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import InputError, as_number, as_whole, check_kind, shown
from rewound.foundations.quantities import counted
from rewound.loops.joint import optimizer_kind
from rewound.method.algorithm import Level, goals, levels
from rewound.method.pruning.counts import Counts, parameter_count
from rewound.method.pruning.mask import plain_parameters
from rewound.method.pruning.prunable import prunable_weights
from rewound.method.pruning.pruner import Pruner, check_memory
from rewound.method.technique import Technique, technique_named

Init = Callable[[nn.Module], object]
Unit = Literal["epoch", "step"]


@dataclass(frozen=True, kw_only=True)
class Course:
    """A run as it was asked for; its times are in the unit that the loop counts."""

    unit: Unit = "epoch"
    training_time: int
    compression: float
    technique: str
    retraining_time: int
    rate: float
    one_shot: bool
    pruner: Pruner
    final: float | None
    adopt: bool
    max_drop: float | None
    init: Init | None

    def __post_init__(self) -> None:
        for name, field in self._times.items():
            object.__setattr__(self, field, as_whole(name, getattr(self, field)))
        for name in ("compression", "rate", "final", "max_drop"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, as_number(name, value))
        for name in ("one_shot", "adopt"):
            check_kind(name, getattr(self, name), bool, "give True or False")
        if self.init is not None and not callable(self.init):
            raise InputError(
                f"init must be a function that draws fresh weights for a model in place, not {shown(self.init)}"
            )
        if self.final is not None and not 0 <= self.final < inf:
            raise InputError(f"final must be a learning rate, 0 or above, not {self.final:g}")
        if self.training_time < 1:
            raise InputError(f"training takes at least 1 {self.unit}, not {self.training_time}")
        if self.max_drop is not None and not self.max_drop >= 0:
            raise InputError(f"max_drop must be at least 0, not {self.max_drop:g}")
        source = self.levels[0].weights_from
        if self.adopt and isinstance(source, int):
            raise InputError(
                f"cannot use {self.technique} on an adopted network: its weights at {self.unit} {source} were not "
                "kept; use lr-rewinding or fine-tuning"
            )
        if source == "fresh" and self.init is None:
            raise InputError(f"{self.technique} needs init=, a function that draws fresh weights for a model in place")

    @property
    def _times(self) -> dict[str, str]:
        """The fields that are times, by the names of their arguments."""
        return {f"training_{self.unit}s": "training_time", f"retrain_{self.unit}s": "retraining_time"}

    @property
    def how(self) -> Technique:
        """The technique itself."""
        return technique_named(self.technique)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """What each level prunes to, starts from and trains."""
        densities = goals(self.compression, self.rate, one_shot=self.one_shot)
        return tuple(levels(self.how, self.retraining_time, self.training_time, densities, unit=self.unit))

    @property
    def densities(self) -> list[float]:
        """What the levels prune to."""
        return [level.density for level in self.levels]

    @property
    def dense(self) -> Level:
        """The dense run as level 0; an adopted network has had its own."""
        return Level(density=1.0, weights_from=0, schedule_from=0, length=0 if self.adopt else self.training_time)

    @property
    def length(self) -> int:
        """How long the whole run is."""
        return sum(level.length for level in (self.dense, *self.levels))

    @property
    def rewound_to(self) -> set[int]:
        """The epochs, or steps, of the dense run that the technique goes back to."""
        source = self.levels[0].weights_from
        return {0} if source == "fresh" and not self.adopt else {source} if isinstance(source, int) else set()

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """Where the parts of the dense run begin."""
        T, level = self.training_time, self.levels[0]
        if self.unit == "epoch":
            return tuple(range(T))
        gone_back_to = {at for at in (level.weights_from, level.schedule_from) if isinstance(at, int)}
        return tuple(sorted(at for at in {0, *gone_back_to} if at < T))

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

    def told(self, done: int, network_compression: float) -> str:
        """One line for a person, when so much is done."""
        dense = f"{counted(self.dense.length, f'dense {self.unit}')}, then " if self.dense.length else ""
        levels = f"{counted(len(self.levels), 'level')} of {counted(self.levels[0].length, self.unit)}"
        whole = counted(self.length, self.unit) + (f", {done:,} of them done" if done else "")
        goal = f"{self.compression:g}x ({network_compression:.2f}x of the whole network)"
        return f"rewound: {dense}{levels} by {self.technique} to {goal}: {whole}"

    def arguments(self, model: nn.Module, optimizer: Optimizer) -> dict[str, object]:
        """What must stay the same for a run to be continued, as plain data."""
        plain = ("compression", "technique", "rate", "one_shot", "final", "adopt")
        pruner = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self.pruner).items()}
        return {
            **{name: getattr(self, field) for name, field in self._times.items()},
            **{name: getattr(self, name) for name in plain},
            "pruner": pruner,
            "optimizer": optimizer_kind(optimizer),
            "weights": {name: list(weight.shape) for name, weight in prunable_weights(model).items()},
        }

    def check(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Whether this model can be pruned while this optimizer trains it."""
        check_memory(model)
        weights = prunable_weights(model)
        wrapped = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
        if wrapped or any(hasattr(weight, "device_mesh") for weight in weights.values()):  # a DTensor
            how = "FullyShardedDataParallel" if wrapped else "fully_shard"
            raise InputError(
                f"cannot prune sharded parameters ({how}): a rank sees only its part of the weights, but all "
                "are ranked together; use DistributedDataParallel"
            )
        self.pruner.check(name for name, _ in model.named_parameters(remove_duplicate=False))
        self.pruner.check_zeros_stay(model, weights)
        trained = trained_weights(model, optimizer)
        selected = self.pruner.selected(weights, model)
        if selected and not any(name in trained for name in selected):
            raise InputError(
                "the optimizer trains none of the model's prunable weights: give the one that trains it, and unfreeze "
                "what is to be pruned"
            )
        shapes = {name: tuple(weight.shape) for name, weight in trained.items()}
        self.pruner.kept(shapes, self.levels[-1].density, model=model)

    def counts(self, model: nn.Module, optimizer: Optimizer) -> Counts:
        """How many weights would be pruned as things stand, all of them kept so far."""
        trained = trained_weights(model, optimizer)
        selected = sum(trained[name].numel() for name in self.pruner.selected(trained, model))
        return Counts(selected, selected, parameter_count(model))

    def untrained(self, model: nn.Module, optimizer: Optimizer) -> list[str]:
        """The weights that would be pruned if they were trained."""
        trained = trained_weights(model, optimizer)
        return [name for name in self.pruner.selected(prunable_weights(model), model) if name not in trained]


def trained_weights(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The prunable weights that the optimizer trains: others would be pruned and never retrained."""
    moved = stepped_parameters(model, optimizer)
    return {name: w for name, w in prunable_weights(model).items() if w.requires_grad and name in moved}


def stepped_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The parameters of the model that the optimizer has, by plain name."""
    moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name: p for name, p in plain_parameters(model, tied=False).items() if id(p) in moved}
