"""Train^t(W, m, g): what `train` yields, at which rate it steps, and how it says that it diverged."""

import copy
import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from dropout_recipe import STEPS, Dropped, half, last, whole
from rewound import Batch, Diverged, InputError, Position, Scores, State, begin, evaluate, train
from rewound.method.schedule import Segment, sliced
from rewound.tasks.recipes.digits import Digits
from sameness import assert_same

pytestmark = pytest.mark.usefixtures("one_thread")


def test_stops_are_counted_from_the_start_and_the_last_step_is_always_one() -> None:
    recipe = Dropped()
    middle = last(train(recipe, begin(recipe, 3), lr=sliced(whole(recipe), 0, 5)))
    assert middle.position == Position(0, 5)
    run = train(recipe, middle, lr=sliced(whole(recipe), 5), stops=[2, 4, 1000])
    assert [state.position for state in run] == [Position(0, 7), Position(0, 9), Position(0, 12)]


def test_nothing_is_yielded_for_no_steps() -> None:
    assert list(train(Dropped(), begin(Dropped(), 3), lr=[])) == []


def test_what_is_yielded_is_live_and_a_clone_is_not() -> None:
    recipe = Dropped()
    run = train(recipe, begin(recipe, 3), lr=whole(recipe), stops=[4])
    live = next(run)
    kept, weight = live.clone(), live.model["0.weight"].clone()
    assert_same(live, kept)
    next(run)
    assert not torch.equal(live.model["0.weight"], weight)
    assert torch.equal(kept.model["0.weight"], weight)
    assert kept.slots["step/0.weight"].item() == 4
    assert live.slots["step/0.weight"].item() == 12


@pytest.mark.numeric
def test_the_loss_is_the_mean_since_the_stop_before() -> None:
    recipe = Dropped()
    each = [state.loss for state in train(recipe, begin(recipe, 3), lr=whole(recipe), stops=range(1, STEPS))]
    told = [state.loss for state in train(recipe, begin(recipe, 3), lr=whole(recipe), stops=[2, 5])]
    assert len(each) == STEPS
    assert told == pytest.approx([sum(each[:2]) / 2, sum(each[2:5]) / 3, sum(each[5:]) / 7], rel=1e-6)


def test_each_step_is_taken_at_its_rate() -> None:
    """One weight with a gradient of one: SGD moves it by the rate."""

    class Unit(Dropped):
        def model(self, seed: int) -> nn.Module:
            return nn.Linear(1, 1, bias=False, dtype=torch.float64)

        def optimizer(self, model: nn.Module) -> Optimizer:
            return SGD(model.parameters(), lr=123.0)

        def loss(self, model: nn.Module, batch: Batch) -> Tensor:
            return model(torch.ones(1, 1, dtype=torch.float64)).sum()

    lr = [Segment(0.5, 2), Segment(0.25, 1), Segment(0.125, 2)]
    start = begin(Unit(), 1).clone()
    places = [s.model["weight"].item() for s in train(Unit(), start, lr=lr, stops=range(1, 5))]
    steps = [before - after for before, after in pairwise([start.model["weight"].item(), *places])]
    assert steps == pytest.approx([0.5, 0.5, 0.25, 0.125, 0.125])


@dataclass(frozen=True)
class Exhausted(Digits):
    """Its batches end with the first pass over the data."""

    def batches(self, seed: int, position: Position, device: torch.device) -> Iterator[Batch]:
        return islice(super().batches(seed, position, device), 3)


def test_batches_that_end_are_told() -> None:
    recipe = Exhausted(blocks=(1,), widths=(4,))
    with pytest.raises(InputError, match=r"the batches of \S+Exhausted ended after 3 steps; .* endless"):
        list(train(recipe, begin(recipe, 1), lr=[Segment(0.1, 5)]))


@pytest.mark.parametrize("poison", [0, 4, 11])
def test_a_loss_that_is_no_number_is_told_with_its_step(poison: int) -> None:
    recipe = Dropped(poison=poison)
    reached = []
    run = train(recipe, begin(recipe, 3), lr=whole(recipe), stops=range(1, STEPS))
    with pytest.raises(Diverged, match=f"the loss became nan by step {poison + 1}") as failure:
        reached.extend(state.position.steps for state in run)
    assert reached == list(range(1, poison + 1))
    assert failure.value.step == poison + 1
    assert math.isnan(failure.value.loss)
    twin = pickle.loads(pickle.dumps(failure.value))  # it comes from another process
    assert (twin.step, str(twin)) == (poison + 1, str(failure.value))


def test_divergence_between_stops_is_told_at_the_next_one() -> None:
    recipe = Dropped(poison=4)
    with pytest.raises(Diverged) as failure:
        list(train(recipe, begin(recipe, 3), lr=whole(recipe), stops=[2, 8]))
    assert failure.value.step == 8


def test_an_abandoned_run_leaves_no_hooks() -> None:
    recipe = Dropped()
    start = begin(recipe, 3)
    mask = half(recipe, start)
    hooks = len(_global_optimizer_pre_hooks)
    run = train(recipe, start, mask, lr=whole(recipe), stops=[1])
    next(run)
    run.close()
    assert len(_global_optimizer_pre_hooks) == hooks


@dataclass(frozen=True)
class Drawing(Dropped):
    """Makes its layers, its batches and its evaluation of whatever torch draws next."""

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return super().model(seed)

    def batches(self, seed: int, position: Position, device: torch.device) -> Iterator[Batch]:
        for x, y in super().batches(seed, position, device):
            yield x + torch.randn_like(x), y

    def evaluate(self, model: nn.Module) -> Scores:
        torch.rand(3)
        return super().evaluate(model)


def test_the_callers_random_numbers_go_on_as_if_nothing_had_been_trained() -> None:
    recipe, precision = Drawing(), torch.backends.cudnn.allow_tf32
    torch.manual_seed(5)
    expected = torch.rand(4).tolist()
    torch.manual_seed(5)
    start = begin(recipe, 3)
    drawn = [torch.rand(1).item()]
    drawn += [torch.rand(1).item() for _ in train(recipe, start, lr=whole(recipe), stops=[1])]
    evaluate(recipe, start)
    assert [*drawn, torch.rand(1).item()] == expected
    assert torch.backends.cudnn.allow_tf32 == precision


def test_evaluation_uses_the_running_statistics_and_changes_nothing() -> None:
    recipe = Dropped()
    state = last(train(recipe, begin(recipe, 3), lr=whole(recipe)))
    before = copy.deepcopy(state)
    first, again = evaluate(recipe, state), evaluate(recipe, state)
    assert first == again
    assert_same(state, before)
    assert 0 <= first.val <= 1
    moved = {n: w + 1 if n.endswith("running_mean") else w for n, w in state.model.items()}
    assert evaluate(recipe, State(moved, {}, 3, state.position)) != first
