"""Pruners of one sweep are ways of pruning of their own: never averaged, each with tables, figures and a subject."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from command_line import SWEEP, Rewound, printed
from rewound.commands.tables import report_tables
from rewound.conclusions.cells import cells
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.paper.figures import FIGURES, panels
from rewound.conclusions.paper.panels import measured
from rewound.conclusions.tables import LayerRow, Row, Tables, is_structured, read_rows, write_rows
from rewound.experiments.sweeps.targets import kind_of
from rewound.method.pruner import Pruner
from rewound.reports.figures import Drawing, file_name
from rewound.states.history import described
from tiny_sweeps import sweep_of

RANDOM = "unstructured random"
AXIS = SWEEP.replace("[1]", "[1, 2]") + 'pruner = [{ score = "magnitude" }, { score = "random" }]\n'
LEVELS = {"technique": "lr-rewinding", "retrain-epochs": 1}


def inverse(weight: Tensor, name: str, seed: int) -> Tensor:
    return 1 / (1 + weight.abs())


def sums_of_rows(scores: Tensor) -> Tensor:
    return scores.sum(dim=1, keepdim=True)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ways")
    (folder / "two.toml").write_text(AXIS)
    (folder / "said").write_text(printed(folder, "run", "two.toml", "--jobs", "1", "--out", "report"))
    return folder


def test_each_pruner_has_rows_of_its_own(reported: Path) -> None:
    rows = read_rows(reported / "report" / "results.csv")
    assert sorted({row.pruning for row in rows if not row.dense}) == ["unstructured", RANDOM]
    pruned = [(row.pruning, row.technique, row.retrain_epochs, row.trial) for row in rows if not row.dense]
    assert len(pruned) == len(set(pruned)) == 2 * 2 * 2 * 2
    assert {row.pruning for row in rows if row.dense} == {"unstructured"}


def test_the_report_shows_them_side_by_side(reported: Path) -> None:
    said = (reported / "said").read_text()
    assert "tiny:Tiny, unstructured pruning, one-shot" in said
    assert "tiny:Tiny, unstructured pruning, random, one-shot" in said
    assert (reported / "report" / "tiny-Tiny-unstructured-best.png").exists()
    assert (reported / "report" / "tiny-Tiny-unstructured-random-best.png").exists()
    page = (reported / "report" / "index.html").read_text()
    story = json.loads(re.search(r'id="story"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    assert [subject["pruning"] for subject in story["subjects"]] == ["unstructured", RANDOM]
    dense = [subject["dense"] for subject in story["subjects"]]
    assert dense[0] == dense[1], "both are measured from the same dense networks"
    assert "paired" in said
    assert "not paired" not in said


def test_the_table_can_be_reported_on_and_compared(reported: Path, rewound_command: Rewound) -> None:
    table = reported / "report" / "results.csv"
    code, _, err = rewound_command("report", "--results", table, "--out", "again", "--figures", "none")
    assert (code, err) == (0, "")
    assert Path("again/results.csv").read_bytes() == table.read_bytes()
    code, out, err = rewound_command("diff", table, table, "--all")
    assert (code, err) == (0, "")
    assert f"lr-rewinding, {RANDOM} one-shot: every cell" in out
    assert "lr-rewinding, one-shot: every cell" in out


def test_the_papers_figures_have_a_panel_of_each(reported: Path) -> None:
    found = measured(Evidence(Tables(read_rows(reported / "report" / "results.csv"))))
    shown = panels(FIGURES["figure-1-sparsity-oneshot"], found)
    assert [panel.measured.pruning for panel in shown] == ["unstructured", RANDOM]
    assert not panels(FIGURES["figure-4-usability-structured"], found), "random pruning is not structured"


def test_a_density_of_units_is_told_from_one_of_weights() -> None:
    pruned = Row("mine", "test:rows", False, "fine-tuning", 0.5, 4, 1, 0.9, 0.9, key="k")
    dense = Row("mine", "", False, "", 1, None, 1, 0.9, 0.9)

    def notes(*layers: LayerRow, pruning: str = "test:rows") -> list[str]:
        tables = Tables([dense, replace(pruned, pruning=pruning)], list(layers))
        return [note for note in Evidence(tables).weaknesses if "units" in note]

    even = LayerRow("k", "one", 50, 100), LayerRow("k", "two", 100, 200)
    assert notes(*even) == notes() == notes(LayerRow("k", "one", 20, 100), pruning="unstructured") == []
    assert notes(LayerRow("k", "one", 70, 100), pruning="structured-b") == [], (
        "the weights behind its filters count as gone"
    )
    (note,) = notes(LayerRow("k", "one", 20, 100), LayerRow("k", "two", 100, 200))
    assert note.startswith("mine, test:rows: density 0.5 leaves 0.4 of the weights in layers.csv, as units of unequal")


def test_networks_that_were_asked_for_at_one_density_are_one_cell() -> None:
    first = Row("digits", "unit", False, "fine-tuning", 0.24, 4, 1, 0.9, 0.9, key="a", asked_density=0.25)
    trials = [replace(first, trial=trial, density=density) for trial, density in ((1, 0.24), (2, 0.23), (3, 0.245))]
    failed = replace(first, trial=4, density=0.25, val=None, test=None)
    other = replace(first, technique="lr-rewinding", density=0.22)
    deeper = replace(first, density=0.1, asked_density=0.125)
    dense = Row("digits", "unstructured", False, "", 1, None, 1, 0.95, 0.95)
    evidence = Evidence(Tables([dense, *trials, failed, other, deeper]))
    found = {(cell.line.technique, cell.density): cell.trials for cell in cells(evidence.rows)}
    assert found == {("fine-tuning", 0.23): 3, ("lr-rewinding", 0.23): 1, ("fine-tuning", 0.1): 1}
    assert [row.density for row in evidence.rows if row.test is None] == [0.23]
    assert evidence.tables.rows[1].density == 0.24, "a table has what was measured"
    (sentence,) = [each for each in evidence.weaknesses if "every density" in each]
    assert "furthest off is 0.1 where 0.125 was asked for" in sentence
    same = [replace(first, density=0.2, asked_density=asked) for asked in (0.25, 0.21)]
    assert {row.density for row in Evidence(Tables([dense, *same])).rows[1:]} == {0.25, 0.21}, "two stay two"


def test_structured_tables_are_reported_as_any_other(tmp_path: Path) -> None:
    rows = [Row("mine", "", False, "", 1, None, n, 0.9, 0.9 + n / 1000, 1000) for n in (1, 2, 3)]
    for density, drop in ((0.87, 0.0), (0.51, 0.02)):
        rows += [
            Row("mine", "structured-b", False, name, density, 4, n, 0.9, 0.9 - drop + n / 1000, 700)
            for name in ("fine-tuning", "lr-rewinding")
            for n in (1, 2, 3)
        ]
    write_rows(rows, tmp_path / "structured.csv")
    report_tables(tmp_path / "structured.csv", None, tmp_path / "report", [], Drawing(), print)
    assert (tmp_path / "report" / "mine-structured-b-best.png").exists()
    story = (tmp_path / "report" / "index.html").read_text()
    assert "keeps dense accuracy to 1.15" in story


def test_every_field_is_in_the_name() -> None:
    assert kind_of(Pruner(score="magnitude", scope="global", floor=0)) == "unstructured"
    assert kind_of(Pruner(scope="layer", floor=0.01)) == "unstructured layer floor=0.01"
    assert kind_of(Pruner(only=("a.*", "b"), skip=("c",))) == "unstructured only=a.*,b skip=c"
    own = kind_of(Pruner(score="test_ways_of_pruning:inverse", pattern="test_ways_of_pruning:sums_of_rows"))
    assert own == "test_ways_of_pruning:sums_of_rows test_ways_of_pruning:inverse"
    assert is_structured(own)


def test_a_state_tells_how_it_was_pruned() -> None:
    sweep = sweep_of({**LEVELS, "density": 0.5, "pruner": {"scope": "layer", "skip": ["stem.*", "dense.*"]}})
    assert "prune magnitude/layer skip=stem.*,dense.* to " in "\n".join(described(sweep.targets[-1].state))


def test_files_of_ways_that_differ_in_wildcards_or_are_long_do_not_collide() -> None:
    names = [file_name("a", f"unstructured skip={glob}", "best") for glob in ("*b", "?b", "b", "b*", "b,c", "b?c")]
    assert len(set(names)) == len(names)
    long = [file_name("a", f"unstructured skip={'layer,' * 90}{end}", "best") for end in "bc"]
    assert len(set(long)) == 2
    assert max(map(len, long)) < 120


def test_the_time_a_run_took_does_not_move_its_row(tmp_path: Path) -> None:
    def keys(*seconds: float) -> list[str]:
        line = ("a", "unstructured", False, "lr-rewinding", 0.5, 4.0, 1, 0.9, 0.9, None, 4.0)
        write_rows([Row(*line, took, key) for took, key in zip(seconds, "kl", strict=True)], tmp_path / "t.csv")
        return [row.key for row in read_rows(tmp_path / "t.csv")]

    assert keys(1.0, 2.0) == keys(2.0, 1.0)
