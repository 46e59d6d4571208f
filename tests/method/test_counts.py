"""Compression of the weights that are pruned, and of the whole network."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rewound import Pruner, epochs, load, prune, save, units
from rewound.experiments.plans.outlook import estimate
from rewound.experiments.plans.planning import plan
from rewound.experiments.sweeps.targets import run_of
from rewound.method.pruning.counts import Counts, counts_of
from rewound.method.pruning.cutting import kept_count
from rewound.method.pruning.mask import Mask
from rewound.tasks.recipe import selected_counts
from tiny import Tiny


def test_biases_and_normalisation_count_for_the_network_and_buffers_do_not() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))
    mask = Mask({"0.weight": torch.arange(100).reshape(10, 10) < 25})
    assert counts_of(model, mask) == Counts(kept=25, selected=100, network=130)
    assert str(counts_of(model, mask)) == "4.00x of the pruned weights, 2.36x of the whole network"


def test_a_tied_weight_counts_once_even_if_it_is_masked_under_two_names() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    first, second = torch.zeros(5, 4, dtype=torch.bool), torch.zeros(5, 4, dtype=torch.bool)
    first[:2], second[1:] = True, True
    assert counts_of(model, Mask({"embed.weight": first})) == Counts(kept=8, selected=20, network=20)
    both = Mask({"embed.weight": first, "head.weight": second})
    assert counts_of(model, both) == Counts(kept=4, selected=20, network=20)


def test_a_small_part_is_said_loudly() -> None:
    Counts(kept=10, selected=25, network=100).warn_of_small_part()
    with pytest.warns(UserWarning, match=r"only 5\.0% of the network's 2,000 parameters .* at most 1\.05x smaller"):
        Counts(kept=100, selected=100, network=2000).warn_of_small_part()


def test_a_density_of_units_is_of_the_weights_that_are_counted() -> None:
    """Not of biases and normalisation, nor of what a layer computes its weight from."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.LayerNorm(12), nn.Linear(12, 8))
    nn.utils.parametrizations.weight_norm(model[4])
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    pruner = Pruner(pattern="unit")
    assert pruner.counted(shapes, model) == ["0.weight", "2.weight"]
    assert pruner.kept(shapes, 1.0, model=model, groups=units(model, torch.zeros(1, 6))) == 6 * 16 + 16 * 12
    assert Pruner().counted(["0.weight", "2.weight"], model) == ["0.weight", "2.weight"]


def test_what_goes_with_units_is_gone_from_the_whole_network_alone() -> None:
    model = nn.Linear(4, 4)
    mask = Mask({"weight": (torch.arange(4) < 1).reshape(4, 1).expand(4, 4), "bias": torch.arange(4) < 1})
    counts = counts_of(model, mask, {"weight"})
    assert (counts.compression, counts.left, counts.network_compression) == (4, 5, 4)
    assert counts.at(0.5) == Counts(kept=8, selected=16, network=20)


def test_what_is_expected_of_a_density_is_what_a_pruner_keeps() -> None:
    model = nn.Linear(64, 22)
    for density in (1 / 3, 0.41, 0.7):
        found = counts_of(model, Pruner()(model, density))
        assert found == found._replace(kept=found.selected).at(density)


class Adapted(nn.Module):
    """A frozen layer with a small one beside it that trains, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(40, 40).requires_grad_(False)
        self.down, self.up = nn.Linear(40, 2, bias=False), nn.Linear(2, 40, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_an_own_loop_says_what_its_compression_is_of_the_whole_network() -> None:
    model, said = Adapted(), list[str]()
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with pytest.warns(
        UserWarning, match=r"^only 8\.9% of the network's 1,800 parameters .* at most 1\.10x smaller"
    ) as told:
        run = epochs(1, model, sgd, compression=4, one_shot=True, pruner=Pruner(floor=0.1), say=said.append)
    assert [each.filename for each in told] == [__file__]
    for _ in run:
        sgd.zero_grad()
        model(torch.randn(8, 40)).square().mean().backward()
        sgd.step()
    # 160 weights of 1,800 are pruned to 40: 1,800 / 1,680 = 1.07.
    assert said[0].endswith("by lr-rewinding to 4x (1.07x of the whole network): 2 epochs")
    assert said[-1] == "level 1 of 1: 4.00x (density 0.25), 1.07x of the whole network, epoch 2 of 2"
    assert run.levels[0].network_compression == 1
    assert run.levels[1].network_compression == 1800 / (1800 - 160 + kept_count(160, 0.25))


def test_a_ticket_knows_the_parameters_of_its_network(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))
    mask = Pruner()(model, 0.25)
    mask.apply(model)
    save(model, mask, tmp_path / "model.safetensors")
    assert load(tmp_path / "model.safetensors").counts == counts_of(model, mask)
    save(model.state_dict(), mask, tmp_path / "state.safetensors")
    ticket = load(tmp_path / "state.safetensors")
    assert (ticket.parameters, ticket.counts) == (None, None)
    assert ticket.hash == load(tmp_path / "model.safetensors").hash


def test_a_plan_says_what_compression_counts() -> None:
    def rows(*pruners: Pruner) -> dict[str, str]:
        asked = [
            t
            for pruner in pruners
            for t in run_of(Tiny(), "lr-rewinding", 1, [0.5], pruner, iterative=False).targets(1)
        ]
        return {
            name: value for name, value in estimate("x", plan(asked), None, "cpu", 1).lines if "may be pruned" in name
        }

    whole = selected_counts(Tiny(), Pruner())
    of = f"{whole.network:,} parameters"
    assert rows(Pruner(), Pruner(score="random")) == {"weights that may be pruned": f"{whole.selected:,} of {of}"}
    stem = 4 * 9
    assert rows(Pruner(), Pruner(skip=("stem.*",))) == {
        "weights that may be pruned (tiny:Tiny)": f"{whole.selected:,} of {of}",
        "weights that may be pruned (tiny:Tiny skip=stem.*)": f"{whole.selected - stem:,} of {of}",
    }


def test_prune_warns_where_little_of_the_network_is_selected(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="of the network's .* parameters are selected for pruning"):
        prune(
            Tiny(), pruner=Pruner(only=("stem.*",)), compression=2, one_shot=True, store=tmp_path, say=lambda line: None
        )
