"""`rewound watch`: what it says of a sweep as the store has it, whom it answers, and that it changes nothing."""

import http.client
import json
import math
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from command_line import Rewound, command, environment, snapshot
from object_server import ObjectServer, serving
from rewound.commands.watching import HOST, WatchedSweep
from rewound.experiments.executors import walking
from rewound.experiments.sweeps.sweep import Sweep
from rewound.foundations.errors import InputError
from rewound.reports import live
from rewound.reports.live import Lookout, Server
from rewound.states.storage.store import Store
from tiny import POISON
from tiny_sweeps import FINE_TUNING, ITERATIVE, run, sweep_of

SWEEP = sweep_of(FINE_TUNING, ITERATIVE)


@pytest.fixture(autouse=True)
def _sees_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look lists everything, however long the last listing took: on a busy machine it would otherwise wait."""
    monkeypatch.setattr(walking, "_SHARE", math.inf)


def watched(sweep: Sweep, store: Store | Path | str) -> WatchedSweep:
    place = store.root if isinstance(store, Store) else store
    return WatchedSweep(sweep, place, "rewound run tiny.toml", "rewound watch tiny.toml")


def facts(now: dict[str, Any]) -> dict[str, str]:
    return dict(now["facts"])


def test_before_a_store_it_waits_and_makes_none(tmp_path: Path) -> None:
    watching = watched(SWEEP, tmp_path / "store")
    now = watching.look()
    assert (now["state"], now["headline"], now["part"]) == ("waiting", "Nothing has run yet.", 0)
    assert now["again"] == "rewound run tiny.toml"
    assert watching.story()["subjects"] == []  # type: ignore[index]
    assert watching.story() is None, "nothing is new"
    assert not (tmp_path / "store").exists()


def test_it_tells_who_works_on_what_and_how_long_it_takes(store: Store) -> None:
    watching = watched(SWEEP, store)
    worker = Store(store.root)
    dense, *others = [target.state.key for target in SWEEP.targets]
    assert worker.claim(dense)
    now = watching.look()
    assert (now["state"], now["headline"]) == ("working", "Running: 1 worker on 1 machine")
    assert [(line["work"], line["steps"]) for line in now["workers"]] == [("Dense network, trial 1", 0)]
    assert facts(now)["Time left"] == "known when a node has ended"
    worker.release(dense)
    run(sweep_of(FINE_TUNING), store)
    assert worker.claim(others[-1])
    assert worker.beat(others[-1], 1)
    now = watching.look()
    (line,) = now["workers"]
    assert line["work"] == "Weight rewinding, 4.00×, iterative, t = 1, trial 1"
    assert 0 < line["steps"] < line["of"]
    assert re.fullmatch(r"about [\d.]+ \w+", facts(now)["Time left"])
    assert [(each["nodes"], each["now"]) for each in now["machines"]] == [(3, 1)]
    assert 0 < now["part"] < 1
    story = watching.story()
    assert story is not None
    assert {technique["name"] for technique in story["techniques"]} == {"fine-tuning"}
    worker.release(others[-1])
    run(SWEEP, store)
    now = watching.look()
    assert (now["part"], facts(now)["Nodes"]) == (1, "6 of 6"), "the dense run is cut where it is rewound to"
    assert (now["state"], now["workers"], now["again"]) == ("finished", [], "")
    story = watching.story()
    assert story is not None
    assert {technique["name"] for technique in story["techniques"]} == {"fine-tuning", "weight-rewinding"}
    assert ["Rows", "5"] in [list(fact) for fact in story["provenance"]]


def test_between_two_nodes_it_does_not_say_that_nobody_works(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run(sweep_of(FINE_TUNING), store)
    watching, worker, last = watched(SWEEP, store), Store(store.root), SWEEP.targets[-1].state.key
    assert watching.look()["headline"] == "Nobody works on it: 4 nodes to do."
    assert watching.look()["again"] == "rewound run tiny.toml"
    worker.claim(last)
    watching.look()
    worker.release(last)
    assert watching.look()["state"] == "working"
    monkeypatch.setattr("rewound.commands.watching._PAUSE", 0)
    assert watching.look()["state"] == "idle"


def test_a_failure_is_told_until_it_is_tried_again(store: Store) -> None:
    sweep = sweep_of(FINE_TUNING, recipe="Watched")
    POISON[1, 1] = 3
    run(sweep, store)
    watching = watched(sweep, store)
    now = watching.look()
    assert [(each["work"], each["why"]) for each in now["failures"]] == [
        ("Fine-tuning, 2.00×, one-shot, t = 1, trial 1", "the loss became nan by step 9")
    ]
    assert facts(now)["Failed or skipped"] == "2", "what builds on it is skipped"
    assert now["state"] == "finished"
    worker, failed = Store(store.root), now["failures"][0]["key"]
    worker.claim(failed)
    assert len(watching.look()["failures"]) == 1, "its owner has not given it up yet"
    worker.forget(failed)
    now = watching.look()
    assert (now["failures"], now["state"]) == ([], "working")


def test_a_failure_that_was_retried_unseen_is_forgotten(store: Store) -> None:
    sweep = sweep_of(FINE_TUNING, recipe="Watched")
    POISON[1, 1] = 3
    run(sweep, store)
    watching = watched(sweep, store)
    (failure,) = watching.look()["failures"]
    Store(store.root).claim(failure["key"])  # its worker died before it gave the claim up
    assert watching.look()["failures"] == [failure]
    POISON.clear()
    Store(store.root).forget(failure["key"])
    Store(store.root).release(failure["key"])
    for claim in store.root.glob("claims/*"):
        claim.unlink()
    run(sweep, store)
    now = watching.look()
    assert (now["failures"], now["state"]) == ([], "finished")


def test_a_store_that_is_gone_is_not_taken_for_one_that_is_not_there_yet(store: Store) -> None:
    sweep = sweep_of(FINE_TUNING)
    run(sweep, store)
    watching = watched(sweep, store)
    assert watching.look()["state"] == "finished"
    store.root.rename(store.root.with_name("moved"))
    with pytest.raises(InputError, match="is no longer there; mount its disk"):
        watching.look()


def test_it_only_reads_a_folder(store: Store) -> None:
    run(sweep_of(FINE_TUNING), store)
    (store.root / "results" / "ab").mkdir(exist_ok=True)
    damaged = next(store.root.glob("results/*/*.json"))
    damaged.write_text("{")
    (store.root / "version").write_text("1\n")
    before = snapshot(store.root)
    watching = watched(SWEEP, store)
    assert "not used" in watching.look()["message"], "a damaged file is told and stays"
    watching.story()
    assert snapshot(store.root) == before


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with serving() as server:
        yield server


def test_it_only_reads_a_bucket(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    url = server.new_bucket()
    watching = watched(sweep_of(FINE_TUNING), f"{url}/runs")
    server.behave()
    assert watching.look()["state"] == "waiting"
    assert {method for method, _ in server.requests} <= {"GET", "HEAD"}, "not even to find out what the server can do"
    run(sweep_of(FINE_TUNING), Store(f"{url}/runs"))
    server.requests.clear()
    assert watching.look()["state"] == "finished"
    assert len(watching.story()["subjects"]) == 1  # type: ignore[index]
    assert {method for method, _ in server.requests} <= {"GET", "HEAD"}


class Counted:
    """A source that counts looks, and can be told to fail."""

    title = "counted"

    def __init__(self) -> None:
        self.looks, self.stories, self.trouble = 0, 0, ""
        self.looked = threading.Event()

    def look(self) -> dict[str, object]:
        self.looks += 1
        self.looked.set()
        if self.trouble:
            raise InputError(self.trouble)
        return {"state": "working", "looks": self.looks}

    def story(self) -> dict[str, object]:
        self.stories += 1
        return {"subjects": [], "techniques": [], "stories": min(self.stories, 2)}


@contextmanager
def served(source: Counted | WatchedSweep, host: str = HOST) -> Iterator[Server]:
    lookout = Lookout(source, {"subjects": [], "techniques": []})
    with Server(lookout, host, 0) as server, lookout.looking():
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def ask(server: Server, path: str = "/now", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(HOST, server.server_address[1], timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def now(server: Server) -> dict[str, Any]:
    found = json.loads(ask(server)[2])
    assert isinstance(found, dict)
    return found


def test_one_look_serves_all_and_nobody_looks_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "INTERVAL", 0.05)
    monkeypatch.setattr(live, "_ASLEEP", 0.0)
    source = Counted()
    with served(source) as server:
        assert source.looked.wait(60)
        before = source.looks
        server.lookout._source.looked.clear()  # type: ignore[attr-defined]
        assert not source.looked.wait(1), "it looks without being asked"
        assert source.looks <= before + 1
        monkeypatch.setattr(live, "_ASLEEP", 60.0)
        assert now(server)["looks"] >= 1
        assert source.looked.wait(60), "asked, it looks again"
    monkeypatch.setattr(live, "INTERVAL", 3600.0)
    with served(source := Counted()) as server:
        for _ in range(20):
            now(server)
        assert source.looks == 1, "one look for twenty questions"


def test_a_source_that_does_not_answer_is_told_with_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "INTERVAL", 0.05)
    source = Counted()
    with served(source) as server:
        while (seen := now(server))["trouble"] or seen.get("looks") is None:
            pass
        source.trouble = "cannot use store s3://away: it does not answer"
        while not (later := now(server))["trouble"]:
            pass
        assert later["trouble"] == source.trouble
        assert (later["state"], later["age"] is not None) == ("working", True)
        source.trouble = ""
        while (recovered := now(server))["trouble"]:
            pass
        assert recovered["looks"] > later["looks"]


def test_data_are_sent_with_their_digest() -> None:
    with served(Counted()) as server:
        status, headers, content = ask(server, "/story")
        assert (status, headers["content-type"]) == (200, "application/json")
        assert json.loads(content)["tag"] == now(server)["story"] or json.loads(ask(server, "/story")[2])["stories"]


def test_nothing_else_is_served_and_nothing_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.txt").write_text("secret")
    with served(Counted()) as server:
        status, headers, page = ask(server, "/")
        policy = re.search(rb'Content-Security-Policy" content="([^"]*)"', page)
        assert status == 200
        assert policy is not None
        assert b"default-src 'none'" in policy[1]
        assert policy[1].endswith(b"connect-src 'self'"), "it asks its own server and nobody else"
        assert policy[1].count(b"sha256-") == 2
        assert headers["content-security-policy"] == "frame-ancestors 'none'"
        assert headers["cache-control"] == "no-store"
        assert "python" not in headers["server"].lower()
        for path in ("/secret.txt", "/../secret.txt", "//secret.txt", "/%2e%2e/secret.txt", "/index.html", "/now/"):
            status, _, content = ask(server, path)
            assert (status, b"secret" in content) == (404, False), path
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            status, headers, _ = ask(server, "/now", method)
            assert (status, headers["allow"]) == (405, "GET, HEAD"), method
        status, headers, content = ask(server, "/", "HEAD")
        assert (status, content) == (200, b"")
        assert int(headers["content-length"]) > 100_000


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ("localhost:9000", 200),  # by a tunnel
        ("127.0.0.1", 200),
        ("[::1]:8421", 200),
        ("192.168.1.7:8421", 200),
        (f"{socket.gethostname()}:8421", 200),
        ("evil.example:8421", 421),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
    ],
)
def test_a_name_from_elsewhere_that_leads_here_reads_nothing(given: str, status: int) -> None:
    with served(Counted()) as server:
        for path in ("/", "/now", "/story"):
            assert ask(server, path, Host=given)[0] == status


def test_what_cannot_be_listened_at_is_one_sentence(rewound_command: Rewound, tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = rewound_command("watch", "digits", "--port", port)
    assert (code, len(err.splitlines())) == (2, 1)
    assert err.startswith(f"error: port {port} of 127.0.0.1 cannot be used (address already in use); give another with")
    code, _, err = rewound_command("watch", "digits", "--port", 70_000)
    assert (code, err.splitlines()) == (2, ["error: --port must be from 0 to 65535, not 70000; 0 is any that is free"])
    code, _, err = rewound_command("watch", "digits", "--host", "no.such.host.invalid")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "--host no.such.host.invalid is no address of this machine" in err
    assert rewound_command("watch", "digit").code == 2
    assert not (tmp_path / "rewound-store").exists()


@pytest.mark.slow
def test_it_prints_its_address_and_ends_in_one_line(tmp_path: Path) -> None:
    words = command("watch", "digits", "--port", "0", "--host", "0.0.0.0")
    with subprocess.Popen(words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("warning: whoever reaches 0.0.0.0 can read this page; ")
        line = process.stdout.readline()
        assert re.fullmatch(r"watching digits in rewound-store: http://0\.0\.0\.0:\d+/ \(Ctrl-C ends it\)\n", line)
        with urlopen(f"http://127.0.0.1:{line.split(':')[3].split('/')[0]}/now") as answer:
            assert json.load(answer)["instance"]
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "no longer watching; the sweep itself goes on\n"
    assert process.returncode == 0
    assert [*tmp_path.iterdir()] == []
