"""Recipes: their fields, their identity, and retraining times in steps."""

import inspect
import math
import re
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import rewound
from rewound import InputError, Metric, Recipe
from rewound.states.history import Start
from rewound.tasks.recipe import Scores, check_recipe
from rewound.tasks.recipes import recipe_named
from rewound.tasks.recipes.cifar10 import ResNet20
from rewound.tasks.recipes.digits import Digits
from rewound.tasks.recipes.images import ImageClassification


@dataclass(frozen=True)
class Mine(Digits):
    """A user's own: without a name it is called by its import path."""

    name: ClassVar[str] = ""
    version: ClassVar[int] = 3
    blend: float = 0.5
    tags: tuple[str, ...] = ("a", "b")


# Fields


def test_fields_from_a_table_may_use_hyphens_and_whole_numbers() -> None:
    recipe = Digits.with_fields({"epochs": 8, "batch-size": 32, "widths": [8, 16], "nesterov": True, "weight_decay": 0})
    assert recipe == Digits(epochs=8.0, batch_size=32, widths=(8, 16), nesterov=True, weight_decay=0.0)
    assert isinstance(recipe.epochs, float)
    assert Digits.with_fields({}) == Digits()


def test_an_unknown_field_is_told_with_the_nearest() -> None:
    with pytest.raises(InputError) as error:
        Digits.with_fields({"batchsize": 32})
    assert str(error.value).startswith("unknown field of digits 'batchsize'; did you mean 'batch-size'? (known: ")
    assert "learning-rate" in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("batch-size", 32.5, "int"),
        ("batch-size", True, "int"),
        ("batch-size", "32", "int"),
        ("epochs", "ten", "float"),
        ("epochs", True, "float"),
    ],
)
def test_a_field_has_the_type_of_its_default(key: str, value: object, kind: str) -> None:
    with pytest.raises(InputError, match=rf"^digits\.{key} must be of type {kind}, not {value!r}$"):
        Digits.with_fields({key: value})


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("nesterov", 1, "bool, not 1; write true or false"),
        ("nesterov", "True", "bool, not 'True'; write true or false"),
        ("widths", 32, "tuple, not 32; write a list, as [32, 48]"),
        ("widths", "4,8", "tuple, not '4,8'; write a list, as [32, 48]"),
    ],
)
def test_it_is_said_how_a_field_is_written(key: str, value: object, says: str) -> None:
    with pytest.raises(InputError, match=rf"^digits\.{key} must be of type {re.escape(says)}$"):
        Digits.with_fields({key: value})


@pytest.mark.parametrize("value", [["32", "48"], [32, 4.5], [32, True]])
def test_so_does_every_entry_of_a_list(value: list[object]) -> None:
    with pytest.raises(InputError, match=r"^each of digits\.widths must be of type int, not"):
        Digits.with_fields({"widths": value})


