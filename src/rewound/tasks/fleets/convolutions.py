"""Convolutions with few channels by kernels of our own, in the steps that `torch.compile` makes for a GPU.

The networks for CIFAR-10 have 16, 32 and 64 channels. cuDNN's kernels compute at least 32 at once, so that with 16 most
of their work is thrown away. Those of `convolution_kernels` take 37% of their time with 16 channels and 74% with 32;
with 64 they are faster only for small batches of small images. A fleet of ResNet-56 trains 1.5 times as fast
(docs/performance.md).

`FewChannels` is a pass over the graphs that `torch.compile` has traced, so no network knows of it. It replaces
convolutions of 3x3 with stride 1 from C channels to C without a bias, in half precision, forward and backward; others
stay cuDNN's.
"""

import operator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

_ATEN = torch.ops.aten
_STRIDE_1_PADDING_1 = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)  # and no dilation, not transposed, one group

# By the number of channels: how the kernels divide their work. The fastest of about thirty ways on an H200, for 2,048
# images at once; a single batch of 128 must give enough programs, too.
_CONVOLVED = {
    16: {"block": 256, "warps": 4, "stages": 5},
    32: {"block": 256, "warps": 4, "stages": 3},
    64: {"block": 128, "warps": 8, "stages": 3},
}
_SUMMED = {
    16: {"each": 1024, "block": 32, "warps": 2, "stages": 4},
    32: {"each": 512, "block": 32, "warps": 2, "stages": 2},
    64: {"each": 256, "block": 64, "warps": 4, "stages": 2},
}
_MOST_PIXELS = {64: 2**15}
"""Of a batch, by the number of channels: with more, cuDNN's kernels are as fast or faster."""


def few_channels(device: torch.device) -> dict[str, Any]:
    """Options of `torch.compile` for steps on a device: this pass, where its kernels run."""
    # AMD's GPUs, which torch calls "cuda", too, have less memory for what a program loads ahead.
    if device.type != "cuda" or torch.version.hip is not None or find_spec("triton") is None:
        return {}
    if torch.cuda.get_device_capability(device) < (8, 0):  # no bfloat16
        return {}
    return {"post_grad_custom_pre_pass": FewChannels()}


class FewChannels(CustomGraphPass):
    """Puts our operations in the place of torch's convolutions."""

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            if node.target is _ATEN.convolution.default:
                x, weight, bias, *settings = node.args
                if bias is None and _suits(x, weight, settings):
                    _replace(node, _put(graph, node, _CONVOLVE, x, weight, False))
            elif node.target is _ATEN.convolution_backward.default:
                above, x, weight, _, *settings, (*_, of_bias) = node.args
                if not of_bias and _suits(x, weight, settings):
                    self._replace_backward(graph, node, above, x, weight)

    @staticmethod
    def _replace_backward(graph: Graph, node: Node, above: Node, x: Node, weight: Node) -> None:
        for user in list(node.users):
            assert user.target is operator.getitem
            if user.args[1] == 0:
                _replace(user, _put(graph, user, _CONVOLVE, above, weight, True))
            else:
                parts = _put(graph, user, _SUM, x, above)
                total = _put(graph, user, _ATEN.sum.dim_IntList, parts, [0])
                moved = _put(graph, user, _ATEN.permute.default, total, [0, 3, 1, 2])
                kind = user.meta["val"].dtype
                _replace(user, _put(graph, user, torch.ops.prims.convert_element_type.default, moved, kind))
        graph.erase_node(node)

    def uuid(self) -> bytes:
        """What torch's cache of compiled graphs knows this pass by."""
        return get_hash_for_files((__file__, str(Path(__file__).with_name("convolution_kernels.py"))))


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
        and pixels % _SUMMED[inputs]["each"] == 0
        and pixels <= _MOST_PIXELS.get(inputs, pixels)
        and images.numel() < 2**31  # kernels count in 32 bits
    )


def _put(graph: Graph, before: Node, operation: Any, *given: Any) -> Node:
    """A new node, with the shape of what it computes."""
    values = [each.meta["val"] if isinstance(each, Node) else each for each in given]
    with graph.inserting_before(before):
        node = graph.call_function(operation, given)
    with values[0].fake_mode:
        node.meta["val"] = operation(*values)
    return node


def _replace(node: Node, by: Node) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


@torch.library.custom_op("rewound::few_channels", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
def _convolved(x: Tensor, weight: Tensor, mirrored: bool) -> Tensor:
    """Images convolved with weights; mirrored: gradients of what was put out to gradients of the images."""
    from rewound.tasks.fleets import convolution_kernels

    how = _CONVOLVED[x.shape[1]]
    return convolution_kernels.convolved(_channels_last(x), _channels_last(weight), mirrored=mirrored, **how)


@_convolved.register_fake
def _(x: Tensor, weight: Tensor, mirrored: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


@torch.library.custom_op("rewound::few_channels_weights", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
def _weight_sums(x: Tensor, above: Tensor) -> Tensor:
    """The gradient of the weights, as sums over parts of the pixels: (parts, outputs, 3, 3, inputs)."""
    from rewound.tasks.fleets import convolution_kernels

    return convolution_kernels.weight_sums(_channels_last(x), _channels_last(above), **_SUMMED[x.shape[1]])


@_weight_sums.register_fake
def _(x: Tensor, above: Tensor) -> Tensor:
    channels = x.shape[1]
    parts = x.numel() // channels // _SUMMED[channels]["each"]
    return x.new_empty((parts, channels, 3, 3, channels), dtype=torch.float32)


_CONVOLVE = torch.ops.rewound.few_channels.default
_SUM = torch.ops.rewound.few_channels_weights.default


def _channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)
