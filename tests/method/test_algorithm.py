"""The algorithm: levels against the paper's table, densities, and law 7."""

import itertools
import re
from contextlib import nullcontext as does_not_raise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewound import TECHNIQUES, Facts, InputError, Level, Schedule, Technique, densities, levels
from rewound.experiments.sweeps.targets import dense, run_of
from rewound.method.algorithm import KEEP, check_final, check_time
from rewound.method.schedule import Piece
from rewound.tasks.recipes.cifar10 import ResNet20
from rewound.tasks.recipes.digits import Digits


def linear(S: Schedule, T: int, t: int, facts: Facts) -> Schedule:
    return Schedule.linear(t, S.peak)


# The paper's table: T = 182, t = 30, as (weights from, schedule from, length).
PAPER: dict[str, tuple[int | str, int, int]] = {
    "fine-tuning": ("previous", 182, 30),
    "weight-rewinding": (152, 152, 30),
    "lr-rewinding": ("previous", 152, 30),
    "low-lr-weight-rewinding": (152, 182, 30),
    "reinitialization": ("fresh", 0, 212),
    "gradual": ("previous", 152, 30),
}


@pytest.mark.parametrize("name", TECHNIQUES)
def test_levels_are_the_papers_table(name: str) -> None:
    weights, start, length = PAPER[name]
    (level,) = levels(TECHNIQUES[name], 30, 182, [0.2])
    gradual = TECHNIQUES[name].gradual
    assert level == Level(density=0.2, weights_from=weights, schedule_from=start, length=length, gradual=gradual)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_every_level_of_a_run_differs_in_its_density_alone(name: str) -> None:
    """Law 5: rewinding reads the dense run again at every level; the others go on from the level before."""
    run = list(levels(TECHNIQUES[name], 30, 182, [0.8, 0.64, 0.64]))
    assert [level.density for level in run] == [0.8, 0.64, 0.64]
    assert len({(level.weights_from, level.schedule_from, level.length) for level in run}) == 1


@pytest.mark.parametrize("name", ["weight-rewinding", "low-lr-weight-rewinding"])
def test_rewinding_for_the_full_time_reads_the_initial_weights(name: str) -> None:
    (level,) = levels(TECHNIQUES[name], 182, 182, [0.2])
    assert level.weights_from == 0


def test_a_rule_draws_its_own_schedule() -> None:
    (level,) = levels(Technique(weights="final", lr=linear), 300, 182, [0.2])
    assert level == Level(density=0.2, weights_from="previous", schedule_from=None, length=300)


def test_algorithm_1_of_the_paper() -> None:
    """Prune 20% a level, retrain with LR rewinding for the full time, until the compression is reached."""
    run = list(levels(TECHNIQUES["lr-rewinding"], 182, 182, densities(2)))
    assert [level.density for level in run] == [0.8, 0.8**2, 0.8**3, 0.5]
    assert {(level.weights_from, level.schedule_from, level.length) for level in run} == {("previous", 0, 182)}


# Densities


def test_twenty_percent_a_level() -> None:
    assert KEEP == 0.8
    assert densities(1 / 0.8**10) == pytest.approx([0.8**level for level in range(1, 11)])
    assert [round(100 * density, 2) for density in densities(9.31)][-3:] == [16.78, 13.42, 10.74]


@given(st.floats(1.001, 1e4), st.floats(0.05, 0.99))
@settings(deadline=None)
def test_the_last_density_is_exactly_the_compression(compression: float, keep: float) -> None:
    chain = densities(compression, keep)
    assert chain[-1] == 1 / compression
    assert chain[:-1] == [keep**level for level in range(1, len(chain))]
    assert all(after < before for before, after in itertools.pairwise(chain))
    assert chain[-1] >= keep ** len(chain) * (1 - 1e-9)  # no level prunes more than the rate


@pytest.mark.parametrize(("compression", "count"), [(1.25, 1), (1 / 0.64, 2), (4, 7), (32, 16)])
def test_a_compression_that_is_a_power_of_the_rate_takes_no_extra_level(compression: float, count: int) -> None:
    assert len(densities(compression)) == count
    assert len(densities(32, keep=0.5)) == 5


