"""Scores of weights and units that need more than the weights: batches, normalisation; and rates by layer."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rewound import InputError, Mask, Pruner
from rewound.method.pruning.scores import observations
from rewound.method.structure.tracing import units
from small_networks import Merging

IMAGES = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def convolutions() -> nn.Sequential:
    torch.manual_seed(3)
    layers = (nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1), nn.Flatten(), nn.Linear(80, 2))
    return nn.Sequential(*layers).eval()


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


def left(mask: Mask, name: str) -> list[int]:
    return mask[name].flatten(1).any(1).nonzero()[:, 0].tolist()


def batches(count: int = 3) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 3, 4, 4, generator=generator),) for _ in range(count)]


def test_the_scale_of_normalisation_ranks_its_units() -> None:
    model = convolutions()
    model[1].weight.data.copy_(torch.tensor([3.0, -0.1, 2.0, -4.0]))
    mask = Pruner("bn-scale", pattern="unit", only=("0.*",))(model, 0.75, example_inputs=IMAGES)
    assert left(mask, "0.weight") == [0, 2, 3]
    with pytest.raises(InputError, match=r"the units of 3\.weight have none; leave them out with skip"):
        Pruner("bn-scale", pattern="unit")(model, 0.75, example_inputs=IMAGES)


def test_taylor_is_the_product_of_weight_and_gradient() -> None:
    """The loss is linear in each output, so that what a weight adds to it is known."""
    model = nn.Linear(3, 2, bias=False)
    model.weight.data.copy_(torch.tensor([[1.0, -2.0, 0.5]] * 2))
    given = [torch.tensor([[1.0, 0.0, 8.0]]), torch.tensor([[1.0, 0.0, -8.0]])]  # effects 1, 0 and 4
    mask = Pruner("taylor")(model, 0.7, batches=given, loss=lambda model, x: model(x).sum())
    assert mask["weight"].tolist() == [[True, False, True]] * 2
    assert Pruner("magnitude")(model, 0.7)["weight"].tolist() == [[True, True, False]] * 2


def test_taylor_of_units_is_the_mean_of_their_weights() -> None:
    model = convolutions()
    found = observations(model, batches(), mean_square)
    effects = found.effects
    own = torch.cat([effects["0.weight"].flatten(1), effects["3.weight"].transpose(0, 1).flatten(1)], 1).mean(1)
    pruner = Pruner("taylor", pattern="unit", only=("0.*",))
    mask = pruner(model, 0.5, example_inputs=IMAGES, batches=batches(), loss=mean_square)
    assert left(mask, "0.weight") == sorted(own.topk(2).indices.tolist())


def test_effects_are_those_of_autograd_on_each_batch() -> None:
    model = convolutions()
    effects = observations(model, batches(), mean_square).effects
    expected = torch.zeros_like(model[0].weight)
    for batch in batches():
        model.zero_grad()
        mean_square(model, batch).backward()
        expected += (model[0].weight * model[0].weight.grad).abs() / 3
    assert torch.allclose(effects["0.weight"], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "pruner",
    [
        Pruner("l2"),
        Pruner("l2", pattern="2:4"),
        Pruner(pattern="block 4x4", scope="layer"),
        Pruner("l2", pattern="unit"),
    ],
)
def test_weights_of_half_precision_are_ranked_as_they_are_in_float64(pruner: Pruner, dtype: torch.dtype) -> None:
    """Squares of weights around 1e-4 are zero in float16, and means over blocks are rounded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    for parameter in model.parameters():
        parameter.data.mul_(1e-3)
    masks = []
    for kind in (dtype, torch.float64):
        example = torch.zeros(1, 32, dtype=kind) if pruner.by_units else None
        masks.append(pruner(model.to(kind), None if pruner.pattern == "2:4" else 0.525, example_inputs=example))
    assert masks[0] == masks[1]


def test_effects_of_weights_of_half_precision_are_not_lost() -> None:
    model = nn.Linear(3, 1, bias=False).half()
    model.weight.data.copy_(torch.tensor([[1e-3, 3e-3, 2e-3]]))
    given = [torch.full((1, 3), 1e-5, dtype=torch.float16)]
    effects = observations(model, given, lambda model, x: model(x).sum()).effects["weight"]
    expected = model.weight.detach().double() * given[0].double()
    assert torch.allclose(effects.double(), expected, rtol=1e-5, atol=0)


