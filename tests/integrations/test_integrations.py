"""Whoever runs the algorithm takes the arguments of `rewound.epochs`: same names, order, defaults and kinds."""

from inspect import Parameter, signature

import pytest

import rewound
from rewound.integrations.lightning import Rewind
from rewound.integrations.transformers import rewind

EPOCHS = signature(rewound.epochs).parameters
TRAINERS_OWN = {"training_epochs", "model", "optimizer", "scheduler", "steps_per_epoch", "resume"}


@pytest.mark.parametrize(
    ("integration", "added"), [(rewind, {"trainer", "retrain_steps"}), (Rewind, {"monitor", "mode"})]
)
def test_an_integration_takes_what_epochs_takes_but_what_the_trainer_has(integration: object, added: set[str]) -> None:
    theirs = signature(integration).parameters  # type: ignore[arg-type]
    assert {name for name in theirs if name not in EPOCHS} == added
    given = {name: parameter for name, parameter in theirs.items() if name not in added}
    expected = {name: parameter for name, parameter in EPOCHS.items() if name not in TRAINERS_OWN}
    # A trainer restores the random states it draws from, so that no generators are given to it.
    assert "Generator" in str(expected["also"].annotation)
    expected["also"] = expected["also"].replace(annotation=given["also"].annotation)
    assert list(given.items()) == list(expected.items())
    assert {parameter.kind for parameter in given.values()} == {Parameter.KEYWORD_ONLY}


def test_a_trainer_that_counts_steps_is_given_them_as_steps_is() -> None:
    mine, theirs = (signature(each).parameters["retrain_steps"] for each in (rewind, rewound.steps))
    assert mine == theirs


def test_prune_has_the_defaults_of_epochs() -> None:
    prune = signature(rewound.prune).parameters
    common = [name for name in prune if name in EPOCHS]
    assert set(common) >= {"compression", "technique", "retrain_epochs", "rate", "one_shot", "pruner", "max_drop"}
    assert [prune[name].default for name in common] == [EPOCHS[name].default for name in common]
