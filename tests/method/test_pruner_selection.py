"""What a pruner selects: parameters by kind and by name, at least the floor of each, and from what a mask has left."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rewound import InputError, Mask, Pruner
from rewound.method.pruner import SCOPES, SCORES
from rewound.method.pruning.cutting import kept_count
from rewound.method.pruning.prunable import prunable_weights
from weights_to_prune import WEIGHTS, as_lists, named, pruned, three_layers

# only, skip, floor


@pytest.mark.parametrize(
    ("only", "skip", "names"),
    [
        ((), (), ["0.weight", "1.weight", "2.weight"]),
        (("0.*", "2.*"), (), ["0.weight", "2.weight"]),
        ((), ("0.*",), ["1.weight", "2.weight"]),
        (("[01].weight",), ("1.*",), ["0.weight"]),
        (["1.*"], [], ["1.weight"]),
    ],
)
def test_only_and_skip_choose_by_name(only: tuple[str, ...], skip: tuple[str, ...], names: list[str]) -> None:
    mask = Pruner(only=only, skip=skip)(three_layers(), 0.5)
    assert list(mask) == names
    assert mask.kept == kept_count(100 * len(names), 0.5)


@pytest.mark.parametrize("field", ["only", "skip"])
def test_one_pattern_is_still_a_tuple(field: str) -> None:
    with pytest.raises(InputError, match=rf"{field} takes a tuple of name patterns, not '1\.\*'; write \('1\.\*',\)"):
        Pruner(**{field: "1.*"})


def test_a_tensor_keeps_at_least_the_floor() -> None:
    model = three_layers()
    with torch.no_grad():
        model[0].weight.mul_(0.001)
        model[1].weight.mul_(0.1)
    mask = Pruner(floor=0.05)(model, 0.3)
    assert mask.kept == kept_count(300, 0.3)
    assert int(mask["0.weight"].sum()) == 5
    weight = model[0].weight.detach().abs()
    assert weight[mask["0.weight"]].min() > weight[~mask["0.weight"]].max()  # its five largest


def test_a_floor_of_numpys_is_pythons() -> None:
    assert json.dumps(asdict(Pruner(floor=np.float32(0.25)))) == json.dumps(asdict(Pruner(floor=0.25)))  # type: ignore[arg-type]


@pytest.mark.parametrize("floor", [1e-9, 1e-3, 0.1])
def test_the_lowest_floor_keeps_the_largest_weight_of_each_tensor(floor: float) -> None:
    weights = {"small": torch.tensor([[0.1, 0.3], [0.2, 0.0]]), "large": torch.tensor([[5.0, 4.0], [3.0, 2.0]])}
    mask = Pruner(floor=floor).prune(weights, 0.4)
    assert as_lists(mask) == {"small": [[False, True], [False, False]], "large": [[True, True], [False, False]]}


@given(WEIGHTS, st.floats(0.01, 0.4), st.floats(0.4, 1.0))
@settings(deadline=None, max_examples=100)
def test_the_floor_holds_and_the_count_does_not_change(weights: list[np.ndarray], floor: float, density: float) -> None:
    tensors = named(weights)
    least = {name: math.ceil(round(floor * tensor.numel(), 6)) for name, tensor in tensors.items()}
    total = sum(tensor.numel() for tensor in tensors.values())
    pruner = Pruner(floor=floor)
    if sum(least.values()) > kept_count(total, density):
        with pytest.raises(InputError, match="lower floor"):
            pruned(pruner, tensors, density)
    else:
        mask = pruned(pruner, tensors, density)
        assert mask.kept == kept_count(total, density)
        assert all(int(mask[name].sum()) >= least[name] for name in tensors)


def test_a_floor_above_the_density_is_an_error() -> None:
    with pytest.raises(InputError, match=r"floor 0\.5 keeps 150 weights, but density 0\.2 only 60; lower floor"):
        Pruner(floor=0.5)(three_layers(), 0.2)


def test_a_floor_does_not_bring_pruned_weights_back() -> None:
    model = three_layers()
    before = Mask({f"{i}.weight": torch.full((10, 10), i > 0) for i in range(3)})
    before["0.weight"][0, 0] = True
    before = Mask(dict(before))
    mask = Pruner(floor=0.1)(model, 0.5, before)
    assert mask["0.weight"].nonzero().tolist() == [[0, 0]]
    assert mask.kept == kept_count(300, 0.5)


def test_equal_weights_under_a_floor_go_by_index_too() -> None:
    weights = {"a": torch.full((2, 5), 0.1), "b": torch.ones(2, 5)}
    mask = Pruner(floor=0.2).prune(weights, 0.5)
    assert mask["a"].tolist() == [[False] * 5, [False, False, False, True, True]]
    assert mask["b"].tolist() == [[False, False, True, True, True], [True] * 5]


@pytest.mark.parametrize("floor", [-0.1, 1.0, 2.0, float("nan")])
def test_a_floor_is_a_fraction(floor: float) -> None:
    with pytest.raises(InputError, match="floor must be at least 0 and below 1, not"):
        Pruner(floor=floor)


# A mask to go on from


def test_a_larger_density_than_the_mask_has_is_an_error() -> None:
    model = three_layers()
    mask = Pruner()(model, 0.2)
    with pytest.raises(InputError, match=r"density 0\.5 keeps 150 weights, but only 60 are left: a mask only shrinks"):
        Pruner()(model, 0.5, mask)


def test_the_same_density_again_changes_nothing() -> None:
    model = three_layers()
    mask = Pruner()(model, 0.2)
    assert as_lists(Pruner()(model, 0.2, mask)) == as_lists(mask)


def test_a_tensor_that_the_mask_does_not_name_is_dense() -> None:
    model = three_layers()
    first = Pruner(only=("0.*",))(model, 0.5)
    mask = Pruner()(model, 0.4, first)
    assert mask.kept == kept_count(300, 0.4)
    assert bool((mask["0.weight"] <= first["0.weight"]).all())


def test_what_was_pruned_and_is_not_selected_stays_pruned() -> None:
    model = three_layers()
    first = Pruner()(model, 0.5)
    mask = Pruner(skip=("0.*",))(model, 0.2, first)
    assert torch.equal(mask["0.weight"], first["0.weight"])
    assert int(mask["1.weight"].sum() + mask["2.weight"].sum()) == kept_count(200, 0.2)


@pytest.mark.parametrize("other", [{"x.weight": (10, 10)}, {"0.weight": (5, 10)}])
def test_a_mask_of_another_model_is_an_error(other: dict[str, tuple[int, int]]) -> None:
    mask = Mask({name: torch.ones(shape, dtype=torch.bool) for name, shape in other.items()})
    with pytest.raises(InputError, match=f"this mask is for another model: .* {next(iter(other))}"):
        Pruner()(three_layers(), 0.5, mask)


# Which parameters


class Projection(nn.Module):
    """As transformers' Conv1D: a linear layer whose weight is stored input first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.bias = nn.Parameter(torch.zeros(6))


