"""How fast translation networks train and translate on one GPU: the eager loop, one captured step, fleets of K.

    PYTHONPATH=src python benchmarks/translation.py                              ende-gnmt, then wmt16-gnmt
    PYTHONPATH=src python benchmarks/translation.py --recipe ende-gnmt --profile which kernels take the time

Tokens are source and target words with the word that ends a target, without padding; seconds are wall-clock seconds of
whole training steps in bfloat16: batches, dropout, loss, clipping, Adam, the mask. Rows take turns; medians of the
rounds, with the least and the largest. Where a corpus is not prepared, words are drawn at random with lengths like its
own. The eager loop is the same network without compiled or captured kernels. For the beam search the network is told
where sentences end, since one that is not trained would not know.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rewound.foundations.errors import Diverged, InputError
from rewound.method.pruning.mask import Mask
from rewound.method.schedule import Segment
from rewound.tasks.datasets.parallel_text import END, LIMIT, START, Corpus, HeldOut, Pairs
from rewound.tasks.fleets.fleet import Fleet
from rewound.tasks.fleets.place import Run
from rewound.tasks.recipe import Position
from rewound.tasks.recipes import beam, recipe_named
from rewound.tasks.recipes.gnmt import GNMT, Decoding
from rewound.tasks.recipes.translation import Translation
from rewound.tasks.training import begin, train

RATE = 1e-4
WARM = 3  # steps of the eager loop before it is timed


class Size(NamedTuple):
    """How much of a recipe is measured."""

    median_words: float
    """Of a source; used where the corpus is not prepared."""
    steps: int
    fleets: tuple[int, ...]


SIZES = {
    "ende-gnmt": Size(15, 100, (1, 2, 4)),
    "wmt16-gnmt": Size(22, 6, (1,)),  # a step is eight batches
    "multi30k-gnmt": Size(13, 100, (1, 4)),
    "translate-toy": Size(8, 10, (1, 2)),
}


class Drawn:
    """Words at random, where a corpus is not prepared."""

    def loaded(self: Any) -> Corpus:
        return drawn(self.vocabulary, SIZES[self.name].median_words)


@lru_cache
def drawn(vocabulary: int, median: float, pairs: int = 200_000) -> Corpus:
    """Lengths vary like those of real text (log-normally, by a factor of 1.9), both sides together."""
    draw = torch.Generator().manual_seed(0)
    source = (median * torch.exp(0.65 * torch.randn(pairs, generator=draw))).round().clamp(1, LIMIT - 1).long()
    target = (source * torch.exp(0.05 + 0.2 * torch.randn(pairs, generator=draw))).round().clamp(1, LIMIT - 1).long()

    def words(lengths: Tensor) -> Tensor:
        return torch.randint(3, vocabulary, (int(lengths.sum()),), generator=draw, dtype=torch.int32)

    held = source[:1024]
    names = tuple(f"w{number}" for number in range(vocabulary))
    kept = HeldOut(words(held), held, ("",) * len(held))
    return Corpus(names, Pairs(words(source), source, words(target), target), {"val": kept, "test": kept})


def chosen(name: str) -> tuple[Translation, str]:
    kind: type[Any] = recipe_named(name)
    recipe = kind(precision="bfloat16")
    try:
        recipe.text()
    except InputError as error:
        made = dataclass(frozen=True)(type(f"Drawn{kind.__name__}", (Drawn, kind), {}))
        print(f"{name}: words drawn at random ({error})", flush=True)
        return made(precision="bfloat16"), "drawn"
    return recipe, "real text"


def tokens_of(recipe: Translation, steps: int, device: torch.device) -> list[int]:
    """How many tokens the first 0, 1, 2, ... steps have."""
    counts = [torch.zeros((), dtype=torch.int64, device=device)]
    batches = recipe.batches(1, Position(0, 0), device)
    for _ in range(steps):
        for _, lengths, _, following in islice(batches, recipe.accumulation):
            counts.append(lengths.sum() + (following >= 0).sum())
    sums: list[int] = torch.stack(counts).cumsum(0)[:: recipe.accumulation].tolist()
    return sums


def sparse(recipe: Translation, density: float = 0.2) -> Mask:
    draw = torch.Generator().manual_seed(1)
    return Mask({name: torch.rand(shape, generator=draw) < density for name, shape in recipe.shapes.items()})


class Bench:
    """One recipe: what is measured in turns, and what was found."""

    def __init__(self, name: str, device: torch.device, rounds: int) -> None:
        self.name, self.device, self.rounds = name, device, rounds
        self.size = SIZES[name]
        self.recipe, self.data = chosen(name)
        self.state, self.mask = begin(self.recipe, 1), sparse(self.recipe)
        self.tokens = tokens_of(self.recipe, WARM + 4 * self.size.steps, device)
        self.fleet = Fleet(self.recipe, device, capacity=max(self.size.fleets))
        self.losses: dict[str, float] = {}

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def eager(self) -> float:
        """Tokens per second of the eager loop."""
        steps, times = self.size.steps, list[float]()
        with torch.compiler.set_stance("force_eager"):
            rates = [Segment(RATE, WARM + steps)]
            for view in train(self.recipe, self.state, self.mask, lr=rates, stops=[WARM], device=self.device):
                self.wait()
                times.append(time.perf_counter())
                self.losses["eager"] = view.loss
        return (self.tokens[WARM + steps] - self.tokens[WARM]) / (times[1] - times[0])

    def together(self, size: int, steps: int) -> float:
        """Seconds of so many steps of `size` runs side by side."""
        for _ in range(size):
            self.fleet.start(Run(self.state, self.mask, [Segment(RATE, steps)]))
        self.wait()
        begun = time.perf_counter()
        for _, outcome, _ in self.fleet.events():
            if isinstance(outcome, Diverged):
                raise outcome
            self.losses[f"fleet of {size}"] = outcome.loss
        self.wait()
        return time.perf_counter() - begun

    def fleet_of(self, size: int) -> float:
        return size * self.tokens[self.size.steps] / self.together(size, self.size.steps)

    def table(self) -> Iterator[dict[str, Any]]:
        begun = time.perf_counter()
        print(f"{self.name}: steps are {'captured' if self.fleet.captures else 'NOT captured'}", flush=True)
        for size in self.size.fleets:  # compiles, captures
            self.together(size, 1)
            print(f"{self.name}: places for {size} ready after {time.perf_counter() - begun:.1f} s", flush=True)
        rows: dict[str, Callable[[], float]] = {"eager loop": self.eager}
        rows |= {f"fleet of {size}": lambda size=size: self.fleet_of(size) for size in self.size.fleets}  # type: ignore[misc]
        found: dict[str, list[float]] = {row: [] for row in rows}
        for _ in range(self.rounds):
            for row, measured in rows.items():
                found[row].append(measured())
        for row, rates in found.items():
            ratios = [rate / eager for rate, eager in zip(rates, found["eager loop"], strict=True)]
            yield self.row(row, rates, "tokens/s", ratio=statistics.median(ratios))
        for times in (1, 2, 4):
            seconds = [self.together(1, times * self.size.steps) for _ in range(self.rounds)]
            tokens = self.tokens[times * self.size.steps]
            yield self.row(f"{tokens:,} tokens in one captured run", [1e6 * s / tokens for s in seconds], "s/Mtoken")

    def row(self, what: str, values: list[float], unit: str, **others: float) -> dict[str, Any]:
        median = statistics.median(values)
        shown = ", ".join(f"{key} {value:.2f}" for key, value in others.items())
        print(f"{self.name:14} {what:42} {median:12,.2f} [{min(values):,.2f}, {max(values):,.2f}] {unit}  {shown}")
        sys.stdout.flush()
        return {"recipe": self.name, "data": self.data, "what": what, "unit": unit, "values": values, **others}

    # Translating

    def translated(self) -> Iterator[dict[str, Any]]:
        model = self.recipe.model(1).to(self.device).eval()
        held = next(iter(self.recipe.text().held_out.values()))
        starts = held.source_lengths.cumsum(0) - held.source_lengths
        batches = list[tuple[Tensor, Tensor]]()
        for some in held.source_lengths.argsort(stable=True)[:1024].split(256):
            lengths = held.source_lengths[some]
            index = starts[some].unsqueeze(1) + torch.arange(int(lengths.max()))
            source = held.source[index.clamp(max=len(held.source) - 1)].long()
            batches.append((source.to(self.device), lengths.to(self.device)))
        rates = list[float]()
        for _ in range(self.rounds + 1):
            self.wait()
            begun = time.perf_counter()
            words = sum(searched(model, source, lengths, self.recipe.beam_width) for source, lengths in batches)
            rates.append(words / (time.perf_counter() - begun))
        yield self.row(f"beam of {self.recipe.beam_width}, 256 sentences at once", rates[1:], "tokens/s")

    def profile(self) -> None:
        """The kernels of captured steps that take the most time."""
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        with torch.profiler.profile(activities=kinds) as profiler:
            self.together(1, min(self.size.steps, 10))
        by = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        print(profiler.key_averages().table(sort_by=by, row_limit=30, max_name_column_width=90))


@torch.no_grad()
def searched(model: GNMT, source: Tensor, lengths: Tensor, width: int) -> int:
    """How many words the translations have, each with as many as its source."""
    with torch.autocast(source.device.type, torch.bfloat16):
        memory, first = model.encoded(source, lengths)
        layers = len(first.outputs)

        def step(words: Tensor, state: beam.State) -> tuple[Tensor, beam.State, Tensor]:
            *rest, left = state
            scores, following, attention = model.step(words, Decoding(*halves(rest, layers)), memory)
            # Every sentence ends in its time: nothing else is then as likely, and before nothing is less likely.
            scores[:, END] = torch.where(left <= 0, 1e4, -1e4).to(scores.dtype)
            return scores, (*following.outputs, *following.cells, following.context, left - 1), attention

        state = (*first.outputs, *first.cells, first.context, lengths)
        found = beam.translated(step, state, source.shape[1], beam.Search(START, END, width=width)).words
    return int((found != END).sum()) + len(found)


def halves(tensors: list[Tensor], layers: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    return tuple(tensors[:layers]), tuple(tensors[layers:-1]), tensors[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", default=["ende-gnmt", "wmt16-gnmt"], choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true", help="list the kernels of captured steps, too")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"this needs a CUDA GPU; torch {torch.__version__} sees none", file=sys.stderr)
        return 2
    device, rows, begun = torch.device(options.device), list[dict[str, Any]](), time.perf_counter()
    on = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{on}, torch {torch.__version__}", flush=True)
    for name in options.recipe:
        bench = Bench(name, device, options.rounds)
        for found in (bench.table, bench.translated):
            for row in found():
                rows.append({**row, "device": on, "torch": torch.__version__})
                if options.json:
                    options.json.write_text(json.dumps(rows, indent=1))
        print(f"{name}: mean losses {bench.losses}; {time.perf_counter() - begun:.0f} s so far", flush=True)
        if options.profile:
            bench.profile()
    return 0


if __name__ == "__main__":
    sys.exit(main())
