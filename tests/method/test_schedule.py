"""Learning-rate schedules against hand values and the authors' three schedules."""

import json
import math
import re
from itertools import groupby, pairwise
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewound import InputError, Schedule
from rewound.method.schedule import CURVES, Piece, Segment, merged, sliced, total

CIFAR = Schedule.piecewise(71_108, [0.1, 0.01, 0.001], drops=[35_547, 53_126])
IMAGENET_EPOCH = 1_281_167 / 1024
IMAGENET = Schedule.piecewise(
    112_590,
    [0.4, 0.04, 0.004, 0.0004],
    drops=[30 * IMAGENET_EPOCH, 60 * IMAGENET_EPOCH, 80 * IMAGENET_EPOCH],
    warmup=5 * IMAGENET_EPOCH,
)
GNMT = Schedule.piecewise(
    8_630,
    [0.002, 0.001, 0.0005, 0.00025, 0.000125],
    drops=[6_472, 7_191, 7_910, 8_629],
    warmup=200,
    warmup_from=0.002 * 0.01,
    warmup_curve="exponential",
    final=0.00025,
)

# Curves


@pytest.mark.parametrize(
    ("curve", "rates"),
    [
        ("constant", [8.0, 8.0, 8.0, 8.0]),
        ("linear", [8.0, 6.5, 5.0, 3.5]),
        ("exponential", [8.0, 4.75682846, 2.82842712, 1.68179283]),
        ("cosine", [8.0, 7.12132034, 5.0, 2.87867966]),
    ],
)
def test_every_curve_at_hand_computed_points(curve: str, rates: list[float]) -> None:
    """Quarters of the way from 8 to 2 (exponential: from 8 to 1)."""
    schedule = Schedule(4, (Piece(4, 8.0, 1.0 if curve == "exponential" else 2.0, curve),))
    assert [schedule.at(step) for step in range(4)] == pytest.approx(rates, rel=1e-8)


def test_the_points_above_cover_every_curve() -> None:
    assert set(CURVES) == {"constant", "linear", "exponential", "cosine"}


def test_a_constant_rate_holds_for_ever() -> None:
    schedule = Schedule.constant(3, 0.1)
    assert [schedule.at(step) for step in range(5)] == [0.1] * 5
    assert schedule.final == schedule.peak == 0.1


def test_linear_after_a_warmup() -> None:
    schedule = Schedule.linear(10, 1.0, warmup=2)
    assert [schedule.at(step) for step in range(11)] == [0, 0.5, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.125]
    assert schedule.final == 0.125


def test_cosine_after_a_warmup_to_an_end() -> None:
    schedule = Schedule.cosine(6, 1.0, 0.2, warmup=2, final=0.05)
    expected = [0, 0.5, 1, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2 + 0.4 * (1 - math.sqrt(0.5)), 0.05, 0.05]
    assert [schedule.at(step) for step in range(8)] == pytest.approx(expected, rel=1e-8)
    assert schedule.peak == 1.0


# The authors' schedules


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 0.1), (35_546, 0.1), (35_547, 0.01), (53_125, 0.01), (53_126, 0.001), (71_107, 0.001), (10**9, 0.001)],
)
def test_cifar_drops_after_the_steps_of_the_authors(step: int, rate: float) -> None:
    assert CIFAR.at(step) == rate


def test_cifar_in_segments() -> None:
    assert CIFAR.segments(0, 71_108) == [(0.1, 35_547), (0.01, 17_579), (0.001, 17_982)]
    assert CIFAR.segments(71_108 - 50 * 391, 71_108 + 10) == [(0.01, 1_568), (0.001, 17_992)]
    assert CIFAR.segments(71_108, 142_216) == [(0.001, 71_108)]


def test_imagenet_warms_up_linearly_over_a_fractional_number_of_steps() -> None:
    assert IMAGENET.at(0) == 0.0
    for step in (1, 1000, 6255):
        assert IMAGENET.at(step) == pytest.approx(0.4 * (step / IMAGENET_EPOCH) / 5, rel=1e-8)
    # 5, 30, 60 and 80 epochs end within steps 6255, 37534, 75068 and 100091.
    for last, before, after in ((37_534, 0.4, 0.04), (75_068, 0.04, 0.004), (100_091, 0.004, 0.0004)):
        assert (IMAGENET.at(last), IMAGENET.at(last + 1)) == (before, after)
    assert (IMAGENET.at(6_255) < 0.4, IMAGENET.at(6_256)) == (True, 0.4)
    assert IMAGENET.final == IMAGENET.at(112_589) == 0.0004
    assert IMAGENET.segments(37_530, 37_540) == [(0.4, 5), (0.04, 5)]


@pytest.mark.parametrize("step", [0, 1, 50, 100, 199])
def test_gnmt_warms_up_exponentially(step: int) -> None:
    assert GNMT.at(step) == pytest.approx(0.002 * 0.01 ** ((200 - step) / 200), rel=1e-8)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (200, 0.002),
        (6_471, 0.002),
        (6_472, 0.001),
        (7_191, 0.0005),
        (7_910, 0.00025),
        (8_628, 0.00025),
        (8_629, 0.000125),
        (8_630, 0.00025),
        (20_000, 0.00025),
    ],
)
def test_gnmt_halves_and_then_holds_what_it_declares(step: int, rate: float) -> None:
    assert GNMT.at(step) == rate


def test_rates_have_nine_significant_digits() -> None:
    assert Schedule.linear(3, 1.0).at(1) == 0.666666667
    assert Schedule.constant(1, 0.1 + 0.2).at(0) == 0.3
    assert Schedule.constant(1, 0.1 + 0.2).segments(0, 1) == [(0.3, 1)]
    assert Schedule.linear(3, 1.0, final=2 / 3).final == 0.666666667


