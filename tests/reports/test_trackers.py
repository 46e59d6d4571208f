"""Results in TensorBoard and MLflow: their own readers find every number, and a second time adds nothing."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command_line import Rewound
from rewound.conclusions.tables import CurveRow, Row, Tables
from rewound.foundations.errors import Failed, InputError
from rewound.reports.trackers import runs, tracker_named, write_mlflow, write_tensorboard

DENSE = Row("digits", "unstructured", False, "", 1.0, None, 1, 0.97, 0.96, flops=1000, key="d" * 32)
PRUNED = replace(DENSE, technique="lr-rewinding", density=0.1, retrain_epochs=4.0, val=0.95, test=0.94, key="a" * 32)
FAILED = replace(PRUNED, technique="fine-tuning", val=None, test=None, key="b" * 32)
CURVES = [CurveRow("a" * 32, 9, 0.1, 2.25, None), CurveRow("a" * 32, 18, 0.01, 1.5, 0.95)]
TABLES = Tables([DENSE, PRUNED, FAILED], [], CURVES)
NAMES = [
    "digits/dense/trial 1",
    "digits/unstructured/fine-tuning 10.00x one-shot t=4/trial 1",
    "digits/unstructured/lr-rewinding 10.00x one-shot t=4/trial 1",
]


def test_every_row_is_a_run_of_its_own_name() -> None:
    found = {run.name: run for run in runs(TABLES)}
    assert sorted(found) == NAMES
    assert found[NAMES[1]].metrics == {}, "it failed"
    assert found[NAMES[2]].labels["compression"] == pytest.approx(10)
    assert found[NAMES[2]].curve == [(9, 0.1, 2.25), (18, 0.01, 1.5)]


def events(place: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(place))
    found.Reload()
    return found


@pytest.mark.filterwarnings("ignore")  # of libraries that the reader imports
def test_tensorboard_reads_what_was_written_and_nothing_is_written_twice(tmp_path: Path) -> None:
    said = write_tensorboard("digits", TABLES, tmp_path)
    assert said.startswith(f"added 3 runs to {tmp_path}/tensorboard; look at them with: tensorboard --logdir")
    read = events(tmp_path / "tensorboard" / "digits" / NAMES[2])
    assert [(each.step, each.value) for each in read.Scalars("training/loss")] == [(9, 2.25), (18, 1.5)]
    assert [each.value for each in read.Scalars("training/learning rate")] == pytest.approx([0.1, 0.01])
    assert [each.value for each in read.Scalars("test")] == pytest.approx([0.94])
    hyperparameters = read.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    assert b"lr-rewinding" in hyperparameters
    assert "row/text_summary" in read.Tags()["tensors"]
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert write_tensorboard("digits", TABLES, tmp_path).startswith("added 0 runs, 3 were there to ")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == files
    tried = Tables([DENSE, PRUNED, replace(FAILED, val=0.9, test=0.9)], [], CURVES)
    assert write_tensorboard("digits", tried, tmp_path).startswith("added 1 run, 2 were there to ")
    assert [each.value for each in events(tmp_path / "tensorboard" / "digits" / NAMES[1]).Scalars("test")] == (
        pytest.approx([0.9])
    )


def test_a_name_in_a_table_stays_below_the_folder(tmp_path: Path) -> None:
    write_tensorboard("digits", Tables([replace(DENSE, recipe="../../../../outside\n")]), tmp_path / "report")
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of libraries that MLflow imports
def test_mlflow_reads_what_was_written_and_nothing_is_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    TABLES.write(tmp_path)
    said = write_mlflow("digits", TABLES, tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert said == (
        f"added 3 runs to experiment digits of MLflow at {uri}; to look at them: "
        f"pip install mlflow && mlflow ui --backend-store-uri {uri}"
    )
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("digits").experiment_id
    found = {run.info.run_name: run for run in client.search_runs([experiment])}
    assert sorted(found) == [*NAMES, "tables"]
    run = found[NAMES[2]]
    assert run.data.params["technique"] == "lr-rewinding"
    assert float(run.data.params["compression"]) == pytest.approx(10)
    assert (run.data.metrics["test"], run.data.metrics["val"]) == (0.94, 0.95)
    losses = client.get_metric_history(run.info.run_id, "training_loss")
    assert sorted((each.step, each.value) for each in losses) == [(9, 2.25), (18, 1.5)]
    assert (run.info.status, found[NAMES[1]].info.status) == ("FINISHED", "FAILED")
    table = client.download_artifacts(found["tables"].info.run_id, "results.csv")
    assert Path(table).read_bytes() == (tmp_path / "results.csv").read_bytes()
    assert write_mlflow("digits", TABLES, tmp_path).startswith("added 0 runs, 3 were there to experiment digits")
    assert {run.info.run_id for run in client.search_runs([experiment])} == {run.info.run_id for run in found.values()}
    tried = Tables([DENSE, PRUNED, replace(FAILED, val=0.9, test=0.9)], [], CURVES)
    assert write_mlflow("digits", tried, tmp_path).startswith("added 1 run, 2 were there")
    again = [run for run in client.search_runs([experiment]) if run.info.run_name == NAMES[1]]
    assert [run.data.metrics["test"] for run in again] == [0.9], "it takes the place of the one that failed"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(Failed, match=r"^cannot write to MLflow at http://127.0.0.1:9: .*MLFLOW_TRACKING_URI") as error:
        write_mlflow("digits", TABLES, tmp_path)
    assert "secret" not in str(error.value)
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_what_is_not_there_is_one_sentence(rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewound.reports.trackers.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"^--to mlflow needs mlflow, which is not installed;"):
        tracker_named("mlflow")
    with pytest.raises(InputError, match=r"^--to tensorboard needs tensorboard, .*'rewound\[tensorboard\]'$"):
        tracker_named("tensorboard")
    with pytest.raises(InputError, match="unknown place for results 'tensorbord'; did you mean 'tensorboard'"):
        tracker_named("tensorbord")


def test_a_report_on_a_table_is_written_to_tensorboard(rewound_command: Rewound, tmp_path: Path) -> None:
    Tables([DENSE, PRUNED]).write(tmp_path / "mine")
    words = ("report", "--results", tmp_path / "mine" / "results.csv", "--figures", "none", "--out", tmp_path / "out")
    code, out, err = rewound_command(*words, "--to", "tensorboard")
    assert (code, err) == (0, "")
    assert "added 2 runs to " in out
    assert len([*(tmp_path / "out" / "tensorboard").rglob("events.out.*")]) == 2
