"""A state's key is the hash of its history: what is the same work has the same key, what is not has another."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewound.experiments.sweeps.targets import Target, dense, run_of
from rewound.foundations.errors import InputError
from rewound.method.pruner import Pruner
from rewound.method.schedule import Schedule, Segment, sliced, total
from rewound.method.technique import TECHNIQUES, Facts, drawn_by
from rewound.states.history import Pruned, Start, Trained, described, lineage, start_of, trained
from rewound.tasks.recipe import Recipe
from rewound.tasks.recipes.cifar10 import ResNet20
from rewound.tasks.recipes.digits import Digits
from rewound.tasks.recipes.imagenet import ImageNetResNet50
from rewound.tasks.recipes.translation import WMT16, Multi30k
from rewound.tasks.training import begin

DIGITS = Digits()


def targets(technique: str, epochs: float, densities: list[float], **others: object) -> list[Target]:
    options = {"iterative": len(densities) > 1, **others}
    return list(run_of(DIGITS, technique, epochs, densities, **options).targets(1))  # type: ignore[arg-type]


def key(technique: str, epochs: float, *densities: float, **others: object) -> str:
    return targets(technique, epochs, list(densities), **others)[-1].state.key


def parent(target: Target) -> Pruned:
    assert isinstance(target.state.parent, Pruned)
    return target.state.parent


# Golden keys. Whoever changes one of these discards every result that anybody has stored: a key that changed is a
# key at which nothing is found. Do so only on purpose, and say it in CHANGELOG.md.


def test_golden_keys_stay() -> None:
    assert dense(DIGITS, 1).state.key == "f7c39d615004bf67a137cbf86a44b7aa"
    assert key("lr-rewinding", 8, 0.1) == "6d5e5ded7a4288e928fdbc855a1be74a"
    assert key("weight-rewinding", 8, 0.5, 0.25) == "656e0cfe5ed71d8838f945f8ac35fe65"
    cifar = next(run_of(ResNet20(), "lr-rewinding", 182, [0.1074], iterative=False).targets(3))
    assert cifar.state.key == "1484177bdd91e708584408e2ba996943"
    imagenet = next(run_of(ImageNetResNet50(), "lr-rewinding", 90, [0.1074], iterative=False).targets(3))
    assert imagenet.state.key == "71ddb618632dd828912b724a131c6977"


GOLDEN_PRUNERS = {
    Pruner(pattern="unit"): "54364ac007ec25ec014daf27b0d48dbd",
    Pruner(
        "taylor", pattern="filter", batches=4, round_to=8, min_units=2, of="flops"
    ): "a8c77ecb9a44c0f1364a8e7ac1f5031e",
    Pruner(rates={"stage1.*": 0.5}): "6a91a04e8b75c3bdb168c4668b563223",
    Pruner(pattern="2:4"): "9d655f35cf92b60a4e94b1ec6c46a773",
    Pruner("l2", pattern="block 4x3"): "c865e5abea83f7892ae9206817c49360",
}


@pytest.mark.parametrize("pruner", GOLDEN_PRUNERS, ids=str)
def test_golden_keys_of_pruners_stay(pruner: Pruner) -> None:
    densities = [] if pruner.sets_density else [0.5]
    assert key("fine-tuning", 1, *densities, pruner=pruner) == GOLDEN_PRUNERS[pruner]


def test_what_checkpoints_say_of_a_pruner_has_only_the_new_fields_that_are_used() -> None:
    known = {"score": "magnitude", "scope": "global", "pattern": "weight", "only": (), "skip": (), "floor": 0.0}
    assert Pruner().settings == known, "as files of earlier versions have it"
    assert Pruner(pattern="unit", round_to=8).settings == {**known, "pattern": "unit", "round_to": 8}
    assert Pruner(rates={"a": 0.5}).settings == {**known, "rates": {"a": 0.5}}


# A field at its default is not in the key. So a default changes only together with `version`, or results of the old
# one would be taken for results of the new one. (A new field needs no new version if its default changes nothing.)
DEFAULTS = {
    Digits(): {
        "version": 1,
        "epochs": 16.0,
        "batch_size": 96,
        "learning_rate": 0.2,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 5e-4,
        "shift": 1,
        "split_seed": 0,
        "blocks": (1, 1),
        "widths": (32, 48),
        "batch_norm_momentum": 0.1,
    },
    ResNet20(): {
        "version": 1,
        "epochs": 182.0,
        "steps": 71_108,
        "drops": (35_547, 53_126),
        "batch_size": 128,
        "learning_rate": 0.1,
        "momentum": 0.9,
        "nesterov": False,
        "weight_decay": 2e-4,
        "shift": 4,
        "split_seed": 0,
        "batch_norm_momentum": 0.003,
        "precision": "float32",
    },
    ImageNetResNet50(): {
        "version": 1,
        "epochs": 90.0,
        "batch_size": 1024,
        "learning_rate": 0.4,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 1e-4,
        "warmup_epochs": 5.0,
        "drops": (30.0, 60.0, 80.0),
        "batch_norm_group": 128,
        "precision": "bfloat16",
        "image_size": 224,
        "smallest_area": 0.08,
        "central_share": 0.875,
        "per_class": 0,
        "split_seed": 0,
    },
    WMT16(): {
        "version": 1,
        "layers": 4,
        "width": 1024,
        "vocabulary": 32_316,
        "shares_embedding": True,
        "dropout": 0.2,
        "epochs": 5.0,
        "steps_per_epoch": 1_726.0,
        "batch_size": 256,
        "accumulation": 8,
        "learning_rate": 0.002,
        "warmup": 200,
        "smoothing": 0.1,
        "precision": "float32",
        "beam_width": 5,
        "most_words": 150,
        "clip_norm": 5.0,
        "clip_each": True,
    },
    Multi30k(): {
        "version": 1,
        "layers": 2,
        "width": 256,
        "vocabulary": 8_000,
        "shares_embedding": True,
        "dropout": 0.15,
        "epochs": 20.0,
        "steps_per_epoch": 224.0,
        "batch_size": 128,
        "accumulation": 1,
        "learning_rate": 0.002,
        "warmup": 200,
        "smoothing": 0.1,
        "precision": "float32",
        "beam_width": 5,
        "most_words": 80,
        "clip_norm": 5.0,
        "clip_each": True,
    },
}


@pytest.mark.parametrize("recipe", DEFAULTS, ids=lambda recipe: recipe.label())
def test_golden_defaults_stay(recipe: Recipe) -> None:
    assert {name: getattr(recipe, name) for name in DEFAULTS[recipe]} == DEFAULTS[recipe]


# What does not matter


SEQUENCES = st.lists(st.builds(Segment, st.sampled_from([0.1, 0.01, 0.001]), st.integers(1, 9)), min_size=1, max_size=8)


@settings(max_examples=50, deadline=None)
@given(SEQUENCES, st.data())
def test_the_address_does_not_depend_on_how_the_work_was_cut(rates: list[Segment], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, total(rates)), max_size=4)))
    whole = trained(Start(DIGITS, 1), rates)
    state: Start | Trained = Start(DIGITS, 1)
    for begins, ends in zip([0, *cuts], [*cuts, total(rates)], strict=True):
        if ends > begins:
            state = trained(state, sliced(rates, begins, ends))
    assert isinstance(state, Trained)
    assert state.key == whole.key
    assert state.steps == whole.steps == total(rates)


def test_a_snapshot_on_the_way_is_the_shorter_run() -> None:
    short, long = targets("fine-tuning", 4, [0.1])[0].state, targets("fine-tuning", 16, [0.1])[0].state
    assert long.until(short.steps).key == short.key


def test_the_density_is_a_label_of_the_kept_count() -> None:
    assert key("fine-tuning", 4, 0.8**3) == key("fine-tuning", 4, 0.512)
    assert key("fine-tuning", 4, 0.512) != key("fine-tuning", 4, 0.5121)


def test_technique_names_are_labels() -> None:
    # The last quarter of the schedule runs at its final rate: LR rewinding within it is fine-tuning.
    assert key("lr-rewinding", 4, 0.1) == key("fine-tuning", 4, 0.1)
    assert key("lr-rewinding", 8, 0.1) != key("fine-tuning", 8, 0.1)
    assert targets("lr-rewinding", 4, [0.1])[0] != targets("fine-tuning", 4, [0.1])[0], "they stay two rows"


def test_iterative_is_a_label() -> None:
    assert key("lr-rewinding", 8, 0.5) == targets("lr-rewinding", 8, [0.5, 0.25])[0].state.key


def test_a_field_at_its_default_is_not_in_the_address() -> None:
    same = Digits.with_fields({"epochs": 16, "batch-size": DIGITS.batch_size})
    assert dense(same, 1).state.key == dense(DIGITS, 1).state.key


# What does


def test_every_field_of_the_recipe_matters() -> None:
    keys = {dense(DIGITS, 1).state.key}
    for name, value in {
        "epochs": 8.0,
        "weight-decay": 0.0,
        "widths": [4, 8],
        "split-seed": 1,
        "nesterov": False,
    }.items():
        keys.add(dense(Digits.with_fields({name: value}), 1).state.key)
    assert len(keys) == 6


def test_trials_pruners_and_order_matter() -> None:
    keys = {
        dense(DIGITS, 1).state.key,
        dense(DIGITS, 2).state.key,
        key("fine-tuning", 4, 0.1),
        key("fine-tuning", 4, 0.1, pruner=Pruner(scope="layer")),
        key("fine-tuning", 4, 0.1, pruner=Pruner(score="random")),
        key("fine-tuning", 4, 0.1, pruner=Pruner(floor=0.01)),
        key("fine-tuning", 4, 0.5, 0.1),
    }
    assert len(keys) == 7
    assert key("fine-tuning", 4, 0.1, pruner=Pruner("magnitude")) == key("fine-tuning", 4, 0.1)


@dataclass(frozen=True)
class Heavier(Digits):
    """A task derived from a shipped one, with another default and no name of its own."""

    weight_decay: float = 1.0


class Renewed(Digits):
    """The same fields, whose meaning has changed."""

    name = "digits"
    version = 2


def test_a_derived_task_is_another_task() -> None:
    assert Heavier.label() == "test_history:Heavier"
    assert len({dense(task, 1).state.key for task in (DIGITS, Heavier(), Renewed())}) == 3


def test_independent_randomness_separates_techniques_and_times() -> None:
    kinds = [("lr-rewinding", 4), ("fine-tuning", 4), ("fine-tuning", 8), ("reinitialization", 4)]
    alone = [targets(technique, t, [0.1], independent=True)[0].state for technique, t in kinds]
    assert len({state.parent.key for state in alone}) == len(kinds), "not even a prefix is shared"
    assert len({lineage_state.key for state in alone for lineage_state in list(lineage(state))[:1]}) == 1, "dense is"
    shared = targets("fine-tuning", 8, [0.1])[0].state
    assert shared.parent.key == targets("fine-tuning", 4, [0.1])[0].state.parent.key
    assert shared.key not in {state.key for state in alone}
    deeper = targets("fine-tuning", 4, [0.5, 0.25], independent=True)
    assert [parent(target).salt for target in deeper] == ["fine-tuning 4", ""], "it joins the seed once"


# Laws 5 and 6: whose weights, whose mask


def test_weight_rewinding_reads_the_original_dense_run_and_pruning_the_previous_level() -> None:
    original = dense(DIGITS, 1).state
    first, second = targets("weight-rewinding", 8, [0.5, 0.25])
    T, t = DIGITS.schedule.steps, DIGITS.steps_of(8)
    for target in (first, second):
        assert parent(target).weights.key == original.until(T - t).key
    assert parent(first).source.key == original.key
    assert parent(second).source.key == first.state.key
    assert [level.key for level in lineage(second.state)] == [original.key, first.state.key, second.state.key]
    assert second.state.prunings == 2
    assert total(sliced(DIGITS.schedule.segments(T - t, T), 0)) == second.state.steps == t


@pytest.mark.parametrize("technique", ["lr-rewinding", "fine-tuning"])
def test_techniques_on_final_weights_read_the_previous_level(technique: str) -> None:
    first, second = targets(technique, 8, [0.5, 0.25])
    assert parent(second).weights.key == parent(second).source.key == first.state.key


def test_rewinding_all_the_way_reads_the_initial_weights() -> None:
    assert parent(targets("weight-rewinding", 16, [0.1])[0]).weights == Start(DIGITS, 1)


def test_reinitialization_draws_other_weights_than_the_dense_run() -> None:
    target = targets("reinitialization", 16, [0.1])[0]
    fresh = parent(target).weights
    assert fresh == Start(DIGITS, 1, fresh=True)
    assert fresh.key != Start(DIGITS, 1).key
    assert target.state.steps == DIGITS.schedule.steps + DIGITS.steps_of(16)
    old, new = begin(DIGITS, 1), begin(DIGITS, 1, fresh=True)
    assert not torch.equal(old.model["dense.weight"], new.model["dense.weight"])
    assert torch.equal(new.model["dense.weight"], begin(DIGITS, 1, fresh=True).model["dense.weight"])


# Rules


def falling(schedule: Schedule, T: int, t: int, facts: Facts) -> Schedule:
    return Schedule.linear(t, schedule.peak)


def steeper(schedule: Schedule, T: int, t: int, facts: Facts) -> Schedule:
    return Schedule.linear(t - 1, schedule.peak)


def forgotten(schedule: Schedule, T: int, t: int, facts: Facts) -> Schedule:
    Schedule.linear(t, schedule.peak)


FALLING = replace(TECHNIQUES["lr-rewinding"], lr=falling)
STEEPER = replace(TECHNIQUES["lr-rewinding"], lr=steeper)


def test_a_rule_is_addressed_by_its_name_and_what_it_is_given() -> None:
    keys = [key(f"test_history:{name}", t, 0.1) for name in ("FALLING", "STEEPER") for t in (4, 8)]
    assert len(set(keys)) == 4
    assert keys[0] == key("test_history:FALLING", 4, 0.1)
    ruled = targets("test_history:FALLING", 4, [0.1])[0].state
    assert ruled.steps == DIGITS.steps_of(4)
    for on_the_way_or_further in (lambda: ruled.until(1), lambda: trained(ruled, [Segment(0.1, 1)])):
        with pytest.raises(ValueError, match="a rule draws its rates"):
            on_the_way_or_further()


def test_a_rule_must_draw_what_was_asked_for() -> None:
    with pytest.raises(InputError, match="test_history:steeper drew 9 steps where 10 were asked for"):
        drawn_by(steeper, DIGITS.schedule, 10, Facts(0.1, 0.5))
    with pytest.raises(InputError, match="forgotten returns must be of type Schedule, not None; end it"):
        drawn_by(forgotten, DIGITS.schedule, 10, Facts(0.1, 0.5))


# For a person


def test_a_history_in_words() -> None:
    lines = described(targets("weight-rewinding", 8, [0.5, 0.25])[1].state)
    assert lines[0] == "start digits seed 1"
    assert [line.split()[0] for line in lines] == ["start", "train", "prune", "train", "prune", "train"]
    assert f"weights of {dense(DIGITS, 1).state.until(DIGITS.schedule.steps - DIGITS.steps_of(8)).key[:12]}" in lines[2]
    assert "its own weights" in described(targets("fine-tuning", 8, [0.5])[0].state)[2]
    assert "fresh weights" in described(targets("reinitialization", 8, [0.5])[0].state)[2]
    assert "test_history:falling" in described(targets("test_history:FALLING", 8, [0.5])[0].state)[-1]
    assert start_of(targets("reinitialization", 8, [0.5])[0].state) == Start(DIGITS, 1, fresh=True)
