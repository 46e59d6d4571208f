"""Schedules of own loops that are easily lost: not given to the run, kept by hand, waiting for their turn, at rest."""

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.optim.optimizer import Optimizer
from torch.optim.swa_utils import SWALR

import rewound
from rewound.foundations.errors import InputError
from rewound.loops.progress import Progress
from sameness import assert_same
from training_loops import STEPS, Loop, T, network, one_step

TOTAL = T * STEPS


def silent(text: str) -> None: ...


def made() -> tuple[nn.Module, Optimizer]:
    model = network()
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture(autouse=True)
def _saved_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewound.loops.iteration.SAVE_SECONDS", 0.0)


# A scheduler that the run was not given

FORGOTTEN: dict[str, Callable[[Optimizer], object]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", FORGOTTEN)
def test_a_scheduler_that_a_resumable_run_was_not_given_is_refused_before_the_first_epoch(
    kind: str, late: bool, tmp_path: Path
) -> None:
    model, optimizer = made()
    scheduler = None if late else FORGOTTEN[kind](optimizer)
    run = rewound.epochs(T, model, optimizer, compression=2, checkpoint=tmp_path, say=silent)
    scheduler = scheduler or FORGOTTEN[kind](optimizer)
    with pytest.raises(InputError, match=f"a {kind} moves this optimizer's rate and was not.*give it as the scheduler"):
        next(iter(run))
    assert scheduler is not None


def test_a_scheduler_that_is_gone_or_is_anothers_or_within_the_one_given_is_not_missed(tmp_path: Path) -> None:
    model, optimizer = made()
    elsewhere = FORGOTTEN["LambdaLR"](made()[1])
    finder = lr_scheduler.ExponentialLR(optimizer, 1.1)  # as a search for the rate makes one
    del finder
    gc.collect()
    next(iter(rewound.epochs(T, model, optimizer, checkpoint=tmp_path / "gone", say=silent)))
    parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, T)]
    scheduler = lr_scheduler.SequentialLR(optimizer, parts, [2])
    next(iter(rewound.epochs(T, model, optimizer, scheduler, checkpoint=tmp_path / "given", say=silent)))
    assert elsewhere is not None


def test_what_drives_the_dense_run_no_longer_matters_in_a_level(tmp_path: Path) -> None:
    options: dict[str, Any] = {"compression": 2, "checkpoint": tmp_path, "say": silent}
    model, optimizer = made()
    for epoch in rewound.epochs(T, model, optimizer, **options):
        one_step(model, optimizer, epoch, 0)
        if epoch == T:
            break
    model, optimizer = made()
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    for epoch in rewound.epochs(T, model, optimizer, **options):
        one_step(model, optimizer, epoch, 0)
        assert optimizer.param_groups[0]["lr"] == 0.1
        scheduler.step()


def test_a_rate_computed_from_the_steps_done_goes_on_when_a_run_is_resumed(tmp_path: Path) -> None:
    def trained(until: int | None = None, **options: Any) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
        model, optimizer = made()
        run = rewound.epochs(T, model, optimizer, compression=2, say=silent, **options)
        rates, steps = [], [run.steps_done]
        for epoch in run:
            for step in range(STEPS):
                for group in optimizer.param_groups:
                    group["lr"] = 0.1 / (1 + run.steps_done)
                one_step(model, optimizer, epoch, step)
                rates.append(optimizer.param_groups[0]["lr"])
                steps.append(run.steps_done)
            if epoch == until:
                break
        return rates, model.state_dict(), steps

    rates, weights, steps = trained()
    assert rates[:TOTAL] == [0.1 / (1 + step) for step in range(TOTAL)]
    assert rates == 5 * rates[:TOTAL]
    assert steps == list(range(5 * TOTAL + 1))
    for until in (2, T + 1):
        trained(until, checkpoint=tmp_path / str(until))
        again, ends, counted = trained(checkpoint=tmp_path / str(until))
        assert again == rates[until * STEPS :]
        assert counted == steps[until * STEPS :]
        assert_same(ends, weights)