@pytest.mark.parametrize("compression", [1, 0.5, 0, -2, float("-inf"), float("nan")])
def test_a_compression_is_above_one(compression: float) -> None:
    with pytest.raises(InputError, match=f"compression must be above 1, not {compression}"):
        densities(compression)


def test_a_compression_is_finite() -> None:
    with pytest.raises(InputError, match="compression must be a finite number, not inf: something must be left"):
        densities(float("inf"))


@pytest.mark.parametrize("keep", [0, 1, 1.5, -0.2])
def test_a_level_keeps_a_fraction(keep: float) -> None:
    with pytest.raises(InputError, match=f"kept per level must be between 0 and 1, not {keep}"):
        densities(2, keep)


@pytest.mark.parametrize("density", [0, -0.5, 1.2, float("nan")])
def test_densities_are_fractions(density: float) -> None:
    with pytest.raises(InputError, match=f"density must be above 0 and at most 1, not {density:g}"):
        list(levels(TECHNIQUES["fine-tuning"], 1, 2, [density]))


def test_densities_do_not_grow_along_a_run() -> None:
    with pytest.raises(InputError, match=r"must not grow along a run, but 0\.5 is followed by 0\.6"):
        list(levels(TECHNIQUES["fine-tuning"], 1, 2, [0.8, 0.5, 0.6]))
    with pytest.raises(InputError, match="no density to prune to"):
        list(levels(TECHNIQUES["fine-tuning"], 1, 2, []))


# Law 7


@pytest.mark.parametrize("name", ["weight-rewinding", "lr-rewinding", "low-lr-weight-rewinding"])
def test_nothing_is_rewound_beyond_its_start(name: str) -> None:
    message = "cannot rewind 200 epochs: cifar10-resnet20 trains for 182; use at most 182, or technique fine-tuning"
    with pytest.raises(InputError, match=message):
        list(run_of(ResNet20(), name, 200, [0.2], iterative=False).targets(1))
    with pytest.raises(InputError, match="cannot rewind 200 epochs: the original run trains for 182"):
        list(levels(TECHNIQUES[name], 200, 182, [0.2]))


@pytest.mark.parametrize(
    "technique", [TECHNIQUES["fine-tuning"], TECHNIQUES["reinitialization"], Technique("final", linear)]
)
def test_what_does_not_rewind_may_take_longer(technique: Technique) -> None:
    assert len(list(levels(technique, 200, 182, [0.2]))) == 1


@pytest.mark.parametrize("t", [0, -1, float("nan")])
def test_retraining_takes_time(t: float) -> None:
    for technique in TECHNIQUES.values():
        with pytest.raises(InputError, match=f"retraining time must be above 0, not {t:g}"):
            check_time(technique, t, 182)


ENDS_AT_ZERO = {
    "cosine": Schedule.cosine(100, 0.1),
    "short cosine": Schedule.cosine(30, 0.1),
    "cosine to a thousandth": Schedule.cosine(100, 0.1, 1e-4),
    "cosine with a cool-down": Schedule(310, (Piece(300, 0.1, 1e-4, "cosine"), Piece(310, 1e-4, 1e-4))),
    "linear": Schedule.linear(10_000, 0.1),
    "short linear": Schedule.linear(500, 0.1),
    "one-cycle": Schedule.cosine(1000, 0.1, 1e-6, warmup=300),
    "decay at the end": Schedule(1000, (Piece(800, 0.1, 0.1), Piece(1000, 0.1, 0.0, "linear"))),
    "held at zero": Schedule.piecewise(100, [0.1, 0.0], drops=[80]),
}


@pytest.mark.parametrize("name", ["fine-tuning", "low-lr-weight-rewinding"])
@pytest.mark.parametrize("schedule", ENDS_AT_ZERO)
def test_a_schedule_that_ends_near_zero_has_no_rate_to_fine_tune_at(name: str, schedule: str) -> None:
    S = ENDS_AT_ZERO[schedule]
    with pytest.raises(InputError) as error:
        check_final(TECHNIQUES[name], S)
    assert str(error.value) == (
        f"this schedule ends at {S.final:g}, too low to retrain at (peak 0.1); "
        "declare what holds after its end, for example final=0.001"
    )


