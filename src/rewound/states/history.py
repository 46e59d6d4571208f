"""What a state is: how it came to be. Its key is the hash of that.

A history is built of three operations, each a frozen value with a `key`:

    Start(recipe, seed)                      the initial weights of a trial (or a fresh draw of them)
    Pruned(weights, source, pruner, kept)    the weights of one state under the mask pruned from another
    Trained(parent, rates)                   trained along these realised learning rates

Adjacent training under one mask is one operation with run-length-encoded rates, so a key depends neither on how
the work was cut nor on which other runs exist. Technique names are labels of rows, not identity: two techniques that
do the same work have the same key, and share the result.

A pruning begins a level: the data order starts anew. One that `runs_on` is an update of the mask within a level, as
gradual pruning has them; a level is then a chain of stages, each trained under a mask of its own.

Learning rates are given by a schedule, or drawn by a rule once the mask is known. Both kinds say how many steps they
span, which rates are known before anything runs, what of them is hashed into a key, and how to describe them.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from rewound.foundations.names import path_of
from rewound.foundations.quantities import counted
from rewound.method.pruner import Pruner
from rewound.method.schedule import Schedule, Segment, merged, sliced, total
from rewound.method.technique import Facts, Rule, drawn_by
from rewound.tasks.recipe import Recipe, changed_fields

_SHOWN = 6  # of many rates, the first
_PAPERS = vars(Pruner())

canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
"""What keys are hashes of."""


@dataclass(frozen=True)
class Given:
    """Rates of a schedule, run-length encoded; two runs that begin with the same ones share that beginning."""

    known: tuple[Segment, ...]

    @cached_property
    def steps(self) -> int:
        return total(self.known)

    @cached_property
    def identity(self) -> str:
        return canonical(self.known)  # once: a schedule that moves with every step has as many segments

    @property
    def described(self) -> str:
        first = ", ".join(f"{steps:,} at {rate:g}" for rate, steps in self.known[:_SHOWN])
        return first if len(self.known) <= _SHOWN else f"{first}, ... ({len(self.known)} rates)"


@dataclass(frozen=True)
class Ruled:
    """Rates that a rule draws: hashed by the rule's name and what it is given, shared whole or not at all."""

    rule: Rule
    schedule: Schedule
    steps: int

    @property
    def known(self) -> tuple[Segment, ...]:
        return ()

    @property
    def identity(self) -> str:
        given = (self.schedule.steps, self.schedule.pieces, self.schedule.declared_final)
        return ",".join(map(canonical, (self.path, given, self.steps)))

    @property
    def path(self) -> str:
        return path_of(self.rule)

    @property
    def described(self) -> str:
        return self.path

    def drawn(self, facts: Facts) -> list[Segment]:
        """The rates, now that the facts are known."""
        return drawn_by(self.rule, self.schedule, self.steps, facts)


Rates: TypeAlias = Given | Ruled


