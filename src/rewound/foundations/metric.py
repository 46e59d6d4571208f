"""What a network is measured by: the name of a metric, its unit, which way is better, and how it is shown.

| unit                 | shown                  | a named drop ("1% drop")               |
|----------------------|------------------------|----------------------------------------|
| fraction             | times 100, in points   | one point                              |
| percent              | as it is, in points    | one point                              |
| BLEU                 | as it is               | one BLEU                               |
| any other, as nats   | as it is               | one percent of the dense network's value |

Differences are signed so that a negative one is worse, whichever way is better.
"""

import math
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from rewound.foundations.errors import InputError

Direction = Literal["higher", "lower"]
_POINTS: Final = ("fraction", "percent", "%")


class Metric(NamedTuple):
    """What `evaluate` returns: its name, the unit it is in (that of `max_drop`, too), and which way is better.

    A "fraction" is shown in points, times 100. State the unit of anything else, as in
    `Metric("cross-entropy", "nats", higher_is_better=False)`: a fraction above 1 is refused.
    """

    name: str = "accuracy"
    unit: str = "fraction"
    higher_is_better: bool = True

    @property
    def direction(self) -> Direction:
        """Which values are better."""
        return "higher" if self.higher_is_better else "lower"

    @property
    def scale(self) -> float:
        """From a value to the shown one."""
        return 100.0 if self.unit == "fraction" else 1.0

    @property
    def shown_unit(self) -> str:
        """The unit of what is shown."""
        return "points" if self.unit in _POINTS else self.unit

    @property
    def ends_at_hundred(self) -> bool:
        """Whether its scale, as shown, ends at 100, so that one of it is the same to every network."""
        return self.unit in (*_POINTS, "BLEU")

    def gain(self, value: float) -> float:
        """The value, with its sign turned where lower is better: the larger, the better.

        >>> Metric().gain(0.9), Metric("error", higher_is_better=False).gain(0.1)
        (0.9, -0.1)
        """
        return value if self.higher_is_better else -value

    def described(self) -> str:
        """The metric in words.

        >>> Metric().described()
        'accuracy (fraction, higher is better)'
        """
        return f"{self.name} ({self.unit}, {self.direction} is better)"

    def check(self, values: Iterable[float | None], of: str) -> None:
        """An error if these values, of a recipe or a table, cannot be in its unit: no fraction is above 1."""
        for value in values:
            if self.unit == "fraction" and value is not None and 1 < value < math.inf:
                raise InputError(
                    f"{of} has {self.name} {value:g}, which is no fraction; state its unit: in a table by the columns "
                    "metric,unit,direction (as accuracy,percent,higher), in a recipe by its metric"
                )


ACCURACY: Final = Metric()
