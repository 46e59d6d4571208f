"""From the large network's shapes to the small one's and back: states, optimizers, models in place, dead layers."""

import copy
import gc
import pickle
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from architectures import IMAGES
from rewound import InputError, Mask
from rewound.foundations.copying import copied
from rewound.method.structure.groups import Units
from rewound.method.structure.kept import contracted, expanded, kept_indices, mask_of_dead_layers, shapes_of
from rewound.method.structure.slimming import Slim, slim, slim_to
from rewound.method.structure.tracing import units
from rewound.tasks.recipes.resnet import ResNet
from slim_and_masked import BOUND, compared
from small_networks import Merging

EXAMPLE = (IMAGES.double(),)


def network(blocks: int = 2, width: int = 4) -> ResNet:
    """Residual blocks of four channels, in float64, with all its tensors drawn."""
    model = ResNet((blocks,), (width,), generator=torch.Generator().manual_seed(0)).double()
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.linspace(0.1, 0.9, tensor.numel()).reshape(tensor.shape).sin() - 0.3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.add_(1)
    return model


def producer_of(found: Units, name: str) -> Any:
    return next(group for group in found if group.name == name)


INNER = "stage1.block1.conv1.weight"  # its filters are tied to nothing else, and are on a residual branch


def half_mask(found: Units) -> Mask:
    return found.mask_without(unit for group in found for unit in group.units[1::2])


def filters_only(model: nn.Module, name: str, gone: list[int]) -> Mask:
    kept = torch.ones_like(model.get_parameter(name), dtype=torch.bool)
    kept[gone] = False
    return Mask({name: kept})


def test_a_mask_of_filters_is_completed_to_whole_units() -> None:
    model = network()
    found, name = units(model, EXAMPLE), INNER
    given = filters_only(model, name, [1, 3])
    group = producer_of(found, name)
    whole = found.whole(given)
    assert whole == found.mask_without([group.units[1], group.units[3]])
    assert found.whole(whole) == whole
    with pytest.raises(InputError, match=r"not of whole units.*rewound\.units\(\.\.\.\)\.whole\(mask\)"):
        slim(model, given, EXAMPLE)
    assert slim(model, whole, EXAMPLE).model.get_parameter(name).shape[0] == 2


def test_a_channel_that_several_layers_produce_is_gone_when_all_of_them_lack_it() -> None:
    model = network()
    found = units(model, EXAMPLE)
    stream = next(group for group in found if len(group.producers) > 1)
    names = [name for name, _ in stream.producers]
    assert len(names) == 3, "the projection, and the second convolution of both blocks"
    part = Mask({name: filters_only(model, name, [0])[name] for name in names[:2]})
    assert found.whole(part) == part
    every = Mask({name: filters_only(model, name, [0])[name] for name in names})
    assert found.whole(every) == found.mask_without([stream.units[0]])


def test_what_is_only_read_by_units_that_are_gone_goes_with_them() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    with torch.no_grad():
        model[2].weight.fill_(1.0)
    found = units(model, (torch.zeros(1, 2),))
    given = {"0.weight": torch.ones(3, 2, dtype=torch.bool), "2.weight": torch.ones(3, 3, dtype=torch.bool)}
    given["0.weight"][0] = False
    given["2.weight"][1, 1:] = False  # this unit reads only the one that is gone
    assert not found.whole(Mask(given))["4.weight"][0, 1]


def test_a_residual_branch_may_go_and_one_unit_of_zeros_keeps_its_place() -> None:
    model = network()
    found, name = units(model, EXAMPLE), INNER
    mask = found.mask_without(producer_of(found, name).units)
    made = slim(model, mask, EXAMPLE)
    assert made.model.get_parameter(name).shape[0] == 1
    assert name in made.mask
    assert not made.mask[name].any()
    assert made.mask == mask_of_dead_layers(mask, made.kept)
    masked = copy.deepcopy(model)
    mask.apply(masked)
    both = []
    for each, its_mask in ((masked, mask), (made.model, made.mask)):
        each.train()
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        with its_mask.attached(each, optimizer):
            for _ in range(3):
                optimizer.zero_grad()
                each(*EXAMPLE).square().mean().backward()
                optimizer.step()
        both.append(each.eval()(*EXAMPLE))
    assert torch.allclose(both[0], both[1], rtol=0, atol=1e-10)
    assert not made.model.get_parameter(name).any()


