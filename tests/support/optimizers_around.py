"""Optimizers around optimizers, in the shapes that libraries give them."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

Closure = Callable[[], Tensor]
StateDict = dict[str, Any]


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