def test_activation_is_what_layers_read() -> None:
    model = convolutions()
    found = observations(model, batches(), mean_square)
    read = torch.stack([model[:3](batch[0]) for batch in batches()]).abs().mean((0, 1, 3, 4))
    assert torch.allclose(found.inputs["3.weight", 1], read.double(), rtol=1e-5)
    flat = torch.stack([model[:5](batch[0]) for batch in batches()]).abs().mean((0, 1))
    assert torch.allclose(found.inputs["5.weight", 1], flat.double(), rtol=1e-5), "sixteen inputs from each channel"
    mask = Pruner("activation", pattern="unit", only=("3.*",))(
        model, 0.6, example_inputs=IMAGES, batches=batches(), loss=mean_square
    )
    channels = flat.reshape(5, 16).mean(1)
    assert left(mask, "3.weight") == sorted(channels.topk(3).indices.tolist())


def test_recurrent_layers_and_groups_of_channels_read_too() -> None:
    x = torch.randn(2, 7, 4)
    lstm = nn.LSTM(4, 3, num_layers=2, batch_first=True)
    read = observations(lstm, [x], lambda model, batch: model(batch)[0].sum()).inputs
    assert torch.allclose(read["weight_ih_l0", 1], x.double().abs().mean((0, 1)))
    images = torch.randn(2, 6, 5, 5)
    grouped = nn.Conv2d(6, 4, 3, groups=2)
    read = observations(grouped, [images], lambda model, batch: model(batch).sum()).inputs
    assert torch.allclose(read["weight", 1], images.double().abs().reshape(2, 2, 3, 5, 5).mean((0, 1, 3, 4)))


def test_measuring_leaves_the_model_as_it_was() -> None:
    model = convolutions().train()
    model[3].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    observations(model, batches(), mean_square)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model] == [True, True, True, False, True, True]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_as_many_batches_are_taken_as_the_pruner_says() -> None:
    taken = []

    def endless() -> Iterator[tuple[Tensor]]:
        while True:
            taken.append(1)
            yield (IMAGES,)

    Pruner("taylor", batches=3)(convolutions(), 0.5, batches=endless(), loss=mean_square)
    assert len(taken) == 3


