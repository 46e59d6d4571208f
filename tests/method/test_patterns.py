"""Blocks and N of M, as patterns of unstructured pruning; and density as a fraction of FLOPs."""

from typing import Any

import pytest
import torch
from torch import nn

from rewound import InputError, Mask, Pruner, profile, slim
from rewound.method.structure.tracing import units


def linear(weight: list[list[float]]) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight), bias=False)
    layer.weight.data.copy_(torch.tensor(weight))
    return layer


def test_two_of_every_four_inputs_stay() -> None:
    model = linear([[1, -5, 3, 2, 0, 0, 0, 0], [4, 3, 2, 1, 1, 9, 1, 8]])
    mask = Pruner(pattern="2:4")(model)
    assert mask["weight"].int().tolist() == [[0, 1, 1, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 1, 0, 1]], "the later of equals"
    assert mask == Pruner(pattern="2:4")(model, density=0.5)
    assert Pruner(pattern="1:4")(model, mask=mask)["weight"].int().tolist()[1] == [1, 0, 0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize(("pattern", "density"), [("2:4", 0.5), ("1:8", 0.125), ("3:4", 0.75)])
def test_n_of_m_go_along_the_inputs_of_every_kind_of_layer(pattern: str, density: float) -> None:
    n, m = map(int, pattern.split(":"))
    layers = [nn.Conv2d(16, 4, 3), nn.ConvTranspose2d(16, 4, 3), nn.Linear(16, 4), nn.Conv1d(32, 4, 3, groups=2)]
    for layer, inputs in zip(layers, (1, 0, 1, 1), strict=True):
        pruner = Pruner(pattern=pattern)
        kept = pruner(layer)["weight"]
        rows = kept.movedim(inputs, -1).reshape(-1, m)
        assert rows.sum(1).tolist() == [n] * len(rows)
        assert pruner.kept({"weight": tuple(kept.shape)}, None, model=layer) == kept.sum()
        assert pruner.own_density({"weight": tuple(kept.shape)}, model=layer) == density == float(kept.float().mean())


def test_sparse_tensor_cores_take_the_masks() -> None:
    """Metadata of two bits for each kept weight, packed and unpacked as torch does it for the GPU."""
    from torch.sparse._semi_structured_conversions import (
        sparse_semi_structured_from_dense_cutlass,
        sparse_semi_structured_to_dense_cutlass,
    )

    layer = nn.Linear(64, 32, bias=False).to(torch.float16)
    Pruner(pattern="2:4")(layer).apply(layer)
    values, places = sparse_semi_structured_from_dense_cutlass(layer.weight.detach())
    assert values.shape == (32, 32)
    assert torch.equal(sparse_semi_structured_to_dense_cutlass(values, places), layer.weight)


def test_blocks_go_by_the_mean_of_their_weights() -> None:
    model = linear([[9, 0, 1, 1], [0, 0, 1, 1], [3, 3, 5, 5], [3, 3, 5, 5]])  # means 2.25, 1, 3 and 5
    mask = Pruner(pattern="block 2x2")(model, 0.5)
    assert mask["weight"].int().tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert Pruner(pattern="block 2x2").kept({"weight": (4, 4)}, 0.5) == mask.kept == 8
    further = Pruner(pattern="block 2x2")(model, 0.3, mask)
    assert further["weight"].int().tolist() == [[0] * 4, [0] * 4, [0, 0, 1, 1], [0, 0, 1, 1]]
    rows = Pruner(pattern="block 1x4")(model, 0.5)["weight"]
    assert rows.any(1).tolist() == [False, False, True, True]


def test_blocks_of_convolutions_are_of_their_matrix() -> None:
    layer = nn.Conv2d(2, 4, 3)
    nn.init.constant_(layer.weight, 1.0)
    layer.weight.data[2:, 1] = 0.5
    mask = Pruner(pattern="block 2x9")(layer, 0.75)["weight"]
    assert not mask[2:, 1].any(), "two filters of one input channel"
    assert mask.sum() == 3 * 18


def test_what_a_pattern_does_not_divide_is_named_and_left_out() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    with pytest.warns(
        UserWarning, match=r"pattern '2:4' does not divide 0\.weight, which is neither pruned nor counted"
    ):
        mask = Pruner(pattern="2:4")(model)
    assert list(mask) == ["2.weight"]
    assert Pruner(pattern="2:4").selected(["0.weight", "2.weight"], model) == ["2.weight"]
    three = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 8), nn.Linear(8, 4))
    with pytest.warns(UserWarning, match=r"does not divide 0\.weight, 1\.weight, which are neither pruned nor counted"):
        Pruner(pattern="2:4")(three)
    with pytest.raises(InputError, match=r"pattern 'block 5x5' divides the shape of none of 0\.weight, 2\.weight"):
        Pruner(pattern="block 5x5")(model, 0.5)


@pytest.mark.parametrize(
    ("fields", "density", "message"),
    [
        ({"pattern": "2:4"}, 0.3, "pattern '2:4' says itself how much goes; leave out the density 0.3, or give 0.5"),
        ({"pattern": "4:4"}, None, "pattern '4:4' keeps 4 of every 4 weights; keep at least 1, and fewer than all"),
        ({"pattern": "2:4", "floor": 0.1}, None, "says how much goes of each layer; leave out floor"),
        (
            {"pattern": "block 1x1"},
            0.5,
            "pattern 'block 1x1' has blocks of less than two weights; use",
        ),
        ({"pattern": "block"}, 0.5, "unknown pattern 'block'; did you mean 'block 4x4'"),
        (
            {"pattern": "2 : 4"},
            None,
            "unknown pattern '2 : 4'; did you mean '2:4'? (known: 2:4, block 4x4, filter, unit",
        ),
        ({"pattern": " 1:8"}, None, "unknown pattern ' 1:8'; did you mean '1:8'?"),
        ({"pattern": "weight", "of": "flops"}, 0.5, "density of flops is for whole units, not for pattern 'weight'"),
        ({"pattern": "unit", "of": "bytes"}, 0.5, "unknown measure for `of` 'bytes'"),
    ],
)
def test_patterns_that_cannot_be_are_refused(fields: dict[str, Any], density: float | None, message: str) -> None:
    with pytest.raises(InputError) as caught:
        Pruner(**fields)(nn.Linear(8, 8), density)
    assert message in str(caught.value)


# Density of FLOPs


def test_density_of_flops_counts_the_forward_pass() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 10)
    )
    image = torch.zeros(1, 3, 8, 8)
    dense = profile(model, image)
    groups = units(model, (image,))
    pruner = Pruner(pattern="unit", of="flops")
    for density in (0.8, 0.5, 0.25):
        mask: Mask = pruner(model, density, example_inputs=image, groups=groups)
        small = profile(slim(model, mask, (image,)).model, image)
        largest_unit = dense.total() / 8
        assert dense.total(mask) == small.total(), "what a mask of units saves is what the slim network saves"
        assert density * dense.total() - largest_unit < small.total() <= density * dense.total() + 1
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    target = pruner.kept(shapes, 0.5, model=model, groups=groups, profile=dense)
    assert abs(target - dense.total() / 2) <= 1
    with pytest.raises(InputError, match="of='flops' counts a forward pass; give example_inputs="):
        pruner(model, 0.5, groups=groups)
    with pytest.raises(InputError, match=r"density 0\.001 cannot be reached by removing units: [\d.]+% of the FLOPs"):
        pruner(model, 0.001, groups=groups, example_inputs=image)
