"""Whether the fast step reaches the accuracy of the plain one: dense networks by the eager float32 loop.

    PYTHONPATH=src python benchmarks/eager_accuracy.py --trials 1 2 3 --out eager.csv

One process per trial, all at once: an eager loop leaves most of a GPU idle. Each writes a row of results.csv when it
ends (14 minutes alone on an H200, float32, ResNet-20), to be compared with the captured bfloat16 rows of a sweep:

    rewound diff results.csv eager.csv
"""

import argparse
import multiprocessing
import sys
import time
from pathlib import Path

import torch

from rewound.recipes.cifar10 import CIFAR10, ResNet20, ResNet56, ResNet110
from rewound.results import Row, write_rows
from rewound.training import begin, evaluate, train

KINDS: dict[str, type[CIFAR10]] = {kind.name: kind for kind in (ResNet20, ResNet56, ResNet110)}


def trained(name: str, trial: int, epochs: int | None) -> Row:
    """The dense network of a trial, by `train` itself."""
    recipe = KINDS[name]()
    S = recipe.schedule
    steps = S.steps if epochs is None else recipe.steps_of(epochs)
    begun, each = time.perf_counter(), recipe.steps_of(10)
    for state in train(
        recipe, begin(recipe, trial), lr=S.segments(0, steps), stops=range(each, steps, each), device="cuda"
    ):
        epoch = state.position.steps / recipe.steps_per_epoch
        print(
            f"trial {trial}, epoch {epoch:.0f}, loss {state.loss:.4f}, {time.perf_counter() - begun:.0f} s", flush=True
        )
    val, test = evaluate(recipe, state, "cuda")
    seconds = time.perf_counter() - begun
    return Row(name, "unstructured", False, "", 1.0, None, trial, val, test, None, 0.0, seconds, "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=KINDS, default="cifar10-resnet20")
    parser.add_argument("--trials", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, help="train less, to try it out")
    parser.add_argument("--out", type=Path, default=Path("eager.csv"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"this needs a CUDA GPU; torch {torch.__version__} sees none", file=sys.stderr)
        return 2
    rows: list[Row] = []
    work = [(options.recipe, trial, options.epochs) for trial in options.trials]
    with multiprocessing.get_context("spawn").Pool(len(work)) as pool:
        for pending in [pool.apply_async(trained, each) for each in work]:
            rows.append(pending.get())
            write_rows(rows, options.out)
            print(f"trial {rows[-1].trial}: val {rows[-1].val:.4f}, test {rows[-1].test:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
