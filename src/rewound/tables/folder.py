"""The tables of an experiment: results.csv, layers.csv and curves.csv."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rewound.tables.results import (
    CurveRow,
    LayerRow,
    Row,
    read_curves,
    read_layers,
    write_curves,
    write_layers,
    write_rows,
)

Detail = TypeVar("Detail", LayerRow, CurveRow)


@dataclass(frozen=True)
class Tables:
    """The three of them; what was asked for and has no result yet is left out and counted."""

    rows: list[Row]
    layers: list[LayerRow] = field(default_factory=list)
    curves: list[CurveRow] = field(default_factory=list)
    missing: int = 0

    def write(self, folder: Path) -> list[Path]:
        """Write them as CSV; only results.csv where nothing is known of layers and curves."""
        paths = [folder / f"{name}.csv" for name in ("results", "layers", "curves")]
        write_rows(self.rows, paths[0])
        if not self.layers and not self.curves:
            return paths[:1]
        write_layers(self.layers, paths[1])
        write_curves(self.curves, paths[2])
        return paths


def with_details(rows: list[Row], folder: Path) -> Tables:
    """The tables of these rows, with what layers.csv and curves.csv of a folder, where there are any, say of them."""
    keys = {row.key for row in rows if row.key}

    def details(read: Callable[[Path], Sequence[Detail]], path: Path) -> list[Detail]:
        return [detail for detail in read(path) if detail.key in keys] if keys and path.exists() else []

    return Tables(rows, details(read_layers, folder / "layers.csv"), details(read_curves, folder / "curves.csv"))
