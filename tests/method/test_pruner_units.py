"""Patterns of whole units: which go, how many, and what is refused."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from architectures import ARCHITECTURES, IMAGES
from rewound import InputError, Mask, Pruner, profile, slim
from rewound.method.structure.groups import Units
from rewound.method.structure.tracing import units

EXAMPLE = torch.zeros(1, 2)


def two_layers() -> nn.Sequential:
    """Eight and four hidden units; of the first layer, unit i has weights of size i, others 10: 16 + 32 + 8 weights."""
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    nn.init.constant_(model[4].weight, 10.0)
    model[0].weight.data.copy_(torch.arange(8.0)[:, None].expand(8, 2))
    model[2].weight.data.copy_(torch.arange(8.0).expand(4, 8))
    return model


@cache
def found() -> Units:
    """Its units, traced once for all tests."""
    return units(two_layers(), (EXAMPLE,))


def pruned(model: nn.Module, density: float, mask: Mask | None = None, seed: int = 0, **fields: Any) -> Mask:
    return Pruner(**{"pattern": "unit", **fields})(model, density, mask, seed=seed, groups=found())


def left(mask: Mask) -> tuple[list[int], int]:
    """Which units of the first layer are left, and how many of the second."""
    return mask["0.weight"].any(1).nonzero()[:, 0].tolist(), int(mask["4.weight"].any(0).sum())


def weights_left(mask: Mask) -> int:
    return sum(mask.counts[name] for name in ("0.weight", "2.weight", "4.weight"))


def test_the_smallest_units_go_until_the_density_is_reached() -> None:
    model = two_layers()
    assert left(pruned(model, 0.8)) == ([2, 3, 4, 5, 6, 7], 4)
    assert left(pruned(model, 0.5)) == ([4, 5, 6, 7], 3), "unit 4 is above the mean of its layer, and none of the other"
    assert left(pruned(model, 1.0)) == (list(range(8)), 4)
    assert left(pruned(model, 0.5, scope="layer")) == ([4, 5, 6, 7], 3), "4 * 2 + 4 * 3 + 3 * 2 = 26 of 56"


def test_a_mask_has_all_parameters_of_the_units_and_slims() -> None:
    model = two_layers()
    mask = pruned(model, 0.5)
    assert list(mask) == ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight"], "outputs stay, and their biases"
    assert mask["0.bias"].tolist() == [False] * 4 + [True] * 4
    assert mask["2.weight"].any(0).tolist() == [False] * 4 + [True] * 4
    assert slim(model, mask, (EXAMPLE,)).model[0].out_features == 4


def test_units_of_layers_are_compared_by_their_part_of_the_layers_mean() -> None:
    """Else one layer, whose weights are small for its place in the network, would lose all units but one."""
    model = two_layers()
    with torch.no_grad():
        for name in ("weight", "bias"):
            getattr(model[0], name).mul_(1e-6)
        model[2].weight.mul_(1e-6)
    assert left(pruned(model, 0.5)) == left(pruned(two_layers(), 0.5))


def test_multiples_minimums_and_floors_stay() -> None:
    model = two_layers()
    assert left(pruned(model, 0.8, round_to=4))[0] == [4, 5, 6, 7]
    assert left(pruned(model, 0.65, floor=0.75)) == ([2, 3, 4, 5, 6, 7], 3)
    assert left(pruned(model, 0.6, min_units=4)) == ([4, 5, 6, 7], 4)


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("score", ["magnitude", "l1", "l2", "random"])
@pytest.mark.parametrize("density", [0.9, 0.5, 0.2])
def test_no_more_is_left_than_was_asked_for_and_hardly_less(score: str, scope: str, density: float) -> None:
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    pruner = Pruner(pattern="unit", score=score, scope=scope)
    mask = pruner(model, density, groups=found())
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    kept = pruner.kept(shapes, density, model=model, groups=found())
    assert kept - 10 <= weights_left(mask) <= kept, "a unit of the second layer has 8 + 2 weights"


def test_masks_shrink_from_level_to_level() -> None:
    model = two_layers()
    first = pruned(model, 0.8)
    second = pruned(model, 0.5, first)
    assert left(second) == ([5, 6, 7], 4)
    assert all(bool((second[name] <= first[name]).all()) for name in first)
    assert pruned(model, 0.79, first) == first, "what is left is less already, as units are large"
    with pytest.raises(InputError, match=r"density 0\.8 keeps 45 weights, but only 26 are left: a mask only shrinks"):
        pruned(model, 0.8, second)


def test_the_draw_of_random_units_is_by_seed_and_for_each_unit_one() -> None:
    model = two_layers()
    assert pruned(model, 0.5, seed=1, score="random") == pruned(model, 0.5, seed=1, score="random")
    masks = [pruned(model, 0.5, seed=seed, score="random") for seed in range(20)]
    assert len({str(left(mask)) for mask in masks}) > 5
    assert {unit for mask in masks for unit in left(mask)[0]} == set(range(8)), "whatever their weights are"


def test_l2_goes_by_the_largest_weights() -> None:
    """Weights (0, 2) have the smaller L1 norm than (1.2, 1.2), and the larger L2 norm."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    model[0].weight.data.copy_(torch.tensor([[0.0, 2.0], [1.2, 1.2]]))
    nn.init.constant_(model[2].weight, 1.0)
    groups = units(model, (EXAMPLE,))
    masks = {s: Pruner(s, pattern="unit")(model, 0.5, groups=groups)["0.bias"].tolist() for s in ("l1", "l2")}
    assert masks == {"l1": [False, True], "l2": [True, False]}
    assert Pruner(score="l1") == Pruner(), "one key for two names"


