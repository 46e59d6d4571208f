"""Learning rates are rewound wherever they are set: in the loop, in a closure, in a hook; or the run says it cannot."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, lr_scheduler
from torch.optim.optimizer import Optimizer

import rewound
from rewound import Epochs
from rewound.foundations.errors import InputError
from training_loops import STEPS, T, batch, network, one_step

TOTAL = T * STEPS
Set = Callable[[], None]


class Telling(SGD):
    """Tells what its updates really use."""

    used: list[tuple[float, float]]

    def _init_group(self, group: dict[str, object], *lists: list[Tensor]) -> object:
        self.used.append((group["lr"], group["momentum"]))  # type: ignore[arg-type]
        return super()._init_group(group, *lists)  # type: ignore[no-untyped-call]


def telling(kind: type[Telling] = Telling) -> tuple[nn.Module, Telling]:
    model = network()
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.used = []
    return model, optimizer


def train(run: Epochs, model: nn.Module, optimizer: Optimizer, before: Set, inside: Set, keyword: bool) -> None:
    for epoch in run:
        for step in range(STEPS):
            x, y = batch(epoch, step)

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                inside()
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                return loss

            before()
            _ = optimizer.step(closure=closure) if keyword else optimizer.step(closure)  # type: ignore[arg-type, func-returns-value]


def nothing() -> None: ...


def silent(text: str) -> None: ...


def backward(model: nn.Module, epoch: int, step: int) -> Tensor:
    x, y = batch(epoch, step)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


def falling(optimizer: Optimizer) -> Set:
    """A rate and a momentum set by hand at every step, down to the end of the dense run."""
    taken = 0

    def set_rate() -> None:
        nonlocal taken
        for group in optimizer.param_groups:
            left = max(0.01, 1 - taken / TOTAL)
            group["lr"], group["momentum"] = 0.1 * left, 0.9 * left
        taken += 1

    return set_rate


def assert_rewound(used: list[tuple[float, float]]) -> None:
    dense, level = used[:TOTAL], used[TOTAL:]
    assert len(set(dense)) == TOTAL
    assert level == dense


@pytest.mark.parametrize("keyword", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_a_rate_set_by_hand_is_rewound_where_the_step_takes_a_closure(inside: bool, keyword: bool) -> None:
    model, optimizer = telling()
    run = rewound.epochs(T, model, optimizer, compression=1.25, say=lambda text: None)
    set_rate = falling(optimizer)
    train(run, model, optimizer, nothing if inside else set_rate, set_rate if inside else nothing, keyword)
    assert_rewound(optimizer.used)


@pytest.mark.parametrize("given", [True, False])
def test_a_scheduler_stepped_in_a_hook_of_the_optimizer_is_rewound(given: bool) -> None:
    model, optimizer = telling()
    scheduler = lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2 * TOTAL)
    optimizer.register_step_post_hook(lambda *step: scheduler.step())
    run = rewound.epochs(T, model, optimizer, scheduler if given else None, compression=1.25, say=lambda text: None)
    train(run, model, optimizer, nothing, nothing, keyword=False)
    assert_rewound(optimizer.used)


class Before(Telling):
    """Follows a schedule of its own, before it updates."""

    steps = 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        self.steps += 1
        self.param_groups[0]["lr"] = 0.1 / self.steps
        return super().step(closure)


class After(Telling):
    """Follows a schedule of its own, after it has updated."""

    steps = 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = super().step(closure)
        self.steps += 1
        self.param_groups[0]["lr"] = 0.1 / (self.steps + 1)
        return loss


@pytest.mark.parametrize("kind", [Before, After])
def test_an_optimizer_that_moves_its_rate_around_its_parents_step_is_rewound(kind: type[Telling]) -> None:
    telling()  # torch follows the parent's step, too, once there has been one of its kind
    model, optimizer = telling(kind)
    run = rewound.epochs(T, model, optimizer, compression=1.25, say=lambda text: None)
    train(run, model, optimizer, nothing, nothing, keyword=False)
    assert_rewound(optimizer.used)


def kinds() -> tuple[type[Optimizer], type[Optimizer]]:
    """An optimizer and one that calls its step, as new as in a process of their own: torch knows neither yet."""

    class Plain(Optimizer):
        def __init__(self, parameters: object) -> None:
            super().__init__(parameters, {"lr": 0.1})  # type: ignore[arg-type]

        @torch.no_grad()
        def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
            if closure is not None:
                with torch.enable_grad():
                    closure()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(group["lr"] * parameter.grad)

    class Derived(Plain):
        def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
            super().step(closure)

    return Plain, Derived


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("made_in", [0, 2, T, T + 2])
def test_a_step_that_calls_its_parents_is_one_step_whatever_else_the_process_makes(
    made_in: int, closure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rewound.loops.iteration.SAVE_SECONDS", 0.0)

    def rates(folder: Path, made_in: int | None, until: int | None = None) -> list[float]:
        (plain, derived), model = kinds(), network()
        optimizer = derived(model.parameters())  # type: ignore[call-arg, arg-type]
        scheduler = lr_scheduler.LinearLR(optimizer, 1.0, 0.1, TOTAL)
        used = []
        for epoch in rewound.epochs(T, model, optimizer, scheduler, compression=2, checkpoint=folder, say=silent):
            if epoch == made_in:
                plain([nn.Parameter(torch.zeros(1))])  # type: ignore[call-arg, arg-type]
            for step in range(STEPS):
                if closure:
                    optimizer.zero_grad()
                    optimizer.step(lambda epoch=epoch, step=step: backward(model, epoch, step))  # type: ignore[misc]
                else:
                    one_step(model, optimizer, epoch, step)
                used.append(optimizer.param_groups[0]["lr"])
                scheduler.step()
            if epoch == until:
                break
        return used

    dense = [pytest.approx(0.1 * (1 - 0.9 * step / TOTAL)) for step in range(TOTAL)]
    whole = rates(tmp_path / "whole", made_in)
    assert whole == 5 * dense
    for first, second in ((made_in, None), (None, made_in)):  # across a resume, in one of the processes
        left = rates(tmp_path / f"left {first}", first, until=3)
        again = rates(tmp_path / f"left {first}", second)
        assert left == whole[: 4 * STEPS]
        assert again == whole[3 * STEPS :]


def test_a_step_that_fails_is_not_taken_for_one_that_is_under_way() -> None:
    (plain, derived), model = kinds(), network()
    optimizer = derived(model.parameters())  # type: ignore[call-arg, arg-type]
    scheduler = lr_scheduler.LinearLR(optimizer, 1.0, 0.1, TOTAL)
    plain([nn.Parameter(torch.zeros(1))])  # type: ignore[call-arg, arg-type]
    used: list[float] = []
    for epoch in rewound.epochs(T, model, optimizer, scheduler, compression=1.25, say=silent):
        for step in range(STEPS):
            with pytest.raises(ZeroDivisionError):  # as by a batch that does not fit in memory
                optimizer.step(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
            one_step(model, optimizer, epoch, step)
            used.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
    assert used[TOTAL:] == used[:TOTAL]
    assert len(set(used)) == TOTAL


class Own(Optimizer):
    """Moves its learning rate in the middle of its step."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"lr": 0.1})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] *= 0.9
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad)


