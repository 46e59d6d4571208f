"""What a person is told about a sweep: before it runs (cost), and after (tables, figures and a page)."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from rewound.comparison import compare, write_comparison
from rewound.conformance import Card
from rewound.drawing import DEFAULT, Drawing, figures_under_way
from rewound.errors import InputError
from rewound.execution import device_named, made_by
from rewound.pages.page import PAGE, Origin, write_page
from rewound.planning import Node, Plan
from rewound.provenance import of_sweep, of_tables
from rewound.recipe import Recipe
from rewound.results import Row, write_rows
from rewound.store import Store
from rewound.sweep import Sweep
from rewound.tables import Tables, collected


def report_sweep(
    sweep: Sweep,
    store: Store,
    out: Path,
    console: Console,
    theirs: Sequence[Row] = (),
    drawing: Drawing = DEFAULT,
) -> list[Path]:
    """Tables, figures and a page of a sweep, as far as it has run; with another table, also a conformance card."""
    tables = collected(sweep.targets, store)
    if not tables.rows:
        raise InputError(f"nothing of {sweep.name} has run yet in {store.root}; run it with: rewound run {sweep.name}")
    cards = compare(tables.rows, theirs) if theirs else []
    paths = tables.write(out)
    if tables.missing:
        console.print(f"{tables.missing} of {len(sweep.targets)} rows are not there yet")
    if all(row.dense for row in tables.rows):
        console.print("only dense networks so far: there are no techniques to compare yet")
    else:
        epochs = {sweep.recipe.label(): sweep.recipe.training_epochs}
        with figures_under_way(tables.rows, out, console, drawing, theirs) as figures:
            _summarise(tables.rows, console, sweep.recipe.test_size)
            origin = of_sweep(sweep, store, tables, paths[0])
            page = _page(tables, out, console, origin, epochs, theirs, cards)
            paths += [*figures(), *page]
    return [*paths, *_compared(cards, tables.rows, out, console)]


def report_files(
    rows: list[Row],
    out: Path,
    console: Console,
    theirs: Sequence[Row] = (),
    drawing: Drawing = DEFAULT,
    title: str = "results",
) -> list[Path]:
    """Table, figures and a page of rows that came from anywhere; with another table, also a conformance card."""
    cards = compare(rows, theirs) if theirs else []
    paths = [out / "results.csv"]
    out.mkdir(parents=True, exist_ok=True)
    write_rows(rows, paths[0])
    with figures_under_way(rows, out, console, drawing, theirs) as figures:
        _summarise(rows, console, None)
        origin = of_tables(title, rows, paths[0])
        page = _page(Tables(rows, [], [], 0), out, console, origin, None, theirs, cards)
        paths += [*figures(), *page]
    return [*paths, *_compared(cards, rows, out, console)]


def say_comparison(cards: list[Card], ours: list[Row], console: Console, *, every_cell: bool = False) -> None:
    """Print the conformance cards, and the recipes of ours that have none."""
    from rewound.pages.card import conformance_card

    console.print(conformance_card(cards, every_cell=every_cell))
    if alone := sorted({row.recipe for row in ours} - {card.recipe for card in cards}):
        console.print(f"only in our table: {', '.join(alone)}", markup=False)


def _compared(cards: list[Card], ours: list[Row], out: Path, console: Console) -> list[Path]:
    if not cards:
        return []
    say_comparison(cards, ours, console)
    write_comparison(cards, out / "compare.csv")
    return [out / "compare.csv"]


def _summarise(rows: list[Row], console: Console, test_images: int | None) -> None:
    from rewound.pages.terminal import summary_table

    console.print(summary_table(rows, test_images))


def _page(
    tables: Tables,
    out: Path,
    console: Console,
    origin: Origin,
    epochs: Mapping[str, float] | None,
    theirs: Sequence[Row],
    cards: Sequence[Card],
) -> list[Path]:
    try:
        return [write_page(tables, out / PAGE, origin, epochs, theirs, cards)]
    except ModuleNotFoundError as error:
        console.print(f"no page: {error.name} is missing; pip install 'rewound[figures]'", markup=False)
        return []


def estimate(plan: Plan, store: Store | None, device: str, jobs: int) -> Iterator[tuple[str, str]]:
    """What a plan would cost, line by line."""
    done = store.finished() if store else set()
    left = [node for node in plan.nodes if node.key not in done]
    yield "rows", f"{len(plan.targets):,}"
    yield "nodes", f"{len(plan.nodes):,} ({len(plan.nodes) - len(left):,} done, {len(left):,} to do)"
    yield "dense epochs", f"{plan.epochs(dense=True):,.0f}"
    yield "retraining epochs, naive", f"{plan.naive_epochs:,.0f}"
    yield "retraining epochs, shared", f"{plan.epochs(dense=False):,.0f}"
    yield "epochs to do", f"{plan.epochs(left, dense=True) + plan.epochs(left, dense=False):,.0f}"
    yield "time to do", _hours(plan, left, store, device, jobs)
    kept = [node for node in left if plan.readers.get(node.key)]
    size = sum(_bytes(node.recipe) for node in kept)
    yield "tensors kept while needed", f"at most {size / 1e6:,.0f} MB ({len(kept):,} states)"


def _hours(plan: Plan, left: list[Node], store: Store | None, device: str, jobs: int) -> str:
    if not left:
        return "nothing"
    recipe = left[0].recipe
    measured = [result for node in plan.nodes if store and (result := store.result(node.key))]
    steps, seconds = sum(result["steps"] for result in measured), sum(result["seconds"] for result in measured)
    if steps and seconds:
        per_step, how = seconds / steps, "from what has run in this store"
    elif device in recipe.epoch_seconds:
        per_step, how = (
            recipe.epoch_seconds[device] / recipe.steps_per_epoch,
            f"typical for {recipe.label()} on {device}",
        )
    else:
        return f"unknown: {recipe.label()} has not run on {device} yet"
    hours = sum(node.steps for node in left) * per_step / jobs / 3600
    return f"{hours:,.2f} hours with {jobs} job{'s' if jobs > 1 else ''} ({how})"


def _bytes(recipe: Recipe) -> int:
    parameters = sum(p.numel() * p.element_size() for p in recipe.skeleton.parameters())
    return 2 * parameters + parameters // 32  # weights, one slot each, a bit of mask per weight


def outdated(plan: Plan, store: Store, device: str) -> list[str]:
    """One line where stored results were made by another source, library or device than today's."""
    today: dict[str, str] = {}
    differing: dict[str, int] = {}
    for node in plan.nodes:
        today = today or made_by(node.recipe, device_named(device))
        if (result := store.result(node.key)) is not None:
            for name in today:
                differing[name] = differing.get(name, 0) + (result["made"].get(name) != today[name])
    different = {name: count for name, count in differing.items() if count}
    if not different:
        return []
    said = ", ".join(f"{name} ({count} of them)" for name, count in different.items())
    return [f"note: stored results were made with another {said}; they are used as they are"]
