"""The dense networks that everything is measured from: a delta is median test - mean dense test, as shown."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, stdev

from rewound.conclusions.tables.rows import Row
from rewound.conclusions.units import metric_of, scales, shown_scale, unit_of
from rewound.foundations.errors import InputError


@dataclass(frozen=True)
class Baseline:
    """The dense networks of one recipe: the zero of every delta, and how much chance alone moves it."""

    mean: float
    sd: float  # 0 for a single run, whose spread is unknown
    n: int
    metric: str = "accuracy"
    """What the values are called."""

    @property
    def scale(self) -> float:
        """Table values to shown values: a fraction is shown in points (x 100), other scores as they are."""
        return shown_scale(self.mean)

    @property
    def unit(self) -> str:
        """The unit of a shown delta."""
        return unit_of(self.metric)

    @property
    def spread(self) -> float:
        """One standard deviation, as shown."""
        return self.sd * self.scale

    def delta(self, test: float) -> float:
        """Difference to the mean dense test value, as shown.

        >>> round(Baseline(mean=0.93, sd=0.002, n=3).delta(0.92), 6)
        -1.0
        """
        return (test - self.mean) * self.scale


def baselines(rows: Iterable[Row], metrics: Mapping[str, str] = {}) -> dict[str, Baseline]:
    """The dense networks of every recipe; a recipe with pruned networks and no dense one is an error.

    `metrics` are what the values of recipes are called, as far as it is known: tables do not say it.
    """
    rows = list(rows)
    scale = scales(rows)
    dense: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.dense and row.test is not None:
            dense[row.recipe].append(row.test)
    if diverged := sorted({row.recipe for row in rows if row.dense} - dense.keys()):
        raise InputError(
            f"every dense run of {', '.join(diverged)} diverged, and deltas are measured from dense networks; "
            "lower the learning rate"
        )
    if missing := sorted({row.recipe for row in rows} - dense.keys()):
        raise InputError(
            f"no finished dense run of {', '.join(missing)}: deltas are measured from dense networks; "
            "add their rows (technique empty, density 1) to the table, or give a table of them with --dense FILE"
        )
    return {
        recipe: Baseline(
            fmean(tests),
            stdev(tests) if len(tests) > 1 else 0.0,
            len(tests),
            metrics.get(recipe) or metric_of(recipe, scale[recipe]),
        )
        for recipe, tests in dense.items()
    }
