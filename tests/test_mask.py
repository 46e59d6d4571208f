"""Masks, and law 3: `attached` is W (.) m, checked against the product in the forward pass to the last bit."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.optimizer import _global_optimizer_pre_hooks

from rewound import InputError, Mask, Pruner

MakeOptimizer = Callable[[Iterator[nn.Parameter]], Optimizer]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network(memory_format: torch.memory_format = torch.contiguous_format) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)]
    return nn.Sequential(*layers).to(memory_format=memory_format)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    return [
        (torch.randn(6, 2, 4, 4, generator=draw), torch.randint(4, (6,), generator=draw, dtype=torch.int64))
        for _ in range(count)
    ]


def half(model: nn.Module, density: float = 0.4) -> Mask:
    return Pruner()(model, density)


def pruned_values(model: nn.Module, mask: Mask) -> Tensor:
    return torch.cat([model.get_parameter(name)[~kept] for name, kept in mask.items()])


# Adamax and Rprop write a least value into these, whatever the gradient; their updates of a zero stay zero.
FLOORED = ("exp_inf", "step_size")


def pruned_slots(model: nn.Module, mask: Mask, optimizer: Optimizer) -> Tensor:
    slots = [
        slot[~kept]
        for name, kept in mask.items()
        for key, slot in optimizer.state[model.get_parameter(name)].items()
        if isinstance(slot, Tensor) and slot.shape == kept.shape and key not in FLOORED
    ]
    return torch.cat([torch.zeros(1), *slots])


def all_zero(values: Tensor) -> bool:
    return bool((values == 0).all())


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
    with pytest.raises(InputError, match=f"the mask of 'w' must be of bool, not {dtype}"):
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
    assert all(torch.equal(back[name], mask[name]) for name in mask)


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
        "this mask is for another model: no parameter of the mask's name and shape for "
        r"layer0.weight, layer1.weight, layer2.weight, layer3.weight, layer4.weight and 2 more$"
    )
    with pytest.raises(InputError, match=message):
        mask.apply(network())
    with pytest.raises(InputError, match=message), mask.attached(network()):
        pass


def test_a_mask_of_another_shape_is_for_another_model() -> None:
    mask = Mask({"0.weight": torch.ones(3, 2, 3, 3, dtype=torch.bool), "4.weight": torch.ones(4, 1, dtype=torch.bool)})
    with pytest.raises(InputError, match=r"name and shape for 4\.weight$"):
        mask.apply(network())


class Wrapped(nn.Module):
    """What DataParallel and DistributedDataParallel do to names, without processes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


class Compiled(nn.Module):
    """What torch.compile does to names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, x: Tensor) -> Tensor:
        return self._orig_mod(x)


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


# Law 3: attached == the product in the forward pass

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(SGD, lr=0.1),
    "sgd-momentum-decay": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd-dampening": partial(SGD, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd-nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd-foreach": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "sgd-fused": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "adam": partial(Adam, lr=0.01),
    "adam-decay": partial(Adam, lr=0.01, weight_decay=0.01),
    "adam-amsgrad": partial(Adam, lr=0.01, amsgrad=True),
    "adam-foreach": partial(Adam, lr=0.01, weight_decay=0.01, foreach=True),
    "adam-fused": partial(Adam, lr=0.01, weight_decay=0.01, fused=True),
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.1),
    "adamw-fused": partial(AdamW, lr=0.01, weight_decay=0.1, fused=True),
    "rmsprop": partial(RMSprop, lr=0.01, momentum=0.9, weight_decay=0.01),
    "rmsprop-centered": partial(RMSprop, lr=0.01, centered=True),
    "adagrad": partial(Adagrad, lr=0.1, weight_decay=0.01, initial_accumulator_value=0.1),
    "adadelta": partial(Adadelta, weight_decay=0.01),
    "adamax": partial(Adamax, weight_decay=0.01),
    "nadam": partial(NAdam, weight_decay=0.01),
    "radam": partial(RAdam, weight_decay=0.01),
    "asgd": partial(ASGD, weight_decay=0.01),
    "rprop": Rprop,
}

LOOPS = ("plain", "clip-norm", "clip-value", "accumulate", "autocast", "scaler", "scaler-clip", "own-gradients")


def update(forward: Callable[[Tensor], Tensor], model: nn.Module, optimizer: Optimizer, loop: str, step: int) -> None:
    """One optimizer step the way `loop` does it; `forward` is the model with or without the product."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=loop.startswith("scaler"))
    parameters = list(model.parameters())
    optimizer.zero_grad()
    for x, y in batches(12)[2 * step : 2 * step + (2 if loop == "accumulate" else 1)]:
        with torch.autocast("cpu", torch.bfloat16) if loop == "autocast" else nullcontext():
            loss = F.cross_entropy(forward(x), y)
        if loop == "own-gradients":
            for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = grad
        else:
            scaler.scale(loss).backward()
    if loop == "clip-norm":
        nn.utils.clip_grad_norm_(parameters, 0.1)
    if loop == "clip-value":
        nn.utils.clip_grad_value_(parameters, 0.01)
    if loop == "scaler-clip":
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 0.1)
    scaler.step(optimizer)
    scaler.update()


