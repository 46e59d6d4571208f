"""The paper's structured presets: filters removed and densities are the authors', to the last digit that is known."""

import csv
import math
from pathlib import Path

import pytest
import torch

from rewound import InputError, Pruner, prune
from rewound.experiments.plans.planning import plan
from rewound.experiments.sweeps.sweep import parse_sweep
from rewound.experiments.sweeps.targets import run_of
from rewound.method.pruning.presets import masks_density, removed_filters, reported_density
from rewound.method.pruning.prunable import prunable_weights
from rewound.states.history import described
from rewound.tasks.recipes.cifar10 import ResNet20, ResNet56, ResNet110
from rewound.tasks.recipes.resnet import resnet34, resnet50
from tiny import Tiny


def imagenet_shapes(make: object = resnet34) -> dict[str, tuple[int, ...]]:
    model = make(torch.Generator().manual_seed(0))
    return {name: tuple(weight.shape) for name, weight in prunable_weights(model).items()}


@pytest.fixture(scope="module")
def shapes() -> dict[str, dict[str, tuple[int, ...]]]:
    return {"56": dict(ResNet56().shapes), "110": dict(ResNet110().shapes), "34": imagenet_shapes()}


# fidelity: the authors' counts of filters removed at k = 1
REMOVED = {
    ("56", "structured-a"): "1 1 2 2 2 2 1 2  3 3 3 3 3 3 3 3  6 6 6 6 7 6 6",
    ("56", "structured-b"): "9 9 10 10 10 10 9  10 10 10 9 10 10 9  6 7 6 6 6 6 7",
    ("34", "structured-a"): "19 19 38 39 77 77 77 77",
    ("34", "structured-b"): "32 32 77 77 102 102 102 103",
}

# As reported, and of the masks alone, for k = 1 to 5
DENSITIES = {
    ("56", "structured-a"): (
        [0.92092, 0.84525, 0.77800, 0.71628, 0.66436],
        [0.96061, 0.92291, 0.88943, 0.85866, 0.83280],
    ),
    ("56", "structured-b"): (
        [0.87117, 0.77631, 0.69986, 0.63810, 0.58790],
        [0.93593, 0.88876, 0.85072, 0.81995, 0.79493],
    ),
    ("110", "structured-a"): (
        [0.97726, 0.96589, 0.96021, 0.95737, 0.95620],
        [0.98863, 0.98295, 0.98011, 0.97868, 0.97810],
    ),
    ("110", "structured-b"): (
        [0.68759, 0.47899, 0.33837, 0.24681, 0.18307],
        [0.84402, 0.73986, 0.66965, 0.62392, 0.59208],
    ),
    ("34", "structured-a"): (
        [0.92464, 0.87203, 0.83551, 0.80937, 0.79138],
        [0.96235, 0.93606, 0.91782, 0.90476, 0.89577],
    ),
    ("34", "structured-b"): (
        [0.89372, 0.83317, 0.79867, 0.77835, 0.76671],
        [0.94690, 0.91666, 0.89942, 0.88926, 0.88344],
    ),
}


@pytest.mark.parametrize(("network", "preset"), REMOVED)
def test_filters_removed_are_the_authors(network: str, preset: str, shapes: dict) -> None:
    assert list(removed_filters(preset, 1, shapes[network]).values()) == [
        int(n) for n in REMOVED[network, preset].split()
    ]


@pytest.mark.parametrize(("network", "preset"), DENSITIES)
def test_densities_are_the_authors(network: str, preset: str, shapes: dict) -> None:
    removed = [removed_filters(preset, k, shapes[network]) for k in range(1, 6)]
    reported, masked = DENSITIES[network, preset]
    assert [round(reported_density(each, shapes[network]), 5) for each in removed] == reported
    assert [round(masks_density(each, shapes[network]), 5) for each in removed] == masked


