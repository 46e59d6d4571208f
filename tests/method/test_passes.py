"""Whether a small network trains as the masked one does: outputs of training mode, and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rewound import InputError
from rewound.method.structure.slimming import Slim, slim
from rewound.method.structure.tracing import units


def halved(model: nn.Module, example: Tensor, traced: nn.Module | None = None) -> Slim:
    """Without half of the units of what was traced: a network that is the same in evaluation mode, if one is given."""
    found = units(traced or model, (example,))
    mask = found.mask_without([unit for group in found for unit in group.units[::2]])
    return slim(model, mask, (example,), groups=found)


class Auxiliary(nn.Module):
    """A second head, in training only."""

    def __init__(self, used: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.c, self.used = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4), used

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).relu()
        return self.b(hidden) + self.c(hidden) if self.training and self.used else self.b(hidden)


def test_a_part_that_only_training_uses_is_refused() -> None:
    model, without, example = Auxiliary(), Auxiliary(used=False), torch.randn(2, 6)
    state = torch.get_rng_state()
    with pytest.raises(
        InputError, match=r"it does not run in training mode .* in the network of the class Aux"
    ) as told:
        halved(model, example, without)
    assert "reads units that are gone); keep those units with skip=" in str(told.value)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn from the caller's generator"


class Returned(nn.Module):
    """Also returns what is inside, in training only; `how` says what of it, and `between` is called on the hidden."""

    def __init__(self, how: str, between: Any = None) -> None:
        super().__init__()
        self.a, self.b, self.how, self.between = nn.Linear(6, 8), nn.Linear(8, 4), how, between or nn.Identity()

    def forward(self, x: Tensor) -> object:
        hidden = self.between(self.a(x)).relu()
        if not self.training:
            return self.b(hidden)
        return self.b(hidden), {"units": hidden, "mean": hidden.mean(1), "sum": hidden.sum(1)}[self.how]


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.1, self.training)


class Sensitive(nn.Module):
    """What the last digits of the weights change by more than a millionth of a millionth."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-6 * (1e12 * x).sin()


def test_what_rounding_changes_much_hides_no_larger_difference() -> None:
    torch.manual_seed(0)
    with pytest.raises(InputError, match="its outputs differ in training mode"):
        halved(Returned("mean", Sensitive()), torch.randn(2, 6), Returned("sum"))
    assert halved(Returned("sum", Sensitive()), torch.randn(2, 6)).model.a.out_features == 4


class Heads(nn.Module):
    """Attention between the rows, of four heads of two."""

    def forward(self, x: Tensor) -> Tensor:
        part, probability = x.view(x.shape[0], -1, 2).transpose(0, 1), 0.5 if self.training else 0.0
        found = nn.functional.scaled_dot_product_attention(part, part, part, None, probability)
        return found.transpose(0, 1).reshape(x.shape)


class Steps(nn.Module):
    """The rows as steps of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(8, 8, 2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)[0]
        return found


BETWEEN: dict[str, Callable[[], Any]] = {
    "nothing": nn.Identity,
    "dropout": lambda: nn.Dropout(0.1),
    "dropout of channels": lambda: nn.Sequential(nn.Unflatten(1, (-1, 1)), nn.Dropout1d(0.5), nn.Flatten()),
    "dropout in place": lambda: nn.Dropout(0.1, inplace=True),
    "a function": Dropped,
    "attention": Heads,
    "a recurrent layer": Steps,
    "normalisation": lambda: nn.BatchNorm1d(8),
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", BETWEEN)
def test_what_only_training_returns_is_compared(name: str, rows: int) -> None:
    traced = Returned("sum", BETWEEN[name]())
    torch.manual_seed(0)  # else, now and then all units are silent on one row
    example = torch.randn(rows, 6)
    for how, says in (("units", "have other shapes"), ("mean", "differ")):
        with pytest.raises(InputError, match=f"its outputs {says} in training mode: .* skip="):
            halved(Returned(how, BETWEEN[name]()), example, traced)
    assert halved(Returned("sum", BETWEEN[name]()), example).model.a.out_features == 4


class StochasticDepth(nn.Module):
    """Leaves a residual branch out of some rows in training, as timm's DropPath."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x) * (torch.rand(len(x), 1) < 0.5) if self.training else x + self.branch(x)


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) if self.training else x


