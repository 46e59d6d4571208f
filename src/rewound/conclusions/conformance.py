"""How near one table of results comes to another: is ours a replica of theirs?

Values are means over trials, as shown, of what the tables call test. The paper's CIFAR-10 and ImageNet networks are
compared on all held-out images (80% test + 20% validation, so that it does not matter whose images are the validation
set) where both tables have validation values. A replica has

(i)   a dense mean within 2.5 sd / sqrt(n) + 0.1 of theirs;
(ii)  at least 90% of the cells within 2.5 sigma sqrt(1/n + 1/m) of theirs, where sigma is their standard deviation
      between trials, pooled over the retraining times of a line and density, at least 0.15;
(iii) every technique's curve within 0.45 on average over its cells (low-LR weight rewinding excepted, whose trials
      differ by up to 4 points in the authors' tables), and all cells together within 0.25.

n and m count our and their trials. Sigma and sd are theirs, so that a noisy table does not excuse itself; ours stand in
where they have a single trial. The limits of (i) and (iii) are for networks like the paper's, whose trials differ by
0.2 to 0.4 points; `Card.noise` tells where trials differ by more, and replicas miss them more often.
"""

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from rewound.conclusions.cell import Line

STANDARD_ERRORS: Final = 2.5
LEAST_SIGMA: Final = 0.15
DENSE_ALLOWANCE: Final = 0.1
LEAST_INSIDE: Final = 0.9
CURVE_BIAS: Final = 0.45
BIAS: Final = 0.25
EXEMPT: Final = "low-lr-weight-rewinding"
QUIET: Final = 0.5
"""The noise up to which the limits hold: that of the authors' networks on CIFAR-10 is 0.32 to 0.41."""


@dataclass(frozen=True)
class Compared:
    """One cell of both tables, or the dense networks (technique empty, density 1), as shown."""

    line: Line
    density: float
    retrain_epochs: float  # 0 of dense networks
    ours: float
    n: int
    theirs: float
    low: float  # their lowest and highest trial
    high: float
    m: int
    sigma: float

    @property
    def difference(self) -> float:
        """Ours minus theirs."""
        return self.ours - self.theirs

    @property
    def margin(self) -> float:
        """The largest difference that chance explains."""
        if not self.line.technique:
            return STANDARD_ERRORS * self.sigma / math.sqrt(self.n) + DENSE_ALLOWANCE
        return STANDARD_ERRORS * self.sigma * math.sqrt(1 / self.n + 1 / self.m)

    @property
    def inside(self) -> bool:
        """Whether chance explains the difference."""
        return abs(self.difference) <= self.margin


@dataclass(frozen=True)
class Curve:
    """All compared cells of one line."""

    line: Line
    cells: tuple[Compared, ...]

    @property
    def bias(self) -> float:
        """The mean difference, ours minus theirs."""
        return fmean(cell.difference for cell in self.cells)

    @property
    def judged(self) -> bool:
        """Whether criterion (iii) looks at this curve."""
        return self.line.technique != EXEMPT

    @property
    def inside(self) -> bool:
        """Whether the bias is small enough, or not judged."""
        return not self.judged or abs(self.bias) <= CURVE_BIAS


@dataclass(frozen=True)
class Lead:
    """How far one technique is above another in each table: iterative, 4x and beyond, in full time, mean of levels."""

    line: Line
    over: str  # the other technique
    ours: float
    theirs: float
    levels: int


@dataclass(frozen=True)
class Card:
    """How near two tables come on one recipe; a criterion is None where the tables share nothing to judge it by."""

    recipe: str
    unit: str
    measure: str
    dense: Compared | None
    curves: tuple[Curve, ...]
    leads: tuple[Lead, ...]
    alone: tuple[int, int]  # cells that only we, only they have
    failed: tuple[int, int]  # runs of ours, of theirs that failed

    @property
    def cells(self) -> tuple[Compared, ...]:
        """Every compared cell."""
        return tuple(cell for curve in self.curves for cell in curve.cells)

    @property
    def noise(self) -> float:
        """Their standard deviation between trials, over all cells."""
        return math.sqrt(fmean(cell.sigma**2 for cell in self.cells)) if self.curves else 0.0

    @property
    def bias(self) -> float | None:
        """The mean difference over all cells."""
        return fmean(cell.difference for cell in self.cells) if self.curves else None

    @property
    def dense_conforms(self) -> bool | None:
        """Criterion (i)."""
        return self.dense.inside if self.dense else None

    @property
    def cells_conform(self) -> bool | None:
        """Criterion (ii)."""
        return sum(cell.inside for cell in self.cells) >= LEAST_INSIDE * len(self.cells) if self.curves else None

    @property
    def curves_conform(self) -> bool | None:
        """Criterion (iii)."""
        return None if self.bias is None else abs(self.bias) <= BIAS and all(curve.inside for curve in self.curves)

    @property
    def conforms(self) -> bool | None:
        """All three; None where none fails and one could not be judged."""
        judged = (self.dense_conforms, self.cells_conform, self.curves_conform)
        return False if False in judged else None if None in judged else True
