"""Whether a small network equals the masked one, as seen by running both: where it draws, or rounds."""

import torch
from torch import Tensor, nn

from rewound.method.structure.slimming import slim
from rewound.method.structure.tracing import units


class Sampled(nn.Module):
    """A variational autoencoder, which draws in evaluation mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean, self.spread = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.decode = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encode(x).relu()
        mean = self.mean(hidden)
        found: Tensor = self.decode(mean + torch.randn_like(mean) * self.spread(hidden).exp())
        return found


def test_a_network_that_draws_becomes_small() -> None:
    model, example = Sampled(), torch.randn(3, 6)
    found = units(model, (example,))
    (hidden,) = (group for group in found if len(group) == 8)
    assert slim(model, found.mask_without(hidden.units[::2]), (example,)).model.encode.out_features == 4


class Short(nn.Module):
    """Sums in float32, whatever type it has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 301), nn.Linear(301, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.linear(x, self.first.weight, self.first.bias).relu().float()
        return nn.functional.linear(hidden, self.last.weight.float(), self.last.bias.float())


def test_a_network_that_computes_in_float32_becomes_small() -> None:
    torch.manual_seed(0)
    model, example = Short().double(), torch.randn(8, 6).double()
    (hidden,) = units(model, (example,))
    assert (
        slim(model, units(model, (example,)).mask_without(hidden.units[1::2]), (example,)).model.first.out_features
        == 151
    )
