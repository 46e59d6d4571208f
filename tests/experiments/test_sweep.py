"""Sweeps: the TOML contract, and the shipped ones."""

from pathlib import Path

import pytest

from command_line import SWEEP, Rewound
from declared_sweeps import EXPERIMENT, WHOLE, swept, with_lines
from rewound.conclusions.paper.figures import pruning_order
from rewound.experiments.plans.planning import plan
from rewound.experiments.sweeps.declaration import shipped_sweeps
from rewound.experiments.sweeps.sweep import load_sweep
from rewound.method.pruner import Pruner
from rewound.method.technique import TECHNIQUES
from rewound.states.history import described
from rewound.tasks.recipes import RECIPES
from rewound.tasks.recipes.cifar10 import ResNet20
from rewound.tasks.recipes.digits import Digits

# The contract


def test_a_whole_sweep() -> None:
    sweep = swept(WHOLE)
    assert sweep.recipe == Digits(epochs=2.0, widths=(4, 8), batch_size=64)
    assert (sweep.trials, sweep.randomness) == ((1, 2), ("independent",))
    one_shot, iterative = sweep.experiments
    assert one_shot.techniques == ("fine-tuning", "lr-rewinding")
    assert one_shot.retrain_epochs == (1.0, 1.5)
    assert one_shot.densities == ((0.5,), (0.25,))
    assert (one_shot.iterative, one_shot.pruners) == (False, (Pruner(),))
    assert iterative.densities == ((0.5, 0.25, 0.125),)
    assert iterative.pruners == (Pruner(scope="layer"), Pruner(score="random", skip=("dense.*",), floor=0.01))
    assert len(sweep.targets) == 2 * (1 + 2 * 2 * 2 + 3 * 2), "every list is an axis of the grid"
    assert [target.technique for target in sweep.targets[:2]] == ["", ""], "dense runs first"


def test_scalars_are_lists_of_one() -> None:
    assert swept(with_lines()).targets == swept(with_lines(density="[0.5]", technique='["fine-tuning"]')).targets


def test_levels_by_compression_end_exactly_there() -> None:
    (experiment,) = swept(with_lines(levels="{ keep = 0.5, compression = 10 }")).experiments
    assert experiment.densities == ((0.5, 0.25, 0.125, 0.1),)
    (experiment,) = swept(with_lines(levels="{ count = 2 }")).experiments
    assert experiment.densities == ((0.8, 0.8**2),), "20% a level unless told otherwise"


def test_several_runs_of_levels() -> None:
    (experiment,) = swept(with_lines(levels="[{ keep = 0.5, count = 1 }, { keep = 0.8, count = 2 }]")).experiments
    assert experiment.densities == ((0.5,), (0.8, 0.8**2))


@pytest.mark.parametrize(
    ("levels", "runs"),
    [
        ("{ keep = 0.5, count = [1, 3] }", [(0.5,), (0.5, 0.25, 0.125)]),
        ("{ keep = [0.5, 0.4], count = [1, 2] }", [(0.5,), (0.5, 0.25), (0.4,), (0.4, 0.4**2)]),
        ("{ keep = 0.5, compression = [2, 3] }", [(0.5,), (0.5, 1 / 3)]),
        ("[{ keep = 0.5, count = [1, 2] }, { keep = [0.3], count = 1 }]", [(0.5,), (0.5, 0.25), (0.3,)]),
    ],
)
def test_lists_in_levels_are_axes(levels: str, runs: list[tuple[float, ...]]) -> None:
    sweep = swept(with_lines(levels=levels))
    assert sweep.experiments[0].densities == tuple(runs)
    assert [target.density for target in sweep.targets[1:]] == list(dict.fromkeys(d for run in runs for d in run))


@pytest.mark.parametrize(
    ("levels", "joined"),
    [
        ("{ keep = 0.5, count = [1, 3] }", False),
        ("{ keep = [0.5, 0.4], count = 2 }", True),
        ("[{ keep = 0.5, count = 1 }, { keep = 0.8, count = 2 }]", True),
    ],
)
def test_levels_of_two_ladders_are_told(levels: str, joined: bool, rewound_command: Rewound) -> None:
    assert bool(swept(with_lines(levels=levels)).joined) == joined
    (ladders := Path("ladders.toml")).write_text(
        SWEEP.replace('["lr-rewinding", "fine-tuning"]', '"lr-rewinding"').replace(
            "density = 0.5", f"levels = {levels}"
        )
    )
    code, out, err = rewound_command("run", ladders, "--jobs", 1, "--out", "report")
    assert (code, err) == (0, "")
    note = "note: the levels of lr-rewinding are more than one ladder of densities, joined into one curve here"
    assert (note in " ".join(out.split())) == joined


def test_lists_in_a_pruner_are_axes() -> None:
    axes = swept(with_lines(pruner='{ score = ["magnitude", "random"], scope = ["global", "layer"], floor = [0.01] }'))
    kinds = ["unstructured", "unstructured layer", "unstructured random", "unstructured random layer"]
    assert [target.pruning for target in axes.targets[1:]] == [f"{kind} floor=0.01" for kind in kinds]
    apart = ", ".join(
        f'{{ score = "{score}", scope = "{scope}", floor = 0.01 }}'
        for score in ("magnitude", "random")
        for scope in ("global", "layer")
    )
    assert axes.targets == swept(with_lines(pruner=f"[{apart}]")).targets, "the same work under the same keys"


