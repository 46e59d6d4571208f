"""Sweeps of tiny networks: what is declared, how it is run, and what two stores are compared by."""

from dataclasses import replace

from rewound.conclusions.tables import CurveRow, LayerRow, Row, Tables
from rewound.experiments.executors import local
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import plan
from rewound.experiments.sweeps.sweep import Sweep, parse_sweep
from rewound.experiments.sweeps.targets import Target
from rewound.states.storage.store import Store
from sameness import assert_same

FINE_TUNING = {"technique": "fine-tuning", "retrain-epochs": [1, 2], "density": 0.5}
ITERATIVE = {"technique": "weight-rewinding", "retrain-epochs": 1, "levels": {"keep": 0.5, "count": 2}}
EVERYTHING = (
    {
        "technique": ["fine-tuning", "weight-rewinding", "lr-rewinding", "low-lr-weight-rewinding", "reinitialization"],
        "retrain-epochs": [1, 2],
        "density": 0.5,
    },
    ITERATIVE,
)


def sweep_of(*experiments: dict[str, object], recipe: str = "Tiny", trials: tuple[int, ...] = (1,)) -> Sweep:
    table = {"recipe": f"tiny:{recipe}", "trials": list(trials), "experiment": list(experiments)}
    return parse_sweep(table, "tiny")


def targets_of(sweep: Sweep, **labels: object) -> list[Target]:
    return [t for t in sweep.targets if all(getattr(t, name) == value for name, value in labels.items())]


def run(sweep: Sweep, store: Store, *, keep_all: bool = False, jobs: int = 1) -> list[str]:
    """Run it; returns what was said."""
    said: list[str] = []
    local.run(plan(sweep.targets), store, Options(jobs=jobs, keep_all=keep_all), say=said.append)
    return said


def states(store: Store) -> set[str]:
    return {path.stem for path in store.root.glob("states/*/*.safetensors")}


def timeless(tables: Tables) -> tuple[list[Row], list[LayerRow], list[CurveRow], int]:
    return [replace(row, seconds=None) for row in tables.rows], tables.layers, tables.curves, tables.missing


def values(tables: Tables) -> list[tuple[object, ...]]:
    """What was measured of each row."""
    return [(row.key, row.val, row.test, row.flops) for row in tables.rows]


def assert_same_tensors(one: Store, other: Store) -> None:
    assert states(one) == states(other)
    for key in states(one):
        mine, yours = one.load(key, to_train=False), other.load(key, to_train=False)
        assert mine is not None
        assert yours is not None
        assert_same(mine.state, yours.state)
