"""How fast networks train on one GPU: the eager loop, one captured step, fleets of K; and whether it is right.

    PYTHONPATH=src python benchmarks/gpu_fleet.py                                       the table for cifar10-resnet20
    PYTHONPATH=src python benchmarks/gpu_fleet.py --recipe cifar10-resnet56 [--captured] [--cudnn]
    PYTHONPATH=src python benchmarks/gpu_fleet.py --option combo_kernels=True           an option of torch's compiler
    PYTHONPATH=src python benchmarks/gpu_fleet.py --recipe transformer:Transformer      a recipe of a user's
    PYTHONPATH=src python benchmarks/gpu_fleet.py --check                               captured = eager, fleet = alone
    PYTHONPATH=src python benchmarks/gpu_fleet.py --parts                               where a cold start's time goes
    PYTHONPATH=src python benchmarks/gpu_fleet.py --kernels                             where a step's time goes

Seconds per epoch and model are wall-clock seconds of one epoch, everything included: data order, augmentation, update,
mask, the stop at its end. Medians of the repeats, with the least and the largest.
"""

import time

STARTED = time.perf_counter()  # before torch is imported: the first step should come within 60 s of a process's start

import argparse  # noqa: E402
import ast  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Iterable, Sequence  # noqa: E402
from dataclasses import dataclass, fields, replace  # noqa: E402
from functools import lru_cache  # noqa: E402
from itertools import pairwise  # noqa: E402
from typing import Any  # noqa: E402

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is reproducible only with a fixed workspace

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from rewound.foundations.errors import Diverged, InputError  # noqa: E402
from rewound.foundations.randomness import fold, permutation  # noqa: E402
from rewound.method.pruning.mask import Mask  # noqa: E402
from rewound.method.schedule import Segment  # noqa: E402
from rewound.tasks.fleets import graphs  # noqa: E402
from rewound.tasks.fleets.captured import Program, program  # noqa: E402
from rewound.tasks.fleets.fleet import Fleet  # noqa: E402
from rewound.tasks.fleets.place import Place, Run  # noqa: E402
from rewound.tasks.recipe import Position, Recipe  # noqa: E402
from rewound.tasks.recipes import recipe_named  # noqa: E402
from rewound.tasks.recipes.cifar10 import CIFAR10, ResNet20, ResNet56, ResNet110  # noqa: E402
from rewound.tasks.recipes.images import Images  # noqa: E402
from rewound.tasks.training import State, begin, evaluate, train  # noqa: E402

CUDA = torch.device("cuda")
KINDS: dict[str, type[CIFAR10]] = {kind.name: kind for kind in (ResNet20, ResNet56, ResNet110)}
sys.path.insert(0, os.path.dirname(__file__))  # noqa: PTH120  # for recipes beside this file


class Synthetic:
    """Noise in the shape of CIFAR-10, where it is not prepared."""

    def images(self, device: torch.device) -> Images:
        return synthetic(device)


class Bytes:
    """Augmented images as they are before standardisation: whole numbers, to be compared exactly."""

    def standardised(self, images: Tensor) -> Tensor:
        return images.float()


@lru_cache
def synthetic(device: torch.device) -> Images:
    draw = torch.Generator().manual_seed(0)
    sizes = (50_000, 2_000, 8_000)
    images = [torch.randint(0, 256, (n, 3, 32, 32), generator=draw, dtype=torch.uint8) for n in sizes]
    labels = [torch.randint(0, 10, (n,), generator=draw) for n in sizes]
    return Images(images[0], labels[0], images[1], labels[1], images[2], labels[2]).to(device)


def chosen(name: str) -> tuple[type[Any], str]:
    """The recipe on its data, CIFAR-10's on noise where they are not prepared."""
    if name not in KINDS:
        return recipe_named(name), "its own data"
    kind = KINDS[name]
    try:
        kind().images(torch.device("cpu"))
    except InputError:
        return mixed(Synthetic, kind), "synthetic data (CIFAR-10 is not prepared)"
    return kind, "CIFAR-10"


def mixed(trait: type, kind: type[CIFAR10]) -> type[CIFAR10]:
    made: type[CIFAR10] = dataclass(frozen=True)(type(f"{trait.__name__}{kind.__name__}", (trait, kind), {}))
    return made


def sparse(recipe: Recipe, density: float = 0.2) -> Mask:
    draw = torch.Generator().manual_seed(1)
    return Mask({name: torch.rand(shape, generator=draw) < density for name, shape in recipe.shapes.items()})


