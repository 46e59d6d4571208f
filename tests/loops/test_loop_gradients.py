"""What does not train is not pruned (law 11): weights that no gradient reaches in the dense run of an own loop."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam
from torch.optim.optimizer import Optimizer
from torch.utils.checkpoint import checkpoint

import rewound
from rewound import Epochs, InputError, Mask, Pruner
from rewound.loops import progress as progress_of_loops
from rewound.loops.progress import Progress
from training_loops import made_by_the_version_before

T = 3


class Branching(nn.Module):
    """A layer that is called, and one that is called only when asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Linear(6, 16)
        self.head = nn.Linear(16, 3)
        self.spare = nn.Linear(32, 32)

    def forward(self, x: Tensor, *, spare: bool = False) -> Tensor:
        extra = self.spare(torch.ones(1, 32)).sum() if spare else 0
        return self.head(self.used(x).relu()) + extra  # type: ignore[no-any-return]


X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
Step = Callable[[nn.Module, Optimizer, int], None]


def plainly(model: nn.Module, optimizer: Optimizer, epoch: int) -> None:
    optimizer.zero_grad()
    model(X).square().mean().backward()
    optimizer.step()


def over(run: Epochs, model: nn.Module, optimizer: Optimizer, step: Step = plainly, until: int | None = None) -> Epochs:
    for epoch in run:
        step(model, optimizer, epoch)
        if epoch == until:
            break
    return run


def started(model: nn.Module, optimizer: Optimizer, said: list[str] | None = None, **options: object) -> Epochs:
    say = (lambda line: None) if said is None else said.append
    return rewound.epochs(T, model, optimizer, **{"compression": 2, "say": say, **options})  # type: ignore[arg-type]


def by_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.01)


def test_an_uncalled_layer_is_neither_pruned_nor_counted() -> None:
    model, said = Branching(), list[str]()
    before = model.spare.weight.detach().clone()
    run = over(started(model, optimizer := by_sgd(model), said), model, optimizer)
    assert run.mask is not None
    assert set(run.mask) == {"used.weight", "head.weight"}
    assert run.mask.kept == Pruner().kept({"used": (16, 6), "head": (3, 16)}, 1 / 2)
    assert torch.equal(model.spare.weight, before)
    line = "not pruned and not counted, since no gradient has reached them in the dense run: spare.weight"
    assert said.count(line) == 1


