"""Law 8: a slim network equals the masked one, in its outputs, gradients and training steps."""

import multiprocessing
from collections.abc import Callable
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from architectures import ARCHITECTURES, IDS, IMAGES
from rewound import InputError, Mask
from rewound.method.structure.slimming import slim
from rewound.method.structure.tracing import units
from slim_and_masked import BOUND, compared

QUICK = (
    "residual",
    "concatenated",
    "depthwise",
    "shuffled",
    "u-net",
    "pixel-shuffle",
    "gated",
    "halved",
    "frozen",
    "bilstm",
    "experts",
    "graph of indices",
    "graph of maxima",
    "scanned",
    "bert",
    "llama",
)
"""Kinds of network; `make test-long` has all of them, and those of torchvision, timm and transformers."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUICK)
def test_slim_equals_masked(name: str) -> None:
    assert compared(ARCHITECTURES[name]()).difference < BOUND


# Derived by hand: channels that are read by one layer, tied by a sum, a concatenation, a split; heads; hidden units
COUNTS = {
    "residual": [4, 4, 4, 4, 6, 6],  # stem; stage 1 (two blocks) and its two inner ones; stage 2 and its inner one
    "plain": [8, 6, 10],
    "concatenated": [4, 3, 3, 3],
    "depthwise": [4, 8, 3],  # the residual stream, the expanded channels with their gate, the squeezed ones
    "shuffled": [4, 6],  # places in a group
    "u-net": [4, 6, 5],
    "pixel-shuffle": [5, 3],
    "gated": [4, 5],  # groups; a value with its gate
    "halved": [5, 4],  # a value with its gate
    "frozen": [4, 6],  # the residual stream; the inner one
    "lstm": [6, 5],  # words; hidden units, which both layers, directions and all gates have in common
    "bilstm": [6, 5],
    "projected-lstm": [6, 5, 3],  # and what is projected of them
    "gru": [6, 5],
    "rnn": [6, 5],
    "translator": [6, 5],
    "experts": [2, 5, 12],  # as in a llama; hidden units that all experts have in common; what goes through them
    "graph of indices": [8, 10],  # of nodes; of messages
    "graph of means": [8, 10],
    "scanned": [8, 7],
    "bert": [4, 20, 4, 20],
    "gpt2": [3, 48],
    "llama": [2, 20],  # two query heads with the key and value head they share
    "vit": [3, 10],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", COUNTS)
def test_units_are_those_that_a_person_counts(name: str) -> None:
    model, args, kwargs = ARCHITECTURES[name]()
    assert sorted(map(len, units(model, args, kwargs))) == sorted(COUNTS[name])


def test_what_is_not_known_pins_what_it_touches() -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.sort(self.first(x), 1).values)

    found = units(Sorted(), (IMAGES,))
    assert len(found) == 0
    assert found.pinned["first.weight", 0] == "the operation sort is not known"
    assert found.pinned["last.weight", 0] == "it is an output of the network"


def test_an_operation_in_a_form_that_is_not_known_pins_what_it_touches() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.scale, self.last = nn.Linear(3, 4), nn.Parameter(torch.ones(4)), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.linear(self.first(x), self.scale))

    found = units(Scaled(), (torch.rand(2, 5, 3),))
    assert len(found) == 0
    assert found.pinned["first.weight", 0] == "the operation linear is used in a form that is not known"


class Spread(nn.Module):
    """Divides channels by how far their values are apart."""

    def __init__(self, spread: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.spread = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 2, 1), spread

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        found: Tensor = self.last(x / (1 + self.spread(x)))
        return found


SPREADS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.var((2, 3), unbiased=False, keepdim=True),
    lambda x: x.std((2, 3), keepdim=True),
    lambda x: x.std((2, 3), correction=3, keepdim=True),
    lambda x: x.var((2, 3), False)[..., None, None],
]


@pytest.mark.parametrize("spread", SPREADS)
def test_channels_go_whose_values_are_divided_by_their_own_spread(spread: Callable[[Tensor], Tensor]) -> None:
    model = Spread(spread)
    assert [len(group) for group in units(model, (IMAGES,))] == [6]
    assert compared((model, (IMAGES,), {})).difference < BOUND


@pytest.mark.parametrize("spread", [lambda x: x.var(unbiased=False), lambda x: x.std()])
def test_channels_stay_whose_values_are_divided_by_the_spread_of_all(spread: Callable[[Tensor], Tensor]) -> None:
    found = units(Spread(spread), (IMAGES,))
    assert len(found) == 0
    assert found.pinned["first.weight", 0] == "it is reduced over"


class Through(nn.Module):
    """Has something done to the hidden units on their way."""

    def __init__(self, done: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.other, self.done = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(5, 6), done

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.done(self, self.first(x)))
        return found


@pytest.mark.parametrize(
    "done",
    [
        lambda _, x: x.swapaxes(1, 2).swapdims(1, 2).moveaxis(0, 1).moveaxis(0, 1),
        lambda _, x: x.mT.relu().mH.adjoint().mT,
        lambda _, x: x.ravel().view(x.shape),
        lambda _, x: torch.cat([*x.tensor_split(2, 1), *x.hsplit([1]), *x.fliplr().unsafe_chunk(2, 1)], 1),
        lambda _, x: x[:, :1].broadcast_to(x.shape),
        lambda _, x: x[:, : len(x)].diagonal(0, 0, 1).T,
    ],
)
def test_units_go_whose_values_are_only_moved(done: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model, example = Through(done), (torch.randn(2, 5, 4),)
    assert [len(group) for group in units(model, example)] == [6]
    assert compared((model, example, {})).difference < BOUND


@pytest.mark.parametrize(
    "done",
    [lambda model, x: x.type_as(model.first.weight), lambda model, x: x.to(model.other.weight)],
)
def test_a_tensor_that_only_says_a_type_ties_nothing(done: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model, example = Through(done), (torch.randn(2, 5, 4),)
    assert [len(group) for group in units(model, example)] == [6]
    assert compared((model, example, {})).difference < BOUND


class OneImage(nn.Sequential):
    """Is given an image without a batch around it."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x[0])
        return found


