"""What is said about results, the same in the terminal and on the page.

`headlines`: what a report says first, one sentence per subject. Each technique is given with the largest compression at
which it is as good as the dense network (`findings.reaches`) and the search cost of the network found there; where
their order could be chance, the sentence says so. The ablations, low-LR weight rewinding and reinitialization, stay out
of it. `drop_names`, `tolerance_words`, `direction_words`: what counts as a drop, and which way is better.
`reach_words`: how far a technique compresses. `contrast`: the first technique of an experiment against its rivals.
`criteria`: the lines of a conformance card.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rewound.conclusions.cells import Baseline, Cell, Line
from rewound.conclusions.comparison import BIAS, CURVE_BIAS, LEAST_INSIDE, QUIET, Card, Curve
from rewound.conclusions.findings import ABLATIONS, Reach, Reaches, best_over_time
from rewound.conclusions.rivals import LEAST_PAIRS, Difference, differences
from rewound.conclusions.tables import Row
from rewound.foundations.metric import Metric
from rewound.reports.look import LOOKS, looks, ratios


def headlines(
    cells: Iterable[Cell], dense: Mapping[str, Baseline], reached: Mapping[Line, Reaches]
) -> dict[tuple[str, str], str]:
    """The sentence of every subject: of its iterative runs, where it has any.

    >>> from rewound.conclusions.findings import priced, reaches
    >>> line, dense = Line("digits", "unstructured", True, "lr-rewinding"), {"digits": Baseline(0.9, 0.0, 1)}
    >>> tests = {0.5: 0.91, 0.25: 0.9, 0.125: 0.8}
    >>> cells = priced((Cell(line, d, 16, (test,), (test,)) for d, test in tests.items()), {"digits": 16})
    >>> headlines(cells, dense, reaches(cells, dense))["digits", "unstructured"]
    'Pruned iteratively, learning rate rewinding keeps dense accuracy to 4.00× for 32 epochs of search.'
    """
    best: dict[Line, list[Cell]] = defaultdict(list)
    for cell in best_over_time(cells):
        if cell.density < 1:
            best[cell.line].append(cell)
    groups: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in best:
        groups[line.subject].append(line)
    sentences = {}
    for key, lines in groups.items():
        mode = [line for line in lines if line.iterative] or lines
        rivals = [line for line in mode if line.technique not in ABLATIONS] or mode
        sentences[key] = _sentence({line: (reached[line], best[line]) for line in rivals}, dense[key[0]])
    return sentences


def _sentence(lines: dict[Line, tuple[Reaches, list[Cell]]], dense: Baseline) -> str:
    names = {name: _inside(name, look.label) for name, look in looks(line.technique for line in lines).items()}
    order = list(names)
    cells = [cell for _, best in lines.values() for cell in best]
    shown = ratios(cell.density for cell in cells)
    how = "Pruned iteratively" if next(iter(lines)).iterative else "Pruned in one shot"
    reached = {line: reach.no_drop for line, (reach, _) in lines.items()}
    kept = [(line, reach.compression) for line, reach in reached.items() if reach.compression is not None]
    if not kept:
        return _no_one(cells, names, shown, how, dense)
    parts: list[str] = []
    for line, no_drop in sorted(kept, key=lambda pair: (-pair[1], order.index(pair[0].technique))):
        reach, best = lines[line]
        cell = next(cell for cell in best if cell.compression == no_drop)
        first = not parts
        text = f"{names[line.technique]} {f'keeps dense {dense.metric.name} ' if first else ''}to "
        text += f"{'at least ' if no_drop == reach.tried else ''}{shown[cell.density]}"
        parts.append(f"{text} for {cell.search_epochs:,.6g}{' epochs of search' if first else ''}")
    lost = [names[line.technique] for line in lines if line not in dict(kept)]
    ending = f"; {_listed(lost)} at no compression tried" if lost else ""
    doubt = (
        " This order may be chance: it changes if results move by one standard error."
        if _is_doubtful(list(reached.values()))
        else ""
    )
    return f"{how}, {', '.join(parts)}{ending}.{doubt}"


def _is_doubtful(reached: list[Reach]) -> bool:
    """Whether one that is behind could be ahead, if its deltas were a standard error higher or the other's lower."""
    known = [(reach.compression or 0, *(bound or 0 for bound in reach.range)) for reach in reached if reach.range]
    pairs = [(ahead, behind) for ahead in known for behind in known if ahead[0] > behind[0]]
    return any(behind[2] > ahead[0] or ahead[1] < behind[0] for ahead, behind in pairs)


