"""What cannot be pruned, and what is left too thin: each is said with the remedy."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization

from rewound import InputError, Mask, Pruner, epochs, units
from rewound.method.pruning.cutting import kept_count
from weights_to_prune import three_layers


@pytest.mark.parametrize("density", [0.0, -0.1, 1.1, float("nan"), float("inf")])
def test_a_density_is_a_fraction(density: float) -> None:
    with pytest.raises(InputError, match=f"density must be above 0 and at most 1, not {density:g}"):
        Pruner()(three_layers(), density)


def test_a_density_is_a_number() -> None:
    with pytest.raises(InputError, match=r"density must be a number, not '0\.5'; leave out the quotes"):
        Pruner()(three_layers(), "0.5")  # type: ignore[arg-type]


def test_density_one_keeps_everything() -> None:
    assert Pruner()(three_layers(), 1.0).density == 1.0


def test_a_model_without_prunable_weights_is_an_error() -> None:
    with pytest.raises(InputError, match=r"no prunable weights: .* outside normalisation layers$"):
        Pruner()(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()), 0.5)


def test_patterns_that_select_nothing_are_an_error() -> None:
    with pytest.raises(InputError, match=r"no prunable weights: .* selected by only and skip$"):
        Pruner(only=("*.bias",))(three_layers(), 0.5)


@pytest.mark.parametrize("field", ["only", "skip"])
def test_a_pattern_that_matches_no_parameter_is_named(field: str) -> None:
    says = rf"^{field} 'encoder\.\*' matches no parameter of the model; it has 0\.weight, 0\.bias, .* and 1 more$"
    with pytest.raises(InputError, match=says):
        Pruner(**{field: ("0.*", "encoder.*")})(three_layers(), 0.5)


def test_a_pattern_may_match_what_is_not_pruned_anyway() -> None:
    assert Pruner(skip=("*.bias",))(nn.DataParallel(three_layers()), 0.5).kept == kept_count(300, 0.5)


@pytest.mark.parametrize("model", [None, three_layers().state_dict()])
def test_what_is_no_model_is_an_error(model: object) -> None:
    given = "OrderedDict" if model else "None"
    with pytest.raises(InputError, match=f"^model must be of type Module, not {given}; give the model itself$"):
        Pruner()(model, 0.5)  # type: ignore[arg-type]


def test_a_model_without_memory_is_an_error() -> None:
    with torch.device("meta"):
        model = three_layers()
    says = r"no memory yet \(meta device\); call model\.to_empty\(device=\.\.\.\) and load its weights first$"
    with pytest.raises(InputError, match=says):
        Pruner()(model, 0.5)
    with pytest.raises(InputError, match=says):
        epochs(2, model, torch.optim.SGD(model.parameters(), lr=0.1), compression=2)


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


def test_n_of_m_says_too_what_to_do_about_weights_that_are_no_numbers() -> None:
    model = nn.Linear(8, 8)
    nn.init.constant_(model.weight, torch.nan)
    with pytest.raises(InputError, match="the network has diverged; train it again with a lower learning rate"):
        Pruner(pattern="2:4")(model)


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
    with pytest.warns(UserWarning, match=r"less than 1% of the weights are left in 1\.weight; `floor` keeps") as told:
        Pruner()(model, 0.3)
    assert told[0].filename == __file__
    Pruner(floor=0.01)(model, 0.3)  # warnings are errors here: with a floor there is none


def test_many_starved_tensors_are_counted() -> None:
    weights = {f"w{i}": torch.full((10, 10), 0.1 + (i == 7)) for i in range(8)}
    with pytest.warns(UserWarning, match=r"left in w0, w1, w2, w3, w4 and 2 more;"):
        Pruner().prune(weights, 0.12)


def test_two_parameters_of_one_plain_name_are_an_error() -> None:
    model = nn.Module()
    model.add_module("module", nn.Sequential(nn.Linear(4, 3)))
    model.add_module("0", nn.Linear(3, 2))
    says = r"^two tensors of this model are called 0\.weight once .* are taken away; rename one of the layers$"
    with pytest.raises(InputError, match=says):
        Pruner()(model, 0.5)
    with pytest.raises(InputError, match=says):
        Mask({"0.weight": torch.ones(2, 3, dtype=torch.bool)}).apply(model)


def test_a_lazy_layer_is_an_error_until_it_has_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(InputError, match=r"^0\.weight, 0\.bias have no shape yet \(lazy layers\); run a batch through"):
        Pruner()(model, 0.5)
    with pytest.raises(InputError, match="have no shape yet"):
        units(model, (torch.ones(1, 6),))
    model(torch.ones(1, 6))
    assert Pruner()(model, 0.5).total == 24


class Symmetric(nn.Module):
    def forward(self, original: Tensor) -> Tensor:
        return original.triu() + original.triu(1).T


def symmetric(layer: nn.Linear) -> nn.Module:
    return register_parametrization(layer, "weight", Symmetric())


@pytest.mark.parametrize("reparametrise", [orthogonal, symmetric])
def test_an_original_whose_zeros_the_weight_does_not_have_is_an_error(
    reparametrise: Callable[[nn.Linear], nn.Module],
) -> None:
    model = nn.Sequential(reparametrise(nn.Linear(5, 5)), nn.Linear(5, 5))
    says = (
        r"^cannot prune 0\.parametrizations\.weight\.original: the layer computes its weight from it, .* exclude it "
        r"with skip=\('0\.parametrizations\.weight\.original',\), or call remove_parametrizations first$"
    )
    with pytest.raises(InputError, match=says):
        Pruner()(model, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match=says):
        next(iter(epochs(1, model, optimizer, compression=2)))
    assert list(Pruner(skip=("0.parametrizations.weight.original",))(model, 0.5)) == ["1.weight"]


@pytest.mark.parametrize("reparametrise", [weight_norm, spectral_norm])
def test_an_original_whose_zeros_the_weight_has_is_pruned(reparametrise: Callable[[nn.Linear], nn.Module]) -> None:
    layer = reparametrise(nn.Linear(6, 6))
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    mask = Pruner(floor=0.2)(layer, 0.5)
    assert all(torch.equal(buffer, before[name]) for name, buffer in layer.named_buffers())
    mask.apply(layer)
    (kept,) = mask.values()
    assert torch.equal(layer.weight != 0, kept)
