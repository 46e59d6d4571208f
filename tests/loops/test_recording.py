"""What a schedule did can be done again: every scheduler, stepped by epoch or by step, for any number of groups."""

import copy
import io
from collections.abc import Callable
from itertools import islice

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, lr_scheduler
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import InputError
from rewound.loops.optimizers import Value, assign, check_new, hyperparameters, resting
from rewound.loops.recording import Recording, rehearsed, scheduled
from rewound.method.schedule import Schedule

transformers = pytest.importorskip("transformers", reason="Hugging Face's schedules: pip install transformers")

EPOCHS, STEPS = 6, 4
TOTAL = EPOCHS * STEPS


def warmed_up(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    rise = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [rise, lr_scheduler.CosineAnnealingLR(optimizer, 4)], milestones=[2])


def listed(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    factors = [1.0, 0.9, 0.7, 0.5, 0.3, 0.2, 0.1]  # one more than epochs: the step after the last one reads it
    return lr_scheduler.LambdaLR(optimizer, lambda epoch: factors[epoch])


BY_EPOCH: dict[str, Callable[[Optimizer], object]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, EPOCHS),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "LambdaLR": listed,
    "SequentialLR": warmed_up,
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.7)], optimizer=o
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, EPOCHS),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}
BY_STEP: dict[str, Callable[[Optimizer], object]] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=TOTAL),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, TOTAL),
    "linear": lambda o: transformers.get_linear_schedule_with_warmup(o, 3, TOTAL),
    "cosine": lambda o: transformers.get_cosine_schedule_with_warmup(o, 3, TOTAL),
    "cosine restarts": lambda o: transformers.get_cosine_with_hard_restarts_schedule_with_warmup(o, 3, TOTAL, 2),
    "polynomial": lambda o: transformers.get_polynomial_decay_schedule_with_warmup(o, 3, TOTAL),
    "inverse square root": lambda o: transformers.get_inverse_sqrt_schedule(o, 3),
}
SCHEDULERS = [(name, False) for name in BY_EPOCH] + [(name, True) for name in BY_STEP]
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adam": lambda model: Adam(model.parameters(), lr=0.01),
    "two groups": lambda model: SGD(
        [{"params": model.weight, "lr": 0.3}, {"params": model.bias}], lr=0.1, momentum=0.9
    ),
    "tensor lr": lambda model: Adam(model.parameters(), lr=torch.tensor(0.01)),
}


def stepped(scheduler: object, by_step: bool, step: int, loss: float = 0.0) -> None:
    """What a loop does after a step: it steps the scheduler then, or at the end of the epoch."""
    if by_step or step == STEPS - 1:
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss)
        else:
            scheduler.step()  # type: ignore[attr-defined]


def trained(
    optimizer: Optimizer, scheduler: object, by_step: bool, recording: Recording
) -> list[list[dict[str, Value]]]:
    """A dense run: what it used at each step, and its recording."""
    used = []
    for epoch in range(EPOCHS):
        recording.begin_epoch()
        for step in range(STEPS):
            recording.before_step(optimizer)
            used.append([hyperparameters(group) for group in optimizer.param_groups])
            optimizer.step()
            recording.after_step(optimizer)
            stepped(scheduler, by_step, step, loss=float(epoch >= 2))
    return used


def made(kind: str, name: str, by_step: bool) -> tuple[Optimizer, object]:
    optimizer = OPTIMIZERS[kind](nn.Linear(3, 2))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    return optimizer, (BY_STEP if by_step else BY_EPOCH)[name](optimizer)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("name", "by_step"), SCHEDULERS)
def test_an_epoch_can_be_done_again(name: str, by_step: bool, kind: str) -> None:
    optimizer, scheduler = made(kind, name, by_step)
    recording = Recording()
    used = trained(optimizer, scheduler, by_step, recording)
    assert len({str(values) for values in used}) > 1, "this schedule moves nothing"
    recording = Recording.from_state_dict(recording.state_dict())
    for epoch in range(EPOCHS):
        for step, values in enumerate(islice(recording.replayed(epoch), STEPS)):
            for group, mine in zip(optimizer.param_groups, values, strict=True):
                assign(group, mine)
            assert [hyperparameters(group) for group in optimizer.param_groups] == used[epoch * STEPS + step]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("name", "by_step"), SCHEDULERS)
def test_a_scheduler_that_has_driven_a_run_is_not_new(name: str, by_step: bool, kind: str) -> None:
    optimizer, scheduler = made(kind, name, by_step)
    check_new([scheduler])  # type: ignore[list-item]
    trained(optimizer, scheduler, by_step, Recording())
    with pytest.raises(InputError, match=f"stepped before .{TOTAL if by_step else EPOCHS} times"):
        check_new([scheduler])  # type: ignore[list-item]


