"""What `test_convolutions` checks, on a GPU or, as a script with TRITON_INTERPRET=1, by Triton's interpreter.

TRITON_INTERPRET=1 PYTHONPATH=src python tests/support/few_channels.py kernels compiled normalised refused
"""

import sys
import warnings
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rewound.tasks.fleets import convolutions
from rewound.tasks.fleets.graphs import FasterOnGPU

LAST = torch.channels_last


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.cpu().double() - expected).norm() / expected.norm())


def differences(channels: int, device: torch.device, kind: torch.dtype) -> None:
    """An error unless the operations agree with float64 to the rounding of what they put out."""
    draw = torch.Generator().manual_seed(0)
    shape = (32, channels, 16, 8)  # not square, so that rows are not mistaken for columns
    convolve, add = convolutions._CONVOLVED[channels], convolutions._SUMMED[channels]
    pixels = shape[0] * shape[2] * shape[3]
    x, above = (torch.randn(shape, generator=draw).to(device, kind).contiguous(memory_format=LAST) for _ in range(2))
    weight = torch.randn(channels, channels, 3, 3, generator=draw).to(device, kind).contiguous(memory_format=LAST)
    exact_x, exact_weight = (each.cpu().double().requires_grad_() for each in (x, weight))
    y = F.conv2d(exact_x, exact_weight, padding=1)
    dx, dweight = torch.autograd.grad(y, [exact_x, exact_weight], above.cpu().double())
    rounding = torch.finfo(kind).eps / 2
    for given in (weight, weight.contiguous(), weight.transpose(2, 3).contiguous().transpose(2, 3)):  # as they come
        assert relative(convolutions._convolved(x, given, False, False)[0], y.detach()) < rounding
        assert relative(convolutions._convolved(above, given, True, False)[0], dx) < rounding
    put_out, moments = convolutions._convolved(x, weight, False, True)
    parts = divided(put_out.cpu().double(), convolve)
    spread, means = torch.var_mean(parts, 1, correction=0)
    # A sum over a part rounds once for each of its pixels at most; where a mean is near 0, relative to the deviation.
    added = parts.shape[1] * torch.finfo(torch.float32).eps
    assert ((moments[:, 0].cpu() - means).abs() / spread.sqrt()).max() < added
    assert relative(moments[:, 1], spread * parts.shape[1]) < 2 * added
    sums = convolutions._weight_sums(x, above)
    assert sums.shape[0] == (2 if "rows" in add else 1) * len(divided(x, add))
    # Products of half precision are exact in float32, and so many of them are added one after the other at most.
    assert relative(sums.sum(0).permute(0, 3, 1, 2), dweight) < pixels * torch.finfo(torch.float32).eps
    print(f"{channels} channels agree")