@pytest.mark.parametrize("size", [5, 7])
def test_channels_of_an_image_without_a_batch_go(size: int) -> None:
    layers = nn.Conv2d(3, 5, 1), nn.ConvTranspose2d(5, 6, 2), nn.Conv2d(6, 2, 1)
    model, example = OneImage(*layers), (torch.randn(1, 3, size, size),)
    assert [len(group) for group in units(model, example)] == [5, 6]
    assert compared((model, example, {})).difference < BOUND


def test_what_an_index_selects_of_stays() -> None:
    class Selected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.last(self.first(x).index_select(1, torch.tensor([0, 3])))
            return found

    found = units(Selected(), (torch.rand(2, 3),))
    assert len(found) == 0
    assert found.pinned["first.weight", 0] == "it is looked up by an index"


def test_what_a_layer_reads_with_a_buffer_stays_as_no_mask_makes_it_zero() -> None:
    class Projected(nn.Module):
        """Half of what is at a unit without weights reaches the outputs."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(3, 4)
            self.register_buffer("projection", torch.ones(4, 1))
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            one, other = self.first(x).sigmoid(), self.scale * self.second(x).sigmoid()
            return one @ self.projection + nn.functional.linear(other, self.scale[None])

    found = units(Projected(), (torch.rand(2, 3),))
    assert len(found) == 0
    assert found.pinned["projection", 0] == found.pinned["scale", 0] == "it is a buffer that is read, or divided by"


def test_weights_that_are_standardised_keep_what_they_read() -> None:
    class Standardised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            flat = self.last.weight.reshape(1, 2, -1)
            weight = nn.functional.batch_norm(flat, None, None, training=True).reshape_as(self.last.weight)
            return nn.functional.conv2d(self.first(x), weight)

    found = units(Standardised(), (IMAGES,))
    assert found.pinned["last.weight", 1] == "it is normalised over"
    assert len(found) == 0


def test_what_is_pooled_over_stays() -> None:
    class Pooled(nn.Module):
        """The features of a row, each with its neighbours."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.last(nn.functional.max_pool1d(self.first(x), 3, 1, 1))
            return found

    found = units(Pooled(), (torch.rand(2, 3),))
    assert len(found) == 0
    assert found.pinned["first.weight", 0] == "it is pooled"
    layers = (nn.Conv2d(3, 4, 1), nn.MaxPool2d(2), nn.Conv2d(4, 5, 1), nn.ReflectionPad2d(1), nn.Conv2d(5, 2, 1))
    assert sorted(map(len, units(nn.Sequential(*layers), (IMAGES[0],)))) == [4, 5], "of an image without a batch"