def test_what_moves_with_the_rate_is_recorded_too() -> None:
    for kind, moved in (("SGD", {"lr", "momentum"}), ("Adam", {"lr", "betas"})):
        optimizer, scheduler = made(kind, "OneCycleLR", True)
        recording = Recording()
        trained(optimizer, scheduler, True, recording)
        assert set(next(recording.replayed(2))[0]) == moved


def test_an_epoch_with_more_steps_than_recorded_holds_its_last_value() -> None:
    optimizer, scheduler = made("SGD", "OneCycleLR", True)
    recording = Recording()
    used = trained(optimizer, scheduler, True, recording)
    values = [step[0]["lr"] for step in islice(recording.replayed(1), STEPS + 3)]
    assert values == [step[0]["lr"] for step in used[STEPS : 2 * STEPS]] + 3 * [used[2 * STEPS - 1][0]["lr"]]


def test_beyond_the_end_the_last_value_holds_or_what_was_declared() -> None:
    optimizer, scheduler = made("two groups", "StepLR", False)
    recording = Recording()
    used = trained(optimizer, scheduler, False, recording)
    assert [g["lr"] for g in next(recording.replayed(EPOCHS + 5))] == [g["lr"] for g in used[-1]]
    ending = recording.ending_at(0.06)
    # In proportion to their peaks, 0.3 and 0.1.
    assert [g["lr"] for g in next(ending.replayed(EPOCHS + 5))] == pytest.approx([0.06, 0.02])
    assert [g["lr"] for g in next(ending.replayed(0))] == [0.3, 0.1]


def test_a_rate_set_by_hand_is_recorded_like_any_other() -> None:
    optimizer, _ = made("SGD", "StepLR", False)
    recording = Recording()
    for epoch in range(3):
        recording.begin_epoch()
        optimizer.param_groups[0]["lr"] = 0.1 / (epoch + 1)
        recording.before_step(optimizer)
    assert [next(recording.replayed(epoch))[0]["lr"] for epoch in range(3)] == [0.1, 0.05, 0.1 / 3]


def test_a_group_that_joins_on_the_way_is_recorded_from_there() -> None:
    model, late = nn.Linear(3, 2), nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    recording = Recording()
    for epoch in range(3):
        recording.begin_epoch()
        if epoch == 1:
            optimizer.add_param_group({"params": late.parameters(), "lr": 0.02})
        if epoch == 2:
            optimizer.param_groups[1]["lr"] = 0.01
        recording.before_step(optimizer)
    assert [group["lr"] for group in next(recording.replayed(2))] == [0.1, 0.01]
    earliest = [0.1, 0.02]  # there was none in epoch 0
    assert [group["lr"] for group in next(recording.replayed(0))] == earliest


def test_what_moves_only_after_a_resume_is_known_from_the_beginning() -> None:
    optimizer = SGD(nn.Linear(3, 2).parameters(), lr=0.1, momentum=0.9)
    recording = Recording()
    for momentum in (0.9, 0.9, 0.5, 0.4):
        recording = Recording.from_state_dict(recording.state_dict())
        recording.begin_epoch()
        optimizer.param_groups[0]["momentum"] = momentum
        recording.before_step(optimizer)
    assert [next(recording.replayed(epoch))[0]["momentum"] for epoch in range(4)] == [0.9, 0.9, 0.5, 0.4]


