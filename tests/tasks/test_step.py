"""What a recipe's step is made of: rates by group, clipping, accumulation; and batches of several shapes."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

from resident_recipes import CAPTURED, Sentences, Toy, Vectors
from rewound import Batch, InputError, Position, begin, train
from rewound.method.schedule import Segment
from rewound.states.history import Start
from rewound.tasks.recipes import recipe_named
from sameness import assert_same

CPU = torch.device("cpu")
STEPS = [Segment(0.02, 2), Segment(0.01, 3)]


@dataclass(frozen=True)
class Still(Vectors):
    """Without dropout."""

    def network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def by_hand(recipe: Toy, rates: Sequence[float], *, factors: Sequence[float] = (1.0,)) -> dict[str, Tensor]:
    """The plainest loop: the batches of a step joined to one, torch's optimizer, its rates set for each group."""
    model = recipe.model(0)
    model.load_state_dict(dict(begin(recipe, 1).model))
    optimizer, batches = recipe.optimizer(model), recipe.batches(1, Position(0, 0), CPU)
    for rate in rates:
        batch = list(islice(batches, recipe.accumulation))
        joined = [tuple(torch.cat(tensors) for tensors in zip(*batch, strict=True))]
        gradients = [clipped_gradient(recipe, model, each) for each in (batch if recipe.clip_each else joined)]
        for group, factor in zip(optimizer.param_groups, factors, strict=True):
            group["lr"] = rate * factor
        for name, parameter in model.named_parameters():
            parameter.grad = torch.stack([gradient[name] for gradient in gradients]).mean(0)
        optimizer.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def clipped_gradient(recipe: Toy, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """What one batch says, no longer than the recipe's clip norm."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(recipe.loss(model, batch), parameters)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    share = recipe.accumulation if recipe.clip_each else 1  # torch adds 1e-6 to the norm of what it clips
    scale = min(1.0, recipe.clip_norm / (norm + share * 1e-6))
    return {name: gradient * scale for name, gradient in zip(names, gradients, strict=True)}


@pytest.mark.parametrize(
    ("recipe", "factors"),
    [
        (Still(), (1.0,)),
        (Still(kind="groups"), (1.0, 0.1)),
        (Still(kind="adam-groups"), (1.0, 0.1)),
        (Still(clip_norm=0.1), (1.0,)),
        (Still(accumulation=3), (1.0,)),
        (Still(kind="groups", clip_norm=0.1, accumulation=2), (1.0, 0.1)),
        (Still(kind="sgd", clip_norm=0.1, accumulation=3, clip_each=True), (1.0,)),
    ],
)
@pytest.mark.usefixtures("float64")
def test_a_step_has_the_groups_rates_clips_and_averages_its_batches(recipe: Toy, factors: tuple[float, ...]) -> None:
    assert recipe.rate_factors == pytest.approx(factors)
    (end,) = (state.clone() for state in train(recipe, begin(recipe, 1), lr=STEPS))
    expected = by_hand(recipe, [0.02] * 2 + [0.01] * 3, factors=factors)
    for name, tensor in end.model.items():
        # Five steps of at most a hundred roundings of 1e-16, and Adam divides by gradients of 1e-3 and more.
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-10)


def test_clipping_changes_something_and_a_wide_clip_nothing() -> None:
    ends = [
        next(train(Still(clip_norm=clip), begin(Still(), 1), lr=STEPS)).clone().model["0.weight"]
        for clip in (math.inf, 1e6, 0.1)
    ]
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_steps_cut_in_the_middle_are_the_same_steps() -> None:
    for recipe in (Vectors(accumulation=2), Sentences(), Sentences(accumulation=2)):
        (whole,) = (state.clone() for state in train(recipe, begin(recipe, 1), lr=[Segment(0.01, 30)]))
        (half,) = (state.clone() for state in train(recipe, begin(recipe, 1), lr=[Segment(0.01, 11)]))
        (rest,) = (state.clone() for state in train(recipe, half, lr=[Segment(0.01, 19)]))
        assert_same(whole.model, rest.model)


def test_what_a_step_does_is_in_the_address_and_the_defaults_are_not() -> None:
    plain = Still()
    others = [replace(plain, clip_norm=1.0), replace(plain, accumulation=2), replace(plain, kind="groups")]
    assert plain.identity().keys() == {"recipe", "version", "fields"}
    assert len({Start(recipe, 1).key for recipe in (plain, *others)}) == 4
    assert others[-1].identity()["rates"] == (1.0, 0.1)


def test_rates_of_groups_are_in_the_address_even_where_no_field_says_them(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Start(Still(), 1).key
    monkeypatch.setitem(CAPTURED, "sgd", CAPTURED["groups"])
    assert Start(Still(), 1).key != before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clip-norm": 0.0}, "clip-norm must be above 0, not 0; leave it out"),
        ({"accumulation": 0}, "accumulation must be at least 1 batch a step, not 0"),
        ({"clip-each": True}, "clip-each needs the norm to clip to; give clip-norm"),
    ],
)
def test_steps_that_cannot_be_taken_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        begin(recipe_named("digits").with_fields(fields), 1)


@dataclass(frozen=True)
class Zero(Still):
    """An optimizer whose default rate says nothing."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": model.parameters(), "lr": 0.1}], lr=0.0)


