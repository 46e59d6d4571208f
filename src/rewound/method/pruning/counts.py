"""How much smaller a network is: compression counts the weights that are pruned, and a network has others, too.

Biases, normalisation, what `skip` names and what is frozen stay as they are. So 4x of few weights may be 1.04x of the
whole network. Parameters count, tied ones once; buffers do not.
"""

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rewound.foundations.errors import warn
from rewound.method.pruning.cutting import kept_count
from rewound.method.pruning.mask import Mask, plain_parameters
from rewound.method.technique import Facts


class Counts(NamedTuple):
    """How many weights a mask keeps, of how many that may be pruned, and how many parameters the whole network has.

    >>> counts = Counts(kept=25, selected=100, network=2000)
    >>> counts.compression, f"{counts.network_compression:.2f}"
    (4.0, '1.04')
    >>> str(counts)
    '4.00x of the pruned weights, 1.04x of the whole network'
    """

    kept: int
    selected: int
    network: int
    gone_along: int = 0
    """How many parameters went with the weights without being counted: biases and normalisation of whole units."""

    @property
    def compression(self) -> float:
        """Of the weights that may be pruned: the reciprocal of their density."""
        return _ratio(self.selected, self.kept)

    @property
    def network_compression(self) -> float:
        """Of all parameters of the network."""
        return _ratio(self.network, self.left)

    @property
    def left(self) -> int:
        """How many parameters the network still has."""
        return self.network - self.selected + self.kept - self.gone_along

    def at(self, density: float) -> "Counts":
        """The same weights of the same network, pruned to `density`; what would go with them is not known.

        >>> Counts(kept=100, selected=100, network=2000).at(0.25)
        Counts(kept=25, selected=100, network=2000, gone_along=0)
        """
        return self._replace(kept=kept_count(self.selected, density), gone_along=0)

    def facts(self, mask: Mask) -> dict[str, dict[str, int]]:
        """What a ticket says of them where its mask is for other parameters, too."""
        return {} if mask.total == self.selected else {"counts": {"weights_kept": self.kept, "weights": self.selected}}

    def density(self, asked: float) -> float:
        """What fraction of the weights is left; that asked for, if no other number of weights could meet it.

        >>> Counts(kept=115, selected=144, network=200).density(0.8), Counts(25, 100, 200).density(0.3)
        (0.8, 0.25)
        """
        met = not self.selected or self.kept == kept_count(self.selected, asked)
        return asked if met else self.kept / self.selected

    def __str__(self) -> str:
        return f"{self.compression:.2f}x of the pruned weights, {self.network_compression:.2f}x of the whole network"

    def warn_of_small_part(self) -> None:
        """Warn if less than a quarter of the network is pruned: whatever its compression, the network loses no more."""
        if 4 * self.selected < self.network:
            most, part = _ratio(self.network, self.network - self.selected), self.selected / self.network
            warn(
                f"only {part:.1%} of the network's {self.network:,} parameters are selected for pruning: however far "
                f"they are pruned, the whole network gets at most {most:.2f}x smaller; unfreeze or select more weights "
                "if that is too little"
            )


def counts_of(model: nn.Module, mask: Mask, counted: Collection[str] | None = None) -> Counts:
    """The counts of a model under a mask, whatever the model is wrapped in.

    `counted` are the weights that density counts (`Pruner.counted`), where the mask has others, too.

    >>> import torch
    >>> mask = Mask({"weight": torch.tensor([[True, True], [False, False]]), "bias": torch.tensor([True, False])})
    >>> counts_of(nn.Linear(2, 2), mask, ["weight"])
    Counts(kept=2, selected=4, network=6, gone_along=1)
    """
    parameters = plain_parameters(model, tied=True)
    masks: dict[nn.Parameter, Tensor] = {}
    for name, kept in mask.items():  # a tied weight may be masked under several of its names
        weight = parameters[name]
        masks[weight] = kept & masks[weight].to(kept.device) if weight in masks else kept
    chosen = {parameters[name] for name in mask if counted is None or name in counted}
    kept_in_all = sum(int(kept.count_nonzero()) for weight, kept in masks.items() if weight in chosen)
    selected = sum(kept.numel() for weight, kept in masks.items() if weight in chosen)
    gone_along = sum(int((~kept).count_nonzero()) for weight, kept in masks.items() if weight not in chosen)
    return Counts(kept_in_all, selected, parameter_count(model), gone_along)


def parameter_count(model: nn.Module) -> int:
    """How many parameters a model has, trained or frozen; tied ones once.

    >>> parameter_count(nn.BatchNorm1d(4))
    8
    """
    return sum(parameter.numel() for parameter in model.parameters())


def _ratio(all_of_them: int, left: int) -> float:
    return all_of_them / left if left else math.inf if all_of_them else 1.0


@torch.no_grad()
def facts_of(weights: Mapping[str, Tensor], before: Mask | None, mask: Mask) -> Facts:
    """What a pruning took away of all prunable weights, those that are skipped included."""
    whole = sum(_squares(w) for w in weights.values())
    # A pruner's mask is on the CPU, wherever the weights are.
    lost = sum(_squares(weights[name].masked_fill(kept.to(weights[name].device), 0)) for name, kept in mask.items())
    alive, total = before.kept if before is not None else mask.total, sum(w.numel() for w in weights.values())
    return Facts((lost / whole) ** 0.5 if whole else 0.0, (alive - mask.kept) / total)


def _squares(weight: Tensor) -> float:
    return float(weight.double().square().sum())
