"""A technique that draws its own learning rates, around a user's own loop."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler

import rewound
import rewound.loops.iteration
from rewound import Facts, InputError, Schedule, Technique
from sameness import assert_same
from training_loops import STEPS, Loop, T, batch, network, one_step

SEEN: list[tuple[Schedule, int, int, Facts]] = []


def adaptive(S: Schedule, T: int, t: int, facts: Facts) -> Schedule:
    SEEN.append((S, T, t, facts))
    return Schedule.linear(t, S.peak * facts.norm_lost, warmup=2)


def too_long(S: Schedule, T: int, t: int, facts: Facts) -> Schedule:
    return Schedule.constant(t + 1, S.peak)


def in_halves(S: Schedule, T: int, t: int, facts: Facts) -> Schedule:
    SEEN.append((S, T, t, facts))
    return Schedule.linear(t, S.peak / 2, warmup=2)


ADAPTIVE = Technique(weights="final", lr=adaptive)
REWOUND = Technique(weights="rewound", lr=adaptive)
TOO_LONG = Technique(weights="final", lr=too_long)
IN_HALVES = Technique(weights="final", lr=in_halves)


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    SEEN.clear()
    monkeypatch.setattr(rewound.loops.iteration, "SAVE_SECONDS", 0.0)


@pytest.mark.numeric
@pytest.mark.parametrize("technique", ["ADAPTIVE", "REWOUND"])
def test_a_rule_draws_the_rates_of_every_level(technique: str) -> None:
    loop = Loop()
    before: dict[int, torch.Tensor] = {}
    run = loop.run(compression=1.5, technique=f"{__name__}:{technique}", retrain_epochs=3)
    weights = [loop.model[0].weight, loop.model[3].weight]  # type: ignore[index]
    for epoch in run:
        loop.rates.append([])
        for step in range(STEPS):
            one_step(loop.model, loop.optimizer, epoch, step)
            loop.rates[-1].append(loop.optimizer.param_groups[0]["lr"])
        loop.scheduler.step()
        before[run.level] = torch.cat([weight.detach().reshape(-1).clone() for weight in weights])
        loop.seen.append((epoch, run.level, run.schedule_epoch))
    assert [seen[1:] for seen in loop.seen[T:]] == [(level, epoch) for level in (1, 2) for epoch in range(3)]
    kept = [144, *(round(144 * density) for density in (0.8, 1 / 1.5))]
    for level, (S, steps, t, facts) in enumerate(SEEN, start=1):
        assert (S.segments(0, steps), steps, t) == (S.segments(0, S.steps), T * STEPS, 3 * STEPS)
        assert [S.at(step) for step in range(0, steps, STEPS)] == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001])
        magnitudes = before[level - 1].abs().sort().values
        lost = magnitudes[: 144 - kept[level]].norm() / magnitudes.norm()
        assert facts.norm_lost == pytest.approx(float(lost), rel=0.02)  # a level keeps a weight more than its share
        assert facts.fraction_pruned == pytest.approx((kept[level - 1] - kept[level]) / 144, abs=0.01)
        drawn = Schedule.linear(t, 0.1 * facts.norm_lost, warmup=2)
        used = [rate for epoch in range(3) for rate in loop.rates[T + 3 * (level - 1) + epoch]]
        assert used == pytest.approx([drawn.at(step) for step in range(t)])
    assert len(SEEN) == 2


def test_groups_keep_their_ratio_and_what_else_moved_holds() -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.3}, {"params": model[1:].parameters(), "lr": 0.1}]
    sgd = SGD(groups, lr=0.1, momentum=0.9)
    cycle = lr_scheduler.OneCycleLR(sgd, [0.3, 0.1], total_steps=T)
    loop = Loop(model, sgd, cycle)
    momenta = []
    for epoch in (run := loop.run(compression=2, one_shot=True, technique=f"{__name__}:ADAPTIVE")):
        loop.train(epoch)
        momenta.append(sgd.param_groups[0]["momentum"])
        if run.level:
            first, second = (group["lr"] for group in sgd.param_groups)
            assert first == pytest.approx(3 * second)
    assert len(set(momenta[:T])) > 1
    assert len(set(momenta[T:])) == 1


@pytest.mark.parametrize("until", [T, T + 1, T + 4])
def test_a_level_is_resumed_with_the_rates_it_began_with(until: int, tmp_path: Path) -> None:
    options = {"compression": 1.5, "technique": f"{__name__}:ADAPTIVE", "retrain_epochs": 3}
    whole, left, again = Loop(), Loop(), Loop()
    whole.over(whole.run(**options))
    left.over(left.run(**options, checkpoint=tmp_path), until=until)
    again.over(again.run(**options, checkpoint=tmp_path))
    assert again.rates == whole.rates[until:]
    assert_same(again.model.state_dict(), whole.model.state_dict())


def test_an_adopted_network_is_drawn_for_too() -> None:
    loop = Loop()
    loop.over(loop.run(compression=2, one_shot=True, technique=f"{__name__}:ADAPTIVE", adopt=True))
    ((S, steps, t, facts),) = SEEN
    assert (S.peak, steps, t) == (0.1, T, T)  # a scheduler that is stepped by epoch is known by epoch
    drawn = Schedule.linear(t, 0.1 * facts.norm_lost, warmup=2)
    assert loop.rates == [pytest.approx([drawn.at(epoch)] * STEPS) for epoch in range(T)]


@pytest.mark.parametrize("adopt", [False, True], ids=["dense run", "adopted"])
def test_several_optimizers_take_a_step_together(adopt: bool) -> None:
    rates: dict[int, list[list[float]]] = {1: [], 2: []}
    for several, seen in rates.items():
        model = network()
        groups = [{"params": part.parameters(), "lr": rate} for part, rate in zip(model[::3], (0.3, 0.1), strict=True)]
        optimizers = [SGD(groups)] if several == 1 else [SGD([group]) for group in groups]
        schedulers = [lr_scheduler.CosineAnnealingLR(each, T * STEPS) for each in optimizers]
        how = {"technique": f"{__name__}:IN_HALVES", "compression": 1.5, "retrain_epochs": 3, "adopt": adopt}
        steps = STEPS if adopt else 1
        for epoch in rewound.epochs(T, model, optimizers, schedulers, **how, steps_per_epoch=steps, say=len):  # type: ignore[arg-type]
            for step in range(STEPS):
                x, y = batch(epoch, step)
                model.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                for optimizer in optimizers:
                    optimizer.step()
                seen.append([group["lr"] for optimizer in optimizers for group in optimizer.param_groups])
                for scheduler in schedulers:
                    scheduler.step()
    assert rates[1] == rates[2]
    assert {(S.steps, steps, t) for S, steps, t, _ in SEEN} == {(T * STEPS, T * STEPS, 3 * STEPS)}
    (one, *_), (two, *_) = SEEN[: len(SEEN) // 2], SEEN[len(SEEN) // 2 :]
    assert one[0].segments(0, T * STEPS) == two[0].segments(0, T * STEPS)


def test_a_rule_that_draws_for_another_time_is_told() -> None:
    loop = Loop()
    with pytest.raises(InputError, match=rf"{__name__}:too_long drew {T * STEPS + 1} steps where {T * STEPS} were"):
        loop.over(loop.run(compression=2, technique=f"{__name__}:TOO_LONG"))


@pytest.mark.parametrize("slim", [False, True])
def test_a_rule_is_told_of_the_prunable_weights_alone_where_units_go(slim: bool) -> None:
    loop, left = Loop(), [16]
    pruner = rewound.Pruner(pattern="unit")
    options = {"technique": f"{__name__}:IN_HALVES", "retrain_epochs": 2, "pruner": pruner, "rate": 0.3}
    run = loop.run(compression=2, slim=slim, **options)
    for epoch in run:
        loop.train(epoch)
        if epoch + 1 in run.ends and run.mask is not None:
            left.append(int(run.mask["0.bias"].sum()))
    assert len(SEEN) == len(left) - 1 == 2
    # Of the 144 weights each unit has 9; its bias and normalisation are none.
    for (*_, facts), before, after in zip(SEEN, left[:-1], left[1:], strict=True):
        assert facts.fraction_pruned == pytest.approx(9 * (before - after) / 144)
