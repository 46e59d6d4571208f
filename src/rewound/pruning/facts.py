"""What a pruning took away, for rules that draw learning rates by it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rewound.pruning.mask import Mask
from rewound.technique import Facts


@torch.no_grad()
def facts_of(weights: Mapping[str, Tensor], before: Mask | None, mask: Mask) -> Facts:
    """What a pruning took away of all prunable weights, those that are skipped included."""
    whole = sum(float(w.double().square().sum()) for w in weights.values())
    lost = sum(float((weights[name] * ~kept).double().square().sum()) for name, kept in mask.items())
    alive, total = before.kept if before is not None else mask.total, sum(w.numel() for w in weights.values())
    return Facts((lost / whole) ** 0.5 if whole else 0.0, (alive - mask.kept) / total)
