"""`rewound.plan`, `run`, `results` and `report`: the same as on the command line, and shown well by a notebook."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import rewound
from command_line import SWEEP, Rewound, environment
from rewound import InputError, Row, Sweep, SweepResults, load_sweep
from rewound.commands.stores import show_store
from rewound.commands.sweeps import as_sweep
from rewound.conclusions.tables import Tables, read_rows, write_rows
from rewound.experiments.plans.planning import plan
from rewound.states.storage.artifacts import Result
from rewound.states.storage.backend import Listed
from rewound.states.storage.folder import Folder
from rewound.states.storage.store import Store
from tiny import POISON, Tiny, Watched

TABLE: dict[str, object] = tomllib.loads(SWEEP)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that the test runs in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sweep(**changes: object) -> dict[str, object]:
    return {**TABLE, **changes}


# What is the same


def test_results_are_the_rows_that_the_command_has_written(done: Path, tmp_path: Path) -> None:
    found = rewound.results(done / "tiny.toml", store=done / "rewound-store")
    write_rows(found.rows, tmp_path / "results.csv")
    assert (tmp_path / "results.csv").read_bytes() == (done / "report" / "results.csv").read_bytes()
    assert [row.key for row in found] == [row.key for row in read_rows(done / "report" / "results.csv")], "in its order"
    assert (len(found), list(found)) == (5, found.rows)
    assert (found.missing, found.failed, found.sweep.name) == (0, [], "tiny")
    assert repr(found) == "SweepResults(tiny: 5 rows)"


def test_a_plan_says_what_the_command_prints(done: Path, rewound_command: Rewound) -> None:
    planned = rewound.plan(done / "tiny.toml", store=done / "rewound-store", jobs=2)
    out = rewound_command("plan", done / "tiny.toml", "--store", done / "rewound-store", "--jobs", 2).out
    for what, value in planned.lines:
        assert re.search(rf"{re.escape(what)}\W+{re.escape(value)}", out)
    assert (planned.nodes_to_do, planned.epochs_to_do, planned.seconds_to_do) == (0, 0, 0)


def test_the_numbers_of_a_plan(folder: Path) -> None:
    planned = rewound.plan("cifar10-resnet20-grid", device="cuda")
    assert planned.naive_epochs == 6780
    assert 3_200 < planned.shared_epochs <= 3_300
    assert planned.epochs_to_do == planned.dense_epochs + planned.shared_epochs
    assert planned.seconds_to_do is not None
    lines = dict(planned.lines)
    assert lines["nodes (pieces of training)"] == f"{planned.nodes} (0 done, {planned.nodes_to_do} to do)"
    assert lines["rows (networks to measure)"] == str(planned.rows)
    assert re.fullmatch(
        r"SweepPlan\(cifar10-resnet20-grid: \d+ rows, .* nodes and .* epochs to do, .*\)", repr(planned)
    )
    assert rewound.plan(sweep(recipe="tiny:Watched"), device="cuda").seconds_to_do is None
    assert list(folder.iterdir()) == [], "nothing ran, and nothing was left behind"


def test_a_report_has_the_files_of_the_command(done: Path, folder: Path, rewound_command: Rewound) -> None:
    said: list[str] = []
    report = rewound.report(done / "tiny.toml", store=done / "rewound-store", out="mine", say=said.append)
    assert said == []
    assert report.files[0].read_bytes() == (done / "report" / "results.csv").read_bytes()
    assert {path.name for path in report.files} == {path.name for path in (done / "report").iterdir()}
    assert report.page == Path("mine", "index.html")
    assert all(path.suffix == ".png" for path in report.figures)
    printed = rewound_command("report", done / "tiny.toml", "--store", done / "rewound-store", "--out", "theirs").out
    assert " ".join(str(report).split()) in " ".join(printed.split())
    assert repr(report) == f"Report(mine: {len(report.figures)} figures, page index.html)"
    table = rewound.report(results=report.files[0], out="again", compare=[report.files[0]], figures="none")
    assert "only" not in str(table)
    assert {path.name for path in table.files} == {
        "results.csv",
        "layers.csv",
        "curves.csv",
        "index.html",
        "compare.csv",
    }


def test_run_gives_what_the_command_computes(done: Path, folder: Path) -> None:
    """Rows agree in all but the seconds that they took; what has run is not run again."""
    said: list[str] = []
    shown: list[tuple[float, float]] = []
    found = rewound.run(TABLE, jobs=1, say=said.append, progress=lambda *steps: shown.append(steps))
    theirs = [replace(row, seconds=None) for row in read_rows(done / "report" / "results.csv")]
    write_rows(found.rows, "ours.csv")  # which rounds to ten digits
    assert [replace(row, seconds=None) for row in read_rows("ours.csv")] == theirs
    assert said == []
    assert shown[-1][0] == shown[-1][1] > 0
    assert rewound.results(TABLE).rows == found.rows
    assert rewound.run(TABLE, jobs=1, say=said.append).rows == found.rows
    assert said == [], "there was nothing left to do, and so no line of progress"
    assert not Path("rewound-report").exists(), "a report is asked for by itself"


@pytest.mark.parametrize(("command", "times"), [("plan", 1), ("show", 1), ("report", 1), ("run", 3)])
def test_how_often_a_finished_sweep_is_listed(
    done: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, times: int
) -> None:
    """To list very many results takes seconds. A run looks again when it begins, and before it drops tensors."""
    listed, listing = list[str](), Folder.list

    def noted(backend: Folder, prefix: str) -> dict[str, Listed]:
        listed.append(prefix)
        return listing(backend, prefix)

    monkeypatch.setattr(Folder, "list", noted)
    sweep, store, quiet = done / "tiny.toml", done / "rewound-store", lambda line: None
    commands: dict[str, Callable[[], object]] = {
        "plan": lambda: rewound.plan(sweep, store=store, say=quiet),
        "show": lambda: show_store(store, str(sweep)),
        "report": lambda: rewound.report(sweep, store=store, out="out", figures="none", say=quiet),
        "run": lambda: rewound.run(sweep, store=store, jobs=2, say=quiet),
    }
    commands[command]()
    assert listed.count("results/") == times


def test_rows_are_found_wherever_the_script_has_gone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rewound.run(TABLE, store="st", jobs=1, say=lambda line: None)
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert len(found.rows) == 5


def test_a_run_reads_curves_and_layers_only_if_its_rows_are_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, results = [0], Store.results

    def counting(store: Store, keys: Collection[str]) -> Iterator[tuple[str, Result]]:
        reads[0] += 1
        return results(store, keys)

    monkeypatch.setattr(Store, "results", counting)
    found = rewound.run(TABLE, jobs=1, say=lambda line: None)
    assert reads == [0]
    assert len(found) == len(found.rows) == 5
    assert reads == [1]
    unused = rewound.run(TABLE, jobs=1, say=lambda line: None)
    shutil.rmtree("rewound-store")
    with pytest.raises(InputError, match="nothing of sweep has run yet in rewound-store"):
        _ = unused.rows
    assert found.failed == [], "what was read stays"


@pytest.mark.parametrize(
    "given",
    [
        TABLE,
        sweep(trials=(1,)),
        sweep(trials=np.array([1])),
        sweep(recipe=Tiny()),
        sweep(recipe=[Tiny()], experiment=({**TABLE["experiment"][0], "density": (np.float64(0.5),)},)),  # type: ignore[index]
    ],
    ids=["as it is read", "with a tuple", "with an array", "with a recipe", "with all of them"],
)
def test_a_dict_is_the_file_with_these_keys(given: dict[str, object], folder: Path) -> None:
    Path("sweep.toml").write_text(SWEEP)
    as_file, as_dict = load_sweep("sweep.toml"), as_sweep(given, Path("store"))[0]
    assert [t.state.key for t in as_dict.targets] == [t.state.key for t in as_file.targets]
    assert as_dict.name == "sweep"


def test_what_is_missing_and_what_failed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POISON, (1, 1), 15)  # in the second epoch
    said: list[str] = []
    given = sweep(recipe=Watched())
    found = rewound.run(given, jobs=1, say=said.append)
    assert {(row.technique, row.retrain_epochs) for row in found.failed} == {("fine-tuning", 2), ("lr-rewinding", 2)}
    assert repr(found) == "SweepResults(sweep: 5 rows, 2 failed)"
    assert str(found).count("failed") == 1 + 2 * 2
    more = rewound.results({**given, "trials": [1, 2]})
    assert (more.missing, len(more)) == (5, 5)
    stopped = rewound.run({**given, "trials": [3]}, jobs=1, minutes=1e-9, say=said.append)
    assert (len(stopped), stopped.missing) == (0, 5)
    assert said[-1] == "6 of 6 nodes are still to do; run it again to continue"
    monkeypatch.delitem(POISON, (1, 1))
    assert rewound.run(given, jobs=1, retry_failed=True, say=said.append).failed == []


def test_ctrl_c_leaves_what_the_command_leaves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Store.publish, iter(range(2))

    def interrupted(store: Store, key: str, result: Result) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        real(store, key, result)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "publish", interrupted)
        with pytest.raises(KeyboardInterrupt) as stop:
            rewound.run(TABLE, jobs=1)
    assert stop.value.__notes__ == ["nothing finished is lost; the same call continues"]
    store = Store(Path("rewound-store"))
    assert (len(store.finished()), store.claims()) == (2, {})
    assert rewound.run(TABLE, jobs=1).missing == 0


SCRIPT = """
from dataclasses import dataclass
import rewound
from rewound.reports import figures
from tiny import Tiny

