"""A real Slurm for tests: one node, in a folder and on ports of its own, without systemd and cgroups.

The daemons belong to whoever runs the tests, so that no other user is needed, and whoever that is may submit.
"""

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

DAEMONS = ("munged", "slurmctld", "slurmd")
PATIENCE = 60.0
_CPUS = os.cpu_count() or 1

# A job that was requeued may start again a second after `cred_expire`, which is 120 seconds by default and at least 5.
_CONFIGURATION = """
ClusterName=rewound
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
ReturnToService=2
JobRequeue=1
KillWait=30
MinJobAge=300
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 Port={node_port} CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=1-0 State=UP
"""


@contextmanager
def running_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The variables with which Slurm's commands find the cluster; the test is skipped where there can be none."""
    if missing := [daemon for daemon in DAEMONS if _program(daemon) is None]:
        pytest.skip(f"no {', '.join(missing)} on this machine: install Slurm (apt-get install slurm-wlm munge)")
    ports = _free_ports()
    settings = _CONFIGURATION.format(
        host=socket.gethostname().split(".")[0],
        controller_port=ports[0],
        node_port=ports[1],
        user=getpass.getuser(),
        folder=folder,
        cpus=_CPUS,
    )
    folder.chmod(0o755)  # munged wants its socket to be within everybody's reach
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(settings)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    environment = {"SLURM_CONF": str(folder / "slurm.conf")}
    munge = {name: str(folder / f"munge.{name}") for name in ("pid", "seed", "log", "socket")}
    words = ["--foreground", "--force", f"--key-file={key}", f"--pid-file={munge['pid']}"]
    words += [f"--seed-file={munge['seed']}", f"--log-file={munge['log']}", f"--socket={munge['socket']}"]
    started: list[subprocess.Popen[bytes]] = []
    try:
        started.append(_started("munged", words, folder, environment))
        _wait_until(lambda: Path(munge["socket"]).exists(), started, folder)
        started.append(_started("slurmctld", ["-D", "-i"], folder, environment))
        started.append(_started("slurmd", ["-D"], folder, environment))
        _wait_until(lambda: _is_idle(environment), started, folder)
        yield environment
    finally:
        with suppress(subprocess.SubprocessError, OSError):
            mine = {**os.environ, **environment}
            subprocess.run(["scancel", "--user", getpass.getuser()], env=mine, timeout=10, capture_output=True)
            subprocess.run(["scancel", "--signal=KILL", "--user", getpass.getuser()], env=mine, timeout=10)
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin")


def _started(daemon: str, words: list[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    program = _program(daemon)
    assert program is not None
    command = ["setpriv", "--pdeathsig=TERM", program, *words]  # it ends with the tests, however these end
    with (folder / f"{daemon}.said").open("wb") as said:
        return subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=said, stderr=said, start_new_session=True
        )


def _wait_until(condition: Callable[[], bool], started: list[subprocess.Popen[bytes]], folder: Path) -> None:
    limit = time.monotonic() + PATIENCE
    while not condition():
        if dead := [process for process in started if process.poll() is not None]:
            name = Path(dead[0].args[2]).name  # type: ignore[index, arg-type]
            pytest.skip(f"{name} does not start here: {(folder / f'{name}.said').read_text().strip()[-500:]}")
        if time.monotonic() > limit:
            pytest.skip(f"Slurm has not started for {PATIENCE:g} s: see {folder}")
        time.sleep(0.05)


def _is_idle(environment: dict[str, str]) -> bool:
    words = ["sinfo", "--noheader", "--format=%T"]
    said = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True)
    return said.stdout.strip() == "idle"


def _free_ports() -> list[int]:
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in (first, second)]
