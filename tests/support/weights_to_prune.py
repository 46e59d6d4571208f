"""Weights to prune: arbitrary ones with many ties, a network of three layers, and what is left of them as lists."""

import warnings

import hypothesis.extra.numpy as arrays
import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from rewound import Mask, Pruner

# Few values, so that most of them are equal to another; zeros among them.
FEW = st.sampled_from([0.0, 0.0, 0.5, -0.5, 1.0, -1.0, 2.0])
SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 6))
MANY_TIES = arrays.arrays(np.float32, SHAPES, elements=FEW)
ANY_FLOATS = arrays.arrays(np.float32, SHAPES, elements=st.floats(-100, 100, width=32))
WEIGHTS = st.lists(st.one_of(MANY_TIES, ANY_FLOATS), min_size=1, max_size=3)


def named(weights: list[np.ndarray]) -> dict[str, Tensor]:
    return {f"w{index}": torch.from_numpy(array.copy()) for index, array in enumerate(weights)}


def three_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 10))


def pruned(pruner: Pruner, weights: dict[str, Tensor], density: float, mask: Mask | None = None, seed: int = 0) -> Mask:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # tensors of a few weights are soon below 1%
        return pruner.prune(weights, density, mask, seed=seed)


def as_lists(mask: Mask) -> dict[str, list[list[bool]]]:
    return {name: kept.tolist() for name, kept in mask.items()}