class Branches(nn.Module):
    """Layers beside a shortcut: an odd convolution, and two linear layers with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Conv2d(3, 5, 3, padding=2, dilation=2), nn.Conv2d(5, 3, 3, stride=2, padding=1)
        self.wide, self.narrow = nn.Linear(3, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = (x[..., ::2, ::2] + self.outside(self.inside(x).relu())).mean((2, 3))
        found: Tensor = x + self.narrow(self.wide(x).relu())
        return found


def operations(model: nn.Module, kinds: str) -> int:
    graph = torch.export.export(model, EXAMPLE, strict=False).graph
    return sum(kind in str(node.target) for node in graph.nodes for kind in kinds.split())


@pytest.mark.parametrize("model", [network(), Branches().double()], ids=["resnet", "branches"])
def test_to_run_it_dead_layers_take_no_time(model: nn.Module) -> None:
    found = units(model, EXAMPLE)
    inner = [INNER] if isinstance(model, ResNet) else ["inside.weight", "wide.weight"]
    mask = found.mask_without(unit for name in inner for unit in producer_of(found, name).units)
    made = slim(model, mask, EXAMPLE)
    fast = made.for_inference()
    assert operations(fast, "conv linear") == operations(made.model.eval(), "conv linear") - 2 * len(inner)
    for images in (EXAMPLE[0], EXAMPLE[0][:1, :, 1:, 2:]):
        assert torch.allclose(fast(images), made.model(images), rtol=0, atol=1e-12)
    assert not fast.training
    assert fast.state_dict().keys() == made.model.state_dict().keys()
    assert torch.equal(copy.deepcopy(fast).float()(EXAMPLE[0].float()), copy.deepcopy(fast.float())(EXAMPLE[0].float()))


def test_a_mask_without_dead_layers_needs_nothing_to_stay_attached() -> None:
    model = network()
    assert len(slim(model, half_mask(units(model, EXAMPLE)), EXAMPLE).mask) == 0


class OfBatches(nn.Module):
    """Takes its input in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.last(self.first(batch["images"]).relu())


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)), (IMAGES,)),
        (OfBatches(), ({"images": IMAGES},)),
        (
            nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)),
            (torch.tensor([[0, 6, 2], [1, 1, 5]]),),
        ),
    ],
)
def test_a_dead_layer_on_the_only_path_is_refused(model: nn.Module, example: tuple[Any]) -> None:
    found = units(model, example)
    group = found.groups[-1]
    expected = rf"removes all units of {group.name} \({len(group)}\), which are on the only way .* keep at least one"
    mask = found.mask_without(group.units)
    with pytest.raises(InputError, match=expected):
        slim(model, mask, example)
    mask.apply(model)  # then the given weights no longer show that the outputs depend on the inputs
    with pytest.raises(InputError, match=expected):
        slim(model, mask, example)


