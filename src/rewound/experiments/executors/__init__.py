"""Where the work runs: an executor does whatever of a plan is not done yet, until all of it is or the time is up.

Workers share nothing but the store, so an executor has only to start them: each walks the plan (`walking`).
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from rewound.experiments.executors import local
from rewound.experiments.executors.walking import Headway
from rewound.experiments.plans.execution import Options
from rewound.experiments.plans.planning import Plan
from rewound.foundations.names import check_function, lookup
from rewound.states.storage.store import Say, Store


class Executor(Protocol):
    """Runs a plan; `say` takes lines for a person, `tick` now and then how far the plan is.

    The device in `options` is only a name here: an executor looks for it, and for the data, where it works.
    """

    def __call__(
        self, plan: Plan, store: Store, options: Options, *, say: Say, tick: Callable[[Headway], None]
    ) -> None: ...


EXECUTORS: Mapping[str, Executor] = {"local": local.run}


def executor_named(name: str) -> Executor:
    """The executor of that name, from the table or from `package.module:name`."""
    found = lookup("executor", name, EXECUTORS)
    if name not in EXECUTORS:
        check_function("executor", name, found, ("plan", "store", "options", "say", "tick"))
    return found
