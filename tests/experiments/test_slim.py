"""Sweeps of slim networks: what is pruned is not there while a network trains, and all else is as with a mask."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rewound.experiments.plans.execution
from rewound import InputError, Pruner
from rewound.experiments.executors import local
from rewound.experiments.executors.walking import Headway
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import plan
from rewound.experiments.plans.realisation import Realised, in_large_shapes, stored_state
from rewound.experiments.sweeps.sweep import Sweep, parse_sweep
from rewound.experiments.sweeps.targets import Target
from rewound.states.history import Pruned
from rewound.states.storage.statefile import Kept
from rewound.states.storage.store import Store
from rewound.tasks.recipe import Recipe
from rewound.tasks.slimmed import cut_state, kept_by, slimmed
from rewound.tasks.training import State, begin, loaded
from sameness import assert_same
from small_fleets import ROUNDING, Digits64
from tiny import Tiny
from tiny_sweeps import assert_same_tensors, run, timeless

TECHNIQUES = ["fine-tuning", "weight-rewinding", "lr-rewinding", "low-lr-weight-rewinding", "reinitialization"]
UNITS: Mapping[str, object] = {
    "technique": TECHNIQUES,
    "retrain-epochs": 0.5,
    "levels": {"keep": 0.6, "count": 2},
    "pruner": {"pattern": "unit"},
    "slim": [False, True],
}


@dataclass(frozen=True)
class Small64(Digits64):
    """Nine steps of a small network in float64."""

    epochs: float = 1.0
    blocks: tuple[int, ...] = (1, 1)
    widths: tuple[int, ...] = (4, 8)


def sweep_of(recipe: Recipe, **changed: object) -> Sweep:
    return parse_sweep({"recipe": recipe, "trials": [1], "experiment": [{**UNITS, **changed}]}, "slim")


def pairs(sweep: Sweep) -> list[tuple[Target, Target]]:
    """The targets with a mask, each with its slim one."""
    slim = {(t.technique, t.density): t for t in sweep.targets if t.pruning == "unit slim"}
    return [(t, slim[t.technique, t.density]) for t in sweep.targets if t.pruning == "unit"]


def kept(target: Target, store: Store) -> Kept:
    stored = stored_state(target.state, store, to_train=False)
    assert stored is not None
    return stored


def large_state(target: Target, store: Store) -> State:
    stored = kept(target, store)
    return in_large_shapes(target.state, Realised(stored.state, stored.mask))


@pytest.mark.slow
@pytest.mark.numeric
@pytest.mark.usefixtures("float64")
def test_each_technique_gives_the_network_that_it_gives_with_a_mask(store: Store) -> None:
    sweep = sweep_of(Small64())
    run(sweep, store, keep_all=True)
    found = pairs(sweep)
    assert len(found) == 2 * len(TECHNIQUES)
    for masked, slim in found:
        one, other = kept(masked, store), kept(slim, store)
        assert one.mask == other.mask, "the mask has the large network's shapes"
        sizes = [sum(tensor.numel() for tensor in each.state.model.values()) for each in (one, other)]
        assert sizes[1] < 0.8 * sizes[0]
        mine, yours = large_state(slim, store), large_state(masked, store)
        for name, parameter in sweep.recipe.skeleton.named_parameters():
            assert mine.model[name].shape == parameter.shape
            assert (mine.model[name] - yours.model[name]).abs().max() < ROUNDING
        assert mine.slots.keys() == yours.slots.keys()
        for name, slot in mine.slots.items():  # of what the next level reads
            assert (slot - yours.slots[name]).abs().max() < ROUNDING


def test_the_tables_of_slim_networks_are_those_of_masked_ones_with_fewer_operations(store: Store) -> None:
    sweep = sweep_of(Tiny(), technique="lr-rewinding")
    run(sweep, store)
    rows = collected(sweep.targets, store).rows
    masked, slim = ([r for r in rows if r.pruning == kind] for kind in ("unit", "unit slim"))
    assert len(masked) == len(slim) == 2
    for one, other in zip(masked, slim, strict=True):
        assert other.density == one.density
        assert other.flops is not None
        assert one.flops is not None
        assert other.flops < one.flops, "normalisation and activations of units that are gone"


def test_slim_networks_have_the_operations_of_their_own_shapes(store: Store) -> None:
    sweep = sweep_of(Tiny(), technique="lr-rewinding", slim=True)
    run(sweep, store, keep_all=True)
    for target in sweep.targets:
        stored, result = kept(target, store), store.result(target.state.key)
        assert result is not None
        recipe = slimmed(target.recipe, kept_by(target.recipe, stored.mask)) if stored.mask else target.recipe
        assert result["flops"] == recipe.profile.total()
        left = sum(parameter.numel() for parameter in recipe.skeleton.parameters())
        assert (result["parameters"], result["parameters_left"]) == (1406, left)


class Interrupted(Exception):
    """Stands for Ctrl-C."""


@pytest.mark.usefixtures("looks_at_ends_of_epochs")
@pytest.mark.parametrize("looks", [5, 7])
def test_an_interrupted_slim_run_goes_on_to_the_same_bits(
    store: Store, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rewound.experiments.executors.working._TELL", -1.0)
    monkeypatch.setattr(rewound.experiments.plans.execution, "SNAPSHOT", -1.0)
    sweep = sweep_of(Tiny(), **{"technique": "weight-rewinding", "retrain-epochs": 1.8, "slim": True})
    calls = iter(range(looks))

    def tick(progress: Headway) -> None:
        if next(calls, None) is None:
            raise Interrupted

    with pytest.raises(Interrupted):
        local.run(plan(sweep.targets), store, Options(keep_all=True), say=lambda text: None, tick=tick)
    slim = [t.state.key for t in sweep.targets if t.technique]
    assert {path.stem for path in store.root.glob("*/**/*.safetensors")} & {*slim}, "it was in a slim network"
    run(sweep, store, keep_all=True)
    other = Store(store.root.with_name("other"))
    run(sweep, other, keep_all=True)
    assert timeless(collected(sweep.targets, store)) == timeless(collected(sweep.targets, other))
    assert_same_tensors(store, other)


def test_a_state_of_other_shapes_than_its_mask_leaves_is_set_aside_and_made_again(store: Store) -> None:
    sweep = sweep_of(Tiny(), technique="fine-tuning", levels={"keep": 0.6, "count": 1})
    run(sweep, store, keep_all=True)
    ((masked, slim),) = pairs(sweep)
    large, small = kept(masked, store), kept(slim, store)
    store.save(slim.state.key, large.state, large.mask, for_good=True)
    assert stored_state(slim.state, store) is None
    assert list(store.root.glob("damaged/**/*.safetensors"))
    single = {name: each.clone() for name, each in (small.mask or {}).items()}
    single[next(iter(single))].view(-1)[0] ^= True
    store.save(slim.state.key, small.state, rewound.Mask(single), for_good=True)
    assert stored_state(slim.state, store) is None, "no network follows from a mask that is not of whole units"


@dataclass(frozen=True)
class WithAdafactor(Tiny):
    """Its optimizer keeps sums over rows and columns."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(model.parameters(), lr=0.01)