class Bags(nn.Module):
    """Takes offsets, of which the first must be 0."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first, self.last = nn.EmbeddingBag(7, 4), nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.last(self.first(self.words(ids, offsets)).relu())


def test_a_dead_layer_is_refused_where_the_network_does_not_take_other_inputs() -> None:
    model, example = Bags(), (torch.tensor([0, 6, 2, 1]), torch.tensor([0, 2]))
    found = units(model, example)
    with pytest.raises(InputError, match="which are on the only way"):
        slim(model, found.mask_without(found.groups[0].units), example)


@pytest.mark.parametrize("seed", [255, 441])
def test_a_dead_layer_is_refused_where_its_units_are_silent_on_the_example(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    group = units(model, (IMAGES,)).groups[0]
    with pytest.raises(InputError, match=r"removes all units of 0\.weight \(4\), which are on the only way"):
        slim(model, units(model, (IMAGES,)).mask_without(group.units), (IMAGES,))


def test_cutting_and_expanding_are_inverse_for_masked_states() -> None:
    model = network()
    mask = half_mask(units(model, EXAMPLE))
    mask.apply(model)
    made = slim(model, mask, EXAMPLE)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    small = contracted(parameters, made.kept)
    assert {name: tensor.shape for name, tensor in small.items()} == {
        name: parameter.shape for name, parameter in made.model.named_parameters()
    }
    back = expanded(small, made.kept, made.shapes)
    assert all(torch.equal(back[name], parameter) for name, parameter in parameters.items())
    with pytest.raises(InputError, match=r"where the large network has .*; give a state of the large network"):
        made.state(made.model.state_dict())
    with pytest.raises(InputError, match="state must be of type Mapping, not None; give tensors of the large network"):
        made.state(None)  # type: ignore[arg-type]


def test_channels_stay_last_in_memory() -> None:
    model = network().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(*EXAMPLE).sum().backward()
    optimizer.step()
    found = units(model, EXAMPLE)
    made = slim(model, half_mask(found), EXAMPLE, groups=found)
    slots = made.optimizer(optimizer).state
    filters = [weight for weight in made.model.parameters() if weight.ndim == 4 and min(weight.shape[1:]) > 1]
    assert filters
    for weight in filters:
        for tensor in (weight, slots[weight]["momentum_buffer"]):
            assert tensor.is_contiguous(memory_format=torch.channels_last)
            assert not tensor.is_contiguous()
    again = expanded(made.model.state_dict(), made.kept, made.shapes)
    assert again[INNER].stride() == model.get_parameter(INNER).stride()


def test_a_slim_network_is_rebuilt_from_what_is_left() -> None:
    model = network()
    mask = half_mask(units(model, EXAMPLE))
    made = slim(model, mask, EXAMPLE)
    again = slim_to(network(), kept_indices(units(model, EXAMPLE), mask, shapes_of(model)), EXAMPLE)
    assert all(torch.equal(tensor, made.model.state_dict()[name]) for name, tensor in again.model.state_dict().items())
    assert torch.equal(again.model.eval()(*EXAMPLE), made.model.eval()(*EXAMPLE))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss = model.train()(*EXAMPLE).square().mean()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
def test_a_users_own_model_and_optimizer_become_small_in_place(kind: Any) -> None:
    model = network()
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind([{"params": list(model.parameters()), "lr": 0.01}], **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    still_alive = step(model, optimizer)  # as a loop's last loss is
    scheduler.step()
    held = list(model.parameters())
    made = slim(model, half_mask(units(model, EXAMPLE)), EXAMPLE)
    beside = made.optimizer(optimizer)
    made.into(model)
    made.into_optimizer(optimizer, model)
    assert still_alive.isfinite()
    assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
    assert sum(map(torch.numel, held)) < 0.6 * sum(map(torch.numel, network().parameters()))
    for _ in range(2):
        step(model, optimizer)
        step(made.model, beside)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.005
    small = made.model.state_dict()
    assert all(torch.allclose(t, small[name], rtol=0, atol=1e-12) for name, t in model.state_dict().items())


def test_gradients_are_dropped_of_what_keeps_its_shape_too() -> None:
    model, example = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (torch.randn(5, 3),)
    found = units(model, example)
    small = slim(model, found.mask_without(found.groups[0].units[:2]), example)
    model(*example).sum().backward()
    small.into(model)
    assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == []


def test_the_large_model_is_not_kept_for_its_optimizer() -> None:
    model = network()
    made: Slim = slim(model, half_mask(units(model, EXAMPLE)), EXAMPLE)
    for other in (network().parameters(), made.model.parameters()):
        with pytest.raises(InputError, match="that the model that was given to slim does not have; give its own"):
            made.optimizer(torch.optim.SGD(other, lr=0.1))
    with pytest.raises(InputError, match="optimizer must be of type Optimizer, not None"):
        made.optimizer(None)  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(made)).shapes == copy.deepcopy(made).shapes == made.shapes
    weights = weakref.ref(model.get_parameter(INNER))
    del model
    gc.collect()
    assert weights() is None


def test_models_and_slots_that_do_not_fit_are_refused() -> None:
    model = network()
    made: Slim = slim(model, half_mask(units(model, EXAMPLE)), EXAMPLE)
    with pytest.raises(InputError, match="the model is Linear here and ResNet in the network that was slimmed"):
        made.into(nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"stage1\.block2 is \w+ here and nothing in .* made in the same way"):
        halved(network(1), EXAMPLE[0]).into(model)
    with pytest.raises(InputError, match=r"of other shapes, than the large one that was slimmed: .* in the same way"):
        made.into(network(width=6))
    with pytest.raises(InputError, match="model must be of type Module, not 'x'; give the large model"):
        made.into("x")  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer)
    with pytest.raises(InputError, match=r"have not become small; call into\(model\) before into_optimizer"):
        made.into_optimizer(optimizer, model)
    made.into(model)
    name, slots = INNER, optimizer.state[model.get_parameter(INNER)]
    diverged = torch.full(made.shapes[name], torch.nan)
    assert made.slot(name, "momentum_buffer", diverged).shape == made.model.get_parameter(name).shape
    slots["preconditioner"] = torch.eye(7)
    with pytest.raises(InputError, match=rf"slot preconditioner of {name} has the shape \(7, 7\).*a new optimizer"):
        made.into_optimizer(optimizer, model)
    slots["preconditioner"] = [torch.eye(4), torch.eye(3)]
    with pytest.raises(InputError, match=rf"slot preconditioner of {name} is a list of tensors, .*a new optimizer"):
        made.into_optimizer(optimizer, model)
    assert slots["momentum_buffer"].shape == made.shapes[name], "what is refused stays as it was"
    with pytest.raises(InputError, match="the optimizer trains parameters that this model does not have"):
        made.into_optimizer(torch.optim.SGD(network().parameters(), lr=0.1), model)


def test_masks_of_other_models_and_what_are_no_units_are_refused() -> None:
    model, other = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)), nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    example = (torch.ones(1, 6),)
    mask = half_mask(units(model, example))
    for call in (lambda: slim(other, mask, example), lambda: units(other, example).whole(mask)):
        with pytest.raises(InputError, match=r"this mask is for another model: no parameter here has .* of 0\.weight"):
            call()
    with pytest.raises(InputError, match="each unit must be of type Unit, not 1; give units of these groups"):
        units(model, example).mask_without([1])  # type: ignore[list-item]


def halved(model: nn.Module, example: torch.Tensor) -> Slim:
    """The network without every second unit of each group."""
    groups = units(model, (example,))
    return slim(model, groups.mask_without([unit for group in groups for unit in group.units[::2]]), (example,))


class Limited(nn.Module):
    """Takes at most eight steps of a sequence, and has eight hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.limit = nn.Linear(6, 8), nn.Linear(8, 4), 8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x[:, : self.limit]).relu()).mean(1)