def _hash(texts: str) -> str:
    """32 hexadecimal digits, a function of canonical JSON."""
    return hashlib.blake2b(f"[{texts}]".encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Start:
    """W_0 of a trial; `fresh` is the other draw that reinitialization starts from."""

    recipe: Recipe
    seed: int
    fresh: bool = False

    @cached_property
    def key(self) -> str:
        parts = ("start", self.recipe.identity(), self.seed, *(["fresh"] if self.fresh else []))
        return _hash(",".join(map(canonical, parts)))

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
    runs_on: bool = False
    """Whether the data order goes on where it was: the mask is updated within a level."""
    slim: bool = False
    """Whether the network is trained without the units that the mask removes: its tensors are smaller."""
    key: str = field(init=False, compare=False, repr=False)
    prunings: int = field(init=False, compare=False, repr=False)
    """How many levels have begun."""

    def __post_init__(self) -> None:
        if self.runs_on and (self.salt or self.weights is not self.source):
            raise ValueError("a mask is updated on the weights that it is made of, under their seed")
        # At once, from those of the level before: later, hundreds of levels would be too deep to ask through.
        object.__setattr__(self, "key", self._hashed())
        object.__setattr__(self, "prunings", self.source.prunings + (not self.runs_on))

    def _hashed(self) -> str:
        # The density is a label of the kept count: 0.8**3 and 0.512 give one key.
        texts = f'"pruned","{self.weights.key}","{self.source.key}",{_identity_of(self.pruner)},{self.kept}'
        for is_so, word in ((self.salt, self.salt), (self.runs_on, ["runs on"]), (self.slim, ["slim"])):
            if is_so:
                texts += f",{canonical(word)}"
        return _hash(texts)

    @property
    def steps(self) -> int:
        """Steps since the level began."""
        return self.source.steps if self.runs_on else 0


def _identity_of(pruner: Pruner) -> str:
    """What is hashed of a pruner: the fields that differ from the paper's."""
    changed = [[name, value] for name, value in vars(pruner).items() if value != _PAPERS[name]]
    return canonical(changed) if changed else "[]"


@dataclass(frozen=True)
class Trained:
    """A state reached by training: the only kind that is stored."""

    parent: Start | Pruned
    rates: Rates
    key: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", _hash(f'"trained","{self.parent.key}",{self.rates.identity}'))

    @property
    def prunings(self) -> int:
        return self.parent.prunings

    @cached_property
    def steps(self) -> int:
        """Steps since its level began."""
        return self.parent.steps + self.rates.steps

    @property
    def stages(self) -> "list[Trained]":
        """The states of its level, each under its own mask: the last is this one, and most levels have no other."""
        stages = [self]
        while isinstance(parent := stages[-1].parent, Pruned) and parent.runs_on:
            assert isinstance(parent.source, Trained)  # a level begins with a pruning that does not run on
            stages.append(parent.source)
        return stages[::-1]

    @property
    def root(self) -> "Start | Pruned":
        """What its level began with."""
        parent = self.parent
        while isinstance(parent, Pruned) and parent.runs_on:
            assert isinstance(parent.source, Trained)  # a level begins with a pruning that does not run on
            parent = parent.source.parent
        return parent

    @property
    def known(self) -> tuple[Segment, ...]:
        """The rates of its whole level, as far as they are known before it runs."""
        stages = self.stages
        return self.rates.known if len(stages) == 1 else tuple(merged(s for stage in stages for s in stage.rates.known))

    def until(self, steps: int) -> "Trained":
        """The state on the way to this one that many steps after its level began, before its mask is updated there."""
        stage = next((stage for stage in self.stages if steps <= stage.steps), self)
        done = steps - stage.parent.steps
        if done > total(stage.rates.known):
            raise ValueError(f"nothing is known of {self.key} after {steps} steps: a rule draws its rates")
        if done == stage.rates.steps:
            return stage
        return Trained(stage.parent, Given(tuple(sliced(stage.rates.known, 0, done))))


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


def is_slim(past: Past | Pruned) -> bool:
    """Whether its tensors are those of a network without the units that its mask removes."""
    root = past.root if isinstance(past, Trained) else past
    return isinstance(root, Pruned) and root.slim


def lineage(past: Past) -> list[Trained]:
    """The levels that led to a state, the dense run first: each the source of the next one's mask."""
    levels: list[Trained] = []
    while isinstance(past, Trained):
        levels.append(past)
        past = root.source if isinstance(root := past.root, Pruned) else root
    return levels[::-1]


def own_functions(past: Past) -> list[str]:
    """The import paths of the user's rules, scores, scopes and patterns that a state came to be by."""
    names, pruners = set[str](), dict[int, Pruner]()
    for stage in (stage for level in lineage(past) for stage in level.stages):
        if isinstance(stage.rates, Ruled):
            names.add(stage.rates.path)
        if isinstance(stage.parent, Pruned):
            pruners[id(stage.parent.pruner)] = stage.parent.pruner  # mostly the same one at all levels
    return sorted(names.union(*(pruner.own_functions for pruner in pruners.values())))


def described(past: Past) -> list[str]:
    """One line per operation, for a person."""
    start = start_of(past)
    lines = [" ".join(["start", start.recipe.label(), *changed_fields(start.recipe), f"seed {start.seed}"])]
    for level in lineage(past):
        if isinstance(root := level.root, Pruned):
            lines.append(_pruning_line(root))
        rates = level.rates if level.parent is root else Given(level.known)
        lines.append(f"train {counted(level.steps, 'step')}: {rates.described}{_on_the_way(level)} -> {level.key[:12]}")
    return lines


def _on_the_way(level: Trained) -> str:
    """How the mask of a level is updated, in words that follow those about its training."""
    updates = [stage.parent for stage in level.stages[1:]]
    if not updates:
        return ""
    last = updates[-1]
    assert isinstance(last, Pruned)
    steps = f"from step {updates[0].steps:,} to step {last.steps:,}"
    return f"; prune on the way to {last.kept:,} weights ({last.density:.4g}) by {len(updates)} updates {steps}"


def _pruning_line(pruned: Pruned) -> str:
    pruner = pruned.pruner
    others = "".join(f" {word}" for name, word in pruner.words.items() if name not in ("score", "scope"))
    others += " slim" if pruned.slim else ""
    unit = "FLOPs" if pruner.of == "flops" else "weights"
    what = f"prune {pruner.score}/{pruner.scope}{others} to {pruned.kept:,} {unit} ({pruned.density:.4g})"
    return f"{what}, {_weights_of(pruned)}"


def _weights_of(pruned: Pruned) -> str:
    if pruned.weights.key == pruned.source.key:
        return "its own weights"
    fresh = isinstance(pruned.weights, Start) and pruned.weights.fresh
    return "fresh weights" if fresh else f"weights of {pruned.weights.key[:12]}"