@pytest.mark.parametrize("score", ["taylor", "activation"])
def test_recurrent_and_transposed_layers_are_measured(score: str) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm, self.out = nn.Linear(3, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.out(self.lstm(self.embed(x))[0])
            return found

    model, x = Tagger(), torch.randn(2, 6, 3)
    pruner = Pruner(score, pattern="unit", only=("lstm.weight_*",))
    mask = pruner(model, 0.7, example_inputs=x, batches=[(x,)], loss=mean_square)
    assert not mask["lstm.weight_hh_l0"].all()


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"score": "taylor"}, {}, "score 'taylor' is measured on training data; give batches=, a list of batches, and"),
        ({"score": "l2"}, {"batches": batches()}, "score 'l2' needs neither batches nor loss; leave them out"),
        ({"score": "taylor"}, {"batches": [], "loss": mean_square}, "there are no batches to measure scores on"),
        ({"score": "taylor", "batches": 0}, {}, "batches must be at least 1, not 0"),
        ({"batches": 4}, {}, "batches=4 belongs to score taylor or activation; score 'magnitude' needs none"),
        ({"score": "bn-scale"}, {}, "score 'bn-scale' is of units, and pattern 'weight' has none; use 'unit'"),
        ({"score": "l3"}, {}, "unknown score 'l3'; did you mean 'l2'?"),
    ],
)
def test_what_is_missing_is_said(fields: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Pruner(**fields)(convolutions(), 0.5, **options)
    assert message in str(caught.value)


# Rates by layer


@pytest.mark.parametrize(
    ("loss", "given"),
    [
        (lambda model, x: model(x), r"a tensor of shape \(4, 2\)"),
        (lambda model, x: model(x).sum().item(), r"-?\d+\.\d+"),
        (lambda model, x: model(x).sum().detach(), "a tensor without a gradient"),
        (lambda model, x: model(x).sum() and None, "None"),
    ],
)
def test_only_effects_need_a_loss_with_a_gradient(loss: Any, given: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    groups, x = units(model, torch.zeros(1, 6)), torch.randn(4, 6)
    options = {"groups": groups, "batches": [x]}
    read = Pruner(pattern="unit", score="activation")
    assert read(model, 0.5, **options, loss=loss) == read(model, 0.5, **options, loss=lambda model, x: model(x).sum())
    with pytest.raises(InputError, match=rf"^score 'taylor' differentiates what loss returns, and that is {given}; re"):
        Pruner(pattern="unit", score="taylor")(model, 0.5, **options, loss=loss)


def test_rates_say_what_goes_of_each_layer() -> None:
    model = convolutions()
    pruner = Pruner(rates={"0.*": 0.5, "3.weight": 0.25, "*": 0.0})
    mask = pruner(model)
    shapes = {name: tuple(mask[name].shape) for name in mask}
    assert mask.counts == {"0.weight": 12 - 6, "3.weight": 20 - 5, "5.weight": 160}
    assert pruner.kept(shapes, None) == mask.kept
    assert pruner.own_density(shapes) == mask.density
    assert pruner(model, mask=mask) == mask, "the same part again is gone already"
    assert hash(pruner) == hash(Pruner(rates=(("0.*", 0.5), ("3.weight", 0.25), ("*", 0.0))))


def test_rates_of_units_go_by_the_weights_that_produce_them() -> None:
    model = convolutions()
    groups = units(model, (IMAGES,))
    pruner = Pruner(pattern="unit", rates={"0.*": 0.5, "3.weight": 0.25})
    mask = pruner(model, groups=groups)
    assert (len(left(mask, "0.weight")), len(left(mask, "3.weight"))) == (2, 4)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    kept = sum(mask.counts[name] for name in ("0.weight", "3.weight", "5.weight"))
    assert kept == pruner.kept(shapes, None, groups=groups, model=model) == 2 * 3 + 4 * 2 + 2 * 64
    assert pruner.own_density(shapes, groups=groups, model=model) == kept / 192


@pytest.mark.parametrize(
    ("fields", "density", "message"),
    [
        ({"rates": {"0.*": 1.0}}, None, "the rate of '0.*' must be at least 0 and below 1, not 1: it is what goes"),
        ({"rates": {"7.*": 0.5}}, None, "rates '7.*' matches no parameter of the model; it has 0.weight"),
        ({"rates": {"0.*": 0.5}}, 0.5, "the table of rates says itself how much goes; leave out the density 0.5"),
        ({"rates": {"0.*": 0.5}, "scope": "layer"}, None, "says how much goes of each layer; leave out scope"),
        ({"rates": 0.5}, None, "rates must be a table of rates by name pattern, as {'stage1.*': 0.3}, not 0.5"),
    ],
)
def test_rates_that_cannot_be_are_refused(fields: dict[str, Any], density: float | None, message: str) -> None:
    with pytest.raises(InputError) as caught:
        Pruner(**fields)(convolutions(), density)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"2.*": 0.5}, r"rates '2\.\*' removes no units: those of 2\.weight stay \(it is an output of the network\)"),
        ({"0.*": 0.5, "2.*": 0.5}, r"rates '2\.\*' removes no units"),
        ({"0.bias": 0.5}, r"rates '0\.bias' removes no units: it matches no weight of a layer"),
    ],
)
def test_rates_by_which_no_unit_goes_are_refused(rates: dict[str, float], message: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    with pytest.raises(InputError, match=message):
        Pruner(pattern="unit", rates=rates)(model, example_inputs=torch.ones(1, 6))


class Sum(nn.Module):
    """Two layers that produce the same units."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.last = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.one(x) + self.other(x))
        return found


def test_a_rate_for_one_of_several_layers_that_produce_the_same_units_is_refused() -> None:
    with pytest.raises(InputError, match=r"removes no units: other\.weight also produce them, and have no rate"):
        Pruner(pattern="unit", rates={"one.*": 0.5})(Sum(), example_inputs=torch.ones(1, 6))
    mask = Pruner(pattern="unit", rates={"o*": 0.5})(Sum(), example_inputs=torch.ones(1, 6))
    assert mask["last.weight"].sum() == 4 * 4


def test_weights_that_are_merged_for_evaluation_are_parted_again() -> None:
    model = nn.Sequential(Merging(3, 4), nn.ReLU(), nn.Linear(4, 2))
    before, given = model[0].weight.detach().clone(), [torch.randn(5, 3)]
    Pruner("taylor", only=("2.*",))(model, 0.5, batches=given, loss=lambda model, x: model(x).square().mean())
    assert not model[0].merged
    torch.testing.assert_close(model[0].weight.detach(), before)
