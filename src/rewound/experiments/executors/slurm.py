"""Workers on a cluster that runs Slurm: one array of jobs, submitted by plain `sbatch`, each of them one worker.

What is submitted lies in `rewound-slurm/NAME/`: the sweep as JSON, a script that a person can read and submit again,
and a log for each worker. Some time before a job's time limit Slurm signals it. Its worker then keeps drafts, and the
script puts the job into the queue again if work is left. Slurm itself does so for jobs that it preempts, or whose
machine fails. All machines have to see the same files: this folder, the environment of Python, and a store in a folder.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rewound.experiments.executors.driving import drive
from rewound.experiments.executors.walking import Headway
from rewound.experiments.executors.working import STOPPED, Assignment, assignment, declaration_of
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import Plan
from rewound.experiments.plans.remaining import todo
from rewound.foundations.errors import Failed, InputError, as_whole, shown
from rewound.foundations.quantities import counted
from rewound.foundations.wholefiles import write_whole
from rewound.states.storage.store import Say, Store

FOLDER = Path("rewound-slurm")
_WARNING = 120  # seconds before the time limit at which a worker is told to keep drafts; Slurm may be 60 s early
_SHORT_WARNING = 30  # the same where the limit is below ten minutes
_GRACE = 300.0  # seconds that workers have to keep drafts when the driver stops them
_ENDING = 30.0  # seconds that workers have to end by themselves when all is done
_LOOKS = (1.0, 30.0)  # seconds between questions to Slurm: the first, and as they grow; its controller serves everybody
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
_GPUS = re.compile(r"-G|--(gres|gpus|gpus-per-(node|task|socket)|tres-per-(node|task|job|socket))\b")
_CPUS = re.compile(r"-c|--cpus-per-task\b")
_LIVING = {"PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "COMPLETING", "STAGE_OUT", "SIGNALING"} | {
    "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESIZING", "RESV_DEL_HOLD"
}  # fmt: skip
_ENDED_WELL = {"COMPLETED", "CANCELLED", "PREEMPTED", "REVOKED"}
_NEVER = re.compile(
    r"PartitionTimeLimit|PartitionNodeLimit|BadConstraints|\w*PerJob\w*|QOSMin\w+|AccountNotAllowed|InvalidAccount|"
    r"InvalidQOS|QOSNotAllowed|QOSTimeLimit|AssociationTimeLimit|DependencyNeverSatisfied|DeadLine|"
    r"launch.failed.requeued.held",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Slurm:
    """Runs a sweep on a cluster with Slurm: `rewound.run(sweep, on=rewound.Slurm(workers=8, time="4:00:00"))`.

    `workers` is how many jobs share the work. `time` is the limit of each, as `sbatch` takes it ("90" minutes,
    "4:00:00", "1-12"); without it, the partition's default holds. `sbatch` is passed on to `sbatch`
    ("--partition=gpu --account=me"). With `wait=False` the call returns as soon as the jobs are submitted.
    """

    workers: int = 4
    time: str | int | None = None
    sbatch: str = ""
    wait: bool = True

    def __post_init__(self) -> None:
        if as_whole("workers", self.workers) < 1:
            raise InputError(f"workers must be at least 1, not {self.workers}; each is one job of Slurm")
        self.words()
        if self.time is not None and seconds_of(self.time) < 60:
            raise InputError(f"time must be at least one minute, not {self.time}; Slurm counts in minutes")

    def __call__(
        self, plan: Plan, store: Store, options: Options, *, say: Say, tick: Callable[[Headway], None]
    ) -> None:
        given = assignment(plan, store, options)
        if not (left := len(todo(plan, store))):
            return
        self.check(options)
        workers = min(self.workers, left)
        job = self._submitted(given, workers, lambda: not todo(plan, store), say)
        say(f"Slurm has {counted(workers, 'worker')} as job {job.number}; their logs are in {job.folder}")
        if self.wait:
            drive(plan, store, job, keep_all=options.keep_all, say=say, tick=tick)
        else:
            show = ["rewound", "show", os.path.relpath(job.sweep), "--store", given.store]
            say(f"how far it is: {shlex.join(show)}")
            say(f"to stop it: {shlex.join(job.words('scancel', job.number))}")

    def check(self, options: Options) -> None:
        """An error unless jobs can be submitted from this machine; see `Engine`."""
        declaration_of(options)
        for program in ("sbatch", "squeue", "scancel"):
            if shutil.which(program) is None:
                raise InputError(
                    f"there is no {program} on this machine; run this where jobs are submitted to Slurm, or --on local"
                )

    def _submitted(self, given: Assignment, workers: int, is_done: Callable[[], bool], say: Say) -> "Job":
        folder = (FOLDER / given.name).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        sweep = folder / f"{given.name}-{given.plan.rpartition('-')[2][:8]}.json"  # others may read another of its name
        write_whole(sweep, f"{json.dumps(given.table, indent=1)}\n".encode())  # a worker may be reading it
        script = folder / "worker.sh"
        script.write_text(self.script(given, sweep, workers))
        answer = _asked("sbatch", "--parsable", *self.words(), str(script))
        if answer.returncode:
            raise InputError(f"Slurm refused the job: {_sentence(answer.stderr)}; see --time and --sbatch")
        number, _, cluster = answer.stdout.strip().partition(";")
        return Job(number, cluster, workers, sweep, is_done, say)

    def script(self, given: Assignment, sweep: Path, workers: int) -> str:
        """The script of each worker. What was chosen is not in it: `sbatch` is given that, and prefers it."""
        short = self.time is not None and seconds_of(self.time) < 600
        name, folder, label = given.name, sweep.parent, re.sub(r"[^\w.-]", "-", given.name)
        options = [
            f"--job-name=rewound-{label}",
            f"--array=1-{workers}",
            f'--chdir="{Path.cwd()}"',
            f'--output="{str(folder).replace("%", "%%")}/%A_%a.log"',
            "--open-mode=append",
            "--nodes=1",
            "--ntasks=1",
            "--requeue",
            f"--signal=B:USR1@{_SHORT_WARNING if short else _WARNING}",
        ]
        device, per_run = given.options.device, given.options.gpus_per_run
        if device.startswith("cuda") and not any(map(_GPUS.match, self.words())):
            options.append(f"--gres=gpu:{per_run}")
        if device == "cpu" and per_run > 1 and not any(map(_CPUS.match, self.words())):
            options.append(f"--cpus-per-task={per_run}")
        is_bucket = "://" in given.store
        return _SCRIPT.format(
            name=name,
            submit=shlex.join(["sbatch", *self.words(), str(folder / "worker.sh")]),
            options="\n".join(f"#SBATCH {option}" for option in options),
            check="" if is_bucket else _CHECK.format(store=shlex.quote(given.store)),
            command=shlex.join([sys.executable, "-P", "-m", "rewound", *given.command(str(sweep))]),
            stopped=STOPPED,
        )

    def words(self) -> list[str]:
        """What was chosen, as options of `sbatch`."""
        try:
            return [*([] if self.time is None else [f"--time={self.time}"]), *shlex.split(self.sbatch)]
        except (ValueError, AttributeError) as error:
            raise InputError(f"sbatch is options in one line (--partition=gpu), not {shown(self.sbatch)}") from error


_SCRIPT = """#!/bin/bash
# One worker of the sweep {name}: it does whatever nobody else does, until all of it is done. To submit it again:
#   {submit}
{options}
{check}
{command} &
worker=$!

