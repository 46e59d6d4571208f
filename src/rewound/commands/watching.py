"""`rewound watch`: the page of a sweep while it runs, made anew from the store as results arrive.

It only reads the store, and each result once. Who works on what is what the claims say; how long it takes follows from
how long the nodes took that have ended, and from how many workers there are now.
"""

import shlex
import signal
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import islice

from rewound.commands.console import say
from rewound.commands.sweeps import as_sweep, by_machine, evidence_of, origin_of, store_option
from rewound.conclusions.tables import Tables
from rewound.experiments.executors.walking import Headway, Watch
from rewound.experiments.plans import planning
from rewound.experiments.plans.collection import collected, has_failed, is_no_number
from rewound.experiments.plans.outlook import seconds_left
from rewound.experiments.plans.planning import Node
from rewound.experiments.sweeps.sweep import Sweep
from rewound.experiments.sweeps.targets import Target
from rewound.foundations.errors import InputError
from rewound.foundations.quantities import counted, spoken
from rewound.reports.charts import Json
from rewound.reports.live import HOST, PORT, Lookout, Server
from rewound.reports.look import looks, mode_title, ratios
from rewound.reports.page import content
from rewound.states.storage.artifacts import Result, failure_in_words
from rewound.states.storage.backend import Location, OnlyRead
from rewound.states.storage.claims import Claim
from rewound.states.storage.store import Store, backend_at, is_store

_PAUSE = 10.0  # seconds without a claim until nobody is taken to be at work: between two nodes a worker has none
_LOOKED_AT = 20  # failures that are read again at each look
_LISTED = 200  # workers and failures that the page lists


def watch_sweep(given: str, place: Location, host: str, port: int) -> None:
    """Serve the page of a sweep until Ctrl-C."""
    sweep, again = as_sweep(given, place)
    if is_store(place):
        Store(OnlyRead(backend_at(place)), say)  # one that cannot be read is refused before there is a page
    where = [*(["--host", host] if host != HOST else []), *(["--port", str(port)] if port != PORT else [])]
    restart = shlex.join(["rewound", "watch", given, *store_option(place), *where])
    watched = WatchedSweep(sweep, place, again, restart)
    try:
        lookout = Lookout(watched, watched.empty())
    except ModuleNotFoundError as error:
        raise InputError(f"rewound watch needs {error.name}; pip install 'rewound[figures]'") from error
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have switched off for this process
    try:
        with Server(lookout, host, port) as server, lookout.looking():
            if not server.is_private:
                say(f"warning: whoever reaches {host} can read this page; 127.0.0.1 and an ssh tunnel keep it private")
            say(f"watching {sweep.name} in {place}: {server.url} (Ctrl-C ends it)")
            server.serve_forever()
    except KeyboardInterrupt:
        say("no longer watching; the sweep itself goes on")


