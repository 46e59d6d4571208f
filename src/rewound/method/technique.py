"""The retraining techniques as rows of data: where the weights come from, and where the schedule starts.

Every technique of the paper (section 2.3) is one call of `Train^t(W, m, g)`: train the weights W under the mask m for
t epochs along the original schedule S from epoch g.

| technique                 | W                        | g                        | epochs |
|---------------------------|--------------------------|--------------------------|--------|
| `fine-tuning`             | final: W_T               | final: T (S holds S[T])  | t      |
| `weight-rewinding`        | rewound: W_{T-t}         | rewound: T-t             | t      |
| `lr-rewinding`            | final: W_T               | rewound: T-t             | t      |
| `low-lr-weight-rewinding` | rewound: W_{T-t}         | final: T                 | t      |
| `reinitialization`        | fresh: another W'_0      | restarted: 0             | T + t  |

These prune once, before they train. One more, not of the paper, prunes little by little while it trains: `gradual`
(`Gradual`; weights and rates are those of `lr-rewinding`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from rewound.foundations.errors import InputError, as_number, as_whole, check_kind
from rewound.foundations.names import lookup, path_of
from rewound.method.schedule import Schedule, Segment


class Facts(NamedTuple):
    """What a learning-rate rule may know about the pruning it follows."""

    norm_lost: float
    """|W - W (.) m| / |W| over the prunable weights, by this pruning alone."""
    fraction_pruned: float
    """The fraction of all prunable weights that this pruning removed."""


# A rule draws its own schedule of t steps; S is the original one of T steps.
Rule = Callable[[Schedule, int, int, Facts], Schedule]


def drawn_by(rule: Rule, S: Schedule, t: int, facts: Facts) -> list[Segment]:
    """The learning rates of t steps that a rule draws, now that the facts are known."""
    schedule, name = rule(S, S.steps, t, facts), path_of(rule)
    remedy = "end it with a return, as return Schedule.linear(t, S.peak, 0.0)"
    check_kind(f"what the rule {name} returns", schedule, Schedule, remedy)
    if schedule.steps != t:
        raise InputError(f"the rule {name} drew {schedule.steps} steps where {t} were asked for")
    return schedule.segments(0, t)


class MaskUpdate(NamedTuple):
    """A pruning in the middle of a level."""

    step: int
    """After how many steps of the level."""
    density: float


@dataclass(frozen=True)
class Gradual:
    """When to prune while training: Zhu and Gupta's cubic curve (2017), fast at first and slower towards the end.

    Of n updates of the mask the i-th prunes to `after + (before - after) (1 - i/n)^3`. `begin` and `end` are fractions
    of the retraining time; `every` is the number of steps between two updates, 0 for a hundredth of the time from begin
    to end.

    >>> [(step, round(density, 3)) for step, density in Gradual(every=10).updates(80, before=1.0, after=0.1)]
    [(10, 0.48), (20, 0.213), (30, 0.114), (40, 0.1)]
    """

    begin: float = 0.0
    end: float = 0.5
    every: int = 0

    def __post_init__(self) -> None:
        begin, end, every = as_number("begin", self.begin), as_number("end", self.end), as_whole("every", self.every)
        if not 0 <= begin < end <= 1:
            raise InputError(
                f"gradual pruning begins at begin={begin:g} and ends at end={end:g} of the retraining time; "
                "give fractions with 0 <= begin < end <= 1"
            )
        if every < 0:
            raise InputError(f"every is the number of steps between two updates of the mask, at least 1, not {every}")

    def updates(self, steps: int, *, before: float, after: float) -> list[MaskUpdate]:
        """The prunings of a level of so many steps; at least one step follows the last."""
        begin, end = int(self.begin * steps), min(int(self.end * steps), steps - 1)
        if end <= begin or self.every > end - begin:
            needed = f"every={self.every} steps" if self.every else "at least 2 steps"
            raise InputError(
                f"gradual pruning updates the mask after {needed}, but only {max(end - begin, 0)} of {steps} steps lie "
                f"between begin={self.begin:g} and end={self.end:g}; retrain for longer, or prune more often"
            )
        every = self.every or max(1, (end - begin) // 100)
        count = (end - begin) // every
        curve = ((1 - number / count) ** 3 for number in range(1, count + 1))
        return [
            MaskUpdate(begin + number * every, after + (before - after) * left) for number, left in enumerate(curve, 1)
        ]


@dataclass(frozen=True)
class Technique:
    """How a pruned network is retrained: from which weights, and at which learning rates.

    `lr` may be a rule of your own, a function `(S, T, t, facts) -> Schedule`. With `gradual` the weights are pruned
    while it retrains, else before.

    >>> Technique(weights="final", lr="rewound") == TECHNIQUES["lr-rewinding"]
    True
    """

    weights: Literal["final", "rewound", "fresh"]
    lr: Literal["final", "rewound", "restarted"] | Rule
    gradual: Gradual | None = None

    def __post_init__(self) -> None:
        if self.weights not in ("final", "rewound", "fresh"):
            raise InputError(f"a technique's weights are final, rewound or fresh, not {self.weights!r}")
        if not callable(self.lr) and self.lr not in ("final", "rewound", "restarted"):
            raise InputError(f"a technique's lr is final, rewound, restarted or a function, not {self.lr!r}")
        if callable(self.lr):
            path_of(self.lr)  # a rule is hashed by its name, so it needs one
        if callable(self.lr) and self.gradual:
            raise InputError(
                "a rule draws its rates once the mask is known, and gradual pruning changes it on the way; "
                "a gradual technique's lr is final, rewound or restarted"
            )

    @property
    def rewinds(self) -> bool:
        """Whether it goes back to an earlier point of the dense run, which bounds t by T."""
        return "rewound" in (self.weights, self.lr)


TECHNIQUES: Mapping[str, Technique] = {
    "fine-tuning": Technique(weights="final", lr="final"),
    "weight-rewinding": Technique(weights="rewound", lr="rewound"),
    "lr-rewinding": Technique(weights="final", lr="rewound"),
    "low-lr-weight-rewinding": Technique(weights="rewound", lr="final"),
    "reinitialization": Technique(weights="fresh", lr="restarted"),
    "gradual": Technique(weights="final", lr="rewound", gradual=Gradual()),
}


def technique_named(words: str) -> Technique:
    """The technique of that name, from the table or from `package.module:name`; after it, how a gradual one differs.

    >>> technique_named("gradual end=0.7 every=100").gradual
    Gradual(begin=0.0, end=0.7, every=100)
    """
    name, *options = words.split() if isinstance(words, str) and words.strip() else [words]
    technique = lookup("technique", name, TECHNIQUES, Technique)
    if not options:
        return technique
    if technique.gradual is None:
        raise InputError(f"technique {name} has no options, but is given {' '.join(options)}; leave them out")
    given: dict[str, float] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in vars(technique.gradual):
            known = ", ".join(vars(technique.gradual))
            raise InputError(f"option {option!r} of technique {name} is not known; give {known}, as end=0.5")
        try:
            given[key] = int(value) if key == "every" else float(value)
        except ValueError:
            kind = "a whole number" if key == "every" else "a number"
            raise InputError(f"{key} of technique {name} must be {kind}, not {value!r}") from None
    return replace(technique, gradual=replace(technique.gradual, **given))  # type: ignore[arg-type]


def technique_label(words: str) -> str:
    """What tables call a technique: its name, and the options that are not the name's own.

    >>> technique_label("gradual every=100 end=0.5"), technique_label("lr-rewinding")
    ('gradual every=100', 'lr-rewinding')
    """
    chosen, (name, *options) = technique_named(words), words.split()
    own = technique_named(name).gradual if options else None
    if chosen.gradual is None or own is None:
        return name
    differing = {key: value for key, value in vars(chosen.gradual).items() if value != vars(own)[key]}
    return " ".join([name, *(f"{key}={value:g}" for key, value in differing.items())])
