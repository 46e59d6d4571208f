"""A fleet is `train`, several at a time."""

import math
import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from resident_recipes import CAPTURED, Recurrent, Sentences, Translating, Vectors
from rewound.foundations.errors import Diverged, Failed, InputError
from rewound.method.schedule import Segment
from rewound.tasks.fleets.captured import Program, program
from rewound.tasks.fleets.fleet import Fleet
from rewound.tasks.fleets.place import Place, Run
from rewound.tasks.recipe import changed_fields
from rewound.tasks.recipes.images import ImageClassification
from rewound.tasks.resident import ResidentRecipe
from rewound.tasks.slimmed import cut_state, kept_by, slimmed
from rewound.tasks.training import State, begin, evaluate
from sameness import assert_same
from small_fleets import (
    CPU,
    DIGITS,
    RATES,
    ROUNDING,
    Digits64,
    Noise,
    Noise64,
    alone,
    furthest,
    sparse,
    stopped,
    together,
)

pytestmark = pytest.mark.usefixtures("one_thread")
needs_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a GPU: run `pytest -m cuda tests/tasks/test_fleet.py` there"
    ),
    pytest.mark.filterwarnings("ignore"),  # compilation warns of what is not ours
]


def test_members_equal_runs_alone_also_in_refilled_places() -> None:
    runs = [
        Run(begin(DIGITS, seed), sparse(DIGITS) if seed % 2 else None, RATES, [3 * seed, 10]) for seed in range(1, 5)
    ]
    outcomes = together(Fleet(DIGITS, "cpu", capacity=2), runs)
    for member, run in enumerate(runs):
        assert_same(outcomes[member], alone(DIGITS, run))


def test_events_come_in_turn_and_say_the_end() -> None:
    fleet = Fleet(DIGITS, "cpu", capacity=2)
    for seed in (1, 2):
        fleet.start(Run(begin(DIGITS, seed), None, [Segment(0.1, 3)], [1, 7]))
    seen = [(m, state.position.steps, ended) for m, state, ended in fleet.events() if isinstance(state, State)]
    assert seen == [(0, 1, False), (1, 1, False), (0, 3, True), (1, 3, True)]


def test_runs_that_have_ended_leave_no_hooks_behind() -> None:
    fleet = Fleet(DIGITS, "cpu", capacity=2)
    bad = [Segment(1e30, 5), Segment(0.1, 12)]
    for seed, rates in ((1, RATES), (2, bad)):
        fleet.start(Run(begin(DIGITS, seed), sparse(DIGITS), rates, [5]))
    for member, outcome, ended in fleet.events():
        if ended and isinstance(outcome, State):
            assert fleet.evaluate(member) == evaluate(DIGITS, outcome)
    assert not _global_optimizer_pre_hooks
    assert fleet.free == 2


def test_a_run_that_diverges_stops_alone() -> None:
    good = Run(begin(DIGITS, 1), None, RATES)
    bad = Run(begin(DIGITS, 2), None, [Segment(1e30, 5), Segment(0.1, 12)], [5, 8])
    outcomes = together(Fleet(DIGITS, "cpu", capacity=2), [bad, good])
    (failure,) = outcomes[0]
    assert isinstance(failure, Diverged)
    assert failure.step == 5
    assert not math.isfinite(failure.loss)
    assert_same(outcomes[1], alone(DIGITS, good))


def test_a_member_branches() -> None:
    fleet = Fleet(DIGITS, "cpu", capacity=2)
    trunk = fleet.start(Run(begin(DIGITS, 1), None, [Segment(0.1, 6)], [4]))
    ends = {}
    for member, outcome, ended in fleet.events():
        assert isinstance(outcome, State)
        if ended:
            ends[member] = outcome.clone()
        elif member == trunk:
            branch = fleet.start(Run(outcome.clone(), None, [Segment(0.01, 2)]))
    assert_same([ends[branch]], alone(DIGITS, Run(begin(DIGITS, 1), None, [Segment(0.1, 4), Segment(0.01, 2)])))
    assert_same([ends[trunk]], alone(DIGITS, Run(begin(DIGITS, 1), None, [Segment(0.1, 6)])))


