"""The network against the authors' parameter counts, initialisation and six recorded training steps."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from rewound import Mask, Pruner
from rewound.method.pruning.prunable import prunable_weights
from rewound.tasks.recipes.cifar10 import ResNet20
from rewound.tasks.recipes.resnet import ResNet, SamePool, Stem, resnet34, resnet50
from sameness import assert_same


def resnet(depth: int = 20, seed: int = 0) -> ResNet:
    return ResNet(((depth - 2) // 6,) * 3, generator=torch.Generator().manual_seed(seed))


def count(net: nn.Module, *ending: str) -> int:
    return sum(parameter.numel() for name, parameter in net.named_parameters() if name.endswith(ending))


@pytest.mark.parametrize(
    ("make", "proj", "prunable", "norm", "trainable"),
    [
        (resnet34, 176_128, 21_783_744, 17_152, 21_801_896),
        (resnet50, 2_768_896, 25_502_912, 53_120, 25_557_032),
    ],
)
def test_imagenet_networks(make: object, proj: int, prunable: int, norm: int, trainable: int) -> None:
    net = make(torch.Generator().manual_seed(0))
    assert count(net, "proj.weight") == proj
    assert sum(weight.numel() for weight in prunable_weights(net).values()) == prunable
    assert count(net, "bn.weight", "bn.bias") == norm
    assert count(net, "") == trainable
    last = "conv3.bn.weight" if make is resnet50 else "conv2.bn.weight"
    assert all(bool((p == 0).all()) for name, p in net.named_parameters() if name.endswith(last))
    assert {module.momentum for module in net.modules() if isinstance(module, nn.BatchNorm2d)} == {0.1}
    assert net.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
    strides = [(block.conv1.stride, block.conv2.stride) for block in (net.stage2.block1, net.stage1.block1)]
    assert strides == ([((1, 1), (2, 2)), ((1, 1), (1, 1))] if make is resnet50 else [((2, 2), (1, 1)), ((1, 1),) * 2])


def test_the_pool_pads_as_tensorflow_does() -> None:
    """An even size at its end alone, an odd one on both sides."""
    even, odd = torch.arange(4.0).expand(1, 1, 4, 4), torch.arange(5.0).flip(0).expand(1, 1, 5, 5)
    assert SamePool()(even)[0, 0, 0].tolist() == [2, 3]
    assert SamePool()(odd)[0, 0, 0].tolist() == [4, 3, 1]
    assert SamePool()(-1 - even[:, :, :3])[0, 0].tolist() == [[-1, -3], [-1, -3]], "beyond the end there is nothing"


@pytest.mark.parametrize("spoiled", [None, math.nan, math.inf])
def test_the_first_layers_are_the_same_in_the_form_for_gpus(
    monkeypatch: pytest.MonkeyPatch, spoiled: float | None
) -> None:
    """Stem and pool compute what torch's own do, with the same gradients, also where pixels of a window are equal."""
    draw = torch.Generator().manual_seed(0)
    stem = Stem(3, 8, 7, 2).double().train()
    images = torch.randint(-3, 4, (2, 3, 20, 24), generator=draw).double()
    if spoiled is not None:
        images[1, 0, 5, 5] = spoiled
    found = []
    for open_gate in (False, True):
        monkeypatch.setattr("rewound.tasks.recipes.resnet._is_compiled_training", lambda *_, gate=open_gate: gate)
        x = images.clone().requires_grad_()
        convolved = stem(x)
        drawn = torch.randint(-3, 4, convolved.shape, generator=torch.Generator().manual_seed(1)).double()
        ties = (drawn + 0 * convolved.detach()).requires_grad_()  # few different numbers, and what is none
        pooled = SamePool()(ties)
        weights = torch.rand(pooled.shape, generator=torch.Generator().manual_seed(2)).double()
        gradients = torch.autograd.grad((weights * pooled).sum(), ties)
        found.append((convolved, pooled, *gradients, *torch.autograd.grad(convolved.square().sum(), [x, stem.weight])))
    plain, other = found
    torch.testing.assert_close(other, plain, rtol=1e-12, atol=1e-10, equal_nan=True)
    if spoiled is None:
        assert all(bool(each.any()) for each in plain)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does it, not we
