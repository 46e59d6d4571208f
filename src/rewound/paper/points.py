"""The numbers behind figures as a table, `points.csv`: one line for each point that is drawn.

`table` says whether it is ours, of a compared table, or published as a black dot, whose technique is the work that it
comes from; its low and high are those of its error bar, if it has one.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from rewound.paper.panels import Panel
from rewound.tables.csvfiles import write_table

COLUMNS: Final = (
    *("figure", "recipe", "pruning", "iterative", "technique", "density", "retrain_epochs"),
    *("unit", "median", "low", "high", "trials", "table"),
)


def write_points(panels: Iterable[tuple[str, Panel]], path: Path) -> Path:
    """Write the points of panels, each with the name of its figure."""
    write_table(COLUMNS, ([figure, *line] for figure, panel in panels for line in _lines(panel)), path)
    return path


def _lines(panel: Panel) -> Iterator[list[str]]:
    where = panel.measured
    experiment = [where.recipe, where.pruning, str(int(where.iterative))]
    unit = "ratio" if panel.y == "speed-up" else where.baseline.unit
    for table, curves in (("ours", panel.curves), ("compared", panel.theirs)):
        for technique, point in ((technique, point) for technique, curve in curves.items() for point in curve):
            at = [technique, f"{point.density:.10g}", f"{point.retrain_epochs:g}", unit]
            spread = (_text(value) for value in (point.median, point.low, point.high))
            yield [*experiment, *at, *spread, str(point.trials), table]
    for dot in panel.published:
        at = [dot.source, f"{dot.density:.10g}", "" if dot.epochs is None else f"{dot.epochs:g}", unit]
        bar = ["", ""] if dot.error is None else [_text(dot.delta - dot.error), _text(dot.delta + dot.error)]
        yield [*experiment, *at, _text(dot.delta), *bar, "", "published"]


def _text(value: float) -> str:
    return f"{value:z.4f}"
