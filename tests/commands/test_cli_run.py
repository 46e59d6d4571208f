"""`run`, `plan` and `show`: what a sweep leaves behind, what a second one does not do again, and what is said of it."""

import hashlib
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from command_line import SWEEP, Rewound, snapshot
from rewound.commands import console
from rewound.conclusions.tables import read_rows
from rewound.experiments.executors import local
from rewound.experiments.executors.walking import Headway
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import Plan, plan
from rewound.experiments.sweeps.sweep import load_sweep
from rewound.foundations.owners import usable_cores
from rewound.states.storage.artifacts import Result, digest
from rewound.states.storage.store import Say, Store
from stored import KEY, RESULT
from tiny import POISON, Tiny, Unmeasured


def test_run_writes_tables_and_figures(done: Path) -> None:
    rows = read_rows(done / "report" / "results.csv")
    assert len(rows) == 1 + 4
    assert all(row.test is not None for row in rows)
    names = {path.name for path in (done / "report").iterdir()}
    assert names > {"results.csv", "layers.csv", "curves.csv"}
    assert any(name.endswith(".png") for name in names)


def test_run_twice_does_nothing_the_second_time(done: Path, rewound_command: Rewound) -> None:
    before = snapshot(done / "rewound-store")
    words = ("run", done / "tiny.toml", "--store", done / "rewound-store", "--jobs", 1, "--keep", "all", "--out", "r")
    code, out, err = rewound_command(*words)
    assert (code, err) == (0, "")
    assert "lr-rewinding" in out
    assert snapshot(done / "rewound-store") == before
    for name in ("results.csv", "layers.csv", "curves.csv"):
        assert Path("r", name).read_bytes() == (done / "report" / name).read_bytes()


def test_a_sweep_of_dense_networks_only(rewound_command: Rewound) -> None:
    Path("dense.toml").write_text('recipe = "tiny:Tiny"\ntrials = [1]\n')
    code, out, err = rewound_command("run", "dense.toml", "--jobs", 1)
    assert (code, err) == (0, "")
    assert "only dense networks so far" in out
    assert Path("rewound-report/dense/results.csv").exists()


def elsewhere(plan: Plan, store: Store, options: Options, *, say: Say, tick: Callable[[Headway], None]) -> None:
    say(f"{len(plan.nodes)} nodes on {options.device}")
    local.run(plan, store, options, say=say, tick=tick)


def test_a_terminal_has_a_bar_once_there_is_something_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(console, "console", Console(file=screen, force_terminal=True, width=100, markup=False))
    with console.progress_of("nothing"):
        pass
    assert screen.getvalue() == ""
    with console.progress_of("mine [ab]") as show:
        show(3, 10)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert re.search(r"mine \[ab\] \S* +3/10 steps", shown)


def test_an_executor_of_ones_own(rewound_command: Rewound) -> None:
    Path("dense.toml").write_text('recipe = "tiny:Tiny"\ntrials = [1]\n')
    code, out, err = rewound_command("run", "dense.toml", "--jobs", 1, "--on", "test_cli_run:elsewhere")
    assert (code, err) == (0, "")
    assert "1 nodes on cpu" in out
    assert Path("rewound-report/dense/results.csv").exists()


def on_a_gpu_elsewhere(
    plan: Plan, store: Store, options: Options, *, say: Say, tick: Callable[[Headway], None]
) -> None:
    assert (options.device, options.jobs) == ("cuda:3", 1)
    local.run(plan, store, replace(options, device="cpu"), say=say, tick=tick)  # as if another machine had done it


