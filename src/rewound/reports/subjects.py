"""What a report is about: subjects, each one recipe under one way of pruning, with all that is concluded of it.

A subject has one recipe, and so one unit: no figure or table has values in two units.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rewound.conclusions.cells import Baseline, Cell, Line, Setting, baselines, cells, setting_of
from rewound.conclusions.comparison import overlay
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.findings import Reaches, Speedup, best_over_time, over_dense, over_fine_tuning, priced, reaches
from rewound.conclusions.tables import Row, is_structured
from rewound.reports.look import looks
from rewound.reports.words import Contrast, contrast, headlines


@dataclass(frozen=True)
class Subject:
    """One recipe under one way of pruning.

    `settings` are in the order of the table and include those of which every trial failed; `cells` do not.
    """

    recipe: str
    pruning: str
    sentence: str
    epochs: float
    baseline: Baseline
    rows: Sequence[Row]
    settings: Sequence[Setting]
    cells: Mapping[Setting, Cell]
    best: Sequence[Cell]
    reaches: Mapping[Line, Reaches]
    speed: Sequence[Speedup]
    """Over the dense network."""
    faster: Sequence[Speedup]
    """Over fine-tuning."""
    contrasts: Mapping[bool, Contrast]
    """The techniques against one another, one-shot (False) and iterative (True)."""
    theirs: Mapping[Setting, Cell]
    """What a compared table has of these settings, on our scale."""

    @cached_property
    def number(self) -> dict[Setting, int]:
        """The place of every setting."""
        return {setting: place for place, setting in enumerate(self.settings)}

    @property
    def modes(self) -> list[bool]:
        """Whether it has one-shot (False) and iterative (True) runs, in this order."""
        return sorted({setting.line.iterative for setting in self.settings})


def subjects(evidence: Evidence) -> list[Subject]:
    """The subjects of a table by name, unstructured pruning first; a recipe with dense networks only comes last."""
    rows = sorted(map(_finite, evidence.rows), key=_order)
    dense, finished = baselines(rows), priced(cells(rows), evidence.epochs)
    reached = reaches(finished, dense)
    sentences = headlines(finished, dense, reached)
    speed, faster = over_dense(rows), over_fine_tuning(rows)
    overlaid = cells(overlay(rows, map(_finite, evidence.theirs))) if evidence.theirs else []
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    originals: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        (originals[row.recipe] if row.dense else groups[row.recipe, row.pruning]).append(row)
    for recipe in originals.keys() - {recipe for recipe, _ in groups}:
        groups[recipe, ""] = []
    found = []
    for name, group in sorted(groups.items(), key=lambda item: (not item[1], *_place(*item[0]))):
        recipe, pruning = name
        own = [cell for cell in finished if cell.line.subject == name]
        reach = {line: reach for line, reach in reached.items() if line.subject == name}
        found.append(
            Subject(
                recipe=recipe,
                pruning=pruning,
                sentence=sentences.get(name, "Nothing is pruned yet: there are only dense networks."),
                epochs=evidence.epochs[recipe],
                baseline=dense[recipe],
                rows=[*group, *originals[recipe]],
                settings=list(dict.fromkeys(place for row in group if (place := setting_of(row)) is not None)),
                cells={cell.setting: cell for cell in own},
                best=best_over_time(own),
                reaches=reach,
                speed=[each for each in speed if each.line.subject == name],
                faster=[each for each in faster if each.line.subject == name],
                contrasts=_contrasts(group, originals[recipe], reach),
                theirs={cell.setting: cell for cell in overlaid if cell.line.subject == name},
            )
        )
    return found


def _contrasts(pruned: Iterable[Row], dense: Sequence[Row], lines: Iterable[Line]) -> dict[bool, Contrast]:
    modes: dict[bool, list[Row]] = defaultdict(list)
    for row in pruned:
        modes[row.iterative].append(row)
    found = {}
    for mode, rows in sorted(modes.items()):
        techniques = looks(line.technique for line in lines if line.iterative == mode)
        if contrasted := contrast([*rows, *dense], list(techniques)):
            found[mode] = contrasted
    return found


def _place(recipe: str, pruning: str) -> tuple[bool, list[tuple[float, str]], str]:
    """Names in a person's order: resnet20 before resnet110, and a rate of 0.05 before one of 0.2."""
    number = re.compile(r"(\d+(?:\.\d+)?)")
    parts = [(float(part), "") if number.fullmatch(part) else (-1.0, part) for part in number.split(recipe)]
    return is_structured(pruning), parts, pruning


def _order(row: Row) -> tuple[bool, str, float, float, int]:
    return row.iterative, row.technique, -row.density, row.retrain_epochs or 0, row.trial


def _finite(row: Row) -> Row:
    """A run whose values are not numbers has failed, whoever wrote the table."""
    values = (row.val, row.test)
    broken = any(value is not None and not math.isfinite(value) for value in values)
    return replace(row, val=None, test=None) if broken else row
