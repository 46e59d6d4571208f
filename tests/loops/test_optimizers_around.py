"""Optimizers around optimizers: the steps, rates and slots of both are followed, saved and rewound."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, lr_scheduler
from torch.optim.optimizer import Optimizer

import rewound
from optimizers_around import SAM, Lookahead, Whole, timm_lookahead
from rewound.foundations.errors import InputError
from training_loops import STEPS, T, batch, network, one_step, same


def sgd(parameters: object) -> SGD:
    return SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


class Script:
    """A training script with an optimizer around another, and what it saw."""

    def __init__(self, around: Callable[[Optimizer], Optimizer], inner: bool = False, two_steps: bool = False) -> None:
        self.model = network()
        base = sgd(self.model.parameters())
        self.optimizer = around(base)
        self.given = base if inner else self.optimizer
        moved = base if two_steps else self.optimizer  # torch warns of an optimizer whose step() is never called
        self.scheduler = lr_scheduler.CosineAnnealingLR(moved, T * STEPS, eta_min=0.001)
        self.two_steps = two_steps
        self.rates: list[float] = []

    def over(self, until: int | None = None, **options: Any) -> rewound.Epochs:
        given = {"compression": 1.5, "say": lambda text: None, **options}
        run = rewound.epochs(T, self.model, self.given, self.scheduler, **given)
        for epoch in run:
            for step in range(STEPS):
                self.step(*batch(epoch, step))
                self.rates.append(self.optimizer.param_groups[0]["lr"])
                self.scheduler.step()
            if epoch == until:
                break
        return run

    def step(self, x: Tensor, y: Tensor) -> None:
        def closure() -> Tensor:
            with torch.enable_grad():
                loss = nn.functional.cross_entropy(self.model(x), y)
                loss.backward()
            return loss

        self.optimizer.zero_grad()
        closure()
        if self.two_steps:
            self.optimizer.first_step()  # type: ignore[attr-defined]
            closure()
            self.optimizer.second_step()  # type: ignore[attr-defined]
        elif isinstance(self.optimizer, SAM):
            self.optimizer.step(closure)
        else:
            self.optimizer.step()


SCRIPTS: dict[str, Callable[[], Script]] = {
    "timm's lookahead": lambda: Script(timm_lookahead()),
    "another lookahead": lambda: Script(Lookahead),
    "SAM": lambda: Script(SAM),
    "SAM with its base in its state": lambda: Script(Whole),
    "the base of SAM": lambda: Script(SAM, inner=True),
    "the base of SAM in two steps": lambda: Script(SAM, inner=True, two_steps=True),
}


@pytest.mark.parametrize("technique", ["lr-rewinding", "weight-rewinding"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_levels_follow_the_dense_run_and_a_run_that_was_left_goes_on(
    name: str, technique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rewound.loops.iteration.SAVE_SECONDS", 0.0)
    options = {"technique": technique, "retrain_epochs": 3}
    whole = SCRIPTS[name]()
    run = whole.over(**options)
    dense, levels = whole.rates[: T * STEPS], whole.rates[T * STEPS :]
    assert len(set(dense)) == T * STEPS
    assert levels == 2 * dense[-3 * STEPS :]
    assert run.mask is not None
    assert not any(weight[~kept].any() for weight, kept in run.mask.pairs(whole.model))
    for until in (1, T + 1):
        for last in (until, None):
            again = SCRIPTS[name]()
            again.over(last, checkpoint=tmp_path / str(until), **options)
        assert again.rates == whole.rates[until * STEPS :]
        assert same(again.model.state_dict(), whole.model.state_dict())


def test_slots_of_the_inner_optimizer_are_rewound_with_the_weights() -> None:
    buffers = []
    for around in (SAM, Whole):
        script, seen = Script(around), []
        script.optimizer.base_optimizer.register_step_pre_hook(  # type: ignore[attr-defined]
            lambda base, *_, seen=seen: seen.append(sum(s["momentum_buffer"].sum().item() for s in base.state.values()))
        )
        script.over(technique="weight-rewinding", retrain_epochs=3, compression=1.25)
        buffers.append(seen)
    assert buffers[0] == buffers[1]


@pytest.mark.parametrize("around", [SAM, Whole])
def test_two_steps_that_leave_out_the_one_given_are_refused_at_the_first(around: Callable[[Optimizer], SAM]) -> None:
    script = Script(around, two_steps=True)
    said = (
        rf"does not call step\(\) of the {around.__name__} that was given: its steps are taken by the SGD inside it; "
        rf"give rewound.epochs that one, the {around.__name__}'s .base_optimizer"
    )
    with pytest.raises(InputError, match=said):
        script.over()
    assert not script.rates


class Curvature:
    """What some optimizers keep for each weight."""


class Keeping(SGD):
    """Keeps in its slots, from its first step on, what cannot be read back without running code."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["curvature"] = Curvature()


def test_slots_that_could_not_be_read_back_are_refused_after_the_first_epoch() -> None:
    model = network()
    optimizer = Keeping(model.parameters(), lr=0.1)
    run = iter(rewound.epochs(T, model, optimizer, technique="weight-rewinding", say=lambda text: None))
    one_step(model, optimizer, next(run), 0)
    with pytest.raises(InputError, match="the state of Keeping is not plain data, so it could not be read back safely"):
        next(run)