def divided(images: Tensor, how: dict[str, int]) -> Tensor:
    """Images by the pixels of each program: (programs, pixels, channels)."""
    _, channels, height, _ = images.shape
    if "rows" not in how:
        return images.permute(0, 2, 3, 1).reshape(-1, how["each"], channels)
    by_pairs = images.permute(0, 3, 2, 1).reshape(-1, 2, height, channels)  # of columns of all images
    strips = by_pairs.reshape(-1, 2 * how["pairs"], height // how["rows"], how["rows"], channels)
    return strips.transpose(1, 2).reshape(-1, 2 * how["pairs"] * how["rows"], channels)


def compiled(device: torch.device, kind: torch.dtype) -> None:
    """An error unless a compiled step takes the operations for what they do, and nothing else, with the same result."""
    torch.manual_seed(0)
    layers = [(3, 16, 1, 3), (16, 16, 1, 3), (16, 32, 2, 3), (32, 32, 1, 3), (32, 32, 1, 1), (32, 64, 2, 3)]
    layers += [(64, 64, 1, 3)]
    convs = [nn.Conv2d(i, o, size, stride, size // 2, bias=False) for i, o, stride, size in layers]
    with_bias = nn.Conv2d(64, 64, 3, padding=1)
    network = nn.Sequential(*convs, with_bias).to(device).to(memory_format=LAST)
    images = torch.randn(16, 3, 32, 32).to(device).contiguous(memory_format=LAST)
    expected = gradients(network.double(), images.double())
    network.float()

    def loss(images: Tensor) -> Tensor:
        with torch.autocast(device.type, kind):
            return network(images).float().square().sum()

    counted = patch.object(convolutions, "put", wraps=convolutions.put)
    with torch._inductor.config.patch(fx_graph_cache=False), counted as put:
        step = torch.compile(loss, dynamic=False, options={"post_grad_custom_pre_pass": FasterOnGPU()})
        found = torch.autograd.grad(step(images), list(network.parameters()))
    calls = [call.args[2] for call in put.call_args_list]
    # For a GPU torch takes the gradient of a bias apart, so that the rest of that layer's backward pass suits, too.
    backward = 4 if device.type == "cuda" else 3
    assert calls.count(convolutions._CONVOLVE) == 3 + backward
    assert calls.count(convolutions._SUM) == backward
    # Each of eight layers rounds its weights, what it puts out and its gradient, by half of eps at most.
    for mine, theirs in zip(found, expected, strict=True):
        assert relative(mine, theirs) < 16 * torch.finfo(kind).eps
    print("the compiled step agrees")


def normalised(device: torch.device, kind: torch.dtype) -> None:
    """An error unless batch normalisation takes its moments from our convolutions, and is that of float64."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16, momentum=1.0)]
    network = nn.Sequential(*layers).to(device).to(memory_format=LAST)
    images = (1 + torch.randn(32, 16, 16, 16)).to(device, kind).contiguous(memory_format=LAST)
    with torch.no_grad():
        rounded = F.conv2d(images.cpu().double(), layers[0].weight.cpu().to(kind).double(), padding=1)
    variance, mean = torch.var_mean(rounded, (0, 2, 3))

    def forward(images: Tensor) -> Tensor:
        with torch.autocast(device.type, kind):
            return network(images)

    taken = patch.object(convolutions, "replace_moments", wraps=convolutions.replace_moments)
    with torch._inductor.config.patch(fx_graph_cache=False), taken as replaced, torch.no_grad():
        found = torch.compile(forward, dynamic=False, options={"post_grad_custom_pre_pass": FasterOnGPU()})(images)
    assert replaced.call_count == 1
    rounding = torch.finfo(kind).eps
    shape = (1, 16, 1, 1)
    expected = (rounded - mean.view(shape)) / (variance.view(shape) + 1e-5).sqrt()
    assert relative(found, expected) < 2 * rounding  # what the convolution puts out is rounded, and so is the result
    # Roundings of single pixels are as often up as down: their mean has little of them.
    assert ((layers[1].running_mean.cpu() - mean).abs() / variance.sqrt()).max() < rounding
    assert relative(layers[1].running_var, variance) < rounding
    print("batch normalisation agrees")


def refused(device: torch.device, kind: torch.dtype) -> None:
    """An error unless kernels that are wrong, even if in moments alone, or that fail are found out and not used."""
    right = convolutions._convolved

    def wrong(x: Tensor, weight: Tensor, mirrored: bool, moments: bool) -> tuple[Tensor, Tensor]:
        images, found = right(x, weight, mirrored, moments)
        return images, found * 1.02

    def undefined(x: Tensor, weight: Tensor, mirrored: bool, moments: bool) -> tuple[Tensor, Tensor]:
        return torch.full_like(x, torch.nan), right(x, weight, mirrored, moments)[1]

    def failing(x: Tensor, weight: Tensor, mirrored: bool, moments: bool) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no room\nat all")

    agrees, given = convolutions._agrees.__wrapped__, (16, 16, 8, kind, device)
    assert agrees(*given)
    for instead, why in ((wrong, " by 0.0"), (undefined, " by nan, "), (failing, " (RuntimeError: no room): ")):
        with patch.object(convolutions, "_convolved", instead), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert not agrees(*given)
        assert why in str(caught[0].message), caught[0].message
    print("wrong kernels are refused")


def gradients(network: nn.Module, images: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(network(images).square().sum(), list(network.parameters()))
    return [each.cpu().double() for each in found]


if __name__ == "__main__":
    # bfloat16 is unknown to numpy, which the interpreter computes with.
    for name in sys.argv[1:]:
        if name == "kernels":
            for number in (16, 32, 64):
                differences(number, torch.device("cpu"), torch.float16)
        else:
            {"compiled": compiled, "normalised": normalised, "refused": refused}[name](
                torch.device("cpu"), torch.float16
            )
