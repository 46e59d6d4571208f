"""Commands on one network: `prune` and `inspect`."""

import io
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import count
from pathlib import Path

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from torch import Tensor

from rewound.commands.console import PlainConsole, console, progress_of, say
from rewound.commands.named import recipe_of_ticket, ticket_file
from rewound.experiments.compression import LevelReport, PrunedNetwork, search_of, searched
from rewound.foundations.errors import InputError, shown
from rewound.foundations.quantities import counted
from rewound.foundations.wholefiles import writable
from rewound.method.flops import Profile
from rewound.method.pruning.mask import Mask
from rewound.method.pruning.prunable import prunable_weights
from rewound.reports.terminal import plain_table
from rewound.states.tickets.ticket import Ticket, load

WIDE = 10_000
"""Columns where there is no terminal: each layer on a line of its own, however long its name."""


def prune_network(recipe: str, pruned: partial[PrunedNetwork], out: Path | None) -> None:
    """Show how `pruned` (`rewound.prune` of a recipe, and whatever else was asked) goes on; save what it returns."""
    asked = {name: value for name, value in pruned.keywords.items() if name in signature(search_of).parameters}
    folder = _folder(recipe, out, search_of(*pruned.args, **asked))
    with progress_of(recipe) as show:
        network = pruned(say=say, progress=show)
    network.save(folder)
    console.print(_level_table(network.levels, network.chosen))
    chosen = network.levels[network.chosen]
    pruned_to = f"{chosen.compression:.2f}x of the pruned weights{_selected(network)}"
    say(f"{chosen.parameters:,} parameters and {chosen.flops / network.levels[0].flops:.1%} of the FLOPs are left")
    say(f"{pruned_to}, {chosen.network_compression:.2f}x of the whole network")
    say(f"test {chosen.test:.4f} (dense {network.levels[0].test:.4f}): {folder}")


def _folder(recipe: str, out: Path | None, asked: Mapping[str, object]) -> Path:
    """Where the network goes: not over one that was searched for otherwise; another compression is the same search."""
    if out is not None:
        if difference := _difference(writable(out), asked):
            raise InputError(f"{out} holds another network: it was pruned {difference}; choose another with --out")
        return out
    name = recipe.replace(":", ".").replace(os.sep, ".")
    folders = (Path("rewound-pruned") / (name if number == 1 else f"{name}-{number}") for number in count(1))
    return next(writable(folder) for folder in folders if not _difference(folder, asked))


def _difference(folder: Path, asked: Mapping[str, object]) -> str:
    """What the network in a folder was asked for that this one is not; nothing where there is none."""
    try:
        present = searched(json.loads((folder / "summary.json").read_text()))
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return "with a summary.json that cannot be read"
    before, now = _flat(present), _flat(asked)
    # What was not asked for has no name, as slim and final.
    places = [place for place in {**now, **before} if before.get(place) != now.get(place)]
    return _difference_in(places[0][1], before.get(places[0]), now.get(places[0])) if places else ""


def _flat(settings: Mapping[str, object]) -> dict[tuple[str, str], object]:
    """Settings by their tables (the pruner, the fields of the recipe, or none) and names."""
    found: dict[tuple[str, str], object] = {}
    for name, value in settings.items():
        found |= {(name, each): v for each, v in value.items()} if isinstance(value, Mapping) else {("", name): value}
    return found


def _difference_in(name: str, before: object, now: object) -> str:
    if before is None:
        return f"without {name}, not with {name} {shown(now)}"
    return f"with {name} {shown(before)}, not {f'without {name}' if now is None else shown(now)}"


def _selected(network: PrunedNetwork) -> str:
    """How many weights a compression counts, where it does not count all; otherwise nothing."""
    sizes = {name: weight.numel() for name, weight in prunable_weights(network.large).items()}
    weights = Mask({name: kept for name, kept in network.mask.items() if name in sizes})
    total, counted = sum(sizes.values()), network.counts_of(network.large, weights).selected
    return "" if counted == total else f" (the {counted:,} selected of {total:,})"


def inspect_ticket(file: Path, recipe: str | None, fields: Mapping[str, object]) -> None:
    """Print what a ticket holds; of a folder that `prune` wrote, the ticket in it."""
    file = ticket_file(file)
    ticket = load(file)
    page = ticket_page(ticket, file.stat().st_size, ticket_profile(ticket, recipe, fields))
    if console.is_terminal and console.encoding.startswith("utf"):
        console.print(page)
        return
    text = io.StringIO()
    PlainConsole(file=text, width=console.width if console.is_terminal else WIDE).print(page)
    for line in text.getvalue().splitlines():
        typer.echo(_written(line.rstrip(), console.encoding))


def _written(text: str, encoding: str) -> str:
    """The text in characters that the encoding has."""
    if not encoding.startswith("utf"):
        text = text.translate({ord("×"): "x", ord("–"): "-", ord("─"): "-"})
    return text.encode(encoding, "replace").decode(encoding)