def test_evaluation_is_the_recipes() -> None:
    fleet = Fleet(DIGITS, "cpu")
    member = fleet.start(Run(begin(DIGITS, 1), None, [Segment(0.1, 20)]))
    for _, state, _ in fleet.events():
        assert isinstance(state, State)
        assert fleet.evaluate(member) == evaluate(DIGITS, state)
    with pytest.raises(InputError, match="member 7 is not at a stop"):
        fleet.evaluate(7)


def test_what_cannot_be_started() -> None:
    with pytest.raises(InputError, match="at least 1 run, not 0"):
        Fleet(DIGITS, "cpu", capacity=0)
    fleet = Fleet(DIGITS, "cpu")
    with pytest.raises(InputError, match="at least 1 step, not 0"):
        fleet.start(Run(begin(DIGITS, 1), None, []))
    fleet.start(Run(begin(DIGITS, 1), None, RATES))
    assert fleet.free == 0
    with pytest.raises(InputError, match="no place is free: 1 runs"):
        fleet.start(Run(begin(DIGITS, 2), None, RATES))


def placed(
    monkeypatch: pytest.MonkeyPatch, capacity: int, free: Sequence[int], recipe: ImageClassification = DIGITS
) -> Fleet:
    """A fleet of places on the CPU, where nothing is captured; `free` is the memory it finds at each look."""
    fleet, looks = Fleet(recipe, "cpu", capacity), iter(free)
    monkeypatch.setattr(fleet, "captures", True)
    programs: dict[object, Program] = {}
    monkeypatch.setattr(fleet, "_program", lambda each: programs.setdefault(each, Program(each, CPU, None)))
    monkeypatch.setattr(fleet, "_memory", lambda: next(looks) << 30)
    return fleet


@pytest.mark.numeric
@pytest.mark.usefixtures("float64")
def test_a_fleet_of_places_ends_branches_and_fails_like_one_of_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Digits64(blocks=(1,), widths=(8,))
    runs = [Run(begin(recipe, seed), sparse(recipe), RATES, [2 * seed, 10]) for seed in (1, 2, 3, 4)]
    runs.insert(1, Run(begin(recipe, 5), None, [Segment(1e300, 6)], [5]))
    outcomes = together(placed(monkeypatch, 3, [90, 80, 80, 70, 70, 60], recipe), runs)
    for member, run in enumerate(runs):
        if member == 1:
            assert [type(outcome) for outcome in outcomes[1]] == [Diverged]
            continue
        for mine, theirs in zip(outcomes[member], alone(recipe, run), strict=True):
            assert isinstance(mine, State)
            assert furthest(mine, theirs) < ROUNDING


@pytest.mark.numeric
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("places", [True, False])
def test_networks_of_several_shapes_advance_together(monkeypatch: pytest.MonkeyPatch, places: bool) -> None:
    recipe = Digits64(blocks=(1,), widths=(8,))
    groups = recipe.units
    masks = [groups.mask_without(group.units[:left]) for group, left in zip(groups, (3, 5), strict=False)]
    runs = [Run(begin(recipe, 1), None, RATES, [6])]
    for mask in [*masks, masks[0]]:
        kept = kept_by(recipe, mask)
        runs.append(Run(cut_state(begin(recipe, 2), kept), None, RATES, [10], recipe=slimmed(recipe, kept)))
    fleet = placed(monkeypatch, 2, [90] * 9, recipe) if places else Fleet(recipe, "cpu", 2)
    outcomes = together(fleet, runs)
    for member, run in enumerate(runs):
        for mine, theirs in zip(outcomes[member], alone(run.recipe or recipe, run), strict=True):
            assert isinstance(mine, State)
            assert furthest(mine, theirs) < ROUNDING
    sizes = {sum(tensor.numel() for tensor in run.state.model.values()) for run in runs}
    assert len(sizes) == 3


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError])
def test_too_little_memory_lowers_the_capacity_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None
) -> None:
    made: list[Place] = []

    def place(program: Program) -> Place:
        if len(made) == 2:
            assert error is not None, "there was no memory for a third"
            raise error
        made.append(Place(program))
        return made[-1]

    monkeypatch.setattr("rewound.tasks.fleets.fleet.Place", place)
    fleet = placed(monkeypatch, 4, [90, 50, 50, 10, 80 if error else 10])
    members = [fleet.start(Run(begin(DIGITS, seed), None, RATES)) for seed in (1, 2, 3)]
    assert (fleet.capacity, fleet.free) == (2, -1)
    assert fleet.waiting == {members[2]}, "it has nothing to draft when time is up"
    assert sorted(member for member, _, ended in fleet.events() if ended) == members
    assert fleet.free == 2


