"""Train^t(W, m, g): laws 1, 4 and 6, and what `train` yields."""

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import ASGD, SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.optimizer import _global_optimizer_pre_hooks

from rewound import Batch, Diverged, Mask, Position, Pruner, Recipe, Schedule, Scores, State, begin, evaluate, train
from rewound.randomness import fold
from rewound.recipes.digits import Digits
from rewound.recipes.images import ImageClassification, Images
from rewound.schedule import Segment, sliced
from rewound.training import restored, viewed

CPU = torch.device("cpu")
STEPS = 12


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Law 1 holds bit for bit with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# A recipe with everything that could break composition: dropout, batch statistics, step counts


class PythonCounts(Optimizer):
    """Adam as many write it: the step count is a Python number in the parameter's state, and so is a product."""

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s.update(step=0, decayed=1.0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                s["step"] += 1
                s["decayed"] *= 0.9
                s["mean"].lerp_(p.grad, 0.1)
                s["square"].lerp_(p.grad.square(), 0.001)
                scale = (1 - s["decayed"]) / math.sqrt(1 - 0.999 ** s["step"])
                p.sub_(group["lr"] * s["mean"] / scale / (s["square"].sqrt() + 1e-8))


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, momentum=0.9, weight_decay=1e-3),
    "nesterov": partial(SGD, momentum=0.9, nesterov=True),
    "adam": Adam,
    "amsgrad": partial(Adam, amsgrad=True, weight_decay=1e-3),
    "adamw-fused": partial(AdamW, fused=True),
    "nadam": NAdam,
    "radam": RAdam,
    "rmsprop": partial(RMSprop, momentum=0.9, centered=True),
    "adagrad": Adagrad,
    "asgd": ASGD,
    "rprop": Rprop,
    "adafactor": Adafactor,
    "python-counts": PythonCounts,
}


@dataclass(frozen=True)
class Dropped(Recipe):
    """A small network with dropout and BatchNorm on endless made-up data; `poison` is the step that turns NaN."""

    kind: str = "adam"
    poison: int = -1

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return OPTIMIZERS[self.kind](model.parameters(), lr=0.01)

    @property
    def schedule(self) -> Schedule:
        return Schedule.linear(STEPS, 0.02, 0.01)

    @property
    def steps_per_epoch(self) -> float:
        return 4.0

    @property
    def training_epochs(self) -> float:
        return 3.0

    def batches(self, seed: int, position: Position, device: torch.device) -> Iterator[Batch]:
        step = position.steps
        while True:
            draw = torch.Generator().manual_seed(fold(seed, position.prunings, "data", step))
            x = torch.randn(10, 6, generator=draw)
            yield x * (math.nan if step == self.poison else 1), (x.sum(1) > 0).long()
            step += 1

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> Scores:
        assert not model.training
        x, y = next(self.batches(99, Position(0, 0), CPU))
        return Scores((model(x).argmax(1) == y).double().mean().item(), F.cross_entropy(model(x), y).item())

    def example(self) -> Batch:
        return (torch.zeros(1, 6),)


def last(run: Iterator[State]) -> State:
    return [state.clone() for state in run][-1]


def whole(recipe: Recipe) -> list[Segment]:
    return recipe.schedule.segments(0, recipe.schedule.steps)


def same(one: State, other: State) -> bool:
    parts = [(one.model, other.model), (one.slots, other.slots)]
    return (one.seed, one.position) == (other.seed, other.position) and all(
        a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a) for a, b in parts
    )


def same_under(mask: Mask | None, one: State, other: State) -> bool:
    """Rprop writes step sizes for pruned weights too, which nothing reads and a new context masks again."""
    masked = [state.pruned(mask or Mask({}), 1, 3) for state in (one, other)]
    return one.position == other.position and same(*masked)


def differs(one: State, other: State) -> bool:
    return any(not torch.equal(w, other.model[n]) for n, w in one.model.items() if n.endswith("weight"))


def half(recipe: Recipe, state: State) -> Mask:
    return Pruner().prune({name: state.model[name] for name in recipe.shapes}, 0.5)


# Law 1: composition


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


@pytest.mark.parametrize("cut", [1, 9, 10, 18])
def test_composition_holds_for_digits(cut: int) -> None:
    """A residual network with augmentation; batches 9 and 18 straddle the ends of epochs."""
    recipe = Digits(epochs=2.0, widths=(4, 8))
    start, lr = begin(recipe, 1), whole(recipe)
    assert same(in_pieces(recipe, start, None, lr, [cut]), last(train(recipe, start, lr=lr)))


