"""Masks of other tools: what torch.nn.utils.prune leaves in a model, and zeros in plain weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from rewound import InputError, Mask, from_torch_prune, load, mask_of_zeros, save
from sameness import assert_same
from small_networks import Compiled, Tied, Wrapped, network


def pruned_by_torch() -> nn.Sequential:
    model = network()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    prune.random_unstructured(model[4], "weight", amount=0.3)
    prune.l1_unstructured(model[4], "weight", amount=0.5)  # again: torch combines the masks
    prune.l1_unstructured(model[4], "bias", amount=1)
    return model


@pytest.mark.parametrize("wrap", [lambda m: m, Wrapped, Compiled, nn.Module.state_dict])
def test_a_model_that_torch_pruned(wrap: object) -> None:
    model = pruned_by_torch()
    state, mask = from_torch_prune(wrap(model))  # type: ignore[operator]
    assert mask.counts == {"0.weight": 27, "4.weight": 17, "4.bias": 3}
    other = network()
    other.load_state_dict(state)  # the names of the plain model, nothing else
    x = torch.randn(3, 2, 4, 4)
    assert torch.equal(other.eval()(x), model.eval()(x))
    assert torch.equal(mask["4.weight"], model[4].weight_mask.bool())
    assert "4.weight_orig" in model.state_dict(), "the model stays as it was"


def test_a_model_that_torch_pruned_becomes_a_ticket(tmp_path: Path) -> None:
    state, mask = from_torch_prune(pruned_by_torch())
    save(state, mask, tmp_path / "t.safetensors")
    ticket = load(tmp_path / "t.safetensors")
    assert_same(ticket.state, state)
    assert_same(ticket.mask, mask)
    ticket.into(network())


def test_pruned_by_torch_and_made_permanent() -> None:
    model = pruned_by_torch()
    masks = {f"{n}.weight": model[n].weight_mask.bool() for n in (0, 4)}
    with pytest.raises(InputError, match=r"0\.weight was pruned by torch\.nn\.utils\.prune; use from_torch_prune"):
        mask_of_zeros(model)
    with pytest.raises(InputError, match="use from_torch_prune"):
        mask_of_zeros(model.state_dict())
    for layer, name in ((0, "weight"), (4, "weight"), (4, "bias")):
        prune.remove(model[layer], name)
    for source in (model, model.state_dict(), Wrapped(model), Wrapped(model).state_dict()):
        mask = mask_of_zeros(source)
        assert list(mask) == ["0.weight", "4.weight"], "biases and normalisation are dense"
        assert_same(mask, masks)
    with pytest.raises(InputError, match=r"nothing here was pruned .* after prune\.remove, use mask_of_zeros"):
        from_torch_prune(model)


def test_a_name_that_only_looks_like_torchs() -> None:
    model = prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=0.5)
    attention: dict[str, Tensor] = {"x_orig": torch.ones(2), "causal_mask": torch.ones(2, 2), **model.state_dict()}
    state, mask = from_torch_prune(attention)
    assert set(state) == {"x_orig", "causal_mask", "weight", "bias"}
    assert list(mask) == ["weight"]
    assert list(mask_of_zeros({"x_orig": torch.ones(2, 2)})) == ["x_orig"]


def test_a_mask_of_torchs_is_of_zeros_and_ones() -> None:
    state = {"w_orig": torch.ones(2, 2), "w_mask": torch.tensor([[1, 0.5], [0, 1]])}
    with pytest.raises(InputError, match=r"the mask of w must be of zeros and ones in the shape \(2, 2\)"):
        from_torch_prune(state)
    with pytest.raises(InputError, match="the mask of w must be"):
        from_torch_prune({**state, "w_mask": torch.ones(4)})


def test_what_is_pruned_is_zero_whatever_it_was() -> None:
    state = {"w_orig": torch.tensor([[float("nan"), -1.0]]), "w_mask": torch.tensor([[0, 1]])}
    assert from_torch_prune(state)[0]["w"].tolist() == [[0.0, -1.0]]


def test_zeros_of_either_sign_are_pruned_and_nothing_else() -> None:
    weight = torch.tensor([[0.0, -0.0, 1e-45], [float("nan"), float("inf"), -3.0]])
    assert mask_of_zeros({"w": weight})["w"].tolist() == [[False, False, True], [True, True, True]]


def test_which_tensors_of_a_state_dict_have_a_mask() -> None:
    state = {
        "conv": torch.ones(4, 2, 3, 3),
        "half": torch.ones(2, 2, dtype=torch.bfloat16),
        "bias": torch.zeros(4),
        "row": torch.zeros(1, 4, 1),
        "table": torch.zeros(3, 3, dtype=torch.int64),
    }
    assert list(mask_of_zeros(state)) == ["conv", "half"]
    for wrong in ({"bias": torch.zeros(4)}, {"epoch": 3, "state_dict": state}, nn.BatchNorm1d(3)):
        with pytest.raises(InputError, match="no weights to read a mask from"):
            mask_of_zeros(wrong)


def test_two_tensors_of_one_plain_name_are_an_error() -> None:
    weights = {"module.weight": torch.ones(2, 2), "weight": torch.zeros(2, 2)}
    for read in (mask_of_zeros, from_torch_prune):
        with pytest.raises(InputError, match="two tensors of this model are called weight once `module"):
            read(weights)


def test_tied_weights_of_a_model_once() -> None:
    model = Tied()
    Mask({"output.weight": torch.rand(6, 3) > 0.5}).apply(model)
    mask = mask_of_zeros(model)
    assert list(mask) == ["embedding.weight"]
    assert torch.equal(mask["embedding.weight"], model.output.weight != 0)