def _no_one(cells: list[Cell], names: dict[str, str], shown: dict[float, str], how: str, dense: Baseline) -> str:
    mildest = max(cell.density for cell in cells)
    best = max((cell for cell in cells if cell.density == mildest), key=lambda cell: dense.delta(cell.median))
    delta = dense.delta(best.median)
    away = f"at {dense.signed(delta).replace('-', '−')} {dense.unit}"
    if not dense.metric.higher_is_better:
        away = f"{-delta:.{dense.digits}f} {dense.unit} above it"
    return (
        f"{how}, no technique keeps dense {dense.metric.name} at {shown[mildest]}, the smallest compression tried; "
        f"{names[best.line.technique]} comes closest, {away}."
    )


def _inside(name: str, label: str) -> str:
    """A label within a sentence; a technique of somebody's own keeps its name."""
    return label[:1].lower() + label[1:] if name in LOOKS and name not in ABLATIONS else label


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


class ReachWords(NamedTuple):
    """A reach as it is read; `range` is empty where it is unknown."""

    ratio: str
    range: str


def drop_names(metric: Metric) -> tuple[str, str]:
    """What the two limits are called: no drop, and that of `Baseline.named_drop`; where lower is better, a rise.

    >>> drop_names(Metric()), drop_names(Metric("BLEU", "BLEU")), drop_names(Metric("loss", "nats", False))
    (('no drop', '1% drop'), ('no drop', '1 BLEU drop'), ('no rise', '1% rise'))
    """
    if metric.higher_is_better:
        return "no drop", "1 BLEU drop" if metric.unit == "BLEU" else "1% drop"
    # "1%" of an error could be taken for a hundredth of it.
    one = f"1 {metric.shown_unit.removesuffix('s')}" if metric.ends_at_hundred else "1%"
    return "no rise", f"{one} rise"


def tolerance_words(dense: Baseline) -> str:
    """What the two limits tolerate.

    >>> tolerance_words(Baseline(0.93, 0.002, 3))
    '“no drop” tolerates one standard deviation of its 3 runs, 0.20; “1% drop” one point'
    >>> tolerance_words(Baseline(0.25, 0.001, 3, Metric("loss", "nats", False))).split("; ")[1]
    '“1% rise” one percent of its loss, 0.0025 nats'
    """
    no_drop, one_drop = drop_names(dense.metric)
    runs = f"one standard deviation of its {dense.n} runs, {dense.spread:.{dense.digits}f}"
    one = f"one {dense.unit.removesuffix('s')}"
    if not dense.metric.ends_at_hundred:
        one = f"one percent of its {dense.metric.name}, {dense.named_drop:.{dense.digits}f} {dense.unit}"
    none = "nothing, as there is one run and its spread is unknown"
    return f"“{no_drop}” tolerates {runs if dense.n > 1 else none}; “{one_drop}” {one}"


def direction_words(metric: Metric) -> str:
    """What is to be said where lower is better: a sentence, with a space before it; else nothing.

    >>> direction_words(Metric("loss", "nats", higher_is_better=False))
    ' A lower loss is better: a delta is the dense value minus the pruned one, so that a negative delta is worse.'
    """
    if metric.higher_is_better:
        return ""
    why = "a delta is the dense value minus the pruned one, so that a negative delta is worse"
    return f" A lower {metric.name} is better: {why}."


def delta_label(metric: Metric) -> str:
    """The name of an axis of deltas, on which higher up is better.

    >>> delta_label(Metric()), delta_label(Metric("BLEU", "BLEU")), delta_label(Metric("loss", "nats", False))
    ('Δ accuracy (points)', 'Δ BLEU', '−Δ loss (nats)')
    """
    unit = f" ({metric.shown_unit})" if metric.shown_unit != metric.name else ""
    return f"{'' if metric.higher_is_better else '−'}Δ {metric.name}{unit}"


def against(metric: Metric) -> str:
    """What stands between two techniques whose difference follows; it is positive where the first is better."""
    return "minus" if metric.higher_is_better else "better than"


def reach_words(reach: Reach, tried: float, labels: Mapping[float, str]) -> ReachWords:
    """The words of a reach, of a technique that was `tried` up to this compression; `labels` are those of compressions.

    >>> reach_words(Reach(4, (None, 10), 16), tried=10, labels={4: "4.00×", 10: "10.00×"})
    ReachWords(ratio='4.00×', range='none–≥10.00×')
    """

    def ratio(compression: float | None) -> str:
        if compression is None:
            return "none"
        return f"{'≥' if compression == tried else ''}{labels[compression]}"

    ends = dict.fromkeys(map(ratio, reach.range or ()))
    return ReachWords(ratio(reach.compression), "–".join(ends).replace("×–", "–"))


