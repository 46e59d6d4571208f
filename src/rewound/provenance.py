"""Where the tables of a sweep come from: computed with what, and the commands that compute them again."""

import shlex
from collections import Counter

from rewound.pages.page import Origin
from rewound.storage.records import DEFAULT_STORE
from rewound.storage.store import Store
from rewound.sweeps.declaration import Declaration
from rewound.tables.folder import Tables
from rewound.tables.results import Row


def of_sweep(declared: Declaration, store: Store, tables: Tables) -> Origin:
    """The origin of a sweep's tables."""
    where = [] if store.root == DEFAULT_STORE else ["--store", str(store.root)]
    missing = f", {tables.missing:,} to come" if tables.missing else ""
    facts = (("Sweep", declared.name), ("Rows", f"{len(tables.rows):,}{missing}"), *_made(tables.rows, store))
    again, show = shlex.join(["rewound", "run", declared.word, *where]), shlex.join(["rewound", "show", *where])
    return Origin(declared.name, facts, again, show)


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
