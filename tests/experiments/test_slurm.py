"""Sweeps on Slurm: a real one, of one node, where it is installed (`apt-get install slurm-wlm munge`).

`make test-slurm` also runs what takes minutes: a time limit, and `digits` by several workers.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import rewound
from command_line import DIGITS_SWEEP, SWEEP, Rewound, environment
from kill_and_continue import _table
from rewound import Slurm
from rewound.experiments.executors.slurm import Job, seconds_of
from rewound.experiments.executors.working import Assignment
from rewound.experiments.plans.options import Options
from rewound.foundations.errors import Failed, InputError
from rewound.states.storage.store import Store
from slurm_cluster import running_slurm
from tiny_sweeps import timeless

long = pytest.mark.skipif("REWOUND_LONG" not in os.environ, reason="takes minutes: make test-slurm")
GIVEN = Assignment("tiny", {"recipe": "digits"}, "/a store", "0.1.0-0123456789abcdef", Options())
SLOW = """
import os, time
from dataclasses import dataclass
from pathlib import Path
from tiny import Tiny

@dataclass(frozen=True)
class Slow(Tiny):
    def batches(self, seed, position, device):
        Path(f"{os.getpid()}.worker").touch()
        for batch in super().batches(seed, position, device):
            time.sleep(float(Path("pause").read_text()) if Path("pause").exists() else 0)
            yield batch