@pytest.mark.parametrize("name", ["weight-rewinding", "lr-rewinding", "reinitialization"])
def test_other_techniques_may_follow_such_a_schedule(name: str) -> None:
    with does_not_raise():
        check_final(TECHNIQUES[name], ENDS_AT_ZERO["cosine"])


@pytest.mark.parametrize("schedule", ENDS_AT_ZERO)
def test_what_the_error_proposes_helps(schedule: str) -> None:
    S = ENDS_AT_ZERO[schedule]
    with pytest.raises(InputError) as error:
        check_final(TECHNIQUES["fine-tuning"], S)
    proposed = re.search(r"final=(\S+)$", str(error.value))
    assert proposed is not None
    with does_not_raise():
        check_final(TECHNIQUES["fine-tuning"], Schedule(S.steps, S.pieces, float(proposed[1])))


WORTH_FINE_TUNING_AT = {
    "the paper's, CIFAR-10": ResNet20().schedule,
    "the paper's, ImageNet": Schedule.piecewise(90, [0.4, 0.04, 0.004, 0.0004], drops=[30, 60, 80], warmup=5),
    "the paper's, GNMT": Schedule.piecewise(
        8630, [2e-3, 1e-3, 5e-4, 2.5e-4, 1.25e-4], drops=[6472, 7191, 7910, 8629], warmup=200, final=2.5e-4
    ),
    "a hundredth, held briefly": Schedule.piecewise(270, [0.02, 0.02 * 0.1, 0.02 * 0.1 * 0.1], drops=[210, 268]),
    "exponential": Schedule(100, (Piece(100, 0.1, 1e-4, "exponential"),)),
    "cosine to a hundredth": Schedule.cosine(1000, 0.3, 0.3 * 0.1 * 0.1),
    "a few epochs of cosine": Schedule.cosine(10, 0.1),
    "constant": Schedule.constant(1, 0.1),
    "declared, as low as may be": Schedule.cosine(100, 1.0, final=1 / 2000),
}


@pytest.mark.parametrize("schedule", WORTH_FINE_TUNING_AT)
def test_a_final_rate_that_was_trained_at_or_declared_is_one_to_fine_tune_at(schedule: str) -> None:
    with does_not_raise():
        check_final(TECHNIQUES["fine-tuning"], WORTH_FINE_TUNING_AT[schedule])


# Targets: the levels written out as rows


def test_the_rows_of_an_iterative_run_add_up_their_cost() -> None:
    rows = list(run_of(Digits(), "lr-rewinding", 4, [0.5, 0.25, 0.125], iterative=True).targets(3))
    assert [row.search_epochs for row in rows] == [4, 8, 12]
    assert [row.density for row in rows] == [0.5, 0.25, 0.125]
    assert {(row.iterative, row.technique, row.retrain_epochs, row.trial) for row in rows} == {
        (True, "lr-rewinding", 4, 3)
    }
    assert [row.state.prunings for row in rows] == [1, 2, 3]


def test_reinitialization_costs_the_original_time_too() -> None:
    (row,) = run_of(Digits(), "reinitialization", 4, [0.5], iterative=False).targets(1)
    assert row.search_epochs == 20
    T, t = Digits().schedule.steps, Digits().steps_of(4)
    assert row.state.steps == T + t


def test_dense_rows_cost_no_search() -> None:
    row = dense(Digits(), 1)
    assert (row.technique, row.density, row.retrain_epochs, row.search_epochs) == ("", 1.0, None, 0.0)


def test_a_retraining_time_just_below_the_whole_is_not_longer_than_it() -> None:
    """T = 9 steps; 0.99 of the 9.34 steps of an epoch would round up to 10."""
    (row,) = run_of(Digits(epochs=1.0), "lr-rewinding", 0.99, [0.5], iterative=False).targets(1)
    assert row.state.steps == 9
