"""Recipes: their fields, their identity, and the facts of the shipped ones that need no training."""

import inspect
from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

import rewound
from rewound import InputError, Recipe
from rewound.history import Start
from rewound.randomness import integers
from rewound.recipe import Scores
from rewound.recipes import recipe_named
from rewound.recipes.cifar10 import ResNet20, ResNet56, ResNet110
from rewound.recipes.digits import Digits
from rewound.recipes.images import ImageClassification, shifted, split
from rewound.targets import retrained

CPU = torch.device("cpu")
CIFAR = [(ResNet20, 271_152), (ResNet56, 851_760), (ResNet110, 1_722_672)]


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
        ("nesterov", 1, "bool"),
        ("widths", 32, "tuple"),
    ],
)
def test_a_field_has_the_type_of_its_default(key: str, value: object, kind: str) -> None:
    with pytest.raises(InputError, match=rf"^digits\.{key} must be of type {kind}, not {value!r}$"):
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
        with pytest.raises(InputError, match=f"{key} must not be below 0, not -1"):
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


# Digits


def test_digits_are_897_training_180_validation_and_720_test_images() -> None:
    images = Digits().images(CPU)
    assert [tuple(part.shape) for part in images[::2]] == [(897, 1, 8, 8), (180, 1, 8, 8), (720, 1, 8, 8)]
    assert [len(labels) for labels in images[1::2]] == [897, 180, 720]
    assert images.train.dtype == torch.uint8


def labelled(images: Tensor, labels: Tensor) -> Counter[tuple[bytes, int]]:
    pairs = zip(images.flatten(1).numpy(), labels.tolist(), strict=True)
    return Counter((image.tobytes(), label) for image, label in pairs)


def test_digits_are_the_whole_data_set_with_its_labels_each_image_once() -> None:
    images = Digits().images(CPU)
    parts = [labelled(*images[i : i + 2]) for i in (0, 2, 4)]
    pixels, answers = load_digits(return_X_y=True)
    everything = labelled(torch.from_numpy(pixels.astype(np.uint8)), torch.from_numpy(answers))
    assert parts[0] + parts[1] + parts[2] == everything
    assert len(everything) == 1797  # all different, so the parts are disjoint


def test_the_digits_split_never_changes() -> None:
    images = Digits().images(CPU)
    assert [labels[:10].tolist() for labels in images[1::2]] == [
        [1, 4, 3, 3, 2, 9, 1, 9, 3, 8],
        [1, 8, 8, 3, 9, 9, 7, 8, 7, 5],
        [7, 2, 5, 3, 4, 9, 6, 9, 9, 7],
    ]
    assert [int(part.long().sum()) for part in images[::2]] == [280319, 55863, 225536]


def test_another_split_seed_moves_only_the_held_out_images() -> None:
    one, other = Digits().images(CPU), Digits(split_seed=1).images(CPU)
    assert torch.equal(one.train, other.train)
    assert not torch.equal(one.val, other.val)
    held = [labelled(i.val, i.val_labels) + labelled(i.test, i.test_labels) for i in (one, other)]
    assert held[0] == held[1]


def test_a_fifth_of_the_held_out_images_validates() -> None:
    held, labels = torch.arange(23)[:, None, None, None], torch.arange(23)
    val, val_labels, test, test_labels = split(held, labels, 7)
    assert (len(val), len(test)) == (4, 19)
    assert sorted(torch.cat([val, test]).flatten().tolist()) == list(range(23))
    assert torch.equal(val.flatten(), val_labels)
    assert torch.equal(test.flatten(), test_labels)


def test_the_digits_network_and_its_schedule() -> None:
    recipe = Digits()
    assert sum(int(np.prod(shape)) for shape in recipe.shapes.values()) >= 40_000
    T = recipe.schedule.steps
    assert round(16 * 897 / 96) == T
    assert recipe.schedule.segments(0, T + 5) == [(0.2, 75), (0.02, 37), (0.002, 43)]  # drops at 1/2 and 3/4
    assert recipe.steps_of(recipe.training_epochs) == T == 150


def test_digits_are_shifted_by_at_most_a_pixel() -> None:
    """Every one of the nine shifts of a lone bright pixel comes up, and nothing else."""
    image = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    image[0, 0, 3, 4] = 11
    batch = Digits().augmented(image.expand(300, 1, 8, 8), 5, torch.arange(300))
    places = (batch == 1.0).nonzero()[:, 2:]
    assert len(places) == 300
    assert {tuple(place) for place in places.tolist()} == {(3 + dy, 4 + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)}


def test_zeros_move_in() -> None:
    moved = shifted(torch.ones(200, 2, 3, 3), 2, 1, torch.arange(200))
    sums = set(moved[:, 0].sum((1, 2)).tolist())
    assert sums == {1.0, 2.0, 3.0, 4.0, 6.0, 9.0}  # one to three rows by one to three columns are left
    assert torch.equal(moved[:, 0], moved[:, 1])  # channels move together


