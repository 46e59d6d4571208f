"""Kill a sweep at random moments, continue it each time, and compare with a run that nobody disturbed.

    python tests/support/kill_and_continue.py                      # `digits`, 20 kills
    python tests/support/kill_and_continue.py --sweep my.toml --kills 100 --jobs 4 --seed 7

The sweep runs once from beginning to end. Then it runs again into another store: at `--kills` random moments its whole
process group gets SIGKILL, which nothing can catch, and the same command is given again. One kill in five strikes while
the command starts, the others when a random share of the nodes is done, somewhere within the next one. In the end
`results.csv` (all columns but `seconds`), `layers.csv` and `curves.csv` must be the same, byte for byte.

Exit code 0: they are. 1: they differ, or a run that was not killed failed.
"""

import argparse
import csv
import io
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

REWOUND = (sys.executable, "-m", "rewound")


class Moment(NamedTuple):
    """When to kill: so many seconds after so many nodes are done (None: after the start)."""

    nodes: int | None
    seconds: float


class Disturbance(Exception):
    """What should not happen, happened."""


def check(sweep: str, kills: int, jobs: int, seed: int, folder: Path, rewound: Sequence[str] = REWOUND) -> list[str]:
    """Run, kill and continue; returns the tables that differ."""
    whole, disturbed = folder / "whole", folder / "disturbed"
    began = time.monotonic()
    _finish(sweep, whole, jobs, rewound)
    took = time.monotonic() - began
    nodes = _done(whole)
    print(f"undisturbed: {nodes} nodes in {took:.0f} s", flush=True)
    for number, moment in enumerate(_moments(kills, nodes, _pace(whole), random.Random(seed)), start=1):
        print(f"kill {number} of {kills}: {_kill(sweep, disturbed, jobs, moment, rewound)}", flush=True)
    _finish(sweep, disturbed, jobs, rewound)
    if _done(disturbed) != nodes:
        raise Disturbance(f"{_done(disturbed)} nodes are done in the end, not {nodes}")
    return [
        name
        for name in ("results.csv", "layers.csv", "curves.csv")
        if _table(whole / "report" / name) != _table(disturbed / "report" / name)
    ]


def _pace(place: Path) -> float:
    """Seconds from one finished node to the next."""
    times = [path.stat().st_mtime for path in place.glob("store/results/*/*.json")]
    return (max(times) - min(times)) / len(times)


def _moments(kills: int, nodes: int, pace: float, draw: random.Random) -> list[Moment]:
    early = kills // 5
    places = sorted(draw.randrange(nodes) for _ in range(kills - early))
    moments = [Moment(place, draw.uniform(0, 2 * pace)) for place in places]
    for _ in range(early):  # among the others: there is more to lose later on
        moments.insert(draw.randrange(len(moments) + 1), Moment(None, draw.uniform(0, 5)))
    return moments


def _command(sweep: str, place: Path, jobs: int, rewound: Sequence[str]) -> list[str]:
    where = ["--store", str(place / "store"), "--out", str(place / "report")]
    return [*rewound, "run", sweep, "--jobs", str(jobs), *where]


def _finish(sweep: str, place: Path, jobs: int, rewound: Sequence[str]) -> None:
    ran = subprocess.run(_command(sweep, place, jobs, rewound), capture_output=True, text=True)
    if ran.returncode:
        raise Disturbance(f"a run that nobody killed ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}")


def _kill(sweep: str, place: Path, jobs: int, moment: Moment, rewound: Sequence[str]) -> str:
    """Run until the moment has come; returns what happened, in words."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            _command(sweep, place, jobs, rewound), stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while moment.nodes is not None and _done(place) < moment.nodes and process.poll() is None:
                time.sleep(0.005)
            with suppress(subprocess.TimeoutExpired):
                process.wait(moment.seconds)
        finally:
            ended = process.poll()
            if ended is None:
                os.killpg(process.pid, signal.SIGKILL)  # the command, its workers, whatever they started
                process.wait()
        if ended:
            said.seek(0)
            raise Disturbance(f"a run ended with {ended} before it was killed:\n{said.read()}")
    happened = "it had ended already" if ended == 0 else "killed"
    drafts = len(list(place.glob("store/drafts/*.safetensors")))
    return f"{happened} after {time.monotonic() - began:.2f} s with {_done(place)} nodes and {drafts} drafts there"


def _done(place: Path) -> int:
    return sum(1 for _ in place.glob("store/results/*/*.json"))


def _table(path: Path) -> bytes:
    """The bytes of a table without its column `seconds`."""
    text = path.read_text()
    rows = list(csv.reader(io.StringIO(text)))
    if "seconds" not in rows[0]:
        return text.encode()
    column = rows[0].index("seconds")
    return "\n".join(",".join(row[:column] + row[column + 1 :]) for row in rows).encode()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", default="digits", help="a TOML file or a shipped sweep [digits]")
    parser.add_argument("--kills", type=int, default=20, help="how many times to kill it [20]")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes [2]")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments [0]")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill-and-continue-") as folder:
        try:
            differing = check(given.sweep, given.kills, given.jobs, given.seed, Path(folder))
        except Disturbance as disturbance:
            print(f"FAILED: {disturbance}")
            return 1
    if differing:
        print(f"DIFFERENT: {', '.join(differing)}")
        return 1
    print(f"IDENTICAL: {given.sweep} after {given.kills} kills, except for seconds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