# Which groups may go


def test_only_and_skip_select_units_by_the_weights_that_produce_them() -> None:
    model = two_layers()
    only = pruned(model, 0.5, only=("2.*",))
    assert "0.weight" not in only, "the first layer stays as it is"
    assert only.counts["2.weight"] == 16, "half of the one weight that counts"
    assert pruned(model, 0.5, skip=("0.*", "4.*")) == only
    with pytest.raises(InputError, match="no units can be removed: only, skip and the pattern leave no group of them"):
        pruned(model, 0.5, only=("4.*",))


def test_what_is_frozen_pins_its_units() -> None:
    model = two_layers()
    model[0].bias.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"0\.bias are frozen"):
        mask = pruned(model, 0.6)
    assert "0.weight" in mask, "which counts, and stays"
    assert left(mask) == (list(range(8)), 1)
    model[2].weight.requires_grad_(False)
    with (
        pytest.warns(UserWarning, match="are frozen"),
        pytest.raises(InputError, match=r"no units can be removed: 0\.bias, 2\.weight do not train"),
    ):
        pruned(model, 0.6)


class Mixed(nn.Module):
    """Two convolutions tied by a sum, one alone, and a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 1), nn.Conv2d(6, 4, 1)
        self.hidden, self.out = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.two(torch.relu(self.one(x)))
        found: Tensor = self.out(torch.relu(self.hidden(x.mean((2, 3)))))
        return found


def test_filters_are_those_of_convolutions_ranked_by_their_own_weights() -> None:
    model = Mixed()
    groups = units(model, (IMAGES,))
    assert sorted(map(len, groups)) == [4, 5, 6]
    nn.init.constant_(model.one.weight, 1.0)
    model.one.weight.data[:3] = 0.5
    model.two.weight.data[:, :3] = 100.0  # what reads the three says nothing of them
    nn.init.constant_(model.stem.weight, 200.0)
    with torch.no_grad():
        model.two.weight.abs_().add_(1.0)
    mask = Pruner(pattern="filter", only=("one.*", "hidden.*"))(model, 0.75, example_inputs=IMAGES)
    assert mask["one.weight"].flatten(1).any(1).tolist() == [False] * 3 + [True] * 3
    assert not mask["two.weight"][:, :3].any(), "what reads a filter goes with it"
    assert mask["hidden.weight"].all(), "rows of a linear layer are no filters"
    by_unit = Pruner(pattern="unit", only=("one.*", "hidden.*"))(model, 0.6, example_inputs=IMAGES)
    assert not by_unit["hidden.weight"].all()


class Experts(nn.Module):
    """A convolution, then four stacked experts."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Conv1d(3, 8, 1)
        self.inside, self.outside = nn.Parameter(torch.randn(4, 8, 12)), nn.Parameter(torch.randn(4, 12, 6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bi,eih->beh", self.filters(x).mean(2).relu(), self.inside).relu()
        return torch.einsum("beh,eho->bo", hidden, self.outside)


def test_hidden_units_of_stacked_experts_are_no_filters() -> None:
    mask = Pruner(pattern="filter", scope="layer")(Experts(), 0.6, example_inputs=torch.randn(2, 3, 5))
    assert 0 < mask["filters.weight"].any(2).any(1).sum() < 8
    assert mask["inside"].any(1).all(), "only what reads a filter is gone"
    assert mask["outside"].all()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["residual", "gpt2", "u-net", "depthwise"])
def test_masks_of_other_networks_slim(name: str) -> None:
    model, args, kwargs = ARCHITECTURES[name]()
    found = units(model, args, kwargs)
    mask = Pruner(pattern="unit")(model, 0.7, example_inputs=args, example_keywords=kwargs)
    assert mask == Pruner(pattern="unit")(model, 0.7, groups=found)
    small = slim(model, mask, args, kwargs).model
    assert sum(p.numel() for p in small.parameters()) < 0.75 * sum(p.numel() for p in model.parameters())


def test_wrapped_and_compiled_models_are_seen_through() -> None:
    model = two_layers()
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    for wrapped in (compiled, nn.DataParallel(model)):
        mask = Pruner(pattern="unit")(wrapped, 0.5, example_inputs=EXAMPLE)
        assert mask == pruned(model, 0.5)
        assert units(wrapped, EXAMPLE).groups == found().groups
        small = slim(wrapped, mask, EXAMPLE)
        assert small.model[0].out_features == 4
        small.into(nn.DataParallel(same := two_layers()))
        assert same[0].out_features == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.05}, "density 0.05 cannot be reached by removing units: 8.93% of the weights are left"),
        (
            {"density": 0.05},
            "; give a density of at least 0.0893 (a compression of at most 11.19), or prune single weights",
        ),
        ({"density": 0.9, "min_units": 40}, "cannot be reached by removing units: 100% of the weights are left where"),
        ({"density": 0.9, "min_units": 40}, "as few units as it may; lower min_units=40, or prune single weights, too"),
        ({"density": 0.1, "floor": 0.5, "round_to": 2}, "), or lower floor=0.5 and round_to=2, or prune single"),
        ({"density": 0.5, "round_to": 5}, "round_to must be from 1 to the 4 units of 2.weight, not 5; lower it, or"),
        ({"density": 1.5}, "density must be above 0 and at most 1, not 1.5"),
        ({"density": 0.5, "round_to": 0}, "round_to must be at least 1 unit, not 0"),
        ({"density": 0.5, "min_units": 2.5}, "min_units must be a whole number, not 2.5"),
        ({"density": 0.5, "round_to": 8, "pattern": "weight"}, "round_to counts units, and pattern 'weight' has none"),
        ({"density": 0.5, "pattern": "units"}, "unknown pattern 'units'; did you mean 'unit'?"),
    ],
)
def test_targets_that_cannot_be_met_name_what_can(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        pruned(two_layers(), **options)
    assert message in str(caught.value)


def test_the_nearest_target_that_is_named_can_be_met() -> None:
    model = two_layers()
    assert weights_left(pruned(model, 0.0893)) == 5, "one unit of each: 2 + 1 + 2"


class ReadTwice(nn.Module):
    """Of eight hidden units, the first four are read twice, and have larger weights: 4 * 8 + 12 * 64 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(12, 64)
        self.a.weight.data[:4] *= 10

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).relu()
        found: Tensor = self.b(torch.cat([hidden, hidden[:, : self.b.in_features - hidden.shape[1]]], 1))
        return found


def test_a_target_is_met_or_refused_where_units_differ_in_size() -> None:
    model, example = ReadTwice(), torch.zeros(1, 4)
    with pytest.raises(InputError, match=r"density 0\.1 cannot be reached .* a density of at least 0\.165 "):
        Pruner(pattern="unit")(model, 0.1, example_inputs=example)
    mask = Pruner(pattern="unit")(model, 0.165, example_inputs=example)
    assert (mask.counts["a.weight"], mask.counts["b.weight"]) == (4, 128), "one of the large units is left"


class Parts(nn.Module):
    """The first eight rows of a weight run at 100 places, the other twelve at one; the former have larger weights."""

    def __init__(self, leading: tuple[int, ...]) -> None:
        super().__init__()
        self.w, self.o, self.p = nn.Parameter(torch.randn(*leading, 20, 6)), nn.Linear(8, 2), nn.Linear(12, 2)
        self.w.data[..., :8, :] *= 10
        self.o.weight.data *= 10

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        w = self.w.flatten(0, -2)
        many, once = w.split([w.shape[0] - self.p.in_features, self.p.in_features])
        hidden = nn.functional.linear(x, many).relu().mean(1), nn.functional.linear(x[:, 0], once).relu()
        return self.o(hidden[0]), self.p(hidden[1])


@pytest.mark.parametrize("density", [0.9, 0.7, 0.3])
def test_a_target_of_flops_is_met_where_parts_of_a_weight_run_at_other_places(density: float) -> None:
    example = torch.zeros(1, 100, 6)
    for seed in range(3):
        torch.manual_seed(seed)
        model = Parts(())
        costs = profile(model, example)
        mask = Pruner(pattern="unit", of="flops")(model, density, example_inputs=example)
        assert density - 0.13 < costs.total(mask) / costs.total() <= density, "a unit of the first takes 12.5%"


def test_a_target_of_flops_that_is_missed_inside_of_rows_is_warned_of() -> None:
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=r"% of the FLOPs are left, where 70% were asked for: parts of one weight's"):
        Pruner(pattern="unit", of="flops")(Parts((1,)), 0.7, example_inputs=torch.zeros(1, 100, 6))


def test_example_inputs_are_asked_for() -> None:
    with pytest.raises(InputError, match="pattern 'unit' follows the network's graph; give example_inputs="):
        Pruner(pattern="unit")(two_layers(), 0.5)
    with pytest.raises(InputError, match="pattern 'unit' needs the units of the network; give groups="):
        Pruner(pattern="unit").prune(dict(two_layers().named_parameters()), 0.5)


def test_examples_and_units_that_do_not_fit_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"the network does not run on the example inputs \(of \(1, 3\)\)"):
        Pruner(pattern="unit")(two_layers(), 0.5, example_inputs=torch.zeros(1, 3))
    assert capfd.readouterr().err == ""
    hidden, wrong = found().groups[0].units, torch.zeros(1, 3)
    for call in (
        lambda: slim(two_layers(), found().mask_without(hidden[:2]), wrong, groups=found()),
        lambda: slim(two_layers(), found().mask_without(hidden), wrong, groups=found()),
        lambda: Pruner(pattern="unit", of="flops")(two_layers(), 0.5, groups=found(), example_inputs=wrong),
    ):
        with pytest.raises(InputError, match=r"the network does not run on the example inputs \(of \(1, 3\)\)"):
            call()
    with pytest.raises(InputError, match=r"these units are of another model: here, 0\.weight have other shapes"):
        Pruner(pattern="unit")(nn.Sequential(nn.Linear(5, 8)), 0.5, groups=found())
    with pytest.raises(InputError, match="groups must be of type Units, not 5"):
        Pruner(pattern="unit")(two_layers(), 0.5, groups=5)  # type: ignore[arg-type]


def test_a_mask_of_single_weights_is_not_gone_on_from() -> None:
    model = two_layers()
    with pytest.raises(InputError, match="the mask to go on from removes parts of units"):
        pruned(model, 0.4, Pruner()(model, 0.5))


def test_a_network_without_units_says_so() -> None:
    normalised = [nn.utils.parametrizations.weight_norm(nn.Linear(2, 4)), nn.Linear(4, 3)]
    for layers, why in (
        ([nn.Linear(2, 3)], "it is an output of the network"),
        ([nn.Unflatten(1, (2, 1, 1)), nn.Conv2d(2, 3, 3, padding=1)], "it is an output of the network"),
        (normalised, "weight_norm divides by it"),
    ):
        with pytest.raises(InputError, match=rf"none of the network can shrink \(the most common reason: {why}"):
            Pruner(pattern="unit")(nn.Sequential(*layers), 0.5, example_inputs=EXAMPLE)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(value: float) -> None:
    model = two_layers()
    model[0].weight.data[2] = value
    with pytest.raises(InputError, match=r"cannot prune the units of .*NaN or infinite, the network has diverged"):
        pruned(model, 0.5)


def test_a_level_that_lost_a_large_unit_goes_on_to_the_next() -> None:
    """One of two units with 100 weights each is gone, where the next level asks for more than is left."""
    model = nn.Sequential(nn.Linear(50, 2), nn.ReLU(), nn.Linear(2, 50), nn.ReLU(), nn.Linear(50, 4))
    groups, pruner = units(model, (torch.zeros(1, 50),)), Pruner(pattern="unit", min_units=1)
    model[0].weight.data.mul_(torch.tensor([[1e-6], [1.0]]))
    model[2].weight.data.mul_(torch.tensor([[1e-6, 1.0]]))
    first = pruner(model, 0.99, groups=groups)
    assert first["0.weight"].any(1).sum() == 1
    assert pruner(model, 0.9, first, groups=groups) == first