def test_no_shift_is_the_identity() -> None:
    images = torch.arange(18).reshape(2, 1, 3, 3)
    assert torch.equal(shifted(images, 0, 1, torch.arange(2)), images)


# CIFAR-10, without its data


@pytest.mark.parametrize(("kind", "prunable"), CIFAR)
def test_cifar_counts(kind: type[ResNet20], prunable: int) -> None:
    recipe = kind()
    assert sum(int(np.prod(shape)) for shape in recipe.shapes.values()) == prunable
    assert (recipe.train_size, recipe.batch_size, recipe.training_epochs) == (50_000, 128, 182)
    assert recipe.steps_per_epoch == 390.625


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.1), (35_546, 0.1), (35_547, 0.01), (53_125, 0.01), (53_126, 0.001), (71_107, 0.001)]
)
def test_the_cifar_schedule_at_its_boundaries(step: int, rate: float) -> None:
    schedule = ResNet56().schedule
    assert schedule.at(step) == rate
    assert (schedule.steps, schedule.final) == (71_108, 0.001)


@pytest.mark.parametrize("fields", [{"epochs": 8.0}, {"batch-size": 256}, {"steps": 10_000}])
def test_epochs_and_steps_of_cifar_belong_together(fields: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"epochs of batches of \d+ are .* steps, not .*; give steps"):
        list(retrained(ResNet20.with_fields(fields), 1, "lr-rewinding", 8, [0.5], iterative=False))
    short = ResNet20.with_fields({"epochs": 8, "steps": 3125, "drops": [1563, 2344]})
    assert short.steps_of(8.0) == 3125


def test_the_cifar_optimizer_decays_every_parameter() -> None:
    recipe = ResNet20()
    model = recipe.model(1)
    optimizer = recipe.optimizer(model)
    assert isinstance(optimizer, torch.optim.SGD)
    (group,) = optimizer.param_groups
    assert {id(p) for p in group["params"]} == {id(p) for p in model.parameters()}
    settings = {name: group[name] for name in ("momentum", "nesterov", "weight_decay", "dampening", "lr")}
    assert settings == {"momentum": 0.9, "nesterov": False, "weight_decay": 2e-4, "dampening": 0, "lr": 0.1}


def test_the_initial_weights_are_a_function_of_the_seed_alone() -> None:
    recipe = ResNet20()
    torch.manual_seed(1)
    one = recipe.model(7).state_dict()
    torch.manual_seed(2)
    same, other = recipe.model(7).state_dict(), recipe.model(8).state_dict()
    assert all(torch.equal(value, same[name]) for name, value in one.items())
    assert not torch.equal(one["stem.weight"], other["stem.weight"])


def bytes_like_cifar(count: int) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randint(256, (count, 3, 32, 32), generator=draw, dtype=torch.uint8)


def standardised_by_hand(image: np.ndarray) -> np.ndarray:
    values = image.astype(np.float64)
    return (values - values.mean()) / max(values.std(), 1 / np.sqrt(3072))


def test_cifar_images_are_standardised_one_by_one() -> None:
    images = bytes_like_cifar(5)
    images[1] = 200  # constant
    images[2] = 0
    images[2, 0, 0, 0] = 1  # a deviation below the least one
    expected = np.stack([standardised_by_hand(image) for image in images.numpy()])
    np.testing.assert_allclose(ResNet20().standardised(images).numpy(), expected, rtol=1e-5, atol=1e-5)
    assert bool((ResNet20().standardised(images)[1] == 0).all())


def test_cifar_images_are_padded_cropped_flipped_and_then_standardised() -> None:
    images, key, counters = bytes_like_cifar(40), 11, torch.arange(1000, 1040)
    down, right = (integers(key, 2 * counters + n, 9).tolist() for n in (0, 1))
    flip = integers(key, -1 - counters, 2).tolist()
    expected = []
    for n, image in enumerate(images.numpy()):
        padded = np.zeros((3, 40, 40), dtype=np.uint8)
        padded[:, 4:36, 4:36] = image
        crop = padded[:, down[n] : down[n] + 32, right[n] : right[n] + 32]
        expected.append(standardised_by_hand(crop[:, :, ::-1] if flip[n] else crop))
    got = ResNet20().augmented(images, key, counters)
    np.testing.assert_allclose(got.numpy(), np.stack(expected), rtol=1e-5, atol=1e-5)
    assert 8 < sum(flip) < 32
    assert len(set(down)) == len(set(right)) == 9


def test_bfloat16_computes_in_bfloat16_and_its_loss_in_float32() -> None:
    images, labels = ResNet20().standardised(bytes_like_cifar(4)), torch.arange(4)
    recipe, model = ResNet20(precision="bfloat16"), ResNet20().model(1)
    seen: list[torch.dtype] = []
    model.dense.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    losses = [r.loss(model, (images, labels)) for r in (recipe, ResNet20())]
    assert seen == [torch.bfloat16, torch.float32]
    assert losses[0].dtype == torch.float32
    torch.testing.assert_close(losses[0], losses[1], rtol=0.05, atol=0.05)
