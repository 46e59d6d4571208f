"""The tables and figures of techniques.md, from the results that the paper's authors published.

    python docs/published.py published-pruned.csv.gz published-dense.csv.gz

prints the rows of the tables and draws the figures into this folder. The files are the authors' tables, one row per
network, in the columns of results.csv.
"""

import sys
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from shutil import copy
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import NamedTuple

from rewound.conclusions.cells import Cell, baselines, cells
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.paper.networks import METRICS
from rewound.conclusions.tables import Row, Tables, read_rows
from rewound.reports.figures import Drawing, draw_figures
from rewound.reports.look import SAFE_ZONE


class Network(NamedTuple):
    """A network of the paper: T, the retraining time nearest to half of it, and the longest up to 90% of it."""

    recipe: str
    name: str
    full: float
    half: float
    most: float


# The authors retrained the CIFAR-10 networks for 10, 30, ..., 170 and 182 epochs.
NETWORKS = (
    Network("cifar10-resnet20", "ResNet-20, CIFAR-10", 182, 90, 150),
    Network("cifar10-resnet56", "ResNet-56, CIFAR-10", 182, 90, 150),
    Network("cifar10-resnet110", "ResNet-110, CIFAR-10", 182, 90, 150),
    Network("imagenet-resnet50", "ResNet-50, ImageNet", 90, 45, 81),
    Network("wmt16-gnmt", "GNMT, WMT16 (BLEU)", 5, 2.5, 4.5),
)


def techniques_table(rows: list[Row]) -> Iterator[str]:
    """Three techniques at 5.96x: median test minus mean dense, one-shot / iterative; then weights rewound to W_0."""
    dense, made = baselines(rows), [cell for cell in cells(rows) if 5.9 < cell.compression < 6]

    def delta(network: Network, technique: str, t: float, *, iterative: bool) -> str:
        (cell,) = (c for c in _of(made, network, technique, iterative) if c.retrain_epochs == t)
        return signed(dense[network.recipe].delta(cell.median))

    for network in NETWORKS:
        times = {"lr-rewinding": network.full, "weight-rewinding": network.most, "fine-tuning": network.full}
        pairs = [
            f"{delta(network, technique, t, iterative=False)} / {delta(network, technique, t, iterative=True)}"
            for technique, t in times.items()
        ]
        yield row(network.name, *pairs, delta(network, "weight-rewinding", network.full, iterative=False))


def times_table(rows: list[Row]) -> Iterator[str]:
    """LR rewinding for half of T minus for all of T: mean over trials and the five ratios from 3.8x to 9.3x."""
    dense, made = baselines(rows), [cell for cell in cells(rows) if 3.8 < cell.compression < 9.32]

    def loss(network: Network, *, iterative: bool) -> float:
        mine = _of(made, network, "lr-rewinding", iterative)
        means = {(cell.density, cell.retrain_epochs): fmean(cell.tests) for cell in mine}
        return fmean(means[d, network.half] - means[d, network.full] for d, _ in means) * dense[network.recipe].scale

    for network in NETWORKS:
        losses = (loss(network, iterative=iterative) for iterative in (False, True))
        yield row(network.name, f"{network.half:g} of {network.full:g}", *map(signed, losses))


def shortfalls_table(rows: list[Row]) -> Iterator[str]:
    """Where rewinding within the safe zone is below fine-tuning for the same time in all trials: how often, how far."""
    found: dict[tuple[str, ...], list[float]] = {}
    for network, cell, rival, difference in in_the_safe_zone(rows):
        if cell.high < rival.low:
            way = "iterative" if cell.line.iterative else "one-shot"
            found.setdefault((network.name, cell.line.technique, way), []).append(difference)
    for setting, differences in found.items():
        yield row(*setting, str(len(differences)), signed(min(differences)))


def in_the_safe_zone(rows: list[Row]) -> Iterator[tuple[Network, Cell, Cell, float]]:
    """Cells of rewinding with those of fine-tuning for the same time, and the differences of their medians."""
    dense, made = baselines(rows), cells(rows)
    for network, technique, iterative in product(NETWORKS, ("lr-rewinding", "weight-rewinding"), (False, True)):
        low, high = (share * network.full for share in SAFE_ZONE)
        rivals = {(c.density, c.retrain_epochs): c for c in _of(made, network, "fine-tuning", iterative)}
        for cell in _of(made, network, technique, iterative):
            if low <= cell.retrain_epochs <= high:
                rival = rivals[cell.density, cell.retrain_epochs]
                yield network, cell, rival, (cell.median - rival.median) * dense[network.recipe].scale


def _of(made: list[Cell], network: Network, technique: str, iterative: bool) -> list[Cell]:
    return [cell for cell in made if cell.line == (network.recipe, "unstructured", iterative, technique)]


def row(*entries: str) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(entries)} |"


def signed(value: float) -> str:
    """Two decimals with a sign, as print has it."""
    return f"{round(value, 2) + 0.0:+.2f}".replace("-", "−")


def figures(rows: Iterable[Row], out: Path) -> None:
    """Algorithm 1 on ResNet-50, and its one-shot curves against retraining time at two compression ratios."""
    mine = [row for row in rows if row.recipe == "imagenet-resnet50"]
    dense = [row for row in mine if row.dense]
    iterative = [row for row in mine if row.iterative]
    two_ratios = [row for row in mine if not row.iterative and round(1 / row.density, 2) in (3.05, 5.96)]
    for name, pruned in (("algorithm-1", iterative), ("times", two_ratios)):
        with TemporaryDirectory() as folder:
            evidence, asked = Evidence(Tables(dense + pruned)), Drawing(formats=("svg",))
            drawn = {path.stem: path for path in draw_figures(evidence, Path(folder), print, asked)}
            copy(drawn[f"imagenet-resnet50-unstructured-{name}"], out / f"published-{name}.svg")


if __name__ == "__main__":
    published = [row for path in sys.argv[1:] for row in read_rows(Path(path), METRICS)]
    print(*techniques_table(published), "", *times_table(published), "", *shortfalls_table(published), sep="\n")
    figures(published, Path(__file__).parent)