def test_lists_of_patterns_are_one_value_and_lists_of_them_an_axis() -> None:
    (experiment,) = swept(with_lines(pruner='{ skip = ["stem.*", "dense.*"], only = [[], ["stage1.*"]] }')).experiments
    skipped = ("stem.*", "dense.*")
    assert experiment.pruners == (Pruner(skip=skipped), Pruner(skip=skipped, only=("stage1.*",)))


def test_the_same_row_asked_for_twice_counts_once() -> None:
    assert len(swept(with_lines(density="[0.5, 0.5]", trials="[1, 1]")).targets) == 2
    assert len(swept(with_lines() + EXPERIMENT).targets) == 2
    assert len(swept(with_lines(density="0.25") + EXPERIMENT).targets) == 3


def test_rows_of_different_pruners_are_told_apart() -> None:
    pruner = '[{}, { score = "random" }, { scope = "layer", skip = ["stem.*", "dense.*"] }]'
    kinds = [target.pruning for target in swept(with_lines(pruner=pruner)).targets[1:]]
    assert kinds == ["unstructured", "unstructured random", "unstructured layer skip=stem.*,dense.*"]
    assert not any(structured for structured, _ in map(pruning_order, kinds)), "single weights, whatever ranks them"
    assert pruning_order("filters")[0]


def test_the_density_1_control_and_more_epochs_than_training_for_fine_tuning() -> None:
    control, longer = swept(with_lines(density="1.0")), swept(with_lines(retrain_epochs="40"))
    assert control.targets[1].density == 1.0
    assert longer.targets[1].state.steps == Digits().steps_of(40)


def test_a_single_step_of_retraining_can_be_asked_for() -> None:
    target = swept(with_lines(retrain_epochs="0.107")).targets[1]
    assert target.state.steps == 1
    assert "train 1 step: " in described(target.state)[-1]


def test_randomness_is_shared_unless_told_otherwise() -> None:
    assert swept(with_lines()).randomness == ("shared",)
    assert swept(with_lines()).targets == swept(with_lines(randomness='"shared"')).targets
    assert swept(with_lines(randomness='"independent"')).randomness == ("independent",)


def test_an_experiment_may_use_some_of_the_trials() -> None:
    sweep = swept(WHOLE.replace('technique = "weight', 'trials = [2]\ntechnique = "weight'))
    assert {t.trial for t in sweep.targets if t.iterative} == {2}
    assert {t.trial for t in sweep.targets if not t.iterative} == {1, 2}


def test_recipes_and_techniques_of_ones_own() -> None:
    sweep = swept(with_lines(recipe='"rewound.tasks.recipes.digits:Digits"', technique='"test_sweep:MINE"'))
    assert sweep.recipe == Digits()
    assert sweep.targets[1].technique == "test_sweep:MINE"
    assert sweep.targets[1].state.key == swept(with_lines()).targets[1].state.key


MINE = TECHNIQUES["fine-tuning"]


def test_a_file_or_a_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(with_lines())
    assert load_sweep(str(path)).name == "mine"
    (tmp_path / "bare").write_text(with_lines())
    monkeypatch.chdir(tmp_path)
    assert load_sweep("bare").name == "bare", "a file needs no suffix"
    assert load_sweep("digits").name == "digits"


# Shipped sweeps


@pytest.mark.parametrize("name", sorted(shipped_sweeps()))
def test_shipped_sweeps_load_and_plan_without_data(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    sweep = load_sweep(name)
    assert sweep.recipe.label() in RECIPES
    assert name.startswith(sweep.recipe.label())
    work = plan(sweep.targets)
    assert {node.key for node in work.nodes} >= {target.state.key for target in sweep.targets}
    assert work.epochs(dense=False) <= work.naive_epochs + 1e-6
    assert list(tmp_path.iterdir()) == []


def test_the_digits_sweep_is_what_the_readme_promises() -> None:
    sweep = load_sweep("digits")
    techniques = {(target.iterative, target.technique) for target in sweep.targets if target.technique}
    assert {technique for iterative, technique in techniques if not iterative} == {
        name for name, technique in TECHNIQUES.items() if not technique.gradual
    }
    assert {t for iterative, t in techniques if iterative} >= {"fine-tuning", "weight-rewinding", "lr-rewinding"}
    assert min(target.density for target in sweep.targets if target.iterative) <= 1 / 20
    assert len(sweep.trials) == 3
    assert any(target.technique and target.density == 1 for target in sweep.targets), "a dense control"


def test_the_papers_grid_is_the_papers() -> None:
    sweep = load_sweep("cifar10-resnet20-oneshot")
    assert isinstance(sweep.recipe, ResNet20)
    assert len(sweep.targets) == 3 * (1 + 5 * 10 * 10)
