"""What a loop reports to `rewound.epochs`, and what it is told: levels, metrics, and the end by `max_drop`."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rewound import Epochs, InputError
from sameness import assert_same
from training_loops import Loop, T, made_by_the_version_before, one_step


def scripted(values: dict[int, float]) -> Callable[[Epochs], float]:
    return lambda run: values[run.level]


@pytest.mark.parametrize(
    ("accuracies", "returned", "trained"),
    [
        ({0: 0.9, 1: 0.91, 2: 0.90, 3: 0.9, 4: 0.9}, 4, 4),
        ({0: 0.9, 1: 0.9, 2: 0.8, 3: 0.9, 4: 0.9}, 4, 4),  # one bad level is chance
        ({0: 0.9, 1: 0.9, 2: 0.8, 3: 0.8}, 1, 3),  # two are not
        ({0: 0.9, 1: 0.8, 2: 0.8}, 0, 2),
        ({0: 0.9, 1: 0.9, 2: 0.9, 3: 0.9, 4: 0.8}, 3, 4),
    ],
)
def test_max_drop_waits_one_more_level_and_returns_the_last_good_one(
    accuracies: dict[int, float], returned: int, trained: int
) -> None:
    loop = Loop()
    ends: dict[int, dict[str, Tensor]] = {}

    def accuracy(run: Epochs) -> float:
        ends[run.level] = copy.deepcopy(loop.model.state_dict())
        return accuracies[run.level]

    run = loop.over(loop.run(compression=2, retrain_epochs=1, max_drop=0.02), accuracy=accuracy)
    assert max(level for _, level, _ in loop.seen) == trained
    assert [reached.value for reached in run.levels] == list(accuracies.values())
    assert_same(loop.model.state_dict(), ends[returned])
    assert (run.mask is None) == (returned == 0)
    if run.mask is not None:
        assert run.mask.density == pytest.approx(run.levels[returned].density, abs=0.01)


def test_lower_may_be_better() -> None:
    loop = Loop()
    run = loop.run(compression=2, retrain_epochs=1, max_drop=0.5)
    for epoch in run:
        loop.train(epoch)
        run.report(accuracy=10.0 + (run.level >= 2), higher_is_better=False)  # a perplexity
    assert len(run.levels) == 4
    assert run.mask is not None
    assert run.mask.density == pytest.approx(0.8, abs=0.01)


def test_max_drop_without_a_report_says_what_is_missing() -> None:
    loop = Loop()
    with pytest.raises(InputError, match=r"needs run.report.* in every level, .* the dense run ended .* report it$"):
        loop.over(loop.run(compression=2, max_drop=0.01))
    adopting = Loop().run(compression=2, max_drop=0.01, adopt=True)
    with pytest.raises(InputError, match=r"max_drop needs run.report\(accuracy=...\) of the adopted network, before"):
        next(iter(adopting))


def test_what_was_last_reported_in_a_level_counts_for_it() -> None:
    loop = Loop()
    run = loop.run(compression=2, retrain_epochs=3, max_drop=0.02)
    accuracies = {0: 0.9, 1: 0.89, 2: 0.8, 3: 0.8}
    for epoch in run:
        loop.train(epoch)
        if epoch % 2 == 0:  # the first level ends with an epoch of no report, the second does not
            run.report(accuracies[run.level])
    assert [reached.value for reached in run.levels] == list(accuracies.values())
    assert run.mask is not None
    assert run.mask.density == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_level_that_nothing_was_reported_of_is_kept(silent: int, tmp_path: Path) -> None:
    def over(max_drop: float | None) -> Loop:
        loop = Loop()
        run = loop.run(compression=1.5, max_drop=max_drop, checkpoint=tmp_path)
        for epoch in run:
            loop.seen.append((epoch, run.level, run.schedule_epoch))
            loop.train(epoch)
            if run.level != silent:
                run.report(0.9)
        return loop

    which = "level 1" if silent else "the dense run"
    for _ in range(2):  # the second time nothing is trained before it is said
        with pytest.raises(InputError, match=f"but {which} ended without one; .* or go on without max_drop"):
            over(0.01)
    assert over(None).seen[0] == (T * (silent + 1), silent + 1, 0)


@pytest.mark.parametrize("accuracy", ["good", None, float("nan"), torch.tensor(float("inf")), torch.zeros(2)])
def test_what_is_no_number_cannot_be_reported(accuracy: object) -> None:
    run = Loop().run(compression=2)
    with pytest.raises(InputError, match=r"run\.report takes (one|a finite) number, not ('good'|None|nan|inf|tensor)"):
        run.report(accuracy)  # type: ignore[arg-type]
    run.report(torch.tensor(0.5))  # type: ignore[arg-type]


def test_a_run_is_shown_in_one_line() -> None:
    loop = Loop()
    run = loop.run(compression=1.5)
    assert repr(run) == "Epochs(0 of 15 epochs done, level 0 of 2, density 1)"
    loop.over(run)
    assert repr(run) == "Epochs(15 of 15 epochs done, level 2 of 2, density 0.6667)"


def test_levels_are_told_as_they_end() -> None:
    loop = Loop()
    loop.over(loop.run(compression=1.25, retrain_epochs=1), accuracy=scripted({0: 0.9, 1: 0.85}))
    assert loop.said == [
        "rewound: 5 dense epochs, then 1 level of 1 epoch by lr-rewinding to 1.25x (1.17x of the whole network): "
        "6 epochs",
        "dense, epoch 5 of 6, accuracy 0.9",
        "level 1 of 1: 1.25x (density 0.8), 1.17x of the whole network, epoch 6 of 6, accuracy 0.85",
    ]


@pytest.mark.parametrize(
    ("how", "metric"), [({"higher_is_better": False}, "loss"), ({"metric": "BLEU"}, "BLEU"), ({}, "accuracy")]
)
def test_what_is_reported_is_told_by_its_name(how: dict[str, object], metric: str) -> None:
    loop = Loop()
    run = loop.run(compression=1.25)
    for epoch in run:
        one_step(loop.model, loop.optimizer, epoch, 0)
        loop.scheduler.step()
        run.report(1.5, **how)  # type: ignore[arg-type]
    assert loop.said[-1].endswith(f"epoch 10 of 10, {metric} 1.5")


def test_reports_that_cannot_be_compared_are_refused() -> None:
    loop = Loop()
    run = loop.run(compression=1.25, adopt=True)
    run.report(0.9)
    with pytest.raises(
        InputError, match=r"higher_is_better was True in earlier reports and is False now; report one metric"
    ):
        run.report(0.1, higher_is_better=False)


# The unit of max_drop


@pytest.mark.parametrize("metric", [None, "accuracy", "val_acc", "val/top1", "eval_f1"])
def test_an_accuracy_in_percent_beside_a_drop_in_fractions_is_refused_at_its_first_report(metric: str | None) -> None:
    loop = Loop()
    run = loop.run(compression=1.5, max_drop=0.01)
    loop.train(next(iter(run)))
    name = metric or "accuracy"
    with pytest.raises(
        InputError,
        match=rf"{name} 97.28 is above 1, so max_drop=0.01 .*; report a fraction \(0.9728\), give max_drop in points "
        rf"\(1\), or name the unit in the metric \('{name} percent'\)",
    ):
        run.report(97.28, metric=metric)


@pytest.mark.parametrize(
    ("value", "max_drop", "how"),
    [
        (0.9728, 0.01, {}),
        (97.28, 1, {}),
        (97.28, 0, {}),  # zero is zero in every unit
        (97.28, 0.5, {"metric": "accuracy percent"}),
        (97.28, 0.5, {"metric": "acc (%)"}),
        (27.3, 0.5, {"metric": "BLEU"}),
        (2.3, 0.05, {"higher_is_better": False}),
        (23.4, 0.5, {"higher_is_better": False, "metric": "perplexity"}),
        (0.9728, None, {}),
        (97.28, None, {}),
    ],
)
def test_a_drop_in_the_unit_of_what_is_reported_is_taken(
    value: float, max_drop: float | None, how: dict[str, object]
) -> None:
    loop = Loop()
    run = loop.run(compression=1.5, max_drop=max_drop)
    for epoch in run:
        loop.train(epoch)
        run.report(value, **how)  # type: ignore[arg-type]
    assert [reached.value for reached in run.levels] == [value] * 3


def test_a_drop_that_no_fraction_can_make_is_warned_of() -> None:
    run = Loop().run(compression=1.5, max_drop=1)
    with pytest.warns(UserWarning, match=r"no fraction can drop by max_drop=1: if accuracy is one, .* max_drop=0\.01"):
        run.report(0.97)


def test_a_drop_given_later_is_held_against_what_was_reported_before(tmp_path: Path) -> None:
    loop = Loop()
    loop.over(loop.run(compression=1.25, checkpoint=tmp_path), accuracy=lambda run: 97.0)
    again = Loop()
    with pytest.raises(InputError, match=r"accuracy 97 is above 1, so max_drop=0\.01"):
        again.over(again.run(compression=1.5, checkpoint=tmp_path, max_drop=0.01))
    assert not again.seen


def test_a_level_says_what_its_value_is_of(tmp_path: Path) -> None:
    loop = Loop()
    run = loop.run(compression=1.25, checkpoint=tmp_path)
    for epoch in run:
        loop.train(epoch)
        run.report(2.5, higher_is_better=False, metric="perplexity")
    assert [(reached.value, reached.metric, reached.higher_is_better) for reached in run.levels] == [
        (2.5, "perplexity", False)
    ] * 2
    made_by_the_version_before(tmp_path)  # without the metric and the whole network in each level
    again = Loop()
    later = again.run(compression=1.25, checkpoint=tmp_path)
    again.over(later)
    assert not again.seen
    assert later.levels == tuple(
        reached._replace(network_compression=None, measured_density=None) for reached in run.levels
    )