def finished(fleet: Fleet, runs: Iterable[Run]) -> list[State]:
    """The last states of runs done side by side."""
    members = [fleet.start(run) for run in runs]
    ends = {}
    for member, outcome, ended in fleet.events():
        if isinstance(outcome, Diverged):
            raise outcome
        if ended:
            ends[member] = outcome.clone()
    return [ends[member] for member in members]


# The table


def eager_seconds(recipe: Recipe, steps: int, repeats: int) -> list[float]:
    marks = [20 + steps * i for i in range(repeats + 1)]
    times = []
    for _ in train(recipe, begin(recipe, 1), None, lr=[Segment(0.1, marks[-1])], stops=marks, device=CUDA):
        torch.cuda.synchronize()
        times.append(time.perf_counter())
    return [later - sooner for sooner, later in pairwise(times)]


def fleet_seconds(fleet: Fleet, state: State, mask: Mask, size: int, steps: int, repeats: int) -> list[float]:
    """Seconds per model of `steps` steps of `size` members side by side."""
    times = []
    for repeat in range(repeats + 1):
        count = steps if repeat else 20
        for _ in range(size):
            fleet.start(Run(state, mask, [Segment(0.1, count)]))
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in fleet.events():
            pass
        times.append((time.perf_counter() - begun) / size)
    return times[1:]  # the first round makes the places


def table(kind: type[Any], options: argparse.Namespace) -> None:
    plain, fast = kind(), kind(precision="bfloat16")
    scale = plain.steps_per_epoch / options.steps
    reference = 0.0

    def row(name: str, measured: Callable[[], Sequence[float]]) -> None:
        nonlocal reference
        if time.perf_counter() - STARTED > options.seconds_budget:
            print(f"{name:34} left out: the budget of {options.seconds_budget:.0f} s is spent", flush=True)
            return
        times = [scale * seconds for seconds in measured()]
        middle = statistics.median(times)
        reference = reference or middle
        spread = f"{min(times):.3f}-{max(times):.3f}"
        print(f"{name:34} {middle:8.3f}  {spread:>13} {reference / middle:8.2f}x", flush=True)

    print(f"an epoch: {plain.steps_per_epoch:.1f} steps")
    print(f"{'':34} {'s/epoch':>8}  {'least-most':>13} {'speed':>9}   (per model; {options.repeats} repeats)")
    if not options.captured:
        row("eager loop, float32", lambda: eager_seconds(plain, options.steps, options.repeats))
        row("eager loop, bfloat16", lambda: eager_seconds(fast, options.steps, options.repeats))
    begun = time.perf_counter()
    fleet = Fleet(fast, CUDA, capacity=max(options.fleets))
    if options.torch_optimizer:
        program(fast, CUDA, fast).momentum = None
    state, mask = begin(fast, 1), sparse(fast)
    finished(fleet, [Run(state, mask, [Segment(0.1, 1)])])
    print(f"first captured step: {time.perf_counter() - begun:.1f} s after the fleet was asked for", flush=True)
    for size in options.fleets:
        if size > fleet.capacity:
            print(f"fleet of {size}: memory is enough for {fleet.capacity}")
            break
        name = "one graph, bfloat16 (fleet of 1)" if size == 1 else f"fleet of {size}, bfloat16"
        row(name, lambda size=size: fleet_seconds(fleet, state, mask, size, options.steps, options.repeats))  # type: ignore[misc]
    print(
        f"memory of a place: {fleet._footprint / 2**30:.2f} GiB, {torch.cuda.max_memory_reserved() / 2**30:.1f} in all"
    )


# The checks


class Report:
    """Prints each check and remembers whether all held."""

    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, what: str, value: float, limit: float) -> None:
        good = value <= limit  # not for NaN
        self.failed += not good
        print(f"{'ok' if good else 'FAILED':7} {what}: {value:.3g} (at most {limit:g})", flush=True)


def difference(one: State, other: State, part: str) -> float:
    """The largest difference in "model" or "slots", relative to the largest value; running statistics by themselves."""
    ones, others = getattr(one, part), getattr(other, part)
    found = 0.0
    for running in (False, True):
        names = [n for n in others if ("running_" in n) is running and not n.endswith("num_batches_tracked")]
        largest = max((float(others[n].abs().max()) for n in names), default=1.0)
        gaps = [float((ones[n] - others[n].to(ones[n].device)).abs().max()) / largest for n in names]
        found = max([found, *gaps])
    return found


