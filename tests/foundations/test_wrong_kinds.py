"""A wrong kind of thing given to a public function is told in one sentence, by its name and with the remedy."""

import inspect
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler

import rewound
from rewound import TECHNIQUES, InputError, Mask, Pruner
from tiny import Tiny

FUNCTIONS = [name for name in rewound.__all__ if inspect.isfunction(getattr(rewound, name))]
NET = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
MASK = Pruner()(NET, 0.5)
LR = TECHNIQUES["lr-rewinding"]


def called(name: str, given: object) -> None:
    """Call a public function with one thing for all that it needs."""
    function = getattr(rewound, name)
    needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    words = {p.name: given for p in needed if p.kind is p.KEYWORD_ONLY}
    made = function(*[given] * (len(needed) - len(words)), **words)
    if isinstance(made, Generator):
        list(made)


@pytest.mark.parametrize("given", [None, object()], ids=["None", "object"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_tells_what_is_of_a_wrong_kind(name: str, given: object) -> None:
    with pytest.raises(InputError) as error:
        called(name, given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("word", ["sparsity", "density"])
@pytest.mark.parametrize(
    "name", [name for name in FUNCTIONS if "compression" in inspect.signature(getattr(rewound, name)).parameters]
)
def test_every_function_that_prunes_to_a_compression_knows_the_other_words_for_it(name: str, word: str) -> None:
    if name != "densities":  # gives densities for a compression, as its name says
        with pytest.raises(InputError, match=f"^{name} has no {word}; for .* give compression=2$"):
            getattr(rewound, name)(**{word: 0.5})


def epochs(scheduler: object = None, **options: object) -> object:
    return rewound.epochs(2, NET, SGD(NET.parameters(), lr=0.1), scheduler, **options)  # type: ignore[arg-type]


def trained(mask: object = None, lr: object = ()) -> object:
    return list(rewound.train(Tiny(), rewound.begin(Tiny(), 1), mask, lr=lr))  # type: ignore[arg-type]


# mypy would find each of them; who runs a notebook reads the sentence.
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "a sparsity": (lambda: epochs(sparsity=0.9), "epochs has no sparsity; for 90% sparsity give compression=10"),
    "a sparsity in percent": (
        lambda: epochs(sparsity=75),
        "epochs has no sparsity; for 75% sparsity give compression=4",
    ),
    "a density": (lambda: epochs(density=0.05), "epochs has no density; for density 0.05 give compression=20"),
    "a sparsity in words": (
        lambda: epochs(sparsity="high"),
        "epochs has no sparsity; for 90% sparsity give compression=",
    ),
    "a sparsity to prune to": (
        lambda: rewound.prune("digits", sparsity=0.8),  # type: ignore[call-arg]
        "prune has no sparsity; for 80% sparsity give compression=5",
    ),
    "a rate for one shot": (
        lambda: epochs(one_shot=True, rate=0.5),
        "rate 0.5 is how much each level prunes, and one-shot pruning has one level, which prunes all that compression",
    ),
    "a pruner by its score": (
        lambda: epochs(pruner="magnitude"),
        "pruner must be of type Pruner, not 'magnitude'; give a rewound.Pruner, as Pruner(score=\"magnitude\")",
    ),
    "the class of a pruner": (lambda: epochs(pruner=Pruner), "pruner must be of type Pruner, not the class Pruner; "),
    "a folder by a number": (lambda: epochs(checkpoint=3), "checkpoint must be a path, not 3"),
    "a scheduler by its name": (lambda: epochs("cosine"), "'cosine' has no state to be saved; give schedulers, "),
    "the class of a scheduler": (lambda: epochs(lr_scheduler.StepLR), "the class StepLR has no state to be saved; "),
    "one thing for several": (
        lambda: epochs(also=nn.Linear(2, 2)),
        "also must be of type list or tuple, not Linear(in_",
    ),
    "nothing to speak with": (lambda: epochs(say=None), "say must be a function of a text, not None; for silence "),
    "a seed for an initialization": (lambda: epochs(init=3), "init must be a function that draws fresh weights "),
    "a word for a switch": (lambda: epochs(one_shot="yes"), "one_shot must be of type bool, not 'yes'; give True or "),
    "a number for a switch": (lambda: epochs(resume=0), "resume must be of type bool, not 0; give True or False"),
    "steps in quotes": (
        lambda: rewound.Schedule.linear("4", 1, 0),  # type: ignore[arg-type]
        "steps must be a whole number, not '4'; leave out the quotes",
    ),
    "a rate in quotes": (
        lambda: rewound.Schedule.cosine(4, "0.1"),  # type: ignore[arg-type]
        "a learning rate must be a number, not '0.1'; leave out the quotes",
    ),
    "one rate for several": (
        lambda: rewound.Schedule.piecewise(4, 0.1, []),  # type: ignore[arg-type]
        "rates must be of type Sequence, not 0.1; give a list, as [0.1, 0.01]",
    ),
    "epochs and model swapped": (
        lambda: rewound.epochs(NET, 2, SGD(NET.parameters())),  # type: ignore[arg-type]
        "training_epochs must be a whole number, not Sequential; the order is epochs(training_epochs, model, ",
    ),
    "a model for a recipe": (
        lambda: rewound.prune(NET),  # type: ignore[arg-type]
        "recipe must be of type Recipe, not Sequential; give one, as Digits(), or a model of your own to ",
    ),
    "the class of a recipe": (
        lambda: rewound.prune(Tiny),  # type: ignore[arg-type]
        "recipe must be of type Recipe, not the class Tiny; ",
    ),
    "the name of a recipe": (
        lambda: rewound.begin("digits", 1),  # type: ignore[arg-type]
        "recipe must be of type Recipe, not 'digits'; ",
    ),
    "a recipe pruned by a score": (
        lambda: rewound.prune(Tiny(), pruner="random"),  # type: ignore[arg-type]
        "pruner must be of type Pruner, not 'random'; ",
    ),
    "half a seed": (
        lambda: rewound.prune(Tiny(), seed=0.5),  # type: ignore[arg-type]
        "seed must be a whole number, not 0.5",
    ),
    "no store": (lambda: rewound.prune(Tiny(), store=None), "store must be a path, not None"),  # type: ignore[arg-type]
    "a store by its URL": (
        lambda: rewound.prune(Tiny(), store="file:///x"),
        "store must be a path or a URL (s3://, az://, gs://), not 'file:///x'; mount it and give its path",
    ),
    "a folder by its URL": (
        lambda: epochs(checkpoint=Path("s3://b/run")),
        "checkpoint must be a path, not the URL s3://b/run; ",
    ),
    "no device": (
        lambda: rewound.prune(Tiny(), device=None),  # type: ignore[arg-type]
        "unknown device None; use cpu or cuda",
    ),
    "masks in a dict": (lambda: trained(mask={"w": 1}), "mask must be of type Mask or NoneType, not {'w': 1}; make"),
    "one learning rate": (lambda: trained(lr=0.1), "lr must be of type Sequence, not 0.1; give segments, as recipe.s"),
    "a schedule": (lambda: trained(lr=Tiny().schedule), "lr must be of type Sequence, not Schedule; give segments, "),
    "a model for a state": (
        lambda: rewound.evaluate(Tiny(), NET),  # type: ignore[arg-type]
        "state must be of type State, not Sequential; give what rewound.begin or rewound.train made",
    ),
    "mask and path swapped": (
        lambda: rewound.save(NET, "ticket", MASK),  # type: ignore[arg-type]
        "mask must be of type Mask, not 'ticket'; the order is rewound.save(model, mask, path)",
    ),
    "parameters for a model": (
        lambda: rewound.save(NET.parameters(), MASK, "ticket"),  # type: ignore[arg-type]
        "model must be of type Module or Mapping, not generator; give the model itself, or its state_dict",
    ),
    "an empty path": (lambda: rewound.save(NET, MASK, ""), "ticket must be a path, not ''"),
    "an empty folder name": (lambda: epochs(checkpoint=""), "checkpoint must be a path, not ''"),
    "no file": (lambda: rewound.load(None), "ticket must be a path, not None"),  # type: ignore[arg-type]
    "a density for a mask": (
        lambda: Pruner()(NET, 0.5, 0.8),  # type: ignore[arg-type]
        "mask must be of type Mask, not 0.8; give what a Pruner made before, or a rewound.Mask of it",
    ),
    "layers for names": (
        lambda: Pruner(skip=(nn.Linear,)),  # type: ignore[arg-type]
        "each of skip must be of type str, not the class Linear; give patterns of parameters' names, ",
    ),
    "no names": (lambda: Pruner(only=3), "each of only must be of type str, not 3; "),  # type: ignore[arg-type]
    "no floor": (lambda: Pruner(floor=None), "floor must be a number, not None"),  # type: ignore[arg-type]
    "a tensor for a mask": (
        lambda: Mask(torch.ones(2, 2) > 0),  # type: ignore[arg-type]
        "a mask must be of type Mapping, not Tensor; give boolean tensors by the names of parameters",
    ),
    "a list for a tensor": (
        lambda: Mask({"weight": [True]}),  # type: ignore[dict-item]
        "the mask of 'weight' must be a tensor of bool, not [True]",
    ),
    "model and optimizer swapped": (
        lambda: MASK.attached(SGD(NET.parameters()), NET),  # type: ignore[arg-type]
        "model must be of type Module, not SGD; give the model itself",
    ),
    "a shape for an example": (
        lambda: rewound.profile(NET, (1, 4)),  # type: ignore[arg-type]
        "example must be what the model takes, a tensor or a tuple of them, not (1, 4)",
    ),
    "a technique by its name": (
        lambda: list(rewound.levels("lr-rewinding", 2, 2, [0.5])),  # type: ignore[arg-type]
        "technique must be of type Technique, not 'lr-rewinding'; give the technique itself, as rewound.TECHNIQUES[",
    ),
    "nothing to compare with": (
        lambda: rewound.report("digits", compare=None),  # type: ignore[arg-type]
        "compare must be of type str or Path or list or tuple, not None; give the path of a table, or leave it out",
    ),
    "a number of formats": (
        lambda: rewound.report("digits", formats=5),  # type: ignore[arg-type]
        "formats must be of type str or list or tuple, not 5; give those of png, svg and pdf that are wanted",
    ),
    "no backend": (
        lambda: rewound.bench(NET, torch.ones(1, 4), backend=None),  # type: ignore[arg-type]
        "backend must be of type str or list or tuple, not None; name those of eager, compiled, onnx that are wanted",
    ),
    "the name of a mask": (
        lambda: rewound.profile(NET, torch.ones(1, 4)).total("mask"),  # type: ignore[arg-type]
        "mask must be of type Mapping, not 'mask'; give the rewound.Mask of that model, or leave it out",
    ),
    "no pattern": (
        lambda: Pruner(pattern=None),  # type: ignore[arg-type]
        "a pattern is given by its name, not as None (known: 2:4, block 4x4, filter, unit, weight)",
    ),
    "a number of batches": (
        lambda: Pruner(score="taylor")(NET, 0.5, batches=5, loss=lambda model, batch: model(batch)),  # type: ignore
        "batches must be of type Iterable, not 5; give a list of batches",
    ),
    "the name of a loss": (
        lambda: Pruner(score="taylor")(NET, 0.5, batches=[torch.ones(1, 4)], loss="mse"),  # type: ignore[arg-type]
        "loss must be a function of the model and a batch, not 'mse'",
    ),
    "a word for a direction": (
        lambda: rewound.epochs(2, NET, SGD(NET.parameters()), compression=2).report(0.5, higher_is_better="no"),  # type: ignore
        "higher_is_better must be of type bool, not 'no'; give True or False",
    ),
    "a list for a metric": (
        lambda: rewound.epochs(2, NET, SGD(NET.parameters()), compression=2).report(0.5, metric=["f1"]),  # type: ignore
        "metric must be of type str, not ['f1']; give its name",
    ),
    "a number for a table": (
        lambda: rewound.report(results=5),  # type: ignore[arg-type]
        "a table must be a path, not 5",
    ),
    "a number among tables": (
        lambda: rewound.report("digits", compare=[5]),  # type: ignore[list-item]
        "a table must be a path, not 5",
    ),
    "a list of trackers": (
        lambda: rewound.report("digits", to=["mlflow"]),  # type: ignore[arg-type]
        "a place for results is given by its name, not as ['mlflow'] (known: mlflow, tensorboard)",
    ),
    "the names of fields": (
        lambda: rewound.bench("digits", fields=["epochs"]),  # type: ignore[arg-type]
        "fields must be of type Mapping, not ['epochs']; give values by the names of fields, as {'epochs': 8}",
    ),
    "no retraining time": (
        lambda: list(rewound.levels(LR, None, 2, [0.5])),  # type: ignore[arg-type]
        "retraining time must be a number, not None",
    ),
    "one density for several": (
        lambda: list(rewound.levels(LR, 2, 2, 0.5)),  # type: ignore[arg-type]
        "densities must be of type Sequence, not 0.5; give a list, as [0.8, 0.64]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_easily_mistaken_for_another_thing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.chdir(tmp_path)
    call, says = WRONG[case]
    with pytest.raises(InputError) as error:
        call()
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


def test_a_sweep_is_also_found_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('recipe = "digits"\ntrials = [1]\n')
    assert rewound.load_sweep(path) == rewound.load_sweep(str(path))


def test_rates_may_be_plain_pairs() -> None:
    (state,) = rewound.train(Tiny(), rewound.begin(Tiny(), 1), lr=[(0.1, 2)])  # type: ignore[list-item]
    assert state.position.steps == 2
