"""`attached` whatever is trained: frozen, unused, tied, sparse, channels-last, low-precision and compiled weights."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.utils.checkpoint import checkpoint

from masked_training import OPTIMIZERS, all_zero, by_product, half, pruned_values, step_after, update
from rewound import Mask
from small_networks import Tied, batches, network

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_frozen_weight_is_masked_and_stays_frozen() -> None:
    model = network()
    mask = half(model)  # before, as what is frozen would not be pruned
    model[0].weight.requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    with mask.attached(model, optimizer):
        assert not model[0].weight.requires_grad
        kept = model[0].weight.clone()
        step_after(model, optimizer)
        assert torch.equal(model[0].weight, kept)
        assert all_zero(pruned_values(model, mask))
    assert not model[0].weight.requires_grad


def test_a_weight_thawed_inside_the_context_keeps_its_zeros() -> None:
    model = network()
    mask = half(model)  # before, as what is frozen would not be pruned
    model[0].weight.requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1)
    with mask.attached(model, optimizer):
        model[0].weight.requires_grad_(True)
        before = model[0].weight.detach().clone()
        step_after(model, optimizer)
        assert not torch.equal(model[0].weight, before)
        assert all_zero(pruned_values(model, mask))


def test_a_weight_that_gets_no_gradient_stays_as_it_is() -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    mask = half(model)
    optimizer = Adam(model.parameters())
    unused = model[1].weight.detach() * mask["1.weight"]
    with mask.attached(model, optimizer):
        model[0](torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert torch.equal(model[1].weight, unused)
    assert all_zero(pruned_values(model, mask))


@pytest.mark.parametrize("names", [["embedding.weight"], ["output.weight"], ["embedding.weight", "output.weight"]])
def test_tied_weights_are_one_weight_under_any_of_their_names(names: list[str]) -> None:
    torch.manual_seed(0)
    model = Tied()
    masks = dict(zip(names, (torch.rand(2, 6, 3) > 0.4), strict=False))
    pruned = ~torch.stack(list(masks.values())).all(0)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Mask(masks).attached(model, optimizer):
        before = model.embedding.weight.detach().clone()
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.arange(6)), torch.arange(6)).backward()
            optimizer.step()
            assert all_zero(model.output.weight[pruned])
    assert bool((model.embedding.weight != before)[~pruned].all())


def test_sparse_gradients_are_masked() -> None:
    model = nn.Embedding(5, 4, sparse=True)
    mask = half(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    with mask.attached(model, optimizer):
        before = model.weight.detach().clone()
        model(torch.tensor([1, 2, 1])).square().sum().backward()
        optimizer.step()
        assert all_zero(pruned_values(model, mask))
    assert not torch.equal(model.weight, before)


def test_a_sparse_gradient_left_from_before_is_masked() -> None:
    model = nn.Embedding(5, 4, sparse=True)
    mask = half(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    model(torch.tensor([1, 2, 1])).square().sum().backward()
    with mask.attached(model, optimizer):
        assert all_zero(model.weight.grad.to_dense()[~mask["weight"]])
        optimizer.step()
        assert all_zero(pruned_values(model, mask))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_of_checkpointed_layers_are_masked_before_clipping(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    mask = half(model)
    with mask.attached(model):
        x = torch.ones(2, 4, requires_grad=True)
        hidden = checkpoint(model[1], model[0](x), use_reentrant=reentrant)
        model[2](hidden).square().sum().backward()
        for name, kept in mask.items():
            gradient = model.get_parameter(name).grad
            assert bool(gradient.any())
            assert all_zero(gradient[~kept])


@pytest.mark.numeric
def test_channels_last_is_the_product_as_well() -> None:
    make = OPTIMIZERS["sgd-momentum-decay"]
    model = network(torch.channels_last)
    mask = half(model)
    optimizer = make(model.parameters())
    for step in range(2):
        update(model, model, optimizer, "plain", step)
    with mask.attached(model, optimizer):
        for step in range(2, 6):
            update(model, model, optimizer, "plain", step)
            assert all_zero(pruned_values(model, mask))
    expected = by_product(make, "plain", mask, network(torch.channels_last)).state_dict()
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def test_a_low_precision_weight_is_masked_in_its_own_precision() -> None:
    model = network().to(torch.bfloat16)
    mask = half(model)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with mask.attached(model, optimizer):
        model(batches(1)[0][0].bfloat16()).square().sum().backward()
        optimizer.step()
        assert model[4].weight.grad.dtype == torch.bfloat16
        assert all_zero(pruned_values(model, mask))


@pytest.mark.numeric
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.usefixtures("float64")  # compiled sums may be rounded otherwise, and a ReLU must not see it
def test_a_compiled_model_trains_as_the_plain_one_does(backend: str) -> None:
    mask = half(network())
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = network()
        forward = torch.compile(model, backend=backend) if compiled else model
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        with mask.attached(forward, optimizer):
            for step in range(4):
                update(forward, model, optimizer, "clip-norm", step)
                assert all_zero(pruned_values(model, mask))
        results.append(model.state_dict())
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value)
