"""A recipe is a task: model + data + optimizer + schedule + evaluation.

Its fields are the hyperparameters (they are hashed into every key, and are the schema of a sweep's
`[recipe-fields]`), its methods the behaviour. A task of your own is one subclass in one file, named
`package.module:Class` wherever a recipe is asked for.
"""

import inspect
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property, lru_cache
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import InputError, check_kind, first_line, shown
from rewound.foundations.metric import Metric
from rewound.foundations.names import path_of, source_digest, unknown
from rewound.foundations.quantities import sized
from rewound.foundations.randomness import own_draws
from rewound.method.costs import MULTIPLY_ADDS, Costs
from rewound.method.flops import Profile, profile
from rewound.method.pruner import Pruner
from rewound.method.pruning.counts import Counts, parameter_count
from rewound.method.pruning.prunable import prunable_weights
from rewound.method.schedule import Schedule
from rewound.method.structure.groups import Units
from rewound.method.structure.tracing import units
from rewound.tasks.hyperparameters import coerced, field_word, widened

Batch: TypeAlias = tuple[Tensor, ...]


class Position(NamedTuple):
    """Where a run is: the trial's seed and its position determine all randomness of a step (law 1)."""

    prunings: int
    steps: int


class _Pair(NamedTuple):
    val: float
    test: float


class Scores(_Pair):
    """The metric on the validation and on the test part of the held-out data; by keyword, on further test sets.

    As a pair it is (val, test); further test sets are kept and shown, never compared.

    >>> Scores(0.91, 0.9, newstest2014=0.12).others
    {'newstest2014': 0.12}
    """

    others: Mapping[str, float]

    def __new__(cls, val: float, test: float, **others: float) -> "Scores":
        scores = super().__new__(cls, val, test)
        scores.others = others
        return scores

    def _replace(self, **fields: float) -> "Scores":
        return Scores(**{"val": self.val, "test": self.test, **self.others, **fields})

    def __getnewargs_ex__(self) -> tuple[tuple[float, float], Mapping[str, float]]:
        return (self.val, self.test), self.others


