"""Commands on a store: `show`, `gc`, `verify`, `pack` and `unpack`."""

import re
from pathlib import Path
from typing import Annotated

import typer

from rewound.cli.sweeps import Device, Jobs, StoreLocation, SweepName
from rewound.experiments.sweeps.declaration import declared
from rewound.states.storage.artifacts import DEFAULT_STORE


def show_command(
    word: Annotated[
        str | None, typer.Argument(help="a sweep; or the key of a state, or its first digits: letters a to f, digits")
    ] = None,
    store: StoreLocation = str(DEFAULT_STORE),
) -> None:
    """Show what is in the store, how far a sweep is and who works on it, or everything known about one state."""
    if word is not None and not re.fullmatch("[0-9a-f]{1,32}", word):
        declared(word)
    from rewound.commands.stores import show_store

    show_store(store, word)


def gc_command(
    sweeps: Annotated[
        list[str] | None, typer.Argument(help="the sweeps that will go on in the store: TOML files or names")
    ] = None,
    store: StoreLocation = str(DEFAULT_STORE),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only show what would be removed")] = False,
    even_if_for_good: Annotated[
        bool, typer.Option("--all", help="also tensors that --keep all and rewound prune have kept")
    ] = False,
) -> None:
    """Remove drafts and tensors that none of the named sweeps needs, and claims of dead workers; results stay.

    Without a name, only claims of dead workers and half-written files are removed.
    """
    for sweep in sweeps or ():
        declared(sweep)
    from rewound.commands.stores import collect_garbage

    collect_garbage(store, sweeps or (), dry_run=dry_run, even_if_for_good=even_if_for_good)


def verify_command(
    sweeps: Annotated[
        list[str] | None, typer.Argument(help="the sweeps to repair the store for: TOML files or names")
    ] = None,
    store: StoreLocation = str(DEFAULT_STORE),
    repair: Annotated[
        bool, typer.Option("--repair", help="set damaged files aside, and compute again what the sweeps have of them")
    ] = False,
    device: Device = "cpu",
    jobs: Jobs = 0,
) -> None:
    """Check every result, state and draft in the store against its checksum; the exit code is 1 if some are damaged."""
    for sweep in sweeps or ():
        declared(sweep)
    from rewound.commands.stores import verify_store

    verify_store(store, sweeps or (), repair=repair, device=device, jobs=jobs)


def pack_command(
    sweep: SweepName,
    out: Annotated[Path, typer.Option(help="the file to write; pieces get a number appended")],
    store: StoreLocation = str(DEFAULT_STORE),
    split_mb: Annotated[int | None, typer.Option(help="largest size of a piece in MiB")] = None,
) -> None:
    """Bundle what is needed to continue a sweep on another machine."""
    declared(sweep)
    from rewound.commands.stores import pack_sweep

    pack_sweep(sweep, store, out, split_mb)


def unpack_command(
    files: Annotated[list[Path], typer.Argument(help="packs, whole or in pieces")],
    store: StoreLocation = str(DEFAULT_STORE),
) -> None:
    """Merge packs into the store; no measured result in it is overwritten."""
    from rewound.commands.stores import unpack_files

    unpack_files(files, store)
