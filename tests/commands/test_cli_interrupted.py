"""Ctrl-C: the command stops cleanly, says how to go on, and the same command does."""

import csv
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import SWEEP, Rewound, command, environment
from rewound.states.storage.artifacts import Result
from rewound.states.storage.store import Store


def test_ctrl_c_in_one_process(rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("x.toml").write_text(SWEEP)
    real, calls = Store.publish, iter(range(2))

    def interrupted(store: Store, key: str, result: Result) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        real(store, key, result)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "publish", interrupted)
        code, out, err = rewound_command("run", "x.toml", "--jobs", 1, "--store", "a [b] c")
    assert (code, err) == (1, "")
    assert out.endswith(
        "stopped; nothing finished is lost, continue with: rewound run x.toml --jobs 1 --store 'a [b] c'\n"
    )
    store = Store(Path("a [b] c"))
    assert len(store.finished()) == 2
    assert store.claims() == {}
    assert rewound_command("run", "x.toml", "--jobs", 1, "--store", "a [b] c").code == 0


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    """The command under way, in a process group of its own, as a terminal has it."""
    return subprocess.Popen(
        command(*words),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def stopped(process: subprocess.Popen[str], ready: Callable[[], bool], after: float = 0.0) -> tuple[str, str]:
    """What a command prints that gets Ctrl-C when it is ready, or so many seconds later, and ends by it."""
    try:
        limit = time.monotonic() + 120
        while not ready():
            assert time.monotonic() < limit, "it was not ready in two minutes"
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(after)
        os.killpg(process.pid, signal.SIGINT)  # as the terminal does: to the whole group
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    return out, err


SLOW = """
import time
from pathlib import Path
from tiny import Tiny

class Slow(Tiny):
    def loss(self, model, batch):
        if Path("slow").exists():
            time.sleep(0.1)
        return super().loss(model, batch)
"""


@pytest.mark.slow
def test_ctrl_c_stops_workers_cleanly_and_the_same_command_continues(tmp_path: Path) -> None:
    # So slow that the first result is far from the last, however long Ctrl-C takes on a busy machine.
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "slow").touch()
    (tmp_path / "x.toml").write_text(SWEEP.replace("tiny:Tiny", "slow:Slow").replace("[1]", "[1, 2]"))
    process = started(tmp_path, "run", "x.toml", "--jobs", "2", "--out", "report")
    out, err = stopped(process, lambda: any(tmp_path.glob("rewound-store/results/*/*.json")))
    assert "stopped; nothing finished is lost, continue with: rewound run x.toml --jobs 2 --out report\n" in out
    assert err == ""
    store = Store(tmp_path / "rewound-store")
    assert store.claims() == {}
    finished = store.finished()
    assert finished
    assert not (tmp_path / "report").exists(), "it was not done yet"
    (tmp_path / "slow").unlink()
    continued = command("run", "x.toml", "--jobs", "1", "--out", "report")  # how many does not matter
    ran = subprocess.run(continued, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert finished < store.finished()
    with (tmp_path / "report" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * (1 + 4)
    assert all(row["test"] for row in rows)


@pytest.mark.slow
def test_ctrl_c_while_workers_start(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(SWEEP)
    process = started(tmp_path, "run", "x.toml", "--jobs", "2")
    out, err = stopped(process, (tmp_path / "rewound-store" / "version").exists, after=0.5)  # the workers are importing
    assert "continue with: rewound run x.toml" in out
    assert err == ""


def test_ctrl_c_while_modules_are_imported(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    (tmp_path / "x.toml").write_text(SWEEP.replace("tiny:Tiny", "interrupted:Task"))
    ran = subprocess.run(command("plan", "x.toml"), cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (-signal.SIGINT, "", "")
