"""Commands on tables of results, whoever wrote them: `report --results` and `diff`. They need no torch."""

from collections.abc import Sequence
from pathlib import Path

from rewound.commands.console import console, say_files
from rewound.conclusions.cells import setting_of
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.paper.networks import TEST_SHARES, TRAINING_EPOCHS
from rewound.conclusions.tables import Row, Tables, read_rows, with_details
from rewound.foundations.errors import InputError
from rewound.reports.figures import Drawing
from rewound.reports.writing import report_files, report_folder, say_comparison


def read_tables(paths: Sequence[Path]) -> list[Row]:
    """The table that these files are together, every network once."""
    rows: dict[object, Row] = {}
    for path in paths:
        found = read_rows(path)
        if not found:
            raise InputError(f"{path} has no rows below its first line; give a table with results")
        for row in found:
            # The authors' dense networks have no names; two variants of a recipe may share one.
            place = (row.recipe, row.key or len(rows)) if row.dense else (setting_of(row), row.trial)
            if place in rows:
                what = "a dense run" if row.dense else f"{row.technique} at density {row.density:g}"
                t = "" if row.retrain_epochs is None else f", t = {row.retrain_epochs:g}"
                raise InputError(
                    f"{path} has {what}{t}, trial {row.trial} of {row.recipe} for the second time; "
                    "give every network once"
                )
            rows[place] = row
    return list(rows.values())


def report_tables(results: Path, dense: Path | None, out: Path | None, theirs: Sequence[Row], drawing: Drawing) -> None:
    """Report on a table, with its dense runs from another file and the details beside it, if they are there."""
    rows = read_tables([results, *([dense] if dense else [])])
    name = results.name.split(".")[0]
    title = results.resolve().parent.name if name == "results" else name  # tables of ours are named by their folder
    out = report_folder(out, name)
    if (out / "results.csv").resolve() == results.resolve():
        raise InputError(f"the report would write over {results}; give another folder with --out")
    evidence = Evidence(with_details(rows, results.parent), theirs, TRAINING_EPOCHS, TEST_SHARES)
    say_files(report_files(evidence, out, console, drawing, title))


def diff_tables(ours: Path, theirs: Sequence[Path], *, every_cell: bool) -> None:
    """Compare a table with another, cell by cell."""
    evidence = Evidence(Tables(read_tables([ours])), read_tables(theirs), TRAINING_EPOCHS, TEST_SHARES)
    say_comparison(evidence, console, every_cell=every_cell)
