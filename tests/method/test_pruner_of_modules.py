"""What a module says of its weights beyond their values: all names of tied ones, norms to divide by, what is frozen."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from rewound import InputError, Mask, Pruner, epochs, mask_of_zeros, prune
from rewound.experiments.sweeps.targets import run_of
from rewound.method.pruning.counts import counts_of
from rewound.method.pruning.cutting import kept_count
from rewound.states.history import Pruned
from small_networks import Tied, Wrapped
from tiny import Mixed
from weights_to_prune import three_layers


class Model(nn.Module):
    """A tied matrix, and another."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.tied = Tied()


# Tied weights: every name counts


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapped])
@pytest.mark.parametrize("name", ["tied.embedding.weight", "tied.output.weight"])
def test_a_tied_weight_is_skipped_by_any_of_its_names(name: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    assert list(Pruner(skip=(name,))(wrap(Model()), 0.5)) == ["body.weight"]


@pytest.mark.parametrize("name", ["tied.embedding.weight", "tied.output.*"])
def test_a_tied_weight_is_selected_by_any_of_its_names(name: str) -> None:
    mask = Pruner(only=(name,))(Model(), 0.5)
    assert list(mask) == ["tied.embedding.weight"]
    assert mask.kept == kept_count(18, 0.5)


def test_what_is_skipped_under_one_name_is_not_selected_under_the_other() -> None:
    with pytest.raises(InputError, match="no prunable weights"):
        Pruner(only=("tied.embedding.*",), skip=("tied.output.*",))(Model(), 0.5)


def test_an_own_loop_skips_a_tied_weight_by_its_second_name() -> None:
    model = Model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    run = epochs(
        1, model, sgd, compression=2, one_shot=True, pruner=Pruner(skip=("*.output.*",)), say=lambda text: None
    )
    for _ in run:
        sgd.zero_grad()
        sum(p.square().sum() for p in model.parameters()).backward()
        sgd.step()
    assert run.mask is not None
    assert list(run.mask) == ["body.weight"]


def test_a_mask_under_the_other_name_of_a_tied_weight_is_gone_on_from() -> None:
    model = Model()
    first = Pruner(only=("tied.*",))(model, 0.5)
    renamed = Mask({"tied.output.weight": first["tied.embedding.weight"]})
    assert Pruner(only=("tied.*",))(model, 0.2, renamed) == Pruner(only=("tied.*",))(model, 0.2, first)


def test_a_mask_of_zeros_has_a_tied_weight_once() -> None:
    state = Model().state_dict()
    assert list(mask_of_zeros(state)) == ["body.weight", "tied.embedding.weight"]


# Weights that are divided by their norm

NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "rows": parametrizations.weight_norm,
    "columns": lambda layer: parametrizations.weight_norm(layer, dim=1),
    "whole": lambda layer: parametrizations.weight_norm(layer, dim=None),
    "spectral": parametrizations.spectral_norm,
    "older rows": nn.utils.weight_norm,
    "older whole": lambda layer: nn.utils.weight_norm(layer, dim=None),
    "older spectral": nn.utils.spectral_norm,
}


def normalised(norm: str, layer: nn.Module) -> nn.Sequential:
    """A layer with one row, one column and nearly everything of tiny weights, and a large plain one."""
    with torch.no_grad():
        layer.weight.mul_(1e-4)
        layer.weight[1].mul_(1e-4)
        layer.weight[:, 1].mul_(1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the older ones are deprecated
        return nn.Sequential(NORMS[norm](layer), nn.Flatten(), nn.LazyLinear(4))


@pytest.mark.filterwarnings("ignore:less than 1%")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layer", [lambda: nn.Linear(8, 6), lambda: nn.Conv2d(8, 6, 3)], ids=["linear", "conv"])
@pytest.mark.parametrize("pruner", [Pruner(), Pruner(floor=0.001)], ids=["", "floor"])
def test_a_normalised_weight_is_never_divided_by_zero(
    norm: str, layer: Callable[[], nn.Module], pruner: Pruner
) -> None:
    torch.manual_seed(0)
    inner = layer()
    model = normalised(norm, inner)
    x = torch.randn(2, 8) if isinstance(inner, nn.Linear) else torch.randn(2, 8, 5, 5)
    model(x)
    (name,) = [name for name, p in model.named_parameters() if p.shape == inner.weight.shape]
    mask = pruner(model, 0.2)
    assert mask.kept == kept_count(mask.total, 0.2)
    assert bool(mask[name].any())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with mask.attached(model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert bool(model(x).isfinite().all())
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_the_largest_of_each_row_stays_and_among_equals_the_last() -> None:
    layer = nn.Linear(3, 2, bias=False)
    layer.weight.data = torch.tensor([[1.0, 2.0, 2.0], [0.1, 0.3, 0.2]])
    mask = Pruner()(parametrizations.weight_norm(layer), 0.3)
    assert next(iter(mask.values())).tolist() == [[False, False, True], [False, True, False]]


def test_the_rest_of_the_mask_is_that_of_a_plain_layer() -> None:
    torch.manual_seed(0)
    plain, divided = nn.Linear(20, 5), nn.Linear(20, 5)
    divided.load_state_dict(plain.state_dict())
    one, other = Pruner()(plain, 0.3), Pruner()(parametrizations.weight_norm(divided), 0.3)
    assert bool(one["weight"].any(1).all())  # no row is empty: there is nothing to protect
    assert torch.equal(one["weight"], other["parametrizations.weight.original1"])


def test_fewer_weights_than_norms_are_refused_before_training() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(10, 8)))
    refusal = (
        r"^density 0\.05 keeps 4 weights, but 8 must stay, as 0\.parametrizations\.weight\.original1 would else be "
        r"divided by a norm of zero; prune to a larger density, or call remove_parametrizations .* first$"
    )
    with pytest.raises(InputError, match=refusal):
        Pruner()(model, 0.05)
    with pytest.raises(InputError, match=refusal):
        epochs(2, model, torch.optim.SGD(model.parameters(), lr=0.1), compression=20)


