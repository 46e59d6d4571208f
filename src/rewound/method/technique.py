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
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rewound.foundations.errors import InputError, check_kind
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


@dataclass(frozen=True)
class Technique:
    """How a pruned network is retrained: from which weights, and at which learning rates.

    `lr` may be a rule of your own, a function `(S, T, t, facts) -> Schedule`.

    >>> Technique(weights="final", lr="rewound") == TECHNIQUES["lr-rewinding"]
    True
    """

    weights: Literal["final", "rewound", "fresh"]
    lr: Literal["final", "rewound", "restarted"] | Rule

    def __post_init__(self) -> None:
        if self.weights not in ("final", "rewound", "fresh"):
            raise InputError(f"a technique's weights are final, rewound or fresh, not {self.weights!r}")
        if not callable(self.lr) and self.lr not in ("final", "rewound", "restarted"):
            raise InputError(f"a technique's lr is final, rewound, restarted or a function, not {self.lr!r}")
        if callable(self.lr):
            path_of(self.lr)  # a rule is addressed by its name, so it needs one

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
}


def technique_named(name: str) -> Technique:
    """The technique of that name, from the table or from `package.module:name`."""
    return lookup("technique", name, TECHNIQUES, Technique)