@pytest.mark.parametrize("key", ["epochs", "batch-size", "learning-rate"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_and_times_are_positive(key: str, value: int) -> None:
    with pytest.raises(InputError, match=f"{key} must be above 0, not {value}"):
        Digits.with_fields({key: value})


def test_decay_momentum_and_shift_are_not_negative() -> None:
    for key in ("weight-decay", "momentum", "shift"):
        with pytest.raises(InputError, match=f"{key} must be at least 0, not -1"):
            ResNet20.with_fields({key: -1})


def test_precision_is_one_of_two_words() -> None:
    assert ResNet20.with_fields({"precision": "bfloat16"}).identity()["fields"] == {"precision": "bfloat16"}
    with pytest.raises(InputError, match="precision is float32 or bfloat16, not 'half'"):
        ResNet20.with_fields({"precision": "half"})


def test_too_short_a_training_has_no_room_for_its_drops() -> None:
    with pytest.raises(InputError, match="must end in growing order"):
        _ = Digits(epochs=0.1).schedule


# Identity


def test_only_fields_that_differ_from_their_defaults_are_hashed() -> None:
    assert Digits().identity() == {"recipe": "digits", "version": 1, "fields": {}}
    assert Digits(epochs=16.0, widths=(32, 48)).identity()["fields"] == {}
    assert Digits(epochs=8.0, shift=0).identity()["fields"] == {"epochs": 8.0, "shift": 0}


def test_a_number_without_a_point_is_the_same_recipe() -> None:
    assert Digits(epochs=8) == Digits(epochs=8.0)
    assert Start(Digits(epochs=8), 1).key == Start(Digits(epochs=8.0), 1).key
    assert Start(Digits(weight_decay=0), 1).key == Start(Digits(weight_decay=0.0), 1).key


def test_a_recipe_without_a_name_is_called_by_its_path() -> None:
    assert Mine.label() == "test_recipe:Mine"
    assert Mine(blend=0.25).identity() == {"recipe": "test_recipe:Mine", "version": 3, "fields": {"blend": 0.25}}
    with pytest.raises(InputError, match=r"unknown field of test_recipe:Mine 'blnd'; did you mean 'blend'"):
        Mine.with_fields({"blnd": 1})


def test_a_recipe_is_a_value() -> None:
    assert Digits() == Digits()
    assert hash(Digits(epochs=8.0)) == hash(replace(Digits(), epochs=8.0))
    assert Digits() != Digits(shift=0)


def test_the_source_digest_is_of_the_file_that_defines_the_recipe() -> None:
    assert Digits().source_digest() == Digits(epochs=1.0).source_digest()
    assert len({Digits().source_digest(), ResNet20().source_digest(), Mine().source_digest()}) == 3


class Undecorated(Digits):
    smoothing: float = 0.1


class Redefined(Digits):
    epochs: float = 3.0


@dataclass(frozen=True)
class Untyped(Digits):
    epochs = 3.0


@dataclass(frozen=True)
class Below(Undecorated):
    known: ClassVar[int] = 1


@pytest.mark.parametrize("metric", [Metric("perplexity", ""), ("loss", "nats", False), "accuracy"])
def test_a_metric_without_a_unit_is_refused(metric: object) -> None:
    task = dataclass(frozen=True)(type("Unclear", (Digits,), {"metric": metric}))
    with pytest.raises(
        InputError, match=r"metric .* must be a Metric with a name and a unit, as Metric\('cross-entropy'"
    ):
        check_recipe(task())


@pytest.mark.parametrize(
    ("task", "name"), [(Undecorated, "smoothing"), (Redefined, "epochs"), (Untyped, "epochs"), (Below, "smoothing")]
)
def test_a_value_that_would_not_be_hashed_is_refused(task: type[Digits], name: str) -> None:
    says = rf"{name} of recipe test_recipe:{task.__name__} is no field: write @dataclass\(frozen=True\) above the class"
    with pytest.raises(InputError, match=says):
        recipe_named(f"test_recipe:{task.__name__}")
    with pytest.raises(InputError, match=says):
        rewound.prune(task())


@dataclass(frozen=True)
class Manufactured(Digits):
    stages: tuple[int, ...] = field(default_factory=lambda: (1, 2))


def test_a_field_without_a_default_value_is_refused() -> None:
    with pytest.raises(InputError, match="stages of recipe test_recipe:Manufactured has no default value, or one"):
        recipe_named("test_recipe:Manufactured")


@dataclass(frozen=True)
class Unfinished(Digits):
    @abstractmethod
    def evaluate(self, model: torch.nn.Module) -> Scores: ...


def test_a_class_with_parts_to_be_defined_is_refused() -> None:
    with pytest.raises(InputError, match="recipe test_recipe:Unfinished has no evaluate; define each"):
        recipe_named("test_recipe:Unfinished")


def test_a_task_says_what_is_missing_from_it() -> None:
    assert inspect.isabstract(Recipe)
    assert inspect.isabstract(ImageClassification)
    with pytest.raises(TypeError, match="abstract"):
        ImageClassification()


# Retraining times in steps


@pytest.mark.parametrize(
    ("epochs", "start"),
    [
        (182, 0),
        (170, 4_701),
        (150, 12_514),
        (130, 20_326),
        (110, 28_139),
        (90, 35_951),
        (70, 43_764),
        (50, 51_576),
        (30, 59_389),
        (10, 67_201),
    ],
)
def test_the_authors_cifar_grid(epochs: int, start: int) -> None:
    """They round the length up; t = T is all of the run, though 182 epochs are 71,093.75 steps."""
    recipe = ResNet20()
    assert recipe.schedule.steps - recipe.steps_of(epochs) == start


def test_times_longer_than_the_training() -> None:
    assert ResNet20().steps_of(364) == 142_188
    assert ResNet20().steps_of(0.001) == 1


@pytest.mark.parametrize(("epochs", "steps"), [(1.1, 11), (2.3, 23), (4.1, 41), (4.11, 42)])
def test_a_rounding_error_is_no_step(epochs: float, steps: int) -> None:
    """1.1 * 10 is 11.000000000000002 in floating point."""

    @dataclass(frozen=True)
    class Ten(Digits):
        steps_per_epoch: ClassVar[float] = 10.0

    assert Ten().steps_of(epochs) == steps


def test_no_time_within_the_training_is_longer_than_it() -> None:
    recipe = Digits(epochs=1.0)
    assert recipe.schedule.steps == 9  # an epoch is 9.34 steps
    assert [recipe.steps_of(epochs) for epochs in (0.5, 0.96, 0.99, 1.0, 1.01)] == [5, 9, 9, 9, 10]


@dataclass(frozen=True)
class Mistaken(Digits):
    """A task with a part that returns something else than it should."""

    part: str = "optimizer"
    epochs: float = 0.5
    drops: tuple[float, ...] = (0.2,)

    def optimizer(self, model: torch.nn.Module) -> Any:
        groups = [{"params": list(model.parameters()), "lr": 0.0}]
        return {"optimizer": None, "rates": torch.optim.SGD(groups, lr=0.1)}.get(self.part, super().optimizer(model))

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        return {"loss": None, "losses": torch.ones(3)}.get(self.part, super().loss(model, batch))

    def evaluate(self, model: torch.nn.Module) -> Scores:
        scores = {"nan": Scores(math.nan, 0.5), "inf": Scores(0.5, math.inf), "percent": Scores(97.0, 98.0)}
        return scores.get(self.part, Scores(0.5, 0.5))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("optimizer", "optimizer of recipe .*Mistaken must return a torch optimizer, not None"),
        ("rates", "trains nothing: all of its groups have a learning rate of 0; give one of them another lr"),
        ("loss", "loss of recipe .*Mistaken must return one number as a tensor, not None"),
        ("losses", r"loss of recipe .*Mistaken must return one number as a tensor, not a tensor of shape \(3,\)"),
        ("nan", "level 0 was evaluated to val nan, test 0.5; evaluate of recipe .*Mistaken must return finite numbers"),
        ("inf", "level 0 was evaluated to val 0.5, test inf; evaluate of recipe"),
        ("percent", "Mistaken has accuracy 97, which is no fraction; state its unit"),
    ],
)
def test_what_a_part_returns_by_mistake_is_said_in_a_sentence(part: str, words: str, tmp_path: Path) -> None:
    with pytest.raises((InputError, rewound.Failed), match=words):
        rewound.prune(Mistaken(part=part), compression=2, store=tmp_path, say=lambda line: None)


@dataclass(frozen=True)
class Lost(Digits):
    """A task whose pruned networks cannot be judged."""

    epochs: float = 0.5
    drops: tuple[float, ...] = (0.2,)

    def evaluate(self, model: torch.nn.Module) -> Scores:
        is_pruned = any(bool((weight == 0).any()) for weight in self.prunable(model).values())
        return Scores(math.nan, 0.5) if is_pruned else Scores(0.5, 0.5)


def test_with_a_limit_the_levels_before_one_that_cannot_be_judged_remain(tmp_path: Path) -> None:
    said = list[str]()
    network = rewound.prune(Lost(), compression=2, max_drop=0.1, store=tmp_path, say=said.append)
    assert [level.val for level in network.levels] == [0.5]
    assert any("must return finite numbers; the levels before it remain" in line for line in said)
