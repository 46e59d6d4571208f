"""Which weights are kept: a mapping from parameter names to boolean tensors, beside the model and never inside it.

`attached` is W (.) m for any training loop (law 3). Weights, gradients and optimizer slots are masked once when it
starts, then gradients as they arrive, before any clipping. For optimizers that treat each element by itself, zero
weight, gradient and slot stay zero; for all others the weights are masked again after every step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from rewound.errors import InputError, few

# torch's optimizers whose update of an element depends on that element alone.
_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
_WRAPPERS = ("module.", "_orig_mod.")
StepHook = Callable[[Optimizer, Any, Any], None]


class Mask(Mapping[str, Tensor]):
    """Parameter name -> boolean tensor, True where the weight is kept.

    >>> mask = Mask({"weight": torch.tensor([[True, False], [False, False]])})
    >>> mask.density, mask.kept, mask.total
    (0.25, 1, 4)
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype != torch.bool:
                raise InputError(f"the mask of {name!r} must be of bool, not {tensor.dtype}")
        self._tensors = dict(tensors)
        self.total = sum(tensor.numel() for tensor in self._tensors.values())
        self.counts = {name: _count(tensor) for name, tensor in self._tensors.items()}
        """How many weights are kept, by name."""
        self.kept = sum(self.counts.values())

    @classmethod
    def full(cls, weights: Mapping[str, Tensor]) -> "Mask":
        """The mask that keeps everything."""
        return cls({name: torch.ones_like(w, dtype=torch.bool) for name, w in weights.items()})

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"Mask({len(self)} tensors, {self.kept:,} of {self.total:,} weights kept, density {self.density:.4g})"

    @property
    def density(self) -> float:
        """The fraction of weights kept."""
        return self.kept / self.total if self.total else 1.0

    def to(self, device: torch.device | str) -> "Mask":
        """The same mask on another device."""
        return Mask({name: tensor.to(device) for name, tensor in self.items()})

    def apply(self, model: nn.Module) -> None:
        """Set the pruned weights of `model` to exactly zero (also for an EMA copy made earlier)."""
        with torch.no_grad():
            for parameter, mask in self.pairs(model):
                _zero(parameter, mask)

    @contextmanager
    def attached(self, model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[None]:
        """Inside this context any loop trains W (.) m: pruned weights are exactly zero after every step.

        >>> layer = nn.Linear(2, 1, bias=False)
        >>> sgd = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        >>> with Mask({"weight": torch.tensor([[True, False]])}).attached(layer, sgd):
        ...     for _ in range(3):
        ...         layer(torch.ones(1, 2)).sum().backward()
        ...         sgd.step()
        >>> layer.weight[0, 1].item()
        0.0
        """
        masks: dict[nn.Parameter, Tensor] = {}
        for parameter, mask in self.pairs(model):
            own = torch.empty_like(parameter, requires_grad=False).copy_(mask)  # in the parameter's memory format
            masks[parameter] = own * masks[parameter] if parameter in masks else own  # tied: under both names
        with ExitStack() as hooks:
            attachment = _Attachment(masks, hooks)
            attachment.begin()
            if optimizer is not None:
                attachment.adopt(optimizer)
            yield

    def packed(self) -> dict[str, Tensor]:
        """Eight weights to a byte, in index order; `unpacked` needs the shapes back."""
        return {name: torch.from_numpy(np.packbits(tensor.cpu().reshape(-1).numpy())) for name, tensor in self.items()}

    @classmethod
    def unpacked(cls, packed: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> "Mask":
        """The inverse of `packed`."""
        out = {}
        for name, bytes_ in packed.items():
            count = int(np.prod(shapes[name]))
            flat = np.unpackbits(bytes_.cpu().numpy(), count=count).astype(bool)
            out[name] = torch.from_numpy(flat).reshape(shapes[name])
        return cls(out)

    def pairs(self, model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
        """(parameter, its mask on the parameter's device), whatever the model is wrapped in."""
        parameters = {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
        if wrong := self._strangers(model):
            raise InputError(
                f"this mask is for another model: no parameter of the mask's name and shape for {few(wrong)}"
            )
        return [(parameters[name], mask.to(parameters[name].device)) for name, mask in self.items()]

    def fits(self, model: nn.Module) -> bool:
        """Whether the model has a parameter of every name and shape of the mask."""
        return not self._strangers(model)

    def _strangers(self, model: nn.Module) -> list[str]:
        shapes = {plain_name(name): p.shape for name, p in model.named_parameters(remove_duplicate=False)}
        return [name for name, mask in self.items() if shapes.get(name) != mask.shape]


class _Weight:
    """One weight under its mask, and how it was left."""

    __slots__ = ("gradient", "mask", "parameter", "version")

    def __init__(self, parameter: nn.Parameter, mask: Tensor) -> None:
        self.parameter, self.mask = parameter, mask
        self.version = -1
        """The parameter's version after the last step: another one was written since, by load_state_dict say."""
        self.gradient: tuple[int, int] | None = None
        """The identity and version of the gradient when it was masked; None when a step has used it up."""


class _Attachment:
    """The hooks of one `attached` context."""

    def __init__(self, masks: Mapping[nn.Parameter, Tensor], hooks: ExitStack) -> None:
        self.weights = {parameter: _Weight(parameter, mask) for parameter, mask in masks.items()}
        self.hooks = hooks
        self.owned: WeakKeyDictionary[Optimizer, tuple[int, list[_Weight]]] = WeakKeyDictionary()
        """The weights of each adopted optimizer, and how many groups it had when they were looked up."""
        self.arrived: list[_Weight] = []
        """The weights whose gradients the backward pass under way has touched."""
        self.backward = -1
        """The number of that backward pass."""

    def begin(self) -> None:
        with torch.no_grad():
            for weight in self.weights.values():
                _zero(weight.parameter, weight.mask)
                weight.version = weight.parameter._version
                if weight.parameter.grad is not None:
                    _zero(weight.parameter.grad, weight.mask)
        for parameter, weight in self.weights.items():
            self.hooks.callback(_hooked(parameter, partial(self.gradient_arrived, weight)).remove)
        self.hooks.callback(register_optimizer_step_pre_hook(untraced(self.before_step)).remove)

    def gradient_arrived(self, weight: _Weight, parameter: Tensor) -> None:
        # Gradients are masked together when the backward pass ends: on a GPU one launch instead of one each.
        if self.backward != (number := torch._C._current_graph_task_id()):
            self.backward, self.arrived = number, []
            _at_the_end_of_backward(lambda: _at_the_end_of_backward(self.gradients_complete))
        self.arrived.append(weight)

    def gradients_complete(self) -> None:
        _mask_gradients(self.arrived)
        for weight in self.arrived:
            if (grad := weight.parameter.grad) is not None:
                weight.gradient = (id(grad), grad._version)
        self.backward, self.arrived = -1, []

    def adopt(self, optimizer: Optimizer) -> list[_Weight]:
        """The weights an optimizer steps; its slots are masked and its steps followed from the first time on."""
        groups, weights = self.owned.get(optimizer, (0, []))
        if groups != len(optimizer.param_groups):
            if not groups:
                self.hooks.callback(optimizer.register_step_post_hook(untraced(self.after_step)).remove)
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p in self.weights]
            weights = [self.weights[parameter] for parameter in parameters]
            self.owned[optimizer] = len(optimizer.param_groups), weights
            for weight in weights:
                for slot in optimizer.state.get(weight.parameter, {}).values():
                    if isinstance(slot, Tensor) and slot.shape == weight.parameter.shape:
                        _zero(slot, weight.mask)
        return weights

    def before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        unmasked = []
        for weight in self.adopt(optimizer):
            if weight.version != weight.parameter._version:
                with torch.no_grad():
                    _zero(weight.parameter, weight.mask)
            # Gradients that a loop assigned itself never arrived; noise may have been added to those that did.
            grad = weight.parameter.grad
            if grad is not None and weight.gradient != (id(grad), grad._version):
                unmasked.append(weight)
            weight.gradient = None
        _mask_gradients(unmasked)

    def after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        weights = self.adopt(optimizer)
        if type(optimizer) not in _ELEMENTWISE:
            with torch.no_grad():
                for weight in weights:
                    weight.parameter.mul_(weight.mask)
        for weight in weights:
            weight.version = weight.parameter._version


def _mask_gradients(weights: Iterable[_Weight]) -> None:
    grads, masks = [], []
    for weight in weights:
        if (grad := weight.parameter.grad) is None:
            continue
        if grad.layout is torch.strided:
            grads.append(grad)
            masks.append(weight.mask)
        else:
            grad.mul_(weight.mask)
    if grads:
        torch._foreach_mul_(grads, masks)


def _zero(tensor: Tensor, mask: Tensor) -> None:
    tensor.masked_fill_(mask == 0, 0)  # not a product: a pruned NaN or infinity is zero afterwards, too


def _at_the_end_of_backward(function: Callable[[], None]) -> None:
    # Twice, one inside the other, comes after DistributedDataParallel has put the averaged gradients in place.
    torch.autograd.Variable._execution_engine.queue_callback(function)


def _count(kept: Tensor) -> int:
    # numpy counts bools twice as fast as torch on one core, and does not wait for a second one to be free.
    return int(np.count_nonzero(kept.numpy()) if kept.device.type == "cpu" else kept.count_nonzero())


def _hooked(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    trains = parameter.requires_grad
    parameter.requires_grad_(True)  # torch refuses the hook otherwise; a frozen weight may be thawed in the context
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trains)
    return handle


def untraced(hook: StepHook) -> StepHook:
    """The hook, left alone by torch.compile: a loop may compile its optimizer's step, which the hook is called by."""
    return torch.compiler.disable(hook)  # type: ignore[no-untyped-call, no-any-return]


def plain_name(name: str) -> str:
    """A parameter's name without what DataParallel and torch.compile put around it.

    >>> plain_name("module._orig_mod.conv1.weight"), plain_name("encoder._orig_mod.weight")
    ('conv1.weight', 'encoder.weight')
    """
    while name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return name.replace("._orig_mod.", ".")
