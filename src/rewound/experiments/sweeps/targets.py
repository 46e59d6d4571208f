"""From one experiment to the states it asks for: `levels` written out as histories.

A target is a row of results.csv to be: its labels (what a person calls it) and its state (what it is).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from rewound.conclusions.tables import UNSTRUCTURED
from rewound.foundations.errors import InputError
from rewound.method.algorithm import Level, check_final, check_time, levels
from rewound.method.choices import check_slim
from rewound.method.pruner import Pruner, as_pruner
from rewound.method.schedule import merged
from rewound.method.technique import Technique, technique_label, technique_named
from rewound.states.history import Given, Past, Pruned, Rates, Ruled, Start, Trained, trained
from rewound.tasks.recipe import Recipe, changed_fields, shapes_to_prune

_ALMOST_ONE = 0.999  # of a step: the error proposes the least time rounded to four digits, and that must do
_PATTERNS = {"weight": UNSTRUCTURED}  # the paper's word; other patterns keep their name


@dataclass(frozen=True, kw_only=True)
class Target:
    """One retrained (or dense) state with the labels of its row."""

    recipe: Recipe
    pruning: str
    iterative: bool
    technique: str
    density: float
    retrain_epochs: float | None
    trial: int
    search_epochs: float
    state: Trained
    variant: str = ""
    """What tells its recipe from others of the sweep, as "width=8", where it has several."""

    @property
    def task(self) -> str:
        """What the `recipe` column says."""
        return f"{self.recipe.label()} {self.variant}".rstrip()


@lru_cache
def kind_of(pruner: Pruner, slim: bool = False) -> str:
    """What the `pruning` column says of a pruner: what is pruned as one, and all that differs from the paper.

    >>> kind_of(Pruner()), kind_of(Pruner(score="random", skip=("stem.*", "dense.*"), floor=0.01))
    ('unstructured', 'unstructured random skip=stem.*,dense.* floor=0.01')
    >>> kind_of(Pruner(preset="structured-b", k=3)), kind_of(Pruner(preset="structured-b", k=3), slim=True)
    ('structured-b', 'structured-b slim')
    """
    last = ["slim"] if slim else []
    if pruner.preset:
        return " ".join([pruner.preset, *last])  # of one preset, densities tell its k
    others = (text for name, text in pruner.words.items() if name != "pattern")
    return " ".join([_PATTERNS.get(pruner.pattern, pruner.pattern), *others, *last])


@lru_cache(maxsize=1024)
def dense(recipe: Recipe, trial: int) -> Target:
    """The dense run of a trial."""
    if not 0 <= trial < 2**63:
        raise InputError(f"a trial is a seed from 0 to {2**63 - 1}, not {trial}")
    try:
        schedule = recipe.schedule
    except InputError as error:
        raise InputError(f"cannot train {' '.join([recipe.label(), *changed_fields(recipe)])}: {error}") from error
    epochs, steps = recipe.training_epochs, recipe.training_epochs * recipe.steps_per_epoch
    if abs(schedule.steps - steps) > recipe.steps_per_epoch:
        raise InputError(
            f"the schedule of {recipe.label()} has {schedule.steps:,} steps, but its {epochs:g} epochs of "
            f"{recipe.steps_per_epoch:g} steps are {steps:,.0f}; make training_epochs and schedule agree"
        )
    state = trained(Start(recipe, trial), _rates(recipe, 0, schedule.steps))
    return Target(
        recipe=recipe,
        pruning=UNSTRUCTURED,
        iterative=False,
        technique="",
        density=1.0,
        retrain_epochs=None,
        trial=trial,
        search_epochs=0.0,
        state=state,
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of the algorithm in any trial: what is checked and counted once, however many trials there are."""

    recipe: Recipe
    technique: str
    """What the tables call it."""
    pruning: str
    iterative: bool
    epochs: float
    pruner: Pruner
    slim: bool
    salt: str
    """Joins the seed of the first level, where techniques are to draw their own randomness."""
    cost: float
    """Epochs of one level."""
    final: float | None
    levels: tuple["_Level", ...]

    def targets(self, trial: int) -> Iterator[Target]:
        """The target of every level, in one trial."""
        original = dense(self.recipe, trial).state
        previous, salt = original, self.salt
        for number, (level, first, kept, weights_at, rates) in enumerate(self.levels, start=1):
            weights = Trained(original.parent, weights_at) if weights_at else _weights(level, original, previous)
            root = Pruned(weights, previous, self.pruner, first, kept, salt, slim=self.slim)
            previous = Trained(root, rates) if rates else _gradual(self.recipe, root, level, self.final)
            salt = ""
            yield Target(
                recipe=self.recipe,
                pruning=self.pruning,
                iterative=self.iterative,
                technique=self.technique,
                density=level.density,
                retrain_epochs=self.epochs,
                trial=trial,
                search_epochs=self.cost * number,
                state=previous,
            )


class _Level(NamedTuple):
    """A level of a run, with what is the same in all trials."""

    level: Level
    first: float
    """The density that it is pruned to before it retrains."""
    kept: int
    """How many weights that density keeps."""
    weights_at: Given | None
    """The rates of the dense run up to where its weights come from; None: they come from elsewhere."""
    rates: Rates | None
    """Those that it retrains at; None: the mask is updated on the way."""


