"""One training step as functions of tensors, compiled once for all runs of a recipe on a device.

    batch    data positions -> augmented images      counter-based draws (`randomness`): those of `recipe.batches`
    loss     weights, buffers, images -> loss        the backward pass is compiled with it
    update   g = m (.) dL/dW + decay W;  v = momentum v + g;  W -= lr v

Weights, momenta, gradients and mask are flat buffers, of which the parameters are views: the update is one kernel.
"""

import copy
import gc
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from rewound.recipe import Batch, Recipe
from rewound.recipes.images import ImageClassification

_ALIGN = 4  # floats, 16 bytes: inductor copies an input that is aligned less


def capturable(recipe: Recipe) -> TypeGuard[ImageClassification]:
    """Whether a step of the recipe is what `Place` does: resident images, momentum SGD of all weights, no own draws."""
    if not isinstance(recipe, ImageClassification) or type(recipe).batches is not ImageClassification.batches:
        return False
    parameters = list(recipe.skeleton.parameters())
    sgd = recipe.optimizer(recipe.skeleton)
    return (
        type(sgd) is torch.optim.SGD
        and len(sgd.param_groups) == 1
        and {id(parameter) for parameter in sgd.param_groups[0]["params"]}
        == {id(parameter) for parameter in parameters}
        and not sgd.param_groups[0]["dampening"]
        and not sgd.param_groups[0]["maximize"]
        and recipe.batch_size <= recipe.train_size
        and all(parameter.dtype == torch.float32 for parameter in parameters)
        and not any(isinstance(module, _DropoutNd) for module in recipe.skeleton.modules())
        and _repeats(recipe)
    )


def _repeats(recipe: ImageClassification) -> bool:
    """Whether a loss draws nothing, reaches every weight and keeps its buffers where they are: tried on two images."""
    model = copy.deepcopy(recipe.skeleton).train()
    buffers = dict(model.named_buffers())
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        loss = recipe.loss(model, (torch.cat(recipe.example() * 2), torch.zeros(2, dtype=torch.int64)))
        drew = not torch.equal(before, torch.get_rng_state())
    loss.backward()  # type: ignore[no-untyped-call]
    reached = all(parameter.grad is not None for parameter in model.parameters())
    return not drew and reached and all(buffer is buffers[name] for name, buffer in model.named_buffers())


class Span(NamedTuple):
    """Where a parameter lies in the flat buffers; `order` sorts its dimensions by their strides."""

    name: str
    shape: torch.Size
    order: tuple[int, ...]
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        stored = [self.shape[dim] for dim in self.order]
        return flat[self.offset : self.offset + math.prod(stored)].view(stored).permute(_inverse(self.order))


def _inverse(order: tuple[int, ...]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


class _Objective(nn.Module):
    """The recipe's loss as a module, for `functional_call`."""

    def __init__(self, recipe: Recipe, network: nn.Module) -> None:
        super().__init__()
        self.recipe, self.network = recipe, network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.recipe.loss(self.network, (images, labels))


class Program:
    """What all runs of a recipe on a device share: the data, the layout of the weights, the compiled functions."""

    def __init__(self, recipe: ImageClassification, device: torch.device, backend: str | None) -> None:
        self.recipe, self.device = recipe, device
        self.images = recipe.images(device)
        self.offsets = torch.arange(recipe.batch_size, device=device)
        template = self.model()
        self.spans: list[Span] = []
        self.size = 0
        for name, parameter in template.named_parameters():
            order = tuple(sorted(range(parameter.ndim), key=lambda dim, p=parameter: -p.stride(dim)))  # type: ignore[misc]
            self.spans.append(Span(name, parameter.shape, order, self.size))
            self.size += -(-parameter.numel() // _ALIGN) * _ALIGN
        self.padding = torch.zeros(_ALIGN, device=device)
        # Batch normalisation counts its batches one kernel per layer; the count is not read, so `Place` counts.
        for module in template.modules():
            if counts(module):
                module.num_batches_tracked = None  # type: ignore[assignment]  # as track_running_stats=False has it
        self.buffers = [name for name, _ in template.named_buffers()]
        self.objective = _Objective(recipe, template)
        group = recipe.optimizer(template).param_groups[0]
        self.momentum, self.decay = float(group["momentum"]), float(group["weight_decay"])
        self.nesterov = bool(group["nesterov"])
        # Functions of tensors alone, so that one compilation serves every place.
        compiled = (lambda f: f) if backend is None else (lambda f: torch.compile(f, backend=backend, dynamic=False))
        self.batch: Callable[[Tensor, Tensor, Tensor], Batch] = compiled(self._batch)
        self.loss: Callable[[Sequence[Tensor], Sequence[Tensor], Tensor, Tensor], Tensor] = compiled(self._loss)
        self.update: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] = compiled(self._update)

    def model(self) -> nn.Module:
        model = self.recipe.model(0).to(self.device)
        return model.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload, no-any-return]

    def flattened(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients as pieces of a flat buffer, in the order of the weights in memory, whatever their own is."""
        pieces = []
        for span, gradient in zip(self.spans, gradients, strict=True):
            pieces.append(gradient.permute(span.order).reshape(-1))
            if rest := -gradient.numel() % _ALIGN:
                pieces.append(self.padding[:rest])
        return pieces

    def _batch(self, orders: Tensor, position: Tensor, key: Tensor) -> Batch:
        recipe, images = self.recipe, self.images
        counters = position * recipe.batch_size + self.offsets
        chosen = orders[counters % (2 * recipe.train_size)]
        inputs = recipe.augmented(images.train[chosen], key, counters)
        return inputs.contiguous(memory_format=torch.channels_last), images.train_labels[chosen]

    def _loss(self, weights: Sequence[Tensor], buffers: Sequence[Tensor], images: Tensor, labels: Tensor) -> Tensor:
        names = [f"network.{name}" for name in (*(span.name for span in self.spans), *self.buffers)]
        tensors = dict(zip(names, [*weights, *buffers], strict=True))
        loss: Tensor = functional_call(self.objective, tensors, (images, labels))
        return loss

    def _update(self, weights: Tensor, momenta: Tensor, mask: Tensor, gradient: Tensor, lr: Tensor) -> None:
        # The mask first: decay of a weight that is zero is zero, so weight and momentum stay so (law 3).
        gradient = gradient.masked_fill(mask == 0, 0) + self.decay * weights
        momenta.mul_(self.momentum).add_(gradient)  # from zero this is the gradient, as SGD's first step has it
        weights.sub_(lr * (gradient + self.momentum * momenta if self.nesterov else momenta))


_made: dict[tuple[Recipe, torch.device], Program] = {}


def program(recipe: ImageClassification, device: torch.device) -> Program:
    """The program of a recipe, compiled once and kept until another is asked for: what it holds is device memory."""
    if (recipe, device) not in _made:
        _made.clear()
        gc.collect()  # a program has functions of itself
        _made[recipe, device] = Program(recipe, device, "inductor" if device.type == "cuda" else None)
    return _made[recipe, device]


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