def test_a_mask_that_leaves_nothing_in_a_row_is_not_gone_on_from() -> None:
    kept = torch.ones(4, 5, dtype=torch.bool)
    kept[2] = False
    mask = Mask({"parametrizations.weight.original1": kept})
    with pytest.raises(InputError, match="the mask to go on from keeps nothing in a part of parametrizations"):
        Pruner()(parametrizations.weight_norm(nn.Linear(5, 4)), 0.3, mask)


# Frozen weights


def test_frozen_weights_neither_count_nor_go_and_that_is_said() -> None:
    model = three_layers()
    model[0].requires_grad_(False)
    with pytest.warns(
        UserWarning, match=r"^0\.weight are frozen, and so neither pruned nor counted; unfreeze"
    ) as caught:
        mask = Pruner()(model, 0.5)
    assert [warning.filename for warning in caught] == [__file__]
    assert list(mask) == ["1.weight", "2.weight"]
    assert mask.kept == kept_count(200, 0.5)
    assert counts_of(model, mask).network == 300 + 30
    assert Pruner(skip=("0.*",))(model, 0.5) == mask  # nothing to say: it was not asked for


def test_a_model_in_which_nothing_trains_says_what_to_do() -> None:
    model = three_layers().requires_grad_(False)
    with pytest.raises(InputError, match=r"are frozen .*; call model\.requires_grad_\(True\) before pruning"):
        Pruner()(model, 0.5)


def test_what_was_pruned_before_it_was_frozen_stays_so() -> None:
    model = three_layers()
    first = Pruner()(model, 0.5)
    model[0].requires_grad_(False)
    with pytest.warns(UserWarning, match="are frozen"):
        mask = Pruner()(model, 0.2, first)
    assert torch.equal(mask["0.weight"], first["0.weight"])
    assert mask.counts["1.weight"] + mask.counts["2.weight"] == kept_count(200, 0.2)


# The same in recipes

LAST = "last.parametrizations.weight.original1"


def test_a_recipe_skips_a_tied_weight_by_its_second_name() -> None:
    (target,) = run_of(Mixed(), "lr-rewinding", 1, [0.5], Pruner(skip=("two.*",), floor=0.01), iterative=False).targets(
        1
    )
    assert isinstance(target.state.parent, Pruned)
    assert target.state.parent.kept == kept_count(640, 0.5)


@pytest.mark.filterwarnings("ignore:less than 1%")
def test_a_recipe_with_weight_norm_stays_finite_where_whole_rows_would_go(tmp_path: Path) -> None:
    network = prune(Mixed(), compression=100, one_shot=True, retrain_epochs=1, store=tmp_path, say=lambda text: None)
    assert set(network.mask) == {"one.weight", LAST}
    assert bool(network.mask[LAST].any(1).all())
    assert network.mask.kept == kept_count(64 * 64 + 640, 0.01)
    assert all(bool(tensor.isfinite().all()) for tensor in network.model.state_dict().values())


def test_a_recipe_whose_zeros_would_not_stay_is_refused_before_it_runs() -> None:
    with pytest.raises(InputError, match=r"cannot prune last\.parametrizations\.weight\.original: the layer computes"):
        list(run_of(Mixed(orthogonal=True), "lr-rewinding", 1, [0.5], iterative=False).targets(1))
