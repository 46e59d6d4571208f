"""Where a report comes from: which table, computed with what, and the commands that compute it again."""

import hashlib
import shlex
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from rewound import __version__
from rewound.compression import DEFAULT_STORE
from rewound.pages.page import Origin
from rewound.results import Row
from rewound.store import Store
from rewound.sweep import Sweep, shipped_sweeps
from rewound.tables import Tables


def of_sweep(sweep: Sweep, store: Store, tables: Tables, results: Path) -> Origin:
    """The origin of a sweep's tables, of which `results` is the written one."""
    name = sweep.name if sweep.name in shipped_sweeps() else f"{sweep.name}.toml"
    where = [] if store.root == DEFAULT_STORE else ["--store", str(store.root)]
    missing = f", {tables.missing:,} to come" if tables.missing else ""
    facts = (
        ("Sweep", sweep.name),
        ("Rows", f"{len(tables.rows):,}{missing}"),
        *_made(tables.rows, store),
        *_written(results),
    )
    again, show = shlex.join(["rewound", "run", name, *where]), shlex.join(["rewound", "show", *where])
    return Origin(sweep.name, facts, again, show)


def of_tables(title: str, rows: list[Row], results: Path) -> Origin:
    """The origin of rows that came from anywhere."""
    return Origin(title, (("Tables", title), ("Rows", f"{len(rows):,}"), *_written(results)))


def _made(rows: list[Row], store: Store) -> list[tuple[str, str]]:
    """What the runs were computed with, as their results say; more than one value is counted."""
    seen: dict[str, Counter[str]] = {}
    for key in dict.fromkeys(row.key for row in rows):
        result = store.result(key)
        for name, value in result["made"].items() if result else ():
            seen.setdefault(name, Counter())[value] += 1
    names = {"source": "Source of the recipe", "torch": "PyTorch", "python": "Python", "device": "Device"}
    return [
        (
            names.get(name, name),
            ", ".join(f"{value} ({n} runs)" if len(counts) > 1 else value for value, n in counts.items()),
        )
        for name, counts in seen.items()
    ]


def _written(results: Path) -> list[tuple[str, str]]:
    digest = hashlib.sha256(results.read_bytes()).hexdigest()
    return [
        (f"SHA-256 of {results.name}", digest[:16]),
        ("Report", f"rewound {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
    ]
