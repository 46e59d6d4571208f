"""How fast global magnitude pruning of a large network is, and how much memory it takes.

165,000,000 float32 weights in 40 tensors (the size of the paper's GNMT) are pruned to a density of 0.2, then to 0.16
within that mask. Goals: at least 10 times faster than `torch.nn.utils.prune.global_unstructured`, at most about 3 times
`[w.clone() for w in weights]`, peak extra memory at most 1.5 times the weights; the masks are exact, ties included.

Cold means that the allocator holds no free memory when the clock starts, as in a program that does the thing once:
new pages then come from the system. Warm means that it runs right after itself. Every number is a median of
interleaved repeats with the extremes in brackets, except torch's, which is timed once, cold. Memory is the high-water
mark of a process of its own.

    python benchmarks/global_pruning.py      # 2 minutes, 11 GB of memory (torch's share; ours needs 2)
"""

import ctypes
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import L1Unstructured, global_unstructured

from rewound import Mask, Pruner

TENSORS, SHAPE = 40, (1650, 2500)
DENSITY, NEXT_DENSITY = 0.2, 0.16
REPEATS = 7

Weights = dict[str, Tensor]
P = ParamSpec("P")
T = TypeVar("T")


def machine() -> str:
    """The processor, its cores and the version of torch."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"model name\s*: (.*)", cpuinfo)
    cpu = found.group(1) if found else "unknown processor"
    return f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def memory(line: str) -> int:
    """A line of /proc/self/status (VmRSS: now, VmHWM: the most so far) in bytes."""
    found = re.search(rf"{line}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise SystemExit("memory is read from /proc/self/status, which only Linux has")
    return int(found.group(1)) * 1024


def in_a_process(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """What `work` returns in a new process, whose memory has no past."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments, **named).result()


def random_weights() -> Weights:
    """Normal draws whose deviation differs from layer to layer, as in a trained network."""
    generator = torch.Generator().manual_seed(0)
    deviations = [0.02 + 0.0005 * layer for layer in range(TENSORS)]
    return {f"layer{i}": torch.empty(SHAPE).normal_(std=d, generator=generator) for i, d in enumerate(deviations)}


def pruned_by_torch(weights: Weights) -> Mask:
    """The masks of torch's own global pruning, which leaves them as buffers in the modules."""
    modules = {name: nn.Module() for name in weights}
    for name, module in modules.items():
        module.weight = nn.Parameter(weights[name])
    pairs = [(module, "weight") for module in modules.values()]
    global_unstructured(pairs, pruning_method=L1Unstructured, amount=1 - DENSITY)
    return Mask({name: module.get_buffer("weight_mask").bool() for name, module in modules.items()})


def peak_extra(level: int) -> float:
    """The memory that pruning adds at its peak, in units of the weights' bytes (level 0: torch's)."""
    weights = random_weights()
    mask = Pruner().prune(weights, DENSITY) if level == 2 else None
    release_free_memory()
    before = memory("VmRSS")
    if level == 2:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the first level
    if level == 0:
        pruned_by_torch(weights)
    else:
        Pruner().prune(weights, DENSITY if mask is None else NEXT_DENSITY, mask)
    return (memory("VmHWM") - before) / sum(w.nbytes for w in weights.values())


def release_free_memory() -> None:
    """Give the allocator's free memory back to the system."""
    ctypes.CDLL(None).malloc_trim(0)


def seconds(work: Callable[[], object], *, cold: bool) -> float:
    """How long `work` takes, from a cold allocator or right after itself."""
    if cold:
        release_free_memory()
    else:
        work()
    start = time.perf_counter()
    result = work()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def check(weights: Weights, mask: Mask, theirs: Mask, following: Mask) -> int:
    """That the masks are exact; returns the number of weights that tie at the threshold."""
    total = sum(w.numel() for w in weights.values())
    assert mask.kept == theirs.kept == round(total * DENSITY), (mask.kept, theirs.kept)
    assert following.kept == round(total * NEXT_DENSITY), following.kept
    assert not any((following[name] & ~mask[name]).any() for name in weights), "the second mask grew"
    threshold = max(float(w.abs()[~mask[name]].max()) for name, w in weights.items())
    assert threshold <= min(float(w.abs()[mask[name]].min()) for name, w in weights.items()), "not the largest"
    tied = torch.cat([(w.abs() == threshold).reshape(-1) for w in weights.values()])
    kept = torch.cat([mask[name].reshape(-1) for name in weights])
    # torch may choose others among the ties; ours keeps the last ones.
    assert torch.equal(kept[~tied], torch.cat([theirs[name].reshape(-1) for name in weights])[~tied])
    assert kept[tied].diff().ge(0).all() if tied.sum() > 1 else True, "ties not by index"
    return int(tied.sum())


def spread(values: list[float]) -> str:
    """Median and extremes."""
    return f"{median(values):.2f} s [{min(values):.2f}-{max(values):.2f}]"


def main() -> None:
    peaks = [in_a_process(peak_extra, level) for level in (1, 2, 0)]
    weights = random_weights()
    first = Pruner().prune(weights, DENSITY)
    works: dict[str, Callable[[], object]] = {
        "clone": lambda: [w.clone() for w in weights.values()],
        "level 1": lambda: Pruner().prune(weights, DENSITY),
        "level 2": lambda: Pruner().prune(weights, NEXT_DENSITY, first),
    }
    cold: dict[str, list[float]] = {name: [] for name in works}
    warm: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(REPEATS):
        for name, work in works.items():
            cold[name].append(seconds(work, cold=True))
            warm[name].append(seconds(work, cold=False))
    release_free_memory()
    start = time.perf_counter()
    theirs = pruned_by_torch(weights)
    torchs = time.perf_counter() - start
    ties = check(weights, first, theirs, Pruner().prune(weights, NEXT_DENSITY, first))

    def times(name: str, other: dict[str, list[float]]) -> str:
        return f"{median(other[name]) / median(other['clone']):.1f}x the clone's {spread(other['clone'])}"

    print(machine())
    print(
        f"pruning {TENSORS * SHAPE[0] * SHAPE[1]:,} weights: cold {spread(cold['level 1'])}, "
        f"{torchs / median(cold['level 1']):.1f}x faster than torch's {torchs:.1f} s, {times('level 1', cold)}; "
        f"warm {spread(warm['level 1'])}, {times('level 1', warm)}; "
        f"second level cold {spread(cold['level 2'])}, warm {spread(warm['level 2'])}; "
        f"peak extra memory {peaks[0]:.2f}x the weights, second level {peaks[1]:.2f}x, torch's {peaks[2]:.2f}x; "
        f"exact, {ties} ties at the threshold"
    )


if __name__ == "__main__":
    main()
