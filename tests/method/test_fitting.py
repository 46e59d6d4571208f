"""Counts in a user's own classes are right in a smaller network, whatever the example and the weights hide."""

import itertools
import random
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from rewound import InputError, Mask
from rewound.method.flops import profile
from rewound.method.structure.examples import tensors_in
from rewound.method.structure.slimming import Slim, slim
from rewound.method.structure.tracing import units
from rewound.method.structure.trials import distance

TOKENS = torch.arange(12).reshape(2, 6) % 10


class Attention(nn.Module):
    """Eight heads of four beside a shortcut; `where` says where their number is."""

    def __init__(self, where: str = "module", *, gain: float = 1.0) -> None:
        super().__init__()
        self.config, self.where = SimpleNamespace(heads=8), where
        self.kind: torch.dtype | None = None
        if where == "module":
            self.heads = 8
        self.words = nn.Embedding(10, 32)
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.gain = nn.Parameter(torch.full((32,), gain))
        self.last = nn.Linear(32, 5)

    def hidden(self, ids: Tensor) -> Tensor:
        words = self.words(ids).to(self.kind or self.words.weight.dtype)
        heads = self.heads if self.where == "module" else self.config.heads
        q, k, v = (f(words).view(*ids.shape, heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        found = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.last(words + self.gain * self.o(found))

    def forward(self, ids: Tensor) -> Tensor:
        return self.hidden(ids)


class Silent(Attention):
    """Its branch ends with a layer of zeros, as in many networks before they are trained."""

    def __init__(self, where: str = "module") -> None:
        super().__init__(where)
        nn.init.zeros_(self.o.weight)


class Single(Attention):
    """Its code says that it computes in float32, and its branch is faint."""

    def __init__(self) -> None:
        super().__init__(gain=1e-5)
        self.kind = torch.float32


class Chosen(Attention):
    """Puts out which class is the largest."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.hidden(ids).argmax(-1)


def halved(model: nn.Module, example: Tensor) -> tuple[Slim, Mask]:
    """The network with half of its heads, and the mask that says so; also where `units` says that they stay."""
    found = units(Attention(), (example,))
    (heads,) = (group for group in found if len(group) == 8)
    mask = found.mask_without(heads.units[::2])
    return slim(model, mask, (example,), groups=found), mask


HIDING: dict[str, tuple[Any, Tensor]] = {
    "equal tokens": (Attention, torch.zeros(2, 6, dtype=torch.long)),
    "equal tokens that are not 0": (Attention, torch.full((2, 6), 9)),
    "one token": (Attention, torch.tensor([[1], [2]])),
    "a layer of zeros": (Silent, TOKENS),
    "float32": (Single, TOKENS),
    "classes": (Chosen, TOKENS),
}


@pytest.mark.parametrize("name", HIDING)
def test_heads_are_counted_where_the_example_shows_no_difference(name: str) -> None:
    torch.manual_seed(0)
    make, example = HIDING[name]
    model = make().eval()
    assert 8 in map(len, units(model, (example,)))
    small, mask = halved(model, example)
    assert small.model.heads == 4
    model.load_state_dict(Attention().state_dict())  # as after training
    mask.apply(model)
    small.model.load_state_dict(small.state(model.state_dict()))
    model.kind = small.model.kind = None
    assert torch.allclose(model.double().hidden(TOKENS), small.model.double().hidden(TOKENS), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "example"),
    [
        (Attention, TOKENS),
        (Attention, torch.zeros(2, 6, dtype=torch.long)),
        (Attention, torch.tensor([[1], [2]])),
        (Silent, TOKENS),
    ],
)
def test_a_count_outside_of_modules_is_refused_where_the_example_hides_it(make: Any, example: Tensor) -> None:
    with pytest.raises(InputError, match=r"no smaller network was found that equals the masked one \(its outputs"):
        halved(make("config"), example)
    assert 8 not in map(len, units(make("config"), (example,)))


class Equal(nn.Module):
    """Two counts that are equal, of layers that need not stay so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = 8
        self.a, self.b, self.out = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Linear(128, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).relu().view(-1, self.first, 4, 4)
        found: Tensor = self.out(self.b(hidden).relu().view(-1, self.second * 16))
        return found


@pytest.mark.parametrize("left", [(5, 6), (6, 5), (5, 5), (8, 5), (5, 8)])
def test_counts_that_were_equal_are_told_apart(left: tuple[int, int]) -> None:
    model, example = Equal(), (torch.randn(2, 3, 4, 4),)
    found = units(model, example)
    gone = [unit for group, stay in zip(found, left, strict=True) for unit in group.units[stay:]]
    small = slim(model, found.mask_without(gone), example).model
    assert (small.first, small.second) == left


def test_a_spectral_norm_in_training_mode_becomes_small() -> None:
    first, example = spectral_norm(nn.Conv2d(3, 8, 1)), (torch.randn(2, 3, 4, 4),)
    model = nn.Sequential(first, nn.ReLU(), nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 2, 1)).train()
    found = units(model, example)
    (group,) = (group for group in found if len(group) == 6)
    small = slim(model, found.mask_without(group.units[::2]), example).model
    assert small[2].out_channels == 3
    assert all(module.training for module in small.modules())


def test_a_number_that_may_be_any_stays() -> None:
    model = Attention()
    model.depth, model.longest = 32, 8  # sizes of its weights, too
    small = halved(model, TOKENS)[0].model
    assert (small.depth, small.longest, small.heads) == (32, 8, 4)


class Cropping(Attention):
    """Says in four numbers what it looks at, all of them sizes of its weights, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = 8, 16, 8, 16

    def forward(self, ids: Tensor) -> Tensor:
        return self.hidden(ids[: self.first, : self.second].repeat(1, 4)[: self.third, : self.fourth])


def test_one_count_is_found_among_many_numbers_that_are_none() -> None:
    ids = torch.arange(12 * 20).reshape(12, 20) % 10
    small = halved(Cropping(), ids)[0].model
    assert (small.heads, small.first, small.second, small.third, small.fourth) == (4, 8, 16, 8, 16)


@dataclass
class Found:
    """What a network puts out, as a record."""

    classes: Tensor
    sizes: Tensor


torch.export.register_dataclass(Found, serialized_type_name="test_fitting.Found")


class Recorded(Attention):
    def forward(self, ids: Tensor) -> Found:  # type: ignore[override]
        classes = self.hidden(ids)
        return Found(classes, classes.abs())


@pytest.mark.parametrize("where", ["module", "config"])
def test_outputs_in_a_dataclass_are_compared(where: str) -> None:
    if where == "module":
        assert halved(Recorded(where), TOKENS)[0].model.heads == 4
    else:
        with pytest.raises(InputError, match="its outputs differ"):
            halved(Recorded(where), TOKENS)


def test_tensors_are_found_however_an_output_nests_them() -> None:
    one, two = torch.ones(1), torch.ones(2)
    for thing in ((one, None, [two]), {"a": one, "b": (two,)}, Found(one, two), UserDict(a=one, b={"c": two})):
        assert [each.numel() for each in tensors_in(thing)] == [1, 2]
    with pytest.raises(InputError, match="the network puts out no tensor, but None, so that nothing can be compared"):
        tensors_in(None)


def test_a_distance_beside_the_size_of_numbers_and_of_what_is_no_number() -> None:
    nan, inf = torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.inf])
    assert distance([nan, inf], [nan, inf]) == 0
    assert distance([torch.tensor([200.0])], [torch.tensor([100.0])]) == 1
    assert 1 < distance([nan], [inf]) < torch.inf
    assert distance([nan], [nan, nan]) == distance([torch.ones(1)], [torch.ones(2)]) == torch.inf


class Shares(nn.Module):
    """Splits what a layer gives into parts of so many."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [5, 8]
        self.both, self.first, self.second = nn.Linear(6, 13), nn.Linear(5, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.both(x).split(self.sizes, 1)
        found: Tensor = self.first(first.relu()) + self.second(second.tanh())
        return found


class Rest(nn.Module):
    """Splits what a layer gives into a part for one layer and the rest, which goes past it."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = (9, 4)
        self.both, self.inner, self.last = nn.Linear(6, 13), nn.Linear(4, 4), nn.Linear(13, 2)

    def forward(self, x: Tensor) -> Tensor:
        rest, part = self.both(x).tanh().split(self.sizes, 1)
        found: Tensor = self.last(torch.cat([rest, self.inner(part).relu()], 1))
        return found


def decoder() -> nn.Module:
    """From a vector to images, as in generators."""
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Unflatten(1, (8, 2, 2)), nn.ConvTranspose2d(8, 3, 2, 2))


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (decoder, lambda model: model[2].unflattened_size == (5, 2, 2)),
        (Shares, lambda model: model.sizes == [2, 5]),
        (Rest, lambda model: model.sizes == (6, 1)),
    ],
)
def test_counts_in_tuples_and_lists_are_written_anew(make: Any, sizes: Any) -> None:
    torch.manual_seed(0)
    model, again, example = make(), make(), torch.randn(4, 6)
    found = units(model, (example,))
    small = slim(model, found.mask_without([unit for group in found for unit in group.units[:3]]), (example,))
    assert sizes(small.model)
    assert not sizes(model)
    small.into(again)
    again.load_state_dict(small.model.state_dict())
    assert torch.equal(again(example), small.model(example))


class Words(nn.Module):
    """Keeps a long list of numbers, which are equal to a size."""

    def __init__(self) -> None:
        super().__init__()
        self.words = [8] * 300
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        PASSES.append(1)
        found: Tensor = self.last(self.first(x).relu()) * len(self.words)
        return found


PASSES: list[int] = []


def test_a_long_list_of_numbers_is_not_taken_for_sizes() -> None:
    model, example = Words(), torch.randn(4, 6)
    found = units(model, (example,))
    PASSES.clear()
    small = slim(model, found.mask_without(found.groups[0].units[:3]), (example,))
    assert small.model.words == [8] * 300
    assert len(PASSES) < 50


class Padded(nn.Module):
    """Pads what is short, up to a multiple, or leaves out an id, by numbers that count no units."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        setattr(self, how, {"least": 8, "multiple": 4, "capacity": 4, "ignored": 2}[how])
        self.words, self.a, self.b = nn.Embedding(20, 6), nn.Linear(6, 32), nn.Linear(32, 3)

    def forward(self, ids: Tensor) -> Tensor:
        number, length = getattr(self, self.how), ids.shape[1]
        words = self.words(ids)
        if self.how == "ignored":
            words = words * (ids != number)[..., None]
        elif self.how == "capacity":
            words = words[:, : max(number, length // 2)]
        else:
            more = -length % number if self.how == "multiple" else max(0, number - length)
            words = nn.functional.pad(words, (0, 0, 0, more))
        found: Tensor = self.b(self.a(words).relu()).mean(1)
        return found


@pytest.mark.parametrize("how", ["least", "multiple", "capacity", "ignored"])
@pytest.mark.parametrize("left", [16, 8])
def test_numbers_that_the_example_does_not_need_stay(how: str, left: int) -> None:
    model, ids = Padded(how), torch.arange(3, 19).repeat(2, 1)  # of 16, which half and a quarter divide, too
    found = units(model, (ids,))
    mask = found.mask_without(next(group for group in found if len(group) == 32).units[left:])
    small = slim(model, mask, (ids,)).model
    assert vars(small)[how] == vars(model)[how]
    mask.apply(model)
    for length in (1, 3, 5, 6, 7, 9, 13):
        other = torch.arange(2 * length).reshape(2, length) % 20
        assert torch.allclose(small(other), model(other), atol=1e-6)


class TimeFirst(nn.Module):
    """Four heads over the first dimension of what it is given, by a number that is an attribute or none."""

    def __init__(self, *, constant: bool, noise: Any = None) -> None:
        super().__init__()
        self.calls, self.noise, self.generator = 0, noise, torch.Generator().manual_seed(0)
        if not constant:
            self.heads = 4
        self.qkv, self.last = nn.Linear(6, 96), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.noise is not None:
            x = x + self.noise(self, x)
        heads = vars(self).get("heads", 4)
        q, k, v = (y.reshape(*x.shape[:2], heads, -1).permute(1, 2, 0, 3) for y in self.qkv(x).chunk(3, -1))
        found = nn.functional.scaled_dot_product_attention(3 * q, k, v)
        return self.last(found.permute(2, 0, 1, 3).flatten(2))


def without_two_heads(model: nn.Module, x: Tensor) -> Slim:
    found = units(TimeFirst(constant=False), (x,))
    (heads,) = found
    return slim(model, found.mask_without(heads.units[2:]), (x,), groups=found)


def test_heads_are_counted_where_one_step_comes_first() -> None:
    x = torch.randn(1, 2, 6)
    assert without_two_heads(TimeFirst(constant=False), x).counts[""]["heads"] == 2
    with pytest.raises(InputError, match="its outputs differ"):
        without_two_heads(TimeFirst(constant=True), x)


NOISE: dict[str, Any] = {
    "numpy": lambda model, x: torch.from_numpy(np.random.standard_normal(x.shape)).to(x),  # noqa: NPY002
    "python": lambda model, x: random.random(),
    "own generator": lambda model, x: torch.randn(x.shape, generator=model.generator).to(x),
    "calls": lambda model, x: model.calls,
}


@pytest.mark.parametrize("name", NOISE)
def test_what_a_network_draws_or_counts_hides_no_difference(name: str) -> None:
    x, before = torch.randn(7, 2, 6), (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    assert without_two_heads(TimeFirst(constant=False, noise=NOISE[name]), x).counts[""]["heads"] == 2
    with pytest.raises(InputError, match="its outputs differ"):
        without_two_heads(TimeFirst(constant=True, noise=NOISE[name]), x)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002


def test_a_network_that_never_puts_out_the_same_is_refused() -> None:
    numbers = itertools.count(1)
    model = TimeFirst(constant=True, noise=lambda model, x: 0.1 * next(numbers))
    with pytest.raises(InputError, match="does not put out the same twice"):
        without_two_heads(model, torch.randn(7, 2, 6))


@pytest.mark.parametrize("size", [1e-5, 1.0, 1e5])
def test_small_outputs_are_compared_as_closely_as_large_ones(size: float) -> None:
    class Scaled(TimeFirst):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float()) * size

    with pytest.raises(InputError, match="its outputs differ"):
        without_two_heads(Scaled(constant=True), torch.randn(7, 2, 6))
    without_two_heads(Scaled(constant=False), torch.randn(7, 2, 6))


def test_a_number_that_stays_is_not_tried_with_values_that_need_much_memory() -> None:
    seen: list[int] = []

    class Larger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.scale = nn.Conv2d(3, 64, 1), nn.Conv2d(64, 3, 1), 2

        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.scale)
            return self.b(nn.functional.interpolate(self.a(x).relu(), scale_factor=self.scale))

    model, x = Larger(), torch.randn(1, 3, 8, 8)
    found = units(model, (x,))
    small = slim(model, found.mask_without(found.groups[0].units[32:]), (x,)).model
    assert small.scale == max(seen) == 2


class Keeper(nn.Module):
    """A layer that its parent never calls, but reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.groups, self.scale = nn.Parameter(torch.randn(8, 6)), 8, 8


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keeper, self.last = Keeper(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.keeper.scale * self.last((x @ self.keeper.weight.T).view(-1, self.keeper.groups).relu())


def without_half(model: nn.Module) -> Slim:
    example = (torch.randn(2, 6),)
    found = units(model, example)
    return slim(model, found.mask_without(found.groups[0].units[::2]), example, groups=found)


def test_a_count_is_found_in_a_layer_that_others_read_and_nobody_calls() -> None:
    small = without_half(Reader()).model.keeper
    assert (small.groups, small.scale) == (4, 8)
    assert "__getattribute__" not in vars(Keeper)


class Counting(Reader):
    """Its class says itself how attributes are read, and notes it."""

    seen = 0

    def __getattribute__(self, name: str) -> Any:
        Counting.seen += name == "keeper"
        return super().__getattribute__(name)


def test_how_a_class_reads_its_attributes_is_left_as_it_was() -> None:
    before = vars(Counting)["__getattribute__"]
    assert without_half(Counting()).model.keeper.groups == 4
    assert Counting.seen > 0
    assert vars(Counting)["__getattribute__"] is before


class Attending(nn.Module):
    """Attention of torch, whose keys and values are computed from others than its queries."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.keys, self.last = nn.Linear(12, 16), nn.Linear(12, 10), nn.Linear(16, 5)
        self.heads = nn.MultiheadAttention(16, 4, kdim=10, vdim=10, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden, keys = self.a(x), self.keys(x)
        found: Tensor = self.last(hidden + self.heads(hidden, keys, keys, need_weights=False)[0])
        return found


def test_counts_of_attention_follow_from_its_weights() -> None:
    model, example = Attending(), torch.randn(2, 7, 12)
    found = units(model, (example,))
    assert [group.name for group in found] == ["keys.weight"], "torch's code needs heads for the whole width"
    mask = found.mask_without(found.groups[0].units[:5])
    small = slim(model, mask, (example,)).model
    heads = small.heads
    assert (heads.num_heads, heads.embed_dim, heads.kdim, heads.vdim) == (4, 16, 5, 5)
    assert profile(small, example[:1]).total() == profile(model, example[:1]).total(mask)
