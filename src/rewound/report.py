"""A report on tables: figures and a page beside them, and a summary in the terminal, whoever computed the rows."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from rewound import __version__
from rewound.conclusions.comparison import compare, write_comparison
from rewound.conclusions.conformance import Card
from rewound.drawing import DEFAULT, Drawing, figures_under_way
from rewound.pages.card import conformance_card
from rewound.pages.page import PAGE, Origin, write_page
from rewound.pages.terminal import summary_table
from rewound.tables.folder import Tables
from rewound.tables.results import Row


def report_files(
    tables: Tables,
    out: Path,
    console: Console,
    theirs: Sequence[Row] = (),
    drawing: Drawing = DEFAULT,
    title: str = "results",
) -> list[Path]:
    """Tables that came from anywhere, with figures and a page; with another table, also a conformance card."""
    rows = tables.rows
    drawing.check(rows)
    cards = compare(rows, theirs) if theirs else []
    paths = tables.write(out)
    origin = written_to(paths[0], Origin(title, (("Tables", title), ("Rows", f"{len(rows):,}"))))
    shown = show_tables(tables, out, console, origin, theirs, cards, drawing)
    return [*paths, *shown, *show_comparison(cards, rows, out, console)]


def written_to(results: Path, origin: Origin) -> Origin:
    """The origin, with what is known of the table that was written."""
    digest = hashlib.sha256(results.read_bytes()).hexdigest()
    facts = (
        (f"SHA-256 of {results.name}", digest[:16]),
        ("Report", f"rewound {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
    )
    return replace(origin, facts=(*origin.facts, *facts))


def show_tables(
    tables: Tables,
    out: Path,
    console: Console,
    origin: Origin,
    theirs: Sequence[Row] = (),
    cards: Sequence[Card] = (),
    drawing: Drawing = DEFAULT,
    epochs: Mapping[str, float] | None = None,
    test_examples: int | None = None,
) -> list[Path]:
    """Draw the figures of tables and write their page into the folder `out`, and print a summary."""
    with figures_under_way(tables.rows, out, console, drawing, theirs, epochs) as figures:
        console.print(summary_table(tables.rows, test_examples))
        page = _page(tables, out, console, origin, epochs, theirs, cards)
        return [*figures(), *page]


def show_comparison(cards: Sequence[Card], ours: Sequence[Row], out: Path, console: Console) -> list[Path]:
    """Print the conformance cards, if there are any, and write them into the folder `out`."""
    if not cards:
        return []
    say_comparison(cards, ours, console)
    write_comparison(cards, out / "compare.csv")
    return [out / "compare.csv"]


def say_comparison(cards: Sequence[Card], ours: Sequence[Row], console: Console, *, every_cell: bool = False) -> None:
    """Print the conformance cards, and the recipes of ours that have none."""
    console.print(conformance_card(cards, every_cell=every_cell))
    if alone := sorted({row.recipe for row in ours} - {card.recipe for card in cards}):
        console.print(f"only in our table: {', '.join(alone)}", markup=False)


def _page(
    tables: Tables,
    out: Path,
    console: Console,
    origin: Origin,
    epochs: Mapping[str, float] | None,
    theirs: Sequence[Row],
    cards: Sequence[Card],
) -> list[Path]:
    try:
        return [write_page(tables, out / PAGE, origin, epochs, theirs, cards)]
    except ModuleNotFoundError as error:
        console.print(f"no page: {error.name} is missing; pip install 'rewound[figures]'", markup=False)
        return []
