"""What a user chooses of the method, stated once: its names, defaults, help and checks.

`rewound.epochs`, `rewound.steps`, `rewound.prune`, the trainers' `rewind` and `Rewind`, and the command `rewound prune`
all take these, by these names. Functions declare them as `**chosen: Unpack[Chosen]`, and `takes_choices` gives such a
function a signature that names each of them.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import wraps
from numbers import Real
from typing import TYPE_CHECKING, ParamSpec, TypedDict, TypeVar

from rewound.foundations.errors import InputError, as_number, check_kind
from rewound.method.algorithm import KEEP, densities
from rewound.method.technique import Technique, technique_named

if TYPE_CHECKING:
    from rewound.method.pruner import Pruner  # needs torch, which the command line's help does without

P = ParamSpec("P")
R = TypeVar("R")
RATE = round(1 - KEEP, 9)


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """How far to prune, in which steps, how to retrain, and when to stop: the paper's Algorithm 1 by default.

    >>> Choices(compression=4, one_shot=True).densities
    [0.25]
    """

    compression: float = field(default=10.0, metadata=_help("how many times fewer weights"))
    technique: str = field(
        default="lr-rewinding", metadata=_help("how to retrain; gradual takes options: 'gradual end=0.7 every=100'")
    )
    rate: float = field(default=RATE, metadata=_help("fraction of the remaining weights that a level prunes"))
    one_shot: bool = field(default=False, metadata=_help("prune all at once"))
    pruner: "Pruner | None" = field(default=None, metadata=_help("what weights are ranked by, and which may be pruned"))
    slim: bool = field(
        default=False, metadata=_help("train smaller networks, without the pruned units, instead of masked ones")
    )
    max_drop: float | None = field(
        default=None,
        metadata=_help("return the last level whose validation value has dropped by at most this, e.g. 0.01"),
    )
    final: float | None = field(
        default=None, metadata=_help("the learning rate that holds after the end of the schedule")
    )

    def __post_init__(self) -> None:
        for name in ("compression", "rate", "final", "max_drop"):
            if (value := getattr(self, name)) is not None or name in ("compression", "rate"):
                object.__setattr__(self, name, as_number(name, value))
        for name in ("one_shot", "slim"):
            check_kind(name, getattr(self, name), bool, "give True or False")
        if self.final is not None and not 0 <= self.final < math.inf:
            raise InputError(f"final must be a learning rate, 0 or above, not {self.final:g}")
        if self.max_drop is not None and not self.max_drop >= 0:
            raise InputError(f"max_drop must be at least 0, not {self.max_drop:g}")
        _ = self.densities, self.the_pruner
        if self.slim:
            check_slim(self.the_pruner, self.the_technique)

    @property
    def the_pruner(self) -> "Pruner":
        """The pruner, by default the paper's."""
        from rewound.method.pruner import as_pruner

        return as_pruner(self.pruner)

    @property
    def the_technique(self) -> Technique:
        """The technique itself, found by its name."""
        return technique_named(self.technique)

    @property
    def iterative(self) -> bool:
        """Whether it prunes in several levels; gradual pruning, and a pruner that says how much goes, have one."""
        return not self.one_shot and self.the_technique.gradual is None and not self.the_pruner.sets_density

    @property
    def densities(self) -> list[float]:
        """What each level prunes to; nothing for a preset or a table of rates, which depends on the network."""
        if said := self.the_pruner.sets_density:
            own = self.the_pruner.fixed_density
            agrees = own is not None and math.isclose(1 / self.compression, own, rel_tol=1e-9)
            if self.rate != RATE or not (agrees or self.compression == Choices.compression):
                agreed = "" if own is None else f", or give compression {1 / own:g}"
                raise InputError(f"{said} says itself how much goes; leave out compression and rate{agreed}")
            return [] if own is None else [own]
        if not 0 < self.rate < 1:
            raise InputError(
                f"rate must be between 0 and 1, not {self.rate:g}: it is the fraction of the remaining weights that a "
                f"level prunes, {RATE:g} by default"
            )
        if not self.iterative and self.rate != RATE:
            kind = "gradual" if self.the_technique.gradual else "one-shot"
            raise InputError(
                f"rate {self.rate:g} is how much each level prunes, and {kind} pruning has one level, which prunes all "
                "that compression asks for; leave out one of the two"
            )
        return densities(self.compression, 1 - self.rate)[0 if self.iterative else -1 :]


class Chosen(TypedDict, total=False):
    """The same as keywords of a function."""

    compression: float
    technique: str
    rate: float
    one_shot: bool
    pruner: "Pruner | None"
    slim: bool
    max_drop: float | None
    final: float | None


HELP = {each.name: str(each.metadata["help"]) for each in fields(Choices)}


def check_slim(pruner: "Pruner", technique: Technique) -> None:
    """An error for what does not leave a smaller network behind."""
    if not pruner.preset and not pruner.by_units:
        raise InputError(
            f"slim needs whole units to go, and pattern {pruner.pattern!r} does not remove them: a mask of single "
            "weights makes no smaller network; use pattern 'unit' or 'filter', or leave out slim"
        )
    if technique.gradual:
        raise InputError(
            "slim needs a mask that stays as it is while a network trains, and gradual pruning changes it; use "
            "another technique, or leave out slim"
        )


def takes_choices(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with each choice named in its signature; `sparsity=` and `density=` are answered with a remedy."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    before = [each for each in own if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    kinds = Chosen.__annotations__
    named = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=kinds[each.name])
        for each in fields(Choices)
    ]
    whole = signature.replace(parameters=[*before, *named, *own[len(before) :]])
    name = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        for word, value in kwargs.items():
            if hint := instead_of(word, value):
                raise InputError(f"{name} has no {word}; {hint}")
            if word not in whole.parameters:
                raise TypeError(f"{name}() got an unexpected keyword argument {word!r}")
        return function(*args, **kwargs)

    called.__signature__ = whole  # type: ignore[attr-defined]
    return called


def density_meant(word: str, value: object) -> float:
    """The density that a sparsity (also in percent), compression or density stands for; 0.1 if it stands for none.

    >>> density_meant("sparsity", 0.9), density_meant("sparsity", 95), density_meant("compression", 4)
    (0.1, 0.05, 0.25)
    """
    number = float(value) if isinstance(value, Real) else 0.0
    sparsity = number / 100 if 1 < number < 100 else number
    density = {"sparsity": 1 - sparsity, "compression": 1 / number if number else 0.0}.get(word, number)
    return round(density, 12) if 0 < density < 1 else 0.1


def instead_of(word: str, value: object, written: str = "compression={:.6g}") -> str:
    """What to write instead of a sparsity or density, the words of other tools; nothing for any other word.

    >>> instead_of("sparsity", 0.9), instead_of("density", 0.05)
    ('for 90% sparsity give compression=10', 'for density 0.05 give compression=20')
    """
    if word not in ("sparsity", "density"):
        return ""
    density = density_meant(word, value)
    asked = f"density {density:g}" if word == "density" else f"{100 * (1 - density):.6g}% sparsity"
    return f"for {asked} give {written.format(1 / density)}"
