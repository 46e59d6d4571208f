"""Laws 4 and 6: a state holds everything that belongs to W; pruned, it is masked, and fresh, it is another draw."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from dropout_recipe import CPU, OPTIMIZERS, STEPS, Dropped, differs, half, last, whole
from rewound import Mask, Position, Recipe, begin, train
from rewound.method.schedule import Segment, sliced
from rewound.tasks.recipes.digits import Digits
from rewound.tasks.training import restored, viewed
from sameness import assert_same

pytestmark = pytest.mark.usefixtures("one_thread")

# Law 4: everything that belongs to W


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_state_restores_parameters_buffers_and_slots(kind: str) -> None:
    recipe = Dropped(kind)
    state = last(train(recipe, begin(recipe, 3), lr=whole(recipe)))
    model, optimizer = restored(recipe, state, CPU)
    assert_same(viewed(model, optimizer, 3, state.position, 0.0), state)
    assert model[1].num_batches_tracked.item() == STEPS
    assert not torch.equal(model[1].running_mean, torch.zeros(8))


@pytest.mark.parametrize(("kind", "count"), [("adam", 12.0), ("radam", 12.0), ("asgd", 12.0), ("python-counts", 12)])
def test_step_counts_come_back_as_what_they_were(kind: str, count: float) -> None:
    recipe = Dropped(kind)
    state = last(train(recipe, begin(recipe, 3), lr=whole(recipe)))
    assert state.slots["step/0.weight"].item() == count
    model, optimizer = restored(recipe, state, CPU)
    back = optimizer.state[model[0].weight]["step"]
    assert back == count
    assert isinstance(back, int if kind == "python-counts" else Tensor)


def test_numbers_of_python_come_back_as_such() -> None:
    recipe = Dropped("python-counts")
    state = last(train(recipe, begin(recipe, 3), lr=whole(recipe)))
    model, optimizer = restored(recipe, state, CPU)
    decayed = optimizer.state[model[0].weight]["decayed"]
    assert isinstance(decayed, float)
    assert decayed == pytest.approx(0.9**STEPS)


def test_step_counts_of_double_precision_stay_tensors() -> None:
    recipe = Dropped("adam")
    torch.set_default_dtype(torch.float64)  # of which torch makes its counts, too
    try:
        state = last(train(recipe, begin(recipe, 3), lr=whole(recipe)))
        model, optimizer = restored(recipe, state, CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    assert isinstance(optimizer.state[model[0].weight]["step"], Tensor)


def test_slots_go_by_name_not_by_order() -> None:
    """The same state in an optimizer that lists the parameters backwards."""

    class Backwards(Dropped):
        def optimizer(self, model: nn.Module) -> Optimizer:
            groups = [{"params": [p]} for p in reversed(list(model.parameters()))]
            return Adam(groups, lr=0.01)

    state = last(train(Dropped(), begin(Dropped(), 3), lr=sliced(whole(Dropped()), 0, 5)))
    rest = sliced(whole(Dropped()), 5)
    assert_same(last(train(Backwards(), state, lr=rest)), last(train(Dropped(), state, lr=rest)))


def test_training_does_not_touch_the_state_it_starts_from() -> None:
    recipe = Dropped()
    state = last(train(recipe, begin(recipe, 3), lr=sliced(whole(recipe), 0, 4)))
    before = copy.deepcopy(state)
    mask = half(recipe, state)
    last(train(recipe, state, mask, lr=sliced(whole(recipe), 4)))
    assert_same(state, before)


@pytest.mark.numeric
def test_lr_rewinding_keeps_the_slots_and_moves_only_the_schedule() -> None:
    recipe = Dropped("sgd")
    end = last(train(recipe, begin(recipe, 3), lr=whole(recipe)))
    everything = Mask.full({name: end.model[name] for name in recipe.shapes})
    pruned = end.pruned(everything, 1, 3)
    assert_same(pruned.slots, end.slots)
    low, high = (last(train(recipe, pruned, everything, lr=[Segment(rate, 1)])) for rate in (0.01, 0.02))
    for name in recipe.shapes:  # momentum SGD: the first update is in proportion to the rate, the slots do not see it
        before, slot = end.model[name], f"momentum_buffer/{name}"
        torch.testing.assert_close(2 * (low.model[name] - before), high.model[name] - before, rtol=1e-3, atol=1e-6)
        assert torch.equal(low.slots[slot], high.slots[slot])


# Pruned states, masked training


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_pruned_state_is_masked_with_its_slots_and_starts_a_new_level(kind: str) -> None:
    recipe = Dropped(kind)
    state = last(train(recipe, begin(recipe, 3), lr=whole(recipe)))
    mask = half(recipe, state)
    pruned = state.pruned(mask, 2, 77)
    assert (pruned.seed, pruned.position) == (77, Position(2, 0))
    for name, weight in state.model.items():
        kept = mask[name] if name in mask else torch.ones_like(weight, dtype=torch.bool)
        assert torch.equal(pruned.model[name], torch.where(kept, weight, 0))
    assert pruned.slots.keys() == state.slots.keys()
    for name, slot in state.slots.items():
        kept = mask.get(name.split("/")[1])
        masked = kept is not None and kept.shape == slot.shape
        assert torch.equal(pruned.slots[name], torch.where(kept, slot, 0) if masked else slot)


@pytest.mark.parametrize("kind", ["sgd", "adam", "adafactor", "python-counts"])
def test_pruned_weights_are_zero_at_every_step(kind: str) -> None:
    recipe = Dropped(kind)
    state = last(train(recipe, begin(recipe, 3), lr=whole(recipe)))
    mask = half(recipe, state)
    for after in train(recipe, state.pruned(mask, 1, 3), mask, lr=whole(recipe), stops=range(1, STEPS)):
        assert all(bool((after.model[name][~kept] == 0).all()) for name, kept in mask.items())
    assert differs(after, state.pruned(mask, 1, 3))


# Law 6


def test_a_state_is_shown_in_one_line_and_is_itself_alone() -> None:
    state = begin(Digits(), 3)
    assert repr(state) == f"State({len(state.model)} tensors, 0 slots, seed 3, prunings 0, steps 0)"
    assert state == state
    assert state != state.clone()


def test_fresh_weights_are_another_draw() -> None:
    recipe = Dropped()
    fresh, again = begin(recipe, 1, fresh=True), begin(recipe, 1, fresh=True)
    assert_same(fresh, again)
    assert (fresh.seed, fresh.position, dict(fresh.slots)) == (1, Position(0, 0), {})
    for trial in range(5):
        assert differs(fresh, begin(recipe, trial))
    assert differs(fresh, begin(recipe, 2, fresh=True))


@pytest.mark.filterwarnings("ignore:less than 1%")  # the last layer begins with the smallest weights
@pytest.mark.parametrize("recipe", [Dropped(), Digits(widths=(4, 8))])
def test_reinitialization_is_not_rewinding_to_step_0(recipe: Recipe) -> None:
    start, fresh = begin(recipe, 1), begin(recipe, 1, fresh=True)
    mask = half(recipe, start)
    lr = [Segment(0.01, 2)]
    assert differs(*(last(train(recipe, w.pruned(mask, 1, 1), mask, lr=lr)) for w in (start, fresh)))