@dataclass(frozen=True)
class Contrast:
    """How much better one technique is than others, by technique and density."""

    first: str
    over: Mapping[str, Mapping[float, Difference]]

    @cached_property
    def all(self) -> list[Difference]:
        """Every difference."""
        return [difference for column in self.over.values() for difference in column.values()]

    @property
    def densities(self) -> list[float]:
        """Where there is a difference, mildest pruning first."""
        return sorted({difference.cell.density for difference in self.all}, reverse=True)

    @property
    def method_note(self) -> str:
        """How the differences were taken."""
        paired = {True: "paired by their dense network", False: "not paired"}
        notes = [paired[flag] for flag in sorted({difference.paired for difference in self.all})]
        few = any(difference.df is None for difference in self.all)
        needs = f"; an interval needs {LEAST_PAIRS} pairs" if few else ""
        return f"Differences of mean test values, {', '.join(notes)}{needs}."

    @property
    def brackets(self) -> str:
        """What stands in brackets where differences are written."""
        spread = {True: "[ ] 95% t interval", False: "( ) least and largest difference"}
        kinds = sorted({difference.df is not None for difference in self.all})
        return f"{', '.join(spread[flag] for flag in kinds)}."


def contrast(rows: Iterable[Row], techniques: Sequence[str]) -> Contrast | None:
    """The first of these techniques against the others, ablations apart; `rows` are of one experiment, and dense ones.

    >>> rows = [
    ...     Row("digits", "unstructured", True, technique, 0.1, 16, trial, test, test)
    ...     for technique, test in (("lr-rewinding", 0.92), ("fine-tuning", 0.90)) for trial in (1, 2)
    ... ]
    >>> found = contrast(rows, ["lr-rewinding", "fine-tuning"])
    >>> found.first, list(found.over), found.densities
    ('lr-rewinding', ['fine-tuning'], [0.1])
    """
    rivals = [name for name in techniques if name not in ABLATIONS]
    if len(rivals) < 2:
        return None
    first, *others = rivals
    rows = list(rows)
    over = {other: {found.cell.density: found for found in differences(rows, first, other)} for other in others}
    return Contrast(first, over) if any(over.values()) else None


_VERDICTS = {True: "conforms", False: "does not conform", None: "no criterion fails, but not all could be judged"}


class Criterion(NamedTuple):
    """One line of a card; `passed` is None where the tables share nothing to judge by."""

    name: str
    n: str
    found: str
    limit: str
    passed: bool | None


def verdict(card: Card) -> str:
    """Whether ours is a replica of theirs."""
    return _VERDICTS[card.conforms]


def criteria(card: Card) -> Iterator[Criterion]:
    """What was asked of the tables, and what they answer."""
    if dense := card.dense:
        found = f"{dense.ours:.2f} against {dense.theirs:.2f}: {signed(dense.difference)}"
        yield Criterion("(i) dense mean", f"{dense.n}, {dense.m}", found, f"±{dense.margin:.2f}", dense.inside)
    else:
        yield Criterion("(i) dense mean", "", "not in both tables", "", None)
    if card.bias is None:
        yield Criterion("(ii) cells, (iii) curves", "", "none in both tables", "", None)
        return
    inside, n = sum(cell.inside for cell in card.cells), len(card.cells)
    found, limit = f"{inside:,} ({100 * inside / n:.0f}%)", f"{100 * LEAST_INSIDE:.0f}%"
    yield Criterion("(ii) cells inside", f"{n:,}", found, limit, card.cells_conform)
    if judged := [curve for curve in card.curves if curve.judged]:
        worst = max(judged, key=lambda curve: abs(curve.bias))
        found, limit = signed(worst.bias), f"±{CURVE_BIAS}"
        yield Criterion("(iii) largest bias of a curve", f"{len(judged)}", found, limit, worst.inside)
    passed = abs(card.bias) <= BIAS
    yield Criterion("(iii) bias of all cells", f"{n:,}", signed(card.bias), f"±{BIAS}", passed)


def measure_words(card: Card) -> str:
    """What the numbers of a card are."""
    return f"In {card.unit}{',' if card.unit.startswith('%') else ''} of {card.measure}, means over trials."


def note(curve: Curve) -> str:
    """What is to be said about the bias of a curve."""
    if not curve.judged:
        return "not judged: a control whose trials scatter"
    return "" if curve.inside else f"beyond ±{CURVE_BIAS}"


def remarks(card: Card) -> str:
    """What was not compared, and whether the limits fit; empty where there is nothing to say."""
    noisy = card.noise > QUIET
    fit = f"Limits are for trials that differ by 0.2 to 0.4 {card.unit}; here {card.noise:.1f}: replicas may miss them."
    return " ".join(part for part in (_left_out(card), fit if noisy else "") if part)


def _left_out(card: Card) -> str:
    counts = {"of our cells": card.alone[0], "of their cells": card.alone[1]}
    counts |= {"failed of our runs": card.failed[0], "failed of their runs": card.failed[1]}
    left = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    return f"Not compared: {left}." if left else ""


def signed(value: float) -> str:
    """A difference, with two digits."""
    return f"{value:+z.2f}"
