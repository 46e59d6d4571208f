"""Sweeps that are not in the TOML contract: one clear sentence for each."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from declared_sweeps import WHOLE, swept, with_lines
from rewound.experiments.sweeps.sweep import load_sweep
from rewound.foundations.errors import InputError
from rewound.method.schedule import Schedule
from rewound.tasks.recipes.digits import Digits


@dataclass(frozen=True)
class EndsAtZero(Digits):
    @property
    def schedule(self) -> Schedule:
        return Schedule.cosine(150, 0.1)


@dataclass(frozen=True)
class Unchecked(Digits):
    """Its own time, which it does not look at."""

    time: float = 2.0

    @property
    def schedule(self) -> Schedule:
        return Schedule.constant(int(self.time * 9), 0.1)


BAD = {
    "unknown recipe": (with_lines(recipe='"digit"'), "unknown recipe 'digit'; did you mean 'digits'?"),
    "recipe far from all": (with_lines(recipe='"zebra"'), "unknown recipe 'zebra' (known: cifar10-resnet110, "),
    "recipe not importable": (with_lines(recipe='"no.such:Task"'), "cannot import recipe 'no.such:Task'"),
    "recipe not in its module": (with_lines(recipe='"rewound.tasks.recipes.digits:Digit"'), "has no attribute 'Digit'"),
    "recipe that is none": (
        with_lines(recipe='"rewound.method.schedule:Schedule"'),
        "is not a subclass of rewound.Recipe",
    ),
    "recipe missing": (with_lines(recipe=""), "the key recipe is missing; give it, for example recipe = "),
    "recipe of another type": (with_lines(recipe="3"), "recipe must be a text, or in Python a Recipe, not 3"),
    "unknown field": (with_lines(field_epoch="3"), "unknown field of digits 'epoch'; did you mean 'epochs'"),
    "no value of a field": (with_lines(field_epochs="[]"), "epochs is an empty list"),
    "an axis with a value of another type": (with_lines(field_epochs='[4, "long"]'), "digits.epochs must be"),
    "field of another type": (with_lines(field_epochs='"long"'), "digits.epochs must be"),
    "field with an item of another type": (with_lines(field_widths='[4, "8"]'), "digits.widths must be"),
    "boolean for a number": (with_lines(field_epochs="true"), "digits.epochs must be"),
    "negative width": (with_lines(field_widths="[4, -3]"), "each of widths must be at least 1, not [4, -3]"),
    "no epochs": (with_lines(field_epochs="0.0"), "epochs must be above 0, not 0"),
    "no epochs of a recipe of one's own": (
        with_lines(recipe='"test_sweep_refused:Unchecked"', field_time="0"),
        "cannot train test_sweep_refused:Unchecked time=0: a schedule needs at least one step, not 0; train",
    ),
    "endless epochs": (with_lines(field_epochs="inf"), "epochs must be"),
    "fields not a table": (with_lines(top="1\nrecipe-fields = 3").replace("top = 1\n", ""), "must be a table, not 3"),
    "unknown technique": (
        with_lines(technique='["lr-rewind"]'),
        "unknown technique 'lr-rewind'; did you mean 'lr-rewinding'",
    ),
    "technique of another type": (with_lines(technique="5"), "technique must be a text, not 5"),
    "technique that is none": (
        with_lines(technique='"rewound.method.pruner:Pruner"'),
        "is a type, not a Technique",
    ),
    "no technique": (with_lines(technique="[]"), "technique is an empty list"),
    "technique missing": (with_lines(technique=""), "the key technique is missing; give it, for example"),
    "unknown key": (
        with_lines(top="1").replace("top = 1", "trails = [1]"),
        "unknown key 'trails'; did you mean 'trials'?",
    ),
    "unknown key of an experiment": (
        with_lines(retrain_epoch="3"),
        "unknown key of [[experiment]] 'retrain-epoch'; did you mean 'retrain-epochs'?",
    ),
    "sparsity": (with_lines(density="", sparsity="[0.95, 0.9]"), "for 95% sparsity write density = 0.05"),
    "sparsity in percent": (with_lines(density="", sparsity="80"), "for 80% sparsity write density = 0.2"),
    "compression": (
        with_lines(density="", compression="20"),
        "write density = 0.05 (one-shot) or levels = { compression = 20 } (iterative)",
    ),
    "sparsity of levels": (with_lines(levels="{ sparsity = 0.75 }"), "for 75% sparsity write compression = 4"),
    "density of levels": (with_lines(levels="{ density = 0.05 }"), "for 95% sparsity write compression = 20"),
    "unknown key of levels": (with_lines(levels="{ keeps = 0.5, count = 1 }"), "'keeps'; did you mean 'keep'?"),
    "unknown key of pruner": (with_lines(pruner='{ scores = "random" }'), "'scores'; did you mean 'score'"),
    "unknown score": (with_lines(pruner='{ score = "magnitudes" }'), "did you mean 'magnitude'?"),
    "a scope that is none": (
        with_lines(pruner='{ scope = "os:system" }'),
        r"scope 'os:system' must be a Python function",
    ),
    "a score that is none": (
        with_lines(pruner='{ score = "os:system" }'),
        r"score 'os:system' must be a Python function",
    ),
    "a pattern that is none": (with_lines(pruner='{ pattern = "os:system" }'), "must be a Python function"),
    "unknown scope": (with_lines(pruner='{ scope = "globally" }'), "did you mean 'global'?"),
    "pruner not a table": (with_lines(pruner='"magnitude"'), "pruner is a table such as"),
    "floor of another type": (with_lines(pruner='{ floor = "low" }'), "floor of pruner must be"),
    "floor of 1": (with_lines(pruner="{ floor = 1.0 }"), "floor must be at least 0 and below 1, not 1"),
    "floor above the density": (with_lines(pruner="{ floor = 0.6 }"), "but density 0.5 only 28,160; lower floor"),
    "one pattern": (with_lines(pruner='{ only = "0.*" }'), 'only of pruner is a list; write only = ["0.*"]'),
    "score of another type": (with_lines(pruner="{ score = 1 }"), "score of pruner must be"),
    "a pruner that selects nothing": (
        with_lines(pruner='{ only = ["nothing.*"] }'),
        "only 'nothing.*' matches no parameter of the model; it has stem.weight, stage1.block1.proj.weight, "
        "stage1.block1.conv1.weight, stage1.block1.conv2.weight, stage2.block1.proj.weight and 18 more",
    ),
    "density of 0": (with_lines(density="0.0"), "density must be above 0 and at most 1, not 0"),
    "density above 1": (with_lines(density="[0.5, 20]"), "density must be above 0 and at most 1, not 20"),
    "negative density": (with_lines(density="-0.1"), "not -0.1"),
    "density that is no number": (with_lines(density="nan"), "density must be"),
    "density of another type": (with_lines(density='"half"'), "density must be a number, not 'half'"),
    "no density": (with_lines(density="[]"), "density is an empty list"),
    "boolean density": (with_lines(density="true"), "density must be a number, not True"),
    "levels that grow": (with_lines(levels="{ keep = 1.25, count = 3 }"), "keep must be between 0 and 1, not 1.25"),
    "levels that stay": (with_lines(levels="{ keep = 1, count = 3 }"), "keep must be between 0 and 1, not 1"),
    "no levels": (with_lines(levels="{ keep = 0.8, count = 0 }"), "count must be from 1 to 100,000 levels, not 0"),
    "levels without end": (
        with_lines(levels="{ keep = 0.9, count = 1_000_000_000 }"),
        "count must be from 1 to 100,000 levels, not 1000000000",
    ),
    "levels without end by their compression": (
        with_lines(levels="{ keep = 0.999999, compression = 10 }"),
        "compression 10 takes more than 100,000 levels that keep 0.999999 each; keep less",
    ),
    "levels without an end": (with_lines(levels="{ keep = 0.8 }"), "levels has either count or compression"),
    "levels with two ends": (with_lines(levels="{ count = 3, compression = 2 }"), "either count or compression"),
    "compression of 1": (with_lines(levels="{ compression = 1 }"), "compression must be above 1, not 1"),
    "levels as a list": (with_lines(levels="[0.5, 0.25]"), "levels is a table such as { keep = 0.8, count = 10 }"),
    "levels that meet": (
        with_lines(levels="[{ keep = 0.5, count = 2 }, { keep = 0.25, count = 1 }]"),
        "two runs of fine-tuning reach density 0.25 in different ways, and would share a row of the tables",
    ),
    "rates that meet": (
        with_lines(levels="{ keep = [0.8, 0.5], compression = 10 }"),
        "two runs of fine-tuning reach density 0.1 in different ways, and would share a row of the tables; declare",
    ),
    "no keep": (with_lines(levels="{ keep = [], count = 1 }"), "keep is an empty list"),
    "no score": (with_lines(pruner="{ score = [] }"), "score is an empty list"),
    "lists of scores": (with_lines(pruner='{ score = [["random"]] }'), "score of pruner must be like 'magnitude', not"),
    "a pattern among lists": (
        with_lines(pruner='{ only = [["stem.*"], "dense.*"] }'),
        'only of pruner is a list; write only = ["dense.*"]',
    ),
    "an axis of levels with a wrong value": (
        with_lines(levels="{ count = [1, 0] }"),
        "count must be from 1 to 100,000 levels, not 0",
    ),
    "half a level": (with_lines(levels="{ count = 1.5 }"), "count must be a whole number, not 1.5"),
    "density and levels": (with_lines(density="0.5", levels="{ count = 1 }"), "either density (one-shot) or levels"),
    "neither density nor levels": (with_lines(density=""), "either density (one-shot) or levels"),
    "no retraining": (with_lines(retrain_epochs="0"), "retraining time must be above 0, not 0"),
    "negative retraining": (with_lines(retrain_epochs="-3"), "retraining time must be above 0, not -3"),
    "less than a step of retraining": (
        with_lines(retrain_epochs="0.001"),
        "retraining time 0.001 is less than one step of digits, which has 9.344 per epoch; give at least 0.107",
    ),
    "endless retraining": (with_lines(retrain_epochs="inf"), "retrain-epochs must be"),
    "retraining time that is no number": (with_lines(retrain_epochs="nan"), "must be"),
    "retraining time of another type": (with_lines(retrain_epochs='"long"'), "must be a number, not 'long'"),
    "no retraining time": (with_lines(retrain_epochs="[]"), "retrain-epochs is an empty list"),
    "rewinding too far": (
        with_lines(technique='"lr-rewinding"', retrain_epochs="[4, 17]"),
        "cannot rewind 17 epochs: digits trains for 16; use at most 16, or technique fine-tuning",
    ),
    "rewinding weights too far": (with_lines(technique='"weight-rewinding"', retrain_epochs="16.5"), "cannot rewind"),
    "schedule of another length": (
        with_lines(recipe='"test_sweep_refused:Unchecked"'),
        "the schedule of test_sweep_refused:Unchecked has 18 steps, but its 16 epochs of 9.34375 steps are 150; make",
    ),
    "rate beyond all floats": (with_lines(field_learning_rate="1e308"), "learning-rate must be at most 3.403e+38"),
    "nesterov without momentum": (with_lines(field_momentum="0.0"), "nesterov needs a momentum above 0, not 0"),
    "more epochs than can be counted": (with_lines(field_epochs="1e308"), "epochs = 1e+308 is more than can be"),
    "more retraining than can be counted": (with_lines(retrain_epochs="1e308"), "1e+308 epochs are more than can be"),
    "fine-tuning at no rate": (
        with_lines(recipe='"test_sweep_refused:EndsAtZero"'),
        "fine-tuning: this schedule ends at 1.09658e-05, too low to retrain at (peak 0.1); "
        "declare what holds after its end, for example final=0.001 in the schedule of test_sweep_refused:EndsAtZero",
    ),
    "no trials": (with_lines(trials="[]"), "trials is an empty list"),
    "trials missing": (with_lines(trials=""), "the key trials is missing; give it, for example trials = [1, 2, 3]"),
    "trials as a flag": (with_lines(trials="true"), "a trial must be a whole number, not True"),
    "trials as a number": (with_lines(trials="3"), "trials is a list, not 3: [3] is one trial, [1, 2, 3] are three"),
    "too large a trial": (with_lines(trials=f"[{'9' * 19}]"), "a trial is a seed from 0 to 9223372036854775807, not 9"),
    "negative trial": (with_lines(trials="[-1]"), "not -1"),
    "half a trial": (with_lines(trials="[1.5]"), "a trial must be a whole number, not 1.5"),
    "trial of another type": (with_lines(trials='["one"]'), "a trial must be a whole number, not 'one'"),
    "trials of an experiment that the sweep has not": (WHOLE.replace("levels", "trials = [3]\nlevels"), "not 3"),
    "unknown randomness": (with_lines(randomness='"some"'), 'randomness is "shared" or "independent", not \'some\''),
    "one bracket": (with_lines().replace("[[experiment]]", "[experiment]"), "with two brackets"),
    "experiments as a text": (with_lines(top='"x"').replace("top", "experiment").split("[[")[0], "two brackets"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(case: str) -> None:
    text, says = BAD[case]
    with pytest.raises(InputError) as caught:
        swept(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"recipe = ", "bad.toml is not TOML"),
        (b'{ "json": true }', "bad.toml is not TOML"),
        (b'recipe = "digits"', "sweep bad: the key trials is missing; give it, for example trials"),
        (b"\xff\xfe\x00", "cannot read sweep .*bad.toml: it is not text"),
    ],
)
def test_what_is_no_sweep_is_told_with_its_file(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=says):
        load_sweep(str(path))


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read sweep .*absent.toml: No such file or directory"):
        load_sweep(str(tmp_path / "absent.toml"))
    with pytest.raises(InputError, match="unknown sweep 'digit'; did you mean 'digits'"):
        load_sweep("digit")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(InputError, match=r"cannot read sweep .*folder.toml: Is a directory"):
        load_sweep(str(tmp_path / "folder.toml"))
