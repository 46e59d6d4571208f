"""The five techniques as rows of data; two later ones defined by a user, and all of them run for real."""

import re
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from rewound import TECHNIQUES, Facts, InputError, Pruner, Schedule, State, Technique, begin, train
from rewound.experiments.executors.local import run
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import plan
from rewound.experiments.plans.realisation import realised
from rewound.experiments.sweeps.targets import Target, dense, run_of
from rewound.method.pruning.mask import Mask
from rewound.method.technique import technique_named
from rewound.states.storage.store import Store
from rewound.tasks.recipes.digits import Digits
from sameness import assert_same

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPE = Digits(epochs=12.0, batch_size=897, widths=(4, 8))  # one step an epoch, so every rate is in the curve
TRIAL = 5


# What a user writes for linear retraining (Zimmer et al. 2023), and for its adaptive form


def linear(S: Schedule, T: int, t: int, facts: Facts) -> Schedule:
    return Schedule.linear(t, S.peak, warmup=t / 10)


def adaptive(S: Schedule, T: int, t: int, facts: Facts) -> Schedule:
    lost = facts.norm_lost / (facts.fraction_pruned or 1) ** 0.5
    return Schedule.linear(t, S.peak * min(1, max(lost, t / T)), warmup=t / 10)


LLR = Technique(weights="final", lr=linear)
ALLR = Technique(weights="final", lr=adaptive)

FIVE = [name for name, technique in TECHNIQUES.items() if technique.gradual is None]  # the paper's

# The table


@pytest.mark.parametrize(
    ("name", "weights", "lr"),
    [
        ("fine-tuning", "final", "final"),
        ("weight-rewinding", "rewound", "rewound"),
        ("lr-rewinding", "final", "rewound"),
        ("low-lr-weight-rewinding", "rewound", "final"),
        ("reinitialization", "fresh", "restarted"),
    ],
)
def test_the_five_techniques(
    name: str, weights: Literal["final", "rewound", "fresh"], lr: Literal["final", "rewound", "restarted"]
) -> None:
    assert technique_named(name) == TECHNIQUES[name] == Technique(weights=weights, lr=lr)


def test_there_are_five() -> None:
    assert len(FIVE) == 5


def test_which_techniques_go_back_in_the_dense_run() -> None:
    rewinding = {name for name, technique in TECHNIQUES.items() if technique.rewinds}
    assert rewinding == {"weight-rewinding", "lr-rewinding", "low-lr-weight-rewinding", "gradual"}
    assert not LLR.rewinds
    assert Technique(weights="rewound", lr=linear).rewinds


def test_an_unknown_technique_is_named_with_the_nearest() -> None:
    message = "unknown technique 'lr-rewind'; did you mean 'lr-rewinding'"
    with pytest.raises(InputError, match=message) as error:
        technique_named("lr-rewind")
    assert all(name in str(error.value) for name in TECHNIQUES)


def test_a_technique_by_its_import_path() -> None:
    assert technique_named("test_technique:LLR") is LLR
    with pytest.raises(InputError, match="technique 'test_technique:linear' is a function, not a Technique"):
        technique_named("test_technique:linear")


def test_the_words_of_a_technique() -> None:
    with pytest.raises(InputError, match="weights are final, rewound or fresh, not 'last'"):
        Technique(weights="last", lr="final")
    with pytest.raises(InputError, match="lr is final, rewound, restarted or a function, not 'cyclic'"):
        Technique(weights="final", lr="cyclic")


@pytest.mark.parametrize("rule", [lambda S, T, t, facts: S, partial(linear)])
def test_a_rule_needs_an_importable_name(rule: object) -> None:
    with pytest.raises(InputError, match="has no importable name; define it at the top level of a module"):
        Technique(weights="final", lr=rule)


# For real


def executed(targets: list[Target], folder: Path) -> Store:
    store = Store(folder / "store")
    run(plan(targets), store, Options(keep_all=True), say=lambda text: None)
    return store


def rates(store: Store, target: Target) -> list[float]:
    return [point.lr for point in store.result(target.state.key)["curve"]]


@lru_cache
def dense_states() -> dict[int, State]:
    """W_0, W_1, ... W_T by hand."""
    S, start = RECIPE.schedule, begin(RECIPE, TRIAL)
    run = train(RECIPE, start, lr=S.segments(0, S.steps), stops=range(1, S.steps))
    return {0: start.clone()} | {state.position.steps: state.clone() for state in run}


def pruned_from(state: State, density: float, before: Mask | None = None) -> Mask:
    return Pruner().prune({name: state.model[name] for name in RECIPE.shapes}, density, before)


def level_by_hand(technique: str, t: int, previous: State, mask: Mask, prunings: int) -> State:
    """One row of the paper's table, as one call of Train^t(W, m, g)."""
    S, T = RECIPE.schedule, RECIPE.schedule.steps
    W, g, length = {
        "fine-tuning": (previous, T, t),
        "weight-rewinding": (dense_states()[T - t], T - t, t),
        "lr-rewinding": (previous, T - t, t),
        "gradual": (previous, T - t, t),
        "low-lr-weight-rewinding": (dense_states()[T - t], T, t),
        "reinitialization": (begin(RECIPE, TRIAL, fresh=True), 0, T + t),
    }[technique]
    run = train(RECIPE, W.pruned(mask, prunings, TRIAL), mask, lr=S.segments(g, g + length))
    return [state.clone() for state in run][-1]