def test_a_default_rate_of_zero_cannot_be_a_measure() -> None:
    with pytest.raises(InputError, match="default lr of 0 and groups with other rates"):
        _ = Zero().rate_factors


# Parts


def drawn(recipe: Sentences, start: Position, count: int) -> list[tuple[Tensor, ...]]:
    return list(islice(recipe.batches(4, start, CPU), count))


def test_parts_take_turns_and_every_example_comes_once_an_epoch() -> None:
    recipe = Sentences()
    assert recipe.steps_per_epoch == 5 + 3 + 4
    batches = drawn(recipe, Position(0, 0), 5 * 12)
    for epoch in range(5):
        shapes = Counter(tuple(words.shape) for words, _ in batches[12 * epoch : 12 * (epoch + 1)])
        assert shapes == {(4, 3): 5, (3, 4): 3, (2, 5): 4}
    first = [tuple(words.shape) for words, _ in batches[:12]]
    assert first != [tuple(words.shape) for words, _ in batches[12:24]], "the order is drawn anew"
    # The first part has 20 sentences in five batches of four: all of them in every epoch.
    for epoch in range(5):
        seen = torch.cat([words for words, _ in batches[12 * epoch : 12 * (epoch + 1)] if words.shape[1] == 3])
        assert torch.equal(seen.sort(0).values, recipe.resident(CPU)[0].sort(0).values)


def test_all_batches_of_a_step_come_from_one_part() -> None:
    recipe = Sentences(accumulation=2)
    assert recipe.steps_per_epoch == 2 + 1 + 2  # of 5, 3 and 4 batches
    widths = [words.shape[1] for words, _ in drawn(recipe, Position(0, 0), 20)]
    assert widths[::2] == widths[1::2]
    assert Counter(widths[:10]) == Counter(widths[10:]) == {3: 4, 4: 2, 5: 4}


def test_a_stream_of_parts_can_be_entered_anywhere() -> None:
    recipe = Sentences()
    whole = drawn(recipe, Position(1, 0), 40)
    for start in (1, 11, 12, 13, 25, 37):
        for mine, theirs in zip(drawn(recipe, Position(1, start), 3), whole[start:], strict=False):
            assert_same(mine, theirs)


def test_a_batch_may_span_several_passes_over_few_examples() -> None:
    recipe = Vectors(batch_size=90)  # of 40 examples: each comes two or three times
    (x, _), *_ = islice(recipe.batches(1, Position(0, 0), CPU), 1)
    counts = Counter(tuple(row.tolist()) for row in x)
    assert len(counts) == 40
    assert set(counts.values()) == {2, 3}