# Slurm sends USR1 some time before the time limit, and TERM when the job is cancelled or preempted. Either way the
# worker keeps drafts and ends with {stopped}; before the time limit the job then goes back into the queue.
again=no signalled=no
trap 'again=yes signalled=yes; kill -USR1 $worker' USR1
trap 'again=no signalled=yes; trap "" USR1; kill -TERM $worker' TERM

wait $worker; code=$?
while [ $signalled = yes ]; do  # the signal has ended the wait, not the worker
  signalled=no; wait $worker; code=$?
done

[ $code != 138 ] || echo "error: the time limit came before the worker had begun; give a longer --time"
[ $code = {stopped} ] || exit $code
[ $again = no ] || exec scontrol requeue ${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID  # this worker alone
"""
_CHECK = """
if ! [ -e {store}/version ]; then
  echo error: $(hostname) does not see the store {store}, so give a folder that all machines share, or a bucket
  exit 2
fi
"""


def seconds_of(limit: str | int) -> float:
    """A time limit of Slurm: minutes, minutes:seconds, hours:minutes:seconds, or days before a hyphen and hours.

    >>> seconds_of("90"), seconds_of("1:30:00"), seconds_of("1-12")
    (5400.0, 5400.0, 129600.0)
    """
    if (found := _TIME.fullmatch(str(limit))) is None:
        raise InputError(
            f"time is a limit as sbatch takes it, such as 90 (minutes), 4:00:00 or 1-12 (days-hours), not {limit!r}"
        )
    first, *others = (float(part or 0) for part in found.group("first", "second", "third"))
    if found["days"] is not None or found["third"] is not None:  # hours first
        return float(found["days"] or 0) * 86400 + first * 3600 + others[0] * 60 + others[1]
    return first * 60 + others[0]


class _Task(NamedTuple):
    name: str
    """Of one job of the array, as 12_3."""
    state: str
    reason: str


class Job:
    """The workers that were submitted as one array, for `driving`."""

    def __init__(
        self, number: str, cluster: str, workers: int, sweep: Path, is_done: Callable[[], bool], say: Say
    ) -> None:
        self.number, self.sweep, self.folder = number, sweep, sweep.parent
        self._is_done, self._say = is_done, say
        self._cluster = [f"--clusters={cluster}"] if cluster else []
        names = [f"{number}_{task}" for task in range(1, workers + 1)]
        self._tasks = {name: _Task(name, "PENDING", "") for name in names}  # until Slurm has answered
        self._next, self._pause = 0.0, _LOOKS[0]
        self._told: set[str] = set()

    def words(self, program: str, *options: str) -> list[str]:
        return [program, *self._cluster, *options]

    def living(self) -> int:
        """How many are in the queue or at work, as Slurm said when it was last asked."""
        if time.monotonic() >= self._next:
            self._pause = min(self._pause * 1.5, _LOOKS[1])
            self._look()
            self._next = time.monotonic() + self._pause
        living = [task for task in self._tasks.values() if task.state in _LIVING]
        if not any(task.state != "PENDING" for task in living):
            for task in living:
                if _NEVER.fullmatch(task.reason.strip("()")):
                    raise InputError(
                        f"Slurm will never start job {self.number} ({task.reason.strip('()')}), so it was cancelled; "
                        "check --time and --sbatch; `sinfo` lists what the cluster has"
                    )
        for task in self._tasks.values():
            if task.state not in _LIVING | _ENDED_WELL and task.name not in self._told:
                self._told.add(task.name)
                text = f"worker {task.name} ended as {task.state}: {self._last_words(task)}"
                if not living:
                    raise Failed(f"{text}; no worker is left")
                self._say(text)
        return len(living)

    def stop(self) -> None:
        """Cancel what waits in the queue, let the others keep drafts, and wait until they have."""
        began, pause, signalled = time.monotonic(), 0.5, set[str]()
        try:
            patience = _ENDING if self._is_done() else 0.0  # workers see themselves that all is done, and end
            while self._look() and time.monotonic() < began + _GRACE:
                _asked(*self.words("scancel", "--quiet", "--state=PENDING", self.number))
                running = {task.name for task in self._tasks.values() if task.state == "RUNNING"} - signalled
                if running and time.monotonic() > began + patience:
                    _asked(*self.words("scancel", "--quiet", "--full", "--signal=TERM", *sorted(running)))
                    signalled |= running
                time.sleep(pause)
                pause = min(pause * 1.2, 5.0)
        finally:  # also by a second Ctrl-C
            _asked(*self.words("scancel", "--quiet", self.number))

    def _look(self) -> int:
        """Ask Slurm for the state of each worker; returns how many live."""
        options = ("--noheader", "--array", "--states=all", "--format=%i|%T|%r", f"--jobs={self.number}")
        answer = _asked(*self.words("squeue", *options))
        if answer.returncode == 0:
            lines = [line.split("|") for line in answer.stdout.splitlines() if line.count("|") == 2]
            found = {name: _Task(name, state, reason) for name, state, reason in lines}
            ended = {name: task for name, task in self._tasks.items() if task.state not in _LIVING}
            self._tasks = {**ended, **found}
        elif "Invalid job id" in answer.stderr:  # Slurm has forgotten it, some minutes after its end
            self._tasks = {}
        elif answer.stderr not in self._told:  # its controller may be restarting
            self._told.add(answer.stderr)
            self._say(f"note: Slurm does not answer: {_sentence(answer.stderr)}; the workers go on without it")
        return sum(task.state in _LIVING for task in self._tasks.values())

    def _last_words(self, task: _Task) -> str:
        """The last line that a worker wrote, and where."""
        log = self.folder / f"{task.name}.log"
        try:
            lines = log.read_text(errors="replace").split("\n")
        except OSError:
            return f"it left no log at {log} ({task.reason})"
        said = [line.strip() for line in lines if line.strip()]
        return f"{said[-1] if said else 'it wrote nothing'} ({log})"


def _asked(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    """What one of Slurm's programs answers."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SCANCEL_"))}
    return subprocess.run([program, *options], capture_output=True, text=True, env=environment)


def _sentence(text: str) -> str:
    """What one of Slurm's programs says of an error, in one line."""
    lines = [re.sub(r"^\w+: (error: )?", "", line).strip() for line in text.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line)) or "it did not say why"
