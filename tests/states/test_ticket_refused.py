"""What a ticket cannot hold, and networks that cannot take one."""

import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from rewound import InputError, Mask, Pruner, Ticket, load, save
from small_networks import Tied, network

# Most of these networks were never trained, under a mask or otherwise.
pytestmark = pytest.mark.filterwarnings("ignore:this mask prunes weights that are not zero:UserWarning")


def through(path: Path, model: nn.Module | dict[str, Tensor], mask: Mask) -> Ticket:
    save(model, mask, path)
    return load(path)


def test_a_mask_of_another_model(tmp_path: Path) -> None:
    mask = Mask({f"layer{i}.weight": torch.ones(2, 2, dtype=torch.bool) for i in range(7)})
    with pytest.raises(InputError, match=r"another model: .* of layer0.weight, .*, layer4.weight and 2 more$"):
        save(network(), mask, tmp_path / "t.safetensors")
    with pytest.raises(InputError, match=r"of 4\.weight$"):
        save(network(), Mask({"4.weight": torch.ones(4, 1, dtype=torch.bool)}), tmp_path / "t.safetensors")


def test_a_ticket_of_another_model(tmp_path: Path) -> None:
    ticket = through(tmp_path / "t.safetensors", network(), Mask({}))
    wide = network()
    wide[4] = nn.Linear(13, 4)
    with pytest.raises(InputError, match=r"this ticket is for another model: names or shapes differ for 4\.weight$"):
        ticket.into(wide)
    model = nn.Linear(3, 3)
    before = model.weight.clone()
    with pytest.raises(InputError, match=r"differ for 0\.weight, .* and 6 more$"):
        ticket.into(model)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_average_is_saved_as_the_network_it_averages(tmp_path: Path, compiled: bool) -> None:
    model = network()
    mask = Pruner()(model, 0.3)
    average = AveragedModel(model)
    average.update_parameters(model)
    saved = torch.compile(average, backend="eager") if compiled else average
    ticket = through(tmp_path / "t.safetensors", saved, mask)  # type: ignore[arg-type]
    assert list(ticket.state) == list(model.state_dict())
    for other in (network(), AveragedModel(network())):
        ticket.into(other)
        found = other.state_dict()["module.4.weight" if isinstance(other, AveragedModel) else "4.weight"]
        assert torch.equal(found, model[4].weight * mask["4.weight"])


def test_a_model_of_another_type_is_filled_with_rounded_values(tmp_path: Path) -> None:
    model = network()
    ticket = through(tmp_path / "t.safetensors", model, Mask({}))
    half = network().to(torch.bfloat16)
    ticket.into(half)
    assert torch.equal(half[4].weight, model[4].weight.to(torch.bfloat16))
    whole = network()
    whole[4].weight = nn.Parameter(torch.zeros(4, 12, dtype=torch.int8), requires_grad=False)
    with pytest.raises(InputError, match=r"cannot put 4\.weight, torch.float32, into torch.int8: its values would be"):
        ticket.into(whole)


def test_a_model_that_cannot_hold_the_network(tmp_path: Path) -> None:
    untied = Tied()
    untied.output.weight = nn.Parameter(untied.embedding.weight + 1)
    ticket = through(tmp_path / "t.safetensors", untied, Mask({}))
    tied = Tied()
    before = tied.output.weight.clone()
    with pytest.raises(
        InputError, match=r"embedding\.weight and output\.weight are tied in this one, and differ in the"
    ):
        ticket.into(tied)
    assert torch.equal(tied.output.weight, before)
    with torch.device("meta"):
        empty = Tied()
    with pytest.raises(InputError, match=r"no memory yet \(meta device\); call model\.to_empty"):
        ticket.into(empty)


class Extra(nn.Linear):
    """Keeps something that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (Extra(2, 2), r"cannot save _extra_state: it is a dict, not a tensor"),
        (nn.Linear(2, 2, device="meta"), r"cannot save weight \(torch.float32, torch.strided, on meta\)"),
        ({"w": torch.eye(2).to_sparse()}, r"cannot save w \(torch.float32, torch.sparse_coo, on cpu\)"),
        ({"w": torch.ones(2, dtype=torch.complex128)}, r"a ticket holds dense tensors of F64, F32, F16, BF16"),
        ({"w": torch.ones(1), "module.w": torch.ones(1)}, "two tensors of this model are called w once"),
    ],
)
def test_what_a_ticket_cannot_hold(tmp_path: Path, state: nn.Module | dict[str, Tensor], says: str) -> None:
    with pytest.raises(InputError, match=says):
        save(state, Mask({}), tmp_path / "t.safetensors")


def test_a_dense_network_has_no_mask_to_save_by(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"mask is None, as run\.mask is .* max_drop; save a dense network with torch"):
        save(network(), None, tmp_path / "t.safetensors")  # type: ignore[arg-type]


def test_a_ticket_is_shown_in_one_line(tmp_path: Path) -> None:
    model = network()
    ticket = through(tmp_path / "t.safetensors", model, Pruner()(model, 0.5))
    counts = "Mask(2 tensors, 51 of 102 weights kept, density 0.5)"
    assert repr(ticket) == f"Ticket({len(model.state_dict())} tensors, {counts}, hash {ticket.hash[:12]})"


def test_files_that_are_no_tickets(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "bytes").write_bytes(struct.pack("<Q", 4) + b"\xff\xfe\x00\x00")
    for name in ("text", "empty", "bytes"):
        with pytest.raises(
            InputError, match=rf"{name} is not a safetensors file, or not a whole one; give the file that"
        ):
            load(tmp_path / name)
    with pytest.raises(InputError, match=r"^cannot read ticket \S+absent: No such file or directory; give the file"):
        load(tmp_path / "absent")
    with pytest.raises(InputError, match="Is a directory"):
        load(tmp_path)
    with pytest.raises(InputError, match="cannot write ticket"):
        save(network(), Mask({}), tmp_path)
