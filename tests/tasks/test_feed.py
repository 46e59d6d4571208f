"""Streamed data: the same results as data that stays on the device, and threads that end with their run."""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import pytest
import torch

from ragged_recipe import BYTES, LENGTHS, STARTS, Ragged, Slow, decoding_threads
from rewound import Batch, InputError, Position, State, begin, train
from rewound.method.schedule import Segment
from rewound.tasks.feed import Feed, nearly_in_sequence, stays_on, streamed
from rewound.tasks.fleets.captured import Program, capturable
from rewound.tasks.fleets.fleet import Fleet
from rewound.tasks.fleets.place import Place, Run
from rewound.tasks.resident import Part, Share
from sameness import assert_same
from small_fleets import CPU, stopped

pytestmark = pytest.mark.usefixtures("one_thread")
RATES = [Segment(0.05, 9), Segment(0.01, 8)]  # over more than two epochs of 40 examples in batches of 6


@pytest.fixture
def streaming(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after which no data stays on a device."""
    return lambda: monkeypatch.setenv("REWOUND_RESIDENT_GB", "0")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    if decoding_threads():
        gc.collect()
    deadline = time.monotonic() + 20
    while decoding_threads() and time.monotonic() < deadline:  # they end by themselves, but not at once
        time.sleep(0.01)
    assert not decoding_threads()


def batches(seed: int, prunings: int, start: int, count: int) -> list[Batch]:
    return list(islice(Ragged().batches(seed, Position(prunings, start), CPU), count))


@pytest.mark.parametrize("n", [1, 63, 64, 16_384, 16_385, 40_000])
def test_an_order_nearly_in_sequence_has_every_example_once(n: int) -> None:
    order = nearly_in_sequence(7, n)
    assert torch.equal(order.sort().values, torch.arange(n))
    assert n < 63 or not torch.equal(order, nearly_in_sequence(8, n))


def test_an_order_nearly_in_sequence_reads_few_places_of_the_pack_at_a_time() -> None:
    order = nearly_in_sequence(7, 40_000)
    for window in order.split(16_384):
        chunks = (window // 64).unique()
        assert len(chunks) <= len(window) // 64 + 2  # nearly all chunks lie in one window as a whole
        assert chunks.max() - chunks.min() > 300  # and come from everywhere
        assert (window[1:] - window[:-1]).abs().median() > 1_000  # neighbours of the pack are apart


@pytest.mark.parametrize(("seed", "prunings", "start"), [(1, 0, 0), (2, 1, 3), (1, 0, 6), (1, 0, 137)])
def test_streamed_batches_are_those_of_resident_data(
    seed: int, prunings: int, start: int, streaming: Callable[[], None]
) -> None:
    resident = batches(seed, prunings, start, 20)
    streaming()
    for mine, theirs in zip(batches(seed, prunings, start, 20), resident, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_process_decodes_only_its_slice_of_a_batch(streaming: Callable[[], None]) -> None:
    streaming()
    whole = batches(1, 0, 3, 9)
    slices = [list(islice(Ragged().batches(1, Position(0, 3), CPU, Share(number, 2)), 9)) for number in range(2)]
    for batch, *parts in zip(whole, *slices, strict=True):
        for tensor, *pieces in zip(batch, *parts, strict=True):
            assert torch.equal(tensor, torch.cat(pieces))


@pytest.mark.parametrize("threads", [1, 7])
def test_examples_lie_at_their_places_whichever_thread_is_first(threads: int) -> None:
    chosen = [torch.arange(40).roll(shift)[:30] for shift in range(9)]
    feed = Feed(Slow(seconds=0.0005), chosen, CPU, threads=threads)
    for which, (content, starts, lengths, _) in zip(chosen, feed, strict=True):
        places = zip(which.tolist(), starts.tolist(), lengths.tolist(), strict=True)
        for index, start, length in places:
            mine, theirs = content[start : start + length], BYTES[STARTS[index] : STARTS[index] + LENGTHS[index]]
            assert torch.equal(mine, theirs)


def test_training_on_streamed_data_is_training_on_resident_data(streaming: Callable[[], None]) -> None:
    state = begin(Ragged(), 3)
    (resident,) = (each.clone() for each in train(Ragged(), state, lr=RATES))
    streaming()
    first, second = (each.clone() for each in train(Ragged(), state, lr=RATES, stops=[5]))
    assert_same(second, resident)
    (resumed,) = train(Ragged(), first, lr=[Segment(0.05, 4), Segment(0.01, 8)])  # in the middle of an epoch
    assert_same(resumed, resident)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_place_that_is_fed_does_the_steps_of_one_with_the_data(
    accumulation: int, streaming: Callable[[], None]
) -> None:
    recipe = Ragged(accumulation=accumulation)
    run = Run(begin(recipe, 3), None, RATES, stops=[4])
    middle, resident = in_place(Place(Program(recipe, CPU, None)), run)
    streaming()
    assert capturable(recipe, CPU)
    place = Place(Program(recipe, CPU, None))
    for _ in range(2):  # and again, in the same place
        assert_same(in_place(place, run), [middle, resident])
    rest = Run(middle, None, [Segment(0.05, 5), Segment(0.01, 8)])  # in the middle of an epoch
    assert_same(in_place(place, rest), [resident])


def in_place(place: Place, run: Run) -> list[State]:
    place.start(run)
    states, ended = list[State](), False
    while not ended:
        _, outcome, ended = stopped(place)
        assert isinstance(outcome, State)
        states.append(outcome.clone())
        place.resume()
    return states


def test_a_place_has_room_for_the_largest_step_of_each_run(streaming: Callable[[], None]) -> None:
    streaming()
    recipe = Ragged()
    source = recipe.source(CPU)
    assert source is not None
    for seed in range(4):
        position = Position(0, 2)
        sums = [int(LENGTHS[chosen].sum()) for chosen in islice(recipe.chosen(seed, position), 30)]
        assert recipe.largest(source, seed, position, 30, CPU) >= max(sums)
        assert recipe.largest(source, seed, position, 1, CPU) == sums[0]


def test_data_is_streamed_as_one_part_with_all_examples(streaming: Callable[[], None]) -> None:
    streaming()
    with pytest.raises(
        InputError, match=r"Parts has 30 \+ 10 examples, and its source 40; data is streamed as one part"
    ):
        next(Parts().batches(1, Position(0, 0), CPU))
    with pytest.raises(InputError, match=r"Fewer has 39 examples, and its source 40"):
        capturable(Fewer(), CPU)


@dataclass(frozen=True)
class Parts(Ragged):
    @property
    def parts(self) -> tuple[Part, ...]:
        return Part(30, 6), Part(10, 6)


@dataclass(frozen=True)
class Fewer(Ragged):
    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(39, 6),)


def test_a_damaged_example_is_one_error_that_names_it(
    streaming: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    streaming()
    monkeypatch.setattr(Ragged, "slow", Slow(damaged=17))
    with pytest.raises(InputError, match="image 17 of shard 0 is damaged"):
        list(train(Ragged(), begin(Ragged(), 1), lr=RATES))


def test_an_interruption_ends_the_threads(streaming: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    streaming()
    monkeypatch.setattr(Ragged, "slow", Slow(seconds=0.001))

    def interrupted() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(train(Ragged(), begin(Ragged(), 1), lr=RATES, due=interrupted))


@pytest.mark.parametrize("kind", ["feed", "place", "batches"])
def test_who_lets_go_of_a_feed_ends_its_threads(kind: str, streaming: Callable[[], None]) -> None:
    streaming()
    if kind == "feed":
        next(Feed(Slow(), iter(lambda: torch.arange(10), None), CPU))
    elif kind == "place":
        Place(Program(Ragged(), CPU, None)).start(Run(begin(Ragged(), 1), None, RATES))
    else:
        next(Ragged().batches(1, Position(0, 0), CPU))


def test_batches_that_nobody_asks_for_are_not_decoded_without_end() -> None:
    source = Slow()
    stream = streamed(source, (torch.arange(10) for _ in range(1_000_000)), CPU)
    next(stream)
    time.sleep(0.1)
    assert source.decoded <= 16 * 10


def test_seconds_of_waiting_are_told(streaming: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    state = begin(Ragged(), 1)
    assert [each.waited for each in train(Ragged(), state, lr=RATES)] == [0.0]
    streaming()
    monkeypatch.setattr(Ragged, "slow", Slow(seconds=0.002))
    outcomes = [*train(Ragged(), state, lr=RATES)]
    outcomes += in_place(Place(Program(Ragged(), CPU, None)), Run(state, None, RATES))
    assert all(outcome.waited > 0.002 for outcome in outcomes)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: run `pytest -m cuda tests/tasks/test_feed.py`")
@pytest.mark.filterwarnings("ignore")  # compilation warns of what is not ours
@pytest.mark.parametrize("seconds", [0.0, 0.002])  # the GPU is slower, and the threads are
def test_on_a_gpu_streamed_data_gives_the_results_of_resident_data(
    seconds: float, streaming: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, rates = torch.device("cuda"), [Segment(0.05, 300)]
    run = Run(begin(Ragged(), 3), None, rates, stops=[5, 150])
    theirs = list(islice(Ragged().batches(1, Position(0, 3), gpu), 60))
    resident = in_place(Place(Program(Ragged(), gpu, "inductor")), run)
    streaming()
    monkeypatch.setattr(Ragged, "slow", Slow(seconds=seconds))
    for mine, other in zip(islice(Ragged().batches(1, Position(0, 3), gpu), 60), theirs, strict=True):
        assert all(map(torch.equal, mine, other))
    place = Place(Program(Ragged(), gpu, "inductor"))
    for _ in range(2):
        assert_same(in_place(place, run), resident)
    assert Fleet(Ragged(), gpu).capacity == 1


def test_what_stays_on_a_device_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stays_on(CPU, 10**6)
    assert not stays_on(CPU, 10**15)
    monkeypatch.setenv("REWOUND_RESIDENT_GB", "0.5")
    assert stays_on(CPU, 500_000_000)
    assert not stays_on(CPU, 500_000_001)
    for wrong in ("much", "-1", "nan"):
        monkeypatch.setenv("REWOUND_RESIDENT_GB", wrong)
        with pytest.raises(InputError, match=f"at least 0, not '{wrong}'"):
            stays_on(CPU, 1)
