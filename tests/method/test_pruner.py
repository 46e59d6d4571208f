"""Which weights go: the authors' count, the ranking against a stable sort, and the random score."""

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rewound import InputError, Mask, Pruner
from rewound.method.pruning.cutting import kept_count
from weights_to_prune import WEIGHTS, as_lists, named, pruned

Arrays = dict[str, np.ndarray]
DENSITIES = st.one_of(st.floats(0.001, 1.0), st.sampled_from([0.8, 0.8**2, 0.8**3, 0.512, 0.5, 0.25, 0.1, 1.0]))

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


def test_what_float32_cannot_tell_apart_is_ranked_in_float64() -> None:
    near_one = 1 + torch.tensor([[3.0, 1.0], [2.0, 0.0]], dtype=torch.float64) * 1e-12
    assert as_lists(Pruner().prune({"w": near_one}, 0.4)) == {"w": [[True, False], [True, False]]}
    beside = {"w": near_one, "v": torch.ones(2, 2)}  # which are equal to the last of them
    assert as_lists(pruned(Pruner(), beside, 0.3)) == {"w": [[True, True], [True, False]], "v": [[False] * 2] * 2}


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
