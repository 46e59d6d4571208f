"""Every kind of pruner in a sweep: what it needs to know of the network and of the data, it is given."""

from typing import Any

import pytest
import torch

from rewound import InputError
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.realisation import stored_state
from rewound.experiments.sweeps.sweep import Sweep, parse_sweep
from rewound.experiments.sweeps.targets import Target
from rewound.method.pruning.mask import Mask
from rewound.states.history import described
from rewound.states.storage.store import Store
from tiny import Tiny
from tiny_sweeps import run

PRUNERS: dict[str, dict[str, Any]] = {
    "unit": {"pattern": "unit"},
    "filter l2": {"pattern": "filter", "score": "l2"},
    "unit bn-scale only=stage*.conv1.weight": {"pattern": "unit", "score": "bn-scale", "only": ["stage*.conv1.weight"]},
    "unit taylor batches=2": {"pattern": "unit", "score": "taylor", "batches": 2},
    "unit activation": {"pattern": "unit", "score": "activation"},
    "unit of=flops": {"pattern": "unit", "of": "flops"},
    "unstructured taylor": {"score": "taylor"},
    "block 2x2": {"pattern": "block 2x2"},
    "2:4": {"pattern": "2:4"},
}


def sweep_of(pruner: object, **changed: object) -> Sweep:
    table = {"technique": "fine-tuning", "retrain-epochs": 0.2, "density": 0.5, "pruner": pruner, **changed}
    experiment = {key: value for key, value in table.items() if value is not None}
    return parse_sweep({"recipe": Tiny(), "trials": [1], "experiment": [experiment]}, "pruners")


def mask_of(target: Target, store: Store) -> Mask:
    stored = stored_state(target.state, store, to_train=False)
    assert stored is not None
    assert stored.mask is not None
    return stored.mask


@pytest.mark.filterwarnings("ignore:pattern")
def test_all_run_in_one_sweep_and_prune_to_what_was_asked(store: Store) -> None:
    sweep = sweep_of(list(PRUNERS.values()))
    run(sweep, store, keep_all=True)
    targets = {target.pruning: target for target in sweep.targets if target.technique}
    assert list(targets) == list(PRUNERS)
    shapes = Tiny().shapes
    for name, target in targets.items():
        mask = mask_of(target, store)
        if name == "unit of=flops":
            assert Tiny().profile.total(mask) <= 0.5 * Tiny().profile.total()
            assert "FLOPs (0.5)" in described(target.state)[2]
            continue
        counted = [each for each in mask if each in shapes]
        part = sum(mask.counts[each] for each in counted) / sum(mask[each].numel() for each in counted)
        assert 0.4 < part <= 0.501, name
    assert len({target.state.key for target in targets.values()}) == len(targets)
    network = sum(parameter.numel() for parameter in Tiny().skeleton.parameters())
    gone = {target.state.key: (mask := mask_of(target, store)).total - mask.kept for target in targets.values()}
    for row in collected(sweep.targets, store).rows:
        assert row.parameters == network - gone.get(row.key, 0), "of the whole network, biases and all"


def test_batches_are_a_part_of_the_address_and_drawn_by_counter(tmp_path: Any) -> None:
    pruner = {"pattern": "unit", "score": "taylor"}
    tables = [{**pruner, **more} for more in ({}, {"batches": 8}, {"batches": 1})]
    by_default, the_same, other = (sweep_of(table).targets[-1] for table in tables)
    assert by_default.state.key == the_same.state.key != other.state.key
    masks = []
    for folder in ("one", "two"):
        store = Store(tmp_path / folder)
        run(sweep_of(pruner), store, keep_all=True)
        masks.append(mask_of(by_default, store))
    assert masks[0] == masks[1]


@pytest.mark.parametrize("pattern", ["weight", "unit"])
def test_rates_say_how_much_goes_of_each_layer(pattern: str, store: Store) -> None:
    rates = {"stage1.*.conv1.weight": 0.5, "stage2.*.conv1.weight": 0.25}
    sweep = sweep_of({"pattern": pattern, "rates": rates}, density=None)
    run(sweep, store, keep_all=True)
    (target,) = [target for target in sweep.targets if target.technique]
    mask = mask_of(target, store)
    kept = sum(
        int(mask[name].sum()) if name in mask else torch.Size(shape).numel() for name, shape in Tiny().shapes.items()
    )
    total = sum(torch.Size(shape).numel() for shape in Tiny().shapes.values())
    assert target.density == pytest.approx(kept / total)
    first = mask["stage1.block1.conv1.weight"]
    assert int(first.flatten(1).any(1).sum() if pattern == "unit" else first.sum()) * 2 == (
        first.shape[0] if pattern == "unit" else first.numel()
    )
    assert "rates=stage1.*.conv1.weight:0.5,stage2.*.conv1.weight:0.25" in target.pruning
    with pytest.raises(InputError, match="the table of rates says itself how much goes: its experiment has neither"):
        sweep_of({"rates": rates})


def test_n_of_m_needs_no_density_and_agrees_with_its_own() -> None:
    without, agreed = (sweep_of({"pattern": "2:4"}, density=density).targets[-1] for density in (None, 0.5))
    assert (without.state.key, without.density) == (agreed.state.key, 0.5)
    with pytest.raises(InputError, match=r"leave out the density 0\.3, or give 0\.5"):
        _ = sweep_of({"pattern": "2:4"}, density=0.3).targets


def test_hyphens_and_several_tables_of_rates() -> None:
    sweep = sweep_of({"pattern": "unit", "round-to": 2, "min-units": [2, 4]}, density=0.7)
    assert {t.pruning for t in sweep.targets if t.technique} == {
        "unit round-to=2 min-units=2",
        "unit round-to=2 min-units=4",
    }
    two = sweep_of({"rates": [{"stage1.*": 0.5}, {"stage2.*": 0.5}]}, density=None)
    assert len({t.pruning for t in two.targets if t.technique}) == 2


def test_what_cannot_be_reached_is_refused_before_anything_runs() -> None:
    with pytest.raises(InputError, match=r"density 0\.001 cannot be reached by removing units: [\d.]+% of the weights"):
        _ = sweep_of({"pattern": "unit"}, density=0.001).targets
    with pytest.raises(InputError, match="round_to must be from 1 to the 4 units of"):
        _ = sweep_of({"pattern": "unit", "round_to": 8}).targets