def test_no_memory_for_even_one_network_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(_: Program) -> Place:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("rewound.tasks.fleets.fleet.Place", place)
    with pytest.raises(Failed, match=r"a single network of digits does not fit .* \(\d+\.\d GiB are free\): end what"):
        placed(monkeypatch, 1, [90]).start(Run(begin(DIGITS, 1), None, RATES))


def test_one_program_is_held_at_a_time() -> None:
    first = weakref.ref(program(DIGITS, CPU))
    assert program(DIGITS, CPU) is first(), "the next fleet of the same recipe compiles nothing"
    program(replace(DIGITS, batch_size=32), CPU)
    assert first() is None


def test_programs_of_several_shapes_are_held_until_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    units = DIGITS.units.groups[0].units
    slim = [slimmed(DIGITS, kept_by(DIGITS, DIGITS.units.mask_without(units[:count]))) for count in (1, 2)]
    monkeypatch.setattr("rewound.tasks.fleets.captured._PROGRAMS", 2)
    large = weakref.ref(program(DIGITS, CPU, DIGITS))
    assert program(slim[0], CPU, DIGITS).parameters == large().parameters  # type: ignore[union-attr]
    assert program(DIGITS, CPU, DIGITS) is large()
    program(slim[1], CPU, DIGITS)
    assert large() is None


def test_a_step_that_does_not_compile_is_one_sentence_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(*_: object) -> None:
        raise RuntimeError("there is no C compiler")

    def place(_: Program) -> Place:
        torch.compile(torch.sin, backend=backend)(torch.zeros(1))
        raise AssertionError("it compiled")

    monkeypatch.setattr("rewound.tasks.fleets.fleet.Place", place)
    message = r"does not compile here \(.*there is no C compiler\); `rewound run --plain`"
    with pytest.raises(InputError, match=message) as caught:
        placed(monkeypatch, 1, [90]).start(Run(begin(DIGITS, 1), None, RATES))
    assert "\n" not in str(caught.value)


