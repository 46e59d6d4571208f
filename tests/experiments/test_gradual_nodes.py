"""Gradual pruning: a level whose mask is updated on the way is one node, resumed and shared like any other."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import rewound.experiments.plans.execution
from rewound import InputError, Mask, Pruner, Technique, begin, prune, train
from rewound.experiments.executors import local
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import plan
from rewound.experiments.sweeps.targets import Target, dense, run_of
from rewound.method.technique import Gradual, technique_label, technique_named
from rewound.states.history import Pruned, described
from rewound.states.storage.store import Store
from tiny import ENTERED, Tiny
from tiny_sweeps import run, sweep_of

RECIPE = Tiny()
GRADUAL = {"technique": "gradual every=2", "retrain-epochs": 2, "density": 0.2}  # 19 steps, updates at 2, 4, 6, 8


def gradual(words: str = "gradual every=2", density: float = 0.2, epochs: float = 2, **how: object) -> Target:
    (target,) = run_of(RECIPE, words, epochs, [density], iterative=False, **how).targets(1)
    return target


# When the mask is updated


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        (Gradual(end=1.0, every=25), 100, [25, 50, 75]),  # a step is left after the last
        (Gradual(begin=0.5, end=1.0, every=10), 101, [60, 70, 80, 90, 100]),
        (Gradual(), 40, list(range(1, 21))),
        (Gradual(), 2, [1]),
        (Gradual(end=0.75), 4, [1, 2, 3]),
    ],
)
def test_updates_lie_between_begin_and_end(options: Gradual, steps: int, expected: list[int]) -> None:
    updates = options.updates(steps, before=1.0, after=0.1)
    assert [update.step for update in updates] == expected
    assert updates[-1].density == pytest.approx(0.1, rel=1e-12)
    assert all(one.density > other.density for one, other in pairwise(updates))


def test_by_default_there_are_a_hundred() -> None:
    updates = Gradual().updates(10_000, before=1.0, after=0.05)
    assert len(updates) == 100
    # Zhu and Gupta's formula, of sparsities
    for number, (step, density) in enumerate(updates, start=1):
        assert step == 50 * number
        assert 1 - density == pytest.approx(0.95 + (0.0 - 0.95) * (1 - number / 100) ** 3)


# As a history


def test_a_level_is_one_node_that_publishes_its_end() -> None:
    targets = [dense(RECIPE, 1), gradual()]
    assert [node.steps for node in plan(targets).nodes] == [19, 19]
    state = targets[1].state
    assert (state.prunings, state.steps, len(state.stages)) == (1, 19, 5)
    assert [stage.parent.steps for stage in state.stages] == [0, 2, 4, 6, 8]
    kept = [stage.parent.kept for stage in state.stages if isinstance(stage.parent, Pruned)]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == Pruner().kept(RECIPE.shapes, 0.2)
    assert targets[1].search_epochs == 2
    line = described(state)[-1]
    assert "train 19 steps: " in line
    assert f"prune on the way to {kept[-1]} weights (0.2) by 4 updates from step 2 to step 8 -> " in line


def test_its_key_is_that_of_the_whole_chain() -> None:
    assert gradual().state.key == "075aa472de7d35d45dc6d32273d98867"
    others = {gradual(*words).state.key for words in [("gradual",), ("gradual every=2", 0.21), ("gradual every=3",)]}
    assert len(others | {gradual().state.key}) == 4
    assert gradual("gradual every=2 end=0.5").state.key == gradual().state.key
    assert gradual(density=1.0).state.key == gradual("lr-rewinding", density=1.0).state.key, "nothing is pruned"


def test_what_another_run_shares_with_it_cuts_it() -> None:
    control, target = gradual("lr-rewinding", density=1.0), gradual()
    nodes = plan([dense(RECIPE, 1), control, target]).nodes
    assert sorted(node.steps for node in nodes) == [2, 17, 17, 19], "the two steps before the first update are shared"
    alone = plan([dense(RECIPE, 1), target]).by_key
    assert target.state.key in alone


def test_iterative_levels_may_each_be_gradual() -> None:
    first, second = run_of(RECIPE, "gradual every=5", 2, [0.5, 0.2], iterative=True).targets(1)
    assert second.state.prunings == 2
    root = second.state.root
    assert isinstance(root, Pruned)
    assert (root.density, root.source.key) == (0.5, first.state.key)


# For real


def by_hand() -> tuple[dict[str, torch.Tensor], Mask]:
    """The same as calls of `train` and a pruner, in a loop as a person would write it."""
    S = RECIPE.schedule
    *_, state = train(RECIPE, begin(RECIPE, 1), lr=S.segments(0, 19))
    mask = Mask.full({name: state.model[name] for name in RECIPE.shapes})
    state = state.clone().pruned(mask, 1, 1)
    for number in range(5):
        if number:
            density = 0.2 + 0.8 * (1 - number / 4) ** 3
            mask = Pruner().prune({name: state.model[name] for name in RECIPE.shapes}, density, mask)
            state = state.pruned(mask, 1, 1, steps=2 * number)
        *_, state = train(RECIPE, state, mask, lr=S.segments(2 * number, 2 * number + 2 if number < 4 else 19))
        state = state.clone()
    return dict(state.model), mask


def test_it_is_a_loop_of_train_and_prune(store: Store) -> None:
    run(sweep_of(GRADUAL), store, keep_all=True)
    key = gradual().state.key
    kept, (model, mask) = store.load(key, to_train=False), by_hand()
    assert kept is not None
    assert kept.mask == mask
    assert all(torch.equal(kept.state.model[name], tensor) for name, tensor in model.items())
    assert len(list(store.root.glob("states/*"))) == 2, "what it passed on the way is not kept"
    result = store.result(key)
    assert result is not None
    assert result["steps"] == 19


@pytest.mark.parametrize("stop", [1, 2, 3, 8, 9])
def test_a_resumed_run_gives_the_same_bits(store: Store, stop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped before, at and after an update of the mask."""
    sweep = sweep_of(GRADUAL, recipe="Watched")
    (target,) = [target for target in sweep.targets if target.technique]
    run(sweep_of({**GRADUAL, "technique": "fine-tuning", "density": 0.9}, recipe="Watched"), store, keep_all=True)

    class Stopped(Exception):
        pass

    def look_at(self: object, state: object, look=rewound.experiments.plans.execution.Job.look_at) -> None:
        look(self, state)
        if self.node.key == target.state.key and state.position.steps >= stop:
            self.keep_draft(state)
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(rewound.experiments.plans.execution, "LOOK", -1.0)  # at every step
        patch.setattr(rewound.experiments.plans.execution.Job, "look_at", look_at)
        with pytest.raises(Stopped):
            local.run(plan(sweep.targets), store, Options(keep_all=True), say=lambda text: None)
    ENTERED.clear()
    run(sweep, store, keep_all=True)
    assert ENTERED[0] == (1, stop), "it goes on from the draft"
    other = Store(store.root.with_name("other"))
    run(sweep, other, keep_all=True)
    one, two = (each.load(target.state.key, to_train=False) for each in (store, other))
    assert one is not None
    assert two is not None
    assert one.mask == two.mask
    assert all(torch.equal(tensor, two.state.model[name]) for name, tensor in one.state.model.items())


