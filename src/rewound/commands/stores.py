"""Commands on a store: `show`, `pack` and `unpack`."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table

from rewound.commands.console import console, say
from rewound.commands.named import found_result
from rewound.commands.sweeps import as_sweep, store_to_read
from rewound.experiments.plans import planning
from rewound.experiments.plans.outlook import unbound_note
from rewound.experiments.plans.remaining import pack_store
from rewound.foundations.errors import InputError
from rewound.foundations.quantities import sized, spoken
from rewound.foundations.wholefiles import writable_file
from rewound.method.pruning.counts import Counts
from rewound.states.storage.artifacts import Result
from rewound.states.storage.backend import Place
from rewound.states.storage.packs import read_packs, unpack_store
from rewound.states.storage.store import Store, is_store


def show_store(root: Place, key: str | None) -> None:
    """Print what is in a store, or everything known about one state."""
    again = shlex.join(["rewound", "run", "digits", "--store", str(root)])
    if not is_store(root):
        raise InputError(f"there is no store at {root}; make one with: {again}")
    store = Store(root, say)
    if key is None and not (store.finished() or store.drafts() or store.claims()):
        raise InputError(f"the store at {root} is empty; fill it, for example with: {again}")
    console.print(_overview(store) if key is None else _detail(store, key))


def pack_sweep(given: str, root: Place, out: Path, split_mb: int | None) -> None:
    """Bundle what is needed to continue elsewhere."""
    if split_mb is not None and split_mb < 1:
        raise InputError(f"--split-mb must be at least 1, not {split_mb}; leave it out for one file")
    sweep, again = as_sweep(given, root)
    plan, store = planning.plan(sweep.targets), store_to_read(sweep, root, again, say)
    for path in pack_store(plan, store, writable_file(out), split_mb * 2**20 if split_mb else None):
        say(f"{path} ({sized(path.stat().st_size)})")


def unpack_files(files: Sequence[Path], root: Place) -> None:
    """Merge packs into a store, which is not touched if one of them cannot be read."""
    for path in files:
        if not path.is_file():
            raise InputError(f"there is no file {path}; give the files that rewound pack wrote")
    merged = unpack_store(read_packs(files), Store(root, say))
    console.print(f"{merged.added} added, {merged.present} there already, {merged.damaged} damaged and left out")
    if merged.unbound:
        say(unbound_note(merged.unbound))


def _overview(store: Store) -> Group:
    results = [result for key in sorted(store.finished()) if (result := store.result(key))]
    table = Table("recipe", "states", "evaluated", "failed", "time", title=f"store {store.name}", title_justify="left")
    for recipe in sorted({result["recipe"] for result in results}):
        of_recipe = [result for result in results if result["recipe"] == recipe]
        took = spoken(sum(result["seconds"] for result in of_recipe))
        counts = (len(of_recipe), sum("test" in r for r in of_recipe), sum("failed" in r for r in of_recipe))
        table.add_row(recipe, *map(str, counts), took)
    under_way = ", ".join(f"{key[:12]} by {c.host_name}:{c.pid}" for key, c in store.claims().items()) or "nothing"
    interrupted = len(store.drafts() - store.claims().keys())
    rest = f"{sized(store.size())} of tensors; under way: {under_way}; to be resumed: {interrupted}"
    return Group(table, rest)


def _facts(result: Result) -> Iterator[tuple[str, str]]:
    yield "recipe", result["recipe"]
    if result["after"]:
        yield "continues", result["after"]
    yield "steps", f"{result['steps']:,}"
    yield "took", spoken(result["seconds"])
    yield "made with", ", ".join(f"{name} {value}" for name, value in result["made"].items())
    if "failed" in result:
        yield "failed", f"the loss became {result['failed']['loss']} by step {result['failed']['step']:,}"
    if "val" in result:
        yield "val", str(result["val"])
        yield "test", str(result["test"])
        yield "FLOPs", f"{result['flops']:,}"
        layers = result["layers"].values()
        kept, total = sum(layer["kept"] for layer in layers), sum(layer["total"] for layer in layers)
        yield "weights", f"{kept:,} of the {total:,} that may be pruned"
        if "parameters" in result and kept < total:
            counts = Counts(kept, total, result["parameters"])
            yield "compression", f"{counts.network_compression:.2f}x of the whole network"


def _detail(store: Store, prefix: str) -> Table:
    key, result = found_result(store, prefix)
    table = Table(title=key, show_header=False, title_justify="left")
    for number, line in enumerate(result["history"]):
        table.add_row("history" if number == 0 else "", line)
    for name, text in _facts(result):
        table.add_row(name, text)
    table.add_row("tensors", "kept" if store.has_state(key) else "not kept")
    return table
