"""Groups that the code of a network needs whole are found in advance, so that `slim` does not refuse what goes."""

from functools import cache
from threading import Lock
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from rewound.method.pruner import Pruner
from rewound.method.structure.groups import Units
from rewound.method.structure.slimming import slim
from rewound.method.structure.tracing import units

X = torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Of four heads, whose size is a part of the input's (`by_input`), or that of the weights."""

    def __init__(self, by_input: bool = True) -> None:
        super().__init__()
        self.num_heads, self.by_input = 4, by_input
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        width = (x if self.by_input else self.out.weight).shape[-1]
        parts = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, width // self.num_heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        found: Tensor = self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return found


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), attention
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        found: Tensor = x + self.down(self.up(x).relu())
        return found


def names(found: Units) -> list[str]:
    return [group.name for group in found]


def test_heads_that_take_their_size_from_the_input_stay_and_all_else_may_go() -> None:
    model = nn.Sequential(*(Block(Attention()) for _ in range(3)))
    found = units(model, (X,))
    assert names(found) == ["0.up.weight", "1.up.weight", "2.up.weight"]
    for block in range(3):  # one was tried, the others are alike
        reason = found.pinned[f"{block}.attention.qkv.weight", 0]
        assert reason.startswith(
            "a network without some of them was tried: RuntimeError in 0.attention of the class Atten"
        )
    mask = Pruner(pattern="unit")(model, 0.8, example_inputs=(X,))
    assert slim(model, mask, (X,)).model[0].up.out_features < 16


def test_heads_that_take_their_size_from_the_weights_may_go() -> None:
    found = units(nn.Sequential(Block(Attention(by_input=False)), Block(Attention())), (X,))
    assert names(found) == ["0.up.weight", "1.up.weight"], "modules of one class are taken to be alike"
    found = units(Block(Attention(by_input=False)), (X,))
    assert names(found) == ["attention.qkv.weight", "up.weight"]


def test_what_the_code_of_torch_itself_needs_stays() -> None:
    model = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
    found = units(model, (X,))
    assert names(found) == ["linear1.weight"]
    reason = found.pinned["self_attn.in_proj_weight", 0]
    assert (
        reason
        == "a network without some of them was tried: AssertionError: was expecting embedding dimension of 4, but got 8"
    )


class Mixed(nn.Module):
    """Mixes places by heads, and writes what they give in the shape of its input, as networks for detection do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.value, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 1)
        self.heads, self.mixed = 2, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        value = self.value(x).view(len(x), self.heads, -1, x.shape[2] * x.shape[3])
        found: Tensor = self.last(self.mixed(value).view(x.shape))
        return found


def test_channels_stay_of_which_code_needs_as_many_in_two_places() -> None:
    model = nn.Sequential(Mixed(), nn.Conv2d(2, 5, 1), nn.ReLU(), nn.Conv2d(5, 1, 1))
    found = units(model, (torch.randn(2, 3, 2, 2),))
    assert names(found) == ["0.last.weight", "1.weight"]
    assert "shape" in found.pinned["0.first.weight", 0]


class Halves(nn.Module):
    """Adds up two halves, of as many as the code says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(8, 6), nn.Linear(3, 2), nn.Linear(2, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.b(self.a(x).view(*x.shape[:2], 2, 3).sum(2))
        found: Tensor = self.d(self.c(hidden).relu())
        return found


def test_of_several_groups_in_a_module_only_those_at_fault_stay() -> None:
    found = units(Halves(), (X,))
    assert "RuntimeError in the network of the class Halves: shape '[2, 7, 2, 3]' is" in found.pinned["a.weight", 0]
    assert names(found) == ["b.weight", "c.weight"]


class Drawn(nn.Module):
    """Takes a number out of a tensor, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor(2.0).item()
        found: Tensor = self.b(self.a(x) * scale + torch.randn(1))
        return found


def test_a_network_that_draws_is_tried_and_the_generator_stays_where_it_was() -> None:
    model, before = Drawn(), torch.random.get_rng_state()
    assert names(units(model, (X,))) == ["a.weight"]
    assert torch.equal(torch.random.get_rng_state(), before)


@cache
def table(length: int, width: int) -> Tensor:
    """Positions, as code keeps them for all networks."""
    return torch.outer(torch.arange(1.0, length + 1), torch.arange(1.0, width + 1)).sin()


class Positions(nn.Module):
    """Keeps tables where a later call finds them: of a function, in a dictionary, as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 2)
        self.tables: dict[int, Tensor] = {}
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        length, width = x.shape[1:]
        if length not in self.tables:
            self.tables[length] = torch.arange(1.0, length + 1)[:, None].cos()
        if self.table is None:
            self.table = torch.full((length, 1), 0.5)
        x = x + table(length, width) + self.tables[length] + self.table
        found: Tensor = self.c(self.a(x).relu() + self.b(x))
        return found