@pytest.mark.parametrize(
    ("inverse", "left"),
    [
        (lambda scale: 1 / scale, 0),
        (lambda scale: scale[None].log(), 0),
        (lambda scale: 1 / (scale + 1e-3), 4),
        (lambda scale: 1 / scale.exp(), 4),
    ],
)
def test_a_parameter_that_is_divided_by_stays(inverse: Callable[[Tensor], Tensor], left: int) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.scale = nn.Linear(3, 4), nn.Linear(4, 2), nn.Parameter(torch.rand(4) + 1)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.last(self.first(x) * inverse(self.scale))
            return found

    found = units(Scaled(), (torch.rand(2, 3),))
    assert sum(map(len, found)) == left
    assert left or found.pinned["scale", 0] == "it is divided by, and would be zero"


def test_a_recurrent_state_that_begins_with_zeros_shrinks_with_its_units() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.read, self.again, self.last = (
                nn.Embedding(11, 6),
                nn.Linear(6, 5),
                nn.Linear(5, 5),
                nn.Linear(5, 3),
            )
            self.size = 5

        def forward(self, ids: Tensor) -> Tensor:
            words = self.words(ids)
            state = words.new_zeros(len(ids), self.size)
            for place in range(ids.shape[1]):
                state = torch.tanh(self.read(words[:, place]) + self.again(state))
            return self.last(state)

    assert sorted(map(len, units(Loop(), (IDS,)))) == [5, 6]
    assert compared((Loop(), (IDS,), {})).difference < BOUND


def test_equal_parts_of_a_split_lose_the_same_places() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.one, self.other = nn.Linear(3, 8), nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            one, other = self.first(x).chunk(2, 1)
            return self.one(one) + self.other(other)

    (group,) = units(Halves(), (torch.rand(2, 3),))
    assert [unit.indices["first.weight", 0] for unit in group.units] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_a_recurrent_state_that_is_given_holds_the_hidden_units() -> None:
    class Continued(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.last = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor, state: Tensor) -> Tensor:
            return self.last(self.layers(x, state)[0])

    found = units(Continued(), (torch.ones(2, 5, 3), torch.ones(1, 2, 4)))
    assert found.pinned["layers.weight_hh_l0", 0] == "its initial state is given and cannot shrink"


def test_a_part_of_a_unit_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    part = torch.ones(4, 3, 1, 1, dtype=torch.bool)
    part[0, 0] = False
    with pytest.raises(InputError, match=r"the mask of 0\.weight is not of whole units"):
        slim(model, Mask({"0.weight": part}), (IMAGES,))