class WatchedSweep:
    """A sweep as the store has it, looked at again and again."""

    def __init__(self, sweep: Sweep, root: Location, again: str, restart: str) -> None:
        self.title = sweep.name
        self._sweep, self._root = sweep, root
        self._again, self._restart = again, restart  # the commands that run and watch it
        self._plan = planning.plan(sweep.targets)
        self._steps = self._plan.steps
        self._backend = OnlyRead(backend_at(root))
        self._last_line = ""
        self._begin_again()

    def _begin_again(self) -> None:
        """Forget what was read: something of it is computed anew."""
        self._watch: Watch | None = None
        self._results: dict[str, Result] = {}
        self._claims: dict[str, Claim] = {}
        self._worked = -float("inf")  # when there was a claim
        self._drawn: set[str] | None = None  # of which results the page was made

    def result(self, key: str) -> Result | None:
        """What was read of the store."""
        return self._results.get(key)

    def results(self, keys: Collection[str]) -> Iterator[tuple[str, Result]]:
        """What was read of the store, of these keys."""
        return ((key, self._results[key]) for key in keys if key in self._results)

    def look(self) -> Json:
        """How far the sweep is, who works on it, and what failed; it costs what has changed."""
        if self._backend.read("version", 1) is None:
            if self._watch is not None:
                raise InputError(f"the store {self._root} is no longer there; mount its disk, or move it back")
            return self._said(Headway(0, 0, 0))
        if self._watch is not None and self._is_retried(self._watch.store):
            self._begin_again()
        if self._watch is None:
            self._watch = Watch(self._plan, Store(self._backend, self._hear))
        watch, store = self._watch, self._watch.store
        headway = watch.headway()
        for key in watch.status.keys() - self._results.keys():
            if key in store.known and (result := store.result(key)) is not None:  # what was skipped has none
                self._results[key] = result
        self._claims = {key: claim for key, claim in store.claims().items() if key in self._plan.by_key}
        if self._claims:
            self._worked = time.monotonic()
        return self._said(headway)

    def _is_retried(self, store: Store) -> bool:
        """Whether something that had failed is computed anew, as by --retry-failed; the first failures tell."""
        failures = (key for key, seen in self._results.items() if has_failed(seen))
        return any(store.result(key) != self._results[key] for key in islice(failures, _LOOKED_AT))

    def _hear(self, line: str) -> None:
        self._last_line = line

    def story(self) -> Json | None:
        """The data of the report's page."""
        if self._drawn == self._results.keys():
            return None
        drawn = {*self._results}
        tables = collected(self._sweep.targets, self, self._plan)
        self._drawn = drawn
        dense = {row.recipe for row in tables.rows if row.dense and row.test is not None}
        comparable = [row for row in tables.rows if row.recipe in dense]  # deltas are measured from dense networks
        return self._content(replace(tables, rows=comparable))

    def empty(self) -> Json:
        """The data before the first result."""
        return self._content(Tables([], missing=len(self._sweep.targets)))

    def _content(self, tables: Tables) -> Json:
        origin = origin_of(self._sweep, tables, self._root, self._again)
        return content(evidence_of(self._sweep, tables), origin)

    def _said(self, headway: Headway) -> Json:
        """All of it in words and numbers."""
        nodes, left = len(self._plan.nodes), len(self._plan.nodes) - headway.nodes
        workers = {claim.owner for claim in self._claims.values()}
        machines = {claim.host_name for claim in self._claims.values()}
        works = self._claims or time.monotonic() - self._worked < _PAUSE
        if not left:
            state, headline = "finished", f"Finished: {nodes:,} of {counted(nodes, 'node')}."
        elif workers:
            state = "working"
            headline = f"Running: {counted(len(workers), 'worker')} on {counted(len(machines), 'machine')}"
        elif works:
            state, headline = "working", "Running: its workers are between two nodes"
        elif headway.nodes:
            state, headline = "idle", f"Nobody works on it: {counted(left, 'node')} to do."
        else:
            state, headline = "waiting", "Nothing has run yet."
        failed = f"{headway.failed:,}" if headway.failed else ""
        facts = [
            ("Nodes", f"{headway.nodes:,} of {nodes:,}"),
            ("Steps", f"{headway.steps:,.0f} of {self._steps:,}"),
            *([("Failed or skipped", failed)] if failed else []),
            *([("Time left", time_left)] if left and (time_left := self._time_left(len(workers))) else []),
        ]
        return {
            "state": state,
            "headline": headline,
            "part": headway.steps / self._steps if self._steps else 1.0,
            "facts": facts,
            "message": self._last_line,
            "watch": self._restart,
            "again": "" if state in ("finished", "working") else self._again,
            "workers": self._workers(),
            "machines": self._machines(),
            "failures": self._failures(),
        }

    def _time_left(self, workers: int) -> str:
        if self._watch is None:
            return ""
        status, drafted = self._watch.status, self._watch.drafted

        def done(node: Node) -> int:
            claim = self._claims.get(node.key)
            return min(node.steps, max(claim.steps if claim else 0, drafted.get(node.key, 0)))

        left = [(node, node.steps - done(node)) for node in self._watch.open if node.key not in status]
        known = ((self._plan.by_key[key], result) for key, result in self._results.items())
        if (seconds := seconds_left(left, known)) is None:
            return "known when a node has ended"
        return f"about {spoken(seconds / workers)}" if workers else f"about {spoken(seconds)} with one worker"

    def _workers(self) -> list[Json]:
        claims = sorted(self._claims.items(), key=lambda each: (each[1].host_name, each[1].pid, each[0]))
        return [
            {
                "key": key,
                "machine": claim.host_name,
                "process": claim.pid,
                "work": self._description(key),
                "steps": min(claim.steps, self._plan.by_key[key].steps),
                "of": self._plan.by_key[key].steps,
            }
            for key, claim in claims[:_LISTED]
        ]

    def _machines(self) -> list[Json]:
        return [
            {"machine": host, "nodes": nodes, "took": spoken(seconds), "now": now}
            for host, nodes, seconds, now in by_machine(self._results.values(), self._claims.values())
        ]

    def _failures(self) -> list[Json]:
        found = [(key, why) for key, result in self._results.items() if (why := _failure(result))]
        return [{"key": key, "work": self._description(key), "why": why} for key, why in found[:_LISTED]]

    def _description(self, key: str) -> str:
        """A node in words: the row that it makes, or the first one that it is a part of."""
        part, seen, waiting = "", {key}, [key]
        while waiting:
            if target := self._asked.get(current := waiting.pop(0)):
                return part + self._in_words(target)
            part = "on the way to "
            following = [*self._plan.readers.get(current, ()), *self._after.get(current, ())]
            waiting += [reader for reader in following if reader not in seen]
            seen.update(following)
        return key[:12]

    def _in_words(self, target: Target) -> str:
        technique = target.technique
        name = looks([technique])[technique].label if technique else "Dense network"
        ratio = [ratios([target.density])[target.density], mode_title(target.iterative).lower()] if technique else []
        time = [] if target.retrain_epochs is None else [f"t = {target.retrain_epochs:g}"]
        words = ", ".join([name, *ratio, *time, f"trial {target.trial}"])
        return f"{target.task}: {words}" if len(self._tasks) > 1 else words

    @cached_property
    def _asked(self) -> dict[str, Target]:
        return {target.state.key: target for target in reversed(self._plan.targets)}

    @cached_property
    def _after(self) -> dict[str, list[str]]:
        """The nodes that continue a node under the same mask."""
        found: dict[str, list[str]] = {}
        for node in self._plan.nodes:
            if node.after is not None:
                found.setdefault(node.after.key, []).append(node.key)
        return found

    @cached_property
    def _tasks(self) -> set[str]:
        return {target.task for target in self._plan.targets}


def _failure(result: Result) -> str:
    if "failed" in result:
        return failure_in_words(result["failed"])
    return "its metric is not a number" if is_no_number(result) else ""