def test_a_number_that_makes_no_difference_on_the_example_stays() -> None:
    assert halved(Limited(), torch.randn(2, 3, 6)).model.limit == 8


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.a(x)
        return self.b(hidden) / hidden.shape[-1]


@pytest.mark.parametrize("example", [torch.zeros(2, 6), torch.ones(2, 6)])
def test_an_example_of_zeros_hides_nothing(example: torch.Tensor) -> None:
    model = Averaged()
    assert not units(model, (example,)).groups
    groups = units(nn.Sequential(OrderedDict(a=model.a, b=model.b)), (example,))
    mask = groups.mask_without(groups.groups[0].units[:3])
    with pytest.raises(InputError, match="its outputs differ"):
        slim(model, mask, (example,), groups=groups)


class Float(nn.Module):
    """Its own code says which type it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x.float()).relu())


def test_a_network_that_casts_its_input_slims_in_its_own_type() -> None:
    assert halved(Float(), torch.randint(0, 255, (2, 6), dtype=torch.uint8)).model.a.out_features == 4


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"y": self.b(self.a(batch["x"]).relu())}


def test_inputs_and_outputs_may_be_in_dictionaries() -> None:
    assert halved(Nested(), {"x": torch.randn(2, 6)}).model.a.out_features == 4  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [6, 8])
def test_slopes_of_prelu_go_with_their_channels(width: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.PReLU(8), nn.Conv2d(8, 4, 3))
    small = halved(model, torch.randn(2, 3, width, width)).model
    assert small[1].weight.shape == (4,)
    assert small[1].num_parameters == 4


@pytest.mark.parametrize(
    ("large", "small"),
    [
        (nn.InstanceNorm2d(8), nn.InstanceNorm2d(4)),
        (nn.GroupNorm(4, 8, affine=False), nn.GroupNorm(2, 4, affine=False)),
    ],
)
def test_normalisation_without_weights_counts_the_channels_that_are_left(large: nn.Module, small: nn.Module) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.one, self.other, self.last = nn.Conv2d(3, 8, 3), large, copied(large), nn.Conv2d(8, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.last(self.other(input=self.one(self.first(x)).relu()))
            return found

    made = halved(Named(), torch.randn(2, 3, 9, 9)).model
    assert made.first.out_channels == 4
    assert repr(made.one) == repr(made.other) == repr(small)


def test_graphs_inside_the_graph_are_pinned() -> None:
    class Chosen(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, super().forward, torch.clone, (x,))

    found = units(Chosen(nn.Linear(6, 8), nn.Linear(8, 6)), (torch.randn(2, 6),))
    assert not found.groups
    assert "the operation cond is not known" in found.pinned.values()


class Autocast(nn.Module):
    """Computes in another type, and a part of it not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.first(x).relu()
            with torch.autocast("cpu", enabled=False):
                hidden = hidden * self.first(x).sigmoid().to(hidden)
            hidden = self.second(hidden)
        return self.last(hidden.to(x))


