"""A process that has imported everything, and makes workers by forking: one is there in milliseconds, not in seconds.

It reads orders as lines of JSON and writes lines of JSON: which process was made, and how one ended. The workers are
processes as any other; they end when nobody gives orders any more.
"""

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from watched_process import Strike, Watched, as_python_path, watch

_PATIENCE = 120.0  # seconds; nothing in a campaign takes as long


@dataclass(frozen=True)
class Order:
    """What a worker is to do."""

    sweep: str
    store: str
    said: str
    """The file that takes what it says."""
    watched: Watched
    keep_all: bool = False


class Child:
    """A worker, as its nursery sees it."""

    def __init__(self, pid: int, order: Order, nursery: "Nursery") -> None:
        self.pid, self.said, self._nursery = pid, Path(order.said), nursery
        self.code: int | None = None
        """How it ended: its exit code, or the number of a signal below zero."""

    def signal(self, number: int) -> bool:
        """Send it a signal; False: it has ended."""
        if self.code is not None:
            return False
        if self._nursery.is_contained:  # its number means another process here, or none
            self._nursery.order({"signal": number, "pid": self.pid})
            return True
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def is_stopped(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
        except OSError:
            return False

    def wait(self, seconds: float = _PATIENCE) -> int | None:
        """How it ended; None: it has not, in this time."""
        with self._nursery.changed:
            self._nursery.changed.wait_for(lambda: self.code is not None, seconds)
        return self.code


class Nursery:
    """Makes workers; what it is given of the environment (a preloaded library, a server's address) is theirs."""

    def __init__(self, folder: Path, environment: Mapping[str, str] = {}, container: Sequence[str] = ()) -> None:
        self.is_contained = bool(container)
        paths = [as_python_path(folder / "site"), *sys.path]
        told = Watched(str(folder / "nobody"))  # until a worker is told something else
        given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **told.environment(), **environment}
        self._process = subprocess.Popen(
            [*container, sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, **given},
        )
        self._children: dict[int, Child] = {}
        self._ordered: Order | None = None
        self._made: Child | None = None
        self._is_ready = False
        self.changed = threading.Condition()
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            fact = json.loads(line)
            with self.changed:
                if "ready" in fact:
                    self._is_ready = True
                elif "made" in fact:
                    assert self._ordered is not None
                    self._made = self._children[fact["made"]] = Child(fact["made"], self._ordered, self)
                else:
                    self._children[fact["ended"]].code = fact["code"]
                self.changed.notify_all()

    def order(self, what: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")

    def wait_until_ready(self) -> None:
        """Wait until a worker would begin at once: those of two nurseries are to begin together."""
        with self.changed:
            assert self.changed.wait_for(lambda: self._is_ready, _PATIENCE), "the nursery does not start"

    def start(self, order: Order) -> Child:
        with self.changed:
            self._ordered, self._made = order, None
            self.order(asdict(order))
            assert self.changed.wait_for(lambda: self._made is not None, _PATIENCE), "no worker was made"
            assert self._made is not None
            return self._made

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._listening.join()
        self._process.stdout.close()


# The process itself


def _work(order: Order) -> int:
    """Be a worker, as `rewound work` is."""
    from rewound.commands.sweeps import work
    from rewound.foundations.errors import InputError

    watch(order.watched)
    try:
        has_ended = work(
            order.sweep,
            store=order.store,
            keep="all" if order.keep_all else "needed",
            say=lambda line: print(line, flush=True),
            progress=lambda done, of: None,
        )
    except InputError as error:
        print(f"error: {error}", flush=True)
        return 2
    return 0 if has_ended else 75


def _main() -> None:
    for name in ("torch._dynamo", "rewound.commands.sweeps", "quick_task"):
        importlib.import_module(name)
    print(json.dumps({"ready": True}), flush=True)
    living: set[int] = set()
    waiting, is_ordered = b"", True
    while is_ordered:
        if select.select([0], [], [], 0.005)[0]:
            read = os.read(0, 1 << 16)
            is_ordered = bool(read)
            *lines, waiting = (waiting + read).split(b"\n")
            for line in lines:
                facts = json.loads(line)
                if "signal" in facts:
                    with suppress(ProcessLookupError):
                        os.kill(facts["pid"], facts["signal"])
                else:
                    living.add(_forked(facts))
        for pid in [*living]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                living.discard(pid)
                print(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}), flush=True)
    for pid in living:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os._exit(0)  # at once: it has nothing to put away


def _forked(facts: dict[str, Any]) -> int:
    """The number of a new worker."""
    strike = facts["watched"].pop("strike")
    watched = Watched(**facts.pop("watched"), strike=Strike(**strike) if strike else None)
    order = Order(**facts, watched=watched)
    if (pid := os.fork()) != 0:
        print(json.dumps({"made": pid}), flush=True)
        return pid
    said = os.open(order.said, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o666)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.close(0)
    code = 1
    try:
        code = _work(order)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    _main()
