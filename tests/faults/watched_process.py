"""What each process of a campaign does beside its work: it keeps a journal, and is struck where it is told to be.

The journal has a line for each call that changes the store, before and after it, and for each node that is begun,
published or computed again. Lines are appended whole, so that many processes share one file, and what a killed process
did up to its end is there.

A folder with `sitecustomize.py` (`as_python_path`) on the path of Python installs this in every process, also in those
that others start: workers of a driver, of Ray, of Slurm. What it does is in the environment (`Watched.environment`).
Nothing of rewound is changed but the settings named there, and only in these processes.
"""

import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "REWOUND_WATCHED"
_KEPT = ("results/", "states/", "drafts/", "claims/", "damaged/")


@dataclass(frozen=True)
class Strike:
    """What happens to a process at one of its calls that change the store."""

    call: int
    """Which of the calls, from 1; those that only give signs of life do not count."""
    after: bool
    """Whether it is struck after the call, or before it."""
    how: str
    """kill: SIGKILL; stop: SIGSTOP; term: SIGTERM."""


@dataclass(frozen=True)
class Watched:
    """What a process is told."""

    journal: str
    machine: str | None = None
    """The name of the machine that it takes itself to be on: one on another cannot be seen, only its signs of life."""
    settings: dict[str, float] = field(default_factory=dict)
    """Values of `module:name`, such as `rewound.states.storage.claims:STALE`."""
    strike: Strike | None = None
    listings: float = 0.0
    """Seconds for which it may be shown what was in the store before, as by NFS; its own changes it sees at once."""

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


def as_python_path(folder: Path) -> str:
    """A folder that installs this in each Python process that has it on its path."""
    folder.mkdir(parents=True, exist_ok=True)
    here = str(Path(__file__).parent)
    lines = ["import sys", f"sys.path.append({here!r})", "import watched_process", "watched_process.install()"]
    (folder / "sitecustomize.py").write_text("\n".join(lines) + "\n")
    return str(folder)


# What is noted

_watched: Watched | None = None
_file = -1
_calls = 0


def watch(watched: Watched) -> None:
    """Begin to do what is told; a forked process is told again."""
    global _watched, _file, _calls
    _watched, _calls = watched, 0
    _file = os.open(watched.journal, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o666)
    for name, value in watched.settings.items():
        module, _, variable = name.partition(":")
        if module in sys.modules:
            setattr(sys.modules[module], variable, value)


def note(what: str, **facts: object) -> None:
    if _watched is not None:
        line = json.dumps({"what": what, "pid": os.getpid(), "machine": _watched.machine, **facts})
        os.write(_file, line.encode() + b"\n")


def _strike(*, after: bool) -> None:
    strike = _watched.strike if _watched else None
    if strike is None or strike.call != _calls or strike.after is not after:
        return
    note("struck", how=strike.how)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[strike.how])


def _noted(call: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a backend that notes when it is called and what came of it."""

    def noting(self: Any, path: str, *given: Any, **named: Any) -> Any:
        global _calls
        if _watched is None or not path.startswith(_KEPT):
            return original(self, path, *given, **named)
        content: dict[str, object] = {}
        if given and call != "remove":
            given = (_noting_content(given[0], content), *given[1:])
        is_counted = threading.current_thread() is threading.main_thread() and not (
            call == "write" and path.startswith("claims/")
        )
        _calls += is_counted
        _seen.clear()
        note(call, path=path, phase="begins")
        if is_counted:
            _strike(after=False)
        try:
            done = original(self, path, *given, **named)
        except BaseException as error:
            note(call, path=path, phase="fails", error=f"{type(error).__name__}: {error}"[:200], **content)
            raise
        note(call, path=path, phase="ends", done=done, **content)
        _seen.clear()
        if is_counted:
            _strike(after=True)
        return done

    return noting


def _noting_content(source: Any, content: dict[str, object]) -> Any:
    def look(data: bytes) -> None:
        content["digest"] = hashlib.blake2b(data, digest_size=8).hexdigest()
        with suppress(ValueError):  # tensors, or a damaged file that is set aside
            said = json.loads(data)
            content["outcome"] = "measured" if "val" in said else "failed" if "failed" in said else "passed"

    if isinstance(source, bytes):
        look(source)
        return source

    def written(to: Path) -> None:
        source(to)
        look(to.read_bytes())

    return written


# What is seen late

_seen: dict[tuple[str, str], tuple[float, Any]] = {}


def _late(call: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A listing as it was some time ago, and a file that is not there yet, as a client of NFS sees them."""

    def looking(self: Any, path: str, *given: Any) -> Any:
        if _watched is None or not _watched.listings:
            return original(self, path, *given)
        when, found = _seen.get((call, path), (-1e9, None))
        if time.monotonic() - when < _watched.listings:
            return found
        found = original(self, path, *given)
        if call == "list" or found is None:
            _seen[call, path] = time.monotonic(), found
        return found

    return looking


# How it gets into the modules


def _change(module: ModuleType) -> None:
    """Let a module that has just been imported do what this process is told."""
    assert _watched is not None
    name = module.__name__
    for setting, value in _watched.settings.items():
        if setting.partition(":")[0] == name:
            setattr(module, setting.partition(":")[2], value)
    if name == "rewound.foundations.owners":
        known = module.this_host
        module.this_host = lambda: f"{_watched.machine}/0" if _watched and _watched.machine else known()
    if name in ("rewound.states.storage.folder", "rewound.states.storage.objects"):
        backend = module.Folder if name.endswith("folder") else module.Bucket
        for call in ("create", "write", "remove"):
            setattr(backend, call, _noted(call, getattr(backend, call)))
        for call in ("list", "read", "fetch"):
            setattr(backend, call, _late(call, getattr(backend, call)))
    if name == "rewound.experiments.plans.execution":
        _note_jobs(module.Job)
    if name == "rewound.experiments.plans.realisation":
        trained = module._trained

        def noting(past: Any, *given: Any) -> Any:
            note("recomputes", key=past.key)
            return trained(past, *given)

        module._trained = noting


def _note_jobs(job: Any) -> None:
    begin, publish, draft = job.__init__, job.publish, job.keep_draft

    def begins(self: Any, node: Any, *given: Any) -> None:
        begin(self, node, *given)
        note("job", key=node.key, phase="begins", step=self.run.state.position.steps)

    def publishes(self: Any, *given: Any) -> None:
        note("job", key=self.node.key, phase="publishes")
        publish(self, *given)

    def drafts(self: Any, state: Any) -> None:
        draft(self, state)
        if not self.is_lost:
            note("job", key=self.node.key, phase="drafted", step=state.position.steps)

    job.__init__, job.publish, job.keep_draft = begins, publishes, drafts


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules of rewound as usual, and changes them once they are there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("rewound."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            _change(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Do what the environment says, from now on; nothing, if it says nothing."""
    if told := os.environ.get(VARIABLE):
        facts = json.loads(told)
        strike = Strike(**facts["strike"]) if facts.get("strike") else None
        sys.meta_path.insert(0, _Finder())
        if (
            "FAKETIME_TIMESTAMP_FILE" in os.environ
        ):  # libfaketime 0.9.10 lets Python's own fail, whatever the clock says
            time.sleep = lambda seconds: select.select([], [], [], seconds) and None
        watch(Watched(**{**facts, "strike": strike}))
