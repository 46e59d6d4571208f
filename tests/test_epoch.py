"""Learning rates are rewound wherever they are set: in the loop, in a closure, in a hook; or the run says it cannot."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, lr_scheduler
from torch.optim.optimizer import Optimizer

import rewound
from loops import STEPS, T, batch, network, one_step
from rewound import Epochs
from rewound.errors import InputError

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
