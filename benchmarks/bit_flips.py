"""Damage to what is kept on disk gives no different result in silence: single bits flipped, and files swapped.

A run is left before its end. Its folder is copied, and one bit of one file in the copy is flipped, each bit of all
files with the same chance; or, one time in ten, a file changes places with another one of the folder, or with one of
another run that differs in its seed alone. Then the run goes on from the copy. What comes of it:

    identical, told     something was said of the damage, and the result is that of an undamaged run
    identical           nothing had to be said: the result is the same
    refused             one sentence says what is wrong and what to do
    different, told     something was said of the damage, and the result is another one
    DIFFERENT           another result, and not a word: what must not happen
    CRASHED             an error that is no sentence: what must not happen, either

    python benchmarks/bit_flips.py --of loop --flips 1000
    python benchmarks/bit_flips.py --of store --flips 1000
"""

import argparse
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

import rewound
import rewound.experiments.executors.working
import rewound.experiments.plans.execution
import rewound.loops.iteration
from rewound import InputError, Sweep
from rewound.experiments.executors.local import run
from rewound.experiments.executors.walking import Headway
from rewound.experiments.plans.collection import collected
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import Plan, plan
from rewound.experiments.sweeps.sweep import parse_sweep
from rewound.states.storage.store import Store

SWAPS = 0.1
"""How often files are swapped instead of a bit flipped."""
FAILURES = ("DIFFERENT", "CRASHED")


@dataclass(frozen=True)
class Kept:
    """Something kept on disk, for which there is a way to make it and a way to go on with it."""

    make: Callable[[Path, int], object]
    """Fills an empty folder, by a seed."""
    go_on: Callable[[Path, list[str]], object]
    """What comes of going on in the folder, to be compared; lines said of damage go into the list."""
    is_tried: Callable[[Path], bool] = lambda path: True
    """Whether a file is damaged here; not what another kind of check is for."""


# Own loops


def own_loop(folder: Path, seed: int, say: Callable[[str], None], until: int | None = None) -> nn.Module:
    """A user's own script: a small network, pruned by weight rewinding to 2.5x in its own loop."""
    torch.manual_seed(seed)
    x = torch.randn(32, 6)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2])
    how = {"technique": "weight-rewinding", "retrain_epochs": 2, "rate": 0.3, "compression": 2.5}
    run = rewound.epochs(3, model, optimizer, scheduler, checkpoint=folder, say=say, **how)  # type: ignore[arg-type]
    for epoch in run:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        if epoch == until:
            break
    return model


def make_loop(folder: Path, seed: int) -> None:
    """Leave a run in its second level, with a snapshot in the middle of it."""
    own_loop(folder, seed, lambda text: None, until=6)
    assert (folder / "latest.pt").exists()


def go_on_with_loop(folder: Path, said: list[str]) -> object:
    """The network at the run's end, and the levels that are kept to choose from."""
    lines: list[str] = []
    model = own_loop(folder, 0, lines.append)
    said += [line for line in lines if "set aside" in line or "checksum" in line]
    levels = folder / "levels"
    hashes = {path.name: rewound.load(path).hash for path in levels.glob("*.safetensors")}
    network = {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}
    return network, hashes, (levels / "levels.csv").read_text()


# Stores of sweeps

SWEEP = {
    "recipe": "own_recipe:Tumours",
    "recipe-fields": {"epochs": 2.0, "width": 8},
    "experiment": [
        {"technique": "fine-tuning", "retrain-epochs": [1, 2], "density": 0.5},
        {"technique": "weight-rewinding", "retrain-epochs": 1, "levels": {"keep": 0.5, "count": 2}},
    ],
}
"""Two trials of a network of 320 weights, pruned by two techniques."""


def sweep_of(seed: int) -> Sweep:
    if (examples := str(Path(__file__).parents[1] / "examples")) not in sys.path:
        sys.path.append(examples)
    return parse_sweep({**SWEEP, "trials": [2 * seed + 1, 2 * seed + 2]}, "small")


