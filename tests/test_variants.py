"""Fields of a recipe as axes of a sweep: every value is a recipe of its own, with its own dense networks."""

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from command_line import SWEEP, command, environment
from rewound.history import described
from rewound.plans.planning import plan
from rewound.recipes.digits import Digits
from rewound.sweeps.sweep import Sweep, parse_sweep
from rewound.sweeps.variants import told_apart, variants
from rewound.tables.results import read_rows
from tiny import Tiny

EXPERIMENT = {"technique": "lr-rewinding", "retrain-epochs": 1, "density": 0.5}


def sweep_of(**fields: object) -> Sweep:
    given = {name.replace("_", "-"): value for name, value in fields.items()}
    return parse_sweep({"recipe": "digits", "trials": [1], "recipe-fields": given, "experiment": [EXPERIMENT]}, "test")


def test_a_list_is_an_axis() -> None:
    sweep = sweep_of(epochs=2, batch_size=[32, 64], learning_rate=[0.1, 0.2])
    made = [(recipe.batch_size, recipe.learning_rate) for recipe in sweep.recipes if isinstance(recipe, Digits)]
    assert made == [(32, 0.1), (32, 0.2), (64, 0.1), (64, 0.2)]
    tasks = [target.task for target in sweep.targets]
    assert tasks[:2] == ["digits batch-size=32 learning-rate=0.1"] * 2, "a dense run and a pruned one of each"
    assert len(sweep.targets) == 8 == len({target.state.key for target in sweep.targets})
    assert sweep.recipe == Digits(epochs=2.0, batch_size=32, learning_rate=0.1)


def test_a_field_that_is_a_list_has_a_list_of_lists_for_an_axis() -> None:
    assert [target.task for target in sweep_of(widths=[4, 8]).targets] == ["digits"] * 2
    tasks = dict.fromkeys(target.task for target in sweep_of(widths=[[4, 8], [8, 16]]).targets)
    assert list(tasks) == ["digits widths=4,8", "digits widths=8,16"]


def test_the_same_value_twice_is_one_variant() -> None:
    assert [target.task for target in sweep_of(epochs=[2, 2.0]).targets] == ["digits"] * 2


def test_a_variant_is_the_same_work_as_a_recipe_with_that_field() -> None:
    keys = {target.state.key for target in sweep_of(batch_size=[32, 64]).targets}
    assert {target.state.key for target in sweep_of(batch_size=64).targets} <= keys
    assert len(plan(sweep_of(batch_size=[32, 64]).targets).nodes) == 2 * len(
        plan(sweep_of(batch_size=64).targets).nodes
    )


@dataclass(frozen=True)
class Open(Tiny):
    """A field whose default says nothing of its kind."""

    marks: tuple[int, ...] | None = None


def test_a_list_for_a_field_of_any_kind_is_its_value() -> None:
    assert variants(Open, {"marks": [1, 2]}) == (Open(marks=(1, 2)),)
    assert told_apart(variants(Open, {"marks": [1, 2]})) == {Open(marks=(1, 2)): ""}


def test_a_state_tells_the_fields_of_its_recipe() -> None:
    assert described(sweep_of(batch_size=64).targets[0].state)[0] == "start digits batch-size=64 seed 1"


def test_variants_are_reported_on_side_by_side(tmp_path: Path) -> None:
    fields = "[recipe-fields]\nlearning-rate = [0.05, 0.2]\nepochs = 2\n\n[[experiment]]"
    (tmp_path / "rates.toml").write_text(SWEEP.replace("[[experiment]]", fields))
    words = command("run", "rates.toml", "--jobs", "1", "--out", "report")
    said = subprocess.run(words, cwd=tmp_path, env=environment(), check=True, capture_output=True, text=True).stdout
    tasks = ["tiny:Tiny learning-rate=0.05", "tiny:Tiny learning-rate=0.2"]
    assert all(f"{task}, unstructured pruning, one-shot" in " ".join(said.split()) for task in tasks)
    rows = read_rows(tmp_path / "report" / "results.csv")
    assert [sum(row.recipe == task and row.dense for row in rows) for task in tasks] == [1, 1]
    assert (tmp_path / "report" / "tiny-Tiny-learning-rate-0.05-unstructured-best.png").exists()
    found = re.search(r'id="story"[^>]*>(.*?)</script>', (tmp_path / "report" / "index.html").read_text(), re.DOTALL)
    assert found is not None
    assert [subject["recipe"] for subject in json.loads(found[1])["subjects"]] == tasks
    words = command("report", "--results", "report/results.csv", "--out", "again", "--figures", "none")
    subprocess.run(words, cwd=tmp_path, env=environment(), check=True, capture_output=True)
    assert (tmp_path / "again" / "results.csv").read_bytes() == (tmp_path / "report" / "results.csv").read_bytes()
