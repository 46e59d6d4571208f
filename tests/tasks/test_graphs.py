"""Variances of numbers in half precision from their sums are those of torch."""

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from rewound.tasks.fleets.graphs import replace_variances

IMAGES = (16, 4, 32, 32)


def batch_normalisation(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.var_mean(x.float(), [0, 2, 3], correction=0, keepdim=True)


def by_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.var_mean(x.view(2, 8, 4, 32, 32).float(), [1, 3, 4], correction=0, keepdim=True)


def corrected(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.var_mean(x.float(), [0, 2, 3])


def replaced(function: object, x: Tensor) -> GraphModule:
    traced = make_fx(function, select_decomp_table(), "fake")(x)
    replace_variances(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced


def has_variance(traced: GraphModule) -> bool:
    return any(node.target is torch.ops.aten.var_mean.correction for node in traced.graph.nodes)


@pytest.mark.parametrize("function", [batch_normalisation, by_groups, corrected])
@pytest.mark.parametrize("far", [0.0, 100.0])
def test_they_are_torchs(function: object, far: float) -> None:
    x = (far + torch.randn(IMAGES, generator=torch.Generator().manual_seed(0))).bfloat16()
    traced = replaced(function, x)
    assert not has_variance(traced)
    variance, mean = traced(x)
    exact_variance, exact_mean = function(Doubled(x))  # type: ignore[operator]
    assert variance.shape == exact_variance.shape
    # Numbers lie within ten deviations of the first one. Their squares are then at most 100 times the variance, and a
    # sum of n numbers in any order rounds at most n times.
    rounding = 100 * IMAGES[0] * IMAGES[2] * IMAGES[3] * torch.finfo(torch.float32).eps
    assert ((variance - exact_variance).abs() / exact_variance).max() < rounding
    # Beside that, a mean far from 0 is rounded once more.
    allowed = rounding * exact_variance.sqrt() + torch.finfo(torch.float32).eps * exact_mean.abs()
    assert ((mean - exact_mean).abs() < allowed).all()


class Doubled:
    """A tensor whose float() is double precision."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def view(self, *shape: int) -> "Doubled":
        return Doubled(self.x.view(*shape))

    def float(self) -> Tensor:
        return self.x.double()


def test_equal_numbers_have_no_variance() -> None:
    x = torch.full(IMAGES, 3.0, dtype=torch.bfloat16)
    traced = replaced(batch_normalisation, x)
    assert not has_variance(traced)
    variance, mean = traced(x)
    assert variance.unique().tolist() == [0.0]
    assert mean.unique().tolist() == [3.0]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(number: float) -> None:
    x = torch.zeros(IMAGES, dtype=torch.bfloat16)
    x[3, 1, 2, 2] = number
    variance, mean = replaced(batch_normalisation, x)(x)
    assert variance.isnan().flatten().tolist() == [False, True, False, False]
    assert mean.isfinite().flatten().tolist() == [True, False, True, True]


def test_float32_and_few_numbers_stay_torchs() -> None:
    assert has_variance(replaced(batch_normalisation, torch.zeros(IMAGES)))
    assert has_variance(replaced(batch_normalisation, torch.zeros(IMAGES)[:1].bfloat16()))
