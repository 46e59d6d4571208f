"""A store in a bucket: it conforms, survives lost answers, keeps secrets, and is refused where it must be."""

import os
import pickle
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import rewound
from command_line import SWEEP, Rewound
from object_server import ENVIRONMENT, ObjectServer, serving
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.planning import plan
from rewound.foundations.errors import InputError
from rewound.states.storage import objects
from rewound.states.storage.backend import ReadOnly, as_location
from rewound.states.storage.conformance import CHECKS, Opener, _kill, _process, _take
from rewound.states.storage.objects import Bucket
from rewound.states.storage.store import Store, is_store
from stored import KEY, RESULT, a_mask, a_state
from tiny_sweeps import FINE_TUNING, run, sweep_of, timeless

SECRET = ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]


@pytest.fixture(scope="module")
def servers() -> Iterator[ObjectServer]:
    with serving() as server:
        yield server


@pytest.fixture
def server(servers: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    """A server that behaves, which the environment names; the cache and the home folder are the test's."""
    for name in os.environ:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in {**servers.environment, "REWOUND_CACHE": str(tmp_path / "cache"), "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    servers.behave()
    return servers


@pytest.fixture
def url(server: ObjectServer) -> str:
    return f"{server.new_bucket()}/some/runs"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_bucket_conforms(check: Callable[[Opener], None], url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    check(lambda: Bucket(url))


# Where a store can be

PLACES = {
    "runs": Path("runs"),
    "a:b": Path("a:b"),
    "s3://bucket": "s3://bucket",
    "s3://bucket/": "s3://bucket",
    "s3://bucket/a/b-c_d.e=1/": "s3://bucket/a/b-c_d.e=1",
    Path("gs://bucket/a"): "gs://bucket/a",
    "az://container/a": "az://container/a",
}


@pytest.mark.parametrize("given", PLACES)
def test_a_place_is_a_path_or_a_url(given: object) -> None:
    assert as_location("store", given) == PLACES[given]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("http://host/x", r"store must be a path or a URL \(s3://, az://, gs://\), not 'http://host/x'; mount it"),
        ("s3://", "store must be s3://BUCKET/PREFIX with letters, digits and . _ = [+] -, not 's3://'"),
        ("s3://bucket/../x", "store must be s3://BUCKET/PREFIX"),
        ("s3://bucket/a b", "store must be s3://BUCKET/PREFIX"),
        ("s3://bucket//a", "store must be s3://BUCKET/PREFIX"),
        (None, "store must be a path, not None"),
    ],
)
def test_another_place_is_refused(given: object, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        as_location("store", given)


@pytest.mark.parametrize("given", ["s3://key:hunter2@bucket/x", "az://c/x?sig=hunter2", "https://me:hunter2@host/x"])
def test_a_password_in_a_url_is_not_repeated(given: str) -> None:
    with pytest.raises(InputError, match="must be a URL without credentials") as refused:
        as_location("store", given)
    assert "hunter2" not in str(refused.value)


def test_the_extra_that_is_missing_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rewound.states.storage.objects")
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(InputError, match=r"needs obstore, which is not installed; pip install 'rewound\[s3\]'"):
        Store(url)


# What a server does


def test_a_server_that_ignores_conditions_is_refused(server: ObjectServer, url: str) -> None:
    server.ignores_conditions = True
    with pytest.raises(InputError, match=f"cannot use store {url}: its server ignores conditions") as refused:
        Store(url)
    assert "\n" not in str(refused.value)
    assert not is_store(url), "and no store was made"
    server.ignores_conditions = False
    assert Store(url).claim(KEY)
    server.ignores_conditions = True
    with pytest.raises(InputError, match="its server ignores conditions"):
        Store(url)


def test_an_answer_that_is_lost_is_read_back(server: ObjectServer, url: str) -> None:
    """The put was done, and its answer an error: whoever asked owns the file, and nobody else does."""
    one, other = Bucket(url), Bucket(url)
    server.lost_answers = 1
    assert one.create("claims/x.1", b"same content")
    assert not other.create("claims/x.1", b"same content"), "the token tells them apart, not the content"
    store = Store(url)
    server.lost_answers = 1
    assert store.publish(KEY, RESULT)
    assert not store.publish(KEY, RESULT)
    server.lost_answers = 1
    store.save(KEY, a_state(), a_mask())
    assert store.load(KEY) is not None


def test_a_put_that_never_arrived_is_repeated(server: ObjectServer, url: str) -> None:
    server.dropped_puts = 2
    assert Bucket(url).create("claims/x.1", b"mine")


def test_a_bucket_that_does_not_exist_is_named(server: ObjectServer) -> None:
    for attempt in (lambda: is_store("s3://nowhere/x"), lambda: Store("s3://nowhere/x")):
        with pytest.raises(InputError, match="s3://nowhere/x: there is no bucket nowhere; create it, or correct the U"):
            attempt()


def test_a_server_that_does_not_answer_is_told_soon(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(InputError, match="its server does not answer; run the same command again when it does"):
        is_store(url)
    assert time.monotonic() - began < 30


def test_what_a_server_says_of_itself_is_repeated(server: ObjectServer, url: str) -> None:
    server.dropped_puts = 10**6
    with pytest.raises(
        InputError, match=f"{url}: its server answers 503 Service Unavailable \\(SlowDown\\); try again later"
    ):
        Store(url)


def test_another_region_is_named(server: ObjectServer, url: str) -> None:
    server.region = "eu-west-3"
    with pytest.raises(
        InputError, match=r"the bucket is in another region; set AWS_REGION to the bucket's \(eu-west-3"
    ):
        Store(url)


def test_a_bucket_that_can_only_be_read_is_read(server: ObjectServer, url: str) -> None:
    Store(url).publish(KEY, RESULT)
    server.denied = {"PUT", "DELETE", "POST"}
    store = Store(url)
    assert store.result(KEY) == RESULT
    with pytest.raises(ReadOnly, match=r"the credentials may not write there \(AccessDenied\); give some that"):
        store.claim(KEY)
    server.denied = {"GET"}
    with pytest.raises(InputError, match=r"the credentials may not read there \(AccessDenied\); give some"):
        is_store(url)


# Credentials


def test_no_credentials_are_not_looked_for_in_the_machine(
    server: ObjectServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", server.endpoint)
    server.requests.clear()
    with pytest.raises(InputError, match=f"{url}: there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET"):
        Store(url)
    assert server.requests == []
    monkeypatch.setenv("REWOUND_INSTANCE_METADATA", "1")
    Store(url)
    assert any("/latest/" in path for _, path in server.requests), "unless they are asked for"


@pytest.mark.parametrize("scheme", ["az", "gs"])
def test_nor_for_other_clouds(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(("AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    with pytest.raises(InputError, match=f"cannot use store {scheme}://b/x: there are no credentials; set "):
        Store(f"{scheme}://b/x")


def test_a_profile_of_the_aws_tools_is_used(
    server: ObjectServer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in server.environment:
        monkeypatch.delenv(name)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        "[work]\naws_access_key_id = of-the-profile\naws_secret_access_key = 50%\n"
    )
    (tmp_path / ".aws" / "config").write_text(f"[profile work]\nregion = eu-west-3\nendpoint_url = {server.endpoint}\n")
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert Store(url).publish(KEY, RESULT)
    assert "of-the-profile" in server.last_authorization
    assert "eu-west-3" in server.last_authorization
    monkeypatch.setenv("AWS_PROFILE", "play")
    with pytest.raises(InputError, match=r"AWS_PROFILE is 'play', and there is no such profile in ~/.aws"):
        Store(url)


def test_secrets_are_neither_printed_nor_kept(
    server: ObjectServer, url: str, tmp_path: Path, rewound_command: Rewound
) -> None:
    store = Store(url)
    store.save(KEY, a_state(), a_mask())
    assert store.load(KEY) is not None
    assert SECRET.encode() not in pickle.dumps(store.backend)
    assert SECRET not in repr(store.backend)
    for path in store.backend.list(""):
        assert SECRET.encode() not in (store.backend.read(path, 2**20) or b"")
    assert all(SECRET.encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    server.denied = {"GET", "PUT"}
    _, out, err = rewound_command("show", "--store", url)
    assert "the credentials may not read there" in err
    assert SECRET not in out + err


# The cache


def test_tensors_are_fetched_once(server: ObjectServer, url: str, tmp_path: Path) -> None:
    Store(url).save(KEY, a_state(), a_mask())
    store, cache = Store(url), tmp_path / "cache"
    assert store.load(KEY) is not None, "from what this machine wrote"
    assert server.downloads() == 0
    shutil.rmtree(cache)  # safe at any time
    for _ in range(3):
        assert store.load(KEY) is not None
    assert server.downloads() == 1
    shutil.rmtree(cache)
    Store(url).save(KEY, a_state(scale=7.0), a_mask())
    kept = store.load(KEY)
    assert kept is not None
    assert kept.state.model["conv.weight"].max() == 77.0, "what is replaced is not taken from the cache"


def test_a_damaged_copy_is_not_the_stores_damage(server: ObjectServer, url: str, tmp_path: Path) -> None:
    lines: list[str] = []
    store = Store(url, lines.append)
    store.save(KEY, a_state(), a_mask())
    (copy,) = (tmp_path / "cache" / "stores").iterdir()
    copy.write_bytes(copy.read_bytes()[:-1] + b"?")
    assert store.load(KEY) is not None
    assert lines == []
    content = store.backend.read(f"states/{KEY[:2]}/{KEY}.safetensors", 2**20) or b""
    store.backend.write(f"states/{KEY[:2]}/{KEY}.safetensors", content[:-1] + b"?")
    assert store.load(KEY) is None
    assert lines == [
        f"damaged: {KEY}.safetensors is not what was written; "
        f"set aside as {url}/damaged/{KEY}.safetensors, to be recomputed"
    ]


def test_a_clock_that_is_wrong_is_not_a_matter_of_credentials(server: ObjectServer, url: str) -> None:
    """Requests are signed with the time, and refused by a server that has another."""
    backend = Bucket(url)
    server.is_late = True
    for attempt in (partial(backend.write, "states/x", b"x"), partial(backend.create, "states/x", b"x")):
        with pytest.raises(InputError, match="this machine's clock is too far from the server's; set it") as caught:
            attempt()
        assert not isinstance(caught.value, ReadOnly)
    with pytest.raises(InputError, match="this machine's clock"):
        backend.read("states/x", 10)


def test_the_cache_is_bounded(server: ObjectServer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWOUND_CACHE_GIB", f"{250_000 / 2**30}")
    backend = Bucket(url)
    for number in range(5):
        backend.write(f"states/{number}", lambda to, n=number: to.write_bytes(100_000 * bytes([n])))  # type: ignore[misc]
    copies = [file.stat().st_size for file in (tmp_path / "cache" / "stores").iterdir()]
    assert sum(copies) == 200_000
    for number in range(5):
        file = backend.fetch(f"states/{number}")
        assert file is not None
        assert file.read_bytes() == 100_000 * bytes([number])
    monkeypatch.setenv("REWOUND_CACHE_GIB", "much")
    with pytest.raises(InputError, match="REWOUND_CACHE_GIB must be a number of GiB such as 10, not 'much'"):
        Bucket(url)


def test_a_file_of_many_parts_is_whole(server: ObjectServer, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_PART", 5 * 2**20)  # the least that S3 takes
    backend, content = Bucket(url), os.urandom(11 * 2**20)
    backend.write("states/x", lambda to: to.write_bytes(content))
    shutil.rmtree(os.environ["REWOUND_CACHE"])
    file = backend.fetch("states/x")
    assert file is not None
    assert file.read_bytes() == content


# Sweeps


def test_a_killed_worker_is_succeeded(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the dense run, for which all others wait, until it is dead; the tables are those of a folder."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    sweep, folder, store = sweep_of(FINE_TUNING), store, Store(url)
    run(sweep, folder)
    with _process(_take, store.backend, plan(sweep.targets).nodes[0].key) as (process, pipe):
        assert pipe.recv() is True
        death = threading.Timer(0.5, _kill, [process.pid])
        death.start()
        run(sweep, store, keep_all=True)
    assert timeless(collected(sweep.targets, store)) == timeless(collected(sweep.targets, folder))
    assert store.claims() == {}


@pytest.mark.slow
def test_every_command_takes_a_url(url: str, rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers in two processes on one bucket; then a plan, a report, and a pack that goes on in another bucket."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    Path("tiny.toml").write_text(SWEEP)
    here, away, quick = ["--store", url], ["--store", f"{url}/away"], ["--figures", "none"]
    code, out, err = rewound_command("report", "tiny.toml", *here)
    assert (code, out) == (2, "")
    assert f"nothing of tiny has run yet in {url}; run it with: rewound run tiny.toml --store {url}" in err
    assert rewound.run("tiny.toml", store=url, jobs=2).missing == 0
    assert rewound.plan("tiny.toml", store=url).nodes_to_do == 0
    assert "done, 0 to do" in rewound_command("plan", "tiny.toml", *here).out
    assert rewound_command("report", "tiny.toml", *here, *quick, "--out", "here").code == 0
    assert f"store {url}" in rewound_command("show", *here).out
    assert rewound_command("pack", "tiny.toml", "--out", "tiny.pack", *here).code == 0
    assert " 0 there already, 0 damaged" in rewound_command("unpack", "tiny.pack", *away).out
    assert rewound_command("report", "tiny.toml", *away, *quick, "--out", "away").code == 0
    assert Path("here/results.csv").read_bytes() == Path("away/results.csv").read_bytes()
    words = ["--compression", 2, "--one-shot", "--retrain-epochs", 1, "--out", "pruned"]
    assert rewound_command("prune", "tiny:Tiny", *words, *here).code == 0
    assert not Path("s3:").exists()
