"""What a driver does while workers on other machines do a plan: it looks at the store, and says how far the plan is.

Workers find their work in the store, and need no driver. On Slurm they finish it if the driver dies; Ray ends the
workers of a dead driver.
"""

import time
from collections.abc import Callable
from typing import Protocol

from rewound.experiments.executors.walking import Headway, Watch
from rewound.experiments.plans.execution import failed_line
from rewound.experiments.plans.planning import Plan
from rewound.experiments.plans.remaining import tidy
from rewound.states.storage.store import Say, Store

_LOOK = 0.5  # seconds between looks at the store


class Workers(Protocol):
    """Workers that an engine has started."""

    def living(self) -> int:
        """How many are waiting or at work; an error if they ended by one that the next would meet, too."""

    def stop(self) -> None:
        """Let them keep drafts and end; to stop what has ended does nothing."""


def drive(
    plan: Plan, store: Store, workers: Workers, *, keep_all: bool, say: Say, tick: Callable[[Headway], None]
) -> None:
    """Wait until every node has ended, or until no worker is left; whatever interrupts the driver stops the workers."""
    reported: set[str] = set()
    try:
        watch = Watch(plan, store)
        reported.update(key for key, succeeded in watch.status.items() if not succeeded)
        while len(watch.status) < len(plan.nodes):
            tick(watch.headway())
            _say_failures(watch, store, reported, say)
            if not workers.living():
                break
            time.sleep(_LOOK)
    finally:
        workers.stop()
    tick(watch.headway(exact=True))
    _say_failures(watch, store, reported, say)
    tidy(plan, store, keep_all=keep_all)


def _say_failures(watch: Watch, store: Store, reported: set[str], say: Say) -> None:
    """Say why each node has failed, once; nothing of those that were skipped because another failed."""
    for key in [key for key, succeeded in watch.status.items() if not succeeded and key not in reported]:
        reported.add(key)
        if (result := store.result(key)) is not None and "failed" in result:
            say(failed_line(key, result["failed"]))