def test_at_k_5_some_layers_of_resnet56_are_wholly_dead(shapes: dict) -> None:
    removed = removed_filters("structured-b", 5, shapes["56"])
    first = [removed[f"stage1.block{block}.conv1.weight"] for block in range(1, 8)]
    assert first == [15, 16, 16, 16, 16, 16, 16]


def test_the_mask_is_that_of_the_smallest_filters() -> None:
    recipe = ResNet56()
    weights = {name: torch.randn(shape, dtype=torch.float64) for name, shape in recipe.shapes.items()}
    pruner = Pruner(preset="structured-b", k=1)
    mask = pruner.prune(weights, None)
    removed = removed_filters("structured-b", 1, recipe.shapes)
    for name, kept in mask.items():
        dead = ~kept.flatten(1).any(1)
        assert torch.equal(kept.flatten(1).all(1), ~dead), "whole filters"
        assert int(dead.sum()) == removed.get(name, 0)
        norms = weights[name].flatten(1).abs().sum(1)
        if dead.any():
            assert norms[dead].max() < norms[~dead].min()
    assert mask.kept == pruner.kept(recipe.shapes, 1.0)
    assert mask.density == pytest.approx(0.93593, abs=5e-6)


def test_a_mask_only_shrinks() -> None:
    weights = {name: torch.randn(shape) for name, shape in ResNet56().shapes.items()}
    one = Pruner(preset="structured-a", k=1).prune(weights, None)
    two = Pruner(preset="structured-a", k=1).prune(weights, None, one)
    assert all(bool((one[name] | ~kept).all()) for name, kept in two.items())
    assert two.kept < one.kept


# In sweeps


STRUCTURED = {
    "recipe": "cifar10-resnet56",
    "trials": [1],
    "experiment": [
        {
            "technique": ["lr-rewinding", "fine-tuning"],
            "retrain-epochs": 182,
            "pruner": {"preset": "structured-b", "k": [1, 3, 5]},
        }
    ],
}


def test_a_sweep_has_a_row_for_each_k() -> None:
    targets = parse_sweep(STRUCTURED, "structured").targets
    rows = [(t.pruning, t.technique, round(t.density, 5), t.iterative) for t in targets if t.technique]
    assert sorted(set(rows)) == sorted(
        ("structured-b", technique, density, False)
        for technique in ("lr-rewinding", "fine-tuning")
        for density in (0.87117, 0.69986, 0.58790)
    )
    work = plan(targets)
    assert sum(node.steps for node in work.nodes) == 7 * 71_108


def test_slim_is_an_axis_and_another_address() -> None:
    both = {**STRUCTURED, "experiment": [{**STRUCTURED["experiment"][0], "slim": [False, True]}]}
    plain, targets = parse_sweep(STRUCTURED, "structured").targets, parse_sweep(both, "structured").targets
    masked = {t.state.key for t in targets if t.pruning == "structured-b"}
    slim = {t.state.key for t in targets if t.pruning == "structured-b slim"}
    assert masked == {t.state.key for t in plain if t.technique}, "without slim a key is as it was"
    assert len(slim) == len(masked)
    assert not slim & masked
    (line, _) = described(targets[-1].state)[2:]
    assert "preset=structured-b k=5 slim to" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slim": "yes"}, "slim must be true or false, not 'yes'"),
        (
            {"pruner": {"floor": 0.1}, "density": 0.5, "slim": True},
            "slim needs whole units to go",
        ),
        (
            {"density": 0.5},
            "preset structured-b says itself how much goes: its experiment has neither density",
        ),
        ({"pruner": {"preset": "structured-c", "k": 1}}, "unknown preset 'structured-c'; did you mean"),
        ({"pruner": {"preset": "structured-b"}}, "k of preset structured-b must be at least 1, not 0; the paper has 1"),
        ({"pruner": {"k": 2}}, "k=2 belongs to a preset; give preset='structured-b' with it"),
        (
            {"pruner": {"preset": "structured-b", "k": 1, "score": "random"}},
            "preset structured-b says all of a pruner but k; leave out score",
        ),
        (
            {"pruner": {"preset": "structured-b", "k": 1, "round-to": 8}},
            "preset structured-b says all of a pruner but k; leave out round_to",
        ),
        ({"technique": "gradual"}, "preset structured-b prunes at once; use another technique than gradual"),
    ],
)
def test_what_a_preset_cannot_be_combined_with(change: dict[str, object], message: str) -> None:
    declared = {**STRUCTURED, "experiment": [{**STRUCTURED["experiment"][0], **change}]}
    with pytest.raises(InputError) as caught:
        _ = parse_sweep(declared, "structured").targets
    assert message in str(caught.value)


