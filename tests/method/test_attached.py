"""Law 3: `attached` is W (.) m, to the last bit of the product in the forward pass, and nothing is left behind."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.optimizer import _global_optimizer_pre_hooks

from masked_training import (
    LOOPS,
    OPTIMIZERS,
    Centred,
    all_zero,
    by_product,
    half,
    pruned_slots,
    pruned_values,
    step_after,
    update,
)
from rewound import Pruner
from small_networks import network

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_attached_is_the_product_in_the_forward_pass(name: str, loop: str) -> None:
    mask = half(network())
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(2):  # dense first: the optimizer arrives with slots that are not zero
        update(model, model, optimizer, loop, step)
    with mask.attached(model, optimizer):
        assert all_zero(pruned_values(model, mask))
        assert all_zero(pruned_slots(model, mask, optimizer))
        for step in range(2, 6):
            update(model, model, optimizer, loop, step)
            assert all_zero(pruned_values(model, mask))
            assert all_zero(pruned_slots(model, mask, optimizer))
    expected = by_product(OPTIMIZERS[name], loop, mask).state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key]), key


# Nothing is left behind


def test_weights_loaded_inside_the_context_are_masked_at_the_next_step() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    dense = copy.deepcopy(model.state_dict())
    mask = Pruner()(model, 0.3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with mask.attached(model, sgd):
        for _ in range(2):
            model(torch.randn(5, 6)).square().mean().backward()
            sgd.step()
        model.load_state_dict(dense)
        for _ in range(2):
            model(torch.randn(5, 6)).square().mean().backward()
            sgd.step()
            assert not model.weight[~mask["weight"]].any()


def test_after_the_context_everything_trains_again() -> None:
    model = network()
    mask = half(model)
    optimizer = Centred(model.parameters(), lr=0.1)
    hooks = len(_global_optimizer_pre_hooks)
    with mask.attached(model, optimizer):
        step_after(model, optimizer)
    assert len(_global_optimizer_pre_hooks) == hooks
    step_after(model, optimizer)
    assert bool((pruned_values(model, mask) != 0).all())


def test_after_an_exception_everything_trains_again() -> None:
    model = network()
    mask = half(model)
    optimizer = SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    hooks = len(_global_optimizer_pre_hooks)

    def interrupted() -> None:
        with mask.attached(model, optimizer):
            step_after(model, optimizer)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert len(_global_optimizer_pre_hooks) == hooks
    assert all_zero(pruned_values(model, mask))
    step_after(model, optimizer)
    assert not all_zero(pruned_values(model, mask))


def test_contexts_nest() -> None:
    model = network()
    outer, inner = half(model, 0.6), half(model, 0.3)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with outer.attached(model, optimizer):
        with inner.attached(model, optimizer):
            step_after(model, optimizer)
            assert all_zero(pruned_values(model, inner))
        step_after(model, optimizer)
        assert all_zero(pruned_values(model, outer))
        assert not all_zero(pruned_values(model, inner))


def test_the_model_is_an_ordinary_one_inside_the_context() -> None:
    model = network()
    keys = list(model.state_dict())
    optimizer = Adam(model.parameters())
    mask = half(model)
    with mask.attached(model, optimizer):
        step_after(model, optimizer)
        assert list(model.state_dict()) == keys
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
        optimizers = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    for twin in copies:  # copies hold the same values and train freely
        assert all(torch.equal(value, twin.state_dict()[key]) for key, value in model.state_dict().items())
        step_after(twin, SGD(twin.parameters(), lr=0.1))
        assert not all_zero(pruned_values(twin, mask))
    assert all(len(twin.state) == len(optimizer.state) for twin in optimizers)
