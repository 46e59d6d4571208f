"""A conformance card in words, the same in the terminal and on the page."""

from collections.abc import Iterator
from typing import NamedTuple

from rewound.conclusions.conformance import BIAS, CURVE_BIAS, LEAST_INSIDE, QUIET, Card, Curve

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
