"""How long it takes to plan a very large sweep, and what shared prefixes save.

The paper's whole CIFAR-10 protocol for ResNet-20 (one-shot: 5 techniques x 10 retraining times x 10 densities;
iterative: 3 techniques x 10 times x 10 levels) for 125 trials is 100,000 retrained networks. Goal: from the declaration
to the finished plan in at most 10 s and 1 GB, imports included in the memory and not in the time.
The second line is the paper's one-shot grid at one density and trial, the shipped sweep `cifar10-resnet20-grid`. Goal:
at most 3,300 epochs of retraining, where doing each run by itself takes 6,780.

    python benchmarks/planning.py      # half a minute
"""

import time
from statistics import median
from typing import NamedTuple

from global_pruning import in_a_process, machine, memory
from rewound import TECHNIQUES, Sweep, load_sweep
from rewound.experiments.plans.planning import plan
from rewound.experiments.sweeps.sweep import Experiment
from rewound.tasks.recipes import recipe_named

TRIALS, REPEATS = 125, 3
TIMES = (10.0, 30.0, 50.0, 70.0, 90.0, 110.0, 130.0, 150.0, 170.0, 182.0)
DENSITIES = tuple(0.8**level for level in range(1, 11))


class Measured(NamedTuple):
    """What planning took, and what came out."""

    seconds: float
    gigabytes: float
    rows: int
    nodes: int
    naive: float
    shared: float


def declared() -> Sweep:
    """The sweep, as a TOML file would declare it."""
    papers = tuple(name for name, technique in TECHNIQUES.items() if technique.gradual is None)
    one_shot = Experiment(papers, TIMES, tuple((density,) for density in DENSITIES), iterative=False)
    rewinding = ("fine-tuning", "weight-rewinding", "lr-rewinding")
    iterative = Experiment(rewinding, TIMES, (DENSITIES,), iterative=True)
    recipe = recipe_named("cifar10-resnet20")()
    return Sweep("large", (recipe,), tuple(range(1, TRIALS + 1)), (one_shot, iterative))


def planned(sweep: Sweep) -> Measured:
    """Plan a sweep in this process."""
    start = time.perf_counter()
    made = plan(sweep.targets)
    elapsed = time.perf_counter() - start
    epochs = made.naive_epochs, made.epochs(dense=False)
    return Measured(elapsed, memory("VmHWM") / 1e9, len(made.targets), len(made.nodes), *epochs)


def planned_large() -> Measured:
    """Plan the large sweep in this process."""
    return planned(declared())


def main() -> None:
    runs = [in_a_process(planned_large) for _ in range(REPEATS)]
    seconds = [run.seconds for run in runs]
    _, _, rows, nodes, naive, shared = runs[0]
    print(machine())
    print(
        f"planning {rows - TRIALS:,} runs: {median(seconds):.1f} s [{min(seconds):.1f}-{max(seconds):.1f}], "
        f"{max(run.gigabytes for run in runs):.2f} GB at the peak; {nodes:,} nodes, {shared:,.0f} epochs of retraining "
        f"instead of {naive:,.0f}"
    )
    grid = planned(load_sweep("cifar10-resnet20-grid"))
    print(
        f"the paper's grid (5 techniques x 10 times, one density, one trial): {grid.shared:,.0f} epochs of retraining "
        f"instead of {grid.naive:,.0f}, {grid.naive / grid.shared:.2f}x fewer"
    )


if __name__ == "__main__":
    main()
