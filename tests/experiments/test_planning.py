"""The plan: nothing twice, parents first, every shared prefix shared."""

import pickle
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewound.experiments.plans.planning import Node, Plan, plan
from rewound.experiments.sweeps.sweep import load_sweep, parse_sweep
from rewound.experiments.sweeps.targets import Target, dense, run_of
from rewound.method.pruner import Pruner
from rewound.method.schedule import Schedule, Segment
from rewound.method.technique import TECHNIQUES, Facts, Technique
from rewound.states.history import Pruned, Start, Trained, described, trained
from rewound.tasks.recipes.digits import Digits

DIGITS = Digits()


def nodes_of(work: Plan) -> dict[str, Node]:
    """The nodes by key; fails if one is planned twice, or before what it reads."""
    seen: dict[str, Node] = {}
    for node in work.nodes:
        assert node.key not in seen, "a node is planned twice"
        assert all(key in seen for key in node.needs), "a parent comes after its child"
        seen[node.key] = node
    return seen


def one_shot(technique: str, *times: float, density: float = 0.1, trial: int = 1) -> list[Target]:
    return [target for t in times for target in run_of(DIGITS, technique, t, [density], iterative=False).targets(trial)]


def iterative(technique: str, t: float, count: int, keep: float = 0.5) -> list[Target]:
    densities = [keep**level for level in range(1, count + 1)]
    return list(run_of(DIGITS, technique, t, densities, iterative=True).targets(1))


# The paper's grid


def test_what_shares_nothing_costs_what_it_costs_naively() -> None:
    work = plan(load_sweep("cifar10-resnet56-algorithm1").targets)
    assert work.epochs(dense=False) == pytest.approx(work.naive_epochs)


def test_the_papers_grid_costs_less_than_half_of_its_naive_price() -> None:
    work = plan(load_sweep("cifar10-resnet20-grid").targets)
    assert len(work.targets) == 1 + 5 * 10
    assert work.naive_epochs == pytest.approx(6_780, abs=1e-6)
    assert work.epochs(dense=False) == pytest.approx(3_218, abs=0.5)
    assert work.epochs(dense=True) == pytest.approx(182)
    nodes_of(work)


def test_independent_randomness_shares_nothing_but_the_dense_run() -> None:
    sweep = load_sweep("cifar10-resnet20-grid")
    work = plan(replace(sweep, randomness=("independent",)).targets)
    assert work.naive_epochs == pytest.approx(6_780, abs=1e-6)
    assert work.epochs(dense=False) == pytest.approx(6_780)
    nodes_of(work)


# What is shared, and what follows from it


def test_times_of_one_technique_are_snapshots_of_the_longest() -> None:
    work = plan(one_shot("fine-tuning", 4, 8, 16))
    assert work.epochs(dense=False) == pytest.approx(16)
    nodes = nodes_of(work)
    chain = [node for node in work.nodes if isinstance(node.state.parent, Pruned)]
    assert [node.after and node.after.key for node in chain] == [None, chain[0].key, chain[1].key]
    assert [node.state.steps for node in chain] == [DIGITS.steps_of(t) for t in (4, 8, 16)]
    assert set(chain[0].needs) == {dense(DIGITS, 1).state.key}
    assert nodes[chain[2].key].needs == (chain[1].key,)


def test_reinitialization_runs_are_one() -> None:
    work = plan(one_shot("reinitialization", 4, 8, 16))
    assert work.epochs(dense=False) == pytest.approx(16 + 16)


def test_lr_rewinding_within_the_final_rate_is_fine_tuning() -> None:
    both = plan([*one_shot("fine-tuning", 4), *one_shot("lr-rewinding", 4)])
    assert len(both.targets) == 2
    assert len(both.nodes) == 2, "the dense run and one retraining"


def test_the_dense_run_is_cut_where_weights_are_rewound_to() -> None:
    work = plan([dense(DIGITS, 1), *one_shot("weight-rewinding", 4, 8)])
    T = DIGITS.schedule.steps
    on_the_way = [node for node in work.nodes if isinstance(node.state.parent, Start)]
    assert [node.state.steps for node in on_the_way] == [T - DIGITS.steps_of(8), T - DIGITS.steps_of(4), T]
    assert [node.asked for node in on_the_way] == [False, False, True]
    assert work.epochs(dense=True) == pytest.approx(16), "trained once"
    pruned = next(node for node in work.nodes if isinstance(node.state.parent, Pruned))
    assert len(pruned.needs) == 2, "the rewound weights, and the trained ones for the mask"


def test_levels_are_shared_between_runs_and_with_one_shot() -> None:
    short, long = iterative("lr-rewinding", 8, 3), iterative("lr-rewinding", 8, 5)
    alone, together = plan(long), plan([*short, *long, *one_shot("lr-rewinding", 8, density=0.5)])
    assert {node.key for node in alone.nodes} == {node.key for node in together.nodes}
    nodes_of(together)


def test_all_targets_are_asked_and_readers_are_who_needs() -> None:
    work = plan(load_sweep("digits").targets)
    nodes = nodes_of(work)
    assert {node.key for node in work.nodes if node.asked} == {target.state.key for target in work.targets}
    inverse = Counter((need, node.key) for node in work.nodes for need in node.needs)
    assert inverse == Counter((key, reader) for key, readers in work.readers.items() for reader in readers)
    assert set(work.readers) <= set(nodes)


