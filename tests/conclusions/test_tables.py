"""The three tables of a report: what lies beside a results table is found again, and nothing is written over."""

import csv
import gzip
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from rewound.commands.tables import report_tables
from rewound.conclusions.tables import (
    CurveRow,
    LayerRow,
    Row,
    Tables,
    read_layers,
    read_rows,
    with_details,
    write_layers,
    write_rows,
)
from rewound.foundations.csvfiles import write_table
from rewound.foundations.errors import InputError
from rewound.reports.figures import Drawing

DENSE = Row("digits", "unstructured", False, "", 1, None, 1, 0.97, 0.96, 1000, None, 1.5, "k0")
PRUNED = replace(DENSE, technique="lr-rewinding", density=0.5, retrain_epochs=16.0, key="k1")
LAYERS = [LayerRow("k0", "stem", 4, 4, 9), LayerRow("k1", "stem", 1, 4, 3), LayerRow("k1", "dense", 3, 8)]
CURVES = [CurveRow("k0", 10, 0.1, 2.5, 0.5), CurveRow("k1", 10, 0.1, 1.5), CurveRow("k1", 20, 0.01, 0.5, 0.75)]
NO_FIGURES = Drawing("none")


def test_details_beside_a_table_are_those_of_its_rows(tmp_path: Path) -> None:
    assert len(Tables([DENSE, PRUNED], LAYERS, CURVES, 0).write(tmp_path)) == 3
    assert with_details([DENSE, PRUNED], tmp_path) == Tables([DENSE, PRUNED], LAYERS, CURVES, 0)
    assert with_details([PRUNED], tmp_path) == Tables([PRUNED], LAYERS[1:], CURVES[1:], 0)
    assert with_details([replace(PRUNED, key="")], tmp_path) == Tables([replace(PRUNED, key="")], [], [], 0)


def test_a_table_alone_stays_alone(tmp_path: Path) -> None:
    assert Tables([DENSE], [], [], 0).write(tmp_path / "new") == [tmp_path / "new" / "results.csv"]
    assert with_details([DENSE], tmp_path / "new") == Tables([DENSE], [], [], 0)


def test_details_that_cannot_be_read_say_where(tmp_path: Path) -> None:
    (tmp_path / "layers.csv").write_text("key,layer,kept,total,flops\nk1,stem,many,4,\n")
    with pytest.raises(InputError, match=r"layers\.csv, line 2: column kept: 'many' is not a whole number"):
        with_details([PRUNED], tmp_path)


def test_a_report_on_a_table_takes_the_details_along(tmp_path: Path) -> None:
    tables = Tables([DENSE, PRUNED], LAYERS, CURVES, 0)
    results, *_ = tables.write(tmp_path / "theirs")
    report_tables(results, None, tmp_path / "mine", [], NO_FIGURES, print)
    for name in ("results", "layers", "curves"):
        mine, theirs = (tmp_path / folder / f"{name}.csv" for folder in ("mine", "theirs"))
        assert mine.read_bytes() == theirs.read_bytes()
    page = (tmp_path / "mine" / "index.html").read_text()
    assert '"stem"' in page, "the map of layers is on the page"


def test_a_report_does_not_write_over_its_table(tmp_path: Path) -> None:
    results, *_ = Tables([DENSE, PRUNED], [], [], 0).write(tmp_path)
    before = results.read_bytes()
    with pytest.raises(InputError, match=r"would write over .*; give another folder for out"):
        report_tables(results, None, tmp_path / "." / "", [], NO_FIGURES, print)
    assert results.read_bytes() == before


@pytest.mark.parametrize("name", ["=HYPERLINK(1)", "+1+cmd", "-loss", "@SUM(A1)", "\t=1", "'=1", "''=1", "'quoted"])
def test_no_text_in_a_table_is_a_formula_of_a_spreadsheet(name: str, tmp_path: Path) -> None:
    row = Row(name, name, False, name, 0.5, 4, 1, -0.5, 0.9, key=name, metric=name, unit=name)
    layer = LayerRow(name, name, 1, 2, 3)
    write_rows([row], tmp_path / "results.csv")
    write_layers([layer], tmp_path / "layers.csv")
    for path in (tmp_path / "results.csv", tmp_path / "layers.csv"):
        (fields,) = csv.DictReader(path.read_text().splitlines())
        texts = [text for column, text in fields.items() if column != "val"]
        assert not [text for text in texts if text.startswith(("=", "+", "-", "@", "\t"))]
    (read,) = read_rows(tmp_path / "results.csv")
    assert (read.recipe, read.technique, read.key, read.metric, read.val) == (name, name, name, name, -0.5)
    assert read_layers(tmp_path / "layers.csv")[0].layer == name


def test_a_number_is_no_formula(tmp_path: Path) -> None:
    write_table(["low", "high"], [["-0.18", "+2e3"]], tmp_path / "points.csv")
    assert (tmp_path / "points.csv").read_text() == "low,high\n-0.18,+2e3\n"


def test_a_table_of_one_endless_line_does_not_fill_the_memory(tmp_path: Path) -> None:
    """64 MiB of one letter in 64 KiB."""
    with gzip.open(path := tmp_path / "x.csv.gz", "wb") as file:
        for _ in range(64):
            file.write(b"a" * 2**20)
    tracemalloc.start()
    with pytest.raises(InputError, match="as a CSV table: a line has more than 1,048,576 letters"):
        read_rows(path)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held < 2**23


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "recipe,test,val,test\ndigits,0.9,0.9,0.1\n",
            "table.csv has the column test more than once; leave",
        ),
        ("recipe,test,val,flops\n ,0.9,0.9,1\n", "table.csv, line 2: column recipe is empty; name the task"),
    ],
)
def test_a_table_that_is_ambiguous_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(InputError, match=words):
        read_rows(tmp_path / "table.csv")