@dataclass(frozen=True)
class Mine(Tiny):
    pass

sweep = {"recipe": Mine(), "trials": [1]}
print("begins")
try:
    rewound.run(sweep, jobs=2)
except rewound.InputError as error:
    print(error)
print(len(rewound.run(sweep, jobs=1, say=lambda line: None)))
experiment = {"technique": ["fine-tuning", "lr-rewinding"], "retrain-epochs": [1, 2], "density": 0.5}
sweep = {**sweep, "recipe": "tiny:Tiny", "experiment": [experiment]}
print(len(rewound.run(sweep, jobs=2, say=lambda line: None)))
figures._WORTH_PROCESSES = 1
print(rewound.report(sweep))
"""


@pytest.mark.slow
def test_a_script_needs_no_guard_and_what_workers_cannot_import_is_refused(folder: Path) -> None:
    Path("script.py").write_text(SCRIPT)
    ran = subprocess.run([sys.executable, "script.py"], env=environment(), capture_output=True, text=True)
    assert ran.stderr == ""
    assert ran.stdout.splitlines()[:5] == [
        "begins",
        "Mine is defined in the notebook or script itself, and 2 worker processes cannot import it from there; move it "
        "into a module, or give jobs=1",
        "1",
        "5",
        "tiny:Tiny, unstructured pruning, one-shot",
    ]
    assert ran.stdout.count("begins") == 1, "neither workers nor what draws figures runs the script again"


# What is refused


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "a number": (lambda: rewound.plan(3), "a sweep is the path of a TOML file, the name of a shipped one, a dict or"),  # type: ignore[arg-type]
    "no sweep": (lambda: rewound.plan("digit"), "unknown sweep 'digit'; did you mean 'digits'"),
    "no recipe": (lambda: rewound.plan({"trials": [1]}), "sweep: the key recipe is missing"),
    "a class": (
        lambda: rewound.plan(sweep(recipe=Tiny)),
        "sweep: recipe must be of type Recipe, not the class Tiny; give one, as Digits()",
    ),
    "fields of a recipe that has them": (
        lambda: rewound.plan({**sweep(recipe=Tiny()), "recipe-fields": {"epochs": 1}}),
        "sweep: recipe-fields go with the name of a recipe; give epochs to Tiny itself",
    ),
    "an underscore": (
        lambda: rewound.plan(sweep(experiment=[{"retrain_epochs": 1}])),
        "unknown key of [[experiment]] 'retrain_epochs'; did you mean 'retrain-epochs'",
    ),
    "one experiment": (
        lambda: rewound.plan(sweep(experiment={})),
        "experiment is a list of tables ([[experiment]], with two brackets), not a table",
    ),
    "a store on the web": (lambda: rewound.run(TABLE, store="ftp://x"), "store must be a path or a URL (s3://, az://"),
    "fewer than no jobs": (lambda: rewound.run(TABLE, jobs=-1), "jobs must be at least 0, not -1; 0 means one per"),
    "half a job": (lambda: rewound.plan(TABLE, jobs=0.5), "jobs must be a whole number, not 0.5"),  # type: ignore[arg-type]
    "no such device": (lambda: rewound.run(TABLE, device="tpu"), "unknown device 'tpu'; use cpu or cuda"),
    "no such executor": (lambda: rewound.run(TABLE, on="mars"), "unknown executor 'mars'"),
    "no executor": (lambda: rewound.run(TABLE, on=None), "on must be the name of an executor, or one with its options"),  # type: ignore[arg-type]
    "minutes as a text": (lambda: rewound.run(TABLE, minutes="5"), "minutes must be a number, not '5'"),  # type: ignore[arg-type]
    "no time": (lambda: rewound.run(TABLE, minutes=0), "minutes must be above 0, not 0"),
    "keeping some": (lambda: rewound.run(TABLE, keep="some"), "keep must be 'needed' or 'all', not 'some'"),
    "results of nothing": (
        lambda: rewound.results(TABLE, store="no where"),
        "nothing of sweep has run yet in no where; run it with: rewound.run(sweep, store='no where')",
    ),
    "results of a shipped sweep that has not run": (
        lambda: rewound.results("digits"),
        "nothing of digits has run yet in rewound-store; run it with: rewound run digits",
    ),
    "a Ray cluster that does not answer": (
        lambda: rewound.run("digits", on=rewound.Ray(address="127.0.0.1:1")),
        "no Ray cluster answers at 127.0.0.1:1",
    ),
    "a sweep that Ray cannot give to other machines": (
        lambda: rewound.run(Sweep("mine", (Tiny(),), (1,), ()), on=rewound.Ray()),
        "workers on other machines read the sweep themselves",
    ),
    "one GPU for two workers without a GPU": (
        lambda: rewound.run("digits", on=rewound.Ray(per_gpu=2)),
        "per-gpu 2 goes with device cuda, not with cpu",
    ),
    "a report on nothing": (rewound.report, "give either a sweep or a table of results"),
    "a report on two things": (lambda: rewound.report(TABLE, results="x.csv"), "give either a sweep or a table of"),
    "dense runs of a sweep": (lambda: rewound.report(TABLE, dense="x.csv"), "dense x.csv goes with a table of results"),
    "a table that is not there": (lambda: rewound.report(results="x.csv"), "there is no table x.csv; check the path"),
    "unknown figures": (lambda: rewound.report(TABLE, figures="all"), "unknown figures 'all'; known: default, paper,"),
    "an unknown format": (lambda: rewound.report(TABLE, formats="gif"), "unknown format 'gif' of figures; known: png"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(case: str, folder: Path) -> None:
    call, says = BAD[case]
    with pytest.raises(InputError) as error:
        call()
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert list(folder.iterdir()) == [], "nothing is left behind"


# What a notebook shows


class Seen(HTMLParser):
    """The texts of a document, its tags, and where its links and pictures lead; what is opened is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts, self.tags, self.leads, self.open = list[str](), set[str](), list[str](), list[str]()
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.leads += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