def with_closure(model: nn.Module, optimizer: Optimizer, epoch: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(X).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


class Clearing(SGD):
    """An optimizer that lets go of the gradients in its step."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = super().step(closure)
        self.zero_grad()
        return loss


def accumulating(model: nn.Module, optimizer: Optimizer, epoch: int) -> None:
    for part in X.split(4):
        model(part).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def by_hand(model: nn.Module, optimizer: Optimizer, epoch: int) -> None:
    parameters = [p for name, p in model.named_parameters() if "spare" not in name]
    for parameter, gradient in zip(parameters, torch.autograd.grad(model(X).square().mean(), parameters), strict=True):
        parameter.grad = gradient
    optimizer.step()


def checkpointed(model: nn.Module, optimizer: Optimizer, epoch: int) -> None:
    optimizer.zero_grad()
    checkpoint(model, X, use_reentrant=False).square().mean().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def to_zero(model: nn.Module, optimizer: Optimizer, epoch: int) -> None:
    """All gradients are there, and zero."""
    optimizer.zero_grad()
    (model(X) * 0).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("step", "made"),
    [
        (plainly, by_sgd),
        (with_closure, by_sgd),
        (with_closure, lambda model: LBFGS(model.parameters(), lr=0.01, max_iter=2)),
        (plainly, lambda model: Clearing(model.parameters(), lr=0.01)),
        (with_closure, lambda model: Clearing(model.parameters(), lr=0.01)),
        (accumulating, by_sgd),
        (by_hand, by_sgd),
        (checkpointed, by_sgd),
        (to_zero, by_sgd),
        (plainly, lambda model: Adam(model.parameters(), lr=0.01)),
    ],
    ids=[
        "plain",
        "closure",
        "lbfgs",
        "clears",
        "closure-clears",
        "accumulated",
        "manual",
        "checkpoint",
        "zero",
        "adam",
    ],
)
def test_a_gradient_is_seen_however_it_comes(step: Step, made: Callable[[nn.Module], Optimizer]) -> None:
    model = Branching()
    run = over(started(model, optimizer := made(model)), model, optimizer, step)
    assert run.mask is not None
    assert set(run.mask) == {"used.weight", "head.weight"}


def test_a_sparse_gradient_is_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(20, 4, sparse=True, mode="sum"), nn.Linear(4, 16))
    optimizer = SGD(model.parameters(), lr=0.01)

    def step(model: nn.Module, optimizer: Optimizer, epoch: int) -> None:
        optimizer.zero_grad()
        model(torch.tensor([[1, 2], [3, 4]])).square().mean().backward()
        optimizer.step()

    run = over(started(model, optimizer), model, optimizer, step)
    assert run.mask is not None
    assert set(run.mask) == {"0.weight", "1.weight"}


def early(model: nn.Module, optimizer: Optimizer, epoch: int) -> None:
    """The spare layer is called in the first epoch alone."""
    optimizer.zero_grad()
    model(X, spare=epoch == 0).square().mean().backward()
    optimizer.step()


def test_a_resumed_run_knows_what_was_reached_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewound.loops.iteration.SAVE_SECONDS", 0.0)
    for seen, step in ((True, early), (False, plainly)):
        folder = tmp_path / str(seen)
        model = Branching()
        over(started(model, optimizer := by_sgd(model), checkpoint=folder), model, optimizer, step, until=1)
        model = Branching()
        run = over(started(model, optimizer := by_sgd(model), checkpoint=folder), model, optimizer, step)
        assert run.mask is not None
        assert ("spare.weight" in run.mask) == seen


def test_a_run_begun_by_an_earlier_version_goes_on_as_it_would_have(tmp_path: Path) -> None:
    model = Branching()
    run = started(model, optimizer := by_sgd(model), checkpoint=tmp_path)
    over(run, model, optimizer, until=T)  # the first epoch after the first pruning
    made_by_the_version_before(tmp_path)
    model = Branching()
    again = over(started(model, optimizer := by_sgd(model), checkpoint=tmp_path), model, optimizer)
    assert again.mask is not None
    assert "spare.weight" in again.mask


def test_a_later_level_keeps_to_what_the_first_pruned() -> None:
    model = Branching()
    run = started(model, optimizer := by_sgd(model), compression=3, retrain_epochs=1)

    def late(model: nn.Module, optimizer: Optimizer, epoch: int) -> None:
        optimizer.zero_grad()
        model(X, spare=epoch >= T).square().mean().backward()
        optimizer.step()

    over(run, model, optimizer, late)
    assert run.mask is not None
    assert "spare.weight" not in run.mask
    assert run.mask.density == pytest.approx(1 / 3, abs=0.01)


@pytest.mark.filterwarnings("ignore:only 11.8% of the network")  # most of it is `spare`
def test_an_adopted_network_is_looked_at_in_its_first_level() -> None:
    model = Branching()
    run = started(model, optimizer := by_sgd(model), adopt=True, scheduler=rewound.Schedule.constant(T, 0.01))
    with pytest.warns(UserWarning, match=r"no gradient has reached spare.weight in level 1: .*skip=\('spare.weight'"):
        over(run, model, optimizer)
    assert run.mask is not None
    assert "spare.weight" in run.mask  # every level of a run counts the same weights
    chosen = Pruner(skip=("spare.weight",))
    run = started(
        model, optimizer := by_sgd(model), adopt=True, scheduler=rewound.Schedule.constant(T, 0.01), pruner=chosen
    )
    over(run, model, optimizer)


def test_a_loop_that_trains_another_part_is_told() -> None:
    model = Branching()
    run = started(model, optimizer := by_sgd(model), pruner=Pruner(only=("spare.*",)))
    with pytest.raises(InputError, match=r"any of the weights to prune in the dense run \(spare.weight\); give"):
        over(run, model, optimizer)


class Guessing(Optimizer):
    """An optimizer without gradients: a random step, kept if it is not worse."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=self.param_groups[0]["lr"])


def test_an_optimizer_without_gradients_trains_all_that_it_has() -> None:
    model = Branching()
    optimizer = Guessing(list(model.parameters()))
    run = over(started(model, optimizer), model, optimizer, lambda model, optimizer, epoch: optimizer.step())
    assert run.mask is not None
    assert len(run.mask) == 3


def test_what_one_rank_has_reached_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_of_loops.ranks, "gathered", lambda value: [value, {"b"}])
    progress = Progress(gradients={"a"})
    progress.agree()
    assert progress.gradients == {"a", "b"}


def test_what_was_reached_is_kept_with_the_rest() -> None:
    state = Progress(gradients={"b", "a"}, mask=Mask({"a": torch.tensor([True])})).state_dict()
    assert state["gradients"] == ["a", "b"]
    assert Progress.from_state_dict(state).gradients == {"a", "b"}
    del state["gradients"]
    assert Progress.from_state_dict(state).gradients is None
