"""One training step as functions of tensors, compiled once for all runs of a recipe on a device.

    batch    data positions -> a batch               counter-based draws (`randomness`): those of `recipe.batches`
    loss     weights, buffers, batch -> loss         the backward pass is compiled with it
    update   gradients -> new weights and slots      the recipe's optimizer (`updates`)

Any `ResidentRecipe` has such a step, with one of torch's own optimizers. Draws inside the loss, such as dropout, come
from a generator that is seeded for each step (law 1). Where data is streamed, a step reads memory into which the
examples of that step are put (`place`).
"""

import gc
import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from rewound.tasks.feed import streamed
from rewound.tasks.fleets.updates import FlatMomentum, Momentum, TorchOptimizer, Update, captures, is_flat
from rewound.tasks.recipe import Batch, Recipe
from rewound.tasks.resident import ResidentRecipe
from rewound.tasks.training import one_number


def capturable(recipe: Recipe, device: torch.device) -> TypeGuard[ResidentRecipe]:
    """Whether a step of the recipe is what `Place` does; decided by its kind, its optimizer and one loss."""
    if not isinstance(recipe, ResidentRecipe) or type(recipe).batches is not ResidentRecipe.batches:
        return False
    return (
        all(part.batch_size * recipe.accumulation <= part.examples for part in recipe.parts)
        and captures(recipe.optimizer(recipe.skeleton))
        and _probe(recipe, device).repeats
    )


class Probe(NamedTuple):
    """What was seen when one loss was computed and differentiated."""

    draws: bool
    """Whether it draws from torch's generator of the device."""
    repeats: bool
    """Whether a graph can repeat it: it draws nothing on the host, and keeps its buffers where they are."""
    reached: frozenset[str]
    """The parameters that got a gradient."""


@lru_cache(maxsize=8)
def _probe(recipe: ResidentRecipe, device: torch.device) -> Probe:
    """One loss of two examples."""
    model = recipe.model(0).to(device).train()
    buffers, first = dict(model.named_buffers()), torch.arange(2, device=device)
    source = recipe.checked_source(device)
    data = recipe.resident(device) if source is None else next(streamed(source, [first.cpu()], device))
    batch = recipe.assembled(data, 0, first, 0, first)
    gpus = [device] if device.type == "cuda" else []
    # What a recipe compiles itself is not compiled for two examples.
    with torch.random.fork_rng(gpus), torch.compiler.set_stance("force_eager") if gpus else nullcontext():
        before = _host_draws(), _drawn(device)
        loss = one_number(recipe.loss(model, batch), recipe)
        after = _host_draws(), _drawn(device)
        loss.backward()  # type: ignore[no-untyped-call]
    on_host = device.type == "cuda" and before[0] != after[0]
    kept = all(buffer is buffers[name] for name, buffer in model.named_buffers())
    reached = frozenset(name for name, parameter in model.named_parameters() if parameter.grad is not None)
    python = before[0][1:] != after[0][1:]
    return Probe(before[1] != after[1], kept and not on_host and not python, reached)


def _host_draws() -> tuple[bytes, object, object]:
    """Where the generators of the host stand: torch's, Python's and numpy's."""
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), str(np.random.get_state())  # noqa: NPY002


def _drawn(device: torch.device) -> bytes:
    """Where torch's generator of the device stands."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return state.numpy().tobytes()


class _Objective(nn.Module):
    """The recipe's loss as a module, for `functional_call`."""

    def __init__(self, recipe: Recipe, network: nn.Module) -> None:
        super().__init__()
        self.recipe, self.network = recipe, network

    def forward(self, *batch: Tensor) -> Tensor:
        return self.recipe.loss(self.network, batch)


