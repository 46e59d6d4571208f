"""Which weights go: the authors' count, the ranking against a stable sort, and what counts as prunable."""

import math
import warnings

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rewound import InputError, Mask, Pruner
from rewound.pruner import SCOPES, SCORES, kept_count, prunable_weights

Arrays = dict[str, np.ndarray]

# Few values, so that most of them are equal to another; zeros among them.
FEW = st.sampled_from([0.0, 0.0, 0.5, -0.5, 1.0, -1.0, 2.0])
SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 6))
MANY_TIES = arrays.arrays(np.float32, SHAPES, elements=FEW)
ANY_FLOATS = arrays.arrays(np.float32, SHAPES, elements=st.floats(-100, 100, width=32))
WEIGHTS = st.lists(st.one_of(MANY_TIES, ANY_FLOATS), min_size=1, max_size=3)
DENSITIES = st.one_of(st.floats(0.001, 1.0), st.sampled_from([0.8, 0.8**2, 0.8**3, 0.512, 0.5, 0.25, 0.1, 1.0]))


def named(weights: list[np.ndarray]) -> dict[str, Tensor]:
    return {f"w{index}": torch.from_numpy(array.copy()) for index, array in enumerate(weights)}


def pruned(pruner: Pruner, weights: dict[str, Tensor], density: float, mask: Mask | None = None, seed: int = 0) -> Mask:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # tensors of a few weights are soon below 1%
        return pruner.prune(weights, density, mask, seed=seed)


def as_lists(mask: Mask) -> dict[str, list[list[bool]]]:
    return {name: kept.tolist() for name, kept in mask.items()}


# How many


@given(st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=300, unique=True), st.integers(1, 100))
@settings(deadline=None)
def test_the_count_is_the_authors(values: list[float], percent: int) -> None:
    """Their code prunes |w| < numpy.percentile(|w|, 100 - X), strictly, X being the density in percent."""
    scores = np.array(values, dtype=np.float64)
    kept = int((scores >= np.percentile(scores, 100 - percent)).sum())
    assert abs(kept_count(len(values), percent / 100) - kept) <= _at_a_value(len(values), percent)


def _at_a_value(n: int, percent: int) -> int:
    # Where the percentile falls on a value exactly, numpy's interpolation may land one rounding error above it.
    return int((n - 1) * (100 - percent) % 100 == 0)


