"""What is faster on a GPU, in the graphs that `torch.compile` has traced; no network knows of it.

    convolutions    those with few channels by kernels of our own (`convolutions`)
    variances       from one pass of sums, where torch's kernels add one number after the other by Welford's method:
                    with x' = x - the first x, mean = first + mean(x'), variance = mean(x'^2) - mean(x')^2

Welford's method divides for every number that it adds, which takes a GPU longer than reading the number. Without the
first number, which lies among the others, the difference of the two means would be the rounding error of large ones.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from rewound.tasks.fleets.convolutions import put, replace_convolutions, replace_moments

_ATEN = torch.ops.aten
_FEWEST = 2**16
"""Of numbers whose variance is taken: fewer are read in no time."""


def faster(device: torch.device) -> dict[str, Any]:
    """Options of `torch.compile` for steps on a device: these changes, where they were tried."""
    # AMD's GPUs, which torch calls "cuda", too, have less memory for what a program loads ahead.
    if device.type != "cuda" or torch.version.hip is not None or find_spec("triton") is None:
        return {}
    if torch.cuda.get_device_capability(device) < (8, 0):  # no bfloat16
        return {}
    return {"post_grad_custom_pre_pass": FasterOnGPU()}


class FasterOnGPU(CustomGraphPass):
    """All changes of this module."""

    def __call__(self, graph: Graph) -> None:
        replace_convolutions(graph)
        replace_variances(graph)

    def uuid(self) -> bytes:
        """What torch's cache of compiled graphs knows this pass by."""
        here = Path(__file__)
        others = ("convolutions.py", "convolution_kernels.py")
        return get_hash_for_files((__file__, *(str(here.with_name(name)) for name in others)))


def replace_variances(graph: Graph) -> None:
    """Take variances of numbers in half precision from their sums."""
    for node in list(graph.nodes):
        if node.target is _ATEN.var_mean.correction and len(node.args) == 2 and _is_of_half(node.args[0]):
            _replace_variance(graph, node, *node.args, correction=node.kwargs.get("correction"))


def _is_of_half(x: Node) -> bool:
    """Whether a node has many numbers of half precision, as float32, in the shape that they had or another."""
    kind, source = x.meta["val"].dtype, x
    while source.target in (torch.ops.prims.convert_element_type.default, _ATEN.view.default, _ATEN.reshape.default):
        source = source.args[0]  # type: ignore[assignment]
    halves = source.meta["val"].dtype in (torch.bfloat16, torch.float16)
    return halves and kind is torch.float32 and x.meta["val"].numel() >= _FEWEST


def _replace_variance(graph: Graph, node: Node, x: Node, dims: list[int], *, correction: float | None) -> None:
    count, first = 1, x
    for dim in dims:
        count *= x.meta["val"].shape[dim]
        first = put(graph, node, _ATEN.slice.Tensor, first, dim, 0, 1)
    apart = put(graph, node, _ATEN.sub.Tensor, x, first)
    squares = put(graph, node, _ATEN.mul.Tensor, apart, apart)
    total, of_squares = (put(graph, node, _ATEN.sum.dim_IntList, each, dims, True) for each in (apart, squares))
    shift = put(graph, node, _ATEN.div.Tensor, total, count)
    rest = put(graph, node, _ATEN.sub.Tensor, of_squares, put(graph, node, _ATEN.mul.Tensor, total, shift))
    least = put(graph, node, _ATEN.clamp_min.default, rest, 0.0)  # where rounding makes it negative
    variance = put(graph, node, _ATEN.div.Tensor, least, count - (1 if correction is None else correction))
    mean = put(graph, node, _ATEN.add.Tensor, first, shift)
    replace_moments(graph, node, variance, mean)
