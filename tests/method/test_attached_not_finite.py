"""`attached` fills with zeros: what is not finite at a pruned weight is zero afterwards, and nothing else changes."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from masked_training import all_zero
from rewound import Mask

pytestmark = pytest.mark.usefixtures("one_thread")

KEPT = torch.arange(16).reshape(4, 4) % 3 == 0
MASK = Mask({"weight": KEPT})
DIVIDING: dict[str, Callable[..., Optimizer]] = {
    "adagrad": Adagrad,
    "adagrad-fused": partial(Adagrad, fused=True),
    "adam": Adam,
    "adam-amsgrad-foreach": partial(Adam, amsgrad=True, foreach=True),
    "adam-fused": partial(Adam, fused=True),
    "adamax": Adamax,
    "adamw": AdamW,
    "nadam": NAdam,
    "radam": RAdam,
    "rmsprop": RMSprop,
}


def layer(dtype: torch.dtype = torch.float32) -> nn.Linear:
    made = nn.Linear(4, 4, bias=False, dtype=dtype)
    nn.init.constant_(made.weight, 0.5)
    return made


def check_steps(model: nn.Linear, optimizer: Optimizer) -> None:
    """Take ten steps (RAdam divides from the sixth on) with a gradient of one everywhere."""
    with MASK.attached(model, optimizer):
        for _ in range(10):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
            assert all_zero(model.weight[~KEPT])
            assert bool(model.weight.isfinite().all())
        slots = [slot for slot in optimizer.state[model.weight].values() if slot.shape == KEPT.shape]
        assert all(bool(slot.isfinite().all()) for slot in slots)
    assert bool((model.weight[KEPT] < 0.5).all())


@pytest.mark.parametrize("name", DIVIDING)
def test_an_epsilon_that_float16_rounds_to_zero_divides_no_zero_by_zero(name: str) -> None:
    model = layer(torch.float16)
    check_steps(model, DIVIDING[name](model.parameters(), lr=0.01))


@pytest.mark.parametrize("name", DIVIDING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_nor_does_an_epsilon_of_zero(name: str, dtype: torch.dtype) -> None:
    model = layer(dtype)
    check_steps(model, DIVIDING[name](model.parameters(), lr=0.01, eps=0.0))


def test_slots_stay_numbers_where_the_optimizer_would_keep_what_it_divided() -> None:
    model = layer()
    optimizer = Adadelta(model.parameters(), eps=0.0)
    with MASK.attached(model, optimizer):
        for _ in range(3):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
            assert all_zero(model.weight[~KEPT])
            assert all_zero(optimizer.state[model.weight]["acc_delta"][~KEPT])


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_gradient_that_is_not_finite_at_pruned_weights_is_zero_there(value: float, dtype: torch.dtype) -> None:
    model, before = layer(dtype), layer(dtype).weight
    optimizer = SGD(model.parameters(), lr=1.0, momentum=0.9)
    scale = torch.ones(4, 4, dtype=dtype).masked_fill(~KEPT, value)
    with MASK.attached(model, optimizer):
        (model.weight * scale).sum().backward()
        assert all_zero(model.weight.grad[~KEPT])
        model.weight.grad = scale.clone()  # assigned, so that it never arrives
        optimizer.step()
    assert all_zero(model.weight[~KEPT])
    assert torch.equal(model.weight[KEPT], before[KEPT] - 1)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0])
def test_weights_written_by_data_are_zero_whatever_was_written(value: float) -> None:
    model = layer()
    optimizer = SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.1)
    with MASK.attached(model, optimizer):
        for _ in range(2):
            model.weight.data.masked_fill_(~KEPT, value)
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
            assert all_zero(model.weight[~KEPT])
            assert all_zero(optimizer.state[model.weight]["momentum_buffer"][~KEPT])


def test_a_sparse_gradient_that_is_not_finite_at_pruned_weights_is_zero_there() -> None:
    def lossy(model: nn.Embedding) -> Tensor:
        rows = torch.tensor([1, 2, 1])  # a row twice: the gradient has its values apart
        scale = torch.ones(3, 4).masked_fill(~KEPT[rows], float("inf"))
        return (model(rows) * scale).sum()

    model = nn.Embedding(4, 4, sparse=True)
    optimizer = SGD(model.parameters(), lr=1.0)
    lossy(model).backward()
    with MASK.attached(model, optimizer):
        before = model.weight.detach().clone()
        assert all_zero(model.weight.grad.to_dense()[~KEPT])
        optimizer.zero_grad()
        lossy(model).backward()
        assert all_zero(model.weight.grad.to_dense()[~KEPT])
        assert model.weight.grad.is_sparse
        optimizer.step()
        assert all_zero(model.weight[~KEPT])
    assert torch.equal(model.weight[KEPT], (before - torch.tensor([0.0, 2, 1, 0])[:, None])[KEPT])


def test_pruned_weights_and_gradients_are_a_positive_zero() -> None:
    model = layer()
    optimizer = SGD(model.parameters(), lr=1.0, momentum=0.9)
    with MASK.attached(model, optimizer):
        for _ in range(3):
            model.weight.data.masked_fill_(~KEPT, -1.0)
            model.weight.grad = torch.full_like(model.weight, -1.0)
            optimizer.step()
        for tensor in (model.weight.detach(), model.weight.grad, optimizer.state[model.weight]["momentum_buffer"]):
            assert not bool(tensor[~KEPT].signbit().any())


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")  # its cycle is broken below
def test_a_gradient_with_a_graph_is_masked_in_its_second_derivative_too() -> None:
    model = layer()
    vector = torch.arange(1.0, 17).reshape(4, 4)
    with MASK.attached(model):
        model.weight.pow(3).sum().backward(create_graph=True)
        assert all_zero(model.weight.grad[~KEPT])
        (product,) = torch.autograd.grad(model.weight.grad, model.weight, vector)
        model.weight.grad = None
    assert torch.equal(product, torch.where(KEPT, 6 * 0.5 * vector, 0))


def test_a_model_moved_to_another_precision_inside_the_context_keeps_its_zeros() -> None:
    model = layer()
    optimizer = SGD(model.parameters(), lr=0.1)
    with MASK.attached(model, optimizer):
        model.to(torch.float64)
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
        assert all_zero(model.weight[~KEPT])
    assert bool((model.weight[KEPT] != 0.5).all())
