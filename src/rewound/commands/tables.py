"""Commands on tables of results, whoever wrote them: `report --results` and `diff`. They need no torch."""

from collections.abc import Sequence
from pathlib import Path

from rewound.conclusions.cells import setting_of
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.paper.networks import METRICS, TEST_SHARES, TRAINING_EPOCHS
from rewound.conclusions.tables import Row, Tables, read_rows, with_details
from rewound.foundations.errors import InputError, as_path
from rewound.reports.figures import Drawing, Say
from rewound.reports.page import Origin
from rewound.reports.trackers import tracker_named
from rewound.reports.writing import Report, report_folder, write_report


def read_tables(paths: Sequence[str | Path]) -> list[Row]:
    """The table that these files are together, every network once."""
    rows: dict[object, Row] = {}
    for path in paths:
        found = read_rows(path, METRICS)
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


def check_subject(sweep: object, results: str | Path | None, dense: str | Path | None) -> None:
    """Refuse a report on nothing, and one on two things."""
    if (sweep is None) == (results is None):
        raise InputError("give either a sweep or a table of results, the file results.csv of another report")
    if dense is not None and results is None:
        raise InputError(f"dense {dense} goes with a table of results: a sweep has its own dense runs; leave it out")


def report_tables(
    results: str | Path,
    dense: str | Path | None,
    out: str | Path | None,
    theirs: Sequence[Row],
    drawing: Drawing,
    say: Say,
    to: str | None = None,
) -> Report:
    """Report on a table, with its dense runs from another file and the details beside it, if they are there."""
    rows, path = read_tables([results, *([] if dense is None else [dense])]), as_path("results", results)
    name = path.name.split(".")[0]
    title = path.resolve().parent.name if name == "results" else name  # tables of ours are named by their folder
    folder = report_folder(out, name)
    if (folder / "results.csv").resolve() == path.resolve():
        raise InputError(f"the report would write over {results}; give another folder for out")
    evidence = Evidence(with_details(rows, path.parent), theirs, TRAINING_EPOCHS, TEST_SHARES)
    # An error where the two tables share nothing, or where deltas have nothing to be measured from.
    _ = evidence.cards, evidence.only_dense or evidence.baselines
    origin = Origin(title, (("Tables", title), ("Rows", f"{len(evidence.rows):,}")))
    tracked = tracker_named(to) if to is not None else None
    made = write_report(evidence, folder, origin, drawing, say)
    if tracked:
        say(tracked(title, evidence.tables, folder))
    return made


def compared(ours: Path, theirs: Sequence[Path]) -> Evidence:
    """A table of results, held against another."""
    return Evidence(Tables(read_tables([ours])), read_tables(theirs), TRAINING_EPOCHS, TEST_SHARES)
