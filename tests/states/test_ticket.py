"""Tickets: exact, small, and read without trust."""

import errno
import json
import os
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn

import rewound.foundations.wholefiles
from rewound import InputError, Mask, Pruner, Ticket, load, save
from rewound.states.tickets.fileformat import DTYPES
from rewound.tasks.recipe import Recipe
from rewound.tasks.recipes.cifar10 import ResNet20
from rewound.tasks.recipes.digits import Digits
from sameness import assert_same
from small_networks import Compiled, Tied, Wrapped, network

# Most of these networks were never trained, under a mask or otherwise.
pytestmark = pytest.mark.filterwarnings("ignore:this mask prunes weights that are not zero:UserWarning")


def bits_of(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def masked(tensor: Tensor, kept: Tensor) -> Tensor:
    """W (.) m to the last bit, for any type."""
    rows = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1, 1).view(torch.uint8)
    rows[~kept.reshape(-1)] = 0
    return rows.reshape(-1).view(tensor.dtype).reshape(tensor.shape)


def through(path: Path, model: nn.Module | dict[str, Tensor], mask: Mask) -> Ticket:
    save(model, mask, path)
    return load(path)


# Round trips


@st.composite
def states(draw: st.DrawFn) -> tuple[dict[str, Tensor], Mask]:
    """Tensors of any type with any bits in them, some masked."""
    tensors, masks = {}, {}
    for number in range(draw(st.integers(0, 5))):
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        size = torch.empty(shape, dtype=dtype, device="meta").numel()
        content = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
        raw = torch.tensor(list(content), dtype=torch.uint8)
        raw = raw % 2 if dtype == torch.bool else raw
        name = draw(st.sampled_from("abc")) + f".{number}"
        tensors[name] = raw.view(dtype).reshape(shape)
        if draw(st.booleans()):
            kept = draw(st.lists(st.booleans(), min_size=size, max_size=size))
            masks[name] = torch.tensor(kept, dtype=torch.bool).reshape(shape)
    return tensors, Mask(dict(reversed(masks.items())))


