"""Batches: a function of trial, level and step, the same for every technique, and entered anywhere."""

from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dropout_recipe import CPU, half, last, whole
from rewound import Batch, Mask, Position, Recipe, State, begin, train
from rewound.method.schedule import Segment
from rewound.tasks.recipes.digits import Digits
from rewound.tasks.recipes.images import ImageClassification, Images
from sameness import assert_same

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Indexed(ImageClassification):
    """Fifty images of one pixel, which is the image's index."""

    batch_size: int = 16

    @property
    def train_size(self) -> int:
        return 50

    def images(self, device: torch.device) -> Images:
        pixels, none = torch.arange(50, dtype=torch.uint8)[:, None, None, None], torch.empty(0)
        return Images(pixels, torch.arange(50) + 100, none, none, none, none)

    def standardised(self, images: Tensor) -> Tensor:
        return images.flatten(1)

    def model(self, seed: int) -> nn.Module:
        return nn.Linear(1, 1)

    def example(self) -> Batch:
        return (torch.zeros(1, 1),)


def stream(recipe: Recipe, seed: int, prunings: int, start: int, count: int) -> list[Batch]:
    return list(islice(recipe.batches(seed, Position(prunings, start), CPU), count))


def drawn(seed: int, prunings: int, start: int, count: int, batch_size: int = 16) -> list[int]:
    batches = stream(Indexed(batch_size=batch_size), seed, prunings, start, count)
    assert all(torch.equal(x[:, 0] + 100, y) for x, y in batches)  # each image with its own label
    return [int(index) for x, _ in batches for index in x]


@pytest.mark.parametrize("batch_size", [1, 16, 25, 50, 60])
def test_every_epoch_is_a_permutation_whatever_the_batch_size(batch_size: int) -> None:
    indices = drawn(1, 0, 0, 300 // batch_size, batch_size)
    epochs = [indices[i : i + 50] for i in range(0, len(indices) - 49, 50)]
    assert len(epochs) >= 5
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


@pytest.mark.parametrize("batch_size", [16, 50, 60])
def test_the_order_does_not_depend_on_the_batch_size(batch_size: int) -> None:
    assert drawn(1, 0, 0, 4, batch_size) == drawn(1, 0, 0, 4 * batch_size, 1)


@given(st.integers(0, 40), st.integers(0, 3))
@settings(deadline=None, max_examples=30)
def test_the_stream_can_be_entered_anywhere(start: int, prunings: int) -> None:
    assert drawn(1, prunings, start, 8) == drawn(1, prunings, 0, start + 8)[16 * start :]


@pytest.mark.parametrize("start", [8, 9, 10, 18, 19])
def test_augmented_batches_can_be_entered_anywhere(start: int) -> None:
    recipe = Digits()
    from_the_start, entered = stream(recipe, 4, 1, 0, start + 2)[start:], stream(recipe, 4, 1, start, 2)
    for one, other in zip(from_the_start, entered, strict=True):
        assert_same(one, other)


class Alike(Digits):
    """Training images that are all the same, so that batches differ in their shifts alone."""

    def images(self, device: torch.device) -> Images:
        images = super().images(device)
        return images._replace(train=images.train[:1].expand_as(images.train))


def test_trials_and_levels_have_their_own_order_and_augmentation() -> None:
    where = [(seed, prunings) for seed in (1, 2, 3) for prunings in (0, 1, 2)]
    assert len({tuple(drawn(*place, 0, 9)) for place in where}) == 9
    shifts = [torch.cat([x for x, _ in stream(Alike(), *place, 0, 3)]) for place in where]
    assert all(not torch.equal(one, other) for i, one in enumerate(shifts) for other in shifts[:i])
    batches = shifts[0].split(96)
    assert not torch.equal(batches[0], batches[1])


class Watched(Digits):
    """Notes the batches that training sees."""

    seen: ClassVar[list[Tensor]] = []

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.seen.append(batch[0].clone())
        return super().loss(model, batch)


def batches_seen(recipe: Watched, state: State, mask: Mask | None, lr: list[Segment]) -> list[Tensor]:
    recipe.seen.clear()
    last(train(recipe, state, mask, lr=lr))
    return list(recipe.seen)


def test_techniques_of_one_trial_and_level_see_the_same_batches_and_not_the_dense_runs() -> None:
    recipe = Watched(epochs=2.0, widths=(4, 8))
    S, T, t = recipe.schedule, recipe.schedule.steps, 10
    start = begin(recipe, 1)
    states = {s.position.steps: s.clone() for s in train(recipe, start, lr=whole(recipe), stops=[T - t])}
    dense = batches_seen(recipe, start, None, whole(recipe))
    mask = half(recipe, states[T])
    rows = {"fine-tuning": (T, T), "weight-rewinding": (T - t, T - t), "lr-rewinding": (T, T - t), "low-lr": (T - t, T)}
    seen = {
        name: batches_seen(recipe, states[w].pruned(mask, 1, 1), mask, S.segments(g, g + t))
        for name, (w, g) in rows.items()
    }
    fresh = batches_seen(recipe, begin(recipe, 1, fresh=True).pruned(mask, 1, 1), mask, S.segments(0, T + t))
    for batches in (*seen.values(), fresh[:t]):
        assert len(batches) == t
        assert_same(batches, seen["fine-tuning"])
    assert not any(torch.equal(a, b) for a in dense for b in fresh)
    second = batches_seen(recipe, states[T].pruned(mask, 2, 1), mask, S.segments(T - t, T))
    assert not any(torch.equal(a, b) for a in second for b in (*dense, *fresh))
