"""How near one table of results comes to another: is ours a replica of theirs?

Values are means over trials, as shown, of what the tables call test. The paper's CIFAR-10 and ImageNet networks are
compared on all held-out images (80% test + 20% validation, so that it does not matter whose images are the validation
set) where both tables have validation values. A replica has

(i)   a dense mean within 2.5 sd / sqrt(n) + 0.1 of theirs;
(ii)  at least 90% of the cells within 2.5 sigma sqrt(1/n + 1/m) of theirs, where sigma is their standard deviation
      between trials, pooled over the retraining times of a line and density, at least 0.15;
(iii) every technique's curve within 0.45 on average over its cells (low-LR weight rewinding excepted, whose trials
      differ by up to 4 points in the authors' tables), and all cells together within 0.25.

Values are in points, or BLEU; in any other unit they are in percent of the dense mean (theirs, else ours), so that the
limits mean the same. n and m count our and their trials. Sigma and sd are theirs, so that a noisy table does not excuse
itself; ours stand in where they have a single trial. The limits of (i) and (iii) are for networks like the paper's,
whose trials differ by 0.2 to 0.4 points; `Card.noise` tells where trials differ by more, and replicas miss them more
often.

Cells are matched by recipe, pruning, technique, nominal density (to four decimals, as the authors' one-shot rows have)
and nominal retraining time. Failed runs are left out and counted.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Final, TypeAlias

from rewound.conclusions.cells import Cell, Line, Pooled, baselines, cells, line_of, metrics_of, pooled, scores_of
from rewound.conclusions.findings import at_full_time
from rewound.conclusions.tables import Row
from rewound.foundations.csvfiles import write_table
from rewound.foundations.errors import InputError
from rewound.foundations.metric import Metric
from rewound.foundations.quantities import counted

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
    """One technique minus another in each table: iterative, 4x and beyond, at full time, mean of levels."""

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


SAME_DENSITY: Final = 0.000051  # half of the fourth decimal: 0.8**5 = 0.32768 is 0.3277 in a one-shot row
LEADS: Final = (
    ("lr-rewinding", "fine-tuning"),
    ("weight-rewinding", "fine-tuning"),
    ("lr-rewinding", "weight-rewinding"),
)
LEADS_TO: Final = 0.25  # the largest density: 4x and beyond
COLUMNS: Final = (
    *("recipe", "pruning", "iterative", "technique", "density", "retrain_epochs"),
    *("ours", "n", "theirs", "theirs_min", "theirs_max", "m", "sigma", "difference", "margin", "inside", "unit"),
)

_Values: TypeAlias = Callable[[Cell], list[float]]


def compare(
    ours: Iterable[Row],
    theirs: Iterable[Row],
    training_epochs: Mapping[str, float] = {},
    test_shares: Mapping[str, float] = {},
) -> list[Card]:
    """One card for every recipe of which both tables have dense networks or a cell.

    `training_epochs` is T by recipe; where it is not known, the longest retraining time is taken for it. `test_shares`
    is the fraction of the held-out images that is the test set, for recipes that are compared on all of them; the
    others are compared on test.

    >>> rows = [Row("digits", "unstructured", False, "", 1, None, n, 0.97, 0.97 + n / 1000) for n in (1, 2, 3)]
    >>> [(card.recipe, card.dense_conforms, card.cells_conform) for card in compare(rows, rows)]
    [('digits', True, None)]
    """
    ours, theirs = list(ours), list(theirs)
    pairs, metrics, cards = matched(ours, theirs), metrics_of(ours), []
    for recipe in sorted(metrics.keys() & metrics_of(theirs).keys()):
        our_rows, their_rows = ([row for row in rows if row.recipe == recipe] for rows in (ours, theirs))
        own_pairs = [pair for pair in pairs if pair[0].line.recipe == recipe]
        share = test_shares.get(recipe.split(" ")[0], 1.0)  # "digits batch-size=64" is a variant of "digits"
        card = _card(recipe, metrics[recipe], our_rows, their_rows, own_pairs, training_epochs.get(recipe), share)
        if card.dense or card.curves:
            cards.append(card)
    if not cards:
        raise InputError(
            f"nothing to compare: one table has {_contents(ours)}, the other {_contents(theirs)}; "
            "recipe, pruning, technique, density and retraining time must agree"
        )
    return cards


def matched(ours: Iterable[Row], theirs: Iterable[Row]) -> list[tuple[Cell, Cell]]:
    """The cells that both tables have, ours and theirs; a recipe whose metrics differ is an error."""
    ours, theirs = list(ours), list(theirs)
    our_metrics, their_metrics = metrics_of(ours), metrics_of(theirs)
    if wrong := sorted(
        recipe for recipe in our_metrics.keys() & their_metrics.keys() if our_metrics[recipe] != their_metrics[recipe]
    ):
        one, other = our_metrics[wrong[0]].described(), their_metrics[wrong[0]].described()
        raise InputError(f"cannot compare {wrong[0]}: one table has {one}, the other {other}; use one metric")
    there: dict[tuple[Line, float], list[Cell]] = defaultdict(list)
    for cell in cells(theirs):
        there[cell.line, cell.retrain_epochs].append(cell)
    found = ((cell, _nearest(there[cell.line, cell.retrain_epochs], cell.density)) for cell in cells(ours))
    return [(cell, near) for cell, near in found if near is not None]


def overlay(ours: Iterable[Row], theirs: Iterable[Row]) -> list[Row]:
    """Their runs of cells that we have too, to be drawn over ours: under our densities, and moved to our dense mean.

    A delta is measured from a table's own dense networks, which come along; where theirs has none, ours do, and its
    values stay where they are.
    """
    ours, theirs = list(ours), list(theirs)
    places = {(cell.line, cell.density, cell.retrain_epochs): one.density for one, cell in matched(ours, theirs)}
    shared = {line.recipe for line, *_ in places}
    known = shared & {row.recipe for row in theirs if row.dense and row.test is not None}
    zero, moved = baselines(row for row in theirs if row.recipe in known), baselines(ours)
    found = [row for row in ours if row.dense and row.recipe in shared - known]
    for row in theirs:
        place = (line_of(row), row.density, row.retrain_epochs or 0)
        density = places.get(place) if not row.dense else 1.0 if row.recipe in known else None
        if density is not None and row.test is not None:
            shift = moved[row.recipe].mean - zero[row.recipe].mean if row.recipe in known else 0.0
            found.append(replace(row, density=density, test=row.test + shift))
    return found


def write_comparison(cards: Iterable[Card], path: Path) -> None:
    """Write `compare.csv`: a line per compared cell, as shown; dense networks have an empty technique."""
    lines = []
    for card in cards:
        for cell in ([card.dense] if card.dense else []) + list(card.cells):
            place = (*cell.line, cell.density, cell.retrain_epochs or None)
            values = (cell.ours, cell.n, cell.theirs, cell.low, cell.high, cell.m, cell.sigma)
            judged = (cell.difference, cell.margin, cell.inside)
            lines.append((*place, *map(_rounded, (*values, *judged)), card.unit))
    write_table(COLUMNS, lines, path)


def _rounded(value: float | bool) -> float | bool:
    # Tables keep ten digits, so a millionth of a point is nothing; adding 0 turns -0.0 into 0.
    return round(value, 6) + 0.0 if isinstance(value, float) else value


def _nearest(cells: Sequence[Cell], density: float) -> Cell | None:
    near = min(cells, key=lambda cell: abs(cell.density - density), default=None)
    return near if near is not None and abs(near.density - density) <= SAME_DENSITY else None


def _card(
    recipe: str,
    metric: Metric,
    ours: list[Row],
    theirs: list[Row],
    pairs: list[tuple[Cell, Cell]],
    epochs: float | None,
    share: float,
) -> Card:
    if any(row.val is None for row in ours + theirs if row.test is not None):
        share = 1.0

    dense = _dense(recipe, ours, metric), _dense(recipe, theirs, metric)
    scale, unit = metric.scale, metric.shown_unit
    if not metric.ends_at_hundred:
        scale, unit = 100 / _dense_value(recipe, metric, [*dense[1], *dense[0]]), f"% of the dense {metric.name}"

    def values(cell: Cell) -> list[float]:
        return [scale * (share * test + (1 - share) * val) for test, val in zip(cell.tests, cell.vals, strict=True)]

    our_cells, their_cells = cells(ours), cells(theirs)
    compared = _compared(pairs, our_cells, their_cells, values)
    epochs = epochs or max((cell.retrain_epochs for cell in our_cells + their_cells), default=0)
    return Card(
        recipe,
        unit=unit,
        measure="test" if share == 1 else f"{share:.0%} test + {1 - share:.0%} validation",
        dense=next(iter(_compared(list(zip(*dense, strict=False)), *dense, values)), None),
        curves=tuple(Curve(line, tuple(group)) for line, group in groupby(compared, key=lambda cell: cell.line)),
        leads=tuple(_leads(compared, at_full_time([cell for cell, _ in pairs], epochs))),
        alone=(len(our_cells) - len(pairs), len(their_cells) - len(pairs)),
        failed=(sum(row.test is None for row in ours), sum(row.test is None for row in theirs)),
    )


def _dense(recipe: str, rows: Iterable[Row], metric: Metric) -> list[Cell]:
    """The dense networks as one cell; none where there are none."""
    tests, vals = scores_of(row for row in rows if row.dense)
    return [Cell(Line(recipe, "", False, ""), 1.0, 0.0, tests, vals, metric=metric)] if tests else []


def _dense_value(recipe: str, metric: Metric, dense: Sequence[Cell]) -> float:
    """What the values of a recipe are compared in percent of: the mean of the first of these dense networks."""
    value = abs(fmean(dense[0].tests)) if dense else 0.0
    if not value:
        raise InputError(
            f"cannot compare {recipe} in {metric.unit}: differences are judged in percent of the dense {metric.name}, "
            f"which is {'0' if dense else 'in neither table'}; give a table with dense networks that have one"
        )
    return value


def _compared(
    pairs: Iterable[tuple[Cell, Cell]], our_cells: Iterable[Cell], their_cells: Iterable[Cell], values: _Values
) -> list[Compared]:
    our_spread, their_spread = _spreads(our_cells, values), _spreads(their_cells, values)
    found = []
    for one, other in pairs:
        spread = their_spread[other.line, other.density] or our_spread[one.line, one.density]
        sigma = max(LEAST_SIGMA, math.sqrt(spread.variance) if spread else 0.0)
        ours, theirs = values(one), values(other)
        means = fmean(ours), len(ours), fmean(theirs), min(theirs), max(theirs), len(theirs)
        found.append(Compared(one.line, one.density, one.retrain_epochs, *means, sigma))
    return found


def _spreads(cells: Iterable[Cell], values: _Values) -> dict[tuple[Line, float], Pooled | None]:
    """The variance between trials, pooled over the retraining times of a line and density."""
    samples: dict[tuple[Line, float], list[list[float]]] = defaultdict(list)
    for cell in cells:
        samples[cell.line, cell.density].append(values(cell))
    return {place: pooled(values_of_place) for place, values_of_place in samples.items()}


def _leads(compared: Iterable[Compared], full: Iterable[Cell]) -> Iterator[Lead]:
    chosen = {cell.setting for cell in full if cell.line.iterative}
    levels: dict[Line, dict[float, Compared]] = defaultdict(dict)
    for cell in compared:
        if (cell.line, cell.density, cell.retrain_epochs) in chosen and cell.density <= LEADS_TO:
            levels[cell.line][cell.density] = cell
    for first, second in LEADS:
        for line in (line for line in levels if line.technique == first):
            above, below = levels[line], levels.get(line._replace(technique=second), {})
            if both := above.keys() & below.keys():
                ours = fmean(above[density].ours - below[density].ours for density in both)
                theirs = fmean(above[density].theirs - below[density].theirs for density in both)
                yield Lead(line, second, ours, theirs, len(both))


def _contents(rows: Sequence[Row]) -> str:
    recipes = sorted({row.recipe for row in rows})
    named = ", ".join(recipes[:3]) + (", ..." if len(recipes) > 3 else "")
    return f"{counted(len(cells(rows)), 'cell')} of {named}" if recipes else "no rows"