@given(states())
@settings(deadline=None, max_examples=200)
def test_any_bits_of_any_type_come_back(tmp_path_factory: pytest.TempPathFactory, case: tuple) -> None:
    tensors, mask = case
    ticket = through(tmp_path_factory.getbasetemp() / "any.safetensors", tensors, mask)
    assert list(ticket.state) == list(tensors)
    assert list(ticket.mask) == list(mask)
    for name, tensor in tensors.items():
        assert_same(ticket.state[name], masked(tensor, mask[name]) if name in mask else tensor)
    for name, kept in mask.items():
        assert_same(ticket.mask[name], kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_model_comes_back_with_its_buffers(tmp_path: Path, dtype: torch.dtype) -> None:
    model = network().to(dtype)
    model(torch.randn(6, 2, 4, 4, dtype=dtype))  # moves the running statistics
    mask = Pruner()(model, 0.3)
    ticket = through(tmp_path / "t.safetensors", model, mask)
    mask.apply(model)
    assert list(ticket.state) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert_same(ticket.state[name], tensor)
    assert ticket.state["1.num_batches_tracked"].item() == 1
    other = network().to(dtype)
    ticket.into(other)
    for name, tensor in model.state_dict().items():
        assert_same(other.state_dict()[name], tensor)


def test_kept_zeros_and_strange_numbers_stay_what_they_are(tmp_path: Path) -> None:
    quiet = struct.unpack("<f", bytes.fromhex("0100c07f"))[0]  # a NaN with a payload
    weight = torch.tensor([[0.0, -0.0, quiet, 1e-45], [float("-inf"), 5.0, -0.0, float("nan")]])
    weight.view(torch.int32)[0, 2] = 0x7FC00001
    kept = torch.tensor([[True, True, True, True], [True, False, False, False]])
    ticket = through(tmp_path / "t.safetensors", {"w": weight}, Mask({"w": kept}))
    assert ticket.mask["w"].tolist() == kept.tolist()
    assert bits_of(ticket.state["w"][kept]) == bits_of(weight[kept])
    assert bits_of(ticket.state["w"][~kept]) == bytes(12), "pruned: +0.0, whatever it was"


def test_the_memory_format_does_not_matter(tmp_path: Path) -> None:
    plain, strided = network(), network(torch.channels_last)
    strided[4].weight.data = strided[4].weight.data.t().contiguous().t()
    mask = Pruner()(plain, 0.3)
    for model in (plain, strided):
        save(model, mask, tmp_path / f"{model is plain}.safetensors")
    assert (tmp_path / "True.safetensors").read_bytes() == (tmp_path / "False.safetensors").read_bytes()
    load(tmp_path / "True.safetensors").into(strided)
    assert strided[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(strided[0].weight, plain[0].weight.masked_fill(~mask["0.weight"], 0))


@pytest.mark.parametrize("names", [["embedding.weight"], ["output.weight"], ["output.weight", "embedding.weight"], []])
def test_tied_weights_are_stored_once(tmp_path: Path, names: list[str]) -> None:
    torch.manual_seed(0)
    model = Tied()
    mask = Mask(dict(zip(names, torch.rand(2, 6, 3) > 0.4, strict=False)))
    content = tmp_path / "t.safetensors"
    ticket = through(content, model, mask)
    kept = torch.stack([torch.ones(6, 3, dtype=torch.bool), *mask.values()]).all(0)
    assert list(ticket.mask) == names
    assert all(torch.equal(found, kept) for found in ticket.mask.values())
    assert ticket.state["embedding.weight"] is ticket.state["output.weight"]
    assert_same(ticket.state["output.weight"], masked(model.output.weight, kept))
    with safe_open(content, "pt") as file:
        assert file.get_slice("values/F32").get_shape() == [int(kept.sum())]
    other = Tied()
    ticket.into(other)
    assert other.output.weight is other.embedding.weight
    assert torch.equal(other.output.weight, ticket.state["output.weight"])


@pytest.mark.parametrize("wrap", [Wrapped, Compiled, lambda m: Wrapped(Compiled(m)), lambda m: m])
@pytest.mark.parametrize("unwrap", [Wrapped, Compiled, lambda m: m])
def test_wrappers_do_not_change_whose_ticket_it_is(
    tmp_path: Path, wrap: Callable[[nn.Module], nn.Module], unwrap: Callable[[nn.Module], nn.Module]
) -> None:
    model, other = network(), network().requires_grad_(False)
    mask = Pruner()(model, 0.3)
    ticket = through(tmp_path / "t.safetensors", wrap(model), mask)
    assert list(ticket.state) == list(model.state_dict())
    other[4].weight.zero_()
    ticket.into(unwrap(other))
    mask.apply(model)
    assert torch.equal(other[4].weight, model[4].weight)


@pytest.mark.filterwarnings("default:this mask prunes")
def test_a_network_that_was_not_trained_under_the_mask_is_told(tmp_path: Path) -> None:
    net = network()
    dense = {name: tensor.clone() for name, tensor in net.state_dict().items()}  # the best epoch, of a denser level
    mask = Pruner()(net, 0.5)
    mask.apply(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(net, mask, tmp_path / "ticket")
    with pytest.warns(UserWarning, match="this mask prunes weights that are not zero, in .* own level") as told:
        save(dense, mask, tmp_path / "ticket")
    assert told[0].filename == __file__


def test_training_goes_on_from_a_ticket(tmp_path: Path) -> None:
    model = network()
    save(model, Pruner()(model, 0.3), tmp_path / "t.safetensors")
    ticket, model = load(tmp_path / "t.safetensors"), network()
    ticket.into(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with ticket.mask.attached(model, optimizer):
        model(torch.randn(6, 2, 4, 4)).square().sum().backward()
        optimizer.step()
    assert all((model.get_parameter(name)[~kept] == 0).all() for name, kept in ticket.mask.items())
    assert Pruner()(model, 0.2, ticket.mask).density == pytest.approx(0.2, abs=0.02)


def test_what_is_loaded_owns_its_memory(tmp_path: Path) -> None:
    ticket = through(tmp_path / "t.safetensors", network(), Mask({}))
    pointers = {tensor.untyped_storage().data_ptr() for tensor in ticket.state.values()}
    assert len(pointers) == len(ticket.state)


# Facts and hash


def test_what_is_said_about_it(tmp_path: Path) -> None:
    about = {"recipe": "digits", "lineage": ["a", "b"], "val": 0.5, "pruner": {"only": ("x",)}, "é\ud800": None}
    save(network(), Mask({}), tmp_path / "t.safetensors", about)
    assert load(tmp_path / "t.safetensors").about == {**about, "pruner": {"only": ["x"]}}


@pytest.mark.parametrize("about", [{"a": float("nan")}, {"a": {1, 2}}, {"a": torch.ones(1)}, {("a", 1): 2}])
def test_facts_are_plain(tmp_path: Path, about: dict[str, object]) -> None:
    with pytest.raises(InputError, match="about takes plain facts"):
        save(network(), Mask({}), tmp_path / "t.safetensors", about)
    assert list(tmp_path.iterdir()) == []


def test_the_hash_is_of_the_network(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"

    def hash_of(weight: Tensor, kept: Tensor, name: str = "w", **about: object) -> str:
        save({name: weight}, Mask({name: kept}), path, about)
        return load(path).hash

    weight, kept = torch.tensor([[1.0, 0.0], [2.0, 3.0]]), torch.tensor([[True, True], [True, False]])
    one = hash_of(weight, kept)
    assert one == hash_of(weight, kept, recipe="digits")
    assert one == hash_of(weight * torch.tensor([[1, 1], [1, -7]]), kept), "what is pruned does not count"
    others = [
        hash_of(weight + 1, kept),
        hash_of(weight, weight > 0),  # the kept zero pruned
        hash_of(weight, kept, name="v"),
        hash_of(weight.double(), kept),
        hash_of(weight.reshape(1, 4), kept.reshape(1, 4)),
    ]
    assert len({one, *others}) == 6


def test_the_hash_stays_what_it_is(tmp_path: Path) -> None:
    state = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.tensor([1, 2])}
    ticket = through(tmp_path / "t.safetensors", state, Mask({"w": state["w"] > 8}))
    assert ticket.hash == "85745501d6ee8559f48256f27841c857"


# The file


@pytest.mark.parametrize(("recipe", "most", "most_16_bit"), [(ResNet20(), 0.13, 0.15), (Digits(), 0.14, 0.17)])
def test_a_tenth_of_the_weights_takes_a_seventh_of_the_bytes(
    tmp_path: Path, recipe: Recipe, most: float, most_16_bit: float
) -> None:
    """At most 14% of the dense bytes for float32, 20% for 16 bits, with what stays dense and the names."""
    model = recipe.model(1)
    mask = Pruner(floor=0.01)(model, 0.1)
    for dtype, limit in ((torch.float32, most), (torch.bfloat16, most_16_bit)):
        model.to(dtype)
        save(model, mask, tmp_path / "t.safetensors", {"recipe": recipe.label(), "technique": "lr-rewinding"})
        dense = sum(tensor.numel() * tensor.itemsize for tensor in model.state_dict().values())
        assert (tmp_path / "t.safetensors").stat().st_size <= limit * dense
        assert limit <= (0.14 if dtype == torch.float32 else 0.20)


def test_the_size_falls_with_the_density(tmp_path: Path) -> None:
    model = nn.Linear(1000, 300, bias=False)
    sizes = []
    for density in (1.0, 0.5, 0.2, 0.1, 0.05, 0.01):
        save(model, Pruner(score="random")(model, density), tmp_path / "t.safetensors")
        sizes.append((tmp_path / "t.safetensors").stat().st_size / (4 * 300_000))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] < 1.01
    assert sizes[3] < 0.117
    assert sizes[5] < 0.016


def test_any_safetensors_reader_opens_it(tmp_path: Path) -> None:
    save(network(), Mask({}), tmp_path / "t.safetensors", {"recipe": "mine"})
    with safe_open(tmp_path / "t.safetensors", "numpy") as file:
        assert set(file.keys()) == {"layout", "mask", "values/F32", "values/I64"}
        said = json.loads(file.metadata()["rewound"])
    assert (said["version"], said["about"], len(said["hash"])) == (1, {"recipe": "mine"}, 32)


def test_the_same_network_is_the_same_bytes(tmp_path: Path) -> None:
    model = network()
    for name in "ab":
        save(model, Pruner()(model, 0.3), tmp_path / name, {"a": 1, "b": 2, "c": 3})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder" / "t.safetensors"
    save(network(), Mask({}), path)
    before = path.read_bytes()

    def full(handle: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(rewound.foundations.wholefiles.os, "fsync", full)
    with pytest.raises(InputError, match=f"^cannot write ticket {path}: No space left on device; choose another path$"):
        save(nn.Linear(2, 2), Mask({}), path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
