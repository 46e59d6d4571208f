"""A fleet is `train`, several at a time; a captured step is a step of `train`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_pre_hooks

from rewound.errors import Diverged, InputError
from rewound.fleets.captured import Program, capturable
from rewound.fleets.fleet import Event, Fleet, Run
from rewound.fleets.place import Place
from rewound.pruning.mask import Mask
from rewound.recipe import Position, Recipe
from rewound.recipes.cifar10 import ResNet20, ResNet56
from rewound.recipes.digits import Digits
from rewound.recipes.images import ImageClassification, Images
from rewound.schedule import Segment
from rewound.training import State, begin, evaluate, train

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
RATES = (Segment(0.05, 12), Segment(0.005, 5))
DIGITS = Digits(blocks=(1,), widths=(8,))
needs_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a GPU: run `pytest -m cuda tests/test_fleet.py` there"
    ),
    pytest.mark.filterwarnings("ignore"),  # compilation warns of what is not ours
]


@lru_cache
def noise(device: torch.device) -> Images:
    draw = torch.Generator().manual_seed(0)

    def part(n: int) -> tuple[Tensor, Tensor]:
        images = torch.randint(0, 256, (n, 3, 32, 32), generator=draw, dtype=torch.uint8)
        return images, torch.randint(0, 10, (n,), generator=draw)

    return Images(*part(60), *part(10), *part(20)).to(device)


@dataclass(frozen=True)
class Noise(ResNet20):
    """The CIFAR-10 network on sixty images of noise."""

    batch_size: int = 8

    @property
    def train_size(self) -> int:
        return 60

    def images(self, device: torch.device) -> Images:
        return noise(device)


@dataclass(frozen=True)
class OwnBatches(Digits):
    """A recipe that feeds itself in its own way."""

    def batches(self, seed, position, device):  # type: ignore[no-untyped-def]
        return super().batches(seed, position, device)


@dataclass(frozen=True)
class HeadAlone(Digits):
    """A recipe that trains its last layer only."""

    def optimizer(self, model: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(model.get_submodule("dense").parameters(), self.learning_rate, self.momentum)


class Strange(nn.Sequential):
    """Digits' network, and after it something that one graph cannot repeat as `train` has it."""

    def __init__(self, network: nn.Module, what: str) -> None:
        super().__init__(network)
        self.what = what
        if what == "unused":
            self.unused = nn.Parameter(torch.zeros(3))
        if what == "frozen":
            next(network.parameters()).requires_grad_(False)
        if what == "buffer":
            self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        if self.what == "buffer":
            self.seen = self.seen + 1
        if self.what == "noise":
            return x + torch.randn_like(x)
        return F.dropout(x, 0.5, self.training) if self.what == "dropout" else x


@dataclass(frozen=True)
class Strangers(Digits):
    """A recipe whose network is one of those."""

    what: str = ""

    def model(self, seed: int) -> nn.Module:
        return Strange(super().model(seed), self.what)


def sparse(recipe: Recipe) -> Mask:
    draw = torch.Generator().manual_seed(1)
    return Mask({name: torch.rand(shape, generator=draw) < 0.3 for name, shape in recipe.shapes.items()})


def alone(recipe: Recipe, run: Run, device: torch.device = CPU) -> list[State]:
    states = train(recipe, run.state, run.mask, lr=run.lr, stops=run.stops, device=device)
    return [state.clone() for state in states]


def together(fleet: Fleet, runs: Sequence[Run]) -> dict[int, list[State | Diverged]]:
    """Every member's outcomes, each run started as soon as there is a place."""
    waiting = list(runs)
    outcomes: dict[int, list[State | Diverged]] = {}
    while waiting:
        while waiting and fleet.free:
            outcomes[fleet.start(waiting.pop(0))] = []
        for member, outcome, _ in fleet.events():
            outcomes[member].append(outcome if isinstance(outcome, Diverged) else outcome.clone())
            while waiting and fleet.free:
                outcomes[fleet.start(waiting.pop(0))] = []
    return outcomes


