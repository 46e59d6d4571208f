"""Averages of the weights that a loop keeps itself are pruned with the model, or said not to be."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

import rewound
from small_networks import Tied
from training_loops import Loop, network

State = dict[str, Any]


class Shadow:
    """An average as scripts write it: a dictionary of tensors beside the model."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def update(self, model: nn.Module) -> None:
        for name, tensor in model.state_dict().items():
            self.shadow[name].copy_(0.9 * self.shadow[name] + 0.1 * tensor)

    def state_dict(self) -> State:
        return self.shadow

    def load_state_dict(self, state: State) -> None:
        self.shadow = copy.deepcopy(state)


class Copied(Shadow):
    """One that gives copies, on a wrapped model's names."""

    def state_dict(self) -> State:
        return {f"module.{name}": tensor.clone() for name, tensor in self.shadow.items()}

    def load_state_dict(self, state: State) -> None:
        self.shadow = {name.removeprefix("module."): tensor.clone() for name, tensor in state.items()}


class Nested(Shadow):
    """One with facts beside its tensors."""

    def state_dict(self) -> State:
        return {"decay": 0.9, "shadow": self.shadow, 0: "a key that is no name"}  # type: ignore[dict-item]

    def load_state_dict(self, state: State) -> None:
        self.shadow = state["shadow"]


class Listed(Shadow):
    """One that knows its tensors by their order alone."""

    def state_dict(self) -> State:
        return {"decay": 0.9, "shadow_params": list(self.shadow.values())}

    def load_state_dict(self, state: State) -> None:
        self.shadow = dict(zip(self.shadow, state["shadow_params"], strict=True))


class Around(nn.Module):
    """A module that holds model and average under names of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.ema_model = copy.deepcopy(model)


@pytest.mark.parametrize("technique", ["lr-rewinding", "weight-rewinding"])
@pytest.mark.parametrize("kind", [Shadow, Copied, Nested])
def test_a_home_made_average_is_pruned_with_the_model(kind: Callable[[nn.Module], Shadow], technique: str) -> None:
    loop = Loop()
    average = kind(loop.model)
    live = average.shadow["0.weight"]
    run = loop.run(compression=1.5, technique=technique, retrain_epochs=2, also=[average])
    for epoch in run:
        loop.train(epoch)
        average.update(loop.model)
        if run.mask is not None:
            for name, kept in run.mask.items():
                assert not average.shadow[name][~kept].any()
                assert average.shadow[name][kept].all()
    assert run.level == 2
    if kind is Shadow and technique == "lr-rewinding":
        assert average.shadow["0.weight"] is live, "a script may hold the tensor itself"


def test_an_average_of_tied_weights_may_hold_each_by_itself() -> None:
    model = Tied()
    sgd = SGD(model.parameters(), lr=0.1)
    average = Shadow(model)
    run = rewound.epochs(1, model, sgd, compression=2, one_shot=True, also=[average], say=lambda text: None)
    for _ in run:
        model(torch.arange(6)).square().mean().backward()
        sgd.step()
    assert run.mask is not None
    assert {int(tensor.count_nonzero()) for tensor in average.shadow.values()} == {run.mask.kept}


@pytest.mark.parametrize("kind", [Listed, Around])
def test_an_average_whose_weights_are_not_named_as_the_models_is_told(kind: Callable[[nn.Module], Any]) -> None:
    loop = Loop()
    said = (
        rf"{kind.__name__} in also holds tensors of the weights' shapes, but not under their names, .* \('0.weight'\)"  # type: ignore[attr-defined]
    )
    with pytest.warns(UserWarning, match=said) as warned:
        loop.run(compression=2, also=[kind(loop.model)])
    assert warned[0].filename == loop.run.__code__.co_filename


class Pair(nn.Module):
    """Two networks and an average of the first, as a GAN or a LightningModule keeps them."""

    def __init__(self, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = network(), second
        self.ema = AveragedModel(self.first)
        self.ema.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


@pytest.mark.parametrize("compiled", [False, True])
def test_an_average_of_one_part_is_pruned_with_that_part(compiled: bool) -> None:
    model = Pair(nn.Linear(3, 3))
    if compiled:
        model.first = torch.compile(model.first, backend="eager")  # type: ignore[assignment]
    sgd = SGD([*model.first.parameters(), *model.second.parameters()], lr=0.1)
    run = rewound.epochs(1, model, sgd, compression=2, one_shot=True, also=[model.ema], say=lambda text: None)
    for _ in run:
        model(torch.randn(8, 6)).square().mean().backward()
        sgd.step()
        model.ema.update_parameters(model.first)
    assert run.mask is not None
    assert set(run.mask) == {"first.0.weight", "first.3.weight", "second.weight"}
    for name in ("0.weight", "3.weight"):
        assert torch.equal(model.ema.module.get_parameter(name) != 0, run.mask[f"first.{name}"])


def test_a_part_may_hold_the_only_weight() -> None:
    model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 1))})
    average, sgd = AveragedModel(model["net"]), SGD(model.parameters(), lr=0.1)
    run = rewound.epochs(1, model, sgd, compression=2, one_shot=True, also=[average], say=lambda text: None)
    for _ in run:
        model["net"](torch.randn(8, 6)).square().mean().backward()
        sgd.step()
    assert run.mask is not None
    assert torch.equal(average.module.get_parameter("0.weight") != 0, run.mask["net.0.weight"])


def test_an_average_of_one_of_two_parts_that_are_made_alike_is_told() -> None:
    model = Pair(network())
    sgd = SGD([*model.first.parameters(), *model.second.parameters()], lr=0.1)
    with pytest.warns(UserWarning, match="AveragedModel in also may be a copy of any of 2 parts of the model"):
        rewound.epochs(1, model, sgd, compression=2, also=[model.ema])


class Slots(Shadow):
    """Something that holds tensors, but not all of the weights."""

    def state_dict(self) -> State:
        return {"other": self.shadow["0.weight"]}


@pytest.mark.parametrize("kind", [Slots, lambda model: nn.Linear(6, 16), lambda model: torch.amp.GradScaler("cpu")])
def test_what_holds_no_copy_of_the_weights_needs_no_word(kind: Callable[[nn.Module], Any]) -> None:
    loop = Loop()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loop.run(compression=2, also=[kind(loop.model)])
    assert said == []