def forward_of(forward: Callable[[nn.Linear, Tensor], Tensor]) -> nn.Module:
    """A network of one linear layer, with a forward of its own."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return forward(self.layer, x)

    return Network()


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (
            lambda layer, x: layer(x) if x.sum() > 0 else x,
            "what it computes depends on the values of a tensor: GuardOnDataDependentSymNode: Could not guard on "
            "data-dependent expression Eq(u0, 1)",
        ),
        (
            lambda layer, x: layer(x[x[:, 0] > 0]),
            "the shape of what aten.index.Tensor gives depends on the values of a tensor",
        ),
        (
            lambda layer, x: layer(x).split((x[:, 0] > 0).long().tolist(), 1)[0],
            "the shape of what aten.split_with_sizes.default gives depends on the values of a tensor",
        ),
        (lambda layer, x: torch.from_numpy(layer(x).detach().numpy()), ".numpy() is not supported"),
    ],
)
def test_a_network_that_cannot_be_traced_says_why(
    forward: Any, message: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InputError) as caught:
        units(forward_of(forward), (torch.ones(2, 3),))
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    said = str(caught.value)
    assert said.startswith("this network cannot be traced (")
    assert message in said
    assert said.endswith("so that its units are not known; unstructured pruning works all the same")


def test_an_example_that_does_not_fit_is_refused() -> None:
    expected = (
        r"does not run on the example inputs \(of \(2, 5\)\): RuntimeError: mat1 and mat2 shapes .*; give one batch"
    )
    with pytest.raises(InputError, match=expected):
        units(nn.Linear(3, 2), (torch.ones(2, 5),))
    with pytest.raises(InputError, match=r"does not run on the example inputs \(of nothing\): TypeError"):
        units(nn.Linear(3, 2), ())
    with pytest.raises(InputError, match="example_keywords must be of type Mapping, not 5; give values by"):
        units(nn.Linear(3, 2), (torch.ones(2, 3),), 5)  # type: ignore[arg-type]


def test_counts_in_the_code_that_cannot_be_written_anew_are_refused() -> None:
    class Even(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(3, 5), nn.Linear(5, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self.middle(self.first(x)))
            if hidden.shape[1] % 2:
                raise ValueError("an odd shape")
            return self.last(hidden)

    model = nn.Sequential(nn.Sequential(Even(), nn.Tanh()))
    found = units(model, (torch.ones(4, 3),))  # which tries the network with four of the eight
    group = next(group for group in found if len(group) == 8)
    expected = (
        r"the masked one \(ValueError in 0\.0 of the class Even: an odd shape\).*, keep its units with skip=, or "
    )
    with pytest.raises(InputError, match=expected):
        slim(model, found.mask_without(group.units[:1]), (torch.ones(4, 3),))


@pytest.mark.parametrize(
    "make", [Lock, multiprocessing.Lock, multiprocessing.Queue], ids=["lock", "of processes", "queue"]
)
def test_a_network_that_holds_what_cannot_be_copied_has_units_and_slim_refuses_it_in_a_sentence(make: Any) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), (torch.ones(2, 3),)
    model.held = make()
    found = units(model, x)
    assert [group.name for group in found] == ["0.weight"]
    with pytest.raises(InputError, match=r"a copy of the Sequential is needed and cannot be made \(.*__getstate__"):
        slim(model, found.mask_without(found.groups[0].units[:2]), x)
    with pytest.raises(InputError, match="does not run on the example inputs"):
        units(model, (torch.ones(2, 5),))


class Frozen(dict[str, int]):
    """A configuration that cannot be changed, such as those of diffusers."""

    def clear(self) -> None:
        raise TypeError("frozen")

    update = clear  # type: ignore[assignment]


def test_a_network_may_hold_what_cannot_be_changed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model.config = Frozen(width=4)
    assert len(units(model, (torch.ones(2, 3),))) == 1


class Positions(nn.Module):
    """Tables of 32 positions, of which a sequence reads as many as it has; `how` says how they are cut."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.heads = how, 4
        self.words, self.table, self.more = nn.Embedding(9, 8), nn.Embedding(32, 8), nn.Parameter(torch.randn(32, 8))
        self.bias = nn.Parameter(torch.randn(4, 32, 32))
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 9)

    def forward(self, ids: Tensor) -> Tensor:
        length, words = ids.shape[1], self.words(ids)
        if self.how == "relative":
            q, k, v = (
                each(words).view(*ids.shape, self.heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v)
            )
            bias = self.bias[:, :length, :length]
            found = nn.functional.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2)
            return self.last(self.o(found.flatten(2)))
        if self.how == "table":
            words = words + self.table.weight[:length]
        elif self.how == "sum":
            words = words + (self.table.weight + self.more)[:length]
        elif self.how == "computed":
            words = words + self.k(self.q(self.more).relu())[:length]
        return self.last(self.o(words).relu())


