"""Processes that do the same work: what they say arrives, and one that is killed keeps nothing from the others."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from rewound.experiments.executors.local import WorkersDied, run_processes
from rewound.foundations.errors import Failed, Fault, InputError
from rewound.states.storage.store import Say

LONG = "long " * 100_000  # more than a pipe holds: who says it waits until somebody listens
PATIENCE = 60.0


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def is_first(folder: Path) -> bool:
    try:
        (folder / "first").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def says_or_waits(folder: Path, say: Say, warn: Say, alive: Callable[[], None]) -> None:
    """The first process is killed while it says something; the other has something to say afterwards."""
    if is_first(folder):
        (folder / "begun").write_text(str(os.getpid()))
        os.replace(folder / "begun", folder / "pid")  # noqa: PTH105 (whole at once)
        until((folder / "nobody-listens").exists)
        say(LONG)
    else:
        until((folder / "killed").exists)
        say("done")


@pytest.mark.slow
def test_a_worker_that_is_killed_in_the_middle_of_a_message(tmp_path: Path) -> None:
    said, begun = list[str](), time.monotonic()

    def tick() -> None:
        assert time.monotonic() - begun < PATIENCE, "the other worker hangs"
        if (tmp_path / "pid").exists() and not (tmp_path / "killed").exists():
            (tmp_path / "nobody-listens").touch()  # not before this function returns
            time.sleep(0.5)
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
            (tmp_path / "killed").touch()

    with pytest.raises(WorkersDied, match=r"1 of 2 workers died \(exit code -9\)"):
        run_processes(2, partial(says_or_waits, tmp_path), said.append, said.append, tick)
    assert said == ["done"], "and nothing of half a message"


def says_much(say: Say, warn: Say, alive: Callable[[], None]) -> None:
    for number in range(3):
        say(f"{number} {LONG}\n\x1b")
        warn("é")


@pytest.mark.slow
def test_long_messages_arrive_whole_and_in_order() -> None:
    said, warned = list[str](), list[str]()
    run_processes(1, says_much, said.append, warned.append, lambda: None)
    assert said == [f"{number} {LONG}\n\x1b" for number in range(3)]
    assert warned == ["é"] * 3


def raises(error: Exception, say: Say, warn: Say, alive: Callable[[], None]) -> None:
    raise error


@pytest.mark.slow
@pytest.mark.parametrize("error", [InputError("too small"), Failed("gone"), RuntimeError("boom")], ids=repr)
def test_the_error_of_a_worker_is_raised_here(error: Exception) -> None:
    kind = Fault if isinstance(error, RuntimeError) and not isinstance(error, Failed) else type(error)
    with pytest.raises(kind, match=str(error)):
        run_processes(1, partial(raises, error), print, print, lambda: None)


HELD = """
import signal
from multiprocessing import get_context
from rewound.foundations.owners import interrupts_held

if __name__ == "__main__":
    with interrupts_held():
        process = get_context("spawn").Process(target=print, args=("started",))
        process.start()
        held = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    process.join()
    print(signal.SIGINT in held)
"""


def test_the_first_process_that_is_started_never_sees_ctrl_c(tmp_path: Path) -> None:
    """multiprocessing starts a process of its own before it, and lets signals through afterwards."""
    (tmp_path / "script.py").write_text(HELD)
    ran = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["started", "True"]
