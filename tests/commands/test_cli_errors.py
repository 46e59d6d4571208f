"""Bad input on the command line: one sentence, exit code 2, nothing lost."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from command_line import COMMANDS, HEADER, SWEEP, Rewound, command, environment, row, snapshot
from rewound.conclusions.tables import read_rows
from rewound.states.storage.artifacts import digest
from rewound.states.storage.store import Store
from stored import RESULT


def bad(words: list[str], says: str, **files: str) -> tuple[list[str], str, dict[str, str]]:
    return words, says, {name.replace("_", "."): text for name, text in files.items()}


BAD = {
    "unknown sweep": bad(["run", "digts"], "unknown sweep 'digts'; did you mean 'digits'"),
    "no file": bad(
        ["run", "absent.toml"],
        "cannot read sweep absent.toml: No such file or directory; give the path of a TOML file, or one of cifar10-",
    ),
    "not TOML": bad(["run", "x.toml"], "(at line 1, column 1); correct it there", x_toml="{"),
    "no command": bad(["fly"], "unknown command 'fly' (known: bench, data,"),
    "misspelt command": bad(["rnu", "digits"], "unknown command 'rnu'; did you mean 'run'"),
    "no sweep": bad(
        ["run"], "rewound run needs SWEEP, a TOML file, or the name of a shipped sweep such as digits; for"
    ),
    "no pack": bad(
        ["pack", "digits"], "rewound pack needs --out, the file to write; pieces get a number appended; for"
    ),
    "a text for a pack": bad(
        ["unpack", "x"], "cannot read x: it is not a pack; give the files that rewound pack wrote\n", x="hello"
    ),
    "misspelt option": bad(
        ["run", "digits", "--jbos", "1"], "unknown option of rewound run '--jbos'; did you mean '--jobs"
    ),
    "a word for a number": bad(
        ["prune", "digits", "--compression", "ten"], "--compression must be a number, not 'ten'\n"
    ),
    "a part of a job": bad(["run", "digits", "--jobs=1.5"], "--jobs must be a whole number, not '1.5'\n"),
    "one word too many": bad(["plan", "digits", "now"], "(now); see rewound plan --help"),
    "an option without its value": bad(["run", "digits", "--store"], "'--store' requires an argument; see rewound"),
    "sparsity": bad(
        ["prune", "digits", "--sparsity", "0.95"], "no option --sparsity; for 95% sparsity give --compression 20\n"
    ),
    "sparsity in percent": bad(["prune", "digits", "--sparsity=80"], "for 80% sparsity give --compression 5\n"),
    "density": bad(
        ["prune", "digits", "--density", "0.1"], "no option --density; for density 0.1 give --compression 10\n"
    ),
    "a rate for one shot": bad(
        ["prune", "digits", "--one-shot", "--rate", "0.5"],
        "rate 0.5 is how much each level prunes, and one-shot pruning has one level, which prunes all that compression "
        "asks for; leave out one of the two\n",
    ),
    **{
        f"{words[0]} where nothing can be written": bad(
            [*words, "--out", "/proc/x"],
            "cannot write into /proc/x: /proc takes no files (No such file or directory); choose",
        )
        for words in (["run", "digits"], ["report", "digits"], ["prune", "digits"])
    },
    "unknown recipe": bad(["plan", "x.toml"], "unknown recipe 'digit'", x_toml=SWEEP.replace("tiny:Tiny", "digit")),
    "unknown technique": bad(["run", "x.toml"], "did you mean 'fine-tuning'", x_toml=SWEEP.replace("tuning", "tune")),
    "unknown key": bad(["run", "x.toml"], "unknown key 'sweep'", x_toml=f"sweep = 1\n{SWEEP}"),
    "no such density": bad(
        ["run", "x.toml"], "density must be above 0 and at most 1, not 2", x_toml=SWEEP.replace("0.5", "2")
    ),
    "no retraining": bad(["run", "x.toml"], "must be above 0, not 0", x_toml=SWEEP.replace("[1, 2]", "0")),
    "rewound too far": bad(
        ["run", "x.toml"], "cannot rewind 3 epochs: tiny:Tiny trains for 2", x_toml=SWEEP.replace("[1, 2]", "3")
    ),
    "no such executor": bad(["run", "digits", "--on", "mars"], "unknown executor 'mars' (known: local, ray, slurm)"),
    "executor misspelt": bad(["run", "digits", "--on", "locl"], "did you mean 'local'? (known: local, ray, slurm)"),
    "no such keep": bad(["run", "digits", "--keep", "some"], "keep must be 'needed' or 'all', not 'some'"),
    "negative jobs": bad(["run", "x.toml", "--jobs", "-1"], "jobs must be at least 0, not -1; 0 means", x_toml=SWEEP),
    "hardly jobs": bad(["plan", "x.toml", "--jobs", "-3"], "jobs must be at least 0, not -3; 0 means", x_toml=SWEEP),
    "no minutes": bad(["run", "x.toml", "--minutes", "0"], "minutes must be above 0, not 0; leave", x_toml=SWEEP),
    "negative minutes": bad(["run", "x.toml", "--minutes", "-1"], "minutes must be above 0, not -1", x_toml=SWEEP),
    "no such device": bad(["run", "x.toml", "--device", "abacus"], "unknown device 'abacus'", x_toml=SWEEP),
    "no such device to plan for": bad(["plan", "x.toml", "--device", "tpu"], "unknown device 'tpu'", x_toml=SWEEP),
    "device of another kind": bad(["run", "x.toml", "--device", "meta"], "is not supported", x_toml=SWEEP),
    "store is a file": bad(["run", "x.toml", "--store", "file"], "cannot use store file", x_toml=SWEEP, file="hello"),
    "store below a file": bad(["prune", "tiny:Tiny", "--store", "file/below"], "cannot use store", file="hello"),
    "newer store": bad(
        ["run", "x.toml", "--store", "."], "newer version (7; this one", x_toml=SWEEP, version=f"7 {digest(7)}\n"
    ),
    "another folder": bad(["show", "--store", "."], "there is no store at .; make one with"),
    "no store": bad(["show", "--store", "nowhere"], "there is no store at nowhere; make one with"),
    "nothing ran": bad(
        ["report", "x.toml", "--store", "no where"],
        "nothing of x has run yet in no where; run it with: rewound run x.toml --store 'no where'\n",
        x_toml=SWEEP,
    ),
    "nothing to pack": bad(
        ["pack", "x.toml", "--out", "p"],
        "nothing of x has run yet in rewound-store; run it with: rewound run x.toml\n",
        x_toml=SWEEP,
    ),
    "no size of a piece": bad(
        ["pack", "x.toml", "--out", "p", "--split-mb", "0"], "--split-mb must be at least 1, not 0; leave", x_toml=SWEEP
    ),
    "no data": bad(["run", "cifar10-resnet20-grid", "--jobs", "2"], "cache: get cifar-10-python.tar.gz from"),
    "no data to prune with": bad(["prune", "cifar10-resnet20"], "cache: get cifar-10-python.tar.gz from"),
    "no data for a figure": bad(
        ["report", "--results", "x.csv", "--figures", "figure-2-sparsity-iterative"],
        "nothing to draw: none of the 2 rows belongs to figure-2-sparsity-iterative; try the default figures",
        x_csv=f"{row()}a,unstructured,0,,1,,1,0.95,0.95,\n",
    ),
    "no dense runs": bad(
        ["report", "--results", "x.csv"],
        "no finished dense run of a: deltas are measured from dense networks; add their rows (technique empty, "
        "density 1) to the table, or give a table of them with --dense FILE\n",
        x_csv=row(),
    ),
    "a file to report into": bad(
        ["report", "--results", "x.csv", "--out", "x.csv"],
        "cannot write into x.csv: x.csv is not a folder; choose another folder for out",
        x_csv=row(),
    ),
    "a file to run into": bad(["run", "x.toml", "--out", "f/below"], "f is not a folder;", x_toml=SWEEP, f="hello"),
    "a file to prune into": bad(["prune", "digits", "--out", "file"], "file is not a folder;", file="hello"),
    "nothing to report on": bad(["report"], "give either a sweep or a table of results"),
    "two things to report on": bad(
        ["report", "digits", "--results", "x.csv"], "give either a sweep or a table of results"
    ),
    "dense runs for a sweep": bad(
        ["report", "digits", "--dense", "x.csv"],
        "dense x.csv goes with a table of results: a sweep has its own dense runs",
    ),
    "unknown figures": bad(["report", "digits", "--figures", "pape"], "unknown figures 'pape'; known: default, paper,"),
    "unknown format": bad(["report", "digits", "--formats", "png,jpg"], "unknown format 'jpg' of figures; known: png,"),
    "no table": bad(["report", "--results", "absent.csv"], "there is no table absent.csv"),
    "not a table": bad(["report", "--results", "x.csv"], "x.csv has no column", x_csv="a,b\n1,2\n"),
    "empty table": bad(["diff", "x.csv", "x.csv"], "x.csv is empty", x_csv=""),
    "a folder for a table": bad(["diff", ".", "."], "cannot read . as a CSV table: Is a directory; give the file"),
    "no rows": bad(["diff", "x.csv", "x.csv"], "x.csv has no rows below its first line", x_csv=f"{HEADER}\n"),
    "nothing common": bad(["diff", "x.csv", "y.csv"], "nothing to compare: one", x_csv=row(t=4), y_csv=row(t=8)),
    "other units": bad(["diff", "x.csv", "y.csv"], "90, which is no fraction", x_csv=row(test=0.9), y_csv=row(test=90)),
    "not a number": bad(["diff", "x.csv", "x.csv"], "'nan' is not a number (of a failed run", x_csv=row(test="nan")),
    "other separators": bad(["diff", "x.csv", "x.csv"], "(separate them by commas)", x_csv="recipe;val;test\na;1;1\n"),
    "a row twice": bad(
        ["diff", "x.csv", "x.csv"], "t = 4, trial 1 of a for the second time", x_csv=row() + row()[len(HEADER) + 1 :]
    ),
    "a dense network twice": bad(
        ["report", "--results", "x.csv", "--dense", "x.csv"],
        "x.csv has a dense run, trial 1 of a for the second time; give every network once",
        x_csv=f"{HEADER},key\na,unstructured,0,,1,,1,0.9,0.9,,{'0' * 32}\n",
    ),
    "a table twice": bad(["diff", "x.csv", "x.csv", "x.csv"], "second time; give every network once", x_csv=row()),
    "nothing to compare with": bad(["report", "--results", "x.csv", "--compare", "y.csv"], "no table", x_csv=row()),
    "compared in vain": bad(
        ["report", "--results", "x.csv", "--compare", "y.csv"], "nothing to compare", x_csv=row(t=4), y_csv=row(t=8)
    ),
    "no such recipe": bad(["prune", "digit"], "unknown recipe 'digit'; did you mean 'digits'"),
    "no such module": bad(
        ["prune", "no.such:Task"], "cannot import recipe 'no.such:Task': No module named 'no'; start in the folder that"
    ),
    "no such technique": bad(["prune", "digits", "--technique", "magic"], "unknown technique 'magic'"),
    "no compression": bad(["prune", "digits", "--compression", "1"], "compression must be above 1, not 1"),
    "endless compression": bad(["prune", "digits", "--compression", "inf"], "must be a finite number, not inf"),
    "no such rate": bad(["prune", "digits", "--rate", "1.5"], "rate must be between 0 and 1, not 1.5"),
    "negative drop": bad(["prune", "digits", "--max-drop=-1"], "max_drop must be at least 0, not -1"),
    "drop in points": bad(
        ["prune", "digits", "--max-drop=5"], "max_drop is in fractions, as accuracy is; for 5 points"
    ),
    "no time": bad(["prune", "digits", "--retrain-epochs", "0"], "retraining time must be above 0, not 0"),
    "too much time": bad(["prune", "digits", "--retrain-epochs", "17"], "cannot rewind 17 epochs"),
    "endless time": bad(
        ["prune", "digits", "--technique", "fine-tuning", "--retrain-epochs", "inf"], "finite number, not inf"
    ),
    "no such score": bad(["prune", "digits", "--score", "luck"], "unknown score 'luck'"),
    "nothing to prune": bad(["prune", "digits", "--only", "none"], "only 'none' matches no parameter"),
    "too high a floor": bad(["prune", "digits", "--floor", "0.5"], "28,160 weights, but density 0.1 only 5,632;"),
    "too large a seed": bad(["prune", "digits", "--seed", "9" * 20], "a trial is a seed from 0 to 922"),
    "no such floor": bad(["prune", "digits", "--floor", "2"], "floor must be"),
    "no such field": bad(["prune", "digits", "--field", "epoch=8"], "unknown field of digits 'epoch'; did you mean"),
    "a field of another type": bad(
        ["prune", "digits", "--field", "epochs=long"], "digits.epochs must be of type float, not 'long'"
    ),
    "a field with a bad value": bad(["prune", "digits", "--field", "epochs=0"], "epochs must be above 0, not 0"),
    "a field without a value": bad(
        ["prune", "digits", "--field", "epochs"], "a field is given as name=value, such as epochs=8, not as 'epochs'"
    ),
    "a field twice": bad(
        ["prune", "digits", "--field", "batch_size=8", "--field", "batch-size=16"], "field batch-size is given twice;"
    ),
    "a field of no recipe": bad(["inspect", "x", "--field", "epochs=8"], "--field epochs=8 goes with --recipe, the"),
    "no ticket": bad(["inspect", "absent"], "cannot read ticket absent: No such file or directory; give the file"),
    "ticket is a folder": bad(["inspect", "."], "cannot read ticket .: Is a directory; give the file"),
    "not a ticket": bad(["inspect", "x.txt"], "x.txt is not a safetensors file", x_txt="hello, this is text"),
    "a report to a URL": bad(["run", "digits", "--out", "s3://b/x"], "out must be a path, not the URL s3://b/x;"),
    "a network to a URL": bad(["prune", "digits", "--out", "gs://b"], "out must be a path, not the URL gs://b;"),
    "nothing to measure": bad(
        ["bench", "digts"], "'digts' is no file, no key of a store, and no recipe; give the path"
    ),
    "no ticket to measure": bad(["bench", "x.txt"], "x.txt is not a safetensors file", x_txt="hello, this is text"),
    "a folder without a ticket": bad(["bench", "."], "cannot read ticket .: Is a directory; give the file"),
    "a key without a store": bad(
        ["bench", "3f2a"], "'3f2a' may be a key, but there is no store at rewound-store; give"
    ),
    "a batch of nothing": bad(["bench", "digits", "--batch", "0"], "batch must be at least 1, not 0; it is the number"),
    "no thread": bad(["bench", "digits", "--threads", "0"], "threads must be at least 1, not 0; leave it out for"),
    "unknown backend": bad(
        ["bench", "digits", "--backend", "tensorrt"], "unknown backend 'tensorrt' (known: compiled,"
    ),
    "a recipe of a recipe": bad(
        ["bench", "digits", "--recipe", "digits"], "recipe 'digits' goes with a ticket or a key"
    ),
    "an export without a file": bad(["export", "digits"], "rewound export needs --out, the file to write; for example"),
    "an export of no format": bad(
        ["export", "digits", "--out", "x.tflite"],
        "x.tflite has no ending that names a format: .onnx (onnx), .pt2 (torch-export), .safetensors (safetensors);",
    ),
    "an unknown format": bad(
        ["export", "digits", "--to", "onxx", "--out", "x.onnx"], "unknown format 'onxx'; did you mean 'onnx'"
    ),
    "another ending": bad(
        ["export", "digits", "--to", "onnx", "--out", "x.pt2"],
        "x.pt2 does not end with .onnx, as files of onnx do; give",
    ),
    "a file that is there": bad(
        ["export", "digits", "--out", "x.onnx"], "x.onnx exists; choose another file, or have it repl", x_onnx="mine"
    ),
    "nothing to slim": bad(
        ["export", "digits", "--out", "x.pt2", "--slim"], "this network has no mask, so that there is nothing to slim;"
    ),
    "nothing to export": bad(
        ["export", "digts", "--out", "x.pt2"], "'digts' is no file, no key of a store, and no rec"
    ),
    "no such data": bad(["data", "mnist"], "unknown data set 'mnist' (known: cifar10, "),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setenv("REWOUND_CACHE", "cache")
    words, says, files = BAD[case]
    for name, text in files.items():
        Path(name).write_text(text)
    code, out, err = rewound_command(*words)
    assert code == 2
    assert err.startswith("error: ")
    assert says in err
    assert err.count("\n") == 1, "one line"
    assert out == "", "nothing began"
    for name, text in files.items():
        assert Path(name).read_text() == text, "nothing is lost"
    if words[0] in ("report", "plan", "pack", "diff", "show"):
        assert {path.name for path in Path().iterdir()} == set(files), "what only looks leaves nothing behind"


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("field", ["weight-decay", "momentum"])
def test_a_step_that_no_float_holds(rewound_command: Rewound, field: str, jobs: int) -> None:
    Path("x.toml").write_text(SWEEP.replace("[[", f"[recipe-fields]\n{field} = 1e308\n\n[[", 1))
    code, _, err = rewound_command("run", "x.toml", "--jobs", jobs)
    assert code == 2
    assert err == (
        f"error: a step of tiny:Tiny {field}=1e+308 needs a number that is too large for the type of its weights; "
        "lower the learning rate, momentum or weight decay\n"
    )


STORED = {name: command for name, command in COMMANDS.items() if any(p.name == "store" for p in command.params)}


@pytest.mark.parametrize("name", STORED)
def test_a_store_is_a_folder_or_a_bucket(rewound_command: Rewound, name: str) -> None:
    needed = [word for p in STORED[name].params if p.required for word in (*p.opts[: "-" in p.opts[0]], "digits")]
    code, out, err = rewound_command(name, *needed, "--store", "http://bucket/x")
    assert (code, out) == (2, "")
    known = "s3://, az://, gs://"
    assert (
        err == f"error: --store must be a path or a URL ({known}), not 'http://bucket/x'; mount it and give its path\n"
    )
    assert list(Path().iterdir()) == [], "and no folder called http:"


@pytest.mark.parametrize("words", [["prune", "digit"], ["run", "digits", "--jobs", "-3"]], ids=" ".join)
def test_in_a_terminal_too_there_is_nothing_but_the_sentence(tmp_path: Path, words: list[str]) -> None:
    ours, theirs = os.openpty()
    ran = subprocess.run(command(*words), cwd=tmp_path, env=environment(), stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert ran.returncode == 2
    assert shown.startswith("error: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("words", [["run", "digits"], ["prune", "digits"], ["bench", "digits"]])
def test_a_device_that_is_not_there(rewound_command: Rewound, words: list[str]) -> None:
    code, _, err = rewound_command(*words, "--device", "cuda")
    assert code == 2
    assert re.fullmatch(r"error: device 'cuda' is not there: torch \S+ sees no CUDA GPU; use cpu\n", err)
    assert list(Path().iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize(
    "words", [["run", "digits", "--jobs", "2"], ["run", "digits", "--jobs", "1"], ["prune", "digits"]]
)
def test_a_package_that_the_data_needs(
    rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # as if it were not installed
    code, _, err = rewound_command(*words)
    assert (code, err) == (2, "error: the digits recipe needs scikit-learn: pip install 'rewound[digits]'\n")
    assert not Path("rewound-store").exists(), "nothing has begun"


def test_an_empty_store_says_how_to_fill_it(rewound_command: Rewound) -> None:
    Store(Path("empty"))
    code, out, err = rewound_command("show", "--store", "empty")
    assert (code, out) == (2, "")
    assert err == ("error: the store at empty is empty; fill it, for example with: rewound run digits --store empty\n")


@pytest.mark.parametrize("word", ["", "zz", "../../etc/passwd", "a/b", "abc", 32 * "f", 33 * "f", "ABC"])
def test_words_that_are_neither_a_key_nor_a_sweep(done: Path, rewound_command: Rewound, word: str) -> None:
    """32 hexadecimal digits, or the beginning of them, are a key; all else is a sweep."""
    before = snapshot(done)
    code, _, err = rewound_command("show", word, "--store", done / "rewound-store")
    assert code == 2
    expected = "(\\d+ keys begin|no key begins) with " if re.fullmatch("[0-9a-f]{1,32}", word) else "(unknown )?sweep "
    assert re.match(f"error: {expected}", err)
    assert err.count("\n") == 1
    assert snapshot(done) == before


def test_a_beginning_of_several_keys_asks_for_more_of_it(store: Store, rewound_command: Rewound) -> None:
    for digit in "12":
        store.publish("ab" + 30 * digit, RESULT)
    said = rewound_command("show", "ab", "--store", store.root).err
    assert "2 keys begin with 'ab'" in said
    assert "give more of its digits: rewound report writes the keys into results.csv" in said


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


def test_a_warning_is_a_sentence_without_a_line_of_code(tmp_path: Path) -> None:
    words = ("prune", "tiny:Tiny", "--one-shot", "--retrain-epochs", "1", "--compression", "2", "--only", "dense.*")
    ran = subprocess.run(command(*words), cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
    assert re.fullmatch(
        r"warning: only \S+% of the network's 1,406 parameters are selected for pruning: .*\n", ran.stderr
    )
