"""How a plan is to be run, wherever that is."""

import math
import time
from dataclasses import dataclass

from rewound.foundations.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run a plan."""

    jobs: int = 1
    device: str = "cpu"
    keep_all: bool = False
    """Whether all tensors are kept, or only those that planned work needs."""
    minutes: float | None = None
    """Stop after this time, with a draft of everything under way; None: run to the end."""
    plain: bool = False
    """On a GPU: the plain loop, one network at a time, nothing captured or compiled."""

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise InputError(f"jobs must be at least 1, not {self.jobs}")
        if self.minutes is not None and not self.minutes > 0:
            raise InputError(f"minutes must be above 0, not {self.minutes:g}; leave them out to run to the end")

    def until(self) -> float:
        """The end of that time from now, on the clock of `time.monotonic`."""
        return math.inf if self.minutes is None else time.monotonic() + 60 * self.minutes


def keeps_all(keep: str) -> bool:
    """What `keep_all` is for a word of the command line."""
    if keep not in ("needed", "all"):
        raise InputError(f"keep must be 'needed' or 'all', not {keep!r}")
    return keep == "all"