class Program:
    """What all runs of a recipe on a device share: the data, the names of its tensors, the compiled functions.

    The data is None where it is streamed: each place then has memory for the examples of a step.
    """

    def __init__(self, recipe: ResidentRecipe, device: torch.device, backend: str | None) -> None:
        self.recipe, self.device = recipe, device
        self.source, self.parts = recipe.source(device), recipe.parts
        self.data = recipe.resident(device) if self.source is None else None
        self.offsets = [torch.arange(part.batch_size, device=device) for part in self.parts]
        template = self.model()
        # Batch normalisation counts its batches one kernel per layer; the count is not read, so `Place` counts.
        for module in template.modules():
            if counts(module):
                module.num_batches_tracked = None  # type: ignore[assignment]  # as track_running_stats=False has it
        self.parameters = [name for name, _ in template.named_parameters()]
        self.buffers = [name for name, _ in template.named_buffers()]
        self.objective = _Objective(recipe, template)
        self.probe = _probe(recipe, device)

        # Functions of tensors alone, so that one compilation serves every place.
        def compiled(function: Callable[..., None]) -> Callable[..., None]:
            if backend is None:
                return function
            from rewound.tasks.fleets.graphs import faster  # torch imports its compiler for it

            options = faster(device) if backend == "inductor" else {}
            return torch.compile(function, backend=backend, dynamic=False, options=options or None)

        optimizer, clip = recipe.optimizer(template), recipe.clip_norm
        flat = (
            is_flat(optimizer, template)
            and set(recipe.rate_factors) == {1.0}
            and self.probe.reached.issuperset(self.parameters)
            and not recipe.clip_each
        )
        self.momentum = Momentum(optimizer, template, clip, compiled) if flat else None
        self.batch: Callable[..., Batch] = compiled(self._batch)  # type: ignore[assignment, arg-type]
        self.loss: Callable[..., Tensor] = compiled(self._loss) if recipe.compiles else self._loss  # type: ignore[assignment, arg-type]

    def model(self) -> nn.Module:
        model = self.recipe.model(0).to(self.device)
        return model.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload, no-any-return]

    def update(self, model: nn.Module) -> Update:
        """What moves the weights of a model of the recipe."""
        if self.momentum is not None:
            return FlatMomentum(model, self.momentum)
        recipe = self.recipe
        return TorchOptimizer(
            model,
            recipe.optimizer(model),
            factors=recipe.rate_factors,
            clip_norm=math.inf if recipe.clip_each else recipe.clip_norm,
            clip_batch=recipe.clip_norm / recipe.accumulation if recipe.clip_each else math.inf,
            reached=self.probe.reached,
        )

    def _batch(self, part: int, data: Sequence[Tensor], orders: Tensor, position: Tensor, key: Tensor) -> Batch:
        counters = position * self.parts[part].batch_size + self.offsets[part]
        batch = self.recipe.assembled(data, part, orders[counters % len(orders)], key, counters)
        return tuple(_channels_last(tensor) for tensor in batch)

    def _loss(self, weights: Sequence[Tensor], buffers: Sequence[Tensor], *batch: Tensor) -> Tensor:
        names = [f"network.{name}" for name in (*self.parameters, *self.buffers)]
        loss: Tensor = functional_call(self.objective, dict(zip(names, [*weights, *buffers], strict=True)), batch)
        return loss / self.recipe.accumulation


def _channels_last(tensor: Tensor) -> Tensor:
    """Images as convolutions take them fastest."""
    images = tensor.ndim == 4 and tensor.is_floating_point()
    return tensor.contiguous(memory_format=torch.channels_last) if images else tensor


_PROGRAMS = 16  # of the shapes that slim networks of a recipe have
_compiled: dict[tuple[Recipe, torch.device], dict[Recipe, Program]] = {}


def program(recipe: ResidentRecipe, device: torch.device, large: Recipe | None = None) -> Program:
    """The program of a recipe, compiled once and kept until one of another recipe is asked for.

    What it holds is device memory. Slim networks of one `large` recipe are trained beside each other, and each shape
    has its program; where there are very many, all of them are given up.
    """
    key = (large or recipe, device)
    if key not in _compiled:
        _give_up_programs()
    elif recipe not in _compiled[key] and len(_compiled[key]) >= _PROGRAMS:
        _give_up_programs()
        torch._dynamo.reset()  # or torch would remember every shape, and compile no more of them at its limit
    programs = _compiled.setdefault(key, {})
    if recipe not in programs:
        programs[recipe] = Program(recipe, device, "inductor" if device.type == "cuda" else None)
    return programs[recipe]


def _give_up_programs() -> None:
    _compiled.clear()
    gc.collect()  # a program has functions of itself


def counts(module: nn.Module) -> bool:
    """Whether the module counts batches without using the count."""
    return isinstance(module, _BatchNorm) and module.momentum is not None and module.num_batches_tracked is not None


@contextmanager
def kernels(*, search: bool) -> Iterator[None]:
    """float32 means float32; the fastest convolutions where the steps are many, unless they must be reproducible."""
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.benchmark, cudnn.benchmark_limit
    exact = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    # All kernels are tried, not torch's first ten: with few channels the best is often a later one (fleets gain 3%).
    cudnn.allow_tf32, cudnn.benchmark, cudnn.benchmark_limit = False, search and not exact, 0
    try:
        yield
    finally:
        cudnn.allow_tf32, cudnn.benchmark, cudnn.benchmark_limit = before


@contextmanager
def quiet_compilation() -> Iterator[None]:
    # Every recipe of a process shares the code objects that are compiled, eight of them by default.
    with torch._dynamo.config.patch(recompile_limit=64), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # not taken on purpose
        yield
