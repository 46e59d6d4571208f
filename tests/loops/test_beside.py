"""Weights that are trained beside the model are saved and rewound with it, or refused; never lost in silence."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, lr_scheduler

import rewound
from rewound import Epochs, InputError
from training_loops import STEPS, Loop, T, same

State = dict[str, Any]


class Pair:
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
    pair = Pair()
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
    whole, left, again = Pair(), Pair(), Pair(seed=7)
    options = {"technique": technique, "retrain_epochs": 3, "checkpoint": tmp_path / "left"}
    whole.over(whole.run(**{**options, "checkpoint": None}, also=[whole.critic]))
    left.over(left.run(**options, also=[left.critic]), until)
    again.over(again.run(**options, also=[again.critic]))
    assert same(again.critic.state_dict(), whole.critic.state_dict())
    assert same(again.generator.state_dict(), whole.generator.state_dict())


def test_a_critic_in_also_is_rewound_and_never_pruned() -> None:
    pair = Pair()
    run = pair.over(pair.run(technique="weight-rewinding", retrain_epochs=3, also=[pair.critic]))
    for level in range(1, len(run.levels)):
        assert same(pair.critics[T + 3 * (level - 1)], pair.critics[T - 3])
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
    pair = Pair()
    for thing in (pair.optimizers[1], pair.schedulers[1]):
        with pytest.raises(
            InputError, match=f"rates of {type(thing).__name__} in also would not be rewound; give it in the lists of "
        ):
            rewound.epochs(
                T, pair.generator, pair.optimizers[0], pair.schedulers[0], compression=2, also=[pair.critic, thing]
            )
