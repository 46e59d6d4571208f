"""`rewound.prune_to_latency`: as few units go as are needed for a forward pass to take no longer than asked.

What is left at each density is slimmed and timed in turns with the dense network (`timing`), and the density found by
bisection. A time is that of the dense network when it was first measured, divided by the speed-up, so that a machine
that is busier now than before changes little.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from rewound.commands.runtimes import BACKENDS
from rewound.commands.timing import bench
from rewound.foundations.errors import InputError, as_number, check_kind
from rewound.foundations.names import unknown
from rewound.method.flops import profile
from rewound.method.pruner import Pruner, as_pruner
from rewound.method.pruning.mask import Mask
from rewound.method.structure.examples import as_arguments
from rewound.method.structure.groups import Units
from rewound.method.structure.slimming import Slim, slim
from rewound.method.structure.tracing import units
from rewound.method.structure.unit_pruning import candidates_of

_HALVINGS = 6  # of the range of densities


@dataclass(frozen=True)
class PrunedToLatency:
    """A network that is as fast as was asked for, and what was measured."""

    mask: Mask
    slim: Slim = field(repr=False)
    density: float
    """What the pruner was asked for: the fraction of the weights, or of the FLOPs, that is left at most."""
    milliseconds: float
    dense_milliseconds: float
    where: str
    """What was measured: device, threads, batch and backend."""

    def __str__(self) -> str:
        times = f"{self.dense_milliseconds:.4g} ms -> {self.milliseconds:.4g} ms"
        return f"{times} at density {self.density:.4g}: {self.where}"


def prune_to_latency(
    model: nn.Module,
    milliseconds: float,
    example_inputs: Tensor | tuple[Tensor, ...],
    *,
    pruner: Pruner | None = None,
    backend: str = "eager",
    threads: int | None = None,
    device: str = "cpu",
    seconds: float = 2.0,
    say: Callable[[str], None] = print,
) -> PrunedToLatency:
    """Remove units until a forward pass on `example_inputs` takes `milliseconds` on this machine, and no more units.

    The model stays as it is: retrain what is returned. `pruner` ranks the units, by default `Pruner(pattern="unit")`;
    `backend` is eager, compiled or onnx, as in `bench`; each density that is tried is measured for about `seconds`.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 256))
    >>> found = prune_to_latency(model, 1e4, torch.zeros(8, 256), seconds=0.1, say=lambda line: None)
    >>> found.density  # ten seconds are enough for all of it
    1.0
    """
    check_kind("model", model, nn.Module, "give the model itself")
    if not as_number("milliseconds", milliseconds) > 0:
        raise InputError(f"milliseconds must be above 0, not {milliseconds:g}")
    if not isinstance(backend, str) or backend not in BACKENDS:  # one alone: a network has one time
        raise InputError(unknown("backend", backend, BACKENDS))
    pruner = Pruner(pattern="unit") if pruner is None else as_pruner(pruner)
    if not pruner.by_units or pruner.rates or pruner.needs_batches:
        raise InputError(
            "only whole units make a network faster, and the density to prune to is searched for; give a pruner of "
            "pattern 'unit' or 'filter', without rates and with a score that needs no batches"
        )
    inputs = as_arguments(example_inputs)
    groups = units(model, inputs)
    before: float | None = None  # what the dense network took when it was first measured

    def tried(density: float) -> PrunedToLatency:
        nonlocal before
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layers of which little is left: most densities are only tried
            mask = pruner(model, density, groups=groups, example_inputs=inputs)
        small = slim(model, mask, inputs, groups=groups)
        found = bench(
            {"dense": model, "slim": small.model},
            inputs,
            backend=backend,
            threads=threads,
            device=device,
            seconds=seconds,
            say=lambda line: None,
        )
        if not found.timings:
            raise InputError(" ".join(found.remarks).rstrip("."))
        dense, faster = (found.timing(name, backend) for name in ("dense", "slim"))
        before = dense.seconds * 1e3 if before is None else before
        result = PrunedToLatency(mask, small, density, before / faster.speedup, before, f"{found.where}, {backend}")
        say(str(result))
        return result

    best = tried(1.0)
    if best.milliseconds <= milliseconds:
        return best
    low, high = _smallest_density(model, pruner, groups, inputs), 1.0
    best = tried(low)
    if best.milliseconds > milliseconds:
        raise InputError(
            f"{milliseconds:g} ms cannot be reached by removing units: {best.milliseconds:.4g} ms are left where every "
            f"group has as few units as it may ({best.where}); give at least that, or a smaller batch"
        )
    for _ in range(_HALVINGS):
        found = tried((low + high) / 2)
        if found.milliseconds <= milliseconds:
            low, best = found.density, found
        else:
            high = found.density
    return best


def _smallest_density(model: nn.Module, pruner: Pruner, groups: Units, inputs: tuple[Any, ...]) -> float:
    """The smallest density that can be reached, rounded up by one weight."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    costs = profile(model, inputs) if pruner.of == "flops" else None
    network = candidates_of(pruner, shapes, model, groups, costs)
    return min((network.smallest + 1) / network.size.without({}), 1.0)