def test_draws_that_do_not_depend_on_units_hide_no_difference() -> None:
    example = torch.randn(4, 6)
    assert halved(Returned("sum", StochasticDepth()), example).model.a.out_features == 4
    with pytest.raises(InputError, match="its outputs differ in training mode"):
        halved(Returned("mean", StochasticDepth()), example, Returned("sum", StochasticDepth()))
    assert halved(Returned("sum", Noisy()), example).model.a.out_features == 4  # fewer units, and other noise


def test_batches_without_variance_do_not_count_as_a_difference() -> None:
    layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())]
    almost_equal = 1 + 1e-12 * torch.randn(2, 64).double()  # each BatchNorm magnifies what differs 300 times
    assert halved(nn.Sequential(*layers, nn.Linear(64, 2)).double(), almost_equal).model[0].out_features == 32


class Shared(torch.autograd.Function):
    """Divides a gradient by how many units there are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.shape[-1]


class Straight(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Passed(nn.Module):
    """Passes what it is given through an autograd function."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.function.apply(x)  # type: ignore[no-untyped-call]
        return found


class Learned(nn.Module):
    """Divides by a learned number, whose gradient is divided by the root of how many units there are (LSQ)."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        part = self.step * x.shape[-1] ** -0.5
        return x / ((self.step - part).detach() + part)


class Rooted(nn.Module):
    """Its gradient at zero, where a unit is gone, is no number."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu().sqrt()


def test_gradients_that_depend_on_the_number_of_units_are_refused() -> None:
    def network(between: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), between, nn.Linear(8, 4))

    example = torch.randn(3, 6)
    hooked = nn.Identity()
    hooked.register_full_backward_hook(lambda module, given, put_out: (given[0] * put_out[0].shape[-1],))
    for between in (Passed(Shared), hooked, Learned()):
        with pytest.raises(InputError, match=r"its gradients differ in training mode: a hook or .* skip="):
            halved(network(between), example, network(nn.Identity()))
    for between in (Passed(Straight), Rooted()):
        assert halved(network(between), example).model[0].out_features == 4


class Held(nn.Module):
    """Keeps a mean over units, or over what they give: as a loss, in a buffer, or as a number for later passes."""

    def __init__(self, how: str, over: str) -> None:
        super().__init__()
        self.a, self.b, self.how, self.over, self.scale = nn.Linear(6, 8), nn.Linear(8, 4), how, over, 1.0
        self.register_buffer("running", torch.ones(()))
        self.losses: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).relu()
        given: Tensor = self.b(hidden) / self.scale / self.running
        if self.training:
            mean = hidden.abs().mean() if self.over == "units" else hidden.abs().sum() / len(x)
            if self.how == "loss":
                self.losses["sparsity"] = mean
            elif self.how == "buffer":
                self.running = 0.9 * self.running + 0.1 * mean.detach()
            else:
                self.scale = 0.9 * self.scale + 0.1 * mean.item()
        return given


@pytest.mark.parametrize("how", ["loss", "buffer", "number"])
def test_what_training_keeps_is_compared(how: str) -> None:
    with pytest.raises(InputError, match="or keeps as a loss or for later passes"):
        halved(Held(how, "units"), torch.randn(2, 6), Held(how, "rows"))
    assert halved(Held(how, "rows"), torch.randn(2, 6)).model.a.out_features == 4


def test_gradients_of_sparse_embeddings_are_compared() -> None:
    rows = nn.Embedding(11, 6, sparse=True)
    model = nn.Sequential(rows, Passed(Straight), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    assert halved(model, torch.arange(5)).model[2].out_features == 4


class Scaled(nn.Module):
    """Reads in training alone how many hidden units it has, and a number that is as large, which counts others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.width, self.steps = 8, 8

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.training:
            hidden = hidden * (hidden.shape[-1] / self.width)
        found: Tensor = self.last(hidden)
        return found


def test_a_count_that_only_training_reads_is_written_anew() -> None:
    model, example = Scaled(), (torch.randn(5, 4),)
    found = units(model, example)
    small = slim(model, found.mask_without(found.groups[0].units[:3]), example).model
    assert (small.width, small.steps) == (5, 8)