def test_compiled_training_takes_the_form_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a captured step calls the network; here the CPU counts as a GPU."""
    net = ResNet((1,), (8,), generator=torch.Generator().manual_seed(0), stem_size=7, stem_stride=2, pool=True)
    asked = "rewound.tasks.recipes.resnet._is_compiled_training"
    monkeypatch.setattr(asked, lambda module, x: module.training and torch.compiler.is_dynamo_compiling())
    for training in (True, False):
        called: list[str] = []

        def backend(graph: torch.fx.GraphModule, _: object, called: list[str] = called) -> torch.fx.GraphModule:
            called.extend(str(node.target) for node in graph.graph.nodes)
            return graph

        forward = torch.compile(lambda tensors, x: functional_call(net, tensors, (x,)), backend=backend)
        net.train(training)
        forward(dict(net.named_parameters()), torch.rand(2, 3, 32, 32))
        assert any("autograd_function" in name for name in called) == training, "our pool"
        torch.compiler.reset()


@pytest.mark.parametrize(
    ("depth", "conv", "norm", "trainable"),
    [(20, 267_696, 1_600, 272_762), (56, 848_304, 4_288, 856_058), (110, 1_719_216, 8_320, 1_731_002)],
)
def test_parameter_counts(depth: int, conv: int, norm: int, trainable: int) -> None:
    net = resnet(depth)
    assert count(net, "stem.weight", "conv1.weight", "conv2.weight") == conv
    assert count(net, "proj.weight") == 2_816
    assert (count(net, "dense.weight"), count(net, "dense.bias")) == (640, 10)
    assert count(net, "bn.weight", "bn.bias") == norm
    assert count(net, "") == trainable
    running = [buffer for name, buffer in net.named_buffers() if "running" in name]
    assert sum(buffer.numel() for buffer in running) == norm


@pytest.mark.parametrize(("depth", "prunable"), [(20, 271_152), (56, 851_760), (110, 1_722_672)])
def test_prunable_counts(depth: int, prunable: int) -> None:
    assert sum(weight.numel() for weight in resnet(depth).parameters() if weight.ndim > 1) == prunable


def test_every_stage_starts_with_a_projection() -> None:
    projections = [name for name in resnet().state_dict() if name.endswith("proj.weight")]
    assert projections == [f"stage{stage}.block1.proj.weight" for stage in (1, 2, 3)]


def test_small_network_for_grey_images() -> None:
    net = ResNet((1, 2), (4, 8), channels=1, classes=5, generator=torch.Generator().manual_seed(0))
    assert net(torch.zeros(2, 1, 8, 8)).shape == (2, 5)
    assert net.stage2.block2.conv2.weight.shape == (8, 8, 3, 3)


@pytest.mark.parametrize(("blocks", "widths"), [((3, 3), (16,)), ((), ()), ((1, 0), (16, 32)), ((1,), (0,))])
def test_stages_must_agree(blocks: tuple[int, ...], widths: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"blocks={blocks} and widths={widths} must have the same number of entries")
    ):
        ResNet(blocks, widths, generator=torch.Generator())


# Initialisation


def test_initialisation_follows_the_authors() -> None:
    net = resnet(56)
    for name, module in net.named_modules():
        if isinstance(module, nn.Conv2d):
            weight, deviation = module.weight.detach(), 1 / math.sqrt(module.weight[0].numel())
            # Cut at two standard deviations of the normal before the cut, which is wider than the result.
            assert weight.abs().max() <= 2 * deviation / 0.8796 * 1.0001, name
            # The standard error of a deviation is below 1/sqrt(2n).
            assert weight.std().item() == pytest.approx(deviation, rel=4 / math.sqrt(2 * weight.numel())), name
        if isinstance(module, nn.BatchNorm2d):
            assert (module.eps, module.momentum) == (1e-5, 0.003)
            for tensor, value in zip(module.state_dict().values(), (1, 0, 0, 1, 0), strict=True):
                assert bool((tensor == value).all())
    assert net.dense.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert not net.dense.bias.any()


def test_large_truncated_normal_has_its_moments() -> None:
    net = ResNet((1,), (256,), generator=torch.Generator().manual_seed(0))
    weight = net.stage1.block1.conv1.weight.detach().double() * 48  # 1/sqrt(fan-in)
    assert weight.mean().item() == pytest.approx(0, abs=0.005)
    assert weight.var().item() == pytest.approx(1, abs=0.005)
    # Of a normal cut at 2 sigma, 71.5% lie within 1 sigma; sigma is 1/0.8796.
    assert (weight.abs() < 1 / 0.8796).double().mean().item() == pytest.approx(0.7152, abs=0.005)


@pytest.mark.numeric
def test_weights_come_from_the_generator_alone() -> None:
    random = torch.random.get_rng_state()
    first, again, other = resnet(seed=1).state_dict(), resnet(seed=1).state_dict(), resnet(seed=2).state_dict()
    assert torch.equal(random, torch.random.get_rng_state())
    assert_same(first, again)
    assert not torch.equal(first["stem.weight"], other["stem.weight"])
    # The draws themselves are pinned: a seed must mean the same network in every release.
    assert first["stem.weight"].flatten()[:3].tolist() == pytest.approx([0.1447648, -0.1214872, -0.0512033], abs=1e-6)


def test_the_momentum_of_the_normalisation_reaches_every_layer() -> None:
    net = ResNet(generator=torch.Generator(), batch_norm_momentum=0.1)
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {(norm.momentum, norm.eps) for norm in norms} == {(0.1, 1e-5)}


# Ways of running it


@pytest.mark.numeric
def test_channels_last_gives_the_same() -> None:
    net, x = resnet().double().eval(), torch.rand(2, 3, 32, 32, dtype=torch.float64)
    expected = net(x)
    net = net.to(memory_format=torch.channels_last)
    # Twenty sums of at most 576 products, one after the other, each with an error of at most 576 times 1.1e-16.
    assert torch.allclose(net(x.contiguous(memory_format=torch.channels_last)), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.numeric
def test_compiles_to_one_graph() -> None:
    net, x = resnet(8).eval(), torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x), net(x), atol=1e-6)


# Six steps of the authors' own graph


def load(archive: np.lib.npyio.NpzFile, folder: str) -> dict[str, Tensor]:
    return {name.removeprefix(folder): torch.from_numpy(archive[name]) for name in archive if name.startswith(folder)}


def unpack(bits: Tensor, weight: Tensor) -> Tensor:
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=weight.numel())).reshape(weight.shape).bool()


@pytest.mark.numeric
@pytest.mark.slow
def test_six_golden_steps(paper: Path) -> None:
    """Network, pruning, optimizer and masked steps are those that everything else uses."""
    with np.load(paper / "golden-resnet20.npz") as archive:
        start, end, bits = load(archive, "start/"), load(archive, "end/"), load(archive, "mask/")
        steps = [torch.from_numpy(archive[name]) for name in ("images", "labels", "lr", "loss", "logits")]
    # In double precision all the difference is TensorFlow's rounding, which the steps amplify a thousandfold; in single
    # precision the number of threads alone moves it from 0.8 to 0.95 of the tolerance.
    recipe = ResNet20()
    net = recipe.model(0).double()
    missing = net.load_state_dict(start, strict=False)
    assert not missing.unexpected_keys
    assert all(name.endswith("num_batches_tracked") for name in missing.missing_keys)
    mask = Pruner()(net, 0.2)
    assert mask.kept == 54_231
    assert mask == Mask({name: unpack(packed, net.get_parameter(name)) for name, packed in bits.items()})
    mask.apply(net)

    optimizer = recipe.optimizer(net)
    with mask.attached(net, optimizer):
        for step, (images, labels, lr, expected_loss, expected_logits) in enumerate(zip(*steps, strict=True)):
            for group in optimizer.param_groups:
                group["lr"] = lr.item()
            logits = net(images.double() / 64)
            loss = F.cross_entropy(logits, labels.long())
            assert loss.item() == pytest.approx(expected_loss.item(), abs=5e-4), step
            if step == 0:
                assert bool(((logits - expected_logits).abs() <= 1e-5).all())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    state = net.state_dict()
    for name, expected in end.items():
        tolerance = 1e-5 * expected if name.endswith("running_var") else 5e-4
        assert bool(((state[name] - expected).abs() <= tolerance).all()), name
