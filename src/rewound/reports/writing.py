"""A report on tables: figures and a page beside them, and a summary of what they say, whoever computed the rows."""

import hashlib
import io
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from rich.console import Console, Group, RenderableType

from rewound import __version__
from rewound.conclusions.comparison import write_comparison
from rewound.conclusions.evidence import Evidence
from rewound.foundations.notebook import PICTURES, html_line, html_link, html_picture
from rewound.foundations.quantities import counted
from rewound.foundations.wholefiles import writable
from rewound.reports.figures import DEFAULT, FORMATS, Drawing, Say, figures_under_way
from rewound.reports.page import PAGE, Origin, write_page
from rewound.reports.terminal import conformance_card, summary_table

_SHOWN: Final = 6  # figures that a notebook shows; the page has all
_WIDTH: Final = 120  # columns of the summary as text


@dataclass(frozen=True, repr=False)
class Report:
    """The files of a report; printed, it is the summary of `rewound report`."""

    folder: Path
    files: tuple[Path, ...]
    """Tables first, then figures and the page."""
    evidence: Evidence
    """The tables and all that is concluded from them."""
    test_examples: int | None = None
    """The size of the test set, for the smallest difference that an accuracy can show."""

    @property
    def page(self) -> Path | None:
        """The page for a browser."""
        return next((path for path in self.files if path.name == PAGE), None)

    @property
    def figures(self) -> list[Path]:
        """The files of figures."""
        return [path for path in self.files if path.suffix.removeprefix(".") in FORMATS]

    def __repr__(self) -> str:
        page = f", page {self.page.name}" if self.page else ""
        return f"Report({self.folder}: {counted(len(self.figures), 'figure')}{page})"

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=_WIDTH, color_system=None).print(self.summary())
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())

    def _repr_html_(self) -> str:
        pictures = [path for path in self.figures if path.suffix in PICTURES]
        # One file of each figure, where it was written in several formats.
        shown = list({path.with_suffix(""): path for path in reversed(pictures)}.values())[::-1]
        rest = len(shown) - _SHOWN
        where = html_link(self.page, str(self.page)) if self.page else html_line(str(self.folder))
        return "".join(
            [
                *([] if shown else [html_line("no figures")]),
                *(f"<div>{html_picture(path)}</div>" for path in shown[:_SHOWN]),
                *([html_line(f"and {counted(rest, 'more figure')} in {self.folder}")] if rest > 0 else []),
                f"<p>report: {where}</p>",
            ]
        )

    def summary(self) -> RenderableType:
        """What the tables say, for a terminal; with the conformance cards, where there is a table to compare with."""
        parts: list[RenderableType] = []
        if self.evidence.only_dense:
            parts.append("only dense networks so far: there are no techniques to compare yet")
        else:
            parts.append(summary_table(self.evidence, self.test_examples))
        return Group(*parts, *([comparison_cards(self.evidence)] if self.evidence.cards else []))


def report_folder(out: str | Path | None, name: str) -> Path:
    """The folder for a report of that name, if files can be written into it."""
    return writable(Path("rewound-report") / name if out is None else out)


def write_report(
    evidence: Evidence,
    folder: Path,
    origin: Origin,
    drawing: Drawing = DEFAULT,
    say: Say = print,
    test_examples: int | None = None,
) -> Report:
    """Write tables, figures and a page into a folder; with another table, also how they compare.

    Dense networks alone have nothing to compare, so that nothing is drawn. `say` takes a line for what is left out.
    """
    drawing.check(evidence)
    _ = evidence.cards  # an error where the two tables share nothing
    files = evidence.tables.write(folder)
    if not evidence.only_dense:
        with figures_under_way(evidence, folder, say, drawing) as figures:
            page = _page(evidence, folder, say, _with_digest(files[0], origin))
            files += [*figures(), *page]
    if evidence.cards:
        write_comparison(evidence.cards, folder / "compare.csv")
        files.append(folder / "compare.csv")
    return Report(folder, tuple(files), evidence, test_examples)


def comparison_cards(evidence: Evidence, *, every_cell: bool = False) -> RenderableType:
    """The conformance cards, and the recipes of ours that have none."""
    cards = conformance_card(evidence.cards, every_cell=every_cell)
    alone = sorted({row.recipe for row in evidence.rows} - {card.recipe for card in evidence.cards})
    return Group(cards, *([f"only in our table: {', '.join(alone)}"] if alone else []))


def _with_digest(results: Path, origin: Origin) -> Origin:
    """The origin, with what is known of the table that was written."""
    digest = hashlib.sha256(results.read_bytes()).hexdigest()
    facts = (
        (f"SHA-256 of {results.name}", digest[:16]),
        ("Report", f"rewound {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
    )
    return replace(origin, facts=(*origin.facts, *facts))


def _page(evidence: Evidence, folder: Path, say: Say, origin: Origin) -> list[Path]:
    try:
        return [write_page(evidence, folder / PAGE, origin)]
    except ModuleNotFoundError as error:
        say(f"no page: {error.name} is missing; pip install 'rewound[figures]'")
        return []