def furthest(one: State, other: State, parts: Sequence[str] = ("model", "slots")) -> float:
    """The largest difference between the tensors of two states."""
    assert (one.model.keys(), one.slots.keys(), one.position) == (
        other.model.keys(),
        other.slots.keys(),
        other.position,
    )
    pairs = [(a, getattr(other, part)[name]) for part in parts for name, a in getattr(one, part).items()]
    return max(float((a.cpu().double() - b.cpu().double()).abs().max()) for a, b in pairs)


def same(ones: Sequence[State | Diverged], others: Sequence[State | Diverged]) -> bool:
    pairs = list(zip(ones, others, strict=True))
    return all(isinstance(a, State) and isinstance(b, State) and furthest(a, b) == 0 for a, b in pairs)


def stopped(place: Place) -> Event:
    while not place.arrived():
        place.launch()
    return Event(0, *place.report())


def test_members_equal_runs_alone_also_in_refilled_places() -> None:
    runs = [
        Run(begin(DIGITS, seed), sparse(DIGITS) if seed % 2 else None, RATES, [3 * seed, 10]) for seed in range(1, 5)
    ]
    outcomes = together(Fleet(DIGITS, "cpu", capacity=2), runs)
    for member, run in enumerate(runs):
        assert same(outcomes[member], alone(DIGITS, run))


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
    assert same(outcomes[1], alone(DIGITS, good))


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
    assert same([ends[branch]], alone(DIGITS, Run(begin(DIGITS, 1), None, [Segment(0.1, 4), Segment(0.01, 2)])))
    assert same([ends[trunk]], alone(DIGITS, Run(begin(DIGITS, 1), None, [Segment(0.1, 6)])))


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
    with pytest.raises(InputError, match="0 steps"):
        fleet.start(Run(begin(DIGITS, 1), None, []))
    fleet.start(Run(begin(DIGITS, 1), None, RATES))
    assert fleet.free == 0
    with pytest.raises(InputError, match="no place is free: 1 runs"):
        fleet.start(Run(begin(DIGITS, 2), None, RATES))


@pytest.mark.parametrize(
    ("recipe", "can"),
    [
        *((Digits(), True), (Noise(), True), (ResNet56(precision="bfloat16"), True), (Strangers(), True)),
        *((Noise(batch_size=61), False), (OwnBatches(), False), (HeadAlone(), False)),
        *((Strangers(what=what), False) for what in ("dropout", "noise", "unused", "frozen", "buffer")),
    ],
)
def test_capturable(recipe: Recipe, can: bool) -> None:
    assert capturable(recipe) is can


@pytest.mark.parametrize("recipe", [DIGITS, Digits(blocks=(1,), widths=(8,), nesterov=True, momentum=0.8), Noise()])
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
            assert furthest(state, expected) < 2e-4, again
            assert state.loss == pytest.approx(expected.loss, rel=1e-5)
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


def placed(monkeypatch: pytest.MonkeyPatch, capacity: int, free: Sequence[int]) -> Fleet:
    """A fleet of places on the CPU, where nothing is captured; `free` is the memory it finds at each look."""
    fleet, looks = Fleet(DIGITS, "cpu", capacity), iter(free)
    monkeypatch.setattr(fleet, "_program", Program(DIGITS, CPU, None))
    monkeypatch.setattr(fleet, "_memory", lambda: next(looks) << 30)
    return fleet