class Counting(SGD):
    """Keeps a number of its own among the hyperparameters, as some optimizers do."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        self.param_groups[0]["d"] = self.param_groups[0].get("d", 1.0) * 1.5
        return super().step(closure)


def test_what_the_optimizer_changes_itself_is_its_state_not_the_schedule() -> None:
    model = nn.Linear(3, 2)
    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["d"] = 1.0
    recording = Recording()
    trained(optimizer, lr_scheduler.StepLR(optimizer, 2), False, recording)
    assert set(next(recording.replayed(0))[0]) == {"lr"}


def test_the_rate_is_never_the_optimizers_own() -> None:
    optimizer = SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    recording = Recording()
    for _ in range(2):
        recording.begin_epoch()
        recording.before_step(optimizer)
        optimizer.param_groups[0]["lr"] /= 2  # in a hook, say
        recording.after_step(optimizer)
    assert recording.rates() == [[0.1, 0.05]]


@pytest.mark.parametrize("ask", [Recording.schedule, Recording.peaks, lambda recording: next(recording.replayed(0))])
def test_a_rate_that_was_not_recorded_is_not_taken_for_zero(ask: Callable[[Recording], object]) -> None:
    recording = Recording([{"lr": [[(0.1, 1)]]}, {"momentum": [[(0.9, 1)]]}], epochs=1)
    with pytest.raises(InputError, match="no learning rate was recorded for parameter group 1"):
        ask(recording)


def test_a_tensor_is_filled_in_place() -> None:
    rate = torch.tensor(0.1)
    group: dict[str, object] = {"lr": rate}
    assign(group, {"lr": 0.025})
    assert group["lr"] is rate
    assert rate.item() == pytest.approx(0.025)


@pytest.mark.parametrize(("name", "by_step"), [s for s in SCHEDULERS if s[0] != "ReduceLROnPlateau"])
def test_a_rehearsal_is_what_training_would_do_and_leaves_no_trace(name: str, by_step: bool) -> None:
    optimizer, scheduler = made("two groups", name, by_step)
    groups, state = copy.deepcopy(optimizer.param_groups), copy.deepcopy(scheduler.state_dict())  # type: ignore[attr-defined]
    rehearsal = rehearsed(optimizer, [scheduler], [STEPS if by_step else 1] * EPOCHS)  # type: ignore[arg-type]
    assert [hyperparameters(g) for g in optimizer.param_groups] == [hyperparameters(g) for g in groups]
    assert str(scheduler.state_dict()) == str(state)  # type: ignore[attr-defined]
    recording = Recording()
    trained(optimizer, scheduler, by_step, recording)
    for epoch in range(EPOCHS):
        for mine, theirs in zip(
            islice(rehearsal.replayed(epoch), STEPS), islice(recording.replayed(epoch), STEPS), strict=True
        ):
            assert mine == theirs


@pytest.mark.parametrize("steps", [EPOCHS, TOTAL])
def test_a_schedule_is_by_epoch_or_by_step(steps: int) -> None:
    optimizer, _ = made("two groups", "StepLR", False)
    S = Schedule.cosine(steps, 0.3, final=0.03)
    recording = scheduled(optimizer, S, [1] * EPOCHS)
    for epoch in range(EPOCHS):
        at = [S.at(epoch * (steps // EPOCHS) + (step if steps == TOTAL else 0)) for step in range(STEPS)]
        rates = [[group["lr"] for group in step] for step in islice(recording.replayed(epoch), STEPS)]
        assert rates == [pytest.approx([rate, rate / 3]) for rate in at]
    assert [rates[-1] for rates in recording.rates()] == pytest.approx([0.03, 0.01])


def test_a_schedule_must_divide_into_its_epochs() -> None:
    optimizer, _ = made("SGD", "StepLR", False)
    with pytest.raises(InputError, match="a schedule of 100 steps does not divide into 6 epochs"):
        scheduled(optimizer, Schedule.constant(100, 0.1), [1] * EPOCHS)


@pytest.mark.parametrize(("name", "by_step"), SCHEDULERS)
def test_a_resting_scheduler_does_nothing_and_tells_the_present_rate(name: str, by_step: bool) -> None:
    optimizer, scheduler = made("SGD", name, by_step)
    trained(optimizer, scheduler, by_step, Recording())
    kind, state = type(scheduler), set(scheduler.state_dict())  # type: ignore[attr-defined]
    with resting([scheduler], optimizer):  # type: ignore[list-item]
        for _ in range(50):
            scheduler.step()  # type: ignore[attr-defined]
        assert isinstance(scheduler, kind)
        assert set(scheduler.state_dict()) == state  # type: ignore[attr-defined]
        optimizer.param_groups[0]["lr"] = 0.123
        assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]  # type: ignore[attr-defined]
    assert type(scheduler) is kind


def test_a_resting_scheduler_is_saved_whole_as_it_was_before() -> None:
    optimizer, scheduler = made("SGD", "StepLR", False)
    trained(optimizer, scheduler, False, Recording())
    with resting([scheduler], optimizer):  # type: ignore[list-item]
        torch.save(scheduler, file := io.BytesIO())
        assert type(copy.deepcopy(scheduler)) is lr_scheduler.StepLR
    file.seek(0)
    read = torch.load(file, weights_only=False)
    assert type(read) is lr_scheduler.StepLR
    assert {k: v for k, v in vars(read).items() if k != "optimizer"} == {
        k: v for k, v in vars(scheduler).items() if k != "optimizer"
    }
    read.step()  # it is awake
    assert read.last_epoch == scheduler.last_epoch + 1  # type: ignore[attr-defined]