@dataclass(frozen=True)
class Recipe(ABC):
    """The base of every task; a subclass is a frozen dataclass whose fields all have defaults."""

    name: ClassVar[str] = ""
    """The name in tables; empty means the import path of the class."""
    version: ClassVar[int] = 1
    """Raise it when the meaning of the fields changes: keys of earlier results then no longer apply."""
    metric: ClassVar[Metric] = Metric()
    test_size: ClassVar[int | None] = None
    """The number of test examples, where the metric is a fraction of them."""
    costs: ClassVar[Costs] = MULTIPLY_ADDS
    """How FLOPs are counted."""
    data_identity: ClassVar[tuple[str, ...]] = ()
    """Which names in `made_with` decide what batches hold, as the decoder of images does: no run goes on with other
    ones in its middle, neither from a draft nor from a published state."""
    epoch_seconds: ClassVar[Mapping[str, float]] = {}
    """Measured seconds of one epoch by device type, for estimates before anything has run."""

    clip_norm: float = field(default=math.inf, kw_only=True)
    """The largest norm that the gradient of all weights may have in a step; a larger gradient is scaled down to it."""
    accumulation: int = field(default=1, kw_only=True)
    """How many batches make a step: it follows the mean of their gradients."""
    clip_each: bool = field(default=False, kw_only=True)
    """Whether `clip_norm` limits the gradient of each batch of a step, instead of their mean."""

    def __post_init__(self) -> None:
        if not self.clip_norm > 0:
            raise InputError(f"clip-norm must be above 0, not {self.clip_norm:g}; leave it out to clip nothing")
        if self.accumulation < 1:
            raise InputError(f"accumulation must be at least 1 batch a step, not {self.accumulation}")
        if self.clip_each and not math.isfinite(self.clip_norm):
            raise InputError("clip-each needs the norm to clip to; give clip-norm, as clip-norm = 5.0")

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """The network with its initial weights, a function of the seed alone."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer. At every step `train` sets the learning rate of each group: the schedule's value, times the
        ratio of the group's own `lr` to the optimizer's default `lr` (law 9)."""

    @property
    @abstractmethod
    def schedule(self) -> Schedule:
        """The original learning-rate schedule S; its length is the training time T in steps."""

    @property
    @abstractmethod
    def steps_per_epoch(self) -> float:
        """How many steps one pass over the training data takes."""

    @property
    @abstractmethod
    def training_epochs(self) -> float:
        """The nominal training time T in epochs; a retraining time equal to it means all of the schedule's steps."""

    @abstractmethod
    def batches(self, seed: int, position: Position, device: torch.device) -> Iterator[Batch]:
        """The endless stream of training batches, augmented, on `device`; `position.steps` batches came before it."""

    def first_batch(self, position: Position) -> Position:
        """From where on `batches` has those of the step at this position: a step may take several batches."""
        return Position(position.prunings, position.steps * self.accumulation)

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The scalar to minimise, with all that belongs to it: a penalty on weights, an auxiliary loss."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> Scores:
        """The metric on the held-out data; the model comes in evaluation mode, without gradients."""

    @abstractmethod
    def example(self) -> Batch:
        """The inputs of one forward pass with a batch of one, for counting FLOPs; needs no data."""

    def check_data(self) -> None:  # noqa: B027 (most have nothing to check)
        """An `InputError` if the data is not there; asked before any worker starts, so it must be quick."""

    def made_with(self) -> Mapping[str, str]:
        """What results depend on here that no field says, such as a checksum of the data or the version of a library.

        It is kept with results, and a run says where it has changed. Empty where nothing is known.
        """
        return {}

    def prunable(self, model: nn.Module) -> Mapping[str, nn.Parameter]:
        """The weights that may be pruned, by name."""
        return prunable_weights(model)

    def steps_of(self, epochs: float) -> int:
        """How many steps a retraining time is, rounded up as the authors do; t = T is exactly T's steps."""
        # Rounded first: 1.1 epochs of 10 steps are 11, not the 12 that 11.000000000000002 would be.
        if not math.isfinite(epochs * self.steps_per_epoch):
            raise InputError(f"{epochs:g} epochs are more than can be counted in steps; give fewer")
        steps = math.ceil(round(epochs * self.steps_per_epoch, 6))
        if epochs == self.training_epochs:
            return self.schedule.steps
        return min(steps, self.schedule.steps) if epochs < self.training_epochs else steps

    @cached_property
    def skeleton(self) -> nn.Module:
        """A model of this recipe to read names, shapes and operation counts from, never to train."""
        with own_draws(torch.device("cpu")):  # layers draw weights when they are made
            return self.model(0)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the prunable weights, by name."""
        return {name: tuple(weight.shape) for name, weight in self.prunable(self.skeleton).items()}

    @property
    def units(self) -> Units:
        """What lives or dies together in the network; an error where it cannot be traced."""
        return _units_of(self)

    @cached_property
    def profile(self) -> Profile:
        """The operation counts of one forward pass; an error where the model does not take the example."""
        try:
            return profile(self.skeleton, self.example(), self.costs)
        except InputError:
            raise
        except (RuntimeError, TypeError, ValueError, MemoryError) as error:
            reason = first_line(error)
            if isinstance(error, MemoryError) or "allocate memory" in reason:  # torch's type for it is a GPU's alone
                asked = re.search(r"tried to allocate (\d+) bytes", reason)
                more = f" (it asks for another {sized(int(asked[1]))})" if asked else ""
                raise InputError(
                    f"the memory does not suffice to run the model of recipe {self.label()} on its example(){more}; "
                    "give smaller inputs, such as a smaller image-size, or use a machine with more memory"
                ) from error
            raise InputError(f"the model of recipe {self.label()} does not take its example(): {reason}") from error

    @cached_property
    def rate_factors(self) -> tuple[float, ...]:
        """Each group's own learning rate as a multiple of the optimizer's default one, which follows the schedule."""
        optimizer = self.optimizer(self.skeleton)
        if not hasattr(optimizer, "param_groups"):  # a forgotten return
            given = shown(optimizer)
            raise InputError(f"optimizer of recipe {self.label()} must return a torch optimizer, not {given}")
        base = float(optimizer.defaults.get("lr", 1.0))
        rates = [float(group.get("lr", base)) for group in optimizer.param_groups]
        if base == 0 and any(rates):
            raise InputError(
                f"the optimizer of recipe {self.label()} has a default lr of 0 and groups with other rates, "
                "whose ratio to it cannot be told; give the optimizer the schedule's first rate as its lr"
            )
        if base and not any(rates):
            raise InputError(
                f"the optimizer of recipe {self.label()} trains nothing: all of its groups have a learning rate of 0; "
                "give one of them another lr, or leave theirs out"
            )
        return tuple(rate / base if base else 1.0 for rate in rates)

    def __getstate__(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # workers get the fields, not what was cached

    @classmethod
    def label(cls) -> str:
        """The recipe's name in tables and sweeps: its own, as a subclass with other defaults is another task."""
        return str(vars(cls).get("name", "")) or path_of(cls)

    def identity(self) -> dict[str, object]:
        """What is hashed: name, version, the fields that differ from their defaults, rate factors that are not all 1.

        A new field whose default changes nothing therefore leaves every earlier key valid.
        """
        given = {f.name: widened(getattr(self, f.name), f.default) for f in fields(self)}
        changed = {f.name: given[f.name] for f in fields(self) if given[f.name] != f.default}
        factors = {"rates": self.rate_factors} if set(self.rate_factors) - {1.0} else {}
        return {"recipe": self.label(), "version": self.version, "fields": changed, **factors}

    def source_digest(self) -> str:
        """A digest of the file that defines the recipe; kept with results, not hashed into keys."""
        return source_digest(f"{type(self).__module__}:{type(self).__qualname__}")

    @classmethod
    def with_fields(cls, values: Mapping[str, object]) -> "Recipe":
        """The recipe with these fields (keys may use hyphens), each checked against its default's type."""
        check_kind("fields", values, Mapping, "give values by the names of fields, as {'epochs': 8}")
        defaults = {f.name: f.default for f in fields(cls)}
        chosen: dict[str, object] = {}
        for key, value in values.items():
            name = key.replace("-", "_")
            if name not in defaults:
                raise InputError(unknown(f"field of {cls.label()}", key, (n.replace("_", "-") for n in defaults)))
            chosen[name] = coerced(f"{cls.label()}.{key}", value, defaults[name])
        return cls(**chosen)  # type: ignore[arg-type]  # each of its default's type, as checked


