"""Compression of the weights that are pruned, and of the whole network."""

import pytest
import torch
from torch import nn

from rewound.pruning.counts import Counts, counts_of
from rewound.pruning.mask import Mask


def test_biases_and_normalisation_count_for_the_network_and_buffers_do_not() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))
    mask = Mask({"0.weight": torch.arange(100).reshape(10, 10) < 25})
    assert counts_of(model, mask) == Counts(kept=25, selected=100, network=130)
    assert str(counts_of(model, mask)) == "4.00x of the pruned weights, 2.36x of the whole network"


def test_a_tied_weight_counts_once_even_if_it_is_masked_under_two_names() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    first, second = torch.zeros(5, 4, dtype=torch.bool), torch.zeros(5, 4, dtype=torch.bool)
    first[:2], second[1:] = True, True
    assert counts_of(model, Mask({"embed.weight": first})) == Counts(kept=8, selected=20, network=20)
    both = Mask({"embed.weight": first, "head.weight": second})
    assert counts_of(model, both) == Counts(kept=4, selected=20, network=20)


def test_a_small_part_is_said_loudly() -> None:
    Counts(kept=10, selected=50, network=100).warn_of_small_part()
    with pytest.warns(UserWarning, match=r"only 5\.0% of the network's 2,000 parameters .* at most 1\.05x smaller"):
        Counts(kept=100, selected=100, network=2000).warn_of_small_part()
