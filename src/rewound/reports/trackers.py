"""Results where teams already look: TensorBoard and MLflow, with a run for every row of the tables.

A run has the row's labels as hyperparameters, what was measured as metrics, and its training curve; the tables go with
them. Each run is kept under its labels with a digest of all that it says: what is there already is left as it is, and
one that says something else now (it had failed, and was tried again) is replaced.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeAlias

from rewound.conclusions.tables import CurveRow, Row, Tables, ordered
from rewound.foundations.errors import Failed, InputError
from rewound.foundations.names import unknown
from rewound.foundations.quantities import counted
from rewound.foundations.wholefiles import write_whole
from rewound.reports.look import mode_title, ratios

_MARK: Final = "rewound.digest"
_LABELS: Final = "rewound.run"
_BATCH: Final = 1000  # metrics that MLflow takes at once


@dataclass(frozen=True)
class Run:
    """One row as a tracker keeps it."""

    name: str
    labels: Mapping[str, str | int | float]
    metrics: Mapping[str, float]
    """What was measured at the end; none if it failed."""
    curve: Sequence[tuple[int, float, float]]
    """Steps, learning rates and losses."""

    @cached_property
    def digest(self) -> str:
        """Of all that it says."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:32]


def runs(tables: Tables) -> Iterator[Run]:
    """The rows of the tables, in the order of `results.csv`."""
    curves: dict[str, list[CurveRow]] = defaultdict(list)
    for point in tables.curves:
        curves[point.key].append(point)
    for row in ordered(tables.rows):
        curve = [(point.step, point.lr, point.loss) for point in curves[row.key]]
        yield Run(_name(row), _labels(row), _metrics(row), curve)


def _name(row: Row) -> str:
    """As a path: TensorBoard groups runs by the beginnings of their names."""
    if row.dense:
        return f"{row.recipe}/dense/trial {row.trial}"
    ratio = ratios([row.density])[row.density].replace("×", "x")
    how = f"{row.technique} {ratio} {mode_title(row.iterative).lower()} t={row.retrain_epochs:g}"
    return f"{row.recipe}/{row.pruning}/{how}/trial {row.trial}"


