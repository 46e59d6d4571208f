"""The conformance card in the terminal: the criteria, the bias of every curve, the cells outside, and the leads."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rewound.conclusions.cell import Line
from rewound.conclusions.conformance import Card, Compared, Curve, Lead
from rewound.presentation.criteria import criteria, note, remarks, signed, verdict
from rewound.presentation.look import mode_title, ratios
from rewound.terminal.summary import plain_table

_ANSWERS = {True: "yes", False: "NO", None: "–"}


def conformance_card(cards: Iterable[Card], *, every_cell: bool = False) -> RenderableType:
    """A card for every recipe; of its cells those outside the interval, or all of them."""
    return Group(*(part for card in cards for part in _parts(card, every_cell)))


def _parts(card: Card, every_cell: bool) -> Iterator[RenderableType]:
    yield from (_criteria(card), "")
    if card.curves:
        yield from (_curves(card.curves), "")
    for curve in card.curves:
        if shown := [cell for cell in curve.cells if every_cell or not cell.inside]:
            yield from (_cells(curve.line, shown, every_cell), "")
    if card.leads:
        yield from (Text("Iterative, 4× and beyond, retrained in full, mean over levels"), _leads(card.leads), "")
    if said := remarks(card):
        yield from (Text(said), "")


def _criteria(card: Card) -> Table:
    table = plain_table(f"{card.recipe}: {verdict(card)}", f"In {card.unit} of {card.measure}, means over trials.")
    table.add_column("criterion")
    for name in ("n", "found", "limit", "passed"):
        table.add_column(name, justify="right")
    for criterion in criteria(card):
        table.add_row(*criterion[:-1], _ANSWERS[criterion.passed])
    return table


def _curves(curves: Iterable[Curve]) -> Table:
    table = plain_table("Curves")
    table.add_column("curve")
    for name in ("cells", "outside", "bias"):
        table.add_column(name, justify="right")
    table.add_column("")
    for curve in curves:
        outside = sum(not cell.inside for cell in curve.cells)
        table.add_row(Text(_name(curve.line)), f"{len(curve.cells)}", f"{outside}", signed(curve.bias), note(curve))
    return table


def _cells(line: Line, cells: Sequence[Compared], every_cell: bool) -> Table:
    table = plain_table(f"{_name(line)}: {'every cell' if every_cell else 'cells outside'}")
    for name in ("ratio", "t", "ours", "theirs", "min to max", "n", "difference", "within"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    labels = ratios(cell.density for cell in cells)
    for cell in cells:
        values = f"{cell.ours:.2f}", f"{cell.theirs:.2f}", f"{cell.low:.2f} to {cell.high:.2f}", f"{cell.n}, {cell.m}"
        judged = signed(cell.difference), f"±{cell.margin:.2f}", "" if cell.inside else "outside"
        table.add_row(labels[cell.density], f"{cell.retrain_epochs:g}", *values, *judged)
    return table


def _leads(leads: Iterable[Lead]) -> Table:
    table = plain_table()
    table.add_column("difference")
    for name in ("ours", "theirs", "levels"):
        table.add_column(name, justify="right")
    for lead in leads:
        values = signed(lead.ours), signed(lead.theirs), f"{lead.levels}"
        table.add_row(Text(f"{lead.line.technique} − {lead.over}"), *values)
    return table


def _name(line: Line) -> str:
    pruning = "" if line.pruning == "unstructured" else f"{line.pruning} "
    return f"{line.technique}, {pruning}{mode_title(line.iterative).lower()}"
