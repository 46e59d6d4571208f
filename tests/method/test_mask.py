"""Masks: named bools with their counts, packed and unpacked, and the model they are for."""

import copy
from collections.abc import Callable

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from masked_training import all_zero, half, pruned_values
from rewound import InputError, Mask
from sameness import assert_same
from small_networks import Compiled, Wrapped, network

pytestmark = pytest.mark.usefixtures("one_thread")

# The mapping


def test_a_mask_is_a_mapping_with_its_counts() -> None:
    mask = Mask({"a": torch.tensor([[True, False], [True, True]]), "b": torch.tensor([False, False, False, True])})
    assert list(mask) == ["a", "b"]
    assert len(mask) == 2
    assert "b" in mask
    assert mask["a"].tolist() == [[True, False], [True, True]]
    assert (mask.kept, mask.total, mask.density) == (4, 8, 0.5)
    assert repr(mask) == "Mask(2 tensors, 4 of 8 weights kept, density 0.5)"


def test_an_empty_mask_prunes_nothing() -> None:
    assert (Mask({}).density, Mask({}).kept, Mask({}).total) == (1.0, 0, 0)


def test_the_full_mask_keeps_everything() -> None:
    mask = Mask.full({"w": torch.zeros(2, 3)})
    assert mask.density == 1.0
    assert mask["w"].dtype == torch.bool
    assert mask["w"].shape == (2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int64])
def test_a_mask_is_of_bool(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=f"the mask of 'w' must be a tensor of bool, not {dtype}"):
        Mask({"w": torch.ones(2, 2, dtype=dtype)})


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5),
        arrays.arrays(bool, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)),
        max_size=4,
    )
)
@settings(deadline=None)
def test_packing_and_unpacking_gives_the_mask_back(tensors: dict[str, np.ndarray]) -> None:
    mask = Mask({name: torch.from_numpy(array.copy()) for name, array in tensors.items()})
    packed = mask.packed()
    for name, tensor in mask.items():
        assert packed[name].dtype == torch.uint8
        assert packed[name].numel() == -(-tensor.numel() // 8)
    back = Mask.unpacked(packed, {name: tuple(tensor.shape) for name, tensor in mask.items()})
    assert list(back) == list(mask)
    assert_same(back, mask)


def test_packed_bits_are_in_index_order() -> None:
    bits = torch.tensor([[1, 0, 0, 0, 0], [0, 0, 1, 1, 1]], dtype=torch.bool)
    assert Mask({"w": bits}).packed()["w"].tolist() == [0b10000001, 0b11000000]


def test_packing_does_not_depend_on_the_memory_format() -> None:
    kept = torch.rand(3, 4, 2, 2, generator=torch.Generator().manual_seed(0)) > 0.5
    strided = kept.contiguous(memory_format=torch.channels_last)
    assert torch.equal(Mask({"w": kept}).packed()["w"], Mask({"w": strided}).packed()["w"])


# The model it is for


def test_apply_sets_pruned_weights_to_zero_and_no_others() -> None:
    model = nn.Linear(3, 1)
    before = model.weight.detach().clone()
    Mask({"weight": torch.tensor([[True, False, True]])}).apply(model)
    assert model.weight.tolist() == [[before[0, 0].item(), 0.0, before[0, 2].item()]]
    assert model.weight.requires_grad


def test_apply_reaches_a_copy_made_earlier() -> None:
    model = network()
    average = copy.deepcopy(model)
    mask = half(model)
    mask.apply(average)
    assert all_zero(pruned_values(average, mask))
    assert not all_zero(pruned_values(model, mask))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_pruned_weights_are_zero_whatever_they_were(value: float) -> None:
    model = nn.Linear(2, 1)
    mask = Mask({"weight": torch.tensor([[True, False]])})
    model.weight.data[0, 1] = value
    other = copy.deepcopy(model)
    mask.apply(model)
    with mask.attached(other):
        pass
    assert str(model.weight[0, 1].item()) == str(other.weight[0, 1].item()) == "0.0"  # not NaN, not -0.0


def test_a_mask_of_other_names_is_for_another_model() -> None:
    mask = Mask({f"layer{i}.weight": torch.ones(2, 2, dtype=torch.bool) for i in range(7)})
    message = (
        "this mask is for another model: no parameter here has the name and shape of "
        r"layer0.weight, layer1.weight, layer2.weight, layer3.weight, layer4.weight and 2 more$"
    )
    with pytest.raises(InputError, match=message):
        mask.apply(network())
    with pytest.raises(InputError, match=message), mask.attached(network()):
        pass


def test_a_mask_of_another_shape_is_for_another_model() -> None:
    mask = Mask({"0.weight": torch.ones(3, 2, 3, 3, dtype=torch.bool), "4.weight": torch.ones(4, 1, dtype=torch.bool)})
    with pytest.raises(InputError, match=r"name and shape of 4\.weight$"):
        mask.apply(network())


@pytest.mark.parametrize("wrap", [Wrapped, Compiled, lambda m: Wrapped(Compiled(m)), lambda m: Compiled(Wrapped(m))])
def test_wrappers_do_not_change_whose_mask_it_is(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = network()
    mask = half(model)
    wrapped = wrap(model)
    assert list(half(wrapped)) == list(mask)
    mask.apply(wrapped)
    assert all_zero(pruned_values(model, mask))


def test_a_compiled_part_of_a_model_keeps_its_name() -> None:
    model = nn.Sequential(Compiled(nn.Linear(3, 3)), nn.Linear(3, 2))
    mask = half(model)
    assert list(mask) == ["0.weight", "1.weight"]
    mask.apply(model)
    assert all_zero(model[0]._orig_mod.weight[~mask["0.weight"]])


def test_masks_are_equal_if_they_keep_the_same_weights() -> None:
    tensors = {"a": torch.tensor([True, False]), "b": torch.tensor([[True]])}
    mask = Mask(tensors)
    assert mask == Mask({name: tensor.clone() for name, tensor in reversed(tensors.items())})
    assert mask != Mask({**tensors, "b": torch.tensor([[False]])})
    assert mask != Mask({**tensors, "b": torch.tensor([True])})
    assert mask != Mask({"a": tensors["a"]})
    assert mask != tensors
