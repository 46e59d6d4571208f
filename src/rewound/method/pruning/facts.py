"""What a pruning took away, for rules that draw learning rates by it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rewound.method.pruning.mask import Mask
from rewound.method.technique import Facts


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
