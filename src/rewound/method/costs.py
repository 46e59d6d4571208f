"""What one call of a layer costs: tables from module type to a pure function that says so.

A subclass costs what its nearest listed ancestor does, and a module in no row what the products in it do. The package
has two tables:

| layer                     | `MULTIPLY_ADDS`                       | `PAPER` (ResNet-20: 41,886,986)                  |
|---------------------------|---------------------------------------|--------------------------------------------------|
| convolution               | 1 per weight and output position      | the same                                         |
| linear                    | 1 per weight and row                  | 2 per weight and row, 1 per bias                 |
| recurrent (layer or cell) | 1 per weight and time step            | the same                                         |
| attention                 | projections, query-key, weights-value | the same                                         |
| batch normalisation       | 0                                     | 2 per element                                    |
| ReLU, global mean         | 0                                     | 1 per element                                    |
| residual sum (`Add`)      | 0                                     | 1 per element of branch and block input          |
| product outside of layers | 1 per multiplication (`products`)     | the same                                         |

Padding and causal masks save nothing: each position counts in full.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn


class Add(nn.Module):
    """The sum that ends a residual block, as a module: PyTorch has none, and only modules are counted.

    >>> Add()(Tensor([1, 1]), Tensor([1, 1]), nn.Identity())
    tensor([2., 2.])
    """

    def forward(self, branch: Tensor, x: Tensor, shortcut: nn.Module) -> Tensor:
        # The shortcut is called in here so that a rule sees the block's input, which is what the paper counts.
        return branch + cast(Tensor, shortcut(x))


@dataclass(frozen=True)
class Cost:
    """What one call of a module costs.

    `weights` maps a weight (its name within the module) to the operations each of its elements takes part in: one
    number, or several for as many equal parts of its rows. `fixed` is what no mask can change.
    """

    weights: Mapping[str, tuple[int, ...]]
    fixed: int = 0


# Given the module and the tensors it took (in the order of its signature) and returned.
CostFunction = Callable[[nn.Module, Sequence[Tensor], Sequence[Tensor]], Cost]
Costs = Mapping[type[nn.Module], CostFunction]


def _convolution(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Cost:
    return Cost({"weight": (outputs[0].numel() // cast(nn.Conv2d, module).out_channels,)})


def _transposed(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Cost:
    return Cost({"weight": (inputs[0].numel() // cast(nn.ConvTranspose2d, module).in_channels,)})


def _linear(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Cost:
    return Cost({"weight": (outputs[0].shape[:-1].numel(),)})


def _recurrent(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Cost:
    # Every matrix of every layer and direction is used once a time step; this also counts a packed sequence.
    steps = inputs[0].numel() // cast(nn.RNNBase, module).input_size
    return Cost({name: (steps,) for name, _ in module.named_parameters(recurse=False) if name.startswith("weight")})


def _attention(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Cost:
    attention = cast(nn.MultiheadAttention, module)
    query, key = inputs[:2]
    queries, keys = query.numel() // attention.embed_dim, key.numel() // attention.kdim
    weights: dict[str, tuple[int, ...]] = {"out_proj.weight": (queries,)}  # used without calling out_proj
    if attention.kdim == attention.vdim == attention.embed_dim:
        weights["in_proj_weight"] = (queries, keys, keys)
    else:
        weights |= {"q_proj_weight": (queries,), "k_proj_weight": (keys,), "v_proj_weight": (keys,)}
    length = key.shape[1 if attention.batch_first and key.ndim == 3 else 0]
    length += (attention.bias_k is not None) + attention.add_zero_attn
    return Cost(weights, fixed=2 * queries * length * attention.embed_dim)


def _paper_linear(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Cost:
    bias = outputs[0].numel() if module.bias is not None else 0
    return Cost({"weight": (2 * outputs[0].shape[:-1].numel(),)}, fixed=bias)


def _elements(count: int) -> CostFunction:
    def cost(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Cost:
        return Cost({}, fixed=count * sum(tensor.numel() for tensor in inputs))

    return cost


MULTIPLY_ADDS: Costs = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _transposed),
    **dict.fromkeys((nn.RNNBase, nn.RNNCellBase), _recurrent),
    nn.Linear: _linear,
    nn.MultiheadAttention: _attention,
}

PAPER: Costs = {
    **MULTIPLY_ADDS,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _elements(2)),
    **dict.fromkeys((nn.ReLU, nn.AdaptiveAvgPool2d, Add), _elements(1)),
    nn.Linear: _paper_linear,
}