def test_tables_that_code_keeps_hold_numbers_after_a_trace() -> None:
    table.cache_clear()
    model = Positions()
    found = units(model, (X,))
    assert (model.tables, model.table) == ({}, None), "the model itself has not run"
    again = units(model, (X,))
    assert names(found) == names(again) == ["a.weight"]
    assert type(table(7, 8)) is Tensor
    small = slim(model, found.mask_without(found.groups[0].units[:2]), (X,)).model
    assert small.a.out_features == 4
    assert type(small(X)) is Tensor
    assert type(model(X)) is Tensor


def test_a_long_example_is_cut_to_two_rows_where_the_network_runs_on_them() -> None:
    seen: list[int] = []

    class Rows(nn.Sequential):
        def __init__(self, least: int) -> None:
            super().__init__(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
            self.least = least

        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            if len(x) < self.least:
                raise ValueError
            found: Tensor = super().forward(x)
            return found

    for least, rows in ((1, 2), (3, 50)):
        assert names(units(Rows(least), (torch.ones(50, 8),))) == ["0.weight"]
        assert seen[-1] == rows


class Writing(nn.Module):
    """Writes into a parameter as it runs, and keeps a tensor that was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(8, 6), nn.Linear(6, 2), nn.Parameter(torch.ones(()))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.copy_(2 * self.scale)
        hidden = self.a(x).relu()
        self.seen.append(hidden)
        found: Tensor = self.b(hidden) * self.scale
        return found


def test_a_network_that_changes_as_it_runs_stays_as_it_was() -> None:
    model = Writing()
    units(model, (X,))
    assert (model.scale.item(), model.seen) == (1, [])


class View(nn.Module):
    """A part of a network that says how wide it is."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), 6)


def test_a_number_in_the_code_of_one_part_does_not_keep_the_others_whole() -> None:
    model = nn.Sequential(nn.Linear(8, 6), View(), nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
    assert names(units(model, (X[:, 0],))) == ["2.weight"]


class Two(nn.Module):
    """Of its four groups, the code needs two whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((8, 10), (10, 12), (12, 14), (14, 16), (16, 2)))

    def forward(self, x: Tensor) -> Tensor:
        for layer, width in zip(self.layers, (10, None, None, 16, None), strict=True):
            x = layer(x)
            x = x.reshape(*x.shape[:-1], width) if width else x
        return x


def test_two_faults_in_one_module_keep_two_groups() -> None:
    assert names(units(Two(), (X,))) == ["layers.1.weight", "layers.2.weight"]


class Needing(nn.Module):
    """Needs a number of channels that eight divides (`by`), or as many in one layer as in the other."""

    def __init__(self, by: int = 0) -> None:
        super().__init__()
        self.a, self.b, self.c, self.by = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(64, 2), by

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        if (self.by and a.shape[-1] % self.by) or (not self.by and a.shape != b.shape):
            raise ValueError(a.shape, b.shape)
        found: Tensor = self.c(torch.cat([a, b], -1).relu())
        return found


def test_code_that_needs_multiples_can_do_with_some() -> None:
    eights = Pruner(pattern="unit", round_to=8)
    model = Needing(by=8)
    small = slim(model, eights(model, 0.6, example_inputs=(X,)), (X,)).model
    assert (small.a.out_features % 8, small.b.out_features % 8) == (0, 0)
    assert small.c.in_features < 64


def test_layers_stay_that_must_be_equally_wide() -> None:
    found = units(nn.Sequential(Needing(), nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 2)), (X,))
    assert names(found) == ["0.c.weight", "1.weight"]
    assert "ValueError in 0 of the class Needing" in found.pinned["0.a.weight", 0]


class Deciding(nn.Module):
    """Decides at its first call what it does from then on, by a number that counts nothing here."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.classes, self.config = 4, SimpleNamespace(kind="")

    def forward(self, x: Tensor) -> Tensor:
        self.config.kind = self.config.kind or ("several" if self.classes == 4 else "two")
        found: Tensor = self.b(self.a(x).relu())
        return found if self.config.kind == "several" else found[..., :2]


def test_what_a_network_decides_with_a_wrong_number_is_not_there_in_the_next_try() -> None:
    model = Deciding()
    assert names(units(model, (X,))) == ["a.weight"]
    assert model.config.kind == ""


class Remembering(nn.Module):
    """Keeps what it computed, and adds it to what it computes next."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 6), nn.Linear(6, 2)
        self.before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).relu()
        if self.before is not None:
            hidden = hidden + self.before
        self.before = hidden.detach()
        found: Tensor = self.b(hidden)
        return found


def test_what_a_run_leaves_behind_in_the_network_does_not_keep_its_units() -> None:
    model = Remembering()
    assert names(units(model, (X,))) == ["a.weight"]
    assert model.before is None


def test_layers_that_a_function_keeps_have_units_though_no_copy_has_them() -> None:
    inner, model = nn.Linear(8, 6), nn.Sequential(nn.Linear(6, 2))
    model.inner = inner
    model.forward = lambda x: model[0](inner(x).relu())
    assert names(units(model, (X,))) == ["inner.weight"]


def test_where_the_network_does_not_give_the_same_twice_nothing_is_kept_whole() -> None:
    class Counting(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = super().forward(x) + next(numbers)
            return found

    numbers = iter(range(1, 1000))
    model = Counting(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    assert names(units(model, (X,))) == ["0.weight"]


class Locked(nn.Module):
    """Cannot be copied, and keeps what it computed in a list; a function keeps a table for all networks."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.a, self.b, self.c = Lock(), nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 2)
        self.tables: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.tables.append(table(x.shape[1], 1))
        with self.lock:
            found: Tensor = self.c(self.a(x).relu() + self.b(x) + self.tables[-1])
        return found


def test_tables_hold_numbers_after_the_trace_of_a_network_that_cannot_be_copied() -> None:
    table.cache_clear()
    model = Locked()
    assert names(units(model, (X,))) == ["a.weight"]
    assert model.tables == []
    assert type(table(7, 1)) is Tensor
    assert type(model(X)) is Tensor


class Quiet(nn.Module):
    """Its `train` gives nothing back, and it leaves out units at random, always."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 6), nn.Linear(6, 2)

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(nn.functional.dropout(self.a(x).relu(), 0.5, training=True))
        return found


def test_a_network_that_always_drops_units_and_says_nothing_of_its_mode_becomes_small() -> None:
    model = Quiet()
    (group,) = units(model, (X,))
    made = slim(model, units(model, (X,)).mask_without(group.units[:3]), (X,))
    assert made.model.a.out_features == 3


def test_code_that_needs_multiples_of_sixteen_may_lose_some_of_48() -> None:
    class Sixteen(Needing):
        def __init__(self) -> None:
            super().__init__(by=16)
            self.a, self.b, self.c = nn.Linear(8, 48), nn.Linear(8, 48), nn.Linear(96, 2)

    assert names(units(Sixteen(), (X,))) == ["a.weight", "b.weight"]


class SecondHead(nn.Module):
    """GoogLeNet's kind: in training mode, a second head reads the units of the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16)
        self.head, self.other = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        first = self.first(x).relu()
        found: Tensor = self.head(self.second(first).relu())
        return (found, self.other(first)) if self.training else found


def test_units_that_only_training_reads_stay() -> None:
    model = SecondHead()
    found = units(model, (X,))
    assert names(found) == ["second.weight"]
    assert found.pinned["first.weight", 0].startswith(
        "a network without some of them was tried: it does not run in training mode (RuntimeError in the network of "
        "the class SecondHead"
    )
    small = slim(model, Pruner(pattern="unit")(model, 0.8, example_inputs=(X,)), (X,)).model
    assert small.second.out_features < 16
    assert [tuple(each.shape) for each in small.train()(X)] == [(3, 7, 4), (3, 7, 4)]


class Louder(nn.Module):
    """What it gives in training mode is multiplied by a number that happens to be that of its units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.times = nn.Linear(8, 16), nn.Linear(16, 4), 16

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.first(x).relu())
        return found * self.times if self.training else found


def test_a_number_that_only_training_reads_keeps_no_units() -> None:
    assert names(units(Louder(), (X,))) == ["first.weight"]