def test_what_computes_in_another_type_is_followed() -> None:
    model, example = Autocast(), (torch.randn(2, 6),)
    assert [len(group) for group in units(model, example)] == [8, 5]
    assert compared((model, example, {})).difference < BOUND


class WithGradients(nn.Module):
    """Computes a part with gradients, whoever calls it, and a part without."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            hidden = self.first(x).relu()
        with torch.no_grad():
            hidden = self.second(hidden)
        found: Tensor = self.last(hidden)
        return found


def test_what_computes_with_gradients_is_followed() -> None:
    model, example = WithGradients(), (torch.randn(2, 6),)
    assert [len(group) for group in units(model, example)] == [8, 5]


class Kept(nn.Module):
    """Keeps what it computed, as for a plot, and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.hidden, self.seen = torch.zeros(0), list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.a(x).relu()
        self.seen.append(self.hidden)
        return self.b(self.hidden)


def spectral() -> nn.Module:
    layers = nn.Linear(6, 5), nn.utils.spectral_norm(nn.Linear(5, 8)), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4)
    return nn.Sequential(*layers)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [Kept, spectral])
def test_a_network_that_keeps_what_it_computed_is_copied(make: Any) -> None:
    model, example = make().train(), torch.randn(2, 6)
    model(example).sum().backward()
    found = units(model, (example,))
    mask = found.mask_without([unit for group in found for unit in group.units[::2]])
    small = slim(model, mask, (example,)).model.eval()
    masked = copied(model).eval()
    mask.apply(masked)
    other = torch.randn(3, 6)
    assert torch.allclose(masked(other), small(other), atol=1e-6)


