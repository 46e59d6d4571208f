"""Gradual pruning in a user's own loop: the mask follows the cubic curve step by step, in epochs and in steps."""

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, lr_scheduler
from torch.optim.optimizer import Optimizer
from torch.optim.swa_utils import AveragedModel

import rewound
import rewound.loops.iteration
from optimizers_around import Lookahead
from rewound import Gradual, InputError, Mask, Pruner, Schedule, Technique
from sameness import assert_same
from training_loops import STEPS, Loop, T, batch, network, one_step

WORDS = "gradual end=0.75 every=2"
EPOCHS = 4  # of retraining: 12 steps, with updates of the mask after 2, 4, 6 and 8
OPTIONS = {"compression": 5, "technique": WORDS, "retrain_epochs": EPOCHS}
BY_STEPS = {"compression": 5, "technique": WORDS, "retrain_steps": EPOCHS * STEPS}
CURVE = {2 * i: 0.2 + 0.8 * (1 - i / 4) ** 3 for i in range(1, 5)}
LATE = Technique(weights="final", lr="final", gradual=Gradual(begin=0.25, end=1.0, every=3))
FRESH = Technique(weights="fresh", lr="restarted", gradual=Gradual(every=5))


def curve(steps: int, pruner: Pruner | None = None, updates: dict[int, float] = CURVE) -> list[int]:
    """How many weights are kept after each step of a level, by the formula."""
    shapes = {name: tuple(w.shape) for name, w in network().named_parameters() if w.ndim == 2}
    densities = [1.0]
    for step in range(1, steps + 1):
        densities.append(updates.get(step, densities[-1]))
    return [(pruner or Pruner()).kept(shapes, density) for density in densities]


def kept(mask: Mask | None) -> int:
    return 144 if mask is None else sum(int(each.sum()) for each in mask.values())


def things() -> tuple[nn.Module, Optimizer, lr_scheduler.LRScheduler]:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    return model, optimizer, lr_scheduler.MultiStepLR(optimizer, [2 * STEPS, 4 * STEPS])


def in_epochs(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: lr_scheduler.LRScheduler,
    until: int = -1,
    masks: list[Mask | None] | None = None,
    **options: object,
) -> rewound.Epochs:
    run = rewound.epochs(T, model, optimizer, scheduler, say=lambda _: None, **{**OPTIONS, **options})  # type: ignore[arg-type]
    for epoch in run:
        if epoch == until:
            break
        for step in range(STEPS):
            one_step(model, optimizer, epoch, step)
            scheduler.step()
            if masks is not None and run.level:
                masks.append(run.mask)
    return run


def in_steps(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: lr_scheduler.LRScheduler,
    until: int = -1,
    masks: list[Mask | None] | None = None,
    **options: object,
) -> rewound.Steps:
    run = rewound.steps(T * STEPS, model, optimizer, scheduler, say=lambda _: None, **{**BY_STEPS, **options})  # type: ignore[arg-type]
    for step in run:
        if masks is not None and run.level:
            masks.append(run.mask)
        if step == until:
            break
        one_step(model, optimizer, *divmod(step, STEPS))
        scheduler.step()
    return run


# The curve


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_the_mask_follows_the_formula_after_every_step(scope: str) -> None:
    pruner = Pruner(scope=scope)
    expected = curve(EPOCHS * STEPS, pruner)
    inside, before = list[Mask | None](), list[Mask | None]()
    in_epochs(*things(), masks=inside, pruner=pruner)
    in_steps(*things(), masks=before, pruner=pruner)
    assert [kept(mask) for mask in inside] == expected[1:]
    assert [kept(mask) for mask in before] == expected[:-1]
    assert len(set(expected)) == 5
    for one, other in pairwise(inside):
        assert one is not None
        assert other is not None
        assert all(bool((one[name] | ~other[name]).all()) for name in one), "masks shrink"


def test_the_other_options_move_the_curve() -> None:
    found = list[Mask | None]()
    in_steps(*things(), masks=found, technique=f"{__name__}:LATE", final=0.01)
    updates = {3 + 3 * i: 0.2 + 0.8 * (1 - i / 2) ** 3 for i in (1, 2)}  # of steps 3 to 11
    assert [kept(mask) for mask in found] == curve(EPOCHS * STEPS, updates=updates)[:-1]


