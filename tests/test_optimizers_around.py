"""Optimizers around optimizers, in the shapes that libraries give them: steps, rates and slots are all rewound."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, lr_scheduler
from torch.optim.optimizer import Optimizer

import rewound
from loops import STEPS, T, batch, network, same
from rewound.errors import InputError

Closure = Callable[[], Tensor]
StateDict = dict[str, Any]


def sgd(parameters: object) -> SGD:
    return SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


def pull_back(groups: list[StateDict], slots: dict[Tensor, StateDict]) -> None:
    for parameter in (p for group in groups for p in group["params"]):
        slow = slots[parameter].setdefault("slow", parameter.detach().clone())
        parameter.copy_(slow.lerp_(parameter, 0.5))


def timm_lookahead() -> type[Optimizer]:
    """A new class each time: torch puts its hooks on the step of one when an optimizer of it is first used."""

    class Lookahead(Optimizer):
        """As timm's: it does not call `Optimizer.__init__`, has some of the hooks, and its slots are its base's."""

        def __init__(self, base: Optimizer) -> None:
            self._optimizer_step_pre_hooks: Any = OrderedDict()
            self._optimizer_step_post_hooks: Any = OrderedDict()
            self._base_optimizer, self.defaults = base, base.defaults
            self.param_groups, self.state = base.param_groups, defaultdict(dict)
            for group in self.param_groups:
                group["lookahead_step"] = 0

        @torch.no_grad()
        def step(self, closure: Closure | None = None) -> None:  # type: ignore[override]
            self._base_optimizer.step(closure)  # type: ignore[arg-type]
            for group in self._base_optimizer.param_groups:
                group["lookahead_step"] += 1
                if group["lookahead_step"] % 2 == 0:
                    pull_back([group], self._base_optimizer.state)

        def state_dict(self) -> StateDict:
            return self._base_optimizer.state_dict()

        def load_state_dict(self, state: StateDict) -> None:
            self._base_optimizer.load_state_dict(state)
            self.param_groups = self._base_optimizer.param_groups

    return Lookahead


class Lookahead(Optimizer):
    """As pytorch_optimizer's: its groups are a property, and its state has a shape of its own."""

    def __init__(self, base: Optimizer) -> None:
        self.optimizer, self.state, self.steps = base, defaultdict(dict), 0
        self.defaults: StateDict = {}

    @property
    def param_groups(self) -> list[StateDict]:  # type: ignore[override]
        return self.optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)  # type: ignore[arg-type]
        self.steps += 1
        if self.steps % 2 == 0:
            pull_back(self.param_groups, self.state)

    def state_dict(self) -> StateDict:
        slow = [dict(self.state[p]) for group in self.param_groups for p in group["params"]]
        return {"base": self.optimizer.state_dict(), "slow": slow, "steps": self.steps}

    def load_state_dict(self, state: StateDict) -> None:
        self.optimizer.load_state_dict(state["base"])
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.state.update(
            {p: {n: v.clone() for n, v in slow.items()} for p, slow in zip(parameters, state["slow"], strict=True)}
        )
        self.steps = state["steps"]


class SAM(Optimizer):
    """As it is copied from script to script: the momentum of its base is not in its state."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {"rho": 0.05})
        self.base_optimizer = base
        self.param_groups = base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter]["old"] = parameter.clone()
            parameter.add_(0.05 * parameter.grad)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.copy_(self.state[parameter]["old"])
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Closure) -> None:  # type: ignore[override]
        self.first_step()
        closure()
        self.second_step()

    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        self.base_optimizer.param_groups = self.param_groups


class Whole(SAM):
    """As pytorch_optimizer's SAM: its base's state is in its own, and loading it gives the two other groups."""

    def state_dict(self) -> StateDict:
        return {**super().state_dict(), "base": self.base_optimizer.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        super(SAM, self).load_state_dict(state)
        self.base_optimizer.load_state_dict(state["base"])


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
