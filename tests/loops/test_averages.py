"""What a script gives in `also`: averages are pruned with the model, what is trained is saved and never pruned."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, lr_scheduler
from torch.optim.swa_utils import AveragedModel

import rewound
from rewound import Epochs, InputError
from sameness import assert_same
from small_networks import Tied
from training_loops import STEPS, Loop, T, network

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


class GeneratorAndCritic:
    """A generator and a critic with the same layers, each with an optimizer and a scheduler."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.generator, self.critic = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2))
        self.optimizers = [Adam(self.generator.parameters(), lr=0.02), Adam(self.critic.parameters(), lr=0.01)]
        self.schedulers = [lr_scheduler.ExponentialLR(each, 0.7) for each in self.optimizers]
        self.critics: list[State] = []
        """The critic before each epoch."""

    def run(self, **options: Any) -> Epochs:
        given = {"compression": 1.5, "say": lambda text: None, **options}
        return rewound.epochs(T, self.generator, self.optimizers, self.schedulers, **given)

    def over(self, run: Epochs, until: int | None = None) -> Epochs:
        for epoch in run:
            self.critics.append({name: tensor.clone() for name, tensor in self.critic.state_dict().items()})
            for step in range(STEPS):
                noise = torch.randn(16, 4, generator=torch.Generator().manual_seed(1000 * epoch + step))
                for optimizer, sign in zip(self.optimizers, (1, -1), strict=True):
                    self.generator.zero_grad()
                    self.critic.zero_grad()
                    (sign * self.critic(self.generator(noise))).tanh().mean().backward()
                    optimizer.step()
            for scheduler in self.schedulers:
                scheduler.step()
            if epoch == until:
                break
        return run


def test_weights_that_only_the_optimizer_knows_are_refused_with_the_remedy() -> None:
    said = (
        r"the optimizer trains 4 tensors outside the model, which would be neither saved nor rewound; put all into one "
        r"module and give that, or give the other module in also=\[\.\.\.\]"
    )
    pair = GeneratorAndCritic()
    with pytest.raises(InputError, match=said):
        pair.run()
    with pytest.raises(InputError, match=said):  # an average of it is a copy
        pair.run(also=[torch.optim.swa_utils.AveragedModel(pair.critic)])
    backbone, head = nn.Linear(6, 16), nn.Linear(16, 3, bias=False)
    together = SGD([*backbone.parameters(), *head.parameters()], lr=0.1)
    with pytest.raises(InputError, match="the optimizer trains 1 tensor outside the model"):
        rewound.epochs(T, backbone, together, compression=2)


@pytest.mark.parametrize("technique", ["lr-rewinding", "weight-rewinding"])
@pytest.mark.parametrize("until", [1, T + 1, T + 5], ids=["dense", "level 1", "level 2"])
def test_a_critic_in_also_is_resumed_with_its_weights(
    technique: str, until: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rewound.loops.iteration.SAVE_SECONDS", 0.0)
    whole, left, again = GeneratorAndCritic(), GeneratorAndCritic(), GeneratorAndCritic(seed=7)
    options = {"technique": technique, "retrain_epochs": 3, "checkpoint": tmp_path / "left"}
    whole.over(whole.run(**{**options, "checkpoint": None}, also=[whole.critic]))
    left.over(left.run(**options, also=[left.critic]), until)
    again.over(again.run(**options, also=[again.critic]))
    assert_same(again.critic.state_dict(), whole.critic.state_dict())
    assert_same(again.generator.state_dict(), whole.generator.state_dict())


def test_a_critic_in_also_is_rewound_and_never_pruned() -> None:
    pair = GeneratorAndCritic()
    run = pair.over(pair.run(technique="weight-rewinding", retrain_epochs=3, also=[pair.critic]))
    for level in range(1, len(run.levels)):
        assert_same(pair.critics[T + 3 * (level - 1)], pair.critics[T - 3])
    assert all(tensor.all() for tensor in pair.critic.state_dict().values())  # though it has the generator's layers
    assert run.mask is not None
    assert not any(parameter[~kept].any() for parameter, kept in run.mask.pairs(pair.generator))


class Uncertainty:
    """A loss with a parameter of its own, and no module."""

    def __init__(self) -> None:
        self.log_variance = torch.zeros(3, requires_grad=True)

    def state_dict(self) -> dict[str, Tensor]:
        return {"log_variance": self.log_variance.detach()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.log_variance.data.copy_(state["log_variance"])


def test_whatever_saves_a_weight_may_hold_it() -> None:
    loop, loss = Loop(), Uncertainty()
    loop.optimizer = SGD([*loop.model.parameters(), loss.log_variance], lr=0.1)
    loop.scheduler = lr_scheduler.MultiStepLR(loop.optimizer, [2, 4])
    with pytest.raises(InputError, match="the optimizer trains 1 tensor outside the model"):
        loop.run(compression=2)
    loop.over(loop.run(compression=1.2, also=[loss]))


def test_an_optimizer_or_a_scheduler_in_also_is_refused() -> None:
    pair = GeneratorAndCritic()
    for thing in (pair.optimizers[1], pair.schedulers[1]):
        with pytest.raises(
            InputError, match=f"rates of {type(thing).__name__} in also would not be rewound; give it in the lists of "
        ):
            rewound.epochs(
                T, pair.generator, pair.optimizers[0], pair.schedulers[0], compression=2, also=[pair.critic, thing]
            )