@pytest.mark.parametrize("technique", FIVE)
def test_two_levels_of_a_technique_are_two_calls_of_train(technique: str, tmp_path: Path) -> None:
    """Law 5 with it: rewinding reads the dense run at both levels, pruning the level before."""
    t, T = 5, RECIPE.schedule.steps
    targets = list(run_of(RECIPE, technique, t, [0.8, 0.6], iterative=True).targets(TRIAL))
    store = executed(targets, tmp_path)
    previous, mask = dense_states()[T], None
    for prunings, target in enumerate(targets, start=1):
        mask = pruned_from(previous, target.density, mask)
        previous = level_by_hand(technique, t, previous, mask, prunings)
        state, stored_mask, *_ = store.load(target.state.key, to_train=False)
        assert_same(stored_mask, mask)
        assert_same(state.model, previous.model)
        assert all(bool((state.model[name][~kept] == 0).all()) for name, kept in mask.items())


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_density_one_is_the_dense_control_of_equal_budget(technique: str, tmp_path: Path) -> None:
    t, T = 4, RECIPE.schedule.steps
    (target,) = run_of(RECIPE, technique, t, [1.0], iterative=False).targets(TRIAL)
    store = executed([target], tmp_path)
    result = store.result(target.state.key)
    assert all(layer["kept"] == layer["total"] for layer in result["layers"].values())
    assert len(result["curve"]) == (T + t if technique == "reinitialization" else t)
    everything = Mask.full({name: torch.empty(shape) for name, shape in RECIPE.shapes.items()})
    state, mask, *_ = store.load(target.state.key, to_train=False)
    assert mask.density == 1.0
    assert_same(state.model, level_by_hand(technique, t, dense_states()[T], everything, 1).model)


def test_linear_retraining_defined_by_a_user(tmp_path: Path) -> None:
    targets = list(run_of(RECIPE, "test_technique:LLR", 10, [0.5, 0.25], iterative=True).targets(TRIAL))
    store = executed(targets, tmp_path)
    expected = [0.0] + [0.2 * (10 - step) / 9 for step in range(1, 10)]  # 10% warm-up: one step
    for target in targets:
        assert rates(store, target) == pytest.approx(expected, rel=1e-8)
        assert target.technique == "test_technique:LLR"
        assert store.load(target.state.key, to_train=False).mask.density == pytest.approx(target.density, rel=0.01)


def norm(tensors: list[Tensor]) -> float:
    return torch.cat([tensor.flatten() for tensor in tensors]).double().norm().item()


@pytest.mark.parametrize(("epochs", "densities"), [(2, [0.5, 0.2]), (10, [0.5]), (2, [1.0])])
def test_adaptive_linear_retraining_defined_by_a_user(epochs: int, densities: list[float], tmp_path: Path) -> None:
    targets = list(run_of(RECIPE, "test_technique:ALLR", epochs, densities, iterative=True).targets(TRIAL))
    original = dense(RECIPE, TRIAL)
    store = executed([original, *targets], tmp_path)
    source, before, scales = store.load(original.state.key, to_train=False).state, 1.0, []
    for target in targets:
        state, mask, *_ = store.load(target.state.key, to_train=False)
        weights = {name: source.model[name] for name in RECIPE.shapes}
        lost = norm([w[~mask[n]] for n, w in weights.items()]) / norm(list(weights.values()))
        fraction = before - mask.density
        scale = min(1.0, max(lost / fraction**0.5 if fraction else 0.0, epochs / 12))
        scales.append(scale)
        expected = Schedule.linear(epochs, 0.2 * scale, warmup=epochs / 10)
        assert rates(store, target) == pytest.approx([expected.at(step) for step in range(epochs)], rel=1e-7)
        source, before = state, mask.density
    if densities == [0.5, 0.2]:
        assert all(epochs / 12 < scale < 1 for scale in scales)  # the norm decides here, and differently at each level
        assert scales[0] != scales[1]
    else:
        assert scales == [epochs / 12]


def wrong_length(S: Schedule, T: int, t: int, facts: Facts) -> Schedule:
    return Schedule.constant(t + 1, 0.1)


WRONG = Technique(weights="final", lr=wrong_length)


def test_a_rule_draws_as_many_steps_as_it_is_asked_for(tmp_path: Path) -> None:
    targets = list(run_of(RECIPE, "test_technique:WRONG", 3, [0.5], iterative=False).targets(TRIAL))
    message = "the rule test_technique:wrong_length drew 4 steps where 3 were asked for"
    with pytest.raises(InputError, match=re.escape(message)):
        executed(targets, tmp_path)


def test_a_rule_is_told_of_all_prunable_weights_also_where_some_are_skipped(tmp_path: Path) -> None:
    (target,) = run_of(RECIPE, "test_technique:LLR", 2, [0.5], Pruner(skip=("stage*",)), iterative=False).targets(TRIAL)
    store = executed([dense(RECIPE, TRIAL), target], tmp_path)
    state, mask, facts = realised(target.state.parent, store, torch.device("cpu"), print)
    assert mask.total < (total := sum(state.model[name].numel() for name in RECIPE.shapes))
    assert facts.fraction_pruned == (mask.total - mask.kept) / total
