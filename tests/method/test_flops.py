"""Operation counts against hand arithmetic and against the totals the authors published."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence

from rewound import Pruner
from rewound.method.costs import MULTIPLY_ADDS, PAPER, Add, Cost
from rewound.method.flops import profile
from rewound.tasks.recipes.resnet import ResNet
from sameness import assert_same
from small_networks import Compiled, Merging, Wrapped

IMAGE = torch.zeros(1, 3, 32, 32)


def resnet(depth: int) -> ResNet:
    return ResNet(((depth - 2) // 6,) * 3, generator=torch.Generator().manual_seed(0))


# The paper's rule


@pytest.mark.parametrize(("depth", "flops"), [(20, 41_886_986), (56, 128_197_898), (110, 257_664_266)])
def test_published_flops(depth: int, flops: int) -> None:
    assert profile(resnet(depth), IMAGE, PAPER).total() == flops


@pytest.mark.slow
@pytest.mark.parametrize(
    ("depth", "rows"),
    [
        (20, (41_074_688, 434_176, 188_416, 86_016 + 98_304, 4_096, 1_290)),
        (56, (126_009_344, 1_122_304, 532_480, 258_048 + 270_336, 4_096, 1_290)),
        (110, (253_411_328, 2_154_496, 1_048_576, 516_096 + 528_384, 4_096, 1_290)),
    ],
)
def test_published_flops_row_by_row(depth: int, rows: tuple[int, ...]) -> None:
    net = resnet(depth)
    kinds = (nn.Conv2d, nn.BatchNorm2d, nn.ReLU, Add, nn.AdaptiveAvgPool2d, nn.Linear)
    assert tuple(profile(net, IMAGE, {kind: PAPER[kind]}).total() for kind in kinds) == rows


def test_residual_sum_counts_the_block_input_before_its_projection() -> None:
    def block_inputs(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Cost:
        return Cost({}, fixed=inputs[1].numel())

    assert profile(resnet(20), IMAGE, {Add: block_inputs}).total() == 98_304


def test_layers_of_resnet20() -> None:
    layers = profile(resnet(20), IMAGE, PAPER).layers()
    assert layers["stem.weight"] == 3 * 16 * 9 * 32 * 32
    assert layers["stage1.block1.proj.weight"] == 16 * 16 * 32 * 32
    assert layers["stage2.block1.conv1.weight"] == 16 * 32 * 9 * 16 * 16
    assert layers["stage3.block3.conv2.weight"] == 64 * 64 * 9 * 8 * 8
    assert layers["dense.weight"] == 2 * 64 * 10
    assert len(layers) == 1 + 3 * 7 + 1


# One layer at a time: (layer, inputs, multiply-adds), written out by hand


def zeros(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(shape) for shape in shapes)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], int]] = {
    "linear": (lambda: nn.Linear(3, 5), zeros((1, 3)), 3 * 5),
    "linear on a sequence": (lambda: nn.Linear(3, 5), zeros((1, 7, 3)), 7 * 3 * 5),
    "conv1d": (lambda: nn.Conv1d(2, 3, 5), zeros((1, 2, 9)), 5 * (2 * 3 * 5)),
    "conv2d, stride and padding": (lambda: nn.Conv2d(2, 4, 3, 2, 1), zeros((1, 2, 8, 6)), 4 * 3 * (2 * 4 * 9)),
    "conv2d, dilated": (lambda: nn.Conv2d(1, 1, 3, dilation=2), zeros((1, 1, 6, 5)), 2 * 1 * 9),
    "conv2d, groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), zeros((1, 4, 5, 5)), 9 * (6 * 2 * 9)),
    "conv2d, depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), zeros((1, 4, 5, 5)), 9 * (4 * 9)),
    "conv2d, no batch": (lambda: nn.Conv2d(1, 2, 3), zeros((1, 4, 4)), 4 * (2 * 9)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2), zeros((1, 1, 3, 3, 3)), 8 * (2 * 8)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 4, stride=2), zeros((1, 2, 5, 5)), 25 * (2 * 3 * 16)),
    "transposed, groups": (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), zeros((1, 4, 5)), 5 * (4 * 3 * 3)),
    "rnn": (lambda: nn.RNN(3, 4), zeros((7, 1, 3)), 7 * (4 * 3 + 4 * 4)),
    "lstm": (lambda: nn.LSTM(3, 4), zeros((7, 1, 3)), 7 * 4 * (4 * 3 + 4 * 4)),
    "gru": (lambda: nn.GRU(3, 4), zeros((7, 1, 3)), 7 * 3 * (4 * 3 + 4 * 4)),
    "lstm, batch first": (lambda: nn.LSTM(3, 4, batch_first=True), zeros((1, 7, 3)), 7 * 4 * (4 * 3 + 4 * 4)),
    "lstm, two layers, both directions": (
        lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
        zeros((7, 1, 3)),
        7 * 2 * 4 * ((4 * 3 + 4 * 4) + (4 * 8 + 4 * 4)),
    ),
    "lstm, projected": (lambda: nn.LSTM(3, 4, proj_size=2), zeros((7, 1, 3)), 7 * (4 * (4 * 3 + 4 * 2) + 4 * 2)),
    "rnn cell": (lambda: nn.RNNCell(3, 4), zeros((1, 3)), 4 * 3 + 4 * 4),
    "lstm cell": (lambda: nn.LSTMCell(3, 4), zeros((1, 3)), 4 * (4 * 3 + 4 * 4)),
    "gru cell": (lambda: nn.GRUCell(3, 4), zeros((1, 3), (1, 4)), 3 * (4 * 3 + 4 * 4)),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        zeros((1, 5, 8), (1, 5, 8), (1, 5, 8)),
        4 * 5 * 8 * 8 + 2 * 5 * 5 * 8,
    ),
    "attention to another sequence": (
        lambda: nn.MultiheadAttention(8, 2),
        zeros((5, 1, 8), (3, 1, 8), (3, 1, 8)),
        (5 + 3 + 3 + 5) * 8 * 8 + 2 * 5 * 3 * 8,
    ),
    "attention to other widths": (
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True),
        zeros((1, 5, 8), (1, 3, 6), (1, 3, 4)),
        5 * 8 * 8 + 3 * 6 * 8 + 3 * 4 * 8 + 5 * 8 * 8 + 2 * 5 * 3 * 8,
    ),
    "attention with two extra keys": (
        lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True),
        zeros((5, 8), (5, 8), (5, 8)),
        4 * 5 * 8 * 8 + 2 * 5 * 7 * 8,
    ),
    "embedding": (lambda: nn.Embedding(9, 4), (torch.tensor([[1]]),), 0),
    "normalisation and activation": (lambda: nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()), zeros((1, 3)), 0),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_costs_its_multiply_adds(name: str) -> None:
    layer, inputs, expected = LAYERS[name]
    assert profile(layer(), inputs).total() == expected


def test_every_kind_of_layer_has_a_case() -> None:
    tested = {kind for layer, _, _ in LAYERS.values() for kind in type(layer()).__mro__}
    # The layers of three dimensions share the function of those of one and two.
    assert set(MULTIPLY_ADDS) - tested <= {nn.ConvTranspose3d}


def test_paper_rule_of_small_layers() -> None:
    assert profile(nn.Linear(3, 5), torch.zeros(1, 3), PAPER).total() == 2 * 15 + 5
    assert profile(nn.Linear(3, 5, bias=False), torch.zeros(1, 3), PAPER).total() == 2 * 15
    assert profile(nn.BatchNorm2d(2), torch.zeros(1, 2, 3, 3), PAPER).total() == 2 * 18
    assert profile(nn.ReLU(), torch.zeros(1, 2, 3, 3), PAPER).total() == 18
    assert profile(nn.AdaptiveAvgPool2d(1), torch.zeros(1, 2, 3, 3), PAPER).total() == 18


# Attention that is no nn.MultiheadAttention


class SelfAttention(nn.Module):
    """Two heads of four; `key` may be shorter than `query`."""

    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.by_name = by_name

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if self.by_name:
            return F.scaled_dot_product_attention(value=value, query=query, key=key)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.parametrize("by_name", [False, True])
def test_functional_attention_is_counted(by_name: bool) -> None:
    assert profile(SelfAttention(by_name), torch.zeros(1, 5, 8)).total() == 5 * 8 * 24 + 2 * 5 * 5 * 8


@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_layer_is_not_counted_twice(need_weights: bool) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.attention(value=x, key=x, query=x, need_weights=need_weights)[0]
            return output

    assert profile(Wrapper(), torch.zeros(5, 1, 8)).total() == 4 * 5 * 8 * 8 + 2 * 5 * 5 * 8


def test_fused_transformer_layers_are_seen_through() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=2).eval()
    expected = 2 * (4 * 5 * 8 * 8 + 2 * 5 * 5 * 8 + 2 * 5 * 8 * 16)
    assert profile(encoder, torch.zeros(1, 5, 8)).total() == expected


# Layers by other names


def test_transposed_linear_of_transformers() -> None:
    class Conv1D(nn.Module):
        def __init__(self, nf: int, nx: int) -> None:
            super().__init__()
            self.nf = nf
            self.weight = nn.Parameter(torch.zeros(nx, nf))
            self.bias = nn.Parameter(torch.zeros(nf))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.bias

    assert profile(Conv1D(6, 3), torch.zeros(1, 7, 3)).layers() == {"weight": 7 * 18}
    assert profile(Conv1D(6, 3), torch.zeros(1, 7, 3), PAPER).total() == 2 * 7 * 18 + 7 * 6


def test_packed_sequence_counts_its_real_steps() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.lstm(pack_padded_sequence(x, [5, 2]))[0].data
            return output

    assert profile(Packed(), torch.zeros(5, 2, 3)).total() == 7 * 4 * (4 * 3 + 4 * 4)


def test_own_layer_is_one_line() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.table

    def cost(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Cost:
        return Cost({"table": (1,)})

    assert profile(Scale(), torch.zeros(1, 3)).uncounted == ["table"]
    counts = profile(Scale(), torch.zeros(1, 3), {**MULTIPLY_ADDS, Scale: cost})
    assert counts.layers() == {"table": 6}
    assert counts.uncounted == []


def test_computed_weight_is_counted_in_full() -> None:
    counts = profile(weight_norm(nn.Linear(3, 5)), torch.zeros(1, 3))
    assert counts.total() == 15
    assert counts.layers() == {}
    assert counts.uncounted == ["parametrizations.weight.original0", "parametrizations.weight.original1"]


# Under a mask


def test_mask_scales_the_weights_and_nothing_else() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    counts = profile(net, torch.zeros(1, 1, 4, 4), PAPER)
    assert counts.total() == 18 * 4 + 2 * 8 + 8 + (2 * 24 + 3)
    conv, dense = torch.zeros(2, 1, 3, 3, dtype=torch.bool), torch.zeros(3, 8, dtype=torch.bool)
    conv[0, 0, 0, :2] = True
    dense[1, :5] = True
    assert counts.layers({"0.weight": conv, "4.weight": dense}) == {"0.weight": 2 * 4, "4.weight": 2 * 5}
    assert counts.total({"0.weight": conv, "4.weight": dense}) == 2 * 4 + 2 * 8 + 8 + (2 * 5 + 3)
    assert counts.total({"0.weight": conv}) == 2 * 4 + 2 * 8 + 8 + (2 * 24 + 3)
    assert counts.total({"1.weight": torch.zeros(2, dtype=torch.bool)}) == counts.total()


def test_mask_of_fused_projections_knows_queries_from_keys() -> None:
    counts = profile(nn.MultiheadAttention(4, 1), zeros((5, 1, 4), (3, 1, 4), (3, 1, 4)))
    mask = torch.zeros(12, 4, dtype=torch.bool)
    mask[0, 0] = mask[4, 0] = mask[8, 0] = mask[9, 1] = True
    assert counts.layers({"in_proj_weight": mask})["in_proj_weight"] == 5 + 3 + 3 + 3


def test_mask_of_a_recurrent_weight() -> None:
    counts = profile(nn.LSTM(3, 4), torch.zeros(7, 1, 3))
    mask = {"weight_hh_l0": torch.eye(16, 4)}
    assert counts.total(mask) == 7 * (16 * 3 + 4)


@pytest.mark.parametrize("wrap", [Wrapped, Compiled, nn.DataParallel])
def test_mask_of_a_wrapped_model(wrap: Callable[[nn.Module], nn.Module]) -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    wrapped, example = wrap(net), torch.zeros(1, 8)
    mask = Pruner()(wrapped, 0.5)
    assert profile(wrapped, example) == profile(net, example)
    assert profile(wrapped, example).total(mask) == mask.kept


def test_mask_for_another_model_is_refused() -> None:
    counts = profile(nn.Linear(3, 2), torch.zeros(1, 3))
    with pytest.raises(
        ValueError, match=r"'weight' has shape \(3, 3\), but the profiled model has it with shape \(2, 3\)"
    ):
        counts.total({"weight": torch.ones(3, 3)})
    with pytest.raises(ValueError, match=r"'conv' has shape \(1,\), but the profiled model has no such parameter"):
        counts.total({"conv": torch.ones(1)})


# Sharing


def test_module_called_twice_costs_twice() -> None:
    layer = nn.Linear(3, 3)
    counts = profile(nn.Sequential(layer, nn.ReLU(), layer), torch.zeros(1, 3))
    assert counts.layers() == {"0.weight": 2 * 9}
    assert counts.total({"0.weight": torch.eye(3)}) == 2 * 3


def test_tied_weights_add_up_under_the_first_name() -> None:
    net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5), nn.Linear(5, 3), nn.Linear(3, 5))
    for index in (1, 3):
        net[index].weight = net[0].weight
    counts = profile(net, torch.tensor([1]))
    assert counts.layers() == {"0.weight": 2 * 15, "2.weight": 15}
    assert counts.total({"0.weight": torch.eye(5, 3)}) == 2 * 3 + 15
    assert counts.total({"3.weight": torch.eye(5, 3)}) == 2 * 3 + 15, "a mask may have another of its names"
    assert counts.total({"1.weight": torch.eye(5, 3), "3.weight": torch.eye(5, 3).flip(0)}) == 2 * 1 + 15, "or several"


def test_weight_tied_to_part_of_the_attention() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 1)
            self.linear = nn.Linear(4, 12, bias=False)
            self.linear.weight = self.attention.in_proj_weight

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            output: Tensor = self.attention(x, y, y)[0]
            return torch.cat([output, self.linear(x)[..., :4]])

    counts = profile(Tied(), zeros((5, 1, 4), (3, 1, 4)))
    assert counts.layers()["attention.in_proj_weight"] == (5 + 3 + 3) * 16 + 5 * 48


# The model stays as it was


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout())
        self.breaks = False

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x)
        if self.breaks:
            raise RuntimeError("broken")
        return output


@pytest.mark.parametrize("breaks", [False, True])
def test_model_is_left_untouched(breaks: bool) -> None:
    model = Fragile().train()
    model.net[1].eval()  # a mixture of modes must survive
    model.breaks = breaks
    before, random = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    if breaks:
        with pytest.raises(RuntimeError, match="broken"):
            profile(model, torch.rand(1, 1, 4, 4, generator=torch.Generator()), PAPER)
    else:
        profile(model, torch.rand(1, 1, 4, 4, generator=torch.Generator()), PAPER)
    assert [module.training for module in model.modules()] == [True, True, True, False, True]
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert_same(before, model.state_dict())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(random, torch.random.get_rng_state())
    x = torch.rand(1, 1, 4, 4, requires_grad=True)
    model.breaks = False
    assert model(x).requires_grad


def test_what_a_pass_changes_is_changed_in_a_copy() -> None:
    class Counting(nn.Linear):
        """Counts its passes, and adds noise."""

        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) + torch.randn(())

    model, random = nn.Sequential(nn.BatchNorm1d(2), Counting(2, 3), Merging(3, 4)), torch.random.get_rng_state()
    before = copy.deepcopy(model.state_dict())
    assert profile(model, torch.zeros(1, 2)).total() == 6 + 12
    assert_same(before, model.state_dict())
    assert (model[1].calls, model[2].merged) == (0, False)
    assert torch.equal(random, torch.random.get_rng_state())


def test_normalisation_over_a_single_value_is_no_obstacle() -> None:
    # In training mode BatchNorm refuses one value per channel.
    assert profile(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).train(), torch.zeros(1, 2)).total() == 6


def test_no_data_is_needed() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(10_000, 10_000), nn.ReLU())
        assert profile(net, torch.empty(1, 10_000)).total() == 10**8