@pytest.mark.parametrize("loop", [in_epochs, in_steps])
def test_it_is_what_it_is_by_hand(loop: Callable[..., object]) -> None:
    model, optimizer, scheduler = things()
    rates = []
    for step in range(T * STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        one_step(model, optimizer, *divmod(step, STEPS))
        scheduler.step()
    weights = {name: weight for name, weight in model.named_parameters() if weight.ndim == 2}
    mask = Mask.full(weights)
    for done in range(EPOCHS * STEPS):
        if done in CURVE:
            mask = Pruner().prune(weights, CURVE[done], mask)
        optimizer.param_groups[0]["lr"] = rates[(T - EPOCHS) * STEPS + done]
        with mask.attached(model, optimizer):
            one_step(model, optimizer, *divmod(T * STEPS + done, STEPS))
    found = things()
    run = loop(*found)
    assert isinstance(run, rewound.Epochs | rewound.Steps)
    assert_same(run.mask, mask)
    assert_same(found[0].state_dict(), model.state_dict())
    assert [reached.density for reached in run.levels] == [1.0, 0.2]
    assert run.levels[-1].network_compression is not None


@pytest.mark.parametrize("kind", [Adam, Lookahead, LBFGS])
def test_pruned_weights_stay_zero_under_any_optimizer(kind: type[Optimizer]) -> None:
    model = network()
    inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = Lookahead(inner) if kind is Lookahead else kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    run = rewound.epochs(T, model, optimizer, say=lambda _: None, **OPTIONS)  # type: ignore[arg-type]
    for epoch in run:
        for step in range(STEPS):
            x, y = batch(epoch, step)

            def loss(x: torch.Tensor = x, y: torch.Tensor = y) -> float:
                optimizer.zero_grad()
                value = nn.functional.cross_entropy(model(x), y)
                value.backward()
                return float(value.detach())

            optimizer.step(loss)
            for weight, mask in run.mask.pairs(model) if run.mask is not None else ():
                assert not weight.detach()[~mask].any()
                for slot in optimizer.state.get(weight, {}).values():
                    if isinstance(slot, torch.Tensor) and slot.shape == mask.shape:
                        assert not slot[~mask].any()
    assert kept(run.mask) == curve(EPOCHS * STEPS)[-1]


def test_two_optimizers_step_together() -> None:
    model = network()
    pair = [SGD(part.parameters(), lr=0.1) for part in (model[:2], model[3])]
    run = rewound.epochs(T, model, pair, say=lambda _: None, **OPTIONS)  # type: ignore[arg-type]
    found = []
    for epoch in run:
        for step in range(STEPS):
            model.zero_grad()
            x, y = batch(epoch, step)
            nn.functional.cross_entropy(model(x), y).backward()
            for optimizer in pair:
                optimizer.step()
            if run.level:
                found.append(kept(run.mask))
    assert found == curve(EPOCHS * STEPS)[1:]


def test_an_average_is_pruned_with_the_model() -> None:
    loop = Loop()
    average = AveragedModel(loop.model, multi_avg_fn=None)
    run = loop.run(**OPTIONS, also=[average])
    for epoch in run:
        for step in range(STEPS):
            one_step(loop.model, loop.optimizer, epoch, step)
            average.update_parameters(loop.model)
        loop.scheduler.step()
        for weight, mask in run.mask.pairs(average.module) if run.mask is not None else ():
            assert not weight.detach()[~mask].any()


def test_fresh_weights_are_pruned_while_they_train() -> None:
    def init(model: nn.Module) -> None:
        torch.manual_seed(9)
        for module in (model[0], model[3]):
            module.reset_parameters()

    run = in_steps(*things(), technique=f"{__name__}:FRESH", retrain_steps=3, init=init)
    assert len(run) == 2 * T * STEPS + 3
    assert kept(run.mask) == curve(EPOCHS * STEPS)[-1]


# Going on


@pytest.mark.parametrize("until", [T + 1, T + 2, T + 3])
def test_epochs_that_were_left_go_on_under_the_same_mask(
    until: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewound.loops.iteration, "SAVE_SECONDS", 0.0)
    whole, masks = things(), list[Mask | None]()
    in_epochs(*whole, masks=masks)
    found = list[Mask | None]()
    in_epochs(*things(), until=until, masks=found, checkpoint=tmp_path)
    again = things()
    run = in_epochs(*again, masks=found, checkpoint=tmp_path)
    assert_same(found, masks)
    assert_same(again[0].state_dict(), whole[0].state_dict())
    assert_same(again[1].state_dict(), whole[1].state_dict())
    ticket = rewound.load(tmp_path / "levels" / "5.00x.safetensors")
    assert_same(ticket.mask, run.mask)
    assert_same(ticket.state, again[0].state_dict())
    assert ticket.about["technique"] == WORDS


@pytest.mark.parametrize("into_level", range(1, EPOCHS * STEPS, 2))
def test_steps_that_were_left_go_on_under_the_same_mask(
    into_level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewound.loops.iteration, "SAVE_SECONDS", 0.0)
    whole, masks = things(), list[Mask | None]()
    in_steps(*whole, masks=masks)
    found = list[Mask | None]()
    in_steps(*things(), until=T * STEPS + into_level, masks=found, checkpoint=tmp_path)
    del found[-1]  # the step that was left is done again
    again = things()
    in_steps(*again, masks=found, checkpoint=tmp_path)
    assert_same(found, masks)
    assert_same(again[0].state_dict(), whole[0].state_dict())


@pytest.mark.parametrize("unit", ["epoch", "step"])
@pytest.mark.parametrize("into_level", [1, 2, 5, 8, 9])
def test_a_trainers_checkpoint_in_the_middle_of_an_epoch_goes_on(unit: str, into_level: int) -> None:
    """Saved after so many optimizer steps, before the run has been asked for the next epoch or step."""
    make, until = (rewound.epochs, T) if unit == "epoch" else (rewound.steps, T * STEPS)
    options = {**(OPTIONS if unit == "epoch" else BY_STEPS), "resume": False, "say": lambda _: None}

    def train(model: nn.Module, optimizer: Optimizer, run: object, first: int, last: int) -> dict[str, object] | None:
        """All steps from `first` on; the state of the run after `last` of them."""
        done = first
        for _ in run:  # type: ignore[attr-defined]
            while done < (T + EPOCHS) * STEPS:
                one_step(model, optimizer, *divmod(done, STEPS))
                done += 1
                if done == last:
                    if unit == "step":
                        return run.state_dict()  # type: ignore[attr-defined,no-any-return]
                    return run.state_dict(epoch_ended=done % STEPS == 0)  # type: ignore[attr-defined,no-any-return]
                if unit == "step" or done % STEPS == 0:
                    break
        return None

    whole = things()
    run = make(until, *whole[:2], **options)  # type: ignore[operator]
    train(*whole[:2], run, 0, -1)
    first = things()
    state = train(*first[:2], make(until, *first[:2], **options), 0, T * STEPS + into_level)  # type: ignore[operator]
    saved = copy.deepcopy((state, first[0].state_dict(), first[1].state_dict()))
    again = things()
    resumed = make(until, *again[:2], **options)  # type: ignore[operator]
    again[0].load_state_dict(saved[1])
    again[1].load_state_dict(saved[2])
    resumed.load_state_dict(saved[0])
    train(*again[:2], resumed, T * STEPS + into_level, -1)
    assert_same(resumed.mask, run.mask)
    assert_same(again[0].state_dict(), whole[0].state_dict())


def test_another_compression_goes_on_from_the_dense_run(tmp_path: Path) -> None:
    in_epochs(*things(), checkpoint=tmp_path)
    again, straight = things(), things()
    run = in_epochs(*again, checkpoint=tmp_path, compression=8)
    assert_same(run.mask, in_epochs(*straight, compression=8).mask)
    assert_same(again[0].state_dict(), straight[0].state_dict())


# What is refused


def test_too_few_steps_are_refused_before_the_dense_run_has_been_trained() -> None:
    loop = Loop()
    with pytest.raises(InputError, match=r"after every=20 steps, but only 9 of 12 steps lie between begin=0 and"):
        in_steps(*things(), technique="gradual end=0.75 every=20")
    with pytest.raises(InputError, match=r"after every=20 steps, but only 9 of 12 steps"):
        loop.over(loop.run(compression=5, technique="gradual end=0.75 every=20", retrain_epochs=EPOCHS))
    assert [epoch for epoch, *_ in loop.seen] == [0]


def test_a_level_that_is_too_short_for_its_updates_is_an_error() -> None:
    def train(loop: Loop, run: rewound.Epochs) -> None:
        for epoch in run:
            for step in range(1 if run.level else STEPS):
                one_step(loop.model, loop.optimizer, epoch, step)
            loop.scheduler.step()

    loop = Loop()
    with pytest.raises(InputError, match=r"level 1 took 4 steps, but the last of its 4 prunings was due after 8"):
        train(loop, loop.run(**OPTIONS))


def test_an_adopted_network_needs_to_know_how_many_steps_an_epoch_has() -> None:
    loop = Loop()
    loop.over(loop.run(compression=1.25, retrain_epochs=1))
    again = Loop(loop.model)
    with pytest.raises(InputError, match=r"one step per epoch, which does not show how many .* use rewound\.steps"):
        again.run(**OPTIONS, adopt=True)
    run = rewound.epochs(
        T,
        loop.model,
        loop.optimizer,
        Schedule.constant(T * STEPS, 0.01),
        adopt=True,
        say=lambda _: None,
        **OPTIONS,  # type: ignore[arg-type]
    )
    found = []
    for epoch in run:
        for step in range(STEPS):
            one_step(loop.model, loop.optimizer, epoch, step)
            found.append(kept(run.mask))
    assert found == curve(EPOCHS * STEPS)[1:]
