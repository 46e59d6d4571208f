"""Law 1: training in pieces is training in one, bit for bit, whatever is drawn or looked at in between."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dropout_recipe import OPTIMIZERS, STEPS, Dropped, differs, half, last, same_under, whole
from rewound import Batch, Mask, Position, Recipe, State, begin, evaluate, train
from rewound.method.schedule import Segment, sliced
from rewound.tasks.recipes.digits import Digits
from sameness import assert_same

pytestmark = pytest.mark.usefixtures("one_thread")


def in_pieces(recipe: Recipe, start: State, mask: Mask | None, lr: list[Segment], cuts: list[int]) -> State:
    state = start
    for begins, ends in pairwise([0, *cuts, sum(steps for _, steps in lr)]):
        state = last(train(recipe, state, mask, lr=sliced(lr, begins, ends)))
        torch.rand(3)  # what anybody draws in between does not matter
    return state


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_in_two_pieces_is_training_in_one(kind: str, masked: bool) -> None:
    recipe = Dropped(kind)
    start = begin(recipe, 3)
    mask = half(recipe, start) if masked else None
    start = start.pruned(mask, 1, 3) if mask else start
    expected = last(train(recipe, start, mask, lr=whole(recipe)))
    for cut in range(1, STEPS, 1 if kind in ("sgd", "adam") else 4):
        assert same_under(mask, in_pieces(recipe, start, mask, whole(recipe), [cut]), expected), cut


@given(st.sets(st.integers(1, STEPS - 1), max_size=5), st.sampled_from(sorted(OPTIMIZERS)), st.booleans())
@settings(deadline=None, max_examples=20)
def test_training_in_any_pieces_is_training_in_one(cuts: set[int], kind: str, masked: bool) -> None:
    recipe = Dropped(kind)
    start = begin(recipe, 3)
    mask = half(recipe, start) if masked else None
    expected = last(train(recipe, start, mask, lr=whole(recipe)))
    assert same_under(mask, in_pieces(recipe, start, mask, whole(recipe), sorted(cuts)), expected)


@pytest.mark.numeric
@pytest.mark.parametrize("cut", [1, 9, 10, 18])
def test_composition_holds_for_digits(cut: int) -> None:
    """A residual network with augmentation; batches 9 and 18 straddle the ends of epochs."""
    recipe = Digits(epochs=2.0, widths=(4, 8))
    start, lr = begin(recipe, 1), whole(recipe)
    assert_same(in_pieces(recipe, start, None, lr, [cut]), last(train(recipe, start, lr=lr)))


def test_looking_up_from_training_does_not_change_it() -> None:
    recipe = Dropped()
    start, lr = begin(recipe, 3), whole(recipe)
    expected = last(train(recipe, start, lr=lr))
    for state in train(recipe, start, lr=lr, stops=range(1, STEPS)):
        evaluate(recipe, state)
        torch.rand(3)
        reached = state.clone()
    assert_same(reached, expected)


def test_two_runs_may_be_advanced_in_turn() -> None:
    recipe, other = Dropped("adam"), Dropped("sgd")
    alone = [last(train(r, begin(r, seed), lr=whole(r))) for r, seed in ((recipe, 1), (other, 2))]
    runs = [train(r, begin(r, seed), lr=whole(r), stops=range(1, STEPS)) for r, seed in ((recipe, 1), (other, 2))]
    for pair in zip(*runs, strict=True):
        together = [state.clone() for state in pair]
    assert_same(alone, together)


def test_a_trial_is_a_function_of_its_seed() -> None:
    recipe = Dropped()
    first, again, other = (last(train(recipe, begin(recipe, seed), lr=whole(recipe))) for seed in (1, 1, 2))
    assert_same(first, again)
    assert differs(first, other)


def test_dropout_differs_from_step_to_step_and_from_level_to_level() -> None:
    """With the same weights and the same batch, only the position is left to tell the draws apart."""

    class Same(Dropped):
        def batches(self, seed: int, position: Position, device: torch.device) -> Iterator[Batch]:
            while True:
                yield torch.ones(10, 6) * torch.arange(10)[:, None], torch.arange(10) % 3

    recipe = Same("sgd")
    state = begin(recipe, 1)
    losses = []
    for position in (Position(0, 0), Position(0, 1), Position(1, 0), Position(1, 1), Position(0, 0)):
        (after,) = train(recipe, State(state.model, {}, 1, position), lr=[Segment(0.0, 1)])
        losses.append(after.loss)
    assert losses[0] == losses[-1]
    assert len(set(losses)) == 4
