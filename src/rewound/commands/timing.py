"""`rewound.bench`: how long a forward pass takes, of the dense network, of the pruned one and of the slim one.

Networks take turns: a round measures each of them once, in a new random order, so that whatever else the machine does
meets all of them alike. A time is the median over rounds and a speed-up the ratio of two medians; their intervals (95%)
come from resampling the rounds. One thread of a CPU is measured in CPU time, which other programs disturb least. Each
network is checked to put out on every backend what it puts out eagerly.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rewound.commands.named import batched, check_is_all, named_network, slim_network
from rewound.commands.runtimes import (
    BACKENDS,
    Machine,
    Prepared,
    check_installed,
    expected,
    inputs_in,
    machine,
    prepared,
    same_outputs,
)
from rewound.foundations.copying import copied
from rewound.foundations.errors import Failed, InputError, as_number, as_whole, check_kind, shown
from rewound.foundations.names import unknown
from rewound.foundations.notebook import html_line, html_table, text_table
from rewound.foundations.quantities import counted
from rewound.method.costs import MULTIPLY_ADDS, Costs
from rewound.method.flops import profile
from rewound.method.pruning.counts import parameter_count
from rewound.method.pruning.mask import Mask
from rewound.method.structure.kept import shapes_of
from rewound.states.storage.artifacts import DEFAULT_STORE
from rewound.tasks.devices import cpu_kind

BATCH = 64
"""Examples of a pass, where the network comes without inputs of its own."""
SHORTEST = 0.02
"""Seconds of the shortest measurement; a faster network runs several times in it."""
FEWEST, MOST = 10, 400
"""Rounds."""
RESAMPLED = 2000
GAIN = 1.05
"""A smaller ratio is no speed-up that anybody would notice."""
EVEN = 8
"""Kernels like sizes that are multiples of it."""


@dataclass(frozen=True)
class Size:
    """How large a network is."""

    network: str
    parameters: int
    bytes: int
    """Of its parameters and buffers."""
    flops: int | None
    """Of one example; None if its layers could not be counted."""


@dataclass(frozen=True)
class Timing:
    """How long a network takes on a backend, with 95% intervals over rounds."""

    backend: str
    network: str
    seconds: float
    interval: tuple[float, float]
    speedup: float
    """How many times as fast as the first network."""
    speedup_interval: tuple[float, float]


@dataclass(frozen=True, repr=False)
class Benchmark:
    """Sizes and times of networks that were measured side by side; prints as tables."""

    name: str
    sizes: tuple[Size, ...]
    timings: tuple[Timing, ...]
    remarks: tuple[str, ...]
    """What a reader should know: why a network is not faster, or was not run."""
    where: str
    """Device, threads and batch."""

    def timing(self, network: str, backend: str) -> Timing:
        """How long a network takes on a backend."""
        for each in self.timings:
            if (each.network, each.backend) == (network, backend):
                return each
        known = ", ".join(f"{each.network} {each.backend}" for each in self.timings)
        raise InputError(f"{network!r} was not measured on {backend!r}; measured: {known}")

    def __repr__(self) -> str:
        return f"Benchmark({self.name}: {len(self.timings)} timings)"

    def __str__(self) -> str:
        times = [text_table(self._time_rows(), _TIME_NAMES)] if self.timings else []
        return "\n\n".join([self._title(), text_table(self._size_rows(), _SIZE_NAMES), *times, *self.remarks])

    def _repr_html_(self) -> str:
        tables = html_table(self._size_rows(), _SIZE_NAMES, self._title())
        times = html_table(self._time_rows(), _TIME_NAMES) if self.timings else ""
        return tables + times + "".join(map(html_line, self.remarks))

    def _title(self) -> str:
        return f"{self.name}: {self.where}"

    def _size_rows(self) -> list[list[str]]:
        return [
            [
                size.network,
                f"{size.parameters:,}",
                f"{size.bytes:,}",
                "" if size.flops is None else f"{size.flops:,}",
                "" if (ratio := self.flop_ratio(size.network)) is None else f"{ratio:.2f}x",
            ]
            for size in self.sizes
        ]

    def flop_ratio(self, network: str) -> float | None:
        """How many times fewer FLOPs it takes than the first network, if they are known."""
        flops = {size.network: size.flops for size in self.sizes}
        if network not in flops:
            raise InputError(f"{shown(network)} was not measured; measured: {', '.join(flops)}")
        first, own = flops[self.sizes[0].network], flops[network]
        return first / own if first and own else None

    def _time_rows(self) -> list[list[str]]:
        return [
            [
                each.backend,
                each.network,
                _milliseconds(each.seconds),
                f"{_milliseconds(each.interval[0])} - {_milliseconds(each.interval[1])}",
                f"{each.speedup:.2f}x",
                f"{each.speedup_interval[0]:.2f} - {each.speedup_interval[1]:.2f}",
            ]
            for each in self.timings
        ]


_SIZE_NAMES = ["network", "parameters", "bytes", "FLOPs", "fewer FLOPs"]
_TIME_NAMES = ["backend", "network", "ms", "95% interval", "speed-up", "95% interval"]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"


class Variant(NamedTuple):
    """A network to measure, and the mask that its FLOPs are counted under."""

    name: str
    model: nn.Module
    mask: Mask | None = None


def bench(
    network: str | Path | nn.Module | Mapping[str, nn.Module],
    example_inputs: Tensor | Sequence[Tensor] | None = None,
    mask: Mask | None = None,
    *,
    batch: int | None = None,
    threads: int | None = None,
    device: str = "cpu",
    backend: str | Sequence[str] = "eager,compiled",
    seconds: float = 10.0,
    recipe: str | None = None,
    fields: Mapping[str, object] = {},
    model: str | None = None,
    store: str | Path = DEFAULT_STORE,
    say: Callable[[str], None] = print,
) -> Benchmark:
    """Measure a network, the same under its mask, and, where the mask removes whole units, the slim network.

    `network` is a module with `example_inputs` (and a `mask`), several modules by name, or what the command takes:
    a recipe's name, the path of a ticket, the first digits of a key in `store`; `recipe` and `fields`, or `model`
    (the import path of what makes it), then say how to build a network whose file does not. A pass has `batch`
    examples (default: as many as `example_inputs`, else 64). Backends are eager, compiled (torch.compile) and onnx
    (ONNX Runtime), each measured for about `seconds`.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> found = bench(model, torch.zeros(4, 8), backend="eager", seconds=0.1, say=lambda line: None)
    >>> found.sizes[0].parameters, found.timing("dense", "eager").speedup
    (178, 1.0)
    """
    backends, on = _backends(backend), machine(device, threads)
    if not as_number("seconds", seconds) > 0:
        raise InputError(f"seconds must be above 0, not {seconds:g}; each backend is measured for about that long")
    if batch is not None and as_whole("batch", batch) < 1:
        raise InputError(f"batch must be at least 1, not {batch}; it is the number of examples in a pass")
    if isinstance(network, str | Path):
        if example_inputs is not None or mask is not None:
            raise InputError(f"{shown(network)} has inputs and a mask of its own; leave out example_inputs and mask")
        found = named_network(network, recipe=recipe, fields=fields, model=model, store=store, say=say)
        name, example, costs = found.name, found.inputs(batch or BATCH), found.costs
        variants, remarks = variants_of(found.dense, found.model, found.mask, example)
        if not found.takes_batches:
            remarks.append(_ONE_EXAMPLE)
    else:
        check_is_all(recipe, fields, model)
        name, example, costs = "networks", _inputs(example_inputs, batch), MULTIPLY_ADDS
        if isinstance(network, Mapping):
            variants, remarks = [Variant(word, model) for word, model in network.items()], []
            _check_modules(network, mask)
        else:
            check_kind("network", network, nn.Module, "give a module, the path of a ticket, a key or a recipe's name")
            name = type(network).__name__
            variants, remarks = variants_of(network, network, mask, example)
    # Copies: the given networks stay in their modes and on their devices.
    inputs = tuple(tensor.to(on.device) for tensor in example)
    here = [each._replace(model=copied(each.model).eval().to(on.device)) for each in variants]
    sizes = [_size(each, example, costs) for each in variants]
    timings: list[Timing] = []
    with on.in_use():
        for word in backends:
            say(f"{word}: {', '.join(each.name for each in here)}")
            try:
                timings += _timed(word, here, inputs, on, seconds)
            except Failed as failure:
                remarks.append(f"{failure}.")
    remarks += no_speedup(timings, has_slim="slim" in [each.name for each in here])
    remarks += slow_slim(timings, here)
    return Benchmark(name, tuple(sizes), tuple(timings), tuple(remarks), _where(on, len(example[0])))


_ONE_EXAMPLE = (
    "The network does not run on one row of its inputs, so that it was run on inputs of the shapes that its file has, "
    "whatever the batch."
)


def _backends(given: str | Sequence[str]) -> list[str]:
    check_kind("backend", given, (str, list, tuple), f"name those of {', '.join(BACKENDS)} that are wanted")
    words = [word.strip() for word in given.split(",")] if isinstance(given, str) else list(given)
    for word in words:
        if word not in BACKENDS:
            raise InputError(unknown("backend", str(word), BACKENDS))
    if not words or len(set(words)) < len(words):
        raise InputError(
            f"backend {shown(given)} must name each of {', '.join(BACKENDS)} at most once, and one at least"
        )
    if "onnx" in words:
        check_installed("backend onnx", ("onnx", "onnxscript", "onnxruntime"))
    return words


def _inputs(given: Tensor | Sequence[Tensor] | None, batch: int | None) -> tuple[Tensor, ...]:
    inputs = inputs_in(given)
    present = len(inputs[0])
    if batch in (None, present):
        return inputs
    if present != 1:
        raise InputError(f"example_inputs has {present} examples, and batch is {batch}; give one example, or no batch")
    return batched(inputs, batch)


def _check_modules(networks: Mapping[str, nn.Module], mask: Mask | None) -> None:
    if not networks or not all(isinstance(each, nn.Module) for each in networks.values()):
        raise InputError(f"several networks are given as modules by name, not as {shown(networks)}")
    if mask is not None:
        raise InputError("a mask goes with one network; give the masked ones among the networks by name instead")


OTHER_OUTPUTS = (
    "The mask keeps biases or normalisation of units whose weights are gone. The slim network does without them, so "
    "that it puts out something else than the pruned network, and has to be retrained."
)


def variants_of(
    dense: nn.Module, model: nn.Module, mask: Mask | None, example: tuple[Tensor, ...]
) -> tuple[list[Variant], list[str]]:
    """The dense network, the masked one and the slim one, as far as there are such; and remarks on the last."""
    if mask is None:
        return [Variant("dense", dense)], []
    check_kind("mask", mask, Mask, "the order is rewound.bench(network, example_inputs, mask)")
    pruned = copied(model)
    mask.apply(pruned)
    variants = [Variant("dense", dense), Variant("pruned", pruned, mask)]
    try:
        smaller = slim_network(pruned, mask, example)
    except InputError as error:
        return variants, [f"There is no slim network: {error}."]
    if smaller is None:
        return variants, []
    network = smaller.for_inference()
    same = same_outputs(pruned, network, example)
    return [*variants, Variant("slim", network, smaller.mask)], [] if same else [OTHER_OUTPUTS]


def _size(variant: Variant, example: tuple[Tensor, ...], costs: Costs) -> Size:
    tensors = (*variant.model.parameters(), *variant.model.buffers())  # tied ones once
    try:
        one = tuple(tensor[:1] for tensor in example)
        flops = profile(variant.model, one, costs).total(variant.mask)
    except Exception:  # whatever its own code raises where it takes no single example
        flops = None
    size = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    return Size(variant.name, parameter_count(variant.model), size, flops)


def _timed(
    backend: str, networks: Sequence[Variant], inputs: tuple[Tensor, ...], on: Machine, seconds: float
) -> list[Timing]:
    """All networks on one backend, in turns."""
    ready: list[Prepared] = []
    for each in networks:
        ready.append(made := prepared(backend, each.model, inputs, on))
        expected(each.model, inputs).deviation(made.outputs(made.run()), f"{each.name} on {backend}")
    times = measured([each.run for each in ready], on, seconds)
    medians = [float(each) for each in np.median(times, axis=0)]
    draws = np.random.default_rng(0).integers(0, len(times), (RESAMPLED, len(times)))
    resampled = np.stack([np.median(column[draws], axis=1) for column in times.T], axis=1)
    ratios = resampled[:, :1] / resampled
    return [
        Timing(backend, each.name, own, _interval(draws_of_time), medians[0] / own, _interval(draws_of_ratio))
        for each, own, draws_of_time, draws_of_ratio in zip(networks, medians, resampled.T, ratios.T, strict=True)
    ]


def _interval(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def measured(runs: Sequence[Callable[[], object]], on: Machine, seconds: float) -> np.ndarray[Any, Any]:
    """The seconds of one pass, by round and network; rounds go on for about `seconds` after a warm-up."""
    for _ in range(2):
        warm = [_seconds(run, 1, on) for run in runs]
    calls = max(1, math.ceil(SHORTEST / min(warm)))
    for run in runs:
        _seconds(run, calls, on)
    rounds = int(min(MOST, max(FEWEST, seconds / (calls * sum(warm)))))
    order, generator = list(range(len(runs))), random.Random(0)
    times = np.empty((rounds, len(runs)))
    for row in times:
        generator.shuffle(order)
        for i in order:
            row[i] = _seconds(runs[i], calls, on)
    return times


def _seconds(run: Callable[[], object], calls: int, on: Machine) -> float:
    on.wait()
    start = on.clock()
    for _ in range(calls):
        run()
    on.wait()
    return (on.clock() - start) / calls


def no_speedup(timings: Sequence[Timing], *, has_slim: bool) -> list[str]:
    """A sentence where a mask makes nothing faster by itself."""
    pruned = [each for each in timings if each.network == "pruned"]
    if not pruned or any(map(_is_faster, pruned)):
        return []
    found = ", ".join(f"{each.speedup:.2f}x {each.backend}" for each in pruned)
    remedy = (
        "the slim network does without them" if has_slim else "only whole units, pruned and slimmed, make it faster"
    )
    return [f"The mask alone gives no speed-up here ({found}): kernels multiply zeros like other numbers; {remedy}."]


def slow_slim(timings: Sequence[Timing], variants: Sequence[Variant]) -> list[str]:
    """A sentence where the slim network is no faster, and sizes that are no multiple of `EVEN` may be why."""
    slow = [each for each in timings if each.network == "slim" and not _is_faster(each)]
    if not slow:
        return []
    large, small = (next(each.model for each in variants if each.name == name) for name in ("dense", "slim"))
    shapes, cut = shapes_of(large), shapes_of(small)
    sizes = [pair for name in shapes.keys() & cut for pair in zip(cut[name], shapes[name], strict=True)]
    if not any(size != before and size % EVEN for size, before in sizes):
        return []
    found = ", ".join(f"{each.speedup:.2f}x {each.backend}" for each in slow)
    return [
        f"The slim network is not faster here ({found}): it has sizes that are no multiple of {EVEN}, for which "
        f"kernels may be slow; prune with round_to={EVEN} (--round-to {EVEN})."
    ]


def _is_faster(timing: Timing) -> bool:
    return timing.speedup >= GAIN and timing.speedup_interval[0] > 1


def _where(on: Machine, batch: int) -> str:
    cuda = on.device.type == "cuda"
    device = torch.cuda.get_device_name(on.device) if cuda else cpu_kind()
    threads = "" if cuda else f", {counted(on.threads, 'thread')}"
    return f"batch {batch}, {device}{threads}, torch {torch.__version__}"
