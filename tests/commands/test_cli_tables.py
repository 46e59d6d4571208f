"""`report` and `diff`: tables and figures of a sweep or of any table, and two tables against each other."""

import re
from pathlib import Path

from command_line import Rewound


def test_report_of_a_sweep(done: Path, rewound_command: Rewound) -> None:
    code, out, err = rewound_command("report", done / "tiny.toml", "--store", done / "rewound-store", "--out", "again")
    assert (code, err) == (0, "")
    assert "One test example is 0.14 points" in out
    assert Path("again/results.csv").read_bytes() == (done / "report" / "results.csv").read_bytes()


def test_the_page_names_the_file_that_was_run_also_where_a_shipped_sweep_has_its_name(
    done: Path, rewound_command: Rewound
) -> None:
    Path("mine").mkdir()
    Path("mine/digits.toml").write_text((done / "tiny.toml").read_text())
    words = ("--store", done / "rewound-store", "--out", "again", "--figures", "none")
    code, _, err = rewound_command("report", "mine/digits.toml", *words)
    assert (code, err) == (0, "")
    assert f'"run":"rewound run mine/digits.toml --store {done}' in Path("again/index.html").read_text()


def test_report_of_a_table(done: Path, rewound_command: Rewound) -> None:
    code, out, err = rewound_command("report", "--results", done / "report" / "results.csv", "--out", "table")
    assert (code, err) == (0, "")
    assert "fine-tuning" in out
    assert Path("table/results.csv").read_bytes() == (done / "report" / "results.csv").read_bytes()


def test_report_of_a_table_of_dense_networks_only(rewound_command: Rewound) -> None:
    """As of a sweep in that state."""
    Path("dense.csv").write_text("recipe,val,test\na,0.95,0.95\na,0.95,0.94\n")
    code, out, err = rewound_command("report", "--results", "dense.csv", "--compare", "dense.csv", "--out", "r")
    assert (code, err) == (0, "")
    assert "only dense networks so far: there are no techniques to compare yet" in out
    assert "a: no criterion fails" in out
    assert "report: r (results.csv, compare.csv)" in out
    assert {path.name for path in Path("r").iterdir()} == {"results.csv", "compare.csv"}


def retrained_for(recipe: str, *times: int) -> str:
    """A table of Algorithm 1's levels, retrained for less than all of a training that it does not tell."""
    lines = ["recipe,pruning,iterative,technique,density,retrain_epochs,trial,val,test,flops"]
    lines += [f"{recipe},,0,,1,,1,0.9,0.9,"]
    levels = [(0.8**level, t) for level in (1, 2, 3) for t in times]
    lines += [f"{recipe},unstructured,1,lr-rewinding,{density:.4f},{t},1,0.8,0.8," for density, t in levels]
    return "\n".join(lines) + "\n"


def test_a_table_of_the_papers_networks_has_their_training_time(rewound_command: Rewound) -> None:
    Path("short.csv").write_text(retrained_for("cifar10-resnet20", 30, 90))
    code, out, err = rewound_command("report", "--results", "short.csv", "--out", "r")
    assert (code, err) == (0, "")
    assert "how long a recipe trains" not in out
    assert "of the 182 epochs of training" in Path("r/index.html").read_text()
    assert not list(Path("r").glob("*algorithm-1*")), "none of it was retrained for 182 epochs"


def test_a_training_time_that_is_guessed_is_said_once(rewound_command: Rewound) -> None:
    Path("mine.csv").write_text(retrained_for("mine", 30, 90))
    code, out, err = rewound_command("report", "--results", "mine.csv", "--out", "r")
    assert (code, err) == (0, "")
    said = "its longest retraining time is taken for that (mine: T = 90)"
    assert " ".join(out.split()).count(said) == 1
    assert Path("r/index.html").read_text().count(said) == 1
    assert "of the 90 epochs of training" in Path("r/index.html").read_text()
    assert list(Path("r").glob("*algorithm-1*"))


def test_diff_of_two_tables(done: Path, rewound_command: Rewound) -> None:
    table = done / "report" / "results.csv"
    code, out, err = rewound_command("diff", table, table)
    assert (code, err) == (0, "")
    assert "tiny:Tiny: conforms" in out
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
    assert "tiny:Tiny: conforms" in out
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
    assert "compared" not in Path("r/paper/points.csv").read_text()
    code, out, err = rewound_command(*words, "paper", "--formats", "svg", "--compare", done / "report" / "results.csv")
    assert (code, err) == (0, "")
    assert "The compared table" in Path("r/paper/figure-1-sparsity-oneshot.svg").read_text()
    assert "compared" in Path("r/paper/points.csv").read_text()
    code, out, err = rewound_command(*words, "none")
    assert (code, err) == (0, "")
    assert "report: r (results.csv, layers.csv, curves.csv, index.html)" in out
    assert out.rstrip().endswith("open in a browser: r/index.html")