def test_looking_up_from_training_does_not_change_it() -> None:
    recipe = Dropped()
    start, lr = begin(recipe, 3), whole(recipe)
    expected = last(train(recipe, start, lr=lr))
    for state in train(recipe, start, lr=lr, stops=range(1, STEPS)):
        evaluate(recipe, state)
        torch.rand(3)
        reached = state.clone()
    assert same(reached, expected)


def test_two_runs_may_be_advanced_in_turn() -> None:
    recipe, other = Dropped("adam"), Dropped("sgd")
    alone = [last(train(r, begin(r, seed), lr=whole(r))) for r, seed in ((recipe, 1), (other, 2))]
    runs = [train(r, begin(r, seed), lr=whole(r), stops=range(1, STEPS)) for r, seed in ((recipe, 1), (other, 2))]
    for pair in zip(*runs, strict=True):
        together = [state.clone() for state in pair]
    assert all(same(one, two) for one, two in zip(alone, together, strict=True))


def test_a_trial_is_a_function_of_its_seed() -> None:
    recipe = Dropped()
    first, again, other = (last(train(recipe, begin(recipe, seed), lr=whole(recipe))) for seed in (1, 1, 2))
    assert same(first, again)
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


# Batches


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
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


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
        assert all(torch.equal(a, b) for a, b in zip(batches, seen["fine-tuning"], strict=True))
    assert not any(torch.equal(a, b) for a in dense for b in fresh)
    second = batches_seen(recipe, states[T].pruned(mask, 2, 1), mask, S.segments(T - t, T))
    assert not any(torch.equal(a, b) for a in second for b in (*dense, *fresh))


# Law 4: everything that belongs to W


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_state_restores_parameters_buffers_and_slots(kind: str) -> None:
    recipe = Dropped(kind)
    state = last(train(recipe, begin(recipe, 3), lr=whole(recipe)))
    model, optimizer = restored(recipe, state, CPU)
    assert same(viewed(model, optimizer, 3, state.position, 0.0), state)
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


def test_slots_go_by_name_not_by_order() -> None:
    """The same state in an optimizer that lists the parameters backwards."""

    class Backwards(Dropped):
        def optimizer(self, model: nn.Module) -> Optimizer:
            groups = [{"params": [p]} for p in reversed(list(model.parameters()))]
            return Adam(groups, lr=0.01)

    state = last(train(Dropped(), begin(Dropped(), 3), lr=sliced(whole(Dropped()), 0, 5)))
    rest = sliced(whole(Dropped()), 5)
    assert same(last(train(Backwards(), state, lr=rest)), last(train(Dropped(), state, lr=rest)))


def test_training_does_not_touch_the_state_it_starts_from() -> None:
    recipe = Dropped()
    state = last(train(recipe, begin(recipe, 3), lr=sliced(whole(recipe), 0, 4)))
    before = copy.deepcopy(state)
    mask = half(recipe, state)
    last(train(recipe, state, mask, lr=sliced(whole(recipe), 4)))
    assert same(state, before)


def test_lr_rewinding_keeps_the_slots_and_moves_only_the_schedule() -> None:
    recipe = Dropped("sgd")
    end = last(train(recipe, begin(recipe, 3), lr=whole(recipe)))
    everything = Mask.full({name: end.model[name] for name in recipe.shapes})
    pruned = end.pruned(everything, 1, 3)
    assert all(torch.equal(pruned.slots[name], slot) for name, slot in end.slots.items())
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


def test_fresh_weights_are_another_draw() -> None:
    recipe = Dropped()
    fresh, again = begin(recipe, 1, fresh=True), begin(recipe, 1, fresh=True)
    assert same(fresh, again)
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


# What train yields


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
    assert same(live, kept)
    next(run)
    assert not torch.equal(live.model["0.weight"], weight)
    assert torch.equal(kept.model["0.weight"], weight)
    assert kept.slots["step/0.weight"].item() == 4
    assert live.slots["step/0.weight"].item() == 12


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


def test_evaluation_uses_the_running_statistics_and_changes_nothing() -> None:
    recipe = Dropped()
    state = last(train(recipe, begin(recipe, 3), lr=whole(recipe)))
    before = copy.deepcopy(state)
    first, again = evaluate(recipe, state), evaluate(recipe, state)
    assert first == again
    assert same(state, before)
    assert 0 <= first.val <= 1
    moved = {n: w + 1 if n.endswith("running_mean") else w for n, w in state.model.items()}
    assert evaluate(recipe, State(moved, {}, 3, state.position)) != first