NAME = "<script>alert('&amp;')</script>"
HARMLESS = {"table", "caption", "thead", "tbody", "tr", "th", "td", "p", "div", "img", "a"}


def shown_results(*rows: Row, missing: int = 0) -> SweepResults:
    found = SweepResults(Sweep(NAME, (Tiny(),), (1,), ()), Path("store"), "again", plan([]))
    vars(found)["tables"] = Tables(list(rows), missing=missing)  # as if they had been read
    return found


def test_a_notebook_shows_a_plan(folder: Path) -> None:
    planned = replace(rewound.plan("digits", jobs=1), name=NAME)
    seen = Seen(planned._repr_html_())
    assert seen.texts[0] == f"plan of {NAME}"
    assert seen.texts[1:] == [text for line in planned.lines for text in line]
    assert seen.tags <= HARMLESS
    assert str(planned).splitlines()[0] == seen.texts[0]


def test_a_notebook_shows_results() -> None:
    row = Row(NAME, "unstructured", False, "lr-rewinding", 0.1, 16, trial=1, val=0.96, test=0.95)
    dense = replace(row, technique="", density=1.0, retrain_epochs=None, recipe="#1")
    seen = Seen(shown_results(dense, row, replace(row, val=None, test=None), missing=3)._repr_html_())
    assert seen.tags <= HARMLESS
    assert seen.texts[0] == f"results of {NAME}: 3 rows, 1 failed, 3 not run yet"
    assert seen.texts[1:7] == ["recipe", "technique", "density", "retrain epochs", "val", "test"]
    assert seen.texts[7:12] == ["#1", "dense", "1", "0.9600", "0.9500"]
    assert seen.texts[12:18] == [NAME, "lr-rewinding", "0.1", "16", "failed", "failed"]
    worse = replace(row, metric="loss", unit="nats", direction="lower", val=2.5, test=2.25)
    (named,) = (text for text in Seen(shown_results(worse)._repr_html_()).texts if "loss" in text)
    assert named == "loss (nats, lower is better)", "a lower value is not taken for a worse one"
    many = Seen(shown_results(*[row] * 50)._repr_html_())
    assert many.texts[-1] == "and 30 more rows; rows and to_pandas() have all"
    assert many.texts.count("lr-rewinding") == 20
    empty = shown_results(missing=2)
    assert Seen(empty._repr_html_()).texts == [str(empty)] == [f"results of {NAME}: 0 rows, 2 not run yet"]


