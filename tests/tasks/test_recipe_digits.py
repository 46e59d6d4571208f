"""The `digits` recipe: its data, their split, their shifts, its network."""

from collections import Counter

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from rewound.tasks.recipes.digits import Digits
from rewound.tasks.recipes.images import shifted, split

CPU = torch.device("cpu")


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