def run_of(
    recipe: Recipe,
    technique: str,
    epochs: float,
    densities: Sequence[float],
    pruner: Pruner | None = None,
    *,
    iterative: bool,
    slim: bool = False,
    independent: bool = False,
    final: float | None = None,
) -> Run:
    """A run of the algorithm; `final` holds after the end of the schedule.

    A preset, rates or N:M say themselves how much goes: no densities are given with them. `slim` networks are trained
    without the units that are pruned.
    """
    pruner = as_pruner(pruner)
    chosen = technique_named(technique)
    if slim:
        check_slim(pruner, chosen)
    if pruner.sets_density:
        densities = [_own_density(recipe, pruner, densities, chosen)]
    schedule = recipe.schedule if final is None else replace(recipe.schedule, declared_final=final)
    check_time(chosen, epochs, recipe.training_epochs, recipe.label())
    try:
        check_final(chosen, schedule)
    except InputError as error:
        raise InputError(f"{technique}: {error} in the schedule of {recipe.label()}") from error
    if epochs * recipe.steps_per_epoch < _ALMOST_ONE:
        raise InputError(
            f"retraining time {epochs:g} is less than one step of {recipe.label()}, which has "
            f"{recipe.steps_per_epoch:.4g} per epoch; give at least {1 / recipe.steps_per_epoch:.4g}"
        )
    t, label = recipe.steps_of(epochs), technique_label(technique)
    course = list(levels(chosen, t, recipe.schedule.steps, densities))
    _kept(recipe, pruner, course[-1].density)  # what was asked for is refused before what leads there
    rule = Ruled(chosen.lr, schedule, t) if callable(chosen.lr) else None
    return Run(
        recipe=recipe,
        technique=label,
        pruning=kind_of(pruner, slim),
        iterative=iterative,
        epochs=epochs,
        pruner=pruner,
        slim=slim,
        salt=f"{label} {epochs:g}" if independent else "",
        cost=epochs + recipe.training_epochs if chosen.lr == "restarted" else epochs,
        final=final,
        levels=tuple(_level(recipe, pruner, level, rule, final) for level in course),
    )


def _level(recipe: Recipe, pruner: Pruner, level: Level, rule: Ruled | None, final: float | None) -> _Level:
    first = level.before if level.gradual else level.density
    rates: Rates | None = rule
    if rule is None and not level.gradual:
        rates = _rates(recipe, level.schedule_from or 0, level.length, final)
    at = level.weights_from
    return _Level(
        level, first, _kept(recipe, pruner, first), _rates(recipe, 0, at) if isinstance(at, int) and at else None, rates
    )


def _own_density(recipe: Recipe, pruner: Pruner, densities: Sequence[float], technique: Technique) -> float:
    """The density of a pruner that says itself how much goes."""
    for density in densities:
        pruner.check_density(density)
    if technique.gradual:
        raise InputError(f"{pruner.sets_density} prunes at once; use another technique than gradual")
    try:
        groups = recipe.units if pruner.by_units else None
        return pruner.own_density(shapes_to_prune(recipe, pruner), model=recipe.skeleton, groups=groups)
    except InputError as error:
        raise InputError(f"{recipe.label()}: {error}") from error


def _gradual(recipe: Recipe, root: Pruned, level: Level, final: float | None) -> Trained:
    """A level whose mask is updated while it is trained."""
    start, done, kept = level.schedule_from or 0, 0, root.kept
    stage: Trained | Pruned = root
    for step, density in level.updates(level.length):
        if (fewer := _kept(recipe, root.pruner, density)) == kept:
            continue  # a small network has fewer weights than the curve has steps
        source = trained(stage, _rates(recipe, start + done, step - done, final))
        stage = Pruned(source, source, root.pruner, density, fewer, runs_on=True)
        done, kept = step, fewer
    return trained(stage, _rates(recipe, start + done, level.length - done, final))


def _weights(level: Level, original: Trained, previous: Trained) -> Past:
    """The state that the weights under the new mask come from, unless that is on the way of the dense run (law 5)."""
    start = original.parent
    assert isinstance(start, Start)
    if level.weights_from == "fresh":
        return _fresh(start.recipe, start.seed)
    return previous if level.weights_from == "previous" else start


@lru_cache(maxsize=1024)
def _fresh(recipe: Recipe, seed: int) -> Start:
    return Start(recipe, seed, fresh=True)


@lru_cache(maxsize=4096)
def _kept(recipe: Recipe, pruner: Pruner, density: float) -> int:
    pruner.check([*recipe.shapes, *(name for name, _ in recipe.skeleton.named_parameters(remove_duplicate=False))])
    if not pruner.by_units:
        pruner.check_zeros_stay(recipe.skeleton, recipe.shapes)
    return pruner.kept(
        shapes_to_prune(recipe, pruner),
        density,
        model=recipe.skeleton,
        groups=recipe.units if pruner.by_units else None,
        profile=recipe.profile if pruner.of == "flops" else None,
    )


@lru_cache(maxsize=4096)
def _rates(recipe: Recipe, start: int, length: int, final: float | None = None) -> Given:
    """One value for all rows of a sweep that follow the same part of the schedule: it may have a rate for each step."""
    schedule = recipe.schedule if final is None else replace(recipe.schedule, declared_final=final)
    return Given(tuple(merged(schedule.segments(start, start + length))))