@lru_cache(maxsize=16)
def _units_of(recipe: Recipe) -> Units:
    try:
        return units(recipe.skeleton, recipe.example())
    except InputError as error:
        raise InputError(f"recipe {recipe.label()}: {error}") from error


def changed_fields(recipe: Recipe) -> list[str]:
    """The fields that differ from their defaults, a word each.

    >>> from rewound.tasks.recipes.digits import Digits
    >>> changed_fields(Digits(epochs=8, batch_size=64))
    ['epochs=8', 'batch-size=64']
    """
    changed = recipe.identity()["fields"]
    assert isinstance(changed, dict)
    return [field_word(name, value) for name, value in changed.items()]


def shapes_to_prune(recipe: Recipe, pruner: Pruner) -> Mapping[str, tuple[int, ...]]:
    """The shapes of what a pruner is given: prunable weights, or all that trains where whole units go.

    What the recipe's `prunable` leaves out stays as it is, so that a unit with weights there stays, too.
    """
    if not pruner.by_units:
        return recipe.shapes
    left_out = prunable_weights(recipe.skeleton).keys() - recipe.shapes.keys()
    trained = ((name, each) for name, each in recipe.skeleton.named_parameters() if each.requires_grad)
    return {name: tuple(each.shape) for name, each in trained if name not in left_out}


def selected_counts(recipe: Recipe, pruner: Pruner) -> Counts:
    """How many weights of a recipe a density of this pruner counts, and how many parameters its network has.

    >>> from rewound.tasks.recipes.digits import Digits
    >>> selected_counts(Digits(), Pruner(skip=("stem.*",)))
    Counts(kept=56032, selected=56032, network=56874, gone_along=0)
    """
    selected = sum(math.prod(recipe.shapes[name]) for name in pruner.counted(recipe.shapes, recipe.skeleton))
    return Counts(selected, selected, parameter_count(recipe.skeleton))


def check_recipe(given: object) -> None:
    """An error for what is no recipe: its name, its class, a model."""
    check_kind("recipe", given, Recipe, "give one, as Digits(), or a model of your own to rewound.epochs")
    assert isinstance(given, Recipe)  # as checked just above
    check_class(type(given))
    Recipe.__post_init__(given)  # a subclass may have one of its own


def check_class(task: type[Recipe]) -> None:
    """An error for a class that lacks a part, or with a value that looks like a field and is none."""
    if task.__abstractmethods__:
        raise InputError(f"recipe {task.label()} has no {', '.join(sorted(task.__abstractmethods__))}; define each")
    if not (isinstance(task.metric, Metric) and task.metric.name and task.metric.unit):
        raise InputError(
            f"metric {task.metric!r} of recipe {task.label()} must be a Metric with a name and a unit, "
            "as Metric('cross-entropy', 'nats', higher_is_better=False)"
        )
    defaults = {f.name: f.default for f in fields(task)}
    if without := [name for name, default in defaults.items() if default is MISSING]:  # a factory's values differ
        raise InputError(
            f"{', '.join(without)} of recipe {task.label()} has no default value, or one that a factory makes; write "
            "it as a value, as epochs: float = 4.0 or sizes: tuple[int, ...] = (8, 8)"
        )
    stray = [name for name, default in defaults.items() if getattr(task, name, default) is not default]
    for part in task.__mro__:
        kinds = inspect.get_annotations(part) if issubclass(part, Recipe) else {}
        stray += [name for name, kind in kinds.items() if name not in defaults and "ClassVar" not in str(kind)]
    if stray:  # it would not be hashed, and other values of it would share results
        raise InputError(
            f"{', '.join(stray)} of recipe {task.label()} is no field: "
            "write @dataclass(frozen=True) above the class, and each field with its type, as epochs: float = 4.0"
        )