@pytest.mark.parametrize("how", ["table", "sum", "computed", "relative"])
def test_what_the_example_does_not_read_of_a_table_stays(how: str) -> None:
    torch.manual_seed(0)
    model, short, long = Positions(how).double().eval(), torch.arange(14).reshape(2, 7) % 9, torch.arange(24)[None] % 9
    found = units(model, (short,))
    table, dim = {"table": ("table.weight", 0), "relative": ("bias", 1)}.get(how, ("more", 0))
    assert (table, dim) in found.pinned
    assert (table, dim) not in [place for group in found for place in group.members]
    mask = found.mask_without(unit for group in found for unit in group.units[::2])
    small = slim(model, mask, (short,)).model
    mask.apply(model)
    assert torch.allclose(model(long), small(long), rtol=0, atol=1e-12)


def test_a_table_that_is_read_from_its_middle_says_what_the_example_does_not_read() -> None:
    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Parameter(torch.randn(32, 8)), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x + self.table[8 : 8 + x.shape[1]])

    assert units(Middle(), (torch.ones(2, 5, 8),)).pinned["table", 0] == "the example does not read it"


def test_parameters_in_the_same_memory_that_are_not_one_are_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)
            self.last.weight = nn.Parameter(self.first.weight.t())

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).relu())

    model, example = Tied(), (torch.rand(2, 3),)
    with pytest.raises(InputError, match=r"\.weight and \w+\.weight are two parameters in the same memory.*make"):
        units(model, example)
    model.last.weight = nn.Parameter(model.first.weight.detach().t().clone())
    assert len(units(model, example)) == 1


def test_a_compiled_part_is_refused() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(3, 4), backend="eager"), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(InputError, match=r"a part of this model is compiled \(0\._orig_mod\.weight\).* in place"):
        units(model, (torch.rand(2, 3),))
    model[0] = nn.Linear(3, 4)
    model[0].compile(backend="eager")
    assert len(units(model, (torch.rand(2, 3),))) == 1


def test_a_network_in_something_that_is_no_wrapper_of_torch_is_to_be_given_itself() -> None:
    network, example = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (torch.rand(2, 3),)
    average = AveragedModel(network)
    with pytest.raises(
        InputError, match=r"AveragedModel holds .* `module` \(module\.0\.weight\).* give .*model\.module"
    ):
        units(average, example)
    assert len(units(average.module, example)) == 1


def test_experts_that_are_stacked_lose_hidden_units_by_a_product_of_groups() -> None:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(2, 8, 32)), nn.Parameter(torch.randn(2, 8, 32))

        def forward(self, x: Tensor) -> Tensor:
            ends = torch.tensor([len(x) // 2, len(x)], dtype=torch.int32)  # half of the rows for each expert
            hidden = nn.functional.grouped_mm(x, self.up, offs=ends).relu()
            found: Tensor = nn.functional.grouped_mm(hidden, self.down.transpose(1, 2), offs=ends)
            return found

    model, x = Stacked().bfloat16(), torch.randn(6, 8).bfloat16()
    (group,) = units(model, (x,))
    assert group.members == (("up", 2), ("down", 2))
    made = slim(model, units(model, (x,)).mask_without(group.units[::2]), (x,))
    assert made.model.up.shape == made.model.down.shape == (2, 8, 16)


class Stacked(nn.Module):
    """Experts whose weights are in one parameter each, taken one by one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down, self.how = nn.Parameter(torch.randn(3, 8, 6)), nn.Parameter(torch.randn(3, 4, 8)), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "index":
            pairs = [(self.up[place], self.down[place]) for place in range(3)]
        else:
            pairs = list(zip(self.up.unbind(), self.down, strict=True))
        return torch.stack([F.linear(F.linear(x, up).relu(), down) for up, down in pairs]).sum(0)


@pytest.mark.parametrize("how", ["index", "unbind"])
def test_hidden_units_of_weights_that_are_taken_from_a_stack_go_one_by_one(how: str) -> None:
    found = units(Stacked(how), (torch.randn(2, 6),))
    (group,) = found
    assert (group.name, len(group), group.members) == ("up", 8, (("up", 1), ("down", 2)))
    assert found.pinned["up", 0] == found.pinned["down", 0] == "it is taken by its index"
    assert compared((Stacked(how), (torch.randn(2, 6),), {})).difference < BOUND