def test_an_executor_looks_for_the_device_where_it_works(
    rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    Path("dense.toml").write_text('recipe = "tiny:Tiny"\ntrials = [1]\n')
    words = ("run", "dense.toml", "--device", "cuda:3")
    code, _, err = rewound_command(*words)
    assert (code, Path("rewound-store").exists()) == (2, False)
    assert err.startswith("error: device 'cuda:3' is not there")
    for _ in range(2):  # the second goes on with results that were made on another device, as far as is known here
        code, out, err = rewound_command(*words, "--on", "test_cli_run:on_a_gpu_elsewhere")
        assert (code, err) == (0, "")
        assert "note: " not in out
    assert Path("rewound-report/dense/results.csv").exists()


def test_a_metric_is_called_by_its_name(rewound_command: Rewound) -> None:
    Path("balanced.toml").write_text(SWEEP.replace("tiny:Tiny", "tiny:Balanced"))
    code, out, err = rewound_command("run", "balanced.toml", "--jobs", 1)
    assert (code, err) == (0, "")
    assert "Test F1 over trials" in " ".join(out.split())
    page = Path("rewound-report/balanced/index.html").read_text()
    assert "The dense network reaches F1 " in page
    assert "F1 (points)" in page


def test_failed_runs_are_shown_and_retried_when_told(rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("failing.toml").write_text(SWEEP.replace("tiny:Tiny", "tiny:Watched"))
    monkeypatch.setitem(POISON, (1, 1), 15)  # in the second epoch
    code, out, err = rewound_command("run", "failing.toml", "--jobs", 1)
    assert (code, err) == (0, "")
    assert out.count("failed: ") == 2
    lost = [row for row in read_rows("rewound-report/failing/results.csv") if row.test is None]
    assert {(row.technique, row.retrain_epochs) for row in lost} == {("fine-tuning", 2.0), ("lr-rewinding", 2.0)}
    code, out, err = rewound_command("run", "failing.toml", "--jobs", 1)
    assert (code, err) == (0, "")
    assert "failed: " not in out, "not tried again"
    monkeypatch.delitem(POISON, (1, 1))
    code, out, err = rewound_command("run", "failing.toml", "--jobs", 1, "--retry-failed")
    assert (code, err) == (0, "")
    assert all(row.test is not None for row in read_rows("rewound-report/failing/results.csv"))


def test_a_metric_that_is_no_number_is_retried_when_told(
    rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = SWEEP.replace("tiny:Tiny", "tiny:Unmeasured").replace("density = 0.5", "density = [0.8, 0.5]")
    Path("nan.toml").write_text(sweep)
    assert rewound_command("run", "nan.toml", "--jobs", 1).code == 0
    assert any(row.test is None for row in read_rows("rewound-report/nan/results.csv"))
    monkeypatch.setattr(Unmeasured, "evaluate", Tiny.evaluate)
    assert rewound_command("run", "nan.toml", "--jobs", 1).code == 0
    assert any(row.test is None for row in read_rows("rewound-report/nan/results.csv")), "not tried again"
    assert rewound_command("run", "nan.toml", "--jobs", 1, "--retry-failed").code == 0
    assert all(row.test is not None for row in read_rows("rewound-report/nan/results.csv"))


RULE = """
from rewound import Technique
from rewound.method.schedule import Schedule

def warm(S, T, t, facts):
    return Schedule.constant(t, 0.01)

WARM = Technique(weights="final", lr=warm)
"""


def test_a_rule_that_was_edited_is_told_with_the_remedy(
    rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("x.toml").write_text(SWEEP.replace('["lr-rewinding", "fine-tuning"]', '["own_rule:WARM", "fine-tuning"]'))
    Path("own_rule.py").write_text(RULE)
    run = ("run", "x.toml", "--jobs", 1)
    assert rewound_command(*run).code == 0
    assert "note:" not in rewound_command(*run).out
    Path("own_rule.py").write_text(RULE.replace("0.01", "0.05"))
    monkeypatch.delitem(sys.modules, "own_rule")  # another process loads what the file has now
    assert (
        "note: stored results were made with another own_rule:warm (2 of them); they are used as they are, "
        "to compute them anew give another store or rename own_rule:warm\n"
    ) in rewound_command(*run).out
    for path in Path("rewound-store/results").rglob("*.json"):  # as earlier versions wrote them
        result = json.loads(path.read_text())
        result["made"].pop("own_rule:warm", None)
        del result["checksum"]
        path.write_text(json.dumps({**result, "checksum": digest(result)}))
    assert "note:" not in rewound_command(*run).out


def test_plan_counts_and_runs_nothing(done: Path, rewound_command: Rewound) -> None:
    before = snapshot(done / "rewound-store")
    code, out, err = rewound_command("plan", done / "tiny.toml", "--store", done / "rewound-store")
    assert (code, err) == (0, "")
    nodes = len(plan(load_sweep(str(done / "tiny.toml")).targets).nodes)
    assert re.search(rf"nodes \(pieces of training\)\W+{nodes} \({nodes} done, 0 to do\)", out)
    assert "recompute" not in out
    assert re.search(r"time to do\W+nothing", out)
    assert snapshot(done / "rewound-store") == before


EDITED = """
from dataclasses import dataclass
from pathlib import Path
from tiny import Tiny

@dataclass(frozen=True)
class Task(Tiny):
    def loss(self, model, batch):
        Path(__file__).write_text(Path(__file__).read_text() + "# thought of while it ran\\n")
        return super().loss(model, batch)
"""


def test_results_name_the_source_that_ran_however_it_was_edited_meanwhile(rewound_command: Rewound) -> None:
    Path("edited.py").write_text(EDITED)
    Path("x.toml").write_text(SWEEP.replace("tiny:Tiny", "edited:Task"))
    ran = hashlib.blake2b(EDITED.encode(), digest_size=8).hexdigest()
    assert rewound_command("run", "x.toml", "--jobs", 1).code == 0
    assert Path("edited.py").read_text() != EDITED
    results = [json.loads(path.read_text()) for path in Path("rewound-store/results").rglob("*.json")]
    assert {result["made"]["source"] for result in results} == {ran}


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1"])
def test_plan_for_one_of_several_gpus(rewound_command: Rewound, device: str) -> None:
    out = rewound_command("plan", "cifar10-resnet20-grid", "--device", device).out
    assert re.search(rf"time to do\W+about \d+ minutes with 1 job \(typical for cifar10-resnet20 on {device}\)", out)


def test_plan_before_anything_ran(rewound_command: Rewound) -> None:
    code, out, err = rewound_command("plan", "cifar10-resnet20-grid", "--device", "cuda")
    assert (code, err) == (0, "")
    assert re.search(r"retraining epochs, naive\W+6,780", out)
    assert int(re.findall(r"retraining epochs, shared\W+([\d,]+)", out)[0].replace(",", "")) <= 3_300
    assert re.search(r"time to do\W+about 19 minutes with 1 job \(typical for cifar10-resnet20 on cuda\)", out)
    assert rewound_command("plan", "digits").out.count(f" with {usable_cores()} job") == 1, "as many as run would take"
    assert list(Path().iterdir()) == [], "it leaves nothing behind"


def test_plan_counts_what_has_to_be_made_again(rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("x.toml").write_text(SWEEP)
    assert rewound_command("run", "x.toml", "--jobs", 1).code == 0
    Path("x.toml").write_text(SWEEP.replace("density = 0.5", "density = [0.5, 0.25]"))
    planned = rewound_command("plan", "x.toml").out
    (epochs,) = re.findall(r"epochs to do\W+(\d+) ", planned)
    (again,) = re.findall(r"of them to recompute\W+(\d+), since their tensors were dropped", planned)
    assert (int(epochs), int(again)) == (2 + 1 + 2 + 2, 2), "the dense run, and all of the new density"
    assert "from what has run on cpu" in planned
    assert re.search(
        r"time to do\W+unknown: \S+ has not run on cuda yet", rewound_command("plan", "x.toml", "--device", "cuda").out
    )
    real, published = Store.publish, list[int]()

    def publish(store: Store, key: str, result: Result) -> None:
        published.append(result["steps"])
        real(store, key, result)

    monkeypatch.setattr(Store, "publish", publish)
    code, out, err = rewound_command("run", "x.toml", "--jobs", 1)
    assert (code, err) == (0, "")
    assert out.count("recomputing ") == 1
    new = round(sum(published) / Tiny().steps_per_epoch)
    assert new == int(epochs) - int(again), "what is done again was measured before"


def test_progress_in_a_log_is_a_line_now_and_then(rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("x.toml").write_text(SWEEP)
    monkeypatch.setattr("rewound.experiments.executors.working._TELL", 0.0)
    code, out, err = rewound_command("run", "x.toml", "--jobs", 1, "--store", "first")
    assert (code, err) == (0, "")
    steps = sum(node.steps for node in plan(load_sweep("x.toml").targets).nodes)
    assert re.findall(r"x: ([\d,]+) of ([\d,]+) steps(.*)", out) == [("0", str(steps), "")], "then silence"
    assert "━" not in out
    monkeypatch.setattr(console, "LINE", 0.0)
    _, out, _ = rewound_command("run", "x.toml", "--jobs", 1, "--store", "second")
    told = re.findall(r"x: ([\d,]+) of [\d,]+ steps(?:, about \S+ seconds? left)?\n", out)
    assert sorted({int(number) for number in told}) == list(dict.fromkeys(map(int, told))), "it never goes back"
    assert len(set(told)) > 1


def test_the_time_left_is_counted_from_the_first_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 75.0, 85.0, 120.0])  # it compiles for 75 seconds
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console.progress_of("x") as show:
        for steps in (1_000, 1_010, 1_110, 1_460):  # a thousand were done before
            show(steps, 2_000)
    assert capsys.readouterr().out.splitlines() == [
        "x: 1,000 of 2,000 steps",
        "x: 1,010 of 2,000 steps",
        "x: 1,460 of 2,000 steps, about 54 seconds left",
    ]


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    console.say("mine:Boom: 1 of 2 steps")
    assert capsys.readouterr().out == "mine:Boom: 1 of 2 steps\n"


@pytest.mark.parametrize("name", ["runs[ab]", "runs[/ab]", "runs[red]"])
def test_brackets_in_a_path_are_part_of_it(done: Path, rewound_command: Rewound, name: str) -> None:
    out = Path(name, "report")
    words = ("report", "--results", done / "report" / "results.csv", "--out", out, "--figures", "default")
    code, told, err = rewound_command(*words)
    assert (code, err) == (0, "")
    assert f"report: {out} (" in told
    assert f"open in a browser: {out}/index.html\n" in told
    Store(Path(name, "store")).publish(KEY, {**RESULT, "history": ["prune skip=layer[ab].*"]})
    assert "skip=layer[ab].*" in rewound_command("show", KEY, "--store", Path(name, "store")).out
    assert f"store {name}/store" in rewound_command("show", "--store", Path(name, "store")).out


def test_show_everything(done: Path, rewound_command: Rewound) -> None:
    code, out, err = rewound_command("show", "--store", done / "rewound-store")
    assert (code, err) == (0, "")
    nodes = len(plan(load_sweep(str(done / "tiny.toml")).targets).nodes)
    assert re.search(rf"tiny:Tiny\W+{nodes}\W", out)
    assert re.search(r"[1-9]\S* KiB of tensors; under way: nothing", out)
    assert re.search(r"tiny:Tiny .* [\d.]+ (seconds?|minutes?) ", out)
    assert " 0 seconds" not in out


def test_show_one_state(done: Path, rewound_command: Rewound) -> None:
    row = read_rows(done / "report" / "results.csv")[1]
    for key in (row.key, row.key[:8]):
        code, out, err = rewound_command("show", key, "--store", done / "rewound-store")
        assert (code, err) == (0, "")
        assert row.key in out
        assert "start tiny:Tiny seed 1" in out
        assert "prune magnitude/global" in out
        assert f"{row.test:.8f}"[:-1] in out
        assert re.search(r"took\W+[\d.]+ seconds?\W", out)
        assert re.search(r"made with\W+source \w{16}, torch \S+, python \S+, device cpu\W", out)
