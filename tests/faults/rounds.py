"""Where faults strike: a sweep in a store of its own, workers at work on it, and the checks afterwards."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from unittest.mock import patch

import rewound.states.storage.claims
from checks import Evidence, tables_of, wrong
from nursery import Child, Nursery, Order
from rewound.experiments.executors import local
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import plan
from rewound.experiments.sweeps.sweep import Sweep, load_sweep
from rewound.states.storage.backend import as_location
from rewound.states.storage.store import Store
from watched_process import Strike, Watched, as_python_path

SWEEP: Final = """
recipe = "quick_task:Quick"
trials = [1, 2]

[[experiment]]
technique = ["weight-rewinding", "lr-rewinding"]
retrain-epochs = [1, 2]
levels = { keep = 0.5, count = 2 }
"""
OTHER_SWEEP: Final = """
recipe = "quick_task:Quick"
trials = [2, 3]

[[experiment]]
technique = ["fine-tuning", "lr-rewinding"]
retrain-epochs = 2
levels = { keep = 0.5, count = 3 }
"""
SMALL_SWEEP: Final = """
recipe = "quick_task:Quick"
trials = [1]

[[experiment]]
technique = "lr-rewinding"
retrain-epochs = 1
levels = { keep = 0.5, count = 2 }
"""
STALE: Final = 1.0  # seconds after which a silent owner is taken for dead, in the processes of a campaign
_SETTINGS: Final = {
    "rewound.states.storage.claims:STALE": STALE,
    "rewound.experiments.plans.execution:SNAPSHOT": -1.0,  # a draft at the end of each epoch
    "rewound.experiments.plans.execution:HEARTBEAT": 0.1,
    "rewound.experiments.executors.ray_cluster:DEATHS": 1e9,  # a campaign may kill those at one node at any time
}
_DRIVE: Final = "import json, sys, rewound; rewound.run(sys.argv[1], store=sys.argv[2], **json.loads(sys.argv[3]))"


@dataclass
class Ground:
    """Where rounds take place: the sweeps, their undisturbed tables, and a nursery for each environment."""

    folder: Path
    sweeps: dict[str, Sweep] = field(default_factory=dict)
    tables: dict[str, dict[str, bytes]] = field(default_factory=dict)
    nurseries: dict[str, Nursery] = field(default_factory=dict)
    pace: float = 1.0
    """Seconds that one worker takes for the first sweep here, when nobody disturbs it."""
    count: int = 0

    def nursery(self, environment: Mapping[str, str] = {}, container: Sequence[str] = ()) -> Nursery:
        """A nursery whose workers have this environment, and are in this container."""
        name = repr((sorted(environment.items()), container))
        if name not in self.nurseries:
            folder = self.folder / f"nursery-{len(self.nurseries)}"
            self.nurseries[name] = Nursery(folder, environment, container)
        return self.nurseries[name]

    def path(self, name: str) -> str:
        return str(self.folder / f"{name}.toml")


@contextmanager
def ground(folder: Path) -> Iterator[Ground]:
    """The sweeps have run once, and nobody has disturbed them."""
    made = Ground(folder)
    before, rewound.states.storage.claims.STALE = rewound.states.storage.claims.STALE, STALE
    try:
        for name, text in (("sweep", SWEEP), ("other", OTHER_SWEEP), ("small", SMALL_SWEEP)):
            Path(made.path(name)).write_text(text)
            sweep = load_sweep(made.path(name))
            store = Store(folder / "undisturbed" / name, lambda line: None)
            local.run(plan(sweep.targets), store, Options(), say=lambda line: None)
            made.sweeps[name] = sweep
            made.tables[sweep.name] = tables_of(sweep, store, folder / "undisturbed" / "tables" / name)
        made.nursery().wait_until_ready()
        began = time.monotonic()
        assert Round(made, random.Random(0)).start().wait() == 0
        made.pace = time.monotonic() - began
        yield made
    finally:
        rewound.states.storage.claims.STALE = before
        for nursery in made.nurseries.values():
            nursery.close()


class Round:
    """One sweep in a store of its own, and what is done to the processes at work on it."""

    def __init__(
        self,
        on: Ground,
        draw: random.Random,
        *,
        sweeps: tuple[str, ...] = ("sweep",),
        store: str | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        on.count += 1
        self.on, self.draw, self.sweeps = on, draw, sweeps
        self.folder = on.folder / f"round-{on.count}"
        self.folder.mkdir()
        self.store = store or str(self.folder / "store")
        self.environment = environment or {}
        self.children: list[Child] = []
        self.done: Counter[str] = Counter()
        """What was done to it, and how often."""
        self.was_damaged = False

    def start(
        self,
        machine: str | None = None,
        *,
        sweep: str | None = None,
        strike: Strike | None = None,
        keep_all: bool = False,
        listings: float = 0.0,
        nursery: Nursery | None = None,
    ) -> Child:
        """One more worker."""
        watched = Watched(str(self.folder / "journal"), machine, _SETTINGS, strike, listings)
        said = str(self.folder / f"said-{len(self.children)}")
        order = Order(self.on.path(sweep or self.sweeps[0]), self.store, said, watched, keep_all)
        self.children.append((nursery or self.on.nursery(self.environment)).start(order))
        return self.children[-1]

    def drive(self, **options: object) -> subprocess.Popen[bytes]:
        """A driver that starts workers of its own by an engine, as `rewound run` does."""
        watched = Watched(str(self.folder / "journal"), None, _SETTINGS)
        paths = [as_python_path(self.folder / "site"), *sys.path]
        given = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **watched.environment()}
        words = [sys.executable, "-c", _DRIVE, self.on.path(self.sweeps[0]), self.store, json.dumps(options)]
        with (self.folder / "said-by-drivers").open("a") as said:
            return subprocess.Popen(
                words, stdout=said, stderr=said, env={**os.environ, **self.environment, **given}, cwd=self.folder
            )

    def processes(self, driver: int) -> dict[str, list[int]]:
        """The living processes of its drivers, whoever started them, by what they are."""
        journal = self.folder / "journal"
        at_work = {json.loads(line)["pid"] for line in journal.read_text().splitlines()} if journal.exists() else set()
        found: dict[str, list[int]] = defaultdict(list)
        for folder in Path("/proc").glob("[0-9]*"):
            pid = int(folder.name)
            try:
                words, told = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
            except OSError:  # it has ended, or is another's
                continue
            if str(journal).encode() in told:
                named = "raylet" if b"/raylet" in words else "head" if b"gcs_server" in words else "other process"
                found["driver" if pid == driver else "worker" if pid in at_work else named].append(pid)
        return found

    def pause(self, shortest: float, longest: float) -> None:
        """Wait for a random part of the time that the sweep takes here, so that strikes fall within it."""
        time.sleep(self.on.pace * self.draw.uniform(shortest, longest))

    def hit(self, child: Child, number: int, name: str) -> bool:
        """Send a signal, and count it if it has arrived."""
        arrived = child.signal(number)
        self.done[name] += arrived
        return arrived

    def finish(self) -> list[str]:
        """Continue in peace, and say what is wrong."""
        for child in self.children:
            child.signal(signal.SIGCONT)
        faults = [
            f"a worker that nobody disturbed ended with {code}: {self.children[-1].said.read_text()}"
            for sweep in self.sweeps
            if (code := self.start(sweep=sweep).wait()) != 0
        ]
        for child in self.children:
            if child.wait() is None:
                faults.append(f"process {child.pid} does not end: {child.said.read_text()}")
                child.signal(signal.SIGKILL)
        said = self.said()
        if "Traceback" in said:
            faults.append(f"a process ended by a traceback: {said[said.index('Traceback') :][:2000]}")
        with patch.dict(os.environ, self.environment):
            store = Store(as_location("store", self.store), lambda line: None)
            sweeps = [self.on.sweeps[name] for name in self.sweeps]
            evidence = Evidence(sweeps, store, self.folder / "journal", said, self.was_damaged)
            return faults + wrong(evidence, self.on.tables, self.folder / "tables")

    def said(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("said-*")))


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "what was waited for did not come"
        time.sleep(0.005)
