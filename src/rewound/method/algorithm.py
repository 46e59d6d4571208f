"""The paper's algorithm, stated once: what each level prunes to, starts from and trains.

Everything that runs the method (the planner, a user's own loop, the integrations) consumes `levels`.
Algorithm 1 of the paper is `levels(TECHNIQUES["lr-rewinding"], T, T, densities(compression))`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from rewound.foundations.errors import InputError, as_number, check_kind
from rewound.method.schedule import Schedule
from rewound.method.technique import Gradual, MaskUpdate, Technique

KEEP = 0.8
"""The fraction of the remaining weights that a level keeps by default (the paper prunes 20% a level)."""
MOST_LEVELS = 100_000
"""Of a run; thousands are tried in tests, and a run of the paper has at most 30."""
REWIND_AT_MOST = 0.9
"""Of T: weights rewound to the first steps of training do not recover (paper, section 4)."""
HELD = 0.08
"""Of T: a schedule that stays at its final rate for less has only passed through it."""


@dataclass(frozen=True)
class Level:
    """One prune + retrain iteration, with positions and lengths in the unit that t and T were given in."""

    density: float
    """Prune the previous level (before the first: the dense run's end) to this fraction of all prunable weights."""
    weights_from: int | Literal["previous", "fresh"]
    """Where the weights under the new mask come from; a number is a position in the original dense run (law 5)."""
    schedule_from: int | None
    """The position of the original schedule at which retraining starts; None where a rule draws its own."""
    length: int
    """How long to retrain."""
    before: float = field(default=1.0, repr=False)
    """The density of the previous level."""
    gradual: Gradual | None = field(default=None, repr=False)
    """When to prune while retraining; None: before it, all at once."""

    def updates(self, steps: int) -> list[MaskUpdate]:
        """The prunings on the way, where the level retrains for so many steps."""
        return self.gradual.updates(steps, before=self.before, after=self.density) if self.gradual else []


def levels(technique: Technique, t: int, T: int, densities: Sequence[float], *, unit: str = "epoch") -> Iterator[Level]:
    """The levels of pruning to each of `densities` in turn, retraining each for t of the original T (epochs, or steps).

    >>> from rewound.method.technique import TECHNIQUES
    >>> list(levels(TECHNIQUES["weight-rewinding"], 30, 100, [0.2]))
    [Level(density=0.2, weights_from=70, schedule_from=70, length=30)]
    """
    check_kind("technique", technique, Technique, 'give the technique itself, as rewound.TECHNIQUES["lr-rewinding"]')
    check_time(technique, t, T, unit=unit)
    check_densities(densities)
    weights_from: dict[str, int | Literal["previous", "fresh"]] = {
        "final": "previous",
        "rewound": T - t,
        "fresh": "fresh",
    }
    schedule: dict[str, tuple[int, int]] = {"final": (T, t), "rewound": (T - t, t), "restarted": (0, T + t)}
    start, length = (None, t) if callable(technique.lr) else schedule[technique.lr]
    for before, density in pairwise([1.0, *densities]):
        yield Level(density, weights_from[technique.weights], start, length, before, technique.gradual)


def longest_time(technique: Technique, T: float) -> float:
    """How long a level retrains unless told otherwise: T, and 0.9 T where the weights are rewound.

    >>> from rewound.method.technique import TECHNIQUES
    >>> longest_time(TECHNIQUES["lr-rewinding"], 100), longest_time(TECHNIQUES["weight-rewinding"], 100)
    (100, 90.0)
    """
    return REWIND_AT_MOST * T if technique.weights == "rewound" else T


def densities(compression: float, keep: float = KEEP) -> list[float]:
    """The densities of iterative pruning: `keep` of all weights, `keep**2`, ..., the last exactly 1/compression.

    >>> [round(density, 3) for density in densities(2)]
    [0.8, 0.64, 0.512, 0.5]
    """
    if compression == math.inf:
        raise InputError("compression must be a finite number, not inf: something must be left of the network")
    if not as_number("compression", compression) > 1:
        raise InputError(f"compression must be above 1, not {compression}")
    if not 0 < as_number("keep", keep) < 1:
        raise InputError(f"the fraction kept per level must be between 0 and 1, not {keep}")
    out: list[float] = []
    target = 1 / compression
    if math.log(target) / math.log(keep) > MOST_LEVELS:
        raise InputError(
            f"compression {compression:g} takes more than {MOST_LEVELS:,} levels that keep {keep:g} each; keep less"
        )
    while keep ** (len(out) + 1) > target * (1 + 1e-9):
        out.append(keep ** (len(out) + 1))
    return [*out, target]


def returned(scores: Sequence[float | None], max_drop: float | None, *, higher_is_better: bool = True) -> int:
    """The level that is returned: the last whose score is within `max_drop` of the dense network's, which is level 0.

    >>> returned([0.92, 0.93, 0.90, 0.915, 0.88], max_drop=0.01)
    3
    """
    return max(level for level, good in enumerate(_within(scores, max_drop, higher_is_better)) if good)


def has_dropped(scores: Sequence[float | None], max_drop: float | None, *, higher_is_better: bool = True) -> bool:
    """Whether to stop: two levels in a row are worse than the dense network by more than `max_drop`.

    One alone may be chance: 2,000 validation images have a standard deviation of 0.4 points.
    """
    return len(scores) > 2 and not any(_within(scores, max_drop, higher_is_better)[-2:])


def _within(scores: Sequence[float | None], max_drop: float | None, higher_is_better: bool) -> list[bool]:
    dense, sign = scores[0], 1 if higher_is_better else -1
    if max_drop is None or dense is None:
        return [True] * len(scores)
    return [level == 0 or (s is not None and sign * (dense - s) <= max_drop) for level, s in enumerate(scores)]


def check_time(
    technique: Technique, t: float, T: float, task: str = "the original run", *, unit: str = "epoch"
) -> None:
    """Law 7: nothing can be rewound further than to its start."""
    if not as_number("retraining time", t) > 0:
        raise InputError(f"retraining time must be above 0, not {t:g}")
    if t == math.inf:
        raise InputError("retraining time must be a finite number, not inf")
    if technique.rewinds and t > as_number("training time", T):
        raise InputError(
            f"cannot rewind {t:g} {unit}s: {task} trains for {T:g}; use at most {T:g}, or technique fine-tuning"
        )


def check_densities(densities: Sequence[float]) -> None:
    """Law 2: a mask only shrinks along a run."""
    check_kind("densities", densities, Sequence, "give a list, as [0.8, 0.64]")
    if not densities:
        raise InputError("no density to prune to")
    for density in densities:
        if not 0 < as_number("density", density) <= 1:
            raise InputError(f"density must be above 0 and at most 1, not {density:g}")
    for before, after in pairwise(densities):
        if after > before:
            raise InputError(f"densities must not grow along a run, but {before:g} is followed by {after:g}")


def check_final(technique: Technique, S: Schedule) -> None:
    """Law 7: an error for a final rate below 1% of the peak, unless the dense run has trained at it for a while.

    The lowest of the paper's, ImageNet's, is 1/1000 of the peak and held for a ninth of the training; a cosine or a
    line towards zero passes through its last rate in a step.
    """
    low = S.final < S.peak / 100 * (1 - 1e-9)
    if technique.lr == "final" and low and (S.final < S.peak / 2000 or S.share_at_final < HELD):
        raise InputError(
            f"this schedule ends at {S.final:g}, too low to retrain at (peak {S.peak:g}); "
            f"declare what holds after its end, for example final={S.peak / 100:g}"
        )