def test_a_preset_is_for_the_papers_networks() -> None:
    with pytest.raises(InputError, match="cifar10-resnet20: preset structured-b is defined for the paper's ResNet-56"):
        list(run_of(ResNet20(), "fine-tuning", 10, [], Pruner(preset="structured-b", k=1), iterative=False).targets(1))
    with pytest.raises(InputError, match="not for this network"):
        removed_filters("structured-b", 1, imagenet_shapes(resnet50))


class Deep(Tiny):
    """As deep as ResNet-56, and tiny."""


def test_prune_takes_a_preset(tmp_path: Path) -> None:
    recipe = Deep(blocks=(9, 9, 9), widths=(4, 4, 4), epochs=0.5)
    quiet = {"store": tmp_path, "say": lambda text: None, "retrain_epochs": 0.3}
    network = prune(recipe, pruner=Pruner(preset="structured-a", k=5), **quiet)
    removed = removed_filters("structured-a", 5, recipe.shapes)
    assert [level.density for level in network.levels] == [1.0, reported_density(removed, recipe.shapes)]
    assert network.mask.density == pytest.approx(masks_density(removed, recipe.shapes))
    with pytest.raises(InputError, match="preset structured-a says itself how much goes; leave out"):
        prune(recipe, pruner=Pruner(preset="structured-a", k=5), compression=4, **quiet)


@pytest.mark.slow
def test_a_slim_preset_is_completed_to_whole_units_and_may_lose_a_residual_branch(tmp_path: Path) -> None:
    recipe = Deep(blocks=(9, 9, 9), widths=(4, 4, 4), epochs=0.5)
    quiet = {"store": tmp_path, "say": lambda text: None, "retrain_epochs": 0.3}
    network = prune(recipe, pruner=Pruner(preset="structured-b", k=5), slim=True, **quiet)
    removed = removed_filters("structured-b", 5, recipe.shapes)
    assert max(removed.values()) == 4, "all filters of some layers"
    assert network.levels[1].density == reported_density(removed, recipe.shapes), "as the paper counts it"
    assert recipe.units.whole(network.mask) == network.mask
    small = dict(network.model.named_parameters())
    weights = recipe.prunable(network.large)
    assert {name: 4 - len(small[name]) for name in removed} == {name: min(count, 3) for name, count in removed.items()}
    dead = next(name for name, count in removed.items() if count == 4)
    assert not small[dead].any(), "a layer that is gone keeps a unit of zeros"
    with (network.save(tmp_path / "out") / "levels" / "levels.csv").open() as file:
        counted = [tuple(int(row[name]) for name in ("weights_kept", "weights")) for row in csv.DictReader(file)]
    whole = sum(math.prod(shape) for shape in recipe.shapes.values())
    kept = sum(int(network.mask[name].sum()) if name in network.mask else w.numel() for name, w in weights.items())
    assert counted == [(whole, whole), (kept, whole)], "weights of layers, without the normalisation that goes along"
    assert network.levels[1].parameters == network.counts_of(network.large, network.mask).left
    images = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    gap = network.model.double().eval()(images) - network.large.double().eval()(images)
    assert gap.abs().max() < 1e-9  # float64: 60 layers of sums of at most 1e4 terms, of 1e-16 each