def make_store(folder: Path, seed: int) -> None:
    """Leave a sweep with half of its results, their states, and the draft of a node."""
    targets, store = sweep_of(seed).targets, Store(folder)
    work = plan(targets)
    dense = tuple(node for node in work.nodes if not node.state.prunings)
    run(Plan(work.targets, dense, work.readers), store, Options(keep_all=True), say=lambda text: None)

    def stop(headway: Headway) -> None:
        if len(store.finished()) >= len(work.nodes) // 2 and store.drafts():
            raise _Enough

    often = (
        patch.object(rewound.experiments.plans.execution, "SNAPSHOT", 0.0),
        patch.object(rewound.experiments.executors.working, "_TELL", 0.0),
    )
    with often[0], often[1], suppress(_Enough):
        run(work, store, Options(keep_all=True), say=lambda text: None, tick=stop)
    assert store.drafts()


class _Enough(Exception):
    """The sweep is half done."""


def go_on_with_store(folder: Path, said: list[str]) -> object:
    """The tables of the sweep, but for how long it took."""
    lines: list[str] = []
    targets, store = sweep_of(0).targets, Store(folder, lines.append)
    run(plan(targets), store, Options(), say=lines.append)
    said += [line for line in lines if line.startswith("damaged")]
    tables = collected(targets, store)
    return [replace(row, seconds=None) for row in tables.rows], tables.layers, tables.curves, tables.missing


KINDS = {
    "loop": Kept(make_loop, go_on_with_loop, lambda path: path.name != "lock"),
    "store": Kept(make_store, go_on_with_store, lambda path: path.name != ".lock"),
}


# Damage, and what comes of it


def files_in(folder: Path, kept: Kept) -> list[Path]:
    """The files that are damaged, in an order that does not depend on the disk."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size and kept.is_tried(path))


def damage(folder: Path, other: Path, kept: Kept, draw: random.Random) -> str:
    """Flip a bit, or swap two files; in words."""
    files = files_in(folder, kept)
    if draw.random() < SWAPS:
        alike = [(one, two) for one in files for two in files if one < two and one.suffix == two.suffix]
        theirs = [(one, other / one.relative_to(folder)) for one in files]
        across = [(one, two) for one, two in theirs if two.exists() and two.read_bytes() != one.read_bytes()]
        one, two = draw.choice(alike if alike and (draw.random() < 0.5 or not across) else across)
        held = one.read_bytes()
        one.write_bytes(two.read_bytes())
        if folder in two.parents:
            two.write_bytes(held)
        return f"{one.name} swapped with {two.name} of {'the same' if folder in two.parents else 'another'} run"
    file = draw.choices(files, [path.stat().st_size for path in files])[0]
    data = bytearray(file.read_bytes())
    bit = draw.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
    return f"bit {bit:,} of {8 * len(data):,} of {file.name}"


def outcomes(kept: Kept, flips: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """For each try: what came of it, what was damaged, what was said."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        whole, other, copy = (Path(temporary) / name for name in ("whole", "other", "copy"))
        kept.make(whole, 0)
        kept.make(other, 1)
        shutil.copytree(whole, copy)
        expected = kept.go_on(copy, [])
        for _ in range(flips):
            shutil.rmtree(copy)
            shutil.copytree(whole, copy)
            where = damage(copy, other, kept, draw)
            yield *outcome(kept, copy, expected), where


def outcome(kept: Kept, folder: Path, expected: object) -> tuple[str, str]:
    """What came of it, and what was said."""
    said: list[str] = []
    try:
        result = kept.go_on(folder, said)
    except (InputError, rewound.foundations.errors.Failed) as error:
        return "refused", str(error)
    except Exception as error:  # any other is a crash
        return "CRASHED", f"{type(error).__name__}: {error}"
    if result == expected:
        return "identical, told" if said else "identical", " ".join(said)
    return "different, told" if said else "DIFFERENT", " ".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=KINDS, default="loop")
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print every try")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rewound.loops.iteration.SAVE_SECONDS = 0.0
    counts: Counter[str] = Counter()
    for came, said, where in outcomes(KINDS[options.of], options.flips, options.seed):
        counts[came] += 1
        if options.verbose or came in FAILURES:
            print(f"{came}: {where}: {said}", flush=True)
    print(f"{options.flips:,} tries on {options.of}, seed {options.seed}:")
    for came, count in counts.most_common():
        print(f"{count:6,}  {came}")
    raise SystemExit(1 if any(counts[came] for came in FAILURES) else 0)


if __name__ == "__main__":
    main()
