"""The tables of an experiment: results.csv, layers.csv and curves.csv."""

from dataclasses import dataclass
from pathlib import Path

from rewound.results import CurveRow, LayerRow, Row, write_curves, write_layers, write_rows


@dataclass(frozen=True)
class Tables:
    """The three of them; what was asked for and has no result yet is left out and counted."""

    rows: list[Row]
    layers: list[LayerRow]
    curves: list[CurveRow]
    missing: int

    def write(self, folder: Path) -> list[Path]:
        """Write them as CSV."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{name}.csv" for name in ("results", "layers", "curves")]
        write_rows(self.rows, paths[0])
        write_layers(self.layers, paths[1])
        write_curves(self.curves, paths[2])
        return paths
