"""`attached` whatever steps: optimizers it was not given, gradients of other origin, and ones that couple elements."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Adam

from masked_training import OPTIMIZERS, Centred, all_zero, by_product, half, pruned_slots, pruned_values, update
from rewound import Mask
from small_networks import batches, network

pytestmark = pytest.mark.usefixtures("one_thread")


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


def noise(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.add_(1.0)


@pytest.mark.parametrize("name", ["sgd-momentum-decay", "adamw", "rmsprop"])
def test_weights_written_by_data_are_zero_again_after_the_next_step(name: str) -> None:
    model = network()
    mask = half(model)
    optimizer = OPTIMIZERS[name](model.parameters())
    with mask.attached(model, optimizer):
        for step in range(3):
            noise(model)
            update(model, model, optimizer, "plain", step)
            assert all_zero(pruned_values(model, mask))
            assert all_zero(pruned_slots(model, mask, optimizer))


def test_weights_written_after_the_last_step_are_masked_with_a_warning() -> None:
    model = network()
    mask = half(model)
    optimizer = SGD(model.parameters(), lr=0.1)

    def train() -> None:
        with mask.attached(model, optimizer):
            update(model, model, optimizer, "plain", 0)
            noise(model)

    pruned = mask.total - mask.kept
    with pytest.warns(UserWarning, match=f"^{pruned} pruned weights were not zero .*; call mask.apply") as caught:
        train()
    assert [warning.filename for warning in caught] == [__file__]
    assert all_zero(pruned_values(model, mask))


def test_a_loss_that_is_no_number_is_not_taken_for_a_write() -> None:
    model = network()
    mask = half(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    with mask.attached(model, optimizer):  # a warning would be an error here
        (float("nan") * model(batches(1)[0][0])).sum().backward()
        optimizer.step()
    assert all_zero(pruned_values(model, mask))
    assert model[0].weight.isnan().any()  # what is left says what went wrong


@pytest.mark.parametrize("name", ["sgd-momentum-decay", "adamw"])
def test_optimizer_state_loaded_inside_is_masked(name: str) -> None:
    model = network()
    mask = half(model)
    optimizer = OPTIMIZERS[name](model.parameters())
    update(model, model, optimizer, "plain", 0)
    dense = copy.deepcopy(optimizer.state_dict())
    with mask.attached(model, optimizer):
        optimizer.load_state_dict(dense)
        assert all_zero(pruned_slots(model, mask, optimizer))
        update(model, model, optimizer, "plain", 1)
        assert all_zero(pruned_values(model, mask))


@pytest.mark.parametrize("loaded", [False, True])
def test_lbfgs_forgets_the_curvature_of_the_dense_network(loaded: bool) -> None:
    def train(model: nn.Module, optimizer: LBFGS) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    x, y = batches(1)[0]
    model, fresh = network(), network()
    mask = half(model)
    optimizer = LBFGS(model.parameters(), lr=0.1, max_iter=3)
    train(model, optimizer)
    dense = copy.deepcopy(optimizer.state_dict())
    fresh.load_state_dict(model.state_dict())
    other = LBFGS(fresh.parameters(), lr=0.1, max_iter=3)
    with mask.attached(model, optimizer), mask.attached(fresh, other):
        if loaded:
            optimizer.load_state_dict(dense)
        for _ in range(2):
            train(model, optimizer)
            train(fresh, other)
        learned = copy.deepcopy(optimizer.state_dict())
    assert all(torch.equal(value, fresh.state_dict()[key]) for key, value in model.state_dict().items())
    with mask.attached(model, optimizer):  # as a run that is continued does
        assert optimizer.state_dict()["state"][0]["n_iter"] == learned["state"][0]["n_iter"] > 0


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


class Codes(Tensor):
    """A quantised slot in the way of torchao: it can be copied from and to, and little else."""

    codes: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor) -> "Codes":
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(
        cls, func: object, types: object, args: tuple[Tensor, Tensor], kwargs: object = None
    ) -> Tensor:
        if func is not torch.ops.aten.copy_.default:
            raise NotImplementedError(f"Codes dispatch: attempting to run unimplemented operator {func}")
        to, source = args
        values = source.codes / 100 if isinstance(source, Codes) else source
        _ = to.codes.copy_(values * 100) if isinstance(to, Codes) else to.copy_(values)
        return to


class Quantised(SGD):
    """Keeps its momentum in eighth bits: as a tensor of its own kind, or as codes of which 0 stands for -1."""

    own_kind = True

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if "codes" not in (state := self.state[parameter]):
                zeros = torch.zeros_like(parameter)
                state["codes"] = Codes(zeros) if self.own_kind else (zeros + 128).to(torch.uint8)
            held = state["codes"]
            before = torch.zeros_like(parameter).copy_(held) if self.own_kind else held.float() / 128 - 1
            momentum = 0.9 * before + parameter.grad
            held.copy_(momentum if self.own_kind else ((momentum + 1) * 128).clamp(0, 255).round())
            parameter.sub_(0.1 * momentum)


@pytest.mark.parametrize("own_kind", [True, False])
def test_quantised_slots_neither_fail_nor_become_other_values(own_kind: bool) -> None:
    model = network()
    mask = half(model)
    optimizer = Quantised(model.parameters(), lr=0.1)
    optimizer.own_kind = own_kind
    for step in range(2):
        update(model, model, optimizer, "plain", step)
    before = {name: optimizer.state[weight]["codes"] for name, weight in model.named_parameters() if name in mask}
    held = {name: (slot.codes if own_kind else slot).clone() for name, slot in before.items()}
    with mask.attached(model, optimizer):
        for name, slot in before.items():
            now = slot.codes if own_kind else slot
            assert torch.allclose(now, held[name] * mask[name]) if own_kind else torch.equal(now, held[name])
        for step in range(2, 6):
            update(model, model, optimizer, "plain", step)
            assert all_zero(pruned_values(model, mask))