@given(st.integers(1, 10**9), st.integers(1, 10_000))
@settings(deadline=None)
def test_the_count_in_whole_numbers(total: int, parts: int) -> None:
    """n - ceil((n-1)(1-density)), without floating point, for densities of four digits."""
    assert kept_count(total, parts / 10_000) == total - -(-(total - 1) * (10_000 - parts) // 10_000)


@given(st.integers(1, 10**8), DENSITIES)
@settings(deadline=None)
def test_at_least_one_weight_stays_and_at_most_all(total: int, density: float) -> None:
    assert 1 <= kept_count(total, density) <= total
    assert kept_count(total, 1.0) == total


@pytest.mark.parametrize("total", [10, 1001, 271_152, 165_000_000])
@pytest.mark.parametrize(("level", "decimal"), [(2, 0.64), (3, 0.512), (4, 0.4096), (10, 0.1073741824)])
def test_a_power_of_the_rate_and_its_decimal_keep_as_many(total: int, level: int, decimal: float) -> None:
    assert kept_count(total, 0.8**level) == kept_count(total, decimal)


def test_counts_of_the_paper() -> None:
    assert kept_count(271_152, 0.8) == 216_921
    assert kept_count(851_760, 0.1074) == 91_479


# Which


def reference(weights: Arrays, density: float, before: Arrays | None, groups: list[list[str]]) -> dict[str, list]:
    """A stable sort over the group: what is gone first, then by magnitude, equals in the order of their index."""
    out: dict[str, list] = {}
    for group in groups:
        flat = np.concatenate([np.abs(weights[name]).ravel() for name in group])
        if before is not None:
            flat = np.where(np.concatenate([before[name].ravel() for name in group]), flat, -1)
        kept = np.zeros(len(flat), dtype=bool)
        count = kept_count(len(flat), density)
        kept[np.argsort(flat, kind="stable")[len(flat) - count :]] = True
        for name in group:
            own, kept = np.split(kept, [weights[name].size])
            out[name] = own.reshape(weights[name].shape).tolist()
    return out


def groups_of(scope: str, names: list[str]) -> list[list[str]]:
    return [names] if scope == "global" else [[name] for name in names]


@given(WEIGHTS, DENSITIES, st.sampled_from(["global", "layer"]))
@settings(deadline=None, max_examples=200)
def test_the_ranking_is_a_stable_sort(weights: list[np.ndarray], density: float, scope: str) -> None:
    tensors = named(weights)
    plain = {name: tensor.numpy() for name, tensor in tensors.items()}
    mask = pruned(Pruner(scope=scope), tensors, density)
    assert as_lists(mask) == reference(plain, density, None, groups_of(scope, list(plain)))


@given(WEIGHTS, st.data(), st.sampled_from(["global", "layer"]))
@settings(deadline=None, max_examples=200)
def test_a_mask_only_shrinks(weights: list[np.ndarray], data: st.DataObject, scope: str) -> None:
    tensors = named(weights)
    plain = {name: tensor.numpy() for name, tensor in tensors.items()}
    first, second = sorted((data.draw(DENSITIES), data.draw(DENSITIES)), reverse=True)
    before = pruned(Pruner(scope=scope), tensors, first)
    after = pruned(Pruner(scope=scope), tensors, second, before)
    assert all(bool((after[name] <= before[name]).all()) for name in tensors)
    masks = {name: kept.numpy() for name, kept in before.items()}
    assert as_lists(after) == reference(plain, second, masks, groups_of(scope, list(plain)))


@given(WEIGHTS, st.data())
@settings(deadline=None, max_examples=100)
def test_pruning_under_any_mask_is_a_stable_sort(weights: list[np.ndarray], data: st.DataObject) -> None:
    """The mask need not come from magnitudes: large weights may be gone."""
    plain = {name: tensor.numpy() for name, tensor in named(weights).items()}
    masks = {name: data.draw(arrays.arrays(bool, array.shape)) for name, array in plain.items()}
    alive, total = sum(int(m.sum()) for m in masks.values()), sum(m.size for m in masks.values())
    density = data.draw(DENSITIES)
    before = Mask({name: torch.from_numpy(m) for name, m in masks.items()})
    if kept_count(total, density) > alive:
        with pytest.raises(InputError, match="a mask only shrinks"):
            pruned(Pruner(), named(weights), density, before)
    else:
        mask = pruned(Pruner(), named(weights), density, before)
        assert as_lists(mask) == reference(plain, density, masks, [list(plain)])


def test_the_smallest_magnitudes_go_over_all_layers_at_once() -> None:
    weights = {"a": torch.tensor([[0.1, -9.0], [0.2, 8.0]]), "b": torch.tensor([[-7.0, 6.0], [5.0, -4.0]])}
    mask = Pruner().prune(weights, 0.5)
    assert as_lists(mask) == {"a": [[False, True], [False, True]], "b": [[True, True], [False, False]]}


def test_the_smallest_magnitudes_go_layer_by_layer() -> None:
    weights = {"a": torch.tensor([[0.1, -9.0], [0.2, 8.0]]), "b": torch.tensor([[-0.07, 0.06], [0.05, -0.04]])}
    mask = Pruner(scope="layer").prune(weights, 0.5)
    assert as_lists(mask) == {"a": [[False, True], [False, True]], "b": [[True, True], [False, False]]}


@pytest.mark.filterwarnings("ignore:less than 1%")
def test_among_equals_the_later_index_stays() -> None:
    weights = {"a": torch.ones(2, 2), "b": torch.ones(2, 2)}
    assert as_lists(Pruner().prune(weights, 0.4)) == {"a": [[False, False]] * 2, "b": [[False, True], [True, True]]}


def test_zeros_go_first_and_in_order() -> None:
    mask = Pruner().prune({"w": torch.tensor([[0.0, 1.0, 0.0, -2.0], [0.0, 0.0, 3.0, 0.0]])}, 0.6)
    assert as_lists(mask) == {"w": [[False, True, False, True], [False, True, True, True]]}


def test_what_is_gone_stays_gone_even_where_its_value_is_large() -> None:
    before = Mask({"w": torch.tensor([[False, True], [True, True]])})
    mask = Pruner().prune({"w": torch.tensor([[9.0, 1.0], [2.0, 3.0]])}, 0.4, before)
    assert as_lists(mask) == {"w": [[False, False], [True, True]]}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_precisions_are_pruned_to_the_same_count(dtype: torch.dtype) -> None:
    weights = {"w": torch.randn(20, 20, generator=torch.Generator().manual_seed(0)).to(dtype)}
    mask = Pruner().prune(weights, 0.3)
    assert mask.kept == kept_count(400, 0.3)
    assert weights["w"][mask["w"]].abs().min() >= weights["w"][~mask["w"]].abs().max()


def test_the_model_is_not_changed() -> None:
    model = nn.Linear(6, 6)
    before = model.weight.detach().clone()
    Pruner()(model, 0.5)
    assert torch.equal(model.weight, before)
    assert list(model.state_dict()) == ["weight", "bias"]


# The random score


def test_the_random_score_is_a_function_of_the_seed_and_the_name() -> None:
    pruner, weights = Pruner(score="random"), {"a": torch.ones(8, 8), "b": torch.ones(8, 8)}
    masks = [pruner.prune(weights, 0.5, seed=seed) for seed in (1, 1, 2)]
    assert as_lists(masks[0]) == as_lists(masks[1])
    assert as_lists(masks[0]) != as_lists(masks[2])
    assert not torch.equal(masks[0]["a"], masks[0]["b"])
    assert masks[0].kept == masks[2].kept == kept_count(128, 0.5)


def test_the_random_score_does_not_look_at_the_weights() -> None:
    one, other = ({"w": torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))} for seed in (1, 2))
    pruner = Pruner(score="random")
    assert as_lists(pruner.prune(one, 0.5, seed=3)) == as_lists(pruner.prune(other, 0.5, seed=3))


