"""Results in the terminal: each technique at its best retraining time, how far it compresses, how sure that is.

`conformance_card` shows how near one table comes to another: the criteria, the bias of every curve, the cells outside.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rewound.conclusions.cells import Baseline, Cell, Line, cells, failures, line_of
from rewound.conclusions.comparison import Card, Compared, Curve, Lead
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.findings import Reaches, best_over_time, priced, reaches
from rewound.conclusions.rivals import Difference
from rewound.foundations.errors import InputError
from rewound.foundations.metric import ACCURACY
from rewound.reports.look import looks, mode_title, pruning_title, ratios
from rewound.reports.words import (
    Contrast,
    against,
    contrast,
    criteria,
    direction_words,
    drop_names,
    measure_words,
    note,
    reach_words,
    remarks,
    signed,
    tolerance_words,
    verdict,
)


def summary_table(evidence: Evidence, test_examples: int | None = None) -> RenderableType:
    """Every technique and compression at its best retraining time, how far each compresses, and what is weak about it.

    `test_examples` is the size of the test set, for the smallest difference that an accuracy can show.
    """
    rows = evidence.rows
    dense, finished, failed = evidence.baselines, priced(cells(rows), evidence.epochs), failures(rows)
    found = reaches(finished, dense)
    best = {(cell.line, cell.density): cell for cell in best_over_time(finished)}
    places = sorted(best.keys() | failed.keys(), key=lambda place: (place[0], -place[1]))
    if not places:
        raise InputError(f"nothing to summarise: none of the {len(rows)} rows is a retrained network")
    parts: list[RenderableType] = []
    for experiment in dict.fromkeys(line.experiment for line, _ in places):
        here = [place for place in places if place[0].experiment == experiment]
        lines = [Line(*experiment, name) for name in looks(line.technique for line, _ in here)]
        any_failed = any(failed[place] for place in here)
        table = _table(lines[0], dense[lines[0].recipe], any_failed)
        shown = ratios(density for _, density in here)
        for line in lines:
            for density in (density for own, density in here if own == line):
                values = _texts(best.get((line, density)), dense[line.recipe])
                lost = [str(failed[line, density] or "")] if any_failed else []
                table.add_row(Text(line.technique), shown[density], *values, *lost)
            table.add_section()
        labels = {1 / density: label for density, label in shown.items()}
        parts += [table, ""]
        if reached := {line.technique: found[line] for line in lines if line in found}:
            parts += [_reach_table(reached, labels, dense[lines[0].recipe]), ""]
        compared = [row for row in rows if row.dense or line_of(row).experiment == experiment]
        if contrasted := contrast(compared, list(reached)):
            parts += [_difference_table(contrasted, shown, dense[lines[0].recipe]), ""]
    if test_examples and any(baseline.metric == ACCURACY for baseline in dense.values()):
        parts.append(f"One test example is {100 / test_examples:.2g} points of accuracy ({test_examples:,} of them).")
    return Group(*parts, *(Text(f"Weak: {sentence}.") for sentence in evidence.weaknesses))


def plain_table(title: str = "", caption: str = "") -> Table:
    """A table without edges, of which nine columns fit 80 characters; names in it are text, whatever they contain."""
    return Table(
        title=Text(title, style="bold") if title else None,
        caption=Text(caption) if caption else None,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        title_justify="left",
        caption_justify="left",
    )


def _table(line: Line, dense: Baseline, any_failed: bool) -> Table:
    chance = (
        f"± {dense.spread:.{dense.digits}f} ({dense.n} runs)"
        if dense.n > 1
        else "(1 run: its spread is unknown, taken as 0)"
    )
    table = plain_table(
        f"{line.recipe}, {pruning_title(line.pruning)}, {mode_title(line.iterative).lower()}",
        f"Test {dense.metric.name} over trials, at the retraining time t that validates best; delta in {dense.unit} "
        f"to dense {dense.shown(dense.mean)} {chance}.{direction_words(dense.metric)} Ratio: compression of the "
        "weights that may be pruned, not of the whole network. Cost: epochs of retraining, all levels.",
    )
    table.add_column("technique", overflow="fold")
    for name in ("ratio", "median", "min", "max", "delta", "t", "cost"):
        table.add_column(name, justify="right", no_wrap=True)
    if any_failed:
        table.add_column("failed", justify="right", no_wrap=True, style="red")
    return table


def _texts(cell: Cell | None, dense: Baseline) -> list[str]:
    if cell is None:
        return ["–"] * 6
    tests = [dense.shown(value) for value in (cell.median, cell.low, cell.high)]
    return [*tests, dense.signed(dense.delta(cell.median)), f"{cell.retrain_epochs:g}", f"{cell.search_epochs:g}"]


def _reach_table(found: Mapping[str, Reaches], labels: Mapping[float, str], dense: Baseline) -> Table:
    costs = any(reach.search_epochs is not None for pair in found.values() for reach in (pair.no_drop, pair.one_drop))
    caption = "Range: with all deltas one standard error lower, and higher."
    if dense.metric != ACCURACY:
        caption += f" Compared with the dense network, {tolerance_words(dense)}."
    table = plain_table("", caption)
    table.padding = (0, 0)  # a space between columns, not two: with costs, the paper's longest name still fits 80
    table.add_column("technique", overflow="fold")
    for name in drop_names(dense.metric):
        for column in (name, "range", *(["cost"] if costs else [])):
            table.add_column(column, justify="right", no_wrap=True)
    for name, reached in found.items():
        texts = []
        for reach in (reached.no_drop, reached.one_drop):
            words = reach_words(reach, reached.tried, labels)
            cost = "–" if reach.search_epochs is None else f"{reach.search_epochs:g}"
            texts += [words.ratio, words.range or "unknown", *([cost] if costs else [])]
        table.add_row(Text(name), *texts)
    return table


def _difference_table(contrasted: Contrast, labels: Mapping[float, str], dense: Baseline) -> RenderableType:
    table = plain_table(f"{contrasted.first} {against(dense.metric)}")
    table.add_column("ratio", justify="right")
    for other in contrasted.over:
        table.add_column(Text(other), justify="right")
    for density in contrasted.densities:
        table.add_row(
            labels[density], *(_difference(column.get(density), dense) for column in contrasted.over.values())
        )
    return Group(table, Text(f"{contrasted.method_note} {contrasted.brackets}"))


def _difference(difference: Difference | None, dense: Baseline) -> Text:
    if difference is None:
        return Text("–")
    left, right = "()" if difference.df is None else "[]"
    mean, low, high = (dense.signed(value) for value in (difference.mean, difference.low, difference.high))
    return Text(f"{mean} {left}{low}, {high}{right}")


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
    if text := remarks(card):
        yield from (Text(text), "")


def _criteria(card: Card) -> Table:
    table = plain_table(f"{card.recipe}: {verdict(card)}", measure_words(card))
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
