"""Commands on one network: `prune`, level by level, and `inspect` for the ticket that it wrote."""

import io
from collections.abc import Callable, Mapping
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from rewound.commands.console import console, progress_of, say
from rewound.commands.outputs import writable
from rewound.compression import LevelReport, PrunedNetwork
from rewound.pruning.prunable import prunable_weights
from rewound.recipes import recipe_named
from rewound.terminal.inspection import ticket_page, ticket_profile
from rewound.terminal.summary import plain_table
from rewound.tickets.ticket import load

WIDE = 10_000
"""Columns where there is no terminal: each layer on a line of its own, however long its name."""


def prune_network(recipe: str, pruned: Callable[..., PrunedNetwork], folder: Path) -> None:
    """Show how `pruned` (`rewound.prune` of the recipe, and whatever else was asked) goes on; save what it returns."""
    writable(folder)
    with progress_of(recipe) as show:
        network = pruned(say=say, progress=show)
    network.save(folder)
    console.print(_level_table(network.levels, network.chosen))
    chosen = network.levels[network.chosen]
    smaller = f"{chosen.compression:.2f}x smaller{_selected(network)}"
    say(f"{smaller}, test {chosen.test:.4f} (dense {network.levels[0].test:.4f}): {folder}")


def _selected(network: PrunedNetwork) -> str:
    """What is said of a compression that counts only some of the weights."""
    total = sum(weight.numel() for weight in prunable_weights(network.model).values())
    counted = network.mask.total
    return "" if counted == total else f" in the {counted:,} weights selected of {total:,}"


def inspect_ticket(file: Path, recipe: str | None, fields: Mapping[str, object]) -> None:
    """Print what a ticket holds; of a folder that `prune` wrote, the ticket in it."""
    if (inside := file / "ticket.safetensors").is_file():
        file = inside
    ticket = load(file)
    task = recipe_named(recipe).with_fields(fields) if recipe is not None else None
    page = ticket_page(ticket, file.stat().st_size, ticket_profile(ticket, task))
    if console.is_terminal and console.encoding.startswith("utf"):
        console.print(page)
        return
    text = io.StringIO()
    Console(file=text, width=console.width if console.is_terminal else WIDE, emoji=False, markup=False).print(page)
    for line in text.getvalue().splitlines():
        typer.echo(_written(line.rstrip(), console.encoding))


def _written(text: str, encoding: str) -> str:
    """The text in characters that the encoding has."""
    if not encoding.startswith("utf"):
        text = text.translate({ord("×"): "x", ord("–"): "-", ord("─"): "-"})
    return text.encode(encoding, "replace").decode(encoding)


def _level_table(levels: tuple[LevelReport, ...], chosen: int) -> Table:
    table = plain_table(caption="Epochs: of retraining, all levels so far.")
    for name in ("level", "density", "compression", "val", "test", "FLOPs", "epochs"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for level in levels:
        mark = "returned" if level.level == chosen else ""
        numbers = (f"{level.density:.4g}", f"{level.compression:.2f}x", f"{level.val:.4f}", f"{level.test:.4f}")
        table.add_row(str(level.level), *numbers, f"{level.flops:,}", f"{level.search_epochs:g}", mark)
    return table