@pytest.mark.parametrize("adopt", [True, False])
def test_a_rate_that_the_step_itself_moves_is_refused(adopt: bool) -> None:
    model = network()
    optimizer = Own(model.parameters())
    schedule = rewound.Schedule.constant(T, 0.1) if adopt else None
    run = rewound.epochs(T, model, optimizer, schedule, compression=1.25, adopt=adopt, say=lambda text: None)
    for epoch in run:
        x, y = batch(epoch, 0)
        nn.functional.cross_entropy(model(x), y).backward()
        with pytest.raises(InputError, match=r"Own moved its learning rate from \[0.1\] to \[0.09.*\] inside its own"):
            optimizer.step()
        break


def test_a_rate_set_in_a_closure_that_comes_too_late_is_refused() -> None:
    model = network()
    optimizer = LBFGS(model.parameters(), lr=0.1)
    run = rewound.epochs(T, model, optimizer, compression=1.25, say=lambda text: None)

    def set_rate() -> None:
        optimizer.param_groups[0]["lr"] = 0.05

    with pytest.raises(InputError, match="LBFGS moved its learning rate"):
        train(run, model, optimizer, nothing, set_rate, keyword=False)


def test_a_rate_that_is_a_tensor_is_compared_as_it_is() -> None:
    model = network()
    optimizer = Adam(model.parameters(), lr=torch.tensor(0.1))
    run = rewound.epochs(T, model, optimizer, compression=1.25, final=0.03, say=lambda text: None)
    train(run, model, optimizer, nothing, nothing, keyword=True)
    assert run.level == 1


def test_a_loop_sees_the_same_rates_in_every_level_wherever_it_looks() -> None:
    model, optimizer = telling()
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=TOTAL + 1)
    run = rewound.epochs(T, model, optimizer, scheduler, compression=1.25, say=lambda text: None)
    seen: dict[int, list[float]] = {0: [], 1: []}
    for epoch in run:
        for step in range(STEPS):
            seen[run.level].append(scheduler.get_last_lr()[0])
            one_step(model, optimizer, epoch, step)
            seen[run.level].append(scheduler.get_last_lr()[0])
            scheduler.step()
    assert seen[1] == seen[0]
