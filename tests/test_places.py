"""A captured step is a step of `train`, wherever it is placed."""

from itertools import pairwise

import pytest
import torch

from rewound.errors import Diverged
from rewound.fleets.captured import Program, capturable
from rewound.fleets.place import Place, Run
from rewound.recipe import Position, Recipe
from rewound.recipes.cifar10 import ResNet56
from rewound.recipes.digits import Digits
from rewound.recipes.images import ImageClassification
from rewound.schedule import Segment
from rewound.training import State, begin, evaluate
from small_fleets import (
    CPU,
    DIGITS,
    RATES,
    ROUNDING,
    Digits64,
    HeadAlone,
    Noise,
    Noise64,
    OwnBatches,
    Strangers,
    alone,
    furthest,
    same,
    sparse,
    stopped,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("recipe", "can"),
    [
        *((Digits(), True), (Noise(), True), (ResNet56(precision="bfloat16"), True), (Strangers(), True)),
        *((Noise(batch_size=61), False), (OwnBatches(), False), (HeadAlone(), False)),
        *((Strangers(what=what), False) for what in ("dropout", "noise", "unused", "frozen", "buffer")),
    ],
)
def test_a_step_is_captured_unless_it_needs_what_a_graph_cannot_do(recipe: Recipe, can: bool) -> None:
    assert capturable(recipe) is can


@pytest.mark.parametrize(
    "recipe", [Digits64(blocks=(1,), widths=(8,)), Digits64(blocks=(1,), widths=(8,), momentum=0.8), Noise64()]
)
@pytest.mark.usefixtures("float64")
def test_the_step_that_is_captured_is_a_step_of_train(recipe: ImageClassification) -> None:
    mask = sparse(recipe)
    # From the middle of a run, with momenta, across the end of an epoch in the middle of a batch.
    (middle,) = alone(recipe, Run(begin(recipe, 3), None, [Segment(0.01, 5)]))
    run = Run(middle, mask, [Segment(0.01, 3), Segment(0.001, 2)], [4])
    place = Place(Program(recipe, CPU, None))
    for again in range(2):  # a place serves one run after the other
        place.start(run)
        for expected in alone(recipe, run):
            _, state, ended = stopped(place)
            assert isinstance(state, State)
            assert furthest(state, expected) < ROUNDING, again
            assert state.loss == pytest.approx(expected.loss, rel=ROUNDING)
            assert all((state.model[name][~kept] == 0).all() for name, kept in mask.items())
            assert all((state.slots[f"momentum_buffer/{name}"][~kept] == 0).all() for name, kept in mask.items())
    assert ended
    assert isinstance(state, State)
    assert place.evaluate() == pytest.approx(evaluate(recipe, state))


def test_places_see_the_batches_of_the_recipe() -> None:
    recipe, place = DIGITS, Place(Program(DIGITS, CPU, None))
    start = Position(2, 7)  # 897 images are 9.34 batches: the third of these straddles two epochs
    batches = recipe.batches(4, start, CPU)
    place.start(Run(State(begin(recipe, 4).model, {}, 4, start), None, [Segment(0.1, 15)]))
    for _ in range(15):
        place._feed()
        for mine, theirs in zip(
            place.program.batch(place.orders, place.position, place.key), next(batches), strict=True
        ):
            assert torch.equal(mine, theirs)
        place.position += 1
        place._done += 1


def test_a_place_does_not_remember_a_run_that_diverged() -> None:
    place = Place(Program(DIGITS, CPU, None))
    good = Run(begin(DIGITS, 1), None, RATES)
    place.start(good)
    _, first, _ = stopped(place)
    assert isinstance(first, State)
    first = first.clone()
    place.start(Run(begin(DIGITS, 2), sparse(DIGITS), [Segment(1e30, 5)]))
    assert isinstance(stopped(place).outcome, Diverged)
    place.start(good)
    assert same([stopped(place).outcome], [first])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_places_share_one_compilation() -> None:
    counters = pytest.importorskip("torch._dynamo.utils").counters
    counters.clear()  # what other tests have compiled
    program = Program(DIGITS, CPU, "aot_eager")
    seen = []
    for seed in (1, 2, 3):
        place = Place(program)
        place.start(Run(begin(DIGITS, seed), sparse(DIGITS), RATES))
        stopped(place)
        seen.append((counters["stats"]["unique_graphs"], dict(counters["graph_break"])))
    assert all(one == other for one, other in pairwise(seen))
    assert not seen[-1][1]