def _labels(row: Row) -> dict[str, str | int | float]:
    found: dict[str, str | int | float | None] = {
        "recipe": row.recipe,
        "pruning": row.pruning,
        "levels": "dense" if row.dense else mode_title(row.iterative).lower(),
        "technique": row.technique or "dense",
        "density": row.density,
        "compression": row.compression,
        "retrain_epochs": row.retrain_epochs,
        "trial": row.trial,
        "metric": row.measured_by.described(),
        "key": row.key or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _metrics(row: Row) -> dict[str, float]:
    names = ("val", "test", "flops", "parameters", "search_epochs", "seconds")
    found = {name: getattr(row, name) for name in names}
    return {} if row.test is None else {name: float(value) for name, value in found.items() if value is not None}


Tracker: TypeAlias = Callable[[str, Tables, Path], str]
"""Takes a name for all of it, the tables, and the folder of the report with the tables' files; says where runs are."""


def tracker_named(name: str) -> Tracker:
    """Where results are to be written to, if what that needs is installed."""
    if not isinstance(name, str) or name not in _TRACKERS:
        raise InputError(unknown("place for results", name, _TRACKERS))
    needed, tracker = _TRACKERS[name]
    if missing := [module for module in needed if find_spec(module) is None]:
        raise InputError(f"--to {name} needs {missing[0]}, which is not installed; pip install 'rewound[{name}]'")
    return tracker


# TensorBoard: a folder of event files for each run


def write_tensorboard(name: str, tables: Tables, folder: Path) -> str:
    """Write event files into `tensorboard/` of a report's folder."""
    root, added, count = folder / "tensorboard", 0, 0
    for run in runs(tables):
        count += 1
        place = root / name / _as_path(run.name)
        mark = place / _MARK
        if mark.exists() and mark.read_text() == run.digest:
            continue
        shutil.rmtree(place, ignore_errors=True)
        _write_events(place, run)
        write_whole(mark, run.digest.encode(), durable=False)  # last: one without it is written again
        added += 1
    return f"{_added(added, count)} to {root}; look at them with: tensorboard --logdir {root}"


def _as_path(name: str) -> str:
    """A name that every file system takes, and that stays below its folder."""
    return re.sub(r"[^\w./=+, -]", "_", name).replace("..", "__")


def _write_events(place: Path, run: Run) -> None:
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    with SummaryWriter(str(place)) as writer:
        for summary in hparams(dict(run.labels), dict(run.metrics)):  # type: ignore[no-untyped-call]
            writer.file_writer.add_summary(summary)
        for name, value in run.metrics.items():
            writer.add_scalar(name, value, 0)
        for step, rate, loss in run.curve:
            writer.add_scalar("training/learning rate", rate, step)
            writer.add_scalar("training/loss", loss, step)
        lines = [f"| {label} | {value} |" for label, value in {**run.labels, **run.metrics}.items()]
        writer.add_text("row", "\n".join(["| column | value |", "|---|---|", *lines]))


# MLflow: runs of an experiment, at the server or in the database that its environment names


def write_mlflow(name: str, tables: Tables, folder: Path) -> str:
    """Write runs to `MLFLOW_TRACKING_URI`, else into a database in a report's folder."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would tell its makers that it is used
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # a server that is away is told within seconds
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    given = os.environ.get("MLFLOW_TRACKING_URI")
    folder = folder.resolve()
    uri = given or f"sqlite:///{folder / 'mlflow.db'}"
    shown_uri = _without_password(uri)
    artifacts = None if given else (folder / "mlflow-artifacts").as_uri()
    for chatty in ("mlflow", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        client = MlflowClient(uri)
        found = client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else client.create_experiment(name, artifacts)
        present = {run.data.tags.get(_LABELS): run for run in _all_runs(client, experiment)}
        added = count = 0
        for run in runs(tables):
            count += 1
            added += _write_run(client, experiment, present.get(run.name), run)
        _write_tables(client, experiment, present.get("tables"), folder)
    except MlflowException as error:
        reason = _without_password(str(error).splitlines()[0])
        raise Failed(f"cannot write to MLflow at {shown_uri}: {reason}; is MLFLOW_TRACKING_URI right?") from None
    how = "" if given else f"; to look at them: pip install mlflow && mlflow ui --backend-store-uri {uri}"
    return f"{_added(added, count)} to experiment {name} of MLflow at {shown_uri}{how}"


def _all_runs(client: Any, experiment: str) -> Iterator[Any]:
    token = None
    while True:
        page = client.search_runs([experiment], max_results=1000, page_token=token)
        yield from page
        if not (token := page.token):
            return


def _write_run(client: Any, experiment: str, present: Any, run: Run) -> bool:
    from mlflow.entities import Metric, Param

    if present is not None:
        if present.data.tags.get(_MARK) == run.digest:
            return False
        client.delete_run(present.info.run_id)
    made = client.create_run(experiment, run_name=run.name, tags={_LABELS: run.name}).info
    now = made.start_time
    measured = [Metric(name, value, now, 0) for name, value in run.metrics.items()]
    curve = [
        Metric(name, value, now, step)
        for step, rate, loss in run.curve
        for name, value in (("learning_rate", rate), ("training_loss", loss))
    ]
    params = [Param(name, str(value)) for name, value in run.labels.items()]
    client.log_batch(made.run_id, params=params)
    metrics = [*measured, *curve]
    for begin in range(0, len(metrics), _BATCH):
        client.log_batch(made.run_id, metrics=metrics[begin : begin + _BATCH])
    client.set_tag(made.run_id, _MARK, run.digest)  # last: one without it is written again
    client.set_terminated(made.run_id, "FINISHED" if run.metrics else "FAILED")
    return True


def _write_tables(client: Any, experiment: str, present: Any, folder: Path) -> None:
    files = [path for name in ("results", "layers", "curves") if (path := folder / f"{name}.csv").exists()]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:32]
    if present is not None and present.data.tags.get(_MARK) == digest:
        return
    if present is not None:
        client.delete_run(present.info.run_id)
    made = client.create_run(experiment, run_name="tables", tags={_LABELS: "tables"}).info
    for path in files:
        client.log_artifact(made.run_id, str(path))
    client.set_tag(made.run_id, _MARK, digest)
    client.set_terminated(made.run_id)


def _without_password(text: str) -> str:
    """A text without the names and passwords in its URLs.

    >>> _without_password("http://user:secret@host:5000 refused it")
    'http://host:5000 refused it'
    """
    return re.sub(r"//[^/@\s]*@", "//", text)


def _added(added: int, count: int) -> str:
    there = f", {count - added:,} were there" if added < count else ""
    return f"added {counted(added, 'run')}{there}"


_TRACKERS: Final[Mapping[str, tuple[tuple[str, ...], Tracker]]] = {
    "tensorboard": (("tensorboard",), write_tensorboard),
    "mlflow": (("mlflow", "sqlalchemy", "alembic"), write_mlflow),
}
