"""Counts that torch's own layers keep beside their weights (`out_channels`, `num_heads`, ...), in a smaller network.

They follow from the weights, or from what a layer is given if it has none.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm

from rewound.method.copies import to_run
from rewound.method.structure.examples import Call


def _convolution(old: Any, new: Any) -> None:
    transposed = isinstance(new, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
    first, second = new.weight.shape[:2]
    if not transposed and old.groups > 1 and old.weight.shape[1] == 1:
        new.groups = new.groups * first // old.weight.shape[0]
    new.in_channels = first if transposed else second * new.groups
    new.out_channels = second * new.groups if transposed else first


def _linear(old: Any, new: Any) -> None:
    new.out_features, new.in_features = new.weight.shape


def _normalisation(old: Any, new: Any) -> None:
    if new.weight is not None:
        new.num_features = new.weight.shape[0]
    elif new.running_mean is not None:
        new.num_features = new.running_mean.shape[0]


def _group_norm(old: Any, new: Any) -> None:
    if new.weight is not None:
        new.num_groups = old.num_groups * new.weight.shape[0] // old.num_channels
        new.num_channels = new.weight.shape[0]


def _prelu(old: Any, new: Any) -> None:
    new.num_parameters = new.weight.numel()


def _embedding(old: Any, new: Any) -> None:
    new.num_embeddings, new.embedding_dim = new.weight.shape


def _recurrent(old: Any, new: Any) -> None:
    gates = old.weight_hh_l0.shape[0] // old.hidden_size
    new.input_size, new.hidden_size = new.weight_ih_l0.shape[1], new.weight_hh_l0.shape[0] // gates
    if old.proj_size:
        new.proj_size = new.weight_hr_l0.shape[0]
    new.flatten_parameters()


def _recurrent_cell(old: Any, new: Any) -> None:
    new.input_size, new.hidden_size = new.weight_ih.shape[1], new.weight_hh.shape[1]


def _attention(old: Any, new: Any) -> None:
    together = new.in_proj_weight is not None
    query, keys, values = (
        new.in_proj_weight.chunk(3) if together else (new.q_proj_weight, new.k_proj_weight, new.v_proj_weight)
    )
    new.embed_dim, new.kdim, new.vdim = query.shape[0], keys.shape[1], values.shape[1]
    new.num_heads = new.embed_dim // old.head_dim


COUNTS: Mapping[type[nn.Module], Callable[[Any, Any], None]] = {
    nn.modules.conv._ConvNd: _convolution,
    nn.Linear: _linear,
    nn.modules.batchnorm._NormBase: _normalisation,
    nn.GroupNorm: _group_norm,
    nn.Embedding: _embedding,
    nn.PReLU: _prelu,
    nn.RNNBase: _recurrent,
    nn.RNNCellBase: _recurrent_cell,
    nn.MultiheadAttention: _attention,
}
"""How the counts that a module of torch keeps follow from its weights."""


def rewrite_counts(large: nn.Module, small: nn.Module) -> None:
    """Write anew what modules of torch count beside their weights, where these have shrunk.

    In evaluation mode: in training mode, spectral_norm changes whenever its weight is read.
    """
    training = [module for model in (large, small) for module in model.modules() if module.training]
    for module in training:
        module.training = False
    pairs: Iterator[tuple[Any, Any]] = zip(large.modules(), small.modules(), strict=True)
    for old, new in pairs:
        if _shapes(old) == _shapes(new):
            continue
        if _is_conv1d(new):
            new.nx, new.nf = new.weight.shape
        for kind, rule in COUNTS.items():
            if isinstance(new, kind):
                rule(old, new)
    for module in training:
        module.training = True


def _shapes(module: nn.Module) -> list[torch.Size]:
    return [tensor.shape for tensor in (*module.parameters(), *module.buffers())]


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is the transposed linear layer of transformers, which need not be installed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_counted(module: nn.Module) -> bool:
    """Whether `rewrite_counts` knows the counts of a layer."""
    if isinstance(module, nn.GroupNorm):
        return module.weight is not None
    return any(isinstance(module, kind) for kind in COUNTS) or _is_conv1d(module)


def count_channels(small: nn.Module, example: Call) -> None:
    """Count the channels of normalisation without weights, which does not need their number, as a copy is run."""
    made = to_run(small)
    copied = dict(zip(made.modules(), small.modules(), strict=True))

    def count(module: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        x = args[0] if args else keywords["input"]
        if isinstance(module, _InstanceNorm):
            copied[module].num_features = x.shape[-module._get_no_batch_dim()]  # type: ignore[no-untyped-call]
        else:
            copied[module].num_channels = x.shape[1]

    without_weights = [
        each for each in made.modules() if isinstance(each, _InstanceNorm | nn.GroupNorm) and each.weight is None
    ]
    for module in without_weights:
        module.register_forward_pre_hook(count, with_kwargs=True)
    if without_weights:
        example.run(made)
