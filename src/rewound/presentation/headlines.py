"""What a report says first: one sentence per subject, computed from its table.

Each technique is given with the largest compression at which it keeps dense accuracy (`trust.reaches`) and the search
cost of the network found there; where their order could be chance, that is said. The ablations, low-LR weight
rewinding and reinitialization, stay out of it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from rewound.conclusions.baseline import Baseline
from rewound.conclusions.cell import Cell, Line
from rewound.conclusions.findings import ABLATIONS, best_over_time
from rewound.conclusions.trust import Reach, Reaches
from rewound.presentation.look import LOOKS, looks, ratios


def headlines(
    cells: Iterable[Cell], dense: Mapping[str, Baseline], reached: Mapping[Line, Reaches]
) -> dict[tuple[str, str], str]:
    """The sentence of every subject: of its iterative runs, where it has any.

    >>> from rewound.conclusions.findings import priced
    >>> from rewound.conclusions.trust import reaches
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
    said = {}
    for key, lines in groups.items():
        mode = [line for line in lines if line.iterative] or lines
        rivals = [line for line in mode if line.technique not in ABLATIONS] or mode
        said[key] = _sentence({line: (reached[line], best[line]) for line in rivals}, dense[key[0]])
    return said


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