def test_an_optimizer_whose_state_cannot_be_cut_is_refused_in_one_sentence(store: Store) -> None:
    sweep = sweep_of(WithAdafactor(), technique="fine-tuning", levels={"keep": 0.6, "count": 1}, slim=True)
    with pytest.raises(InputError, match="slim networks need an optimizer whose state has the shape of the weights"):
        run(sweep, store)


def test_a_slim_recipe_differs_from_its_recipe_in_its_model_alone() -> None:
    recipe = Tiny()
    groups = recipe.units
    slim = slimmed(recipe, kept_by(recipe, groups.mask_without(groups.groups[0].units[:1])))
    assert slim != recipe
    assert (slim.label(), slim.identity()) == (recipe.label(), recipe.identity())
    assert slim.source_digest() == recipe.source_digest()
    assert slim is slimmed(recipe, kept_by(recipe, groups.mask_without(groups.groups[0].units[1:2]))), "of one shape"
    assert isinstance(slim, Tiny)
    assert slim.schedule == recipe.schedule


class Weighted(nn.Module):
    """Hidden units that are multiplied by numbers of their own, which no state holds."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.dense = nn.Linear(64, 8), nn.Linear(8, 10)
        self.register_buffer("scale", torch.randn(8), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.dense(self.hidden(images.flatten(1)) * self.scale)


@dataclass(frozen=True)
class WithUnsavedBuffer(Tiny):
    """Tiny's task with a network of which a buffer is drawn with the weights and not saved."""

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Weighted()


def test_slim_networks_of_the_same_sizes_have_their_own_unsaved_buffers() -> None:
    recipe = WithUnsavedBuffer()
    images = torch.randn(4, *recipe.example()[0].shape[1:], generator=torch.Generator().manual_seed(0))
    for seed, gone in ((1, [0, 1, 2]), (1, [5, 6, 7]), (2, [5, 6, 7])):
        mask = recipe.units.mask_without([recipe.units.groups[0].units[unit] for unit in gone])
        large, kept = begin(recipe, seed), kept_by(recipe, mask)
        mask.apply(masked := loaded(recipe, large))
        small = loaded(slimmed(recipe, kept), cut_state(large, kept))
        assert small.hidden.out_features == 5
        assert torch.allclose(small(images), masked(images), atol=1e-5), (seed, gone)


def test_the_target_is_hashed() -> None:
    sweep = sweep_of(Tiny(), technique="fine-tuning", levels={"keep": 0.5, "count": 1}, slim=True)
    pruned = sweep.targets[-1].state.parent
    assert isinstance(pruned, Pruned)
    assert pruned.kept == sum(torch.Size(shape).numel() for shape in Tiny().shapes.values()) // 2


def test_prune_returns_the_slim_network_and_its_ticket_holds_it(tmp_path: Path) -> None:
    recipe, pruner = Tiny(), Pruner(pattern="unit")
    chosen = {"pruner": pruner, "slim": True, "rate": 0.4, "store": tmp_path / "store", "say": lambda text: None}
    rewound.prune(recipe, compression=2, **chosen)
    network = rewound.prune(recipe, compression=3, **chosen)
    assert [level.compression for level in network.levels] == [1 / level.density for level in network.levels]
    assert 3 <= network.levels[-1].compression < 4
    sizes = [sum(p.numel() for p in each.parameters()) for each in (network.model, network.large)]
    assert network.levels[-1].network_compression == pytest.approx(sizes[1] / sizes[0])
    folder = network.save(tmp_path / "pruned")
    small = rewound.load(folder / "ticket.safetensors").slim(recipe.model(1), recipe.example()).model
    assert_same(small.state_dict(), network.model.state_dict())
    images = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    gap = small.double().eval()(images) - network.large.double().eval()(images)
    assert gap.abs().max() < ROUNDING
    assert json.loads((folder / "summary.json").read_text())["asked"]["slim"] is True
    assert len(list((folder / "levels").glob("*.safetensors"))) == len(network.levels)
