"""A captured step is a step of `train`, wherever it is placed."""

from dataclasses import dataclass, replace
from itertools import count, pairwise

import pytest
import torch
from torch import nn

from resident_recipes import CAPTURED, Averaged, Recurrent, Sentences, Translating, Vectors
from rewound.foundations.errors import Diverged
from rewound.method.pruning.mask import Mask
from rewound.method.schedule import Segment
from rewound.tasks.fleets.captured import Program, capturable
from rewound.tasks.fleets.fleet import _Plain
from rewound.tasks.fleets.place import Place, Run
from rewound.tasks.fleets.updates import FlatMomentum, TorchOptimizer
from rewound.tasks.recipe import Position, Recipe, Scores, changed_fields
from rewound.tasks.recipes.digits import Digits
from rewound.tasks.recipes.images import ImageClassification
from rewound.tasks.resident import ResidentRecipe
from rewound.tasks.training import State, begin, evaluate, train
from sameness import assert_same
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
    Strangers64,
    alone,
    furthest,
    sparse,
    stopped,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("recipe", "can"),
    [
        *((Digits(), True), (Noise(), True), (Noise(precision="bfloat16"), True), (HeadAlone(), True)),
        *((Noise(batch_size=61), False), (OwnBatches(), False), (Noise(batch_size=31, accumulation=2), False)),
        *((Strangers(what=what), True) for what in ("", "dropout", "noise", "unused", "frozen")),
        *((Strangers(what=what), False) for what in ("buffer", "python", "numpy")),
        *((Vectors(kind=kind), True) for kind in CAPTURED),
        *((Vectors(kind=kind), False) for kind in ("adagrad", "asgd", "rprop", "no-epsilon", "dampening", "own")),
        *((Sentences(), True), (Sentences(accumulation=2), True), (Recurrent(), True)),
        (Translating(), True),
    ],
)
def test_a_step_is_captured_unless_it_needs_what_a_graph_cannot_do(recipe: Recipe, can: bool) -> None:
    assert capturable(recipe, CPU) is can


@pytest.mark.numeric
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


@pytest.mark.parametrize("recipe", [DIGITS, Sentences()])
def test_places_see_the_batches_of_the_recipe(recipe: ResidentRecipe) -> None:
    place = Place(Program(recipe, CPU, None))
    start = Position(2, 7)  # 897 images are 9.34 batches: the third of these straddles two epochs
    batches = recipe.batches(4, start, CPU)
    place.start(Run(State(begin(recipe, 4).model, {}, 4, start), None, [Segment(0.1, 15)]))
    for _ in range(15):
        part = place._feed()
        mine = place.program.batch(part, place.data, place.orders[part], place.positions[part], place.keys[part])
        assert_same(mine, next(batches))
        place.positions[part] += 1
        place._done += 1


@pytest.mark.numeric
@pytest.mark.parametrize(
    "recipe",
    [
        *(Vectors(kind=kind) for kind in CAPTURED),
        Vectors(kind="adamw", clip_norm=0.05, accumulation=2),
        Vectors(kind="sgd", clip_norm=0.05, accumulation=3),
        Vectors(kind="sgd", clip_norm=0.05, accumulation=3, clip_each=True),
        *(Sentences(accumulation=2), Sentences(kind="adam", accumulation=2, clip_norm=0.05, clip_each=True)),
        *(Strangers64(what=what) for what in ("dropout", "noise", "unused", "frozen")),
        *(
            Sentences(clip_norm=0.05),
            Recurrent(),
            Averaged(),
            Translating(accumulation=2, clip_norm=0.05, clip_each=True),
        ),
    ],
    ids=lambda recipe: " ".join([type(recipe).__name__, *changed_fields(recipe)]),
)
@pytest.mark.usefixtures("float64")
def test_whatever_a_recipe_does_in_a_step_a_place_does(recipe: ResidentRecipe) -> None:
    biases = {name: bias for name, bias in recipe.skeleton.named_parameters() if name.endswith("bias")}
    mask = Mask({**sparse(recipe), **{name: torch.arange(len(bias)) > 1 for name, bias in biases.items()}})
    (middle,) = alone(recipe, Run(begin(recipe, 3), None, [Segment(0.01, 3)]))
    place = Place(Program(recipe, CPU, None))
    for state in (middle, begin(recipe, 5)):  # the second must not find slots of the first
        run = Run(state, mask, [Segment(0.01, 4), Segment(0.001, 3)], [2])
        place.start(run)
        for expected in alone(recipe, run):
            outcome = stopped(place).outcome
            assert isinstance(outcome, State)
            assert furthest(outcome, expected) < ROUNDING
            assert outcome.loss == pytest.approx(expected.loss, rel=ROUNDING)
            assert all((outcome.model[name][~kept] == 0).all() for name, kept in mask.items())


@dataclass(frozen=True)
class Sampling(Vectors):
    """A task that is judged by chance."""

    def evaluate(self, model: nn.Module) -> Scores:
        return Scores(*torch.rand(2).tolist())


def test_what_evaluation_draws_is_a_function_of_the_state() -> None:
    recipe, scores = Sampling(kind="sgd"), []
    place = Place(Program(recipe, CPU, None))
    for seed in (1, 2):
        torch.manual_seed(seed)
        place.start(Run(begin(recipe, 1), None, [Segment(0.01, 2)]))
        state = stopped(place).outcome
        assert isinstance(state, State)
        before = torch.get_rng_state()
        scores += [place.evaluate(), evaluate(recipe, state)]
        assert torch.equal(torch.get_rng_state(), before)
    assert scores[1:] == scores[:-1]
    assert evaluate(recipe, begin(recipe, 1)) != scores[0], "another position"


@pytest.mark.numeric
@pytest.mark.usefixtures("float64")
def test_torchs_sgd_and_the_flat_one_are_the_same_update() -> None:
    program = Program(Vectors(kind="sgd"), CPU, None)
    assert program.momentum is not None
    for other in ("groups", "another-rate"):
        assert Program(Vectors(kind=other), CPU, None).momentum is None
    flat = Place(program)
    program.momentum = None  # the same recipe by torch's own
    ends = []
    for place in (flat, Place(program)):
        place.start(Run(begin(program.recipe, 1), sparse(program.recipe), RATES))
        ends.append(stopped(place).outcome)
        assert isinstance(ends[-1], State)
    assert [type(place.update) for place in (flat, place)] == [FlatMomentum, TorchOptimizer]
    one, other = ends
    assert furthest(one, other) < ROUNDING


def test_a_run_stops_when_it_is_due_and_goes_on_to_the_same_end() -> None:
    run = Run(begin(DIGITS, 1), sparse(DIGITS), RATES, [9])
    looks = [count(1) for _ in range(2)]
    due = [replace(run, due=lambda look=look: next(look) % 4 == 0) for look in looks]  # type: ignore[misc]
    place = Place(Program(DIGITS, CPU, None))
    outcomes: list[list[State]] = [[], []]
    for room, each in zip((place, _Plain(DIGITS, CPU, train)), due, strict=True):
        room.start(each)
        ended = False
        while not ended:
            while not room.arrived():
                room.launch()
            outcome, ended = room.report()
            assert isinstance(outcome, State)
            outcomes[room is not place].append(outcome.clone())
    assert [[state.position.steps for state in states] for states in outcomes] == [[4, 8, 9, 13, 17]] * 2
    place.start(run)
    stopped(place)
    assert_same([stopped(place).outcome], outcomes[0][-1:])
    assert_same(outcomes[1][-1:], alone(DIGITS, run)[-1:])


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
    assert_same([stopped(place).outcome], [first])


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
