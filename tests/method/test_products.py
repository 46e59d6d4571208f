"""Products outside of layers: counted like those of layers, against torch's own counter, and charged to weights."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

from rewound import InputError, Pruner, slim
from rewound.method.costs import MULTIPLY_ADDS, PAPER, Add
from rewound.method.flops import FirstPass, profile


class Network(nn.Module):
    """Parameters and layers by name, and what a forward pass does with them."""

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module | tuple[int, ...]) -> None:
        super().__init__()
        self.computed = forward
        torch.manual_seed(0)
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(torch.randn(part)))

    def forward(self, x: Tensor) -> Tensor:
        return self.computed(self, x)


def heads(s: Network, x: Tensor) -> list[Tensor]:
    return [layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (s.q, s.k, s.v)]


def by_matmul(s: Network, x: Tensor) -> Tensor:
    q, k, v = heads(s, x)
    return s.o(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2))


def by_einsum(s: Network, x: Tensor) -> Tensor:
    q, k, v = heads(s, x)
    weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
    return s.o(torch.einsum("bhij,bhjd->bihd", weights, v).flatten(2))


def by_function(s: Network, x: Tensor) -> Tensor:
    return s.o(F.scaled_dot_product_attention(*heads(s, x)).transpose(1, 2).flatten(2))


def attention(forward: Callable[..., Tensor]) -> Network:
    return Network(forward, **{name: nn.Linear(8, 8) for name in "qkvo"})


SEQUENCES, IMAGES = (3, 5, 8), (3, 3, 8, 8)

# Networks, the shape of their input, and the operations that each element of a weight takes part in
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, tuple[int, ...]]]] = {
    "linear": (lambda: Network(lambda s, x: F.linear(x, s.w, s.b), w=(4, 8), b=(4,)), SEQUENCES, {"w": (15,)}),
    "matmul": (lambda: Network(lambda s, x: x @ s.w, w=(8, 4)), SEQUENCES, {"w": (15,)}),
    "addmm": (lambda: Network(lambda s, x: torch.addmm(s.c, x[0], s.w), w=(8, 4), c=(5, 4)), SEQUENCES, {"w": (5,)}),
    "used twice": (
        lambda: Network(lambda s, x: F.linear(F.linear(x, s.w), s.w.t()), w=(4, 8)),
        SEQUENCES,
        {"w": (30,)},
    ),
    "rows of a weight": (
        lambda: Network(lambda s, x: F.linear(x, s.w[:2]) + F.linear(x[:1], s.w[6:8]), w=(8, 8)),
        SEQUENCES,
        {"w": (15, 0, 0, 5)},
    ),
    "heads in a batch": (
        lambda: Network(lambda s, x: x[:, None] @ s.w, w=(2, 8, 4)),  # torch copies the weight for each example
        SEQUENCES,
        {"w": (15,)},
    ),
    "experts": (
        lambda: Network(lambda s, x: torch.einsum("btd,edh->ebth", x, s.w).relu().sum(0), w=(4, 8, 6)),
        SEQUENCES,
        {"w": (15,)},
    ),
    "experts with biases": (
        lambda: Network(lambda s, x: torch.baddbmm(s.b, x.expand(3, 5, 8), s.w), w=(3, 8, 6), b=(3, 1, 6)),
        SEQUENCES,
        {"w": (5,)},
    ),
    "one expert after another": (
        lambda: Network(lambda s, x: sum((x[e] @ s.w[e] for e in range(3)), x.new_zeros(())), w=(3, 8, 6)),
        SEQUENCES,
        {"w": (5, 5, 5)},
    ),
    "a list of weights": (
        lambda: Network(
            lambda s, x: F.linear(F.linear(x, s.ws[0]).relu(), s.ws[1]),
            ws=nn.ParameterList([torch.randn(6, 8), torch.randn(4, 6)]),  # type: ignore[arg-type]
        ),
        SEQUENCES,
        {"ws.0": (15,), "ws.1": (15,)},
    ),
    "convolutions": (
        lambda: Network(
            lambda s, x: F.conv_transpose2d(F.conv2d(x, s.a, s.b, stride=2), s.c, groups=2),
            a=(6, 3, 3, 3),
            b=(6,),
            c=(6, 2, 2, 2),
        ),
        IMAGES,
        {"a": (3 * 9,), "c": (3 * 9,)},
    ),
    "with layers": (
        lambda: Network(lambda s, x: s.o(F.linear(s.a(x), s.w)), a=nn.Linear(8, 6), w=(6, 6), o=nn.Linear(6, 2)),
        SEQUENCES,
        {"w": (15,), "a.weight": (15,), "o.weight": (15,)},
    ),
    "computed weight": (lambda: Network(lambda s, x: F.linear(x, s.w.exp()), w=(4, 8)), SEQUENCES, {}),
    "attention by matmul": (lambda: attention(by_matmul), SEQUENCES, {f"{n}.weight": (15,) for n in "qkvo"}),
    "attention by einsum": (lambda: attention(by_einsum), SEQUENCES, {f"{n}.weight": (15,) for n in "qkvo"}),
    "layer of attention": (
        lambda: Network(lambda s, x: s.a(x, x, x)[0], a=nn.MultiheadAttention(8, 2, batch_first=True)),
        SEQUENCES,
        {"a.in_proj_weight": (15, 15, 15), "a.out_proj.weight": (15,)},
    ),
}


@pytest.mark.parametrize("in_inference_mode", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_products_count_as_torchs_own_counter_has_them(name: str, in_inference_mode: bool) -> None:
    make, shape, weights = NETWORKS[name]
    model, x = make().eval(), torch.randn(shape)
    with FlopCounterMode(display=False) as counter:
        model(x)
    with torch.inference_mode(in_inference_mode):
        counts = profile(model, x)
    assert 2 * counts.total() == counter.get_total_flops() > 0  # which counts multiplications and additions
    assert counts.weights == weights
    products = sum(counts.shapes[n].numel() // len(each) * sum(each) for n, each in weights.items())
    assert counts.fixed == counts.total() - products


def test_attention_costs_the_same_however_it_is_written() -> None:
    x = torch.randn(SEQUENCES)
    counts = [profile(attention(forward), x) for forward in (by_function, by_matmul, by_einsum)]
    assert counts[0] == counts[1] == counts[2]
    assert counts[0].fixed == 2 * 3 * 5 * 5 * 8


def test_a_mask_saves_what_it_removes_of_a_part_of_a_weight() -> None:
    counts = profile(NETWORKS["rows of a weight"][0](), torch.randn(SEQUENCES))
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[0, :3] = mask[4, :2] = mask[7, :1] = True
    assert counts.total({"w": mask}) == 3 * 15 + 0 + 1 * 5


def test_parts_of_different_sizes_add_up() -> None:
    model = Network(lambda s, x: F.linear(x, s.w[:2]).sum() + F.linear(x, s.w[3:]).sum(), w=(6, 8))
    assert profile(model, torch.randn(1, 8)).layers() == {"w": 5 * 8}


@pytest.mark.parametrize("costs", [MULTIPLY_ADDS, PAPER])
def test_what_a_counted_layer_does_is_not_counted_twice(costs: dict[type[nn.Module], object]) -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bi,oi->bo", x, self.weight)

    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("caught by the model")

    class Caught(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.w = Failing(8, 4), nn.Parameter(torch.randn(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            try:
                return torch.as_tensor(self.bad(x))
            except KeyError:
                return F.linear(x, self.w)

    x = torch.randn(1, 8)
    assert profile(Own(8, 4, bias=False), x, costs).total() == profile(nn.Linear(8, 4, bias=False), x, costs).total()  # type: ignore[arg-type]
    assert profile(Caught(), x, costs).layers() == {"w": 32}, "a layer that fails hides nothing after it"  # type: ignore[arg-type]


def test_a_table_without_such_a_layer_counts_no_such_products() -> None:
    x = torch.randn(SEQUENCES)
    only_sums = {Add: PAPER[Add]}
    for make, shape, _ in NETWORKS.values():
        assert profile(make(), torch.randn(shape), only_sums).total() == 0
    without = {kind: cost for kind, cost in MULTIPLY_ADDS.items() if kind is not nn.MultiheadAttention}
    assert profile(attention(by_function), x, without).fixed == 0


def test_the_first_pass_in_training_sees_products_too_and_not_those_of_a_backward_pass() -> None:
    def penalised(s: Network, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        y = F.linear(x, s.w)
        return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0].mean()

    for forward in (lambda s, x: F.linear(x, s.w), penalised):
        model, x = Network(forward, w=(4, 8)), torch.randn(SEQUENCES)
        first = FirstPass(model)
        model(x).sum().backward()
        assert first.profile is not None
        assert first.profile.layers() == {"w": 15 * 32}
        assert _get_current_dispatch_mode() is None
    model = Network(lambda s, x: F.linear(x, s.w), w=(4, 8))
    first = FirstPass(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(SEQUENCES))
    assert first.profile is not None
    assert first.profile.layers() == {"w": 15 * 32}, "autocast makes a copy of the weight"


def test_a_pass_that_fails_leaves_no_mode_behind() -> None:
    model = Network(lambda s, x: F.linear(x, s.w), w=(4, 8))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        profile(model, torch.randn(1, 3))
    assert _get_current_dispatch_mode() is None


# Density of FLOPs


@pytest.mark.parametrize("name", ["with layers", "a list of weights", "experts"])
def test_units_go_until_that_part_of_the_flops_is_left(name: str) -> None:
    x = torch.randn(3, 5, 16)
    model = {
        "with layers": Network(
            lambda s, x: s.o(F.linear(s.a(x).relu(), s.w).relu()), a=nn.Linear(16, 64), w=(64, 64), o=nn.Linear(64, 4)
        ),
        "a list of weights": Network(
            lambda s, x: F.linear(F.linear(x, s.ws[0]).relu(), s.ws[1]),
            ws=nn.ParameterList([torch.randn(64, 16), torch.randn(4, 64)]),  # type: ignore[arg-type]
        ),
        "experts": Network(
            lambda s, x: torch.einsum("ebth,ehd->btd", torch.einsum("btd,edh->ebth", x, s.a).relu(), s.b),
            a=(4, 16, 32),
            b=(4, 32, 4),
        ),
    }[name]
    mask = Pruner(pattern="unit", of="flops")(model, density=0.5, example_inputs=x)
    small = slim(model, mask, (x,)).model
    dense, left = profile(model, x), profile(small, x)
    assert dense.total(mask) == left.total()
    assert 0.4 < left.total() / dense.total() <= 0.5, "nearly, as an expert is a unit, too"


def test_a_network_without_operations_is_refused() -> None:
    model = Network(lambda s, x: (x[..., None] * s.a).sum(-2).relu() * s.b, a=(8, 6), b=(6,))
    with pytest.raises(InputError, match=r"of='flops' counts no operations in this network, .*, or of='weights'"):
        Pruner(pattern="unit", of="flops")(model, density=0.5, example_inputs=torch.randn(3, 8))


def test_weights_whose_operations_are_not_known_are_named() -> None:
    model = Network(
        lambda s, x: s.o(F.linear(s.a(x).relu(), s.w.exp()).relu()), a=nn.Linear(8, 16), w=(16, 16), o=nn.Linear(16, 3)
    )
    with pytest.warns(UserWarning, match=r"^of='flops' finds no product with w: .*; use layers of torch\.nn there"):
        Pruner(pattern="unit", of="flops")(model, density=0.7, example_inputs=torch.randn(3, 8))
    words = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    ids = torch.tensor([[1, 2]])
    mask = Pruner(pattern="unit", of="flops")(words, density=0.5, example_inputs=ids)  # a table takes no operations
    assert profile(words, ids).total(mask) <= 0.5 * profile(words, ids).total()