def check(kind: type[Any]) -> int:
    report = Report()
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)  # gradients of embeddings are added in any order otherwise
    torch.backends.cudnn.deterministic = True
    if issubclass(kind, CIFAR10):
        check_batches(mixed(Bytes, kind)(), report)
    for precision in ("float32", "bfloat16"):
        if "dropout" in {field.name for field in fields(kind)}:  # compiled, it draws otherwise than eagerly
            check_steps(kind(precision=precision, dropout=0.0), report)
            check_steps(kind(precision=precision), report, like_eager=False)
        else:
            check_steps(kind(precision=precision), report)
    print("all checks hold" if not report.failed else f"{report.failed} checks FAILED")
    return int(report.failed > 0)


def check_batches(recipe: CIFAR10, report: Report) -> None:
    """The compiled batches, on the GPU, are those of `recipe.batches` on the CPU: from 0 and around an epoch's end."""
    program = Program(recipe, CUDA, "inductor")
    seed, prunings, cpu = 5, 2, torch.device("cpu")
    orders = torch.cat([permutation(fold(seed, prunings, "order", epoch), recipe.train_size) for epoch in (0, 1)]).to(
        CUDA
    )
    key = torch.tensor(fold(seed, prunings, "augmentation"), device=CUDA)
    for first, count in ((0, 3), (389, 4), (780, 1)):
        theirs = recipe.batches(seed, Position(prunings, first), cpu)
        for step in range(first, first + count):
            images, labels = next(theirs)
            mine, answers = program.batch(0, program.data, orders, torch.tensor(step, device=CUDA), key)
            wrong = int((mine.cpu() != images).sum() + (answers.cpu() != labels).sum())
            report(f"batch {step}: values unlike the CPU's", wrong, 0)


def check_steps(recipe: Any, report: Report, *, like_eager: bool = True) -> None:
    name, exact = recipe.precision, recipe.precision == "float32"
    name += "" if like_eager else ", with dropout"
    mask, state = sparse(recipe), begin(recipe, 1)
    run = Run(state, mask, [Segment(0.01, 30), Segment(0.001, 20)])
    begun = time.perf_counter()
    fleet = Fleet(recipe, CUDA, capacity=4)
    (first,) = finished(fleet, [replace(run, lr=[Segment(0.01, 1)])])
    print(f"{name}: first captured step after {time.perf_counter() - begun:.1f} s", flush=True)
    graphs = compilations()

    (alone,) = finished(fleet, [run])
    if like_eager:
        *_, eager = train(recipe, state, mask, lr=[Segment(0.01, 1)], device=CUDA)
        report(f"{name}: 1 step, captured - eager, slots", difference(first, eager, "slots"), 1e-3 if exact else 0.1)
        # Adam's first step is the rate times the sign of a gradient, which rounding decides where there is hardly one.
        limit = 0.021 if any("exp_avg" in slot for slot in first.slots) else 1e-5 if exact else 1e-2
        report(f"{name}: 1 step, captured - eager, weights", difference(first, eager, "model"), limit)
        *_, eager = train(recipe, state, mask, lr=run.lr, device=CUDA)
        report(
            f"{name}: 50 steps, captured - eager, weights", difference(alone, eager, "model"), 0.01 if exact else 0.2
        )
        gap = abs(alone.loss / eager.loss - 1)
        report(f"{name}: 50 steps, captured - eager, mean loss", gap, 1e-3 if exact else 2e-2)
    off = {name: ~kept.to(CUDA) for name, kept in mask.items()}
    slots = [(slot, off[n]) for name, slot in alone.slots.items() if (n := name.split("/", 1)[1]) in off and slot.ndim]
    pruned = [(alone.model[n], o) for n, o in off.items()] + slots
    report(f"{name}: pruned weights and slots that are not 0", sum(int(t[o].count_nonzero()) for t, o in pruned), 0)

    others = [Run(begin(recipe, seed), None, [Segment(0.1, 20 * seed)]) for seed in (2, 3, 4)]
    together = finished(fleet, [others[0], run, *others[1:]])[1]
    report(f"{name}: in a fleet of 4 - alone, weights", difference(together, alone, "model"), 0)
    (half,) = finished(fleet, [replace(run, lr=[Segment(0.01, 23)])])
    (whole,) = finished(fleet, [Run(half, mask, [Segment(0.01, 7), Segment(0.001, 20)])])
    report(f"{name}: 23 + 27 steps - 50 steps, weights", difference(whole, alone, "model"), 0)
    report(f"{name}: compilations for places 2 to 4", compilations() - graphs, 0)

    member = fleet.start(run)
    for _, view, ended in fleet.events():
        if ended and isinstance(view, State):
            mine, theirs = fleet.evaluate(member), evaluate(recipe, view, CUDA)
            report(
                f"{name}: evaluated in place - evaluated",
                max(abs(a - b) for a, b in zip(mine, theirs, strict=True)),
                2e-3,
            )
    bad = fleet.start(Run(state, None, [Segment(1e30, 20)], [10]))
    good = fleet.start(run)
    ends = {
        member: outcome if isinstance(outcome, Diverged) else outcome.clone() for member, outcome, _ in fleet.events()
    }
    report(f"{name}: diverging runs that were not told", int(not isinstance(ends[bad], Diverged)), 0)
    if isinstance(beside := ends[good], Diverged):
        raise beside
    report(f"{name}: beside a diverging run - alone, weights", difference(beside, alone, "model"), 0)


