"""What a pruner is: its fields, what they mean, which are refused, and how they are written in tables."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from rewound.foundations.errors import InputError, as_number, as_whole, check_kind, few
from rewound.foundations.names import check_function, lookup, unknown
from rewound.method.pruning.mask import all_names, plain_name, plain_parameters
from rewound.method.pruning.patterns import UNIT_PATTERNS, Blocks, NofM, Pieces, input_dimensions, pattern_named
from rewound.method.pruning.presets import PRESETS
from rewound.method.pruning.prunable import dense_originals, divided_by_norm, prunable_weights
from rewound.method.pruning.scores import OF_UNITS, OTHER_NAMES, SCORES, WITH_BATCHES

Shapes = Mapping[str, tuple[int, ...]]
Scope = Callable[[Sequence[str]], Sequence[Sequence[str]]]  # names -> groups that are ranked together
SCOPES: Mapping[str, Scope] = {"global": lambda names: [names], "layer": lambda names: [[name] for name in names]}
MEASURES = ("weights", "flops")
_LATER = ("preset", "k", "round_to", "min_units", "rates", "of", "batches")  # than the first files with settings


@dataclass(frozen=True)
class PrunerFields:
    """The fields of a `Pruner`, checked."""

    score: str = "magnitude"
    scope: str = "global"
    pattern: str = "weight"
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    floor: float = 0.0
    preset: str = ""
    k: int = 0
    round_to: int = 1
    min_units: int = 1
    rates: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    of: str = "weights"
    batches: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "score", OTHER_NAMES.get(self.score, self.score))
        for kind, name, table, parameters in (
            ("score", self.score, {**SCORES, **dict.fromkeys((*WITH_BATCHES, *OF_UNITS))}, ("weight", "name", "seed")),
            ("scope", self.scope, SCOPES, ("names",)),
        ):
            found = lookup(kind, name, table)
            if name not in table:
                check_function(kind, name, found, parameters)
        _ = self.the_pattern
        for field in ("only", "skip"):
            if isinstance(patterns := getattr(self, field), str):
                raise InputError(f"{field} takes a tuple of name patterns, not {patterns!r}; write ({patterns!r},)")
            globs = tuple(patterns) if isinstance(patterns, Iterable) else (patterns,)
            for glob in globs:
                check_kind(f"each of {field}", glob, str, "give patterns of parameters' names, as ('encoder.*',)")
            object.__setattr__(self, field, globs)
        object.__setattr__(self, "floor", as_number("floor", self.floor))
        if not 0 <= self.floor < 1:
            raise InputError(f"floor must be at least 0 and below 1, not {self.floor:g}")
        object.__setattr__(self, "rates", _as_rates(self.rates))
        self._check_preset()  # first: next to a preset, what others say about a field is no help
        self._check_units()
        self._check_batches()
        self._check_amount()

    def _check_units(self) -> None:
        for field in ("round_to", "min_units"):
            if (value := as_whole(field, getattr(self, field))) < 1:
                raise InputError(f"{field} must be at least 1 unit, not {value}")
            if value > 1 and not self.by_units:
                raise InputError(f"{field} counts units, and pattern {self.pattern!r} has none; use pattern 'unit'")
        if self.by_units and self.scope not in SCOPES:
            raise InputError(f"units are ranked with scope global or layer, not {self.scope!r}")
        if self.score in OF_UNITS and not self.by_units:
            raise InputError(f"score {self.score!r} is of units, and pattern {self.pattern!r} has none; use 'unit'")
        if self.of not in MEASURES:
            raise InputError(unknown("measure for `of`", str(self.of), MEASURES))
        if self.of != "weights" and not self.by_units:
            raise InputError(f"density of {self.of} is for whole units, not for pattern {self.pattern!r}; use 'unit'")

    def _check_batches(self) -> None:
        if as_whole("batches", self.batches) < 1:
            raise InputError(f"batches must be at least 1, not {self.batches}")
        if self.batches != PrunerFields.batches and not self.needs_batches:
            raise InputError(
                f"batches={self.batches} belongs to score {' or '.join(WITH_BATCHES)}; score {self.score!r} needs none"
            )

    def _check_amount(self) -> None:
        """What fixes how much goes of each layer leaves no choice to other fields."""
        refused = ["scope", "floor", "rates"] if isinstance(self.the_pattern, NofM) else []
        refused = refused or (["scope", "of"] if self.rates else [])
        if others := [name for name in refused if name in self.words]:
            raise InputError(f"{self.sets_density} says how much goes of each layer; leave out {few(others)}")

    def _check_preset(self) -> None:
        if not self.preset:
            if self.k:
                raise InputError(f"k={self.k} belongs to a preset; give preset='structured-b' with it")
            return
        if self.preset not in PRESETS:
            raise InputError(unknown("preset", str(self.preset), PRESETS))
        if as_whole("k", self.k) < 1:
            raise InputError(f"k of preset {self.preset} must be at least 1, not {self.k}; the paper has 1 to 5")
        others = [name for name in vars(self) if name not in ("preset", "k") and name in self.words]
        if others:
            raise InputError(f"preset {self.preset} says all of a pruner but k; leave out {few(others)}")

    @property
    def the_pattern(self) -> Pieces | Blocks | NofM | None:
        """The pattern itself, found by its name; None where whole units go."""
        return pattern_named(self.pattern)

    @property
    def own_functions(self) -> set[str]:
        """The import paths of the user's score, scope and pattern."""
        names = {self.score, self.scope, *([self.pattern] if isinstance(self.the_pattern, Pieces) else [])}
        return {name for name in names if ":" in name}

    @property
    def by_units(self) -> bool:
        """Whether whole units go: the network's graph is needed to know them."""
        return self.pattern in UNIT_PATTERNS

    @property
    def needs_batches(self) -> bool:
        """Whether the score is measured on batches of training data."""
        return self.score in WITH_BATCHES

    @property
    def sets_density(self) -> str:
        """What says how much goes, so that no density is given: a preset, rates, N:M; empty where a density does.

        >>> from rewound import Pruner
        >>> Pruner(pattern="2:4").sets_density, Pruner(rates={"0.*": 0.5}).sets_density, Pruner().sets_density
        ("pattern '2:4'", 'the table of rates', '')
        """
        if self.preset:
            return f"preset {self.preset}"
        if isinstance(self.the_pattern, NofM):
            return f"pattern {self.pattern!r}"
        return "the table of rates" if self.rates else ""

    @property
    def fixed_density(self) -> float | None:
        """The density of any network, where the pattern says it: 0.5 for 2:4."""
        return pattern.density if isinstance(pattern := self.the_pattern, NofM) else None

    def check_density(self, density: float | None) -> None:
        """An error for a density that is missing, no fraction, or other than the one that the pruner says itself."""
        if self.sets_density:
            own = self.fixed_density
            if density is not None and (own is None or abs(density - own) > 1e-9):
                raise InputError(
                    f"{self.sets_density} says itself how much goes; leave out the density {density:g}"
                    + ("" if own is None else f", or give {own:g}")
                )
        elif density is None:
            raise InputError("give the density to prune to, the fraction of the weights that stays, as density=0.2")
        elif not 0 < as_number("density", density) <= 1:
            raise InputError(f"density must be above 0 and at most 1, not {density:g}")

    @property
    def settings(self) -> dict[str, object]:
        """Its fields by name; those that earlier versions did not have only where they differ from their defaults."""
        unchanged = [name for name in _LATER if getattr(self, name) == getattr(PrunerFields, name)]
        found = {name: value for name, value in vars(self).items() if name not in unchanged}
        return {**found, "rates": dict(self.rates)} if self.rates else found  # a table, as JSON has them

    @property
    def words(self) -> dict[str, str]:
        """What is not as in the paper, a word for each field.

        >>> from rewound import Pruner
        >>> Pruner(score="random", skip=("stem.*", "dense.*"), floor=0.01).words
        {'score': 'random', 'skip': 'skip=stem.*,dense.*', 'floor': 'floor=0.01'}
        """
        changed = {name: value for name, value in vars(self).items() if value != getattr(PrunerFields, name)}
        return {name: _word(name, value) for name, value in changed.items()}

    def check(self, parameters: Iterable[str]) -> None:
        """An error for a pattern that matches none of a model's parameters, prunable or not."""
        names = list(dict.fromkeys(map(plain_name, parameters)))
        given = {"only": self.only, "skip": self.skip, "rates": tuple(dict(self.rates))}
        for field, patterns in given.items():
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise InputError(f"{field} {pattern!r} matches no parameter of the model; it has {few(names)}")

    def rate_of(self, names: Collection[str]) -> float:
        """The rate at which a weight with these names is pruned: that of the first pattern that matches one, or 0."""
        found = (rate for glob, rate in dict(self.rates).items() if any(fnmatchcase(name, glob) for name in names))
        return next(found, 0.0)

    def selected(self, names: Iterable[str], model: nn.Module | None) -> list[str]:
        """Those that `only`, `skip` and the pattern leave to be pruned; a tied weight counts by all its names.

        >>> from rewound import Pruner
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> model[1].weight = model[0].weight
        >>> Pruner(only=("1.*",)).selected(["0.weight"], model), Pruner(skip=("1.*",)).selected(["0.weight"], model)
        (['0.weight'], [])
        """
        every = all_names(model) if model is not None and (self.only or self.skip) else {}
        chosen = [name for name in names if self._selects(every.get(name, (name,)))]
        if model is None or not isinstance(self.the_pattern, Blocks | NofM):
            return chosen
        shapes = {name: tuple(weight.shape) for name, weight in plain_parameters(model, tied=True).items()}
        return self.fitting({name: shapes[name] for name in chosen}, model)

    def counted(self, names: Iterable[str], model: nn.Module) -> list[str]:
        """Those of these parameters that a density counts: all that are selected.

        Where whole units go, as slim networks of presets lose them, biases and normalisation go along and are not
        counted, nor is a weight that its layer computes from others.

        >>> from rewound import Pruner
        >>> Pruner(pattern="unit").counted(["weight", "bias"], nn.Linear(2, 2))
        ['weight']
        """
        chosen = self.selected(names, model)
        if not self.by_units and not self.preset:
            return chosen
        weights = prunable_weights(model)
        computed = {*divided_by_norm(model, chosen), *dense_originals(model, chosen)}
        return [name for name in chosen if name in weights and name not in computed]

    def fitting(self, shapes: Shapes, model: nn.Module | None) -> list[str]:
        """Those whose shape the pattern divides."""
        pattern = self.the_pattern
        inputs = self.inputs(model)
        return [name for name, shape in shapes.items() if pattern is None or pattern.fits(shape, inputs.get(name, 1))]

    def inputs(self, model: nn.Module | None) -> dict[str, int]:
        """The dimension of weights that reads, where it is not dimension 1, if the pattern goes along it."""
        return input_dimensions(model) if model is not None and isinstance(self.the_pattern, NofM) else {}

    def _selects(self, names: Collection[str]) -> bool:
        only = not self.only or any(fnmatchcase(name, glob) for name in names for glob in self.only)
        return only and not any(fnmatchcase(name, glob) for name in names for glob in self.skip)


