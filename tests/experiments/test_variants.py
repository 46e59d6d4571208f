"""Recipes, their fields and randomness as axes of a sweep: each value has a name, and dense networks, of its own."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from command_line import SWEEP, Rewound
from rewound.conclusions.tables import read_rows
from rewound.experiments.plans.planning import plan
from rewound.experiments.sweeps.sweep import Sweep, differing_fields, parse_sweep, variants
from rewound.foundations.errors import InputError
from rewound.states.history import described
from rewound.tasks.recipes.digits import Digits
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
    assert differing_fields(variants(Open, {"marks": [1, 2]})) == {Open(marks=(1, 2)): ""}


def test_several_recipes_in_one_sweep() -> None:
    def declared(recipe: object, **fields: object) -> Sweep:
        table = {"recipe": recipe, "trials": [1], "recipe-fields": fields, "experiment": [EXPERIMENT]}
        return parse_sweep(table, "test")

    both = declared(["digits", "tiny:Tiny"])
    assert [target.task for target in both.targets] == ["digits"] * 2 + ["tiny:Tiny"] * 2
    assert both.targets == (*declared("digits").targets, *declared("tiny:Tiny").targets), "the same work by one name"
    tasks = dict.fromkeys(target.task for target in declared(["digits", "tiny:Tiny"], epochs=[2, 4]).targets)
    assert list(tasks) == ["digits epochs=2", "digits epochs=4", "tiny:Tiny epochs=2", "tiny:Tiny epochs=4"]
    assert declared(["digits", "rewound.tasks.recipes.digits:Digits"]).targets == declared("digits").targets


def test_randomness_is_an_axis() -> None:
    def declared(randomness: object) -> Sweep:
        table = {"recipe": "tiny:Tiny", "trials": [1], "randomness": randomness, "experiment": [EXPERIMENT]}
        return parse_sweep(table, "test")

    shared, independent = declared("shared").targets, declared("independent").targets
    both = declared(["independent", "shared"]).targets
    assert [target.state for target in both] == [target.state for target in (*shared, *independent)]
    assert [target.task for target in both] == [
        *["tiny:Tiny randomness=shared"] * 2,
        *["tiny:Tiny randomness=independent"] * 2,
    ]
    assert declared(["shared"]).targets == shared


@dataclass(frozen=True)
class Namesake(Tiny):
    """Another task, by the name of one that there is."""

    name: ClassVar[str] = "digits"


@dataclass(frozen=True)
class Marked(Tiny):
    marks: tuple[str, ...] = ("a",)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (
            {"recipe": ["digits", "test_variants:Namesake"]},
            "rewound.tasks.recipes.digits:Digits and test_variants:Namesake are both called digits in the tables",
        ),
        (
            {"recipe": "test_variants:Marked", "recipe-fields": {"marks": [["a", "b"], ["a,b"]]}},
            "two dense networks of test_variants:Marked marks=a,b are trained in different ways, and would share a row",
        ),
        ({"recipe": ["digits", 3]}, "recipe must be a text, or in Python a Recipe, not 3"),
        ({"recipe": []}, "recipe is an empty list"),
        ({"recipe": ["digits", "tiny:Tiny", "digit"]}, "unknown recipe 'digit'; did you mean 'digits'"),
        (
            {"recipe": ["digits", "cifar10-resnet20"], "recipe-fields": {"precision": "bfloat16"}},
            "unknown field of digits 'precision' (known: ",
        ),
        ({"recipe": "digits", "randomness": []}, "randomness is an empty list"),
        (
            {"recipe": "digits", "randomness": ["shared", ["x"]]},
            """randomness is "shared" or "independent", not ['x']""",
        ),
    ],
)
def test_what_cannot_be_an_axis_is_one_sentence(table: dict[str, object], says: str) -> None:
    with pytest.raises(InputError) as caught:
        _ = parse_sweep({**table, "trials": [1]}, "test").targets
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_recipes_of_one_sweep_run_and_are_reported_on(rewound_command: Rewound) -> None:
    recipes = 'recipe = ["tiny:Tiny", "tiny:Held"]\nrandomness = ["shared", "independent"]'
    Path("two.toml").write_text(SWEEP.replace('recipe = "tiny:Tiny"', recipes))
    code, out, err = rewound_command("run", "two.toml", "--jobs", 1, "--out", "report")
    assert (code, err) == (0, "")
    rows = read_rows("report/results.csv")
    tasks = [f"tiny:{name} randomness={word}" for name in ("Held", "Tiny") for word in ("independent", "shared")]
    assert list(dict.fromkeys(row.recipe for row in rows)) == tasks
    assert len(rows) == 4 * (1 + 4)
    assert [sum(row.dense for row in rows if row.recipe == task) for task in tasks] == [1] * 4
    assert len({row.key for row in rows if row.dense}) == 2, "both kinds of randomness have the same dense networks"
    assert all(f"{task}, unstructured pruning, one-shot" in " ".join(out.split()) for task in tasks)
    code, out, err = rewound_command("diff", "report/results.csv", "report/results.csv")
    assert (code, err) == (0, "")
    assert all(task in " ".join(out.split()) for task in tasks), "its own table can be read again"


def test_recipes_of_two_metrics_are_reported_each_in_its_own(rewound_command: Rewound) -> None:
    Path("two.toml").write_text(SWEEP.replace('"tiny:Tiny"', '["tiny:Tiny", "tiny:Wrong"]'))
    code, out, err = rewound_command("run", "two.toml", "--jobs", 1, "--out", "report")
    assert (code, err) == (0, "")
    assert "Test accuracy over trials" in out
    assert "Test error over trials" in out
    metrics = {(row.recipe, row.metric, row.direction) for row in read_rows("report/results.csv")}
    assert metrics == {("tiny:Tiny", "accuracy", "higher"), ("tiny:Wrong", "error", "lower")}
    assert {path.stem for path in Path("report").glob("*-best.png")} == {
        f"tiny-{name}-unstructured-best" for name in ("Tiny", "Wrong")
    }


def test_no_store_is_made_if_the_data_of_one_recipe_is_missing(
    rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWOUND_CACHE", "cache")
    Path("two.toml").write_text(SWEEP.replace('"tiny:Tiny"', '["tiny:Tiny", "cifar10-resnet20"]'))
    code, _, err = rewound_command("run", "two.toml", "--jobs", 1)
    assert code == 2
    assert err.startswith("error: no CIFAR-10 in ")
    assert not Path("rewound-store").exists()


def test_a_plan_takes_each_recipe_at_its_own_pace(rewound_command: Rewound) -> None:
    Path("one.toml").write_text(SWEEP)
    Path("two.toml").write_text(SWEEP.replace('"tiny:Tiny"', '["tiny:Tiny", "cifar10-resnet20"]'))
    assert rewound_command("run", "one.toml", "--jobs", 1).code == 0
    out = " ".join(rewound_command("plan", "two.toml", "--jobs", 1).out.split())
    assert re.search(r"about 16 hours with 1 job \(typical for cifar10-resnet20 on cpu\)", out)


def test_a_state_tells_the_fields_of_its_recipe() -> None:
    assert described(sweep_of(batch_size=64).targets[0].state)[0] == "start digits batch-size=64 seed 1"


def test_variants_are_reported_on_side_by_side(tmp_path: Path, rewound_command: Rewound) -> None:
    fields = "[recipe-fields]\nlearning-rate = [0.05, 0.2]\nepochs = 2\n\n[[experiment]]"
    (tmp_path / "rates.toml").write_text(SWEEP.replace("[[experiment]]", fields))
    said = rewound_command("run", "rates.toml", "--jobs", "1", "--out", "report").out
    tasks = ["tiny:Tiny learning-rate=0.05", "tiny:Tiny learning-rate=0.2"]
    assert all(f"{task}, unstructured pruning, one-shot" in " ".join(said.split()) for task in tasks)
    rows = read_rows(tmp_path / "report" / "results.csv")
    assert [sum(row.recipe == task and row.dense for row in rows) for task in tasks] == [1, 1]
    assert (tmp_path / "report" / "tiny-Tiny-learning-rate-0.05-unstructured-best.png").exists()
    found = re.search(r'id="story"[^>]*>(.*?)</script>', (tmp_path / "report" / "index.html").read_text(), re.DOTALL)
    assert found is not None
    assert [subject["recipe"] for subject in json.loads(found[1])["subjects"]] == tasks
    words = ("report", "--results", "report/results.csv", "--out", "again", "--figures", "none")
    assert rewound_command(*words).code == 0
    assert (tmp_path / "again" / "results.csv").read_bytes() == (tmp_path / "report" / "results.csv").read_bytes()