"""


def script(slurm: Slurm, given: Assignment = GIVEN) -> str:
    return slurm.script(given, Path("/a folder/tiny-01234567.json"), slurm.workers)


# Without Slurm


def test_the_script_can_be_read_by_a_person_and_by_bash(tmp_path: Path) -> None:
    text = script(Slurm(workers=8, time="4:00:00", sbatch="--partition=long --comment='a b'"))
    (tmp_path / "worker.sh").write_text(text)
    subprocess.run(["bash", "-n", tmp_path / "worker.sh"], check=True)
    assert "#   sbatch --time=4:00:00 --partition=long '--comment=a b' '/a folder/worker.sh'\n" in text
    assert "#SBATCH --array=1-8\n" in text
    assert "#SBATCH --signal=B:USR1@120\n" in text
    assert "-m rewound work '/a folder/tiny-01234567.json' --store '/a store' --device cpu --plan 0.1.0-0123" in text
    assert "scontrol requeue ${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" in text, "the last job has the array's number"
    assert "gpu" not in text


def test_a_worker_on_a_gpu_has_one_unless_it_is_said_otherwise() -> None:
    given = replace(GIVEN, options=Options(device="cuda"))
    assert "#SBATCH --gres=gpu:1\n" in script(Slurm(sbatch="--partition=gpu"), given)
    for otherwise in ("--gres=gpu:a100:2", "--gpus=2", "-G 2", "--gpus-per-task=1"):
        assert "gres=gpu:1\n" not in script(Slurm(sbatch=otherwise), given)


def test_a_bucket_is_not_looked_for_among_the_files() -> None:
    given = replace(GIVEN, store="s3://bucket/prefix")
    assert "does not see the store" not in script(Slurm(), given)
    assert "does not see the store" in script(Slurm())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers must be at least 1, not 0"),
        ({"time": "an hour"}, r"time is a limit as sbatch takes it, such as 90 \(minutes\), .* not 'an hour'"),
        ({"time": "0:30"}, "time must be at least one minute, not 0:30"),
        ({"sbatch": "--comment='a"}, r"sbatch is options in one line \(--partition=gpu\), not "),
    ],
)
def test_options_that_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Slurm(**options)  # type: ignore[arg-type]


def test_times() -> None:
    assert [seconds_of(t) for t in (5, "5", "5:30", "1:00:00", "2-0", "1-12:30", "1-0:0:1")] == [
        300, 300, 330, 3600, 2 * 86400, 86400 + 12.5 * 3600, 86401,
    ]  # fmt: skip


def test_where_there_is_no_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    Path("tiny.toml").write_text(SWEEP)
    with pytest.raises(InputError, match="there is no sbatch on this machine; run this where jobs are submitted"):
        rewound.run("tiny.toml", on="slurm", say=lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.toml"], "neither jobs nor a store"


# On a real one


def test_workers_live_until_slurm_says_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "squeue").write_text(
        "#!/bin/sh\necho 'squeue: error: Unable to contact slurm controller' >&2; exit 1\n"
    )
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    said: list[str] = []
    job = Job("17", "", 3, tmp_path / "tiny.json", lambda: False, said.append)
    assert job.living() == 3
    assert said == ["note: Slurm does not answer: Unable to contact slurm controller; the workers go on without it"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with running_slurm(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


@pytest.fixture
def folder(cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `tiny.toml` is submitted: a folder whose name has a space, with a slow recipe in it."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name, value in {**environment(), **cluster, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(folder)
    Path("slow.py").write_text(SLOW)
    Path("tiny.toml").write_text(SWEEP.replace("tiny:Tiny", "slow:Slow"))
    return folder


def answer(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def queue() -> list[str]:
    """The states of what is in the queue or runs."""
    return answer("squeue", "--noheader", "--array", "--format=%T").split()


def once(act: Callable[[], object]) -> Callable[[float, float], None]:
    """What takes the progress of a run, and acts once when another worker has begun to train."""
    left, before = [act], {*Path().glob("*.worker")}

    def progress(done: float, of: float) -> None:
        if left and {*Path().glob("*.worker")} - before:
            left.pop()()

    return progress


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_stopped_and_queued_again(folder: Path) -> None:
    """Ctrl-C keeps drafts; so does the signal before the time limit, after which the job is queued again."""
    expected = timeless(rewound.run("tiny.toml", store="local", jobs=1, say=lambda _: None).tables)
    Path("pause").write_text("0.3")
    said: list[str] = []

    def run(act: Callable[[], object]) -> rewound.SweepResults:
        return rewound.run("tiny.toml", store="store", on=Slurm(workers=1), say=said.append, progress=once(act))

    with pytest.raises(KeyboardInterrupt):
        run(interrupt)
    store = Store(folder / "store")
    assert queue() == []
    assert store.claims() == {}
    assert len(store.drafts()) == 1
    (log,) = Path("rewound-slurm/tiny").glob("*.log")
    assert "stopped before the end, with drafts of what was under way (exit code 75)" in log.read_text()

    def warn() -> None:
        """What Slurm does before the time limit."""
        answer("scancel", "--batch", "--signal=USR1", said[-1].split("as job ")[1].partition(";")[0])
        Path("pause").unlink()

    results = run(warn)
    assert timeless(results.tables) == expected
    *_, log = sorted(Path("rewound-slurm/tiny").glob("*.log"))
    assert [line for line in log.read_text().splitlines() if re.fullmatch(r"tiny-\w+: \d+ of 66 steps", line)][1:]
    assert queue() == []
    assert store.drafts() | set(store.claims()) == set()


@pytest.mark.slow
def test_workers_that_end_in_an_error(folder: Path) -> None:
    """The last line of a log is quoted; here the workers do not find the recipe in the folder in which they are."""
    with pytest.raises(Failed) as failed:
        rewound.run("tiny.toml", on=Slurm(workers=1, sbatch="--chdir=/"), say=lambda _: None)
    assert re.fullmatch(
        r"worker \d+_1 ended as FAILED: .*slow.* \(.*/a folder/rewound-slurm/tiny/\d+_1\.log\); no worker is left",
        str(failed.value),
    )


def test_what_slurm_refuses(folder: Path) -> None:
    with pytest.raises(InputError, match=r"Slurm refused the job: invalid partition specified: nowhere; .*"):
        rewound.run("tiny.toml", on=Slurm(sbatch="--partition=nowhere"), say=lambda _: None)
    assert queue() == []


def test_what_slurm_will_never_start(folder: Path) -> None:
    """The partition has a limit; Slurm takes the job, and leaves it in the queue for ever."""
    with pytest.raises(InputError, match=r"Slurm will never start job \d+ \(PartitionTimeLimit\), so it was cancelled"):
        rewound.run("tiny.toml", on=Slurm(time="2-0"), say=lambda _: None)
    assert queue() == []


def test_without_waiting(folder: Path, rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command returns at once and says how to look and how to stop; here the job does not start for a day."""
    monkeypatch.chdir(folder)
    words = ("--on", "slurm", "--no-wait", "--workers", 2, "--sbatch", "--begin=now+1day")
    code, out, err = rewound_command("run", "tiny.toml", *words)
    assert (code, err) == (0, "")
    found = re.search(r"how far it is: rewound (show .*)\nto stop it: (scancel \d+)\n", out)
    assert found
    assert queue() == ["PENDING", "PENDING"]
    assert rewound_command(*shlex.split(found[1])).code == 0
    answer(*found[2].split())
    assert queue() == []


# What takes minutes


@long
def test_a_time_limit(folder: Path) -> None:
    expected = timeless(rewound.run("tiny.toml", store="local", jobs=1, say=lambda _: None).tables)
    Path("pause").write_text("3")
    results = rewound.run("tiny.toml", on=Slurm(workers=2, time=2), say=lambda _: None)
    assert timeless(results.tables) == expected
    logs = [log.read_text() for log in Path("rewound-slurm/tiny").glob("*.log")]
    assert any("exit code 75" in log for log in logs)
    assert not any("pending" in log for log in logs), "a worker has put another into the queue"


@long
def test_digits_by_two_workers(folder: Path, rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    Path("sweep.toml").write_text(DIGITS_SWEEP)
    assert rewound_command("run", "sweep.toml", "--store", "local", "--out", "here").code == 0
    words = ("--on", "slurm", "--workers", 2, "--time", 30, "--out", "there")
    assert rewound_command("run", "sweep.toml", *words).code == 0
    for name in ("results.csv", "layers.csv", "curves.csv"):
        assert _table(Path("there") / name) == _table(Path("here") / name)
