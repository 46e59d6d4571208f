"""What a report says first: one sentence per subject, computed from its table.

Each technique is given with the largest compression at which it keeps dense accuracy (`trust.reaches`) and the search
cost of the network found there; where their order could be chance, that is said. The ablations, low-LR weight
rewinding and reinitialization, stay out of it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from rewound.conclusions.baseline import Baseline, baselines
from rewound.conclusions.cell import Cell, Line, cells
from rewound.conclusions.findings import ABLATIONS, best_over_time, longest_times
from rewound.conclusions.trust import Reach, Reaches, reaches
from rewound.pages.look import LOOKS, looks, ratios
from rewound.tables.results import Row


def headlines(rows: Iterable[Row], reached: Mapping[Line, Reaches] | None = None) -> dict[tuple[str, str], str]:
    """The sentence of every subject: of its iterative runs, where it has any.

    `reached` is `reaches(rows)`, if it is known already.

    >>> rows = [Row("digits", "", False, "", 1, None, 1, 0.9, 0.9)]
    >>> line = ("digits", "unstructured", True, "lr-rewinding")
    >>> rows += [Row(*line, d, 16, 1, test, test) for d, test in ((0.5, 0.91), (0.25, 0.9), (0.125, 0.8))]
    >>> headlines(rows)["digits", "unstructured"]
    'Pruned iteratively, learning rate rewinding keeps dense accuracy to 4.00× for 32 epochs of search.'
    """
    rows = list(rows)
    dense, found = baselines(rows), reaches(rows) if reached is None else reached
    best: dict[Line, list[Cell]] = defaultdict(list)
    for cell in best_over_time(priced(cells(rows))):
        if cell.density < 1:
            best[cell.line].append(cell)
    groups: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in best:
        groups[line.subject].append(line)
    said = {}
    for key, lines in groups.items():
        mode = [line for line in lines if line.iterative] or lines
        rivals = [line for line in mode if line.technique not in ABLATIONS] or mode
        said[key] = _sentence({line: (found[line], best[line]) for line in rivals}, dense[key[0]])
    return said


def priced(made: Iterable[Cell]) -> list[Cell]:
    """The cells with their search cost, by the paper's rule where the table does not know it.

    Each level costs t epochs, or T + t for reinitialization; the levels of an iterative run are its line's densities.

    >>> line = Line("digits", "unstructured", True, "fine-tuning")
    >>> [cell.search_epochs for cell in priced(Cell(line, d, 8, (0.9,), (0.9,)) for d in (0.8, 0.64))]
    [8, 16]
    """
    made = list(made)
    longest = longest_times(made)
    densities: dict[Line, set[float]] = defaultdict(set)
    for cell in made:
        densities[cell.line].add(cell.density)

    def cost(cell: Cell) -> float:
        again = longest[cell.line.recipe] if cell.line.technique == "reinitialization" else 0
        levels = sum(density >= cell.density for density in densities[cell.line]) if cell.line.iterative else 1
        return (again + cell.retrain_epochs) * levels

    return [cell if cell.search_epochs is not None else replace(cell, search_epochs=cost(cell)) for cell in made]


def _sentence(lines: dict[Line, tuple[Reaches, list[Cell]]], dense: Baseline) -> str:
    names = {name: _inside(name, look.label) for name, look in looks(line.technique for line in lines).items()}
    order = list(names)
    made = [cell for _, best in lines.values() for cell in best]
    shown = ratios(cell.density for cell in made)
    how = "Pruned iteratively" if next(iter(lines)).iterative else "Pruned in one shot"
    reached = {line: reach.no_drop for line, (reach, _) in lines.items()}
    kept = [(line, reach.compression) for line, reach in reached.items() if reach.compression is not None]
    if not kept:
        return _no_one(made, names, shown, how, dense)
    parts: list[str] = []
    for line, no_drop in sorted(kept, key=lambda pair: (-pair[1], order.index(pair[0].technique))):
        reach, best = lines[line]
        cell = next(cell for cell in best if cell.compression == no_drop)
        first = not parts
        text = f"{names[line.technique]} {f'keeps dense {dense.metric} ' if first else ''}to "
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


def _no_one(made: list[Cell], names: dict[str, str], shown: dict[float, str], how: str, dense: Baseline) -> str:
    mildest = max(cell.density for cell in made)
    best = max((cell for cell in made if cell.density == mildest), key=lambda cell: cell.median)
    delta = f"{dense.delta(best.median):+.2f}".replace("-", "−")
    return (
        f"{how}, no technique keeps dense {dense.metric} at {shown[mildest]}, the smallest compression tried; "
        f"{names[best.line.technique]} comes closest, at {delta} {dense.unit}."
    )


def _inside(name: str, label: str) -> str:
    """A label within a sentence; a technique of somebody's own keeps its name."""
    return label[:1].lower() + label[1:] if name in LOOKS and name not in ABLATIONS else label


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
