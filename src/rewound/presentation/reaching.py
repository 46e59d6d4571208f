"""How far a technique compresses, in words, the same in the terminal and on the page."""

from collections.abc import Mapping
from typing import NamedTuple

from rewound.conclusions.baseline import Baseline
from rewound.conclusions.trust import Reach


class ToldReach(NamedTuple):
    """A reach as it is read; `range` is empty where it is unknown."""

    ratio: str
    range: str


def one_drop(baseline: Baseline) -> str:
    """The name of a drop of one, in the unit of a metric.

    >>> one_drop(Baseline(0.93, 0.002, 3)), one_drop(Baseline(26.9, 0.2, 10, "BLEU"))
    ('1% drop', '1 BLEU drop')
    """
    return "1% drop" if baseline.scale == 100 else f"1 {baseline.unit.removesuffix('s')} drop"


def told_reach(reach: Reach, tried: float, labels: Mapping[float, str]) -> ToldReach:
    """The words of a reach, of a technique that was `tried` up to this compression; `labels` are those of compressions.

    >>> told_reach(Reach(4, (None, 10), 16), tried=10, labels={4: "4.00×", 10: "10.00×"})
    ToldReach(ratio='4.00×', range='none–≥10.00×')
    """

    def ratio(compression: float | None) -> str:
        if compression is None:
            return "none"
        return f"{'≥' if compression == tried else ''}{labels[compression]}"

    ends = dict.fromkeys(map(ratio, reach.range or ()))
    return ToldReach(ratio(reach.compression), "–".join(ends).replace("×–", "–"))
