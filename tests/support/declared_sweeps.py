"""Sweeps as a user writes them: a whole one, and a good one with any of its lines changed."""

import tomllib

from rewound.experiments.sweeps.sweep import Sweep, parse_sweep

WHOLE = """
recipe = "digits"
trials = [1, 2]
randomness = "independent"

[recipe-fields]
epochs = 2
widths = [4, 8]
batch-size = 64

[[experiment]]
technique = ["fine-tuning", "lr-rewinding"]
retrain-epochs = [1, 1.5]
density = [0.5, 0.25]

[[experiment]]
technique = "weight-rewinding"
retrain-epochs = 1
levels = { keep = 0.5, count = 3 }
pruner = [{ score = "magnitude", scope = "layer" }, { score = "random", skip = ["dense.*"], floor = 0.01 }]
"""
EXPERIMENT = """
[[experiment]]
technique = "fine-tuning"
retrain-epochs = 4
density = 0.5
"""


def swept(text: str) -> Sweep:
    """Parsed, and its targets made: a sweep is checked before anything runs."""
    sweep = parse_sweep(tomllib.loads(text), "test")
    assert sweep.targets
    return sweep


def with_lines(**lines: str) -> str:
    """A good sweep with some of its values replaced, or lines added."""
    top = {"recipe": '"digits"', "trials": "[1]"}
    experiment = {"technique": '"fine-tuning"', "retrain_epochs": "4", "density": "0.5"}
    fields: dict[str, str] = {}
    for name, value in lines.items():
        if name.startswith("field_"):
            fields[name.removeprefix("field_")] = value
        elif name in ("recipe", "trials", "randomness", "top"):
            top[name] = value
        else:
            experiment[name] = value
    if "levels" in experiment and lines.get("density") is None:
        del experiment["density"]
    said = [f"{name} = {value}" for name, value in top.items() if value]
    if fields:
        said += ["[recipe-fields]", *(f"{name.replace('_', '-')} = {value}" for name, value in fields.items())]
    said += ["[[experiment]]", *(f"{name.replace('_', '-')} = {value}" for name, value in experiment.items() if value)]
    return "\n".join(said)