def test_a_fleet_of_places_ends_branches_and_fails_like_one_of_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [Run(begin(DIGITS, seed), sparse(DIGITS), RATES, [2 * seed, 10]) for seed in (1, 2, 3, 4)]
    runs.insert(1, Run(begin(DIGITS, 5), None, [Segment(1e30, 6)], [5]))
    outcomes = together(placed(monkeypatch, 3, [90, 80, 80, 70, 70, 60]), runs)
    for member, run in enumerate(runs):
        if member == 1:
            assert [type(outcome) for outcome in outcomes[1]] == [Diverged]
            continue
        for mine, theirs in zip(outcomes[member], alone(DIGITS, run), strict=True):
            assert isinstance(mine, State)
            assert furthest(mine, theirs) < 2e-3


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

    monkeypatch.setattr("rewound.fleets.fleet.Place", place)
    fleet = placed(monkeypatch, 4, [90, 50, 50, 10, 80 if error else 10])
    members = [fleet.start(Run(begin(DIGITS, seed), None, RATES)) for seed in (1, 2, 3)]
    assert (fleet.capacity, fleet.free) == (2, -1)
    assert sorted(member for member, _, ended in fleet.events() if ended) == members
    assert fleet.free == 2


def test_a_step_that_does_not_compile_is_one_sentence_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(*_: object) -> None:
        raise RuntimeError("there is no C compiler")

    def place(_: Program) -> Place:
        torch.compile(torch.sin, backend=backend)(torch.zeros(1))
        raise AssertionError("it compiled")

    monkeypatch.setattr("rewound.fleets.fleet.Place", place)
    message = r"does not compile here \(.*there is no C compiler\); `rewound run --plain`"
    with pytest.raises(InputError, match=message) as caught:
        placed(monkeypatch, 1, [90]).start(Run(begin(DIGITS, 1), None, RATES))
    assert "\n" not in str(caught.value)


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


class TestOnTheGPU:
    """Run these where there is one; `benchmarks/gpu_fleet.py --check` does the same at full size."""

    pytestmark = needs_cuda

    def test_captured_steps_are_steps_of_train(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        recipe, cuda = Noise(), torch.device("cuda")
        # Rates this low since rounding grows: 1e-6 of the weights becomes 7e-6 of them and 0.0015 of the slots here,
        # but 0.01 at ten times the rate.
        run = Run(begin(recipe, 1), sparse(recipe), [Segment(1e-3, 12), Segment(1e-4, 5)], [10])
        outcomes = together(Fleet(recipe, cuda, capacity=1), [run])[0]
        for captured, eager in zip(outcomes, alone(recipe, run, cuda), strict=True):
            assert isinstance(captured, State)
            assert furthest(captured, eager, ["model"]) < 1e-4
            assert furthest(captured, eager, ["slots"]) < 1e-2
            assert all((captured.model[name][~kept.cuda()] == 0).all() for name, kept in sparse(recipe).items())

    def test_plain_runs_are_those_of_train(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
        recipe, cuda = Noise(), torch.device("cuda")
        run = Run(begin(recipe, 1), sparse(recipe), RATES, [5])
        assert same(together(Fleet(recipe, cuda, plain=True), [run])[0], alone(recipe, run, cuda))

    def test_members_equal_runs_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
        recipe = Noise(precision="bfloat16")
        runs = [Run(begin(recipe, seed), sparse(recipe), RATES, [5 * seed]) for seed in (1, 2, 3)]
        outcomes = together(Fleet(recipe, "cuda", capacity=2), runs)
        for member, run in enumerate(runs):
            assert same(outcomes[member], together(Fleet(recipe, "cuda", capacity=1), [run])[0])

    def test_failures_are_separate_and_evaluation_the_recipes(self) -> None:
        recipe = Noise()
        fleet = Fleet(recipe, "cuda", capacity=2)
        bad = fleet.start(Run(begin(recipe, 1), None, [Segment(1e30, 20)], [10]))
        good = fleet.start(Run(begin(recipe, 2), None, RATES))
        for member, outcome, _ in fleet.events():
            assert isinstance(outcome, Diverged) == (member == bad)
            if member == good and isinstance(outcome, State):
                assert fleet.evaluate(good) == pytest.approx(evaluate(recipe, outcome, "cuda"), abs=0.11)
