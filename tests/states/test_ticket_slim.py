"""Tickets of networks that have lost whole units: the small network is built again, on nobody's word but the user's."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import rewound
from rewound import InputError, Pruner
from rewound.states.tickets.rebuilding import described_example, drawn_example, large_network
from rewound.tasks.recipes.digits import Digits


class Net(nn.Module):
    """Channels, a count in its own code, and words of a vocabulary of 10."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.heads = nn.Embedding(10, 8), 4
        self.project, self.out = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, words: Tensor, *, scale: float) -> Tensor:
        hidden = self.project(self.words(words))
        hidden = hidden.unflatten(2, (self.heads, -1)).relu().flatten(2) * scale
        return self.out(hidden.mean(1))


def words() -> Tensor:
    return torch.randint(0, 10, (4, 5), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The folder of an own loop with slim levels."""
    torch.manual_seed(0)
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    run = rewound.epochs(
        2,
        model,
        optimizer,
        compression=2,
        one_shot=True,
        retrain_epochs=1,
        pruner=Pruner(pattern="unit"),
        slim=True,
        checkpoint=tmp_path,
        say=lambda _: None,
    )
    for _ in run:
        optimizer.zero_grad()
        model(words(), scale=2.0).square().mean().backward()
        optimizer.step()
    torch.save((model.state_dict(), model(words(), scale=2.0).detach()), tmp_path / "small.pt")
    return tmp_path


def test_the_small_network_of_an_own_loop_is_built_from_its_ticket(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, output = torch.load(run_folder / "small.pt", weights_only=True)
    ticket = rewound.load(run_folder / "levels" / "2.00x.safetensors")
    given = Net()
    before = copy.deepcopy(given.state_dict())
    monkeypatch.setitem(sys.modules, "a_users_models", sys.modules[__name__])
    for model in (given, Net, "a_users_models:Net"):
        small = ticket.slim(model).model
        assert {name: tensor.shape for name, tensor in small.state_dict().items()} == {
            n: t.shape for n, t in state.items()
        }
        assert torch.allclose(small(words(), scale=2.0), output, atol=1e-6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in given.state_dict().items()), "it stays as it is"
    into = Net()
    ticket.slim(into).into(into)
    assert torch.allclose(into(words(), scale=2.0), output, atol=1e-6)
    assert sum(t.numel() for t in ticket.state.values()) > sum(t.numel() for t in state.values())


def test_a_ticket_holds_the_kind_of_the_example_and_none_of_its_values(run_folder: Path) -> None:
    about = rewound.load(run_folder / "levels" / "2.00x.safetensors").about
    kind = {"tensor": ["I64", [2, 5], int(words()[:2].min()), int(words()[:2].max())]}
    assert about["example"] == {"inputs": [kind], "keywords": {"scale": {"value": 2.0}}}
    inputs, keywords = drawn_example(about["example"])
    assert inputs[0].shape == (2, 5)
    assert keywords == {"scale": 2.0}


def test_nothing_is_imported_on_the_word_of_a_ticket(run_folder: Path) -> None:
    ticket = rewound.load(run_folder / "levels" / "2.00x.safetensors")
    with pytest.raises(
        InputError, match=r"give the large network .by what it says of itself, '.*:Net'., or a function"
    ):
        ticket.slim()
    for about in ({"recipe": "a_module_that_deletes_files:Task"}, {"model": "os:abort"}, {"recipe": ["digits"]}):
        with pytest.raises(InputError, match="of no recipe that comes with rewound"):
            large_network(None, about)
    with pytest.raises(InputError, match=r"^'math:sqrt' cannot be called without arguments \(missing.*'x'\); give a f"):
        large_network("math:sqrt", {})
    with pytest.raises(InputError, match="makes 3 and no network"):
        large_network(lambda: 3, {})


def test_a_recipe_that_comes_with_the_package_needs_no_help(tmp_path: Path) -> None:
    recipe = Digits()
    model = recipe.model(3)
    mask = Pruner(pattern="unit")(model, density=0.5, example_inputs=recipe.example())
    mask.apply(model)
    rewound.save(model, mask, tmp_path / "ticket.safetensors", about={"recipe": "digits"})
    small = rewound.load(tmp_path / "ticket.safetensors").slim().model
    x = torch.randn(3, *recipe.example()[0].shape[1:])
    assert torch.allclose(small.eval()(x), model.eval()(x), atol=1e-5)
    assert sum(p.numel() for p in small.parameters()) < 0.6 * sum(p.numel() for p in model.parameters())
    # The bits of the mask cost little beside the values of the small network.
    dense = sum(tensor.numel() * tensor.itemsize for tensor in small.state_dict().values())
    assert (tmp_path / "ticket.safetensors").stat().st_size < 1.15 * dense


def test_what_has_no_whole_units_or_no_example_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    mask = Pruner()(model, density=0.5)
    mask.apply(model)
    rewound.save(model, mask, tmp_path / "ticket.safetensors")
    ticket = rewound.load(tmp_path / "ticket.safetensors")
    with pytest.raises(InputError, match="does not say what its network takes; give example_inputs="):
        ticket.slim(model)
    with pytest.raises(InputError, match="not of whole units"):
        ticket.slim(model, torch.zeros(1, 4))
    with pytest.raises(InputError, match="for another model"):
        ticket.slim(nn.Linear(4, 2), torch.zeros(1, 4))


FORGED = (
    None,
    [],
    {"inputs": 3},
    {"inputs": [], "keywords": []},
    {"inputs": [{"tensor": ["F32", [2**40]]}], "keywords": {}},
    {"inputs": [{"tensor": ["F32", [2**12, 2**13]]}], "keywords": {}},
    {"inputs": [{"tensor": ["F32", [2**23]]}] * 3, "keywords": {}},
    {"inputs": [{"tensor": ["F32", [-1]]}], "keywords": {}},
    {"inputs": [{"tensor": ["F32", [1.5]]}], "keywords": {}},
    {"inputs": [{"tensor": ["F33", [2]]}], "keywords": {}},
    {"inputs": [{"tensor": ["I64", [2], 5, 1]}], "keywords": {}},
    {"inputs": [{"tensor": ["I64", [2], 0, 2**70]}], "keywords": {}},
    {"inputs": [{"code": "import os"}], "keywords": {}},
    {"inputs": [{"value": {"a": 1}}], "keywords": {}},
)


@pytest.mark.parametrize("kind", FORGED)
def test_forged_examples_are_not_drawn(kind: object) -> None:
    assert drawn_example(kind) is None


def test_examples_of_all_kinds_are_drawn() -> None:
    given = (
        (torch.randn(2, 3).half(), [torch.tensor([True, False])], None),
        {"x": {"y": (torch.arange(4), "text", 1.5)}},
    )
    inputs, keywords = drawn_example(described_example(*given))
    assert (inputs[0].dtype, inputs[0].shape) == (torch.float16, (2, 3))
    assert inputs[1][0].dtype == torch.bool
    assert inputs[2] is None
    assert keywords["x"]["y"][1:] == ("text", 1.5)
    assert 0 <= int(keywords["x"]["y"][0].min()) <= int(keywords["x"]["y"][0].max()) <= 3
    assert described_example((object(),), {}) is None
