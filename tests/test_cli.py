"""The command line: what it promises in --help, in exit codes, in files, and in one sentence when it cannot."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import typer.main
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import rewound
from rewound import cli
from rewound.mask import Mask
from rewound.planning import plan
from rewound.recipes.digits import Digits
from rewound.records import Result
from rewound.results import read_rows
from rewound.store import Store
from rewound.sweep import load_sweep
from tiny import POISON

COMMANDS = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Tiny(Digits):
    """Two epochs of a small network."""

    epochs: float = 2.0
    widths: tuple[int, ...] = (4, 8)


SWEEP = """
recipe = "test_cli:Tiny"
trials = [1]

[[experiment]]
technique = ["lr-rewinding", "fine-tuning"]
retrain-epochs = [1, 2]
density = 0.5
"""


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Rewound = Callable[..., Outcome]


@pytest.fixture
def rewound_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Rewound:
    """Runs the command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*words: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["rewound", *map(str, words)])
        capsys.readouterr()
        try:
            cli.main()
            code: object = 0
        except SystemExit as end:
            code = end.code or 0
        assert isinstance(code, int)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the sweep has run, with all tensors; not to be changed."""
    folder = tmp_path_factory.mktemp("done")
    (folder / "tiny.toml").write_text(SWEEP)
    words = ["run", "tiny.toml", "--jobs", "1", "--keep", "all", "--out", "report"]
    subprocess.run(command(*words), cwd=folder, env=environment(), check=True, capture_output=True)
    return folder


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "rewound", *words]


def environment() -> dict[str, str]:
    paths = [str(Path(__file__).parent), *sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MPLBACKEND": "agg", "NO_COLOR": "1", "COLUMNS": "200"}


def snapshot(folder: Path) -> dict[Path, tuple[int, int]]:
    return {
        path: (path.stat().st_mtime_ns, path.stat().st_size)
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


# Help


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(rewound_command: Rewound, name: str) -> None:
    code, out, err = rewound_command(name, "--help")
    assert (code, err) == (0, "")
    example = re.search(rf"Example: (rewound {name} .*)", out)
    assert example, "no example"
    for option in re.findall(r"--[a-z-]+", example[1]):
        assert option in out.replace(example[0], ""), "the example uses an option that is not there"


def test_the_contract_of_commands() -> None:
    assert {"run", "plan", "report", "diff", "prune", "inspect", "show", "data"} <= set(COMMANDS)


def test_help_and_version(rewound_command: Rewound) -> None:
    code, out, _ = rewound_command("--help")
    assert code == 0
    assert "Example: rewound run digits" in out
    assert all(name in out for name in COMMANDS)
    assert rewound_command("--version") == (0, f"rewound {rewound.__version__}\n", "")


def test_as_a_module() -> None:
    ran = subprocess.run(command("--version"), env=environment(), capture_output=True, text=True, check=True)
    assert ran.stdout == f"rewound {rewound.__version__}\n"


@pytest.mark.parametrize(
    "words",
    [["--help"], ["prune", "--help"], ["--version"], ["diff", "x.csv", "x.csv"], ["report", "--results", "x.csv"]],
    ids=" ".join,
)
def test_what_needs_no_torch_does_not_import_it(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "x.csv").write_text(f"{row()}a,unstructured,0,,1,,1,0.95,0.95,\n")
    script = "import sys; from rewound.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    started = [sys.executable, "-c", script, *words]
    ran = subprocess.run(started, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("words", [["run"], ["fly"], ["run", "digits", "--jbos", "1"], ["prune", "x", "--rate", "low"]])
def test_a_command_line_that_cannot_be_read(rewound_command: Rewound, words: list[str]) -> None:
    code, out, err = rewound_command(*words)
    assert code == 2
    assert out == ""
    assert "Traceback" not in err


# Run, plan, report, show


def test_run_writes_tables_and_figures(done: Path) -> None:
    rows = read_rows(done / "report" / "results.csv")
    assert len(rows) == 1 + 4
    assert all(row.test is not None for row in rows)
    names = {path.name for path in (done / "report").iterdir()}
    assert names > {"results.csv", "layers.csv", "curves.csv"}
    assert any(name.endswith(".png") for name in names)


def test_run_twice_does_nothing_the_second_time(done: Path, rewound_command: Rewound) -> None:
    before = snapshot(done / "rewound-store")
    began = time.perf_counter()
    words = ("run", done / "tiny.toml", "--store", done / "rewound-store", "--jobs", 1, "--keep", "all", "--out", "r")
    code, out, err = rewound_command(*words)
    assert (code, err) == (0, "")
    assert "lr-rewinding" in out
    assert time.perf_counter() - began < 60
    assert snapshot(done / "rewound-store") == before
    for name in ("results.csv", "layers.csv", "curves.csv"):
        assert Path("r", name).read_bytes() == (done / "report" / name).read_bytes()


def test_plan_counts_and_runs_nothing(done: Path, rewound_command: Rewound) -> None:
    before = snapshot(done / "rewound-store")
    code, out, err = rewound_command("plan", done / "tiny.toml", "--store", done / "rewound-store")
    assert (code, err) == (0, "")
    nodes = len(plan(load_sweep(str(done / "tiny.toml")).targets).nodes)
    assert re.search(rf"nodes\W+{nodes} \({nodes} done, 0 to do\)", out)
    assert re.search(r"time to do\W+nothing", out)
    assert snapshot(done / "rewound-store") == before


def test_plan_before_anything_ran(rewound_command: Rewound) -> None:
    code, out, err = rewound_command("plan", "cifar10-resnet20-grid", "--device", "cuda")
    assert (code, err) == (0, "")
    assert re.search(r"retraining epochs, naive\W+6,780", out)
    assert int(re.findall(r"retraining epochs, shared\W+([\d,]+)", out)[0].replace(",", "")) <= 3_300
    assert re.search(r"time to do\W+[\d.,]+ hours", out)
    assert list(Path().iterdir()) == [], "it leaves nothing behind"


def test_report_of_a_sweep(done: Path, rewound_command: Rewound) -> None:
    code, out, err = rewound_command("report", done / "tiny.toml", "--store", done / "rewound-store", "--out", "again")
    assert (code, err) == (0, "")
    assert "One test image is 0.14 points" in out
    assert Path("again/results.csv").read_bytes() == (done / "report" / "results.csv").read_bytes()


def test_report_of_a_table(done: Path, rewound_command: Rewound) -> None:
    code, out, err = rewound_command("report", "--results", done / "report" / "results.csv", "--out", "table")
    assert (code, err) == (0, "")
    assert "fine-tuning" in out
    assert Path("table/results.csv").read_bytes() == (done / "report" / "results.csv").read_bytes()


def test_diff_of_two_tables(done: Path, rewound_command: Rewound) -> None:
    table = done / "report" / "results.csv"
    code, out, err = rewound_command("diff", table, table)
    assert (code, err) == (0, "")
    assert "test_cli:Tiny: conforms" in out
    assert "every cell" not in out
    code, out, err = rewound_command("diff", table, table, "--all")
    assert (code, err) == (0, "")
    assert "lr-rewinding, one-shot: every cell" in out


def test_diff_of_a_table_in_several_files(rewound_command: Rewound) -> None:
    rows = "".join(f"a,unstructured,1,lr-rewinding,0.1,4,{trial},0.9,0.9,\n" for trial in (1, 2, 3))
    Path("pruned.csv").write_text(
        "recipe,pruning,iterative,technique,density,retrain_epochs,trial,val,test,flops\n" + rows
    )
    Path("dense.csv").write_text("recipe,val,test\na,0.95,0.95\na,0.95,0.95\n")
    code, out, err = rewound_command("report", "--results", "pruned.csv", "--dense", "dense.csv", "--out", "ours")
    assert (code, err) == (0, "")
    worse = Path("ours/results.csv").read_text().replace("0.9,0.9", "0.8,0.8")
    Path("worse.csv").write_text(worse)
    code, out, err = rewound_command("diff", "worse.csv", "pruned.csv", "dense.csv")
    assert (code, err) == (0, ""), "a difference is a finding, not a failure"
    assert "a: does not conform" in out
    assert re.search(r"\(i\) dense mean +2, 2 +95\.00 against 95\.00", out)
    assert re.search(r"10\.00× +4 +80\.00 +90\.00 .* outside", out)


def test_report_compares(done: Path, rewound_command: Rewound) -> None:
    table = done / "report" / "results.csv"
    code, out, err = rewound_command("report", "--results", table, "--compare", table, "--out", "table")
    assert (code, err) == (0, "")
    assert "test_cli:Tiny: conforms" in out
    assert "compare.csv" in out
    assert len(Path("table/compare.csv").read_text().splitlines()) == 1 + 1 + 4
    words = ("report", done / "tiny.toml", "--store", done / "rewound-store", "--compare", table, "--out", "sweep")
    code, out, err = rewound_command(*words)
    assert (code, err) == (0, "")
    assert Path("sweep/compare.csv").read_bytes() == Path("table/compare.csv").read_bytes()


def test_the_papers_figures_of_a_table(done: Path, rewound_command: Rewound) -> None:
    words = ["report", "--results", done / "report" / "results.csv", "--out", "r", "--figures"]
    code, out, err = rewound_command(*words, "paper", "--formats", "svg")
    assert (code, err) == (0, "")
    assert re.search(r"no data for \d+ of the paper's 12 figures: ", out)
    assert Path("r/paper/figure-1-sparsity-oneshot.svg").exists()
    assert not list(Path("r").glob("*.png"))
    code, out, err = rewound_command(*words, "none")
    assert (code, err) == (0, "")
    assert "report: r (results.csv, index.html)" in out
    assert out.rstrip().endswith("open in a browser: r/index.html")


def test_a_sweep_of_dense_networks_only(rewound_command: Rewound) -> None:
    Path("dense.toml").write_text('recipe = "test_cli:Tiny"\ntrials = [1]\n')
    code, out, err = rewound_command("run", "dense.toml", "--jobs", 1)
    assert (code, err) == (0, "")
    assert "only dense networks so far" in out
    assert Path("rewound-report/dense/results.csv").exists()


def test_show_everything(done: Path, rewound_command: Rewound) -> None:
    code, out, err = rewound_command("show", "--store", done / "rewound-store")
    assert (code, err) == (0, "")
    nodes = len(plan(load_sweep(str(done / "tiny.toml")).targets).nodes)
    assert re.search(rf"test_cli:Tiny\W+{nodes}\W", out)
    assert "MB of tensors; under way: nothing" in out


def test_show_one_state(done: Path, rewound_command: Rewound) -> None:
    row = read_rows(done / "report" / "results.csv")[1]
    for key in (row.key, row.key[:8]):
        code, out, err = rewound_command("show", key, "--store", done / "rewound-store")
        assert (code, err) == (0, "")
        assert row.key in out
        assert "start test_cli:Tiny seed 1" in out
        assert "prune magnitude/global" in out
        assert f"{row.test:.8f}"[:-1] in out


# Inspect


def write_ticket(recipe: rewound.Recipe, about: dict[str, object], path: str = "t.safetensors") -> Mask:
    model = recipe.model(1)
    mask = rewound.Pruner(floor=0.02)(model, 0.25)
    rewound.save(model, mask, path, about)
    return mask


def rows(out: str) -> dict[str, list[str]]:
    """The lines of a table by their first word."""
    return {words[0]: words[1:] for line in out.splitlines() if (words := line.split())}


def test_inspect_a_ticket(rewound_command: Rewound) -> None:
    mask = write_ticket(Digits(), {"recipe": "digits", "lineage": ["a", 1]})
    code, out, err = rewound_command("inspect", "t.safetensors")
    assert (code, err) == (0, "")
    profile, found = Digits().profile, rows(out)
    for name, kept in mask.items():
        shape, count, of, density, flops = found[name]
        assert shape == "×".join(map(str, kept.shape))
        assert (count, of) == (f"{mask.counts[name]:,}", f"{kept.numel():,}")
        assert float(density) == pytest.approx(mask.counts[name] / kept.numel(), rel=1e-3)
        assert flops == f"{profile.layers(mask)[name]:,}"
    assert found["layers"] == ["above", "14,080", "56,320", "0.25", f"{sum(profile.layers(mask).values()):,}"]
    assert found["all"] == ["else", "36", "tensors", "1,105", "1,105", "1", f"{profile.fixed:,}"]
    assert found["network"][:2] == ["15,185", "57,425"]
    assert found["network"][3] == f"{profile.total(mask):,}"
    assert found["recipe"] == ["digits"]
    assert found["lineage"] == ['["a",', "1]"]
    assert found["hash"] == [rewound.load("t.safetensors").hash]
    assert found["size"][0] == f"{Path('t.safetensors').stat().st_size:,}"


def test_inspect_with_a_recipe_of_ones_own(rewound_command: Rewound) -> None:
    mask = write_ticket(Tiny(), {})
    code, out, err = rewound_command("inspect", "t.safetensors", "--recipe", "test_cli:Tiny")
    assert (code, err) == (0, "")
    assert rows(out)["network"][3] == f"{Tiny().profile.total(mask):,}"
    code, _, err = rewound_command("inspect", "t.safetensors", "--recipe", "digits")
    assert code == 2
    assert err.startswith("error: mask entry 'stem.weight' has shape (4, 1, 3, 3), but the profiled model has it with")


@pytest.mark.parametrize("recipe", [None, "digits", "this:s", "unknown", 7, ["digits"]])
def test_inspect_imports_nothing_that_a_file_names(rewound_command: Rewound, recipe: object) -> None:
    write_ticket(Tiny(), {"recipe": recipe})
    sys.modules.pop("this", None)
    code, out, err = rewound_command("inspect", "t.safetensors")
    assert (code, err) == (0, "")
    assert rows(out)["network"][3] == "–"
    assert "FLOPs need the network: give its recipe with --recipe, or" in out
    assert "this" not in sys.modules


def test_inspect_shows_no_codes_of_a_file_to_the_terminal(rewound_command: Rewound) -> None:
    weight = torch.ones(2, 2)
    about = {"\x1b[2J": "\x1b]0;title\x07[red]\ud800\n"}
    rewound.save({"a\x1b[31m": weight}, Mask({"a\x1b[31m": weight > 0}), "t.safetensors", about)
    code, out, err = rewound_command("inspect", "t.safetensors")
    assert (code, err) == (0, "")
    assert r"a\x1b[31m" in out
    assert r"\x1b]0;title\x07[red]\ud800\n" in out
    assert all(c.isprintable() or c == "\n" for c in out)


def test_inspect_what_is_no_ticket(rewound_command: Rewound) -> None:
    save_file({"w": torch.ones(2)}, "model.safetensors")
    code, _, err = rewound_command("inspect", "model.safetensors")
    assert code == 2
    assert err.startswith("error: model.safetensors is a safetensors file but no ticket; rewound.save writes one")
    write_ticket(Tiny(), {})
    damaged = bytearray(Path("t.safetensors").read_bytes())
    damaged[-1] ^= 1
    Path("t.safetensors").write_bytes(damaged)
    code, _, err = rewound_command("inspect", "t.safetensors")
    assert code == 2
    assert re.fullmatch(r"error: the ticket t.safetensors is damaged: .*; save it or get it again\n", err)


# Failure


def test_failed_runs_are_shown_and_retried_when_told(rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("failing.toml").write_text(SWEEP.replace("test_cli:Tiny", "tiny:Watched"))
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


# Prune


def test_prune_writes_the_network(rewound_command: Rewound) -> None:
    code, out, err = rewound_command("prune", "test_cli:Tiny", "--compression", 3, "--rate", 0.5, "--out", "pruned")
    assert (code, err) == (0, "")
    assert "3.00x" in out
    assert {path.name for path in Path("pruned").iterdir()} == {
        *("model.safetensors", "mask.safetensors", "ticket.safetensors"),
        "summary.json",
    }
    weights = load_file("pruned/model.safetensors")
    model = Tiny().model(0)
    model.load_state_dict(weights)  # the model's own keys, nothing else
    packed = load_file("pruned/mask.safetensors")
    with safe_open("pruned/mask.safetensors", framework="pt") as file:
        shapes = {name: tuple(shape) for name, shape in json.loads(file.metadata()["shapes"]).items()}
    mask = Mask.unpacked(packed, shapes)
    assert sum(tensor.numel() for tensor in packed.values()) < mask.total / 7, "bit-packed"
    assert mask.density == pytest.approx(1 / 3, abs=2 / mask.total)
    for name, kept in mask.items():
        assert weights[name][~kept].count_nonzero() == 0
    again = mask.packed()
    assert all(torch.equal(again[name], packed[name]) for name in packed)
    summary = json.loads(Path("pruned/summary.json").read_text())
    assert summary["chosen"] == 2
    assert [round(level["compression"], 9) for level in summary["levels"]] == [1, 2, 3]
    assert [level["search_epochs"] for level in summary["levels"]] == [0, 2, 4]
    ticket = rewound.load("pruned/ticket.safetensors")
    assert ticket.about == {
        "recipe": "test_cli:Tiny",
        "technique": "lr-rewinding",
        "retrain_epochs": 2.0,
        "lineage": summary["levels"][2]["key"],
    }
    assert all(torch.equal(ticket.state[name], weight) for name, weight in weights.items())
    assert all(torch.equal(ticket.mask[name], kept) for name, kept in mask.items())
    scores = Tiny().evaluate(model.eval())
    assert (scores.val, scores.test) == (summary["levels"][2]["val"], summary["levels"][2]["test"])


def test_prune_by_call_and_by_command_give_the_same_numbers(rewound_command: Rewound) -> None:
    options = {"compression": 2.0, "technique": "weight-rewinding", "retrain_epochs": 1.0, "rate": 0.5, "seed": 3}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert rewound_command("prune", "test_cli:Tiny", *words, "--out", "command").code == 0
    network = rewound.prune("test_cli:Tiny", store="other", **options)  # type: ignore[arg-type]
    network.save("call")
    command, call = (json.loads(Path(place, "summary.json").read_text()) for place in ("command", "call"))
    assert command == call
    for name in ("model.safetensors", "mask.safetensors", "ticket.safetensors"):
        assert Path("command", name).read_bytes() == Path("call", name).read_bytes()
    by_default = rewound.prune(Tiny(), one_shot=True, compression=2, store="other")
    assert rewound_command("prune", "test_cli:Tiny", "--one-shot", "--compression", 2, "--out", "default").code == 0
    summary = json.loads(Path("default/summary.json").read_text())
    assert summary["levels"] == [vars(level) for level in by_default.levels], "the defaults are the same, too"


def test_prune_stops_within_the_drop(rewound_command: Rewound) -> None:
    code, out, err = rewound_command(
        *("prune", "test_cli:Tiny", "--compression", 1000, "--rate", 0.7, "--max-drop", 0.0, "--out", "pruned")
    )
    assert (code, err) == (0, "")
    summary = json.loads(Path("pruned/summary.json").read_text())
    val = [level["val"] for level in summary["levels"]]
    chosen = summary["chosen"]
    assert chosen == len(val) - 3, "the level before the two that fell too far"
    assert val[chosen] >= val[0] > max(val[chosen + 1 :])
    assert "returned" in out
    assert summary["compression"] == summary["levels"][chosen]["compression"] < 1000
    weights = load_file("pruned/model.safetensors")
    model = Tiny().model(0)
    model.load_state_dict(weights)
    assert Tiny().evaluate(model.eval()).val == val[chosen]


def test_prune_returns_networks_whose_tensors_were_not_kept(rewound_command: Rewound) -> None:
    words = ("prune", "test_cli:Tiny", "--rate", 0.5, "--compression")
    assert rewound_command(*words, 4, "--out", "four").code == 0
    code, out, err = rewound_command(*words, 2, "--out", "two")  # level 1 of the run before: measured, then dropped
    assert (code, err) == (0, "")
    assert "recomputing" in out
    assert rewound_command(*words, 2, "--store", "other", "--out", "other-two").code == 0
    for name in ("model.safetensors", "mask.safetensors", "ticket.safetensors"):
        assert Path("two", name).read_bytes() == Path("other-two", name).read_bytes()
    code, out, err = rewound_command(*words, 2, "--out", "two")
    assert (code, err) == (0, "")
    assert "recomputing" not in out, "what was returned is kept"


def test_prune_that_diverges_exits_with_1(rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POISON, (1, 1), 3)
    code, _, err = rewound_command("prune", "tiny:Watched", "--one-shot", "--compression", 2)
    assert code == 1
    assert err == "failed: level 1 (density 0.5) diverged; nothing to build the next one on\n"


# Bad input: one sentence, exit code 2, nothing lost


def bad(words: list[str], says: str, **files: str) -> tuple[list[str], str, dict[str, str]]:
    return words, says, {name.replace("_", "."): text for name, text in files.items()}


HEADER = "recipe,pruning,iterative,technique,density,retrain_epochs,trial,val,test,flops"


def row(t: float = 4, test: object = 0.9) -> str:
    return f"{HEADER}\na,unstructured,0,fine-tuning,0.5,{t},1,{test},{test},\n"


BAD = {
    "unknown sweep": bad(["run", "digts"], "unknown sweep 'digts'; did you mean 'digits'"),
    "no file": bad(["run", "absent.toml"], "cannot read sweep absent.toml: No such file or directory"),
    "not TOML": bad(["run", "x.toml"], "x.toml is not TOML", x_toml="{"),
    "unknown recipe": bad(["plan", "x.toml"], "unknown recipe 'digit'", x_toml=SWEEP.replace("test_cli:Tiny", "digit")),
    "unknown technique": bad(["run", "x.toml"], "did you mean 'fine-tuning'", x_toml=SWEEP.replace("tuning", "tune")),
    "unknown key": bad(["run", "x.toml"], "unknown key 'sweep'", x_toml=f"sweep = 1\n{SWEEP}"),
    "density": bad(["run", "x.toml"], "density must be above 0 and at most 1, not 2", x_toml=SWEEP.replace("0.5", "2")),
    "no retraining": bad(["run", "x.toml"], "must be above 0, not 0", x_toml=SWEEP.replace("[1, 2]", "0")),
    "rewound too far": bad(
        ["run", "x.toml"], "cannot rewind 3 epochs: test_cli:Tiny trains for 2", x_toml=SWEEP.replace("[1, 2]", "3")
    ),
    "no such executor": bad(["run", "digits", "--on", "mars"], "unknown executor 'mars'; known: local"),
    "no such keep": bad(["run", "digits", "--keep", "some"], "--keep is needed or all, not 'some'"),
    "negative jobs": bad(["run", "x.toml", "--jobs", "-1"], "jobs must be at least 1, not -1", x_toml=SWEEP),
    "no such device": bad(["run", "x.toml", "--device", "abacus"], "unknown device 'abacus'", x_toml=SWEEP),
    "device of another kind": bad(["run", "x.toml", "--device", "meta"], "is not supported", x_toml=SWEEP),
    "store is a file": bad(["run", "x.toml", "--store", "file"], "cannot use store file", x_toml=SWEEP, file="hello"),
    "store below a file": bad(["prune", "test_cli:Tiny", "--store", "file/below"], "cannot use store", file="hello"),
    "newer store": bad(["run", "x.toml", "--store", "."], "newer version (7; this one", x_toml=SWEEP, version="7\n"),
    "no store": bad(["show", "--store", "nowhere"], "there is no store at nowhere; make one with"),
    "nothing ran": bad(["report", "x.toml"], "nothing of x has run yet in rewound-store", x_toml=SWEEP),
    "nothing to report on": bad(["report"], "give either a sweep or --results FILE"),
    "two things to report on": bad(["report", "digits", "--results", "x.csv"], "give either a sweep or --results"),
    "unknown figures": bad(["report", "digits", "--figures", "pape"], "unknown figures 'pape'; known: default, paper,"),
    "unknown format": bad(["report", "digits", "--formats", "png,jpg"], "unknown format 'jpg' of figures; known: png,"),
    "no table": bad(["report", "--results", "absent.csv"], "there is no table absent.csv"),
    "not a table": bad(["report", "--results", "x.csv"], "x.csv has no column", x_csv="a,b\n1,2\n"),
    "empty table": bad(["diff", "x.csv", "x.csv"], "x.csv is empty", x_csv=""),
    "no rows": bad(["diff", "x.csv", "x.csv"], "x.csv has no rows below its first line", x_csv=f"{HEADER}\n"),
    "nothing common": bad(["diff", "x.csv", "y.csv"], "nothing to compare: one", x_csv=row(t=4), y_csv=row(t=8)),
    "other units": bad(["diff", "x.csv", "y.csv"], "one table has fractions", x_csv=row(test=0.9), y_csv=row(test=90)),
    "not a number": bad(["diff", "x.csv", "x.csv"], "'nan' is not a number (of a failed run", x_csv=row(test="nan")),
    "nothing to compare with": bad(["report", "--results", "x.csv", "--compare", "y.csv"], "no table", x_csv=row()),
    "compared in vain": bad(
        ["report", "--results", "x.csv", "--compare", "y.csv"], "nothing to compare", x_csv=row(t=4), y_csv=row(t=8)
    ),
    "no such recipe": bad(["prune", "digit"], "unknown recipe 'digit'; did you mean 'digits'"),
    "no such module": bad(["prune", "no.such:Task"], "cannot import recipe 'no.such:Task'"),
    "no such technique": bad(["prune", "digits", "--technique", "magic"], "unknown technique 'magic'"),
    "no compression": bad(["prune", "digits", "--compression", "1"], "compression must be above 1, not 1"),
    "endless compression": bad(["prune", "digits", "--compression", "inf"], "compression must be above 1, not inf"),
    "no such rate": bad(["prune", "digits", "--rate", "1"], "not"),
    "negative drop": bad(["prune", "digits", "--max-drop=-1"], "max-drop must not be negative, not -1"),
    "no time": bad(["prune", "digits", "--retrain-epochs", "0"], "retraining time must be above 0, not 0"),
    "too much time": bad(["prune", "digits", "--retrain-epochs", "17"], "cannot rewind 17 epochs"),
    "endless time": bad(
        ["prune", "digits", "--technique", "fine-tuning", "--retrain-epochs", "inf"], "finite number, not inf"
    ),
    "no such score": bad(["prune", "digits", "--score", "luck"], "unknown score 'luck'"),
    "nothing to prune": bad(["prune", "digits", "--only", "none"], "no prunable weights"),
    "no such floor": bad(["prune", "digits", "--floor", "2"], "floor must be"),
    "no ticket": bad(["inspect", "absent"], "cannot read ticket absent: No such file or directory; give the file"),
    "ticket is a folder": bad(["inspect", "."], "cannot read ticket .: Is a directory; give the file"),
    "not a ticket": bad(["inspect", "x.txt"], "x.txt is not a safetensors file", x_txt="hello, this is text"),
    "no such data": bad(["data", "mnist"], "unknown data set 'mnist'; known: cifar10"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(rewound_command: Rewound, case: str) -> None:
    words, says, files = BAD[case]
    for name, text in files.items():
        Path(name).write_text(text)
    code, out, err = rewound_command(*words)
    assert code == 2
    assert err.startswith("error: ")
    assert says in err
    assert err.count("\n") == 1, "one line"
    assert len(out.splitlines()) <= 1, "at most a progress bar that never moved"
    for name, text in files.items():
        assert Path(name).read_text() == text, "nothing is lost"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("words", [["run", "digits"], ["prune", "digits"]])
def test_a_device_that_is_not_there(rewound_command: Rewound, words: list[str]) -> None:
    code, _, err = rewound_command(*words, "--device", "cuda")
    assert code == 2
    assert re.fullmatch(r"error: device 'cuda' is not there: torch \S+ sees no CUDA GPU; use --device cpu\n", err)


@pytest.mark.parametrize("key", ["", "zz", "../../etc/passwd", "a/b"])
def test_keys_that_are_none(done: Path, rewound_command: Rewound, key: str) -> None:
    before = snapshot(done)
    code, _, err = rewound_command("show", key, "--store", done / "rewound-store")
    assert code == 2
    assert re.match(r"error: (\d+ keys begin|no key begins) with ", err)
    assert err.count("\n") == 1
    assert snapshot(done) == before


def test_a_damaged_result_is_named_and_recomputed(rewound_command: Rewound) -> None:
    Path("x.toml").write_text(SWEEP.replace("[1, 2]", "1"))
    assert rewound_command("run", "x.toml", "--jobs", 1).code == 0
    rows = read_rows("rewound-report/x/results.csv")
    path = next(Path("rewound-store/results").rglob(f"{rows[1].key}.json"))
    path.write_text(path.read_text().replace("0.", "1.", 1))
    code, out, err = rewound_command("show", rows[1].key, "--store", "rewound-store")
    assert code == 2
    assert f"damaged: {path.name}" in out
    assert err == f"error: the result of {rows[1].key} was damaged; run the sweep again to recompute it\n"
    code, _, err = rewound_command("run", "x.toml", "--jobs", 1)
    assert (code, err) == (0, "")
    again = read_rows("rewound-report/x/results.csv")
    assert [(row.key, row.val, row.test) for row in again] == [(row.key, row.val, row.test) for row in rows]


def test_a_full_disk_is_one_sentence(rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("x.toml").write_text(SWEEP)
    real, calls = os.fsync, iter(range(3))

    def fills_up(handle: int) -> None:
        if next(calls, None) is None:
            raise OSError(28, "No space left on device")
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fills_up)
        code, _, err = rewound_command("run", "x.toml", "--jobs", 1)
    assert code == 2
    assert err == (
        "error: cannot use store rewound-store: the disk is full; free some space and run the same command again, "
        "nothing stored is lost\n"
    )
    store = Store(Path("rewound-store"))
    kept = store.finished()
    assert len(kept) == 2, "what was published before"
    code, _, err = rewound_command("run", "x.toml", "--jobs", 1)
    assert (code, err) == (0, "")
    assert kept < store.finished()


# Ctrl-C


def test_ctrl_c_in_one_process(rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("x.toml").write_text(SWEEP)
    real, calls = Store.publish, iter(range(2))

    def interrupted(store: Store, key: str, result: Result) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        real(store, key, result)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "publish", interrupted)
        code, out, err = rewound_command("run", "x.toml", "--jobs", 1, "--store", "a [b] c")
    assert (code, err) == (1, "")
    assert out.endswith(
        "stopped; nothing finished is lost, continue with: rewound run x.toml --jobs 1 --store 'a [b] c'\n"
    )
    store = Store(Path("a [b] c"))
    assert len(store.finished()) == 2
    assert store.claims() == {}
    assert rewound_command("run", "x.toml", "--jobs", 1, "--store", "a [b] c").code == 0


@pytest.mark.slow
def test_ctrl_c_stops_workers_cleanly_and_the_same_command_continues(tmp_path: Path) -> None:
    # Enough work that the first result is far from the last, however long Ctrl-C takes on a busy machine.
    long = SWEEP.replace("trials = [1]", "trials = [1, 2, 3, 4, 5, 6]\n[recipe-fields]\nepochs = 8").replace(
        "[1, 2]\n", "[4, 8]\n"
    )
    (tmp_path / "x.toml").write_text(long)
    process = subprocess.Popen(
        command("run", "x.toml", "--jobs", "2", "--out", "report"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        limit = time.monotonic() + 120
        while not list(tmp_path.glob("rewound-store/results/*/*.json")):
            assert time.monotonic() < limit, "nothing was done in two minutes"
            assert process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)  # as the terminal does: to the whole group
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "stopped; nothing finished is lost, continue with: rewound run x.toml --jobs 2 --out report\n" in out
    assert err == ""
    store = Store(tmp_path / "rewound-store")
    assert store.claims() == {}
    finished = store.finished()
    assert finished
    assert not (tmp_path / "report").exists(), "it was not done yet"
    continued = command("run", "x.toml", "--jobs", "1", "--out", "report")  # how many does not matter
    ran = subprocess.run(continued, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert finished < store.finished()
    with (tmp_path / "report" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 * (1 + 4)
    assert all(row["test"] for row in rows)


@pytest.mark.slow
def test_ctrl_c_while_workers_start(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(SWEEP)
    process = subprocess.Popen(
        command("run", "x.toml", "--jobs", "2"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        limit = time.monotonic() + 120
        while not (tmp_path / "rewound-store" / "version").exists():
            assert time.monotonic() < limit
            time.sleep(0.01)
        time.sleep(0.5)  # the workers are importing
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "continue with: rewound run x.toml" in out
    assert err == ""
