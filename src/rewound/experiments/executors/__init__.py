"""Where the work runs: an executor does whatever of a plan is not done yet, until all of it is or the time is up.

Workers share nothing but the store, so an executor has only to start them (`working`), and each finds its own work
(`walking`).
"""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Protocol, runtime_checkable

from rewound.experiments.executors import local
from rewound.experiments.executors.ray_cluster import Ray
from rewound.experiments.executors.slurm import Slurm
from rewound.experiments.executors.walking import Headway
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import Plan
from rewound.foundations.errors import InputError
from rewound.foundations.names import check_function, lookup
from rewound.states.storage.store import Say, Store


class Executor(Protocol):
    """Runs a plan; `say` takes lines for a person, `tick` now and then how far the plan is.

    The device in `options` is only a name here: an executor looks for it, and for the data, where it works.
    """

    def __call__(
        self, plan: Plan, store: Store, options: Options, *, say: Say, tick: Callable[[Headway], None]
    ) -> None: ...


@runtime_checkable
class Engine(Executor, Protocol):
    """An executor whose workers run on other machines: it decides how many there are, and `jobs` is not for it."""

    @property
    def wait(self) -> bool:
        """Whether it returns when the workers have ended; otherwise as soon as they are asked for."""

    def check(self, options: Options) -> None:
        """An error if no worker could be asked for now; no store is made for what cannot begin."""


EXECUTORS: Mapping[str, Callable[..., Executor]] = {"local": lambda: local.run, "ray": Ray, "slurm": Slurm}
"""What makes an executor of each name, with the options that it has."""


def executor_named(name: str, **given: object) -> Executor:
    """The executor of that name, from the table with the options given (None: not given), or `package.module:name`."""
    chosen = {option: value for option, value in given.items() if value is not None}
    known = {executor: [*signature(made).parameters] for executor, made in EXECUTORS.items()}
    for option in chosen:
        if option not in known.get(name, ()):
            those = " or ".join(f"--on {each}" for each, options in known.items() if option in options)
            flag = "no-wait" if option == "wait" else option.replace("_", "-")
            raise InputError(f"--{flag} goes with {those}, not with --on {name}; leave it out")
    if name in EXECUTORS:
        return EXECUTORS[name](**chosen)
    found: Executor = lookup("executor", name, EXECUTORS)  # type: ignore[assignment]  # checked in the next line
    check_function("executor", name, found, ("plan", "store", "options", "say", "tick"))
    return found
