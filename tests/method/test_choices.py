"""The method's choices are stated once: whoever runs the method takes all of them, by the same names and defaults."""

import inspect
from dataclasses import MISSING, fields

import pytest
import typer

import rewound
from rewound import InputError, Pruner, Schedule
from rewound.cli import app
from rewound.experiments.sweeps.targets import run_of
from rewound.method.choices import HELP, Choices, Chosen
from tiny import Tiny

NAMES = [each.name for each in fields(Choices)]
DEFAULTS = {each.name: each.default for each in fields(Choices)}


def test_as_a_record_and_as_keywords_they_are_the_same() -> None:
    assert list(Chosen.__annotations__) == NAMES
    assert MISSING not in DEFAULTS.values()
    assert HELP.keys() == DEFAULTS.keys()
    assert Choices() == Choices(compression=10, technique="lr-rewinding", rate=0.2, one_shot=False)


@pytest.mark.parametrize("function", [rewound.epochs, rewound.steps, rewound.prune])
def test_functions_take_all_of_them(function: object) -> None:
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in NAMES} == DEFAULTS
    assert not [each for each in parameters.values() if each.kind is inspect.Parameter.VAR_KEYWORD]


def test_the_command_line_takes_all_of_them_and_of_the_pruner() -> None:
    command = typer.main.get_command(app).commands["prune"]
    options = {each.name: each for each in command.params}
    for name, default in DEFAULTS.items():
        if name != "pruner":
            assert (options[name].default, options[name].help) == (default, HELP[name])
    for each in fields(Pruner):
        assert (options[each.name].default or ()) == (each.default or ()), "of the pruner"


@pytest.mark.parametrize("rate", [0.0, 1.0, 1.5, -0.5, float("nan")])
def test_a_rate_is_a_fraction(rate: float) -> None:
    with pytest.raises(InputError, match=f"rate must be between 0 and 1, not {rate:g}: it is the fraction"):
        Choices(rate=rate)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"final": -1.0}, "final must be a learning rate, 0 or above, not -1"),
        ({"max_drop": -0.1}, "max_drop must be at least 0, not -0.1"),
        ({"one_shot": "yes"}, "one_shot must be of type bool, not 'yes'; give True or False"),
        ({"technique": "magic"}, "unknown technique 'magic'"),
        ({"compression": 0.5}, "compression must be above 1, not 0.5"),
        ({"rate": None}, "rate must be a number, not None"),
        ({"pruner": "random"}, "pruner must be of type Pruner, not 'random'"),
        (
            {"slim": True, "pruner": Pruner(pattern="unit"), "technique": "gradual"},
            "slim needs a mask that stays as it is while a network trains, and gradual pruning changes it",
        ),
        ({"slim": True, "pruner": Pruner(pattern="2:4")}, "slim needs whole units to go, and pattern '2:4' does not"),
        ({"slim": 1}, "slim must be of type bool, not 1; give True or False"),
        ({"slim": True}, "a mask of single weights makes no smaller network; use pattern 'unit' or 'filter'"),
    ],
)
def test_what_cannot_be_is_refused(chosen: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Choices(**chosen)
    assert message in str(caught.value)


def test_a_misspelt_one_is_an_error_as_for_any_function() -> None:
    with pytest.raises(TypeError, match=r"prune\(\) got an unexpected keyword argument 'compresion'"):
        rewound.prune("digits", compresion=10)


class Falling(Tiny):
    """Ends too low to fine-tune at."""

    @property
    def schedule(self) -> Schedule:
        return Schedule.cosine(super().schedule.steps, 0.1)


def test_final_holds_after_the_end_of_the_schedule() -> None:
    recipe = Falling()
    with pytest.raises(InputError, match="too low to retrain at"):
        list(run_of(recipe, "fine-tuning", 2, [0.5], iterative=False).targets(1))
    (target,) = run_of(recipe, "fine-tuning", 2, [0.5], iterative=False, final=0.02).targets(1)
    assert [tuple(segment) for segment in target.state.known] == [(0.02, 19)]
    (own,) = run_of(Tiny(), "fine-tuning", 2, [0.5], iterative=False).targets(1)
    (same,) = run_of(Tiny(), "fine-tuning", 2, [0.5], iterative=False, final=Tiny().schedule.final).targets(1)
    assert own.state.key == same.state.key
