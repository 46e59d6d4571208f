"""How fast fleets of slim networks train beside fleets of dense ones: ResNet-56 under the paper's structured-b.

    PYTHONPATH=src python benchmarks/slim_fleet.py                                    on a GPU: k = 1, 3, 5
    PYTHONPATH=src python benchmarks/slim_fleet.py --fleet 1 8 --repeats 7
    PYTHONPATH=src python benchmarks/slim_fleet.py --device cpu --steps 3 --examples 256   tries it out, slowly

All networks are trained in one process, by one fleet with places for every shape; the shapes take turns in each round,
so that whatever else the machine does meets all of them. A ratio is that of one round; its median is given with the
least and the largest. Seconds per epoch and model are wall-clock seconds, as in `gpu_fleet.py`. Beside each network
stands one that keeps filters in multiples of 8, as tensor cores want them.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from rewound.foundations.errors import Diverged, InputError
from rewound.method.pruning.mask import Mask
from rewound.method.pruning.presets import removed_filters
from rewound.method.schedule import Segment
from rewound.method.structure.kept import mask_of_dead_layers
from rewound.tasks.fleets.fleet import Fleet
from rewound.tasks.fleets.place import Run
from rewound.tasks.recipe import Recipe
from rewound.tasks.recipes.cifar10 import ResNet56
from rewound.tasks.recipes.images import Images
from rewound.tasks.slimmed import cut_state, kept_by, slimmed
from rewound.tasks.training import begin
from slim_speed import PRESET, filter_mask

STARTED = time.perf_counter()
WARM_UP = 20  # steps, in which places are made and kernels chosen


@lru_cache
def noise(examples: int, device: torch.device) -> Images:
    draw = torch.Generator().manual_seed(0)
    sizes = (examples, 10, 10)
    images = [torch.randint(0, 256, (n, 3, 32, 32), generator=draw, dtype=torch.uint8) for n in sizes]
    labels = [torch.randint(0, 10, (n,), generator=draw) for n in sizes]
    return Images(images[0], labels[0], images[1], labels[1], images[2], labels[2]).to(device)


@dataclass(frozen=True)
class Noise(ResNet56):
    """ResNet-56 on noise of CIFAR-10's shape: what it learns does not matter here."""

    examples: int = 50_000

    @property
    def train_size(self) -> int:
        return self.examples

    def images(self, device: torch.device) -> Images:
        return noise(self.examples, device)


def runs_of(recipe: Recipe, ks: list[int]) -> dict[str, tuple[Run, Recipe]]:
    """A dense run, and one of each slim network, by what the table calls it."""
    state = begin(recipe, 1)
    found = {"dense": (Run(state, None, [], recipe=recipe), recipe)}
    model = recipe.model(1)
    for k in ks:
        removed = removed_filters(PRESET, k, recipe.shapes)
        for multiple, name in ((1, f"k={k}, slim"), (8, f"k={k}, slim, multiples of 8")):
            mask = recipe.units.whole(filter_mask(model, removed, multiple))
            kept, masked = kept_by(recipe, mask), state.pruned(mask, 1, 1)
            smaller = slimmed(recipe, kept)
            zeros: Mask = mask_of_dead_layers(mask, kept)
            found[name] = Run(cut_state(masked, kept), zeros, [], recipe=smaller), smaller
    return found


def seconds(fleet: Fleet, run: Run, size: int, steps: int) -> float:
    """Seconds per model of `steps` steps of `size` members side by side."""
    for _ in range(size):
        fleet.start(Run(run.state, run.mask, [Segment(0.01, steps)], recipe=run.recipe))
    if fleet.device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _, outcome, _ in fleet.events():
        if isinstance(outcome, Diverged):
            raise outcome
    return (time.perf_counter() - begun) / size


def table(recipe: Noise, options: argparse.Namespace) -> None:
    runs, scale = runs_of(recipe, options.k), recipe.steps_per_epoch / options.steps
    large = recipe.profile.total()
    for size in options.fleet:
        fleet: Any = Fleet(recipe, options.device, capacity=size * len(runs))
        warm_up = min(WARM_UP, options.steps)
        for name, (run, _) in runs.items():
            begun = time.perf_counter()
            seconds(fleet, run, size, warm_up)
            print(f"fleet of {size}, {name}: ready after {time.perf_counter() - begun:.1f} s", flush=True)
        if fleet.capacity < size * len(runs):
            raise InputError(
                f"memory is enough for {fleet.capacity} places, not for {size} of each shape; lower --fleet"
            )
        times: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(1, options.repeats + 1):
            for name, (run, _) in runs.items():
                times[name].append(scale * seconds(fleet, run, size, options.steps))
            latest = ", ".join(f"{each[-1]:.3f}" for each in times.values())
            print(f"fleet of {size}, round {number}: {latest} s/epoch", flush=True)
        heads = f"{'s/epoch':>8}  {'least-most':>13} {'faster':>7}  {'least-most':>11} {'FLOPs':>7}"
        print(f"\n{f'fleet of {size}':36} {heads}")
        for name, (run, smaller) in runs.items():
            middle, spread = _middle(times[name], 3)
            ratio, ratios = _middle([d / s for d, s in zip(times["dense"], times[name], strict=True)], 2)
            fewer = large / smaller.profile.total(run.mask)
            print(f"{name:36} {middle:>8}  {spread:>13} {ratio:>6}x  {ratios:>11} {fewer:>6.2f}x", flush=True)
        print()


def _middle(values: list[float], digits: int) -> tuple[str, str]:
    """The median, and the least and the largest."""
    return f"{statistics.median(values):.{digits}f}", f"{min(values):.{digits}f}-{max(values):.{digits}f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 3, 5], help="of the preset structured-b")
    parser.add_argument("--fleet", type=int, nargs="+", default=[1, 8], help="networks of one shape side by side")
    parser.add_argument("--steps", type=int, default=391, help="steps of a round")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--examples", type=int, default=50_000)
    parser.add_argument("--batch-size", type=int, default=128)
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no CUDA GPU; --device cpu tries it out", file=sys.stderr)
        return 2
    where = "CPU" if options.device == "cpu" else torch.cuda.get_device_name()
    recipe = Noise(precision=options.precision, examples=options.examples, batch_size=options.batch_size)
    what = f"ResNet-56, batch {options.batch_size}, {options.precision}, noise of CIFAR-10's shape"
    print(f"{what}, {where}, torch {torch.__version__}; {options.repeats} rounds of {options.steps} steps", flush=True)
    table(recipe, options)
    print(f"{time.perf_counter() - STARTED:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