def _as_rates(given: object) -> tuple[tuple[str, float], ...]:
    """Pairs of a name pattern and a rate, of a table or such pairs."""
    if not isinstance(given, Mapping | tuple | list):
        raise InputError(f"rates must be a table of rates by name pattern, as {{'stage1.*': 0.3}}, not {given!r}")
    try:
        pairs = dict(given)
    except (TypeError, ValueError):
        raise InputError(f"rates must be a table of rates by name pattern, not {given!r}") from None
    for glob, rate in pairs.items():
        check_kind("each name of rates", glob, str, "give patterns of parameters' names, as 'encoder.*'")
        if not 0 <= as_number(f"the rate of {glob}", rate) < 1:
            raise InputError(f"the rate of {glob!r} must be at least 0 and below 1, not {rate:g}: it is what goes")
    return tuple((glob, float(rate)) for glob, rate in pairs.items())


def rates_in(words: Iterable[str]) -> dict[str, float]:
    """The table of rates that words give.

    >>> rates_in(["stage1.*=0.3", "stage2.*=0.5"])
    {'stage1.*': 0.3, 'stage2.*': 0.5}
    """
    rates: dict[str, float] = {}
    for word in words:
        glob, equals, rate = word.rpartition("=")
        try:
            rates[glob] = float(rate)
        except ValueError:
            equals = ""
        if not equals:
            raise InputError(f"a rate is given as pattern=rate, such as 'stage1.*=0.3', not as {word!r}")
    return rates


def _word(name: str, value: object) -> str:
    if name in ("score", "scope"):
        return str(value)
    if name == "rates":
        value = tuple(f"{glob}:{rate:g}" for glob, rate in value)  # type: ignore[attr-defined]
    return f"{name.replace('_', '-')}={','.join(value) if isinstance(value, tuple) else value}"
