"""Commands on one network: `prune`, `inspect`, `bench` and `export`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rewound.cli.sweeps import Device, StoreLocation
from rewound.commands.console import say
from rewound.foundations.errors import Failed, InputError
from rewound.method.choices import HELP, Choices
from rewound.states.storage.artifacts import DEFAULT_STORE
from rewound.tasks.hyperparameters import fields_in

Fields = Annotated[list[str] | None, typer.Option("--field", help="a field of the recipe, e.g. epochs=8; repeatable")]
Network = Annotated[
    str,
    typer.Argument(help="a recipe such as digits, a ticket, or the first digits of a key in the store"),
]
ItsRecipe = Annotated[
    str | None,
    typer.Option(
        help="the recipe that builds the network, or package.module:Class", show_default="what the file names"
    ),
]
ItsModel = Annotated[
    str | None,
    typer.Option("--model", help="package.module:name of what makes the network of a ticket that names no recipe"),
]


def prune_command(
    recipe: Annotated[str, typer.Argument(help="a recipe such as digits, or package.module:Class")],
    fields: Fields = None,
    compression: Annotated[float, typer.Option(help=HELP["compression"])] = Choices.compression,
    technique: Annotated[str, typer.Option(help=HELP["technique"])] = Choices.technique,
    retrain_epochs: Annotated[
        float | None,
        typer.Option(
            help="epochs per level", show_default="the full training time; 0.9 of it where weights are rewound"
        ),
    ] = None,
    rate: Annotated[float, typer.Option(help=HELP["rate"])] = Choices.rate,
    one_shot: Annotated[bool, typer.Option("--one-shot", help=HELP["one_shot"])] = Choices.one_shot,
    score: Annotated[
        str,
        typer.Option(
            help="what to rank by: magnitude (l1), l2, random, taylor, package.module:name; units: bn-scale, activation"
        ),
    ] = "magnitude",
    scope: Annotated[str, typer.Option(help="what to rank together: global, layer, or package.module:name")] = "global",
    pattern: Annotated[
        str, typer.Option(help="what is pruned as one: weight, unit, filter, 2:4, 'block 4x4', or package.module:name")
    ] = "weight",
    only: Annotated[
        list[str] | None, typer.Option(help="prune only these weights, e.g. 'encoder.*'; repeatable")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(help="never prune these weights; repeatable")] = None,
    floor: Annotated[float, typer.Option(help="minimum fraction kept in each tensor, or group of units")] = 0.0,
    preset: Annotated[
        str, typer.Option(help="the paper's filters in place of all of these: structured-a or structured-b")
    ] = "",
    k: Annotated[int, typer.Option(help="how much the preset prunes; the paper has 1 to 5")] = 0,
    round_to: Annotated[int, typer.Option(help="keep a multiple of so many units of each group")] = 1,
    min_units: Annotated[int, typer.Option(help="keep so many units of each group at least")] = 1,
    rates: Annotated[
        list[str] | None,
        typer.Option(help="prune this fraction of each of these weights, e.g. 'stage1.*=0.3'; repeatable"),
    ] = None,
    of: Annotated[str, typer.Option(help="what compression is of: weights, or flops where units go")] = "weights",
    batches: Annotated[int, typer.Option(help="how many batches the scores taylor and activation are measured on")] = 8,
    slim: Annotated[bool, typer.Option("--slim", help=HELP["slim"])] = Choices.slim,
    max_drop: Annotated[float | None, typer.Option(help=HELP["max_drop"])] = Choices.max_drop,
    final: Annotated[float | None, typer.Option(help=HELP["final"])] = Choices.final,
    seed: Annotated[int, typer.Option(help="the seed of the trial")] = 1,
    device: Device = "cpu",
    store: StoreLocation = str(DEFAULT_STORE),
    keep: Annotated[
        str, typer.Option(help="tensors to keep: needed (a larger compression goes on from them), or all")
    ] = "needed",
    out: Annotated[
        Path | None,
        typer.Option(
            help="folder for the pruned network, with a ticket of every level in levels/",
            show_default="rewound-pruned/RECIPE",
        ),
    ] = None,
) -> None:
    """Train a network and prune it: the paper's Algorithm 1 (20% a level, LR rewinding, full time) by default."""
    from rewound.commands.networks import prune_network
    from rewound.experiments.compression import prune
    from rewound.method.pruner import Pruner
    from rewound.method.pruning.settings import rates_in
    from rewound.tasks.recipes import recipe_named

    pruned = partial(
        prune,
        recipe_named(recipe).with_fields(fields_in(fields or ())),
        compression=compression,
        technique=technique,
        retrain_epochs=retrain_epochs,
        rate=rate,
        one_shot=one_shot,
        pruner=Pruner(
            score=score,
            scope=scope,
            pattern=pattern,
            only=tuple(only or ()),
            skip=tuple(skip or ()),
            floor=floor,
            preset=preset,
            k=k,
            round_to=round_to,
            min_units=min_units,
            rates=rates_in(rates or ()),
            of=of,
            batches=batches,
        ),
        slim=slim,
        max_drop=max_drop,
        final=final,
        seed=seed,
        device=device,
        store=store,
        keep=keep,
    )
    prune_network(recipe, pruned, out)


