"""How far a technique compresses, in words, the same in the terminal and on the page."""

from collections.abc import Mapping
from typing import NamedTuple

from rewound.conclusions.trust import Reach


class ToldReach(NamedTuple):
    """A reach as it is read; `range` is empty where it is unknown."""

    ratio: str
    range: str


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
