"""Commands on a store: `show`, `pack`, `unpack`, `gc` and `verify`."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table

from rewound.commands.console import console, progress_of, say, two_columns
from rewound.commands.named import found_result
from rewound.commands.sweeps import as_sweep, by_machine, store_option, store_to_read, worker_count
from rewound.experiments.executors.walking import Watch
from rewound.experiments.housekeeping import damages, leftovers, remove
from rewound.experiments.housekeeping import repair as repair_damage
from rewound.experiments.plans import planning
from rewound.experiments.plans.collection import parameters_left
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.outlook import unbound_note
from rewound.experiments.plans.remaining import pack_store
from rewound.foundations.errors import Failed, InputError
from rewound.foundations.quantities import counted, sized, spoken
from rewound.foundations.wholefiles import writable_file
from rewound.states.storage.artifacts import Result, failure_in_words, outcome_of
from rewound.states.storage.backend import Location
from rewound.states.storage.merging import unpack_store
from rewound.states.storage.packs import read_packs
from rewound.states.storage.store import Store, is_store

_KEY = re.compile("[0-9a-f]{1,32}")  # or the beginning of one


def show_store(root: Location, word: str | None) -> None:
    """Print what is in a store, everything known about one state, or how far a sweep is."""
    if word is None or _KEY.fullmatch(word):
        store = _existing(root)
        if word is None and not (store.finished() or store.drafts() or store.claims()):
            raise InputError(f"the store at {root} is empty; fill it, for example with: {_example(root)}")
        console.print(_overview(store) if word is None else _detail(store, word))
    else:
        sweep, again = as_sweep(word, root)
        console.print(_progress(sweep.name, planning.plan(sweep.targets), store_to_read(sweep, root, again, say)))


def _existing(root: Location) -> Store:
    if not is_store(root):
        raise InputError(f"there is no store at {root}; make one with: {_example(root)}")
    return Store(root, say)


def _example(root: Location) -> str:
    return shlex.join(["rewound", "run", "digits", "--store", str(root)])


def collect_garbage(root: Location, sweeps: Sequence[str], *, dry_run: bool, even_if_for_good: bool) -> None:
    """Remove from a store what no named sweep needs, and what dead workers left; results stay."""
    plans, store = [planning.plan(as_sweep(each, root)[0].targets) for each in sweeps], _existing(root)
    found = leftovers(plans, store, say)
    if not dry_run:
        remove(found, store, even_if_for_good=even_if_for_good)
    title = f"{'not needed' if dry_run else 'removed'} in {store.name}"
    table = Table("what", "files", "size", title=title, title_justify="left")
    states = found.states | (found.for_good if even_if_for_good else {})
    rows = {"drafts": found.drafts, "tensors": states, "claims of dead workers": found.claims}
    for what, sizes in rows.items():
        table.add_row(what, f"{len(sizes):,}", sized(sum(sizes.values())))
    console.print(table)
    if not sweeps:
        held = sized(store.size())
        say(f"name sweeps to keep for, and what none of them needs of the {held} of tensors and drafts goes, too")
    if found.for_good and not even_if_for_good:
        size = sized(sum(found.for_good.values()))
        say(f"{counted(len(found.for_good), 'state')} ({size}) were kept for good; --all removes them, too")
    if aside := store.backend.list("damaged/"):
        size = sized(sum(listed.size for listed in aside.values()))
        say(f"{counted(len(aside), 'damaged file')} ({size}) are in {store.name}/damaged; delete them when you like")


def verify_store(root: Location, sweeps: Sequence[str], *, repair: bool, device: str, jobs: int) -> None:
    """Check every file of a store; set damaged ones aside and compute them again, if that is wanted."""
    plans, store = {each: planning.plan(as_sweep(each, root)[0].targets) for each in sweeps}, _existing(root)
    with progress_of("verify", "files") as progress:
        found = list(damages(store, progress))
    if not found:
        console.print(f"every result, state and draft in {store.name} is what was written")
        return
    for damage in found:
        if repair:
            store.set_aside(damage.path, damage.reason)
        else:
            say(f"damaged: {damage.path} {damage.reason}")
    damaged = f"{counted(len(found), 'damaged file')} in {store.name}"
    if not repair:
        again = shlex.join(["rewound", "verify", *(sweeps or ["SWEEP"]), *store_option(root), "--repair"])
        raise Failed(f"{damaged}; to set them aside, and compute again what a sweep has of them: {again}")
    options = Options(jobs=worker_count(jobs, device), device=device)
    for given, plan in plans.items():
        with progress_of(given) as progress:
            repair_damage(found, plan, store, options, say, progress)
    console.print(f"{damaged} set aside; what the named sweeps have of them is computed again")
    known = {key for plan in plans.values() for key in plan.by_key}
    if strange := [damage for damage in found if damage.artifact.key not in known]:
        say(
            f"{counted(len(strange), 'file')} of them {'belongs' if len(strange) == 1 else 'belong'} to no sweep that "
            "was named; a run of their sweep computes again what it needs"
        )


def pack_sweep(given: str, root: Location, out: Path, split_mb: int | None) -> None:
    """Bundle what is needed to continue elsewhere."""
    if split_mb is not None and split_mb < 1:
        raise InputError(f"--split-mb must be at least 1, not {split_mb}; leave it out for one file")
    sweep, again = as_sweep(given, root)
    plan, store = planning.plan(sweep.targets), store_to_read(sweep, root, again, say)
    for path in pack_store(plan, store, writable_file(out), split_mb * 2**20 if split_mb else None):
        say(f"{path} ({sized(path.stat().st_size)})")


def unpack_files(files: Sequence[Path], root: Location) -> None:
    """Merge packs into a store, which is not touched if one of them cannot be read."""
    for path in files:
        if not path.is_file():
            what = f"{path} is a folder" if path.is_dir() else f"there is no file {path}"
            raise InputError(f"{what}; give the files that rewound pack wrote")
    merged = unpack_store(read_packs(files), Store(root, say))
    console.print(f"{merged.added} added, {merged.present} there already, {merged.damaged} damaged and left out")
    if merged.unbound:
        say(unbound_note(merged.unbound))


def _overview(store: Store) -> Group:
    results = [result for _, result in store.summaries(store.finished())]
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


def _progress(name: str, plan: planning.Plan, store: Store) -> Group:
    """How far a sweep is, and which machines did how much of it."""
    results = dict(store.summaries(plan.by_key.keys()))
    watch = Watch(plan, store, {key: outcome_of(result) for key, result in results.items()})
    headway, steps = watch.headway(), plan.steps
    under_way = {key: claim for key, claim in store.claims().items() if key in plan.by_key}
    failed = f", {headway.failed:,} failed" if headway.failed else ""
    resumed = len((store.drafts() & plan.by_key.keys()) - under_way.keys() - watch.status.keys())
    lines = [
        ("store", store.name),
        ("nodes", f"{headway.nodes:,} of {len(plan.nodes):,} have ended{failed}"),
        ("steps", f"{headway.steps / steps:.1%} of {steps:,}" if steps else "none"),
        ("under way", counted(len(under_way), "node")),
        ("to be resumed", counted(resumed, "node")),
    ]
    machines = Table("machine", "finished", "time", "under way", title="by machine", title_justify="left")
    for host, nodes, seconds, now in by_machine(results.values(), under_way.values()):
        machines.add_row(host, f"{nodes:,}", spoken(seconds), f"{now:,}")
    return Group(two_columns(f"progress of {name}", lines), *([machines] if machines.row_count else []))


def _facts(result: Result) -> Iterator[tuple[str, str]]:
    yield "recipe", result["recipe"]
    if result["after"]:
        yield "continues", result["after"]
    yield "steps", f"{result['steps']:,}"
    yield "took", spoken(result["seconds"])
    if waited := result.get("waited"):
        yield "waited for data", f"{spoken(waited)} ({waited / result['seconds']:.1%} of that)"
    yield "made with", ", ".join(f"{name} {value}" for name, value in result["made"].items())
    if "failed" in result:
        yield "failed", failure_in_words(result["failed"])
    if "val" in result:
        yield "val", str(result["val"])
        yield "test", str(result["test"])
        yield "FLOPs", f"{result['flops']:,}"
        layers = result["layers"].values()
        kept, total = sum(layer["kept"] for layer in layers), sum(layer["total"] for layer in layers)
        yield "weights", f"{kept:,} of the {total:,} that may be pruned"
        if "parameters" in result and (left := parameters_left(result)) and kept < total:
            yield "compression", f"{result['parameters'] / left:.2f}x of the whole network"


def _detail(store: Store, prefix: str) -> Table:
    key, result = found_result(store, prefix)
    history = (("" if number else "history", line) for number, line in enumerate(result["history"]))
    return two_columns(key, [*history, *_facts(result), ("tensors", "kept" if store.has_state(key) else "not kept")])