def _operations(flops: int) -> str:
    """FLOPs, those of a large network in millions: the table is to fit into 80 columns."""
    return f"{flops:,}" if flops < 10_000_000 else f"{flops / 1e6:,.1f}M"


def _level_table(levels: tuple[LevelReport, ...], chosen: int) -> Table:
    words = "Compression: of the weights that may be pruned; network: of all parameters. Epochs: of retraining, so far."
    table = plain_table(caption=words)
    for name in ("level", "density", "compression", "network", "val", "test", "FLOPs", "epochs"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for level in levels:
        mark = "returned" if level.level == chosen else ""
        ratios = (f"{level.compression:.2f}x", f"{level.network_compression:.2f}x")
        numbers = (f"{level.density:.4g}", *ratios, f"{level.val:.4f}", f"{level.test:.4f}")
        table.add_row(str(level.level), *numbers, _operations(level.flops), f"{level.search_epochs:g}", mark)
    return table


_NO_FLOPS = (
    "FLOPs need the network: give its recipe with --recipe (and --field), or count them in Python with "
    "rewound.profile(model, example).layers(ticket.mask)."
)


def ticket_profile(ticket: Ticket, recipe: str | None, fields: Mapping[str, object]) -> Profile | None:
    """The operation counts of the ticket's network, if its recipe is known."""
    if (task := recipe_of_ticket(ticket, recipe, fields)) is None:
        return None
    try:
        task.profile.layers(ticket.mask)
    except InputError:  # this is another network
        if recipe is not None:
            raise
        return None
    return task.profile


def ticket_page(ticket: Ticket, size: int, profile: Profile | None) -> RenderableType:
    """The layers and the facts of a ticket whose file has `size` bytes."""
    dense = sum(tensor.numel() * tensor.itemsize for tensor in _once(ticket).values())
    facts = Table(show_header=False, box=None, pad_edge=False)
    for name, value in ticket.about.items():
        if name == "counts":  # the compression below says it
            continue
        facts.add_row(name, value if isinstance(value, str) else json.dumps(value))
    facts.add_row("compression", _compression(ticket, profile))
    facts.add_row("hash", ticket.hash)
    facts.add_row("size", f"{size:,} bytes, {size / max(dense, 1):.1%} of the dense {dense:,}")
    return Group(_layers(ticket, profile), *([] if profile else ["", _NO_FLOPS]), "", facts)


def _compression(ticket: Ticket, profile: Profile | None) -> str:
    """Of the masked layers and of the network: of its parameters, if a recipe or the file tells them from buffers."""
    known = _parameters(ticket, profile)
    counts = replace(ticket, parameters=_numbers(ticket) if known is None else known).counts
    return f"{counts}" + (" (buffers counted, too: the file does not tell them apart)" if known is None else "")


def _parameters(ticket: Ticket, profile: Profile | None) -> int | None:
    """How many parameters the network has, if the file says it or the recipe is known."""
    if ticket.parameters is not None or profile is None:
        return ticket.parameters
    return sum(shape.numel() for shape in profile.shapes.values())


def _numbers(ticket: Ticket) -> int:
    """Of all tensors: parameters and buffers."""
    return sum(tensor.numel() for tensor in _once(ticket).values())


def _layers(ticket: Ticket, profile: Profile | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("layer", overflow="fold")
    table.add_column("shape", no_wrap=True)
    for name in ("kept", "of", "density", *(["FLOPs"] if profile else [])):
        table.add_column(name, justify="right", no_wrap=True)

    def add(name: str, shape: str, kept: int, total: int, flops: int | None) -> None:
        cells = [f"{flops:,}" if flops is not None else "–"] if profile else []
        table.add_row(name, shape, f"{kept:,}", f"{total:,}", f"{kept / max(total, 1):.4g}", *cells)

    tensors, mask = _once(ticket), ticket.mask
    masked = [name for name in tensors if name in mask]
    kept, of = sum(mask.counts[name] for name in masked), sum(mask[name].numel() for name in masked)
    known = _parameters(ticket, profile)
    others = (_numbers(ticket) if known is None else known) - of
    layers, whole = (profile.layers(mask), profile.total(mask)) if profile else ({}, 0)
    first_names = profile.first_names if profile else {}
    operations = {name: layers.get(first_names.get(name, name)) for name in masked}
    here = sum(filter(None, operations.values()))
    for name in masked:
        add(name, "×".join(map(str, mask[name].shape)), mask.counts[name], mask[name].numel(), operations[name])
    table.add_section()
    add("layers above", "", kept, of, here)
    rest = counted(len(tensors) - len(masked), "tensor") if known is None else "parameters"
    add("all else", rest, others, others, whole - here)
    add("network", "", kept + others, of + others, whole)
    return table


def _once(ticket: Ticket) -> dict[str, Tensor]:
    """The tensors by name, tied ones once: under the name that is masked, if one is."""
    names: dict[int, str] = {}
    for name in sorted(ticket.state, key=lambda name: name not in ticket.mask):
        names.setdefault(id(ticket.state[name]), name)
    return {name: tensor for name, tensor in ticket.state.items() if names[id(tensor)] == name}