@pytest.mark.parametrize("until", [2, T - 1, T + 1, None])
@pytest.mark.parametrize("adopt", [False, True])
def test_steps_are_known_from_a_file_that_did_not_count_them(until: int | None, adopt: bool) -> None:
    loop = Loop()
    schedule = {"adopt": True, "steps_per_epoch": STEPS} if adopt else {}
    run = loop.over(loop.run(compression=2, **schedule), until=until)
    state: Any = copy.deepcopy(run.state_dict(epoch_ended=False))
    steps = state.pop("steps_done")
    assert steps == STEPS * len(loop.seen)
    assert Progress.from_state_dict(state).steps_done == steps


# Schedulers that wait for their turn


def test_swalr_waits_for_its_turn(tmp_path: Path) -> None:
    def trained(alone: bool, until: int | None = None, **options: Any) -> list[float]:
        model, optimizer = made()
        first = lr_scheduler.StepLR(optimizer, 1, 0.8)
        swa = SWALR(optimizer, swa_lr=0.05, anneal_epochs=1)
        run = rewound.epochs(
            T, model, optimizer, swa if alone else [first, swa], compression=1.25, say=silent, **options
        )
        rates = []
        for epoch in run:
            one_step(model, optimizer, epoch, 0)
            rates.append(optimizer.param_groups[0]["lr"])
            if run.schedule_epoch >= 3:
                swa.step()
            elif not alone:
                first.step()
            if epoch == until:
                break
        return rates

    for alone in (False, True):
        rates = trained(alone)
        assert rates[:T] == rates[T:]
        assert rates[0] == 0.1
        assert rates[T - 1] == pytest.approx(0.05)
        folder = tmp_path / str(alone)
        assert trained(alone, until=2, checkpoint=folder) + trained(alone, checkpoint=folder)[1:] == rates


def warmed_up(stepped: bool) -> list[float]:
    model, optimizer = made()
    schedulers = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.StepLR(optimizer, 1)]
    run = rewound.epochs(T, model, optimizer, schedulers, compression=1.25, say=silent)
    rates = []
    for epoch in run:
        one_step(model, optimizer, epoch, 0)
        rates.append(optimizer.param_groups[0]["lr"])
        if stepped:
            schedulers[run.schedule_epoch >= 2].step()
    return rates


def test_what_follows_a_warm_up_waits_for_its_turn_and_one_of_them_must_be_stepped() -> None:
    rates = warmed_up(stepped=True)
    assert rates[T:] == rates[:T]
    with pytest.raises(InputError, match=r"LinearLR \+ StepLR was not stepped in epoch 0"):
        warmed_up(stepped=False)


# What a scheduler at rest tells


SCHEDULERS: dict[str, Callable[[Optimizer], lr_scheduler.LRScheduler]] = {
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T, eta_min=0.01),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.7)], optimizer=o),
}


@pytest.mark.parametrize("options", [{}, {"technique": "fine-tuning", "final": 0.03}, {"max_drop": 0.1}], ids=str)
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_tells_the_rate_that_the_optimizer_has(kind: str, options: dict[str, Any]) -> None:
    model, optimizer = made()
    scheduler = SCHEDULERS[kind](optimizer)
    run = rewound.epochs(T, model, optimizer, scheduler, compression=2, say=silent, **options)

    def check() -> None:
        rate = optimizer.param_groups[0]["lr"]
        assert scheduler.get_last_lr() == [rate]
        assert scheduler.state_dict()["_last_lr"] == [rate]
        assert pickle.loads(pickle.dumps(scheduler)).get_last_lr() == [rate]

    logged = []
    for epoch in run:
        for step in range(STEPS):
            one_step(model, optimizer, epoch, step)
            check()
        _ = scheduler.step(1.0) if kind == "ReduceLROnPlateau" else scheduler.step()  # type: ignore[arg-type, func-returns-value]
        check()
        logged.append(scheduler.get_last_lr()[0])
        if "max_drop" in options:
            run.report(1.0 - 0.2 * (run.level > 0))
    check()
    if not options:
        assert logged[T : 2 * T - 1] == logged[: T - 1]  # after the last step there is nothing left to tell


# A schedule that ends too low to retrain at

LONG = 40


def warm_then_cosine(optimizer: Optimizer, steps: int) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, steps - 2)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


