"""What each operation of a traced network ties: a rule for those that compute, none for those that only move data.

Operations that move data (view, permute, split, roll, ...) are run on the atoms themselves. Pointwise operations are
known by torch's own tag. What is in no table pins all that it touches: nothing is removed that was not understood.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from rewound.method.structure.atoms import Atoms, Labels, labelled
from rewound.method.structure.combining import (
    added_at,
    extreme,
    flat,
    gated,
    indexed,
    inverted,
    joined,
    moved,
    padded,
    plain,
    pointwise,
    reduction,
    scanned,
    selected,
    shaped_like,
    softmax,
    spatial,
    spread,
    stacked,
    weight_normalised,
)
from rewound.method.structure.layers import (
    added_product,
    attention,
    batch_norm,
    convolution,
    einsum,
    embedding,
    group_norm,
    grouped_product,
    layer_norm,
    linear,
    prelu,
    product,
    recurrent,
    recurrent_cell,
    transposed_convolution,
)

Rule = Callable[..., Any]

_MOVES = """
    _unsafe_view adjoint broadcast_to channel_shuffle chunk diagonal dsplit expand flatten flip fliplr flipud hsplit
    mH mT matrix_H moveaxis movedim narrow numpy_T permute pixel_shuffle pixel_unshuffle ravel repeat repeat_interleave
    reshape roll rot90 select slice split split_with_sizes squeeze swapaxes swapdims t tensor_split tile transpose
    unbind unflatten unfold unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze view vsplit
"""
MOVES = frozenset(_MOVES.split())
_KEEPS = """
    _to_copy alias alpha_dropout celu clone contiguous detach dropout dropout_ elu_ empty_like feature_dropout float
    full_like hardsigmoid hardsigmoid_ hardswish hardswish_ hardtanh hardtanh_ leaky_relu_ lift_fresh_copy
    masked_fill masked_fill_ mish ones_like rand_like relu6 relu_ silu_ softplus where zeros_like
"""
KEEPS = frozenset(_KEEPS.split())
TYPED = frozenset({"to", "type_as"})
"""Of their tensors, the second only says a type."""
_SPATIAL = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d avg_pool1d avg_pool2d avg_pool3d
    max_pool1d max_pool2d max_pool2d_with_indices max_pool3d reflection_pad2d replication_pad2d upsample_bicubic2d
    upsample_bilinear2d upsample_nearest1d upsample_nearest2d
"""
SPATIAL = {name: int(re.findall(r"(\d)d", name)[0]) for name in _SPATIAL.split()}
"""How many dimensions each pools."""
FILLS = frozenset({"zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full"})
"""Their sizes are counts in the network's code, which are written anew: they go with what they are combined with."""

BESIDE = frozenset({"batch_norm", "instance_norm", "rsqrt"})
"""Those of `RULES` by which a buffer goes with units; what others read or divide by, a mask would have to change."""


def name_of(target: Any) -> str:
    """An operation's plain name: "conv2d" of aten.conv2d.default, "others.gate" of others.gate.default."""
    parts = str(target).split(".")
    return parts[1] if parts[0] == "aten" else ".".join(parts[:2])


def applied(atoms: Atoms, target: Any, args: Sequence[Any], kwargs: dict[str, Any], value: Any) -> Any:
    """The labels of what an operation gives; `args` have labels where tensors were, `value` is the traced result."""
    name, given = name_of(target), [each for each in flat([*args, *kwargs.values()]) if isinstance(each, Labels)]
    if name in FILLS:
        return labelled(atoms, tuple(value.shape))
    if value is None or not any(each.factors for each in given):
        return plain(value)  # an assertion, or nothing that could go
    constants = [each for each in given if each.is_constant]
    if constants and name in RULES and name not in BESIDE:
        atoms.pin_all(constants, "it is a buffer that is read, or divided by")
        args, kwargs = tree_map_only(Labels, _without_constant, (list(args), kwargs))
        return applied(atoms, target, args, kwargs, value)
    found = _applied(atoms, target, name, args, kwargs, value, given)
    if all(each.is_constant for each in given if each.factors):
        return tree_map_only(Labels, _as_constant, found)
    return found


def _as_constant(labels: Labels) -> Labels:
    return replace(labels, is_constant=bool(labels.factors))


def _without_constant(labels: Labels) -> Labels:
    return Labels(labels.shape) if labels.is_constant else labels


def _applied(
    atoms: Atoms,
    target: Any,
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    value: Any,
    given: Sequence[Labels],
) -> Any:
    """The labels by the operation's rule; where it has none, all that it touches is pinned."""
    try:
        if name in RULES:
            return RULES[name](atoms, value, *args, **kwargs)
        if name in KEEPS or torch.Tag.pointwise in getattr(target, "tags", ()):
            return pointwise(atoms, value, given)
        if name in TYPED:
            return pointwise(atoms, value, given[:1])
        if name in MOVES and len(given) == 1:
            return moved(atoms, target, args, kwargs, value)
        if name in SPATIAL:
            return spatial(atoms, value, given[0], SPATIAL[name])
        reason = "is not known"
    except (TypeError, ValueError, IndexError, RuntimeError, StopIteration):  # for arguments that a rule does not take
        reason = "is used in a form that is not known"
    atoms.pin_all(given, f"the operation {name} {reason}")
    return plain(value)


# A rule takes the atoms, the traced value, and the operation's own arguments.
RULES: dict[str, Rule] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), transposed_convolution),
    "linear": linear,
    **dict.fromkeys(("matmul", "mm", "bmm"), product),
    **dict.fromkeys(("addmm", "baddbmm"), added_product),
    **dict.fromkeys(("_grouped_mm", "transformers.grouped_mm_fallback"), grouped_product),
    "prelu": prelu,
    "embedding": embedding,
    "batch_norm": batch_norm,
    "instance_norm": batch_norm,
    "group_norm": group_norm,
    **dict.fromkeys(("layer_norm", "rms_norm"), layer_norm),
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "_log_softmax"), softmax),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp"), scanned),
    **dict.fromkeys(("index_add", "index_add_", "scatter_add", "scatter_add_"), added_at),
    **dict.fromkeys(("scatter_reduce", "scatter_reduce_"), added_at),
    **dict.fromkeys(("mean", "sum", "amax", "amin"), reduction),
    **dict.fromkeys(("var", "std"), spread),
    **dict.fromkeys(("max", "min"), extreme),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), recurrent),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), recurrent_cell),
    "scaled_dot_product_attention": attention,
    **dict.fromkeys(("cat", "concat", "concatenate"), joined),
    "stack": stacked,
    **dict.fromkeys(("view_as", "reshape_as", "expand_as"), shaped_like),
    **dict.fromkeys(("constant_pad_nd", "pad"), padded),
    "index": indexed,
    "index_select": selected,
    "glu": gated,
    **dict.fromkeys(("div", "div_", "true_divide", "reciprocal", "rsqrt", "log", "log2", "log10"), inverted),
    **dict.fromkeys(("_weight_norm", "_weight_norm_interface"), weight_normalised),
    "einsum": einsum,
}
