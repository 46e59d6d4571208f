"""Theoretical speed-up: how many times fewer operations a pruned network takes (paper, appendix F).

Over the dense network it is dense FLOPs / median FLOPs of the trials; over fine-tuning, the median FLOPs of
fine-tuning at the same density / those of the technique. Each technique stands at its best retraining time, chosen by
validation among the runs whose FLOPs are known. `low` is of the trial with the most operations, `high` of the one with
the fewest; against fine-tuning, of the two trials furthest apart.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median

from rewound.conclusions.cell import Line, Setting, cells, setting_of
from rewound.conclusions.findings import best_over_time
from rewound.conclusions.tables.rows import Row


@dataclass(frozen=True)
class Speedup:
    """How much faster one technique's networks of one density are, in theory."""

    line: Line
    density: float
    retrain_epochs: float
    median: float
    low: float
    high: float
    trials: int

    @property
    def setting(self) -> Setting:
        """What its trials share."""
        return Setting(self.line, self.density, self.retrain_epochs)


@dataclass(frozen=True)
class _Best:
    line: Line
    density: float
    retrain_epochs: float
    flops: tuple[int, ...]

    def against(self, others: Iterable[float]) -> Speedup:
        theirs = list(others)
        ratios = median(theirs) / median(self.flops), min(theirs) / max(self.flops), max(theirs) / min(self.flops)
        return Speedup(self.line, self.density, self.retrain_epochs, *ratios, len(self.flops))


def over_dense(rows: Iterable[Row]) -> list[Speedup]:
    """The speed-up over the dense network, of every technique and density whose FLOPs are known.

    >>> dense = Row("digits", "", False, "", 1, None, 1, 0.9, 0.9, flops=1000)
    >>> pruned = Row("digits", "unstructured", True, "fine-tuning", 0.1, 4, 1, 0.9, 0.9, flops=250)
    >>> [found.median for found in over_dense([dense, pruned])]
    [4.0]
    """
    rows = list(rows)
    dense: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        if row.dense and row.flops:
            dense[row.recipe].append(row.flops)
    return [best.against([fmean(dense[best.line.recipe])]) for best in _best(rows) if best.line.recipe in dense]


def over_fine_tuning(rows: Iterable[Row]) -> list[Speedup]:
    """The speed-up over networks of the same density that were fine-tuned; fine-tuning itself is 1 with its spread."""
    best = _best(rows)
    fine_tuned = {(each.line.experiment, each.density): each for each in best if each.line.technique == "fine-tuning"}
    return [
        each.against(rival.flops)
        for each in best
        if (rival := fine_tuned.get((each.line.experiment, each.density))) is not None
    ]


def _best(rows: Iterable[Row]) -> list[_Best]:
    counted = [row for row in rows if not row.dense and row.flops and row.test is not None]
    flops: dict[Setting | None, list[int]] = defaultdict(list)
    for row in counted:
        flops[setting_of(row)].append(row.flops or 0)
    return [_Best(*cell.setting, tuple(flops[cell.setting])) for cell in best_over_time(cells(counted))]