Make = Callable[[Optimizer, int], lr_scheduler.LRScheduler]
TOWARDS_ZERO: dict[str, Make] = {
    "cosine": lr_scheduler.CosineAnnealingLR,
    "cosine to the last epoch": lambda o, steps: lr_scheduler.CosineAnnealingLR(o, steps - 1),
    "line": lambda o, steps: lr_scheduler.LinearLR(o, 1.0, 0.0, steps - 1),
    "polynomial": lambda o, steps: lr_scheduler.PolynomialLR(o, steps, power=2.0),
    "one cycle": lambda o, steps: lr_scheduler.OneCycleLR(o, 0.1, total_steps=steps),
    "warm-up and cosine": warm_then_cosine,
    "transformers": lambda o, steps: pytest.importorskip("transformers").get_cosine_schedule_with_warmup(o, 2, steps),
}
ENDING_WELL: dict[str, Make] = {
    "cosine to a rate": lambda o, steps: lr_scheduler.CosineAnnealingLR(o, steps, eta_min=0.01),
    "half a cosine": lambda o, steps: lr_scheduler.CosineAnnealingLR(o, 2 * steps),
    "line to a half": lambda o, steps: lr_scheduler.LinearLR(o, 1.0, 0.5, steps),
    "steps": lambda o, steps: lr_scheduler.StepLR(o, steps // 2, 0.2),
    "one cycle to a rate": lambda o, steps: lr_scheduler.OneCycleLR(o, 0.1, total_steps=steps, final_div_factor=1),
}


def fine_tuned(make: Make, by_step: bool, **options: Any) -> tuple[Optimizer, int]:
    """An optimizer, and how many epochs it took until an error said that its schedule ends too low."""
    model, optimizer = made()
    scheduler = make(optimizer, LONG * (2 if by_step else 1))
    given = {"technique": "fine-tuning", "compression": 1.25, "retrain_epochs": 1, "say": silent, **options}
    epochs = 0
    before = copy.deepcopy((optimizer.param_groups[0]["lr"], scheduler.state_dict()))
    try:
        for epoch in rewound.epochs(LONG, model, optimizer, scheduler, **given):
            if not epoch:
                assert repr((optimizer.param_groups[0]["lr"], scheduler.state_dict())) == repr(before)
            for step in range(2):
                one_step(model, optimizer, epoch, step)
                if by_step or step:
                    scheduler.step()
            epochs += 1
    except InputError as error:
        if "too low to retrain at (peak 0.1); declare what holds after its end, for example final=0.001" in str(error):
            return optimizer, epochs
        raise
    return optimizer, epochs


@pytest.mark.parametrize("technique", ["fine-tuning", "low-lr-weight-rewinding"])
@pytest.mark.parametrize("name", TOWARDS_ZERO)
def test_a_schedule_made_for_the_epochs_that_ends_too_low_is_refused_before_them(name: str, technique: str) -> None:
    assert fine_tuned(TOWARDS_ZERO[name], by_step=False, technique=technique)[1] == 0


@pytest.mark.parametrize("name", TOWARDS_ZERO)
def test_one_made_for_all_steps_is_refused_when_the_first_epoch_has_shown_how_many_they_are(name: str) -> None:
    assert fine_tuned(TOWARDS_ZERO[name], by_step=True)[1] == 1


@pytest.mark.parametrize("by_step", [False, True])
@pytest.mark.parametrize("name", [*TOWARDS_ZERO, *ENDING_WELL])
def test_with_a_final_rate_or_a_good_end_it_is_not_refused(name: str, by_step: bool) -> None:
    low = name in TOWARDS_ZERO
    optimizer, epochs = fine_tuned({**TOWARDS_ZERO, **ENDING_WELL}[name], by_step, final=0.02 if low else None)
    assert epochs == LONG + 1
    assert not low or optimizer.param_groups[0]["lr"] == 0.02


def test_a_function_of_the_scripts_own_is_not_called_ahead_of_time() -> None:
    calls: list[int] = []

    def factor(epoch: int) -> float:
        calls.append(epoch)
        return 1.0 if epoch < LONG - 1 else 0.0

    assert fine_tuned(lambda o, _: lr_scheduler.LambdaLR(o, factor), by_step=False)[1] == LONG
    assert calls == list(range(LONG + 1))