def cold_start(kind: type[Any]) -> int:
    """Where the seconds until the first captured step go: torch's own account of compiling, and the rest."""
    from torch._dynamo.utils import compile_times

    print(f"imported after {time.perf_counter() - STARTED:.1f} s", flush=True)
    fast = kind(precision="bfloat16")
    fast.resident(CUDA)
    print(f"data on the GPU after {time.perf_counter() - STARTED:.1f} s", flush=True)
    fleet = Fleet(fast, CUDA, capacity=1)
    print(f"program made after {time.perf_counter() - STARTED:.1f} s", flush=True)
    finished(fleet, [Run(begin(fast, 1), None, [Segment(0.1, 1)])])
    print(f"first captured step after {time.perf_counter() - STARTED:.1f} s; of this, by torch's account:", flush=True)
    names, seconds = compile_times(repr="csv", aggregate=True)
    for name, spent in sorted(zip(names, map(float, seconds), strict=True), key=lambda row: -row[1])[:25]:
        print(f"{spent:8.2f} s  {name}")
    return 0


def kernels(kind: type[Any]) -> int:
    """Milliseconds of one network's step by kind of kernel, and the longest kernels."""
    from imagenet import where_it_goes

    found = where_it_goes(Place(program(kind(precision="bfloat16"), CUDA)))
    for name, part in found.items():
        print(name, *(f"{milliseconds:8.2f}  {kernel}" for kernel, milliseconds in part.items()), sep="\n")
    return 0


def option(text: str) -> tuple[str, object]:
    """NAME=VALUE of the command line, the value as Python writes it."""
    name, _, value = text.partition("=")
    return name, ast.literal_eval(value)


def compilations() -> int:
    from torch._dynamo.utils import counters

    breaks = dict(counters["graph_break"])
    if breaks:
        print(f"graph breaks: {breaks}")
    return int(counters["stats"]["unique_graphs"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="cifar10-resnet20", help=f"{', '.join(KINDS)}, or module:Class")
    parser.add_argument("--check", action="store_true", help="check instead of measuring")
    parser.add_argument("--parts", action="store_true", help="time the parts of a cold start instead")
    parser.add_argument("--kernels", action="store_true", help="time the kernels of a step instead")
    parser.add_argument("--captured", action="store_true", help="captured steps alone, without the eager loops")
    parser.add_argument("--cudnn", action="store_true", help="torch's and cuDNN's kernels alone, none of ours")
    parser.add_argument("--option", type=option, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--torch-optimizer", action="store_true", help="torch's own SGD instead of the flat one")
    parser.add_argument("--fleets", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16], help="sizes, in growing order")
    parser.add_argument("--steps", type=int, default=391, help="steps per repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds-budget", type=float, default=400.0, help="no row is begun after so many seconds")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"this needs a CUDA GPU; torch {torch.__version__} sees none", file=sys.stderr)
        return 2
    ours = {} if options.cudnn else graphs.faster(CUDA)
    graphs.faster = lambda device: {**ours, **dict(options.option)}
    kind, data = chosen(options.recipe)
    what = f"{options.recipe}, batch {kind().batch_size}, {data}"
    print(f"{what}, {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    if options.check:
        return check(kind)
    if options.parts:
        return cold_start(kind)
    if options.kernels:
        return kernels(kind)
    table(kind, options)
    print(f"{time.perf_counter() - STARTED:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