def by_product(make: MakeOptimizer, loop: str, mask: Mask, model: nn.Module | None = None) -> nn.Module:
    """The reference: raw weights, multiplied by the mask wherever they are used."""
    model = model or network()
    optimizer = make(model.parameters())
    for step in range(2):
        update(model, model, optimizer, loop, step)

    def forward(x: Tensor) -> Tensor:
        weights = {n: p * mask[n] if n in mask else p for n, p in model.named_parameters()}
        return functional_call(model, weights, (x,))

    for step in range(2, 6):
        update(forward, model, optimizer, loop, step)
    for name, kept in mask.items():
        model.get_parameter(name).data.mul_(kept)
    return model


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


@pytest.mark.parametrize("name", ["sgd-momentum-decay", "adamw", "rmsprop"])
def test_an_optimizer_that_was_not_given_is_masked_on_first_use(name: str) -> None:
    mask = half(network())
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(2):
        update(model, model, optimizer, "plain", step)
    with mask.attached(model):
        for step in range(2, 6):
            update(model, model, optimizer, "plain", step)
            assert all_zero(pruned_values(model, mask))
            assert all_zero(pruned_slots(model, mask, optimizer))
    expected = by_product(OPTIMIZERS[name], "plain", mask).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def test_each_of_two_optimizers_of_one_model_is_masked() -> None:
    model = network()
    mask = half(model)
    first, second = Adam(model[0].parameters()), SGD(model[4].parameters(), lr=0.1, momentum=0.9)
    for optimizer in (first, second):
        update(model, model, optimizer, "plain", 0)
    with mask.attached(model, first):
        for optimizer in (first, second):
            update(model, model, optimizer, "plain", 1)
            assert all_zero(pruned_values(model, mask))


def test_an_optimizer_made_inside_is_masked_though_its_predecessor_is_gone() -> None:
    model = network()
    mask = half(model)
    with mask.attached(model):
        for _ in range(5):  # a dead optimizer's id may be given to the next one
            optimizer = Centred(model.parameters(), lr=0.1)
            update(model, model, optimizer, "plain", 0)
            assert all_zero(pruned_values(model, mask))
            del optimizer


def test_a_gradient_left_from_before_is_masked() -> None:
    model = network()
    mask = half(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    model(batches(1)[0][0]).square().sum().backward()
    with mask.attached(model, optimizer):
        optimizer.step()
        assert all_zero(pruned_values(model, mask))


def test_noise_added_to_gradients_does_not_reach_pruned_weights() -> None:
    model = network()
    mask = half(model)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with mask.attached(model, optimizer):
        for x, y in batches(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for parameter in model.parameters():
                parameter.grad.add_(1.0)
            optimizer.step()
            assert all_zero(pruned_values(model, mask))


def test_a_step_that_the_scaler_skips_leaves_pruned_weights_zero() -> None:
    model = network()
    mask = half(model)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with mask.attached(model, optimizer):
        before = copy.deepcopy(model[4].weight)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(1e9 * model(batches(3)[step][0]).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert all_zero(pruned_values(model, mask))
        assert torch.equal(model[4].weight, before)  # every step overflowed
    assert scaler.get_scale() < 2.0**127


class Centred(Optimizer):
    """Couples the elements of a tensor twice, as LARS (a norm over all of it) and gradient centralisation do."""

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.seen: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.seen += [p.detach().clone(), p.grad.clone()]
                    trust = p.norm() / (p.grad.norm() + 1e-3)
                    p.sub_(group["lr"] * trust * (p.grad - p.grad.mean()))


class Sgd(Centred):
    """Called like one of torch's own, but it is not."""


Sgd.__name__ = "SGD"


@pytest.mark.parametrize("kind", [Centred, Sgd])
@pytest.mark.parametrize("given", [True, False])
def test_an_optimizer_that_couples_elements_keeps_zeros(kind: type[Centred], given: bool) -> None:
    model = network()
    mask = Mask({"4.weight": half(model)["4.weight"]})
    optimizer = kind(iter([model[4].weight]), lr=0.1)
    start = model[4].weight.detach().clone()
    with mask.attached(model, optimizer if given else None):
        for step in range(3):
            update(model, model, optimizer, "plain", step)
            assert all_zero(pruned_values(model, mask))
    assert not torch.equal(model[4].weight, start * mask["4.weight"])
    assert len(optimizer.seen) == 6
    assert all(all_zero(tensor[~mask["4.weight"]]) for tensor in optimizer.seen)


# Nothing is left behind


def step_after(model: nn.Module, optimizer: Optimizer) -> None:
    update(model, model, optimizer, "plain", 0)


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


# Kinds of parameters


def test_a_frozen_weight_is_masked_and_stays_frozen() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    mask = half(model)
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
    model[0].weight.requires_grad_(False)
    mask = half(model)
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


class Tied(nn.Module):
    """One matrix as embedding and as output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 3)
        self.output = nn.Linear(3, 6, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.embedding(tokens))


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


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
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