# Segments


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    rate = st.floats(1e-6, 10)
    pieces, until = [], 0.0
    for _ in range(draw(st.integers(1, 4))):
        until += draw(st.one_of(st.integers(1, 20), st.floats(0.1, 20)))
        pieces.append(
            Piece(until, draw(rate), draw(rate), draw(st.sampled_from(["constant", "constant", "constant", *CURVES])))
        )
    steps = draw(st.integers(1, max(1, math.floor(until))))
    pieces[-1] = pieces[-1]._replace(until=max(until, steps))
    return Schedule(steps, tuple(pieces), draw(st.one_of(st.none(), rate)))


@given(schedules(), st.integers(0, 60), st.integers(0, 60))
@settings(deadline=None, max_examples=200)
def test_segments_are_the_rates_of_the_steps_run_length_encoded(schedule: Schedule, start: int, length: int) -> None:
    rates = [schedule.at(step) for step in range(start, start + length)]
    assert schedule.segments(start, start + length) == [Segment(rate, len(list(run))) for rate, run in groupby(rates)]


@given(schedules(), st.lists(st.integers(0, 60), min_size=3, max_size=3).map(sorted))
@settings(deadline=None, max_examples=100)
def test_segments_do_not_depend_on_where_they_are_cut(schedule: Schedule, cuts: list[int]) -> None:
    a, b, c = cuts
    whole = schedule.segments(a, c)
    assert merged([*schedule.segments(a, b), *schedule.segments(b, c)]) == whole
    assert sliced(whole, 0, b - a) == schedule.segments(a, b)
    assert sliced(whole, b - a) == schedule.segments(b, c)
    assert total(whole) == c - a


SEGMENTS = st.lists(st.builds(Segment, st.sampled_from([0.1, 0.01]), st.integers(0, 4)), max_size=6)


@given(SEGMENTS)
@settings(deadline=None)
def test_merging_keeps_every_step_and_is_canonical(segments: list[Segment]) -> None:
    once = merged(segments)
    assert [rate for rate, steps in once for _ in range(steps)] == [r for r, steps in segments for _ in range(steps)]
    assert all(steps > 0 for _, steps in once)
    assert all(one.rate != other.rate for one, other in pairwise(once))
    assert merged(iter(once)) == once


@given(SEGMENTS, st.integers(0, 25), st.one_of(st.none(), st.integers(0, 25)))
@settings(deadline=None)
def test_slicing_is_slicing_of_the_steps(segments: list[Segment], start: int, stop: int | None) -> None:
    steps = [rate for rate, count in segments for _ in range(count)]
    assert [rate for rate, count in sliced(segments, start, stop) for _ in range(count)] == steps[start:stop]


def test_nothing_between_a_step_and_itself() -> None:
    assert CIFAR.segments(100, 100) == []
    assert total([]) == 0


# Errors


@pytest.mark.parametrize("steps", [0, -1])
def test_a_schedule_has_steps(steps: int) -> None:
    with pytest.raises(InputError, match=f"at least one step, not {steps}; train for longer"):
        Schedule(steps, (Piece(1, 0.1, 0.1),))
    with pytest.raises(InputError, match="at least one piece"):
        Schedule(5, ())


@pytest.mark.parametrize("ends", [(5, 5, 10), (6, 5, 10), (0, 10), (4, 8)])
def test_pieces_end_in_growing_order_and_cover_the_steps(ends: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="must end in growing order, the last at 10 or later"):
        Schedule(10, tuple(Piece(end, 0.1, 0.1) for end in ends))


def test_a_warmup_longer_than_the_first_rate_is_an_error() -> None:
    with pytest.raises(InputError, match="must end in growing order"):
        Schedule.piecewise(10, [0.1, 0.01], drops=[5], warmup=6)


def test_rates_need_drops_between_them() -> None:
    with pytest.raises(InputError, match="3 rates need 2 drops between them, not 1"):
        Schedule.piecewise(10, [0.1, 0.01, 0.001], drops=[5])


def test_an_unknown_curve_is_named_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown curve 'cosin'; did you mean 'cosine'\?"):
        Schedule(1, (Piece(1, 0.1, 0.1, "cosin"),))


@pytest.mark.parametrize(
    ("start", "stop", "curve"),
    [
        (-0.1, 0.1, "linear"),
        (0.1, -0.1, "cosine"),
        (0.0, 0.1, "exponential"),
        (nan, nan, "constant"),
        (0.1, inf, "linear"),
        (1e308, 0.1, "linear"),
    ],
)
def test_rates_are_positive(start: float, stop: float, curve: str) -> None:
    with pytest.raises(
        InputError, match=rf"learning rates must be from 0 to 3.403e\+38.*, not {re.escape(f'{start} to {stop}')}"
    ):
        Schedule(1, (Piece(1, start, stop, curve),))


def test_numbers_of_numpy_become_pythons() -> None:
    """What is hashed, and written into a checkpoint's arguments, is JSON."""
    piece = Piece(np.int64(10), np.float64(0.5), np.float32(0.25), "linear")  # type: ignore[arg-type]
    made = Schedule(np.int64(10), (piece,), np.float64(0.1))  # type: ignore[arg-type]
    assert json.dumps(vars(made)) == json.dumps(vars(Schedule(10, (Piece(10, 0.5, 0.25, "linear"),), 0.1)))


@pytest.mark.parametrize("final", [-0.1, nan, inf, 1e39])
def test_what_holds_after_the_end_is_a_rate(final: float) -> None:
    with pytest.raises(
        InputError, match=rf"holds after the end must be from 0 to 3.403e\+38, not {re.escape(f'{final:g}')}"
    ):
        Schedule.cosine(10, 0.1, final=final)
