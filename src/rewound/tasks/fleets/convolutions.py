"""Convolutions with few channels by kernels of our own, in the steps that `torch.compile` makes for a GPU.

The networks for CIFAR-10 have 16, 32 and 64 channels. cuDNN's kernels compute at least 32 at once, so that with 16 most
of their work is thrown away (docs/performance.md).

`replace_convolutions` replaces convolutions of 3x3 with stride 1 from C channels to C without a bias, in half
precision, forward and backward; others stay cuDNN's. Where batch normalisation follows, it takes its mean and variance
from what the convolution's programs found for their pixels, and need not read the images again:

    mean = mean of the programs' means      variance = sum of their squares / pixels + variance of their means

The kernels are compared with torch's convolution on each GPU, for each size of images, before they are used there:
Triton compiled one way to write them to wrong moments beside right images (3.6, on an H200).
"""

import operator
import warnings
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node
from torch.nn import functional as F

from rewound.foundations.errors import in_a_line

_ATEN = torch.ops.aten
_STRIDE_1_PADDING_1 = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)  # and no dilation, not transposed, one group

# By the number of channels: how the kernels divide their work, by rows or by pixels. Of about a hundred ways that were
# tried on an H200, these are nearly the fastest for 2,048 images at once, and not slow for a single batch of 128, which
# longer strips leave with too few programs.
_CONVOLVED: dict[int, dict[str, int]] = {
    16: {"pairs": 64, "rows": 4, "warps": 4},
    32: {"each": 256, "warps": 4, "stages": 3},
    64: {"each": 128, "warps": 4, "stages": 3},
}
_SUMMED: dict[int, dict[str, int]] = {
    16: {"pairs": 64, "rows": 16, "warps": 4},
    32: {"pairs": 32, "rows": 16, "warps": 4},
    64: {"each": 1024, "block": 64, "warps": 4, "stages": 3},
}
_MOST_PIXELS = {64: 2**15}
"""Of a batch, by the number of channels: with more, cuDNN's kernels are as fast or faster."""


def replace_convolutions(graph: Graph) -> None:
    """Put our operations in the place of torch's convolutions that they do."""
    for node in list(graph.nodes):
        if node.target is _ATEN.convolution.default:
            x, weight, bias, *settings = node.args
            if bias is None and _suits(x, weight, settings):
                _replace_forward(graph, node, x, weight)
        elif node.target is _ATEN.convolution_backward.default:
            above, x, weight, _, *settings, (*_, of_bias) = node.args
            if not of_bias and _suits(x, weight, settings):
                _replace_backward(graph, node, above, x, weight)


def _suits(x: Node, weight: Node, settings: list[Any]) -> bool:
    """Whether the kernels do this convolution."""
    images, weights = x.meta["val"], weight.meta["val"]
    outputs, inputs, *size = weights.shape
    pixels = images.numel() // images.shape[1]
    return (
        size == [3, 3]
        and outputs == inputs
        and inputs in _CONVOLVED
        and tuple(settings) == _STRIDE_1_PADDING_1
        and images.dtype in (torch.bfloat16, torch.float16)
        and _divides(images.shape, _CONVOLVED[inputs])
        and _divides(images.shape, _SUMMED[inputs])
        and pixels <= _MOST_PIXELS.get(inputs, pixels)
        and images.numel() < 2**31  # kernels count in 32 bits
        and _agrees(inputs, *images.shape[2:], images.dtype, images.device)
    )


