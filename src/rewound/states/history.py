"""What a state is: how it came to be. Its address is the hash of that.

A history is built of three operations, each a frozen value with a `key`:

    Start(recipe, seed)                      the initial weights of a trial (or a fresh draw of them)
    Pruned(weights, source, pruner, kept)    the weights of one state under the mask pruned from another
    Trained(parent, rates)                   trained along these realised learning rates

Adjacent training under one mask is one operation with run-length-encoded rates, so an address depends neither on how
the work was cut nor on which other runs exist. Technique names are labels of rows, not identity: two techniques that
do the same work have the same address, and share the result.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from rewound.foundations.quantities import counted
from rewound.method.pruning.pruner import Pruner
from rewound.method.schedule import Segment, merged, sliced, total
from rewound.states.rates import Given, Rates, Ruled, canonical
from rewound.tasks.recipe import Recipe, changed_fields


def address(*parts: object) -> str:
    """32 hexadecimal digits, a function of the parts' canonical JSON."""
    return _hash(",".join(map(canonical, parts)))


def _hash(texts: str) -> str:
    return hashlib.blake2b(f"[{texts}]".encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Start:
    """W_0 of a trial; `fresh` is the other draw that reinitialization starts from."""

    recipe: Recipe
    seed: int
    fresh: bool = False

    @cached_property
    def key(self) -> str:
        return address("start", self.recipe.identity(), self.seed, *(["fresh"] if self.fresh else []))

    @property
    def prunings(self) -> int:
        return 0

    @property
    def steps(self) -> int:
        return 0


@dataclass(frozen=True)
class Pruned:
    """The weights of one state under the mask that `pruner` makes of another (the previous level)."""

    weights: "Past"
    source: "Past"
    pruner: Pruner
    density: float
    kept: int
    salt: str = ""
    """Joins the seed from here on, where techniques are to draw their own randomness."""

    def __post_init__(self) -> None:
        # At once, from those of the level before: later, hundreds of levels would be too deep to ask through.
        _ = self.key, self.prunings

    @cached_property
    def key(self) -> str:
        # The density is a label of the kept count: 0.8**3 and 0.512 are one address.
        pruner = [[name, value] for name, value in vars(self.pruner).items() if value != getattr(Pruner, name)]
        return address(
            "pruned", self.weights.key, self.source.key, pruner, self.kept, *([self.salt] if self.salt else [])
        )

    @cached_property
    def prunings(self) -> int:
        return self.source.prunings + 1


@dataclass(frozen=True)
class Trained:
    """A state reached by training: the only kind that is stored."""

    parent: Start | Pruned
    rates: Rates

    @cached_property
    def key(self) -> str:
        return _hash(f'"trained","{self.parent.key}",{self.rates.identity}')

    @property
    def prunings(self) -> int:
        return self.parent.prunings

    @cached_property
    def steps(self) -> int:
        """Steps since the last pruning."""
        return self.rates.steps

    def until(self, steps: int) -> "Trained":
        """The state on the way to this one after that many steps."""
        if steps > total(self.rates.known):
            raise ValueError(f"nothing is known of {self.key} after {steps} steps: a rule draws its rates")
        return Trained(self.parent, Given(tuple(sliced(self.rates.known, 0, steps))))


Past: TypeAlias = Start | Trained
"""What states come from: weights, masks and further training are those of one of these."""


def trained(parent: Past | Pruned, rates: Sequence[Segment] | Given) -> Trained:
    """`parent` trained on along `rates`: one operation with whatever training came before."""
    given = rates if isinstance(rates, Given) else Given(tuple(merged(rates)))
    if isinstance(parent, Trained):
        before = parent.until(parent.steps).rates.known  # all of them, or the error that they are not known
        return Trained(parent.parent, Given(tuple(merged([*before, *given.known]))))
    return Trained(parent, given)


def start_of(past: Past | Pruned) -> Start:
    """Where it all began."""
    while not isinstance(past, Start):
        past = past.parent if isinstance(past, Trained) else past.weights
    return past


def lineage(past: Past) -> list[Trained]:
    """The levels that led to a state, the dense run first: each the source of the next one's mask."""
    levels: list[Trained] = []
    while isinstance(past, Trained):
        levels.append(past)
        past = past.parent.source if isinstance(past.parent, Pruned) else past.parent
    return levels[::-1]


def own_functions(past: Past) -> list[str]:
    """The import paths of the user's rules, scores, scopes and patterns that a state came to be by."""
    names = set[str]()
    for level in lineage(past):
        if isinstance(level.rates, Ruled):
            names.add(level.rates.path)
        if isinstance(level.parent, Pruned):
            names |= {level.parent.pruner.score, level.parent.pruner.scope, level.parent.pruner.pattern}
    return sorted(name for name in names if ":" in name)


def described(past: Past) -> list[str]:
    """One line per operation, for a person."""
    start = start_of(past)
    lines = [" ".join(["start", start.recipe.label(), *changed_fields(start.recipe), f"seed {start.seed}"])]
    for level in lineage(past):
        if isinstance(level.parent, Pruned):
            lines.append(_pruning_line(level.parent))
        lines.append(f"train {counted(level.steps, 'step')}: {level.rates.told} -> {level.key[:12]}")
    return lines


def _pruning_line(pruned: Pruned) -> str:
    pruner = pruned.pruner
    others = "".join(f" {word}" for name, word in pruner.words.items() if name not in ("score", "scope"))
    what = f"prune {pruner.score}/{pruner.scope}{others} to {pruned.kept:,} weights ({pruned.density:.4g})"
    return f"{what}, {_weights_of(pruned)}"


def _weights_of(pruned: Pruned) -> str:
    if pruned.weights.key == pruned.source.key:
        return "its own weights"
    fresh = isinstance(pruned.weights, Start) and pruned.weights.fresh
    return "fresh weights" if fresh else f"weights of {pruned.weights.key[:12]}"
