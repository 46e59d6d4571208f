"""The conformance card of a recipe as JSON for the page: criteria in words, curves, and cells as columns."""

from collections.abc import Callable

from rewound.conclusions.conformance import Card, Compared, Curve
from rewound.pages.jsondata import Json
from rewound.presentation.criteria import criteria, note, remarks, verdict
from rewound.presentation.look import ratios


def told_card(card: Card) -> Json:
    """A card; every cell names its curve by number, and has the two digits that the terminal shows."""
    return {
        "verdict": verdict(card),
        "measure": f"In {card.unit} of {card.measure}, means over trials.",
        "criteria": [criterion._asdict() for criterion in criteria(card)],
        "curves": [_curve(curve) for curve in card.curves],
        "cells": _cells(card),
        "remarks": remarks(card),
    }


def _curve(curve: Curve) -> Json:
    counts = {"cells": len(curve.cells), "outside": sum(not cell.inside for cell in curve.cells)}
    line = {"technique": curve.line.technique, "iterative": curve.line.iterative, "pruning": curve.line.pruning}
    return {**line, **counts, "bias": _shown(curve.bias), "note": note(curve)}


def _cells(card: Card) -> Json:
    labels = [ratios(cell.density for cell in curve.cells) for curve in card.curves]

    def column(value: Callable[[Compared], float]) -> list[float]:
        return [_shown(value(cell)) for cell in card.cells]

    return {
        "curve": [number for number, curve in enumerate(card.curves) for _ in curve.cells],
        "ratio": [own[cell.density] for own, curve in zip(labels, card.curves, strict=True) for cell in curve.cells],
        "t": [cell.retrain_epochs for cell in card.cells],
        "ours": column(lambda cell: cell.ours),
        "n": [cell.n for cell in card.cells],
        "theirs": column(lambda cell: cell.theirs),
        "low": column(lambda cell: cell.low),
        "high": column(lambda cell: cell.high),
        "m": [cell.m for cell in card.cells],
        "difference": column(lambda cell: cell.difference),
        "margin": column(lambda cell: cell.margin),
        "inside": [int(cell.inside) for cell in card.cells],
    }


def _shown(value: float) -> float:
    return round(value, 2) + 0.0  # adding 0 turns -0.0 into 0