@lru_cache
def _agrees(channels: int, height: int, width: int, kind: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels compute what torch does, as they are compiled here; a warning if they do not."""
    limit = torch.finfo(kind).eps
    try:
        with unset_fake_temporarily(), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            off = _largest_error(channels, height, width, kind, device)
    except Exception as error:  # compilers and drivers raise many kinds
        why = f"fail on {device} ({in_a_line(error)})"
    else:
        if off < limit:  # never true of NaN
            return True
        why = f"differ from torch's on {device} by {off:.2g}, more than {limit:.2g}"
    remedy = "torch's are used, which are slower; another version of Triton may do better"
    warnings.warn(f"our convolutions for {channels} channels {why}: {remedy}", stacklevel=2)
    return False


def _largest_error(channels: int, height: int, width: int, kind: torch.dtype, device: torch.device) -> float:
    """Of the convolution, its two gradients and the moments, each relative to its size, on a few drawn images."""
    shapes = (torch.Size((images, channels, height, width)) for images in count(1))
    shape = next(each for each in shapes if _divides(each, _CONVOLVED[channels]) and _divides(each, _SUMMED[channels]))
    draw = torch.Generator(device).manual_seed(0)
    sizes = shape, shape, (channels, channels, 3, 3)
    x, above, weight = (torch.randn(size, generator=draw, device=device).to(kind) for size in sizes)
    exact_x, exact_weight = (each.double().requires_grad_() for each in (x, weight))
    exact = F.conv2d(exact_x, exact_weight, padding=1)
    of_x, of_weight = torch.autograd.grad(exact, [exact_x, exact_weight], above.double())
    images, moments = _convolved(x, weight, False, True)
    variance, mean = torch.var_mean(images.double(), (0, 2, 3), correction=0)
    means, squares = moments.double().unbind(1)
    pairs = [
        (images, exact),
        (_convolved(above, weight, True, False)[0], of_x),
        (_weight_sums(x, above).sum(0).permute(0, 3, 1, 2), of_weight),
        (squares.sum(0) * channels / x.numel() + means.var(0, correction=0), variance),
        (means.mean(0) + variance.sqrt(), mean + variance.sqrt()),  # a mean alone may be nearly 0
    ]
    return float(torch.stack([(mine.double() - theirs).norm() / theirs.norm() for mine, theirs in pairs]).max())


def _divides(shape: torch.Size, how: dict[str, int]) -> bool:
    """Whether images are a whole number of what a program takes."""
    images, _, height, width = shape
    if "rows" in how:
        return width % 2 == 0 and images * width // 2 % how["pairs"] == 0 and height % how["rows"] == 0
    return images * height * width % how["each"] == 0


def _programs(shape: torch.Size, how: dict[str, int]) -> int:
    """How many programs take the images."""
    images, _, height, width = shape
    return images * height * width // (2 * how["pairs"] * how["rows"] if "rows" in how else how["each"])


def _replace_forward(graph: Graph, node: Node, x: Node, weight: Node) -> None:
    normalisations = [each for user in node.users if _is_float(user) for each in user.users if _is_moments(each)]
    both = put(graph, node, _CONVOLVE, x, weight, False, bool(normalisations))
    found = put(graph, node, operator.getitem, both, 1) if normalisations else None
    _replace(node, put(graph, node, operator.getitem, both, 0))
    for each in normalisations:
        assert found is not None
        images = x.meta["val"]
        means = put(graph, each, _ATEN.select.int, found, 1, 0)
        squares = put(graph, each, _ATEN.sum.dim_IntList, put(graph, each, _ATEN.select.int, found, 1, 1), [0])
        within = put(graph, each, _ATEN.div.Tensor, squares, images.numel() // images.shape[1])
        of_means = put(graph, each, _ATEN.var_mean.correction, means, [0], correction=0)
        between, mean = (put(graph, each, operator.getitem, of_means, number) for number in (0, 1))
        replace_moments(graph, each, put(graph, each, _ATEN.add.Tensor, within, between), mean)


def _is_float(node: Node) -> bool:
    return node.target is torch.ops.prims.convert_element_type.default and node.args[1] is torch.float32


def _is_moments(node: Node) -> bool:
    """Whether a node is the mean and variance of each channel of images, as batch normalisation takes them."""
    if node.target is not _ATEN.var_mean.correction:
        return False
    _, dims = node.args
    return dims == [0, 2, 3] and node.kwargs == {"correction": 0, "keepdim": True}


def replace_moments(graph: Graph, node: Node, variance: Node, mean: Node) -> None:
    """Use other nodes for a variance and mean, in the same shape."""
    for user in list(node.users):
        assert user.target is operator.getitem
        found = (variance, mean)[user.args[1]]  # type: ignore[index]
        _replace(user, put(graph, user, _ATEN.view.default, found, list(user.meta["val"].shape)))
    graph.erase_node(node)


def _replace_backward(graph: Graph, node: Node, above: Node, x: Node, weight: Node) -> None:
    for user in list(node.users):
        assert user.target is operator.getitem
        if user.args[1] == 0:
            both = put(graph, user, _CONVOLVE, above, weight, True, False)
            _replace(user, put(graph, user, operator.getitem, both, 0))
        else:
            parts = put(graph, user, _SUM, x, above)
            total = put(graph, user, _ATEN.sum.dim_IntList, parts, [0])
            moved = put(graph, user, _ATEN.permute.default, total, [0, 3, 1, 2])
            kind = user.meta["val"].dtype
            _replace(user, put(graph, user, torch.ops.prims.convert_element_type.default, moved, kind))
    graph.erase_node(node)


def put(graph: Graph, before: Node, operation: Any, *given: Any, **named: Any) -> Node:
    """A new node, with the shape of what it computes."""
    values = [each.meta["val"] if isinstance(each, Node) else each for each in given]
    with graph.inserting_before(before):
        node = graph.call_function(operation, given, named)
    with _first_tensor(values).fake_mode:
        node.meta["val"] = operation(*values, **named)
    return node


def _first_tensor(values: list[Any]) -> Any:
    return values[0][0] if isinstance(values[0], tuple | list) else values[0]


def _replace(node: Node, by: Node) -> None:
    """Use another node in the place of one."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


@torch.library.custom_op("rewound::few_channels", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
def _convolved(x: Tensor, weight: Tensor, mirrored: bool, moments: bool) -> tuple[Tensor, Tensor]:
    """Images convolved with weights, and the moments of each program's pixels if asked for, else none.

    Mirrored: gradients of what was put out to gradients of the images.
    """
    from rewound.tasks.fleets import convolution_kernels

    how = _CONVOLVED[x.shape[1]]
    work = convolution_kernels.convolved_by_rows if "rows" in how else convolution_kernels.convolved
    return work(_channels_last(x), _channels_last(weight), mirrored=mirrored, moments=moments, **how)


@_convolved.register_fake
def _(x: Tensor, weight: Tensor, mirrored: bool, moments: bool) -> tuple[Tensor, Tensor]:
    channels = x.shape[1]
    programs = _programs(x.shape, _CONVOLVED[channels]) if moments else 0
    return (
        torch.empty_like(x, memory_format=torch.channels_last),
        x.new_empty((programs, 2, channels), dtype=torch.float32),
    )


@torch.library.custom_op("rewound::few_channels_weights", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
def _weight_sums(x: Tensor, above: Tensor) -> Tensor:
    """The gradient of the weights, as sums over parts of the pixels: (parts, outputs, 3, 3, inputs)."""
    from rewound.tasks.fleets import convolution_kernels

    how = _SUMMED[x.shape[1]]
    work = convolution_kernels.weight_sums_by_rows if "rows" in how else convolution_kernels.weight_sums
    return work(_channels_last(x), _channels_last(above), **how)


@_weight_sums.register_fake
def _(x: Tensor, above: Tensor) -> Tensor:
    channels = x.shape[1]
    how = _SUMMED[channels]
    parts = _programs(x.shape, how) * (2 if "rows" in how else 1)
    return x.new_empty((parts, channels, 3, 3, channels), dtype=torch.float32)


_CONVOLVE = torch.ops.rewound.few_channels.default
_SUM = torch.ops.rewound.few_channels_weights.default


def _channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)