class Closed(nn.Module):
    """Calls its first layer by a function that keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.hidden = lambda x: self.last(self.first(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.hidden(x)
        return found


def test_a_network_whose_copy_computes_with_weights_of_the_original_is_refused() -> None:
    model, example = Closed(), (torch.randn(4, 6),)
    with pytest.raises(InputError, match=r"computes with weights of the original \(first\.weight, .*from self where"):
        slim(model, half_mask(units(model, example)), example)


def test_a_network_without_values_is_refused() -> None:
    with torch.device("meta"):
        model, example = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)), (torch.ones(1, 6),)
    found = units(model, example)
    with pytest.raises(InputError, match=r"no memory yet \(meta device\)"):
        slim(model, half_mask(found), example, groups=found)


def test_an_example_may_be_of_another_type_than_the_network() -> None:
    model, example = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double(), (torch.randn(2, 6),)
    assert slim(model, half_mask(units(model, example)), example).model[0].out_features == 4


def test_what_is_set_on_a_parameter_is_on_that_of_the_slim_network() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    model[0].weight.decays = False  # type: ignore[attr-defined]
    small = halved(model, torch.ones(2, 6)).model
    assert vars(small[0].weight) == {"decays": False}
    assert not vars(small[2].weight)


@torch.inference_mode()
def test_a_network_that_was_slimmed_in_inference_mode_can_be_trained() -> None:
    small = halved(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), torch.ones(2, 6)).model
    with torch.inference_mode(False):
        small(torch.ones(2, 6)).sum().backward()
    assert small[0].weight.grad.shape == (4, 6)


def test_a_graph_of_torch_fx_becomes_small_in_place() -> None:
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)))
    made, x = halved(model, torch.ones(2, 6)), torch.randn(2, 6)
    made.into(model)
    assert torch.equal(model(x), made.model(x))
    other = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
    with pytest.raises(InputError, match="give a model that is made in the same way"):
        made.into(other)


def test_an_error_of_somebodys_own_copying_is_a_sentence() -> None:
    class Unwilling(nn.Sequential):
        def __deepcopy__(self, memo: object) -> "Unwilling":
            raise ValueError("use clone()\nin two lines")

    model, x = Unwilling(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), torch.ones(2, 6)
    with pytest.raises(
        InputError, match=r"^a copy of the Unwilling is needed and cannot be made \(use clone\(\)\); keep"
    ):
        halved(model, x)


def test_weights_that_are_merged_for_evaluation_are_refused() -> None:
    model, example = nn.Sequential(Merging(3, 4), nn.ReLU(), nn.Linear(4, 2)), (torch.randn(5, 3),)
    assert not units(model, example).groups
    alike = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2))
    found, before = units(alike, example), model[0].weight.detach().clone()
    with pytest.raises(InputError, match=r"a smaller copy of this network cannot be run .* skip="):
        slim(model, found.mask_without(found.groups[0].units[:2]), example, groups=found)
    assert torch.equal(model[0].weight, before)
    assert not model[0].merged


class Renamed(torch.optim.SGD):
    """An optimizer whose arguments have other names than its defaults."""

    def __init__(self, parameters: Any, rate: float) -> None:
        super().__init__(parameters, lr=rate)


def test_optimizers_that_cannot_be_cut_or_made_again_say_so() -> None:
    model, example = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (torch.randn(5, 3),)
    found = units(model, example)
    small = slim(model, found.mask_without(found.groups[0].units[:2]), example)
    with pytest.raises(InputError, match=r"Renamed cannot be made from its defaults .* by into and into_optimizer"):
        small.optimizer(Renamed(model.parameters(), 0.1))
    optimizer = torch.optim.LBFGS([model[2].bias, model[0].weight, model[0].bias, model[2].weight])
    assert len(small.optimizer(optimizer).param_groups[0]["params"]) == 4, "it has no history yet"

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(*example).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    with pytest.raises(InputError, match="LBFGS keeps its last steps as vectors of all parameters together"):
        small.optimizer(optimizer)
    small.into(model)
    with pytest.raises(InputError, match="LBFGS keeps"):
        small.into_optimizer(optimizer, model)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_copy_without_the_hooks_on_gradients_is_warned_of(register: str) -> None:
    model, example = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (torch.randn(5, 3),)
    found = units(model, example)
    getattr(model[2].weight, register)(lambda _: None)
    with pytest.warns(UserWarning, match=r"^2\.weight of this model has hooks on gradients"):
        slim(model, found.mask_without(found.groups[0].units[:2]), example)


def test_a_model_that_becomes_small_in_place_keeps_its_hooks_on_gradients() -> None:
    model, example = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (torch.randn(5, 3),)
    found = units(model, example)
    model[2].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    with pytest.warns(UserWarning, match="make the model itself small by into"):
        small = slim(model, found.mask_without(found.groups[0].units[:2]), example)
    small.into(model)
    model(*example).square().sum().backward()
    gradient = model[2].weight.grad
    assert gradient is not None
    assert gradient.shape == (2, 2)
    assert gradient.abs().max() <= 1e-3