def test_a_notebook_shows_figures_and_where_the_page_is(done: Path, folder: Path) -> None:
    table = done / "report" / "results.csv"
    out = Path('a "b" & <c>')
    report = rewound.report(results=table, out=out, formats=["svg", "png"])
    assert len(report.figures) == 4
    seen = Seen(report._repr_html_())
    assert seen.tags <= HARMLESS
    assert seen.texts == ["report: ", str(report.page)]
    kinds = [lead.partition(";")[0] for lead in seen.leads]
    assert kinds == ["data:image/svg+xml", "data:image/svg+xml", "a%20%22b%22%20%26%20%3Cc%3E/index.html"], "each once"
    plain = Seen(rewound.report(results=table, out="none", figures="none")._repr_html_())
    assert plain.texts == ["no figures", "report: ", "none/index.html"]
    elsewhere = rewound.report(results=table, out=folder.parent / "outside", figures="none")._repr_html_()
    assert Seen(elsewhere).leads == [(folder.parent / "outside" / "index.html").as_uri()]


def test_rows_as_a_data_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("digits", "unstructured", False, "lr-rewinding", 0.1, 16, trial=1, val=0.96, test=0.95)
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda rows, columns: (rows, columns)))
    rows, columns = shown_results(row).to_pandas()
    assert columns[:4] == ["recipe", "pruning", "iterative", "technique"]
    assert [record["test"] for record in rows] == [0.95]
    assert set(columns) == set(rows[0])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="to_pandas needs pandas, which is not installed; pip install pandas"):
        shown_results(row).to_pandas()