def test_the_random_score_is_uniform_over_a_tensor() -> None:
    mask = Pruner(score="random").prune({"w": torch.zeros(100, 100)}, 0.2, seed=5)
    rows, columns = mask["w"].sum(1), mask["w"].sum(0)  # binomial, 100 x 0.2: deviation 4
    assert min(rows.min(), columns.min()) >= 4
    assert max(rows.max(), columns.max()) <= 36


# only, skip, floor


def three_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 10))


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


# What cannot be pruned


@pytest.mark.parametrize("density", [0.0, -0.1, 1.1, float("nan"), float("inf")])
def test_a_density_is_a_fraction(density: float) -> None:
    with pytest.raises(InputError, match=f"density must be above 0 and at most 1, not {density:g}"):
        Pruner()(three_layers(), density)


def test_density_one_keeps_everything() -> None:
    assert Pruner()(three_layers(), 1.0).density == 1.0


def test_a_model_without_prunable_weights_is_an_error() -> None:
    with pytest.raises(InputError, match=r"no prunable weights: .* outside normalisation layers$"):
        Pruner()(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()), 0.5)


def test_patterns_that_select_nothing_are_an_error() -> None:
    with pytest.raises(InputError, match=r"no prunable weights: .* selected by only and skip$"):
        Pruner(only=("encoder.*",))(three_layers(), 0.5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("pruner", [Pruner(), Pruner(scope="layer"), Pruner(floor=0.1)])
@pytest.mark.parametrize("zeros", [0, 50])
def test_weights_that_are_no_numbers_are_an_error(value: float, pruner: Pruner, zeros: int) -> None:
    model = three_layers()
    with torch.no_grad():
        model[1].weight.view(-1)[:zeros] = 0.0
        model[1].weight[7, 3] = value
    with pytest.raises(InputError, match="it holds NaN or infinite weights, the network has diverged; train it again"):
        pruner(model, 0.5)
    alive = Mask({f"{i}.weight": torch.ones(10, 10, dtype=torch.bool) for i in range(3)})
    with pytest.raises(InputError, match="NaN or infinite"):
        pruner(model, 0.5, alive)


def test_a_weight_that_is_gone_may_be_no_number() -> None:
    model = three_layers()
    mask = Pruner()(model, 0.5)
    row, column = (~mask["1.weight"]).nonzero()[0].tolist()
    model[1].weight.data[row, column] = float("nan")
    assert Pruner()(model, 0.3, mask).kept == kept_count(300, 0.3)


def test_a_starved_tensor_is_named_in_a_warning() -> None:
    model = three_layers()
    with torch.no_grad():
        model[1].weight.mul_(1e-3)
    with pytest.warns(UserWarning, match=r"less than 1% of the weights are left in 1\.weight; `floor` keeps"):
        Pruner()(model, 0.3)
    Pruner(floor=0.01)(model, 0.3)  # warnings are errors here: with a floor there is none


def test_many_starved_tensors_are_counted() -> None:
    weights = {f"w{i}": torch.full((10, 10), 0.1 + (i == 7)) for i in range(8)}
    with pytest.warns(UserWarning, match=r"left in w0, w1, w2, w3, w4 and 2 more;"):
        Pruner().prune(weights, 0.12)


# A user's own


def inverse(weight: Tensor, name: str, seed: int) -> Tensor:
    """The largest weights go first."""
    return 1 / (1 + weight.abs())


def negative(weight: Tensor, name: str, seed: int) -> Tensor:
    return -weight.abs()


def one_number(weight: Tensor, name: str, seed: int) -> Tensor:
    return weight.abs().sum()


def first_and_rest(names: list[str]) -> list[list[str]]:
    return [names[:1], names[1:]]


def test_a_score_of_ones_own() -> None:
    mask = Pruner(score="test_pruner:inverse").prune({"w": torch.tensor([[3.0, 1.0], [-4.0, 2.0]])}, 0.4)
    assert as_lists(mask) == {"w": [[False, True], [False, True]]}


def test_a_scope_of_ones_own() -> None:
    weights = {"a": torch.ones(2, 2), "b": torch.full((2, 2), 2.0), "c": torch.full((2, 2), 3.0)}
    pruner = Pruner(scope="test_pruner:first_and_rest")
    mask = pruned(pruner, weights, 0.5)
    assert [int(mask[name].sum()) for name in "abc"] == [2, 0, 4]
    assert pruner.kept(dict.fromkeys("abc", (2, 2)), 0.5) == mask.kept


@pytest.mark.parametrize("score", ["negative", "one_number"])
def test_a_score_gives_one_non_negative_number_per_weight(score: str) -> None:
    with pytest.raises(
        InputError, match=f"score 'test_pruner:{score}' must give one number per weight of w, none below 0"
    ):
        Pruner(score=f"test_pruner:{score}").prune({"w": torch.ones(2, 2)}, 0.5)


@pytest.mark.parametrize("field", ["score", "scope", "pattern"])
def test_unknown_words_are_errors(field: str) -> None:
    with pytest.raises(InputError, match=f"unknown {field} 'magnitud'"):
        Pruner(**{field: "magnitud"})
    with pytest.raises(InputError, match=f"{field} 'math:pi' is a float, not a function"):
        Pruner(**{field: "math:pi"})


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