class Everything(nn.Module):
    """One of each kind of parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.pointwise = nn.Conv2d(4, 4, 1)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4)
        self.batch_norm = nn.BatchNorm2d(4)
        self.instance_norm = nn.InstanceNorm2d(4, affine=True)
        self.group_norm = nn.GroupNorm(2, 4)
        self.layer_norm = nn.LayerNorm((4, 5))  # its weight has two dimensions
        self.rms_norm = nn.RMSNorm((4, 5))
        self.projection = Projection()
        self.attention = nn.MultiheadAttention(4, 2)  # in_proj_weight: query, key and value in one
        self.recurrent = nn.LSTM(3, 4)
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.row = nn.Parameter(torch.randn(1, 9))  # a vector in two dimensions
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.table = nn.Parameter(torch.ones(3, 3, dtype=torch.int64), requires_grad=False)
        self.phase = nn.Parameter(torch.ones(3, 3, dtype=torch.complex64))


PRUNABLE = [
    "conv.weight",
    "pointwise.weight",
    "depthwise.weight",
    "projection.weight",
    "attention.in_proj_weight",
    "attention.out_proj.weight",
    "recurrent.weight_ih_l0",
    "recurrent.weight_hh_l0",
    "embedding.weight",
]


def test_the_prunable_set_of_any_module() -> None:
    assert sorted(prunable_weights(Everything())) == sorted(PRUNABLE)


def test_any_module_can_be_pruned_and_masked() -> None:
    model = Everything()
    mask = Pruner()(model, 0.5)
    assert mask.kept == kept_count(mask.total, 0.5)
    mask.apply(model)
    zeros = sum(int((weight == 0).sum()) for weight in prunable_weights(model).values())
    assert zeros == mask.total - mask.kept


# Counts known before anything is trained


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("density", [1.0, 0.8, 0.8**3, 0.2097, 0.1074])
@pytest.mark.filterwarnings("ignore:less than 1%")
def test_the_count_is_known_from_the_shapes(scope: str, score: str, density: float) -> None:
    model = Everything()
    pruner = Pruner(score=score, scope=scope, skip=("attention.*",))
    shapes = {name: tuple(weight.shape) for name, weight in prunable_weights(model).items()}
    assert pruner.kept(shapes, density) == pruner(model, density).kept