def test_naive_epochs_count_each_level_once() -> None:
    work = plan([dense(DIGITS, 1), *iterative("weight-rewinding", 8, 3), *one_shot("reinitialization", 4)])
    assert work.naive_epochs == pytest.approx(3 * 8 + 16 + 4)


def test_long_chains_begin_early() -> None:
    work = plan([*one_shot("fine-tuning", 4, density=0.3), *iterative("lr-rewinding", 16, 5)])
    retraining = [node for node in work.nodes if isinstance(node.state.parent, Pruned)]
    assert [node.state.prunings for node in retraining[:4]] == [1, 2, 3, 4], "the five levels of 16 epochs"
    assert [node.state.steps for node in retraining].index(DIGITS.steps_of(4)) >= 4


def test_trials_share_nothing() -> None:
    one, two = plan(one_shot("fine-tuning", 4)), plan(one_shot("fine-tuning", 4, trial=2))
    assert {node.key for node in one.nodes}.isdisjoint(node.key for node in two.nodes)


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_plan_of_one_target_is_that_run(technique: str) -> None:
    work = plan(one_shot(technique, 8))
    target = work.targets[0].state
    assert sum(node.steps for node in work.nodes if isinstance(node.state.parent, Pruned)) == target.steps
    nodes_of(work)


def falling(S: Schedule, T: int, t: int, facts: Facts) -> Schedule:
    return Schedule.linear(t, S.peak)


FALLING = Technique(weights="final", lr=falling)


def test_what_a_rule_draws_is_done_whole_beside_what_is_shared() -> None:
    ruled, shared = one_shot("test_planning:FALLING", 4, 8), one_shot("fine-tuning", 4, 8)
    nodes = nodes_of(plan([*shared, *ruled]))
    assert [nodes[target.state.key].steps for target in ruled] == [DIGITS.steps_of(4), DIGITS.steps_of(8)]
    assert nodes[shared[1].state.key].steps == DIGITS.steps_of(8) - DIGITS.steps_of(4)


def test_an_empty_plan() -> None:
    assert plan([]).nodes == ()
    only_dense = parse_sweep({"recipe": "digits", "trials": [1, 2]}, "dense")
    assert len(plan(only_dense.targets).nodes) == 2


# The tree of learning rates, against brute force

RATES = st.lists(st.builds(Segment, st.sampled_from([0.1, 0.01, 0.001]), st.integers(1, 4)), min_size=1, max_size=5)


def expanded(state: Trained) -> tuple[float, ...]:
    return tuple(rate for rate, steps in state.rates.known for _ in range(steps))


@settings(max_examples=200, deadline=None)
@given(st.lists(RATES, min_size=1, max_size=9))
def test_the_cut_tree_is_the_trie_of_all_sequences(sequences: list[list[Segment]]) -> None:
    asked = [trained(Start(DIGITS, 1), rates) for rates in sequences]
    work = plan([replace(dense(DIGITS, 1), state=state) for state in asked])
    nodes = nodes_of(work)
    trie = {expanded(state)[:length] for state in asked for length in range(1, state.steps + 1)}
    assert sum(node.steps for node in work.nodes) == len(trie), "every step of the trie once"
    assert {state.key for state in asked} == {node.key for node in work.nodes if node.asked}
    for node in work.nodes:
        assert node.steps >= 1
        before = expanded(node.after) if node.after else ()
        assert expanded(node.state)[: len(before)] == before, "it continues what it comes after"
        assert node.steps == node.state.steps - len(before)
        assert node.needs == ((node.after.key,) if node.after else ())
        if not node.asked:
            assert len(work.readers[node.key]) >= 2, "what nobody asked for is a branch point"
    for state in asked:
        steps, node = 0, nodes[state.key]
        while True:
            steps += node.steps
            if node.after is None:
                break
            node = nodes[node.after.key]
        assert steps == state.steps, "reachable from the root"


def test_rows_that_follow_one_schedule_share_its_rates() -> None:
    """A schedule may have a rate for every step: each is kept, hashed and sent to workers once."""
    targets = [*run_of(DIGITS, "lr-rewinding", 1.0, [0.5, 0.25, 0.125], iterative=True).targets(1)]
    assert len({id(target.state.rates) for target in targets}) == 1
    again = pickle.loads(pickle.dumps(plan(targets)))
    assert len({id(target.state.rates) for target in again.targets}) == 1
    assert [node.key for node in again.nodes] == [node.key for node in plan(targets).nodes]


def test_hundreds_of_levels() -> None:
    targets = [dense(DIGITS, 1), *iterative("weight-rewinding", 8, count=600, keep=0.99)]
    work = plan(targets)
    assert len(nodes_of(work)) == 602, "the dense run is cut where the weights are rewound to"
    assert work.nodes[-1].state.prunings == 600
    assert len(described(targets[-1].state)) == 2 * 601
    assert len(pickle.loads(pickle.dumps(work)).nodes) == len(work.nodes), "as workers get it"
    assert len(plan(targets[-1:]).nodes) == len(work.nodes), "whichever are asked for"


def test_a_plan_names_each_way_to_prune_a_recipe_once() -> None:
    targets = [*iterative("lr-rewinding", 4, 3), *one_shot("fine-tuning", 2, 4), dense(DIGITS, 1)]
    other = run_of(DIGITS, "fine-tuning", 2, [0.1], Pruner(score="random"), iterative=False).targets(1)
    assert plan([*targets, *other]).prunings == ((DIGITS, Pruner()), (DIGITS, Pruner(score="random")))
    assert plan([dense(DIGITS, 1)]).prunings == ()