class TestOnTheGPU:
    """Run these where there is one; `benchmarks/gpu_fleet.py --check` does the same at full size."""

    pytestmark = needs_cuda

    def test_captured_steps_are_steps_of_train(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        recipe, cuda = Noise(), torch.device("cuda")
        run = Run(begin(recipe, 1), sparse(recipe), [Segment(1e-3, 12), Segment(1e-4, 5)], [10])
        outcomes = together(Fleet(recipe, cuda, capacity=1), [run])[0]
        for captured, eager in zip(outcomes, alone(recipe, run, cuda), strict=True):
            assert isinstance(captured, State)
            # The exact comparison is the next one, in float64. In float32 the kernels are those that are fastest at
            # the time, so rounding differs from run to run: 1e-6 is seen, 1e-5 with TensorFloat32's 10 bits.
            assert furthest(captured, eager, ["model"]) < 1e-4
            assert all((captured.model[name][~kept.cuda()] == 0).all() for name, kept in sparse(recipe).items())

    @pytest.mark.usefixtures("float64")
    def test_captured_steps_are_steps_of_train_in_float64(self) -> None:
        recipe, cuda = Noise64(), torch.device("cuda")
        place = Place(Program(recipe, cuda, "inductor"))
        run = Run(begin(recipe, 1), sparse(recipe), [Segment(1e-3, 12), Segment(1e-4, 5)], [10])
        place.start(run)
        for expected in alone(recipe, run, cuda):
            captured = stopped(place).outcome
            assert isinstance(captured, State)
            assert furthest(captured, expected) < ROUNDING

    @pytest.mark.parametrize(
        "recipe",
        [
            *(Vectors(kind=kind, clip_norm=0.5) for kind in CAPTURED),
            *(Vectors(accumulation=2), Sentences(), Recurrent()),
            *(
                Translating(kind="sgd", clip_norm=0.5),
                Translating(kind="sgd", accumulation=2, clip_norm=0.5, clip_each=True),
            ),
        ],
        ids=lambda recipe: " ".join([type(recipe).__name__, *changed_fields(recipe)]),
    )
    def test_captured_draws_and_updates_are_those_of_train(self, recipe: ResidentRecipe) -> None:
        cuda = torch.device("cuda")
        run = Run(begin(recipe, 1), sparse(recipe), [Segment(1e-2, 9), Segment(1e-3, 5)], [4])
        place = Place(Program(recipe, cuda, None))  # not compiled: compiled dropout draws other numbers
        for again in range(2):
            place.start(run)
            for eager in alone(recipe, run, cuda):
                captured = stopped(place).outcome
                assert isinstance(captured, State)
                # 14 steps of about a hundred roundings (6e-8) each; a wrong dropout mask changes weights by 1e-3.
                assert furthest(captured, eager, ["model"]) < 14 * 100 * 6e-8, again

    def test_masks_hold_at_every_captured_step_of_a_translation_network(self) -> None:
        recipe = Translating()
        mask = sparse(recipe)
        run = Run(begin(recipe, 1), mask, [Segment(1e-2, 20)], range(1, 20))
        outcomes = together(Fleet(recipe, "cuda", capacity=1), [run])[0]
        assert len(outcomes) == 20
        for outcome in outcomes:
            assert isinstance(outcome, State)
            assert all((outcome.model[name][~kept.cuda()] == 0).all() for name, kept in mask.items())
        assert any(
            (outcome.model[name][kept.cuda()] != run.state.model[name][kept].cuda()).any()
            for name, kept in mask.items()
        )

    def test_places_side_by_side_draw_each_its_own(self) -> None:
        recipe = Vectors(kind="adamw")
        runs = [Run(begin(recipe, seed), sparse(recipe), RATES, [5 * seed]) for seed in (1, 2, 3, 4)]
        outcomes = together(Fleet(recipe, "cuda", capacity=4), runs)
        for member, run in enumerate(runs):
            assert_same(outcomes[member], together(Fleet(recipe, "cuda", capacity=1), [run])[0])

    def test_plain_runs_are_those_of_train(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
        recipe, cuda = Noise(), torch.device("cuda")
        run = Run(begin(recipe, 1), sparse(recipe), RATES, [5])
        assert_same(together(Fleet(recipe, cuda, plain=True), [run])[0], alone(recipe, run, cuda))

    def test_members_equal_runs_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
        recipe = Noise(precision="bfloat16")
        runs = [Run(begin(recipe, seed), sparse(recipe), RATES, [5 * seed]) for seed in (1, 2, 3)]
        outcomes = together(Fleet(recipe, "cuda", capacity=2), runs)
        for member, run in enumerate(runs):
            assert_same(outcomes[member], together(Fleet(recipe, "cuda", capacity=1), [run])[0])

    def test_slim_networks_beside_large_ones_equal_runs_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
        recipe = Noise()
        kept = kept_by(recipe, recipe.units.mask_without(recipe.units.groups[1].units[:5]))
        slim = Run(cut_state(begin(recipe, 2), kept), None, RATES, [5], recipe=slimmed(recipe, kept))
        runs = [Run(begin(recipe, 1), None, RATES, [5]), slim, Run(begin(recipe, 3), None, RATES), slim]
        outcomes = together(Fleet(recipe, "cuda", capacity=2), runs)
        for member, run in enumerate(runs):
            assert_same(outcomes[member], together(Fleet(recipe, "cuda", capacity=1), [run])[0])

    def test_failures_are_separate_and_evaluation_the_recipes(self) -> None:
        recipe = Noise()
        fleet = Fleet(recipe, "cuda", capacity=2)
        bad = fleet.start(Run(begin(recipe, 1), None, [Segment(1e30, 20)], [10]))
        good = fleet.start(Run(begin(recipe, 2), None, RATES))
        for member, outcome, _ in fleet.events():
            assert isinstance(outcome, Diverged) == (member == bad)
            if member == good and isinstance(outcome, State):
                assert fleet.evaluate(good) == pytest.approx(evaluate(recipe, outcome, "cuda"), abs=0.11)
