"""How a plan is run: what the command line and Python can choose of it, and when a worker has to stop."""

import math
import time
from dataclasses import dataclass

from rewound.experiments.sweeps.declaration import Declaration
from rewound.foundations.errors import InputError, as_number, as_whole


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
    gpus_per_run: int = 1
    """How many processes train one network together, each on a GPU of its own; on the CPU they share the cores."""
    fleet: int | None = None
    """On a GPU: how many networks a worker trains side by side, at most; None: as many as make it faster."""
    declaration: Declaration | None = None
    """The sweep as it was declared, for workers on other machines; None where it is known as an object alone."""

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise InputError(f"jobs must be at least 1, not {self.jobs}")
        if as_whole("gpus-per-run", self.gpus_per_run) < 1:
            raise InputError(f"gpus-per-run must be at least 1, not {self.gpus_per_run}")
        if self.gpus_per_run > 1 and self.jobs > 1:
            raise InputError(
                f"jobs must be 1 with {self.gpus_per_run} GPUs per run, not {self.jobs}; for more workers start "
                "`rewound work` with other GPUs each (CUDA_VISIBLE_DEVICES)"
            )
        if self.fleet is not None and as_whole("fleet", self.fleet) < 1:
            raise InputError(f"fleet must be at least 1, not {self.fleet}")
        if self.fleet is not None and self.device == "cpu":
            raise InputError(
                f"a fleet of {self.fleet} needs a GPU, and the device is cpu; leave it out, or give another device: on "
                "the CPU each worker trains one network at a time"
            )
        if self.minutes is not None and not as_number("minutes", self.minutes) > 0:
            raise InputError(f"minutes must be above 0, not {self.minutes:g}; leave them out to run to the end")


def keeps_all(keep: str) -> bool:
    """What `keep_all` is for a word of the command line."""
    if keep not in ("needed", "all"):
        raise InputError(f"keep must be 'needed' or 'all', not {keep!r}")
    return keep == "all"


class Stop:
    """When a worker stops, with a draft of everything under way: its time is up, or it is asked to."""

    def __init__(self, minutes: float | None = None) -> None:
        self._end = math.inf if minutes is None else time.monotonic() + 60 * minutes

    def ask(self) -> None:
        """Let the worker stop as soon as it can."""
        self._end = -math.inf

    def is_due(self) -> bool:
        return time.monotonic() > self._end


class Paused(Exception):
    """The worker has stopped before the end; what was under way is kept as drafts."""
