"""Several optimizers in one loop are as one with all their groups; optimizers inside others are saved and rewound."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, NAdam, lr_scheduler
from torch.optim.optimizer import Optimizer

import rewound
from optimizers_around import SAM, Lookahead, Whole, timm_lookahead
from rewound import Epochs, InputError, Schedule
from sameness import assert_same
from training_loops import STEPS, T, batch, network, one_step, redraw

Parts = list[list[nn.Parameter]]


def halves(model: nn.Sequential) -> Parts:
    return [[*model[0].parameters(), *model[1].parameters()], [*model[3].parameters()]]


def sgd(parameters: list[nn.Parameter], rate: float) -> SGD:
    return SGD(parameters, lr=rate, momentum=0.9, weight_decay=1e-3)


class Script:
    """A loop with an optimizer for each part of its model, or one with a group for each."""

    def __init__(self, several: bool, by_step: bool = False) -> None:
        self.model = network()
        pairs = list(zip(halves(self.model), (0.1, 0.02), strict=True))
        if several:
            self.optimizers: list[Optimizer] = [sgd(part, rate) for part, rate in pairs]
        else:
            groups = [{"params": part, "lr": rate} for part, rate in pairs]
            self.optimizers = [SGD(groups, lr=1.0, momentum=0.9, weight_decay=1e-3)]
        length = T * (STEPS if by_step else 1)
        self.schedulers = [lr_scheduler.CosineAnnealingLR(each, length, eta_min=1e-3) for each in self.optimizers]
        self.by_step = by_step
        self.rates: list[list[float]] = []

    def run(self, **options: object) -> Epochs:
        given: dict[str, object] = {"compression": 2, "say": lambda text: None, **options}
        return rewound.epochs(T, self.model, self.optimizers, self.schedulers, **given)  # type: ignore[arg-type]

    def over(self, run: Epochs, until: int | None = None) -> Epochs:
        for epoch in run:
            for step in range(STEPS):
                x, y = batch(epoch, step)
                self.model.zero_grad()
                nn.functional.cross_entropy(self.model(x), y).backward()
                for optimizer in self.optimizers:
                    optimizer.step()
                self.rates.append([group["lr"] for each in self.optimizers for group in each.param_groups])
                if self.by_step:
                    self._move()
            if not self.by_step:
                self._move()
            if epoch == until:
                break
        return run

    def _move(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()


@pytest.mark.parametrize("by_step", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"technique": "lr-rewinding"},
        {"technique": "lr-rewinding", "retrain_epochs": 2},
        {"technique": "weight-rewinding", "retrain_epochs": 3},
        {"technique": "fine-tuning", "final": 0.01},
        {"technique": "reinitialization", "init": redraw},
    ],
    ids=lambda options: options["technique"],
)
def test_two_optimizers_are_one_with_two_groups(options: dict[str, object], by_step: bool) -> None:
    two, one = Script(several=True, by_step=by_step), Script(several=False, by_step=by_step)
    runs = []
    for script in (two, one):
        torch.manual_seed(7)  # for what `init` draws
        runs.append(script.over(script.run(**options)))
    assert two.rates == one.rates
    assert len({tuple(rates) for rates in two.rates}) > 3
    assert_same(two.model.state_dict(), one.model.state_dict())
    masks = [run.mask for run in runs]
    assert all(mask is not None for mask in masks)
    assert_same(dict(masks[0].items()), dict(masks[1].items()))  # type: ignore[union-attr]


@pytest.mark.parametrize("until", [1, T, T + 2])
def test_a_run_that_was_left_goes_on(tmp_path: Path, until: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewound.loops.iteration.SAVE_SECONDS", 0.0)
    whole = Script(several=True, by_step=True)
    whole.over(whole.run())
    for last in (until, None):
        again = Script(several=True, by_step=True)
        again.over(again.run(checkpoint=tmp_path), until=last)
    assert_same(again.model.state_dict(), whole.model.state_dict())
    slots = [each.state[each.param_groups[0]["params"][0]]["momentum_buffer"] for each in again.optimizers]
    others = [each.state[each.param_groups[0]["params"][0]]["momentum_buffer"] for each in whole.optimizers]
    assert all(map(torch.equal, slots, others))


def test_the_number_of_optimizers_belongs_to_the_run(tmp_path: Path) -> None:
    two, one = Script(several=True), Script(several=False)
    two.over(two.run(checkpoint=tmp_path), until=T)
    with pytest.raises(InputError, match=r"SGD \+ SGD"):
        one.over(one.run(checkpoint=tmp_path))


@pytest.mark.parametrize("schedule", [True, False], ids=["schedule", "schedulers"])
def test_an_adopted_network_follows_both_schedules(schedule: bool) -> None:
    scripts = [Script(several=several, by_step=True) for several in (True, False)]
    for script in scripts:
        if schedule:
            script.schedulers = Schedule.linear(T * STEPS, 0.1, 0.01)  # type: ignore[assignment]
            script.by_step = False
            script._move = lambda: None  # type: ignore[method-assign]
            script.over(script.run(adopt=True))
        else:
            script.over(script.run(adopt=True, steps_per_epoch=STEPS))
    assert scripts[0].rates == scripts[1].rates
    assert_same(scripts[0].model.state_dict(), scripts[1].model.state_dict())


def test_one_may_step_more_often_than_the_other() -> None:
    model = network()
    often, seldom = (sgd(part, rate) for part, rate in zip(halves(model), (0.1, 0.02), strict=True))
    schedulers = [lr_scheduler.ExponentialLR(each, 0.9) for each in (often, seldom)]
    rates: list[list[float]] = []
    run = rewound.epochs(T, model, [often, seldom], schedulers, compression=1.25, say=lambda text: None)
    for epoch in run:
        rates.append([])
        for step in range(4):
            x, y = batch(epoch, step)
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            often.step()
            rates[-1].append(often.param_groups[0]["lr"])
            schedulers[0].step()
            if step % 2:
                seldom.step()
                rates[-1].append(seldom.param_groups[0]["lr"])
                schedulers[1].step()
    assert rates[:T] == rates[T:]
    assert [scheduler.last_epoch for scheduler in schedulers] == [4 * T, 2 * T]  # at rest after the dense run


def test_muon_and_adamw_train_a_pruned_network() -> None:
    model = network()
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if weight.ndim != 2]
    optimizers = [Muon(matrices, lr=0.02), AdamW(others, lr=3e-3)]
    schedulers = [lr_scheduler.LinearLR(each, 1.0, 0.1, T) for each in optimizers]
    shown: list[list[float]] = []
    run = rewound.epochs(T, model, optimizers, schedulers, compression=4, say=lambda text: None)
    losses: list[float] = []
    for epoch in run:
        for step in range(STEPS):
            x, y = batch(epoch, step)
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.item())
        for scheduler in schedulers:
            scheduler.step()
        shown.append([rate for scheduler in schedulers for rate in scheduler.get_last_lr()])
    assert run.mask is not None
    assert run.mask.density == pytest.approx(0.25, abs=0.01)
    assert not any(weight[~run.mask[name]].any() for name, weight in model.named_parameters() if name in run.mask)
    assert all(
        len(rates) == 2 and rates[0] == pytest.approx(rates[1] * 20 / 3) for rates in shown
    )  # each tells its own
    assert losses[-1] < losses[0]


def pair(model: nn.Sequential) -> list[Optimizer]:
    return [sgd(part, 0.1) for part in halves(model)]


def shared(model: nn.Sequential) -> list[Optimizer]:
    return [sgd(list(model.parameters()), 0.1), sgd(list(model[3].parameters()), 0.1)]


@pytest.mark.parametrize(
    ("made", "options", "said"),
    [
        (lambda model: [], {}, "no optimizer is given; give the one that trains the model"),
        (shared, {}, "two optimizers share parameters"),
        (lambda model: [*pair(model), "adam"], {}, "optimizer .*'adam'.* the order is"),
        (lambda model: "adam", {}, "optimizer .*'adam'.* the order is"),
        (pair, {"adopt": True}, "one new scheduler for each optimizer or a Schedule, not 0 schedulers"),
    ],
)
def test_optimizers_that_do_not_fit_are_refused_at_the_start(
    made: Callable[[nn.Sequential], object], options: dict[str, object], said: str
) -> None:
    model = network()
    with pytest.raises(InputError, match=said):
        rewound.epochs(T, model, made(model), **options)  # type: ignore[arg-type]


def test_a_group_that_joins_one_of_several_is_told() -> None:
    script = Script(several=True)
    run = iter(script.run())
    next(run)
    script.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(InputError, match="SGD had 1 parameter groups and has 2: of several optimizers, give each all"):
        script.optimizers[1].step()


def test_one_that_takes_no_step_in_the_first_epoch_is_named() -> None:
    model = network()
    first, second = sgd(halves(model)[0], 0.1), AdamW(halves(model)[1])
    run = iter(rewound.epochs(T, model, [first, second], say=lambda text: None))
    next(run)
    first.step()
    with pytest.warns(UserWarning, match="AdamW took no step in epoch 0: give rewound.epochs the optimizers of the"):
        next(run)


def test_a_mask_is_attached_to_several() -> None:
    model = network()
    mask = rewound.Pruner()(model, density=0.5)
    optimizers = pair(model)
    with mask.attached(model, optimizers):
        for step in range(3):
            x, y = batch(0, step)
            nn.functional.cross_entropy(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
        slots = {name: each.state[p] for each in optimizers for name, p in model.named_parameters() if p in each.state}
        assert not any(slots[name]["momentum_buffer"][~kept].any() for name, kept in mask.items())


def momentum_sgd(parameters: object) -> SGD:
    return SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


class ScriptAround:
    """A training script with an optimizer around another, and what it saw."""

    def __init__(self, around: Callable[[Optimizer], Optimizer], inner: bool = False, two_steps: bool = False) -> None:
        self.model = network()
        base = momentum_sgd(self.model.parameters())
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


SCRIPTS: dict[str, Callable[[], ScriptAround]] = {
    "timm's lookahead": lambda: ScriptAround(timm_lookahead()),
    "another lookahead": lambda: ScriptAround(Lookahead),
    "SAM": lambda: ScriptAround(SAM),
    "SAM with its base in its state": lambda: ScriptAround(Whole),
    "the base of SAM": lambda: ScriptAround(SAM, inner=True),
    "the base of SAM in two steps": lambda: ScriptAround(SAM, inner=True, two_steps=True),
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
        assert_same(again.model.state_dict(), whole.model.state_dict())


def test_slots_of_the_inner_optimizer_are_rewound_with_the_weights() -> None:
    buffers = []
    for around in (SAM, Whole):
        script, seen = ScriptAround(around), []
        script.optimizer.base_optimizer.register_step_pre_hook(  # type: ignore[attr-defined]
            lambda base, *_, seen=seen: seen.append(sum(s["momentum_buffer"].sum().item() for s in base.state.values()))
        )
        script.over(technique="weight-rewinding", retrain_epochs=3, compression=1.25)
        buffers.append(seen)
    assert buffers[0] == buffers[1]


@pytest.mark.parametrize("around", [SAM, Whole])
def test_two_steps_that_leave_out_the_one_given_are_refused_at_the_first(around: Callable[[Optimizer], SAM]) -> None:
    script = ScriptAround(around, two_steps=True)
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


class Counting(SGD):
    """Keeps an average of its gradients in float32, whatever the weights are, and a whole number."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                slots = self.state[parameter]
                average = slots.setdefault("average", torch.zeros_like(parameter, dtype=torch.float32))
                average.mul_(0.9).add_(parameter.grad.float(), alpha=0.1)
                slots["steps"] = slots.get("steps", torch.zeros((), dtype=torch.int64)) + 1
                parameter.grad.copy_(average)
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "types"),
    [
        (
            NAdam,
            [
                ("step", torch.float32),
                ("mu_product", torch.float32),
                ("exp_avg", torch.bfloat16),
                ("exp_avg_sq", torch.bfloat16),
            ],
        ),
        (Counting, [("average", torch.float32), ("steps", torch.int64)]),
    ],
)
@pytest.mark.parametrize("several", [False, True], ids=["one", "two"])
def test_slots_keep_their_types_when_a_run_is_resumed_or_rewound(
    kind: Callable[..., Optimizer],
    types: list[tuple[str, torch.dtype]],
    several: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rewound.loops.iteration, "SAVE_SECONDS", 0.0)

    def over(folder: Path, until: int | None = None) -> dict[str, Any]:
        model = network().bfloat16()
        optimizers = [kind(part, lr=0.01) for part in (halves(model) if several else [[*model.parameters()]])]
        run = rewound.epochs(
            T,
            model,
            optimizers,
            compression=1.5,
            technique="weight-rewinding",
            checkpoint=folder,
            say=lambda text: None,
        )
        for epoch in run:
            for step in range(STEPS):
                x, y = batch(epoch, step)
                model.zero_grad()
                nn.functional.cross_entropy(model(x.bfloat16()), y).backward()
                for each in optimizers:
                    each.step()
            slots = [slot for each in optimizers for found in each.state.values() for slot in found.items()]
            assert {(name, slot.dtype) for name, slot in slots} == set(types), f"in epoch {epoch}"
            if epoch == until:
                break
        return {"model": model.state_dict(), "optimizers": [each.state_dict() for each in optimizers]}

    whole = over(tmp_path / "whole")
    for until in (2, T + 1):
        over(tmp_path / "left", until)
    assert_same(over(tmp_path / "left"), whole)
