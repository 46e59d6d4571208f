"""A report on tables: figures and a page beside them, and a summary in the terminal, whoever computed the rows."""

import hashlib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from rewound import __version__
from rewound.conclusions.comparison import write_comparison
from rewound.conclusions.evidence import Evidence
from rewound.foundations.wholefiles import writable
from rewound.reports.figures import DEFAULT, Drawing, figures_under_way
from rewound.reports.page import PAGE, Origin, write_page
from rewound.reports.terminal import conformance_card, summary_table


def report_folder(out: Path | None, name: str) -> Path:
    """The folder for a report of that name, if files can be written into it."""
    return writable(out or Path("rewound-report") / name)


def report_files(
    evidence: Evidence, out: Path, console: Console, drawing: Drawing = DEFAULT, title: str = "results"
) -> list[Path]:
    """Tables that came from anywhere, with figures and a page; with another table, also a conformance card."""
    _check(evidence, drawing)
    _ = evidence.only_dense or evidence.baselines  # an error where deltas have nothing to be measured from
    paths = evidence.tables.write(out)
    origin = with_digest(paths[0], Origin(title, (("Tables", title), ("Rows", f"{len(evidence.rows):,}"))))
    shown = show_tables(evidence, out, console, origin, drawing)
    return [*paths, *shown, *show_comparison(evidence, out, console)]


def write_tables(evidence: Evidence, out: Path, drawing: Drawing) -> list[Path]:
    """Write the tables into the folder `out`, once it is known that the figures and cards asked for can be made."""
    _check(evidence, drawing)
    return evidence.tables.write(out)


def _check(evidence: Evidence, drawing: Drawing) -> None:
    drawing.check(evidence)
    _ = evidence.cards  # an error where the two tables share nothing


def with_digest(results: Path, origin: Origin) -> Origin:
    """The origin, with what is known of the table that was written."""
    digest = hashlib.sha256(results.read_bytes()).hexdigest()
    facts = (
        (f"SHA-256 of {results.name}", digest[:16]),
        ("Report", f"rewound {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
    )
    return replace(origin, facts=(*origin.facts, *facts))


def show_tables(
    evidence: Evidence,
    out: Path,
    console: Console,
    origin: Origin,
    drawing: Drawing = DEFAULT,
    test_examples: int | None = None,
) -> list[Path]:
    """Draw the figures of tables and write their page into the folder `out`, and print a summary.

    Dense networks alone have nothing to compare: a line says so, and nothing is drawn.
    """
    if evidence.only_dense:
        console.print("only dense networks so far: there are no techniques to compare yet")
        return []
    with figures_under_way(evidence, out, console, drawing) as figures:
        console.print(summary_table(evidence, test_examples))
        page = _page(evidence, out, console, origin)
        return [*figures(), *page]


def show_comparison(evidence: Evidence, out: Path, console: Console) -> list[Path]:
    """Print the conformance cards, if there are any, and write them into the folder `out`."""
    if not evidence.cards:
        return []
    say_comparison(evidence, console)
    write_comparison(evidence.cards, out / "compare.csv")
    return [out / "compare.csv"]


def say_comparison(evidence: Evidence, console: Console, *, every_cell: bool = False) -> None:
    """Print the conformance cards, and the recipes of ours that have none."""
    console.print(conformance_card(evidence.cards, every_cell=every_cell))
    if alone := sorted({row.recipe for row in evidence.rows} - {card.recipe for card in evidence.cards}):
        console.print(f"only in our table: {', '.join(alone)}", markup=False)


def _page(evidence: Evidence, out: Path, console: Console, origin: Origin) -> list[Path]:
    try:
        return [write_page(evidence, out / PAGE, origin)]
    except ModuleNotFoundError as error:
        console.print(f"no page: {error.name} is missing; pip install 'rewound[figures]'", markup=False)
        return []
