"""Each group is normalised as `nn.BatchNorm2d` would by itself."""

import pytest
import torch
from torch import Tensor, nn

import rewound
from rewound.foundations.errors import InputError
from rewound.tasks.normalisation import GroupedBatchNorm2d
from rewound.tasks.recipes.resnet import ResNet
from sameness import assert_same


def images(n: int, seed: int = 0, **of: object) -> Tensor:
    return torch.randn(n, 3, 4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(**of)


def norms(group: int, **of: object) -> tuple[GroupedBatchNorm2d, nn.BatchNorm2d]:
    grouped, plain = GroupedBatchNorm2d(3, group), nn.BatchNorm2d(3)
    with torch.no_grad():
        for norm in (grouped, plain):
            norm.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
            norm.bias.copy_(torch.tensor([-1.0, 0.0, 3.0]))
    return grouped.to(**of), plain.to(**of)


def test_groups_are_normalised_by_themselves_also_in_the_gradient() -> None:
    grouped, plain = norms(4, dtype=torch.float64)
    x, y = (images(12).requires_grad_() for _ in range(2))
    scale = images(12, seed=1)
    (grouped(x) * scale).sum().backward()
    pieces = [plain(piece) for piece in y.split(4)]
    (torch.cat(pieces) * scale).sum().backward()
    # Sums of 80 values of magnitude 1 in double precision.
    assert torch.allclose(grouped(x), torch.cat(pieces), rtol=0, atol=1e-12)
    for one, other in ((x, y), (grouped.weight, plain.weight), (grouped.bias, plain.bias)):
        assert torch.allclose(one.grad, other.grad, rtol=0, atol=1e-12)


def test_the_gradient_is_that_of_differences() -> None:
    grouped, _ = norms(2, dtype=torch.float64)
    weight, bias = grouped.weight.detach().requires_grad_(), grouped.bias.detach().requires_grad_()

    def normalised(*tensors: Tensor) -> Tensor:
        return torch.func.functional_call(grouped, dict(zip(("weight", "bias"), tensors[1:], strict=True)), tensors[0])

    assert torch.autograd.gradcheck(normalised, (images(4)[:, :, :2, :2].requires_grad_(), weight, bias))


def test_running_statistics_move_once_by_the_mean_over_groups() -> None:
    grouped, _ = norms(4, dtype=torch.float64)
    x = images(12)
    grouped(x)
    pieces = [piece.transpose(0, 1).flatten(1) for piece in x.split(4)]
    mean, variance = (torch.stack(each).mean(0) for each in zip(*((p.mean(1), p.var(1)) for p in pieces), strict=True))
    assert torch.allclose(grouped.running_mean, 0.1 * mean, atol=1e-14)
    assert torch.allclose(grouped.running_var, 0.9 + 0.1 * variance, atol=1e-14)
    assert grouped.num_batches_tracked == 1
    grouped.momentum = None  # the mean over all batches
    grouped(x)
    assert torch.allclose(grouped.running_mean, (0.1 * mean + mean) / 2, atol=1e-14)


@pytest.mark.parametrize("batch", [1, 7, 8])
def test_one_group_is_plain_batch_norm(batch: int) -> None:
    grouped, plain = norms(8)
    x = images(batch, dtype=torch.float32)
    assert torch.equal(grouped(x), plain(x))
    assert_same(grouped.state_dict(), plain.state_dict())
    assert torch.equal(grouped.eval()(images(9, dtype=torch.float32)), plain.eval()(images(9, dtype=torch.float32)))


def test_a_last_group_that_is_smaller_is_refused() -> None:
    with pytest.raises(InputError, match="a batch of 9 images is not a whole number of groups of 4; give a batch size"):
        norms(4)[0](images(9, dtype=torch.float32))


@pytest.mark.numeric
def test_bfloat16_activations_keep_their_layout_and_have_statistics_in_float32() -> None:
    grouped, _ = norms(4)
    x = images(8).to(torch.bfloat16).contiguous(memory_format=torch.channels_last).requires_grad_()
    out = grouped(x)
    assert out.dtype == torch.bfloat16
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert grouped.running_mean.dtype == torch.float32
    out.float().square().sum().backward()
    assert x.grad.is_contiguous(memory_format=torch.channels_last)
    exact, _ = norms(4)
    # A result of at most about 10 is rounded to 8 significant bits.
    assert torch.allclose(out.float(), exact(x.detach().float()), atol=0.04)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does it
def test_it_compiles_to_one_graph() -> None:
    grouped, again = norms(4)[0], norms(4)[0]
    x, y = (images(8, dtype=torch.float32).requires_grad_() for _ in range(2))
    compiled = torch.compile(again, backend="aot_eager", fullgraph=True)
    grouped(x).square().sum().backward()
    compiled(y).square().sum().backward()
    assert torch.allclose(x.grad, y.grad, atol=1e-5)
    assert torch.allclose(grouped.running_var, again.running_var)


@pytest.mark.parametrize(("batch", "group"), [(4, 1), (1, 1), (1, 2)])
def test_a_group_of_one_value_is_refused(batch: int, group: int) -> None:
    norm = GroupedBatchNorm2d(3, group)
    with pytest.raises(InputError, match=r"one value in each channel.*give larger images, or a larger batch-size and"):
        norm(torch.rand(batch, 3, 1, 1))
    assert norm.eval()(torch.rand(batch, 3, 1, 1)).shape == (batch, 3, 1, 1)


def test_a_slim_network_is_the_masked_one_and_keeps_its_groups() -> None:
    """Law 8, also where a group has as many images as a layer has channels."""
    net = ResNet((1, 1), (8, 16), bottleneck=True, batch_norm_group=8, generator=torch.Generator().manual_seed(0))
    x = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    net = net.double()
    groups = rewound.units(net, (x[:1],))
    group = next(each for each in groups.groups if each.name == "stage1.block1.conv1.weight")
    mask = groups.mask_without(group.units[:3])
    small = rewound.slim(net, mask, (x[:1],), groups=groups).model
    mask.apply(net)
    norm = small.stage1.block1.conv1.bn
    assert (type(norm), norm.group, norm.num_features) == (GroupedBatchNorm2d, 8, 5)
    for mode in (True, False):
        # A dozen sums of at most a few thousand products in double precision.
        assert torch.allclose(net.train(mode)(x), small.train(mode)(x), rtol=0, atol=1e-9)