def test_a_parent_that_was_dropped_is_made_again_without_its_stages(store: Store) -> None:
    levels = {"technique": "gradual every=5", "retrain-epochs": 2, "levels": {"keep": 0.5, "count": 2}}
    sweep = sweep_of(levels)
    run(sweep, store, keep_all=True)
    first, second = (target.state.key for target in sweep.targets if target.technique)
    before = store.load(second, to_train=False)
    for key in (first, second):
        store.drop(key, even_if_for_good=True)
    store.forget(second)
    run(sweep, store, keep_all=True)
    after = store.load(second, to_train=False)
    assert before is not None
    assert after is not None
    assert all(torch.equal(tensor, after.state.model[name]) for name, tensor in before.state.model.items())


def test_random_scores_are_drawn_anew_at_each_update(store: Store) -> None:
    run(sweep_of({**GRADUAL, "pruner": {"score": "random", "scope": "layer"}}), store, keep_all=True)
    key = gradual(pruner=Pruner(score="random", scope="layer")).state.key
    kept = store.load(key, to_train=False)
    assert kept is not None
    assert kept.mask is not None
    for mask in kept.mask.values():
        assert int(mask.sum()) == Pruner().kept({"": tuple(mask.shape)}, 0.2), "of each layer as many"


def test_prune_reaches_the_compression_in_one_level(tmp_path: Path) -> None:
    network = prune(RECIPE, technique="gradual", compression=5, retrain_epochs=2, store=tmp_path, say=lambda text: None)
    assert [level.level for level in network.levels] == [0, 1]
    assert network.levels[1].compression == pytest.approx(5, rel=0.01)
    assert network.levels[1].search_epochs == 2
    with pytest.raises(InputError, match=r"rate 0\.5 is how much each level prunes, and gradual pruning has one level"):
        prune(RECIPE, technique="gradual", compression=5, rate=0.5, store=tmp_path, say=lambda text: None)


# Words


def test_options_follow_the_name() -> None:
    assert technique_named("gradual begin=0.1 end=0.6 every=7").gradual == Gradual(0.1, 0.6, 7)
    assert technique_label("gradual every=7 begin=0.1 end=0.6") == "gradual begin=0.1 end=0.6 every=7"
    targets = sweep_of({**GRADUAL, "technique": ["gradual", "gradual end=0.5", "gradual end=0.75"]}).targets
    assert [target.technique for target in targets] == ["", "gradual", "gradual end=0.75"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "gradual until=0.5",
            "option 'until=0.5' of technique gradual is not known; give begin, end, every",
        ),
        ("gradual end", "end of technique gradual must be a number, not ''"),
        ("gradual every=1.5", "every of technique gradual must be a whole number, not '1.5'"),
        (
            "gradual end=1.5",
            "begins at begin=0 and ends at end=1.5 of the retraining time; give fractions",
        ),
        ("gradual begin=0.8", "give fractions with 0 <= begin < end <= 1"),
        ("gradual end=nan", "end"),
        ("gradual every=-1", "every is the number of steps between two updates of the mask, at least 1, not -1"),
        ("lr-rewinding end=0.5", "technique lr-rewinding has no options, but is given end=0.5; leave them out"),
        (
            "gradual every=500",
            "updates the mask after every=500 steps, but only 9 of 19 steps lie between",
        ),
        ("slow end=0.5", "unknown technique 'slow'"),
    ],
)
def test_options_that_cannot_be(words: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        gradual(words)
    assert message in str(caught.value)


def test_a_rule_cannot_be_gradual() -> None:
    with pytest.raises(InputError, match="a gradual technique's lr is final, rewound or restarted"):
        Technique(weights="final", lr=rule, gradual=Gradual())


def rule(S: object, T: int, t: int, facts: object) -> object:
    return S