def inspect_command(
    file: Annotated[Path, typer.Argument(help="a ticket, as rewound prune and rewound.save write it")],
    recipe: Annotated[
        str | None,
        typer.Option(help="the recipe to count FLOPs with, or package.module:Class", show_default="the ticket's"),
    ] = None,
    fields: Fields = None,
) -> None:
    """Show what a ticket holds: its layers, and what was said about it."""
    if fields and recipe is None:
        raise InputError(f"--field {fields[0]} goes with --recipe, the recipe that has the field; give both")
    from rewound.commands.networks import inspect_ticket

    inspect_ticket(file, recipe, fields_in(fields or ()))


def bench_command(
    network: Network,
    batch: Annotated[int, typer.Option(help="examples of a forward pass")] = 64,
    threads: Annotated[
        int | None, typer.Option(help="threads on the CPU", show_default="as many as torch takes")
    ] = None,
    device: Device = "cpu",
    backend: Annotated[
        str, typer.Option(help="eager, compiled (torch.compile) and onnx (ONNX Runtime), with commas between")
    ] = "eager,compiled",
    seconds: Annotated[float, typer.Option(help="about how long each backend is measured, after a warm-up")] = 10.0,
    recipe: ItsRecipe = None,
    fields: Fields = None,
    model: ItsModel = None,
    store: StoreLocation = str(DEFAULT_STORE),
) -> None:
    """Measure a network: dense beside pruned, beside slim where whole units were pruned."""
    from rewound.commands.timing import bench

    found = bench(
        network,
        batch=batch,
        threads=threads,
        device=device,
        backend=backend,
        seconds=seconds,
        recipe=recipe,
        fields=fields_in(fields or ()),
        model=model,
        store=store,
        say=say,
    )
    for line in str(found).splitlines():
        say(line)
    if not found.timings:
        raise Failed("nothing was measured: no backend could run this network; the lines above say why")


def export_command(
    network: Network,
    out: Annotated[Path, typer.Option(help="the file to write")],
    to: Annotated[
        str | None,
        typer.Option(help="the format: onnx, torch-export or safetensors", show_default="by the ending of the file"),
    ] = None,
    slim: Annotated[bool, typer.Option("--slim", help="leave out the units that the mask removes")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the file if it exists")] = False,
    recipe: ItsRecipe = None,
    fields: Fields = None,
    model: ItsModel = None,
    store: StoreLocation = str(DEFAULT_STORE),
) -> None:
    """Write a network for another runtime; the file is loaded again, run and compared."""
    from rewound.commands.exporting import export

    made = export(
        network,
        out,
        to=to,
        slim=slim,
        overwrite=overwrite,
        recipe=recipe,
        fields=fields_in(fields or ()),
        model=model,
        store=store,
        say=say,
    )
    say(str(made))
