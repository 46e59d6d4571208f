"""W (.) m in anybody's training loop (law 3): the hooks that keep pruned weights at zero while others train them.

Weights, gradients and optimizer slots are masked once at the start; then gradients as they arrive, before any clipping;
slots whenever an optimizer loads its state; and weights before every step, since PyTorch does not report a write by
`.data`. For optimizers that treat each element by itself, zero weight, gradient and slot stay zero; for all others, and
where a zero would be divided by an epsilon of zero, the weights are masked again after every step. What was written
after the last step is masked at the end, with a warning.

To mask is to fill with zeros, whatever was there: NaN and infinity times zero would be NaN. It is done by a product all
the same, of the bits taken as integers. That is as fast as a product of floats, and one launch for many tensors on a
GPU; `masked_fill_` takes ten times as long on a CPU.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import LBFGS
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from rewound.foundations.errors import warn

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
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
StepHook = Callable[[Optimizer, Any, Any], None]
_STEP = Optimizer.profile_hook_step(print).__code__  # what torch puts around the step of every kind of optimizer


@contextmanager
def attached(pairs: Iterable[tuple[nn.Parameter, Tensor]], optimizers: Iterable[Optimizer]) -> Iterator["Attachment"]:
    """Inside, every parameter is zero where its mask is False, after any optimizer's step; masks may shrink."""
    masks: dict[nn.Parameter, Tensor] = {}
    for parameter, mask in pairs:
        dtype = _INTEGERS.get(parameter.element_size(), torch.bool)
        own = torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(mask)  # in its memory format
        masks[parameter] = own * masks[parameter] if parameter in masks else own  # tied: under both names
    with ExitStack() as hooks:
        attachment = Attachment(masks, hooks)
        attachment.begin()
        for optimizer in optimizers:
            attachment.adopt(optimizer)
        yield attachment
        attachment.end()


def untraced(hook: StepHook) -> StepHook:
    """The hook, left alone by torch.compile: a loop may compile its optimizer's step, which the hook is called by."""
    return torch.compiler.disable(hook)  # type: ignore[no-untyped-call, no-any-return]


def steps_under_way(optimizer: Optimizer) -> int:
    """In a hook on steps: how many steps of an optimizer are on the stack, 2 in the inner one of `super().step()`.

    A parent's step has hooks once the process has made an optimizer of that very class, and none before: whoever counts
    must leave it out. The stack tells, also after a step that has raised an error.
    """
    frame: FrameType | None = sys._getframe(1)
    steps = 0
    while frame is not None:
        steps += frame.f_code is _STEP and frame.f_locals["self"] is optimizer
        frame = frame.f_back
    return steps


class _Weight:
    """One weight under its mask."""

    __slots__ = ("gradient", "mask", "parameter")

    def __init__(self, parameter: nn.Parameter, mask: Tensor) -> None:
        self.parameter, self.mask = parameter, mask
        self.gradient: tuple[int, int] | None = None
        """The identity and version of the gradient when it was masked; None when a step has used it up."""


class Attachment:
    """The hooks of one `attached` context."""

    def __init__(self, masks: Mapping[nn.Parameter, Tensor], hooks: ExitStack) -> None:
        self.weights = {parameter: _Weight(parameter, mask) for parameter, mask in masks.items()}
        self.hooks = hooks
        self.owned: WeakKeyDictionary[Optimizer, tuple[int, list[_Weight]]] = WeakKeyDictionary()
        """The weights of each adopted optimizer, and how many groups it had when they were looked up."""
        self.arrived: dict[int, list[_Weight]] = {}
        """The weights whose gradients a backward pass has touched, by its number; checkpointing nests them."""

    def begin(self) -> None:
        with torch.no_grad():
            for weight in self.weights.values():
                zero(weight.parameter, weight.mask)
                if weight.parameter.grad is not None:
                    zero(weight.parameter.grad, weight.mask)
        for parameter, weight in self.weights.items():
            self.hooks.callback(_hooked(parameter, partial(self.gradient_arrived, weight)).remove)
        self.hooks.callback(register_optimizer_step_pre_hook(untraced(self.before_step)).remove)

    def shrink(self, pairs: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Prune more, between two steps: what the masks prune now is zero in weights, gradients and slots."""
        for parameter, mask in pairs:
            self.weights[parameter].mask.mul_(mask)
        weights = list(self.weights.values())
        _mask_weights(weights)
        _mask_gradients(weights)
        for optimizer in list(self.owned):
            _mask_slots(optimizer, self.adopt(optimizer))

    def end(self) -> None:
        """Mask what was written after the last step, and say so: forward passes have used it."""
        revived = written = 0
        for weight in self.weights.values():
            pruned = weight.parameter.detach()[weight.mask == 0]
            revived += int(pruned.count_nonzero())
            # NaN is what a step makes of a pruned weight whose gradient is no number: nobody wrote it.
            written += int(pruned[pruned.isfinite()].count_nonzero())
        if revived:
            with torch.no_grad():
                for weight in self.weights.values():
                    zero(weight.parameter, weight.mask)
        if written:
            warn(
                f"{written:,} pruned weights were not zero when training under the mask ended, and were set to zero: "
                "the loop writes weights outside optimizer.step(); call mask.apply(model) after it does"
            )

    def gradient_arrived(self, weight: _Weight, parameter: Tensor) -> None:
        # Gradients are masked together when the backward pass ends: on a GPU one launch instead of one each.
        if (number := torch._C._current_graph_task_id()) not in self.arrived:
            self.arrived[number] = []
            complete = partial(self.gradients_complete, number)
            _at_the_end_of_backward(lambda: _at_the_end_of_backward(complete))
        self.arrived[number].append(weight)

    def gradients_complete(self, number: int) -> None:
        weights = self.arrived.pop(number, [])
        _mask_gradients(weights)
        for weight in weights:
            if (grad := weight.parameter.grad) is not None:
                weight.gradient = (id(grad), grad._version)

    def adopt(self, optimizer: Optimizer) -> list[_Weight]:
        """The weights an optimizer steps; its slots are masked and its steps followed from the first time on."""
        groups, weights = self.owned.get(optimizer, (0, []))
        if groups != len(optimizer.param_groups):
            if not groups:
                self.hooks.callback(optimizer.register_step_post_hook(untraced(self.after_step)).remove)
                self.hooks.callback(optimizer.register_load_state_dict_post_hook(self.state_loaded).remove)
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p in self.weights]
            weights = [self.weights[parameter] for parameter in parameters]
            self.owned[optimizer] = len(optimizer.param_groups), weights
            _mask_slots(optimizer, weights)
        return weights

    def state_loaded(self, optimizer: Optimizer) -> None:
        _mask_slots(optimizer, self.adopt(optimizer))

    def before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if steps_under_way(optimizer) > 1:
            return
        weights, unmasked = self.adopt(optimizer), []
        _mask_weights(weights)  # with weight decay, what was written since the last step would get into the slots
        for weight in weights:
            # Gradients that a loop assigned itself never arrived; noise may have been added to those that did.
            grad = weight.parameter.grad
            if grad is not None and weight.gradient != (id(grad), grad._version):
                unmasked.append(weight)
            weight.gradient = None
        _mask_gradients(unmasked)

    def after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        weights = self.adopt(optimizer)
        if type(optimizer) in _ELEMENTWISE:
            if may_divide_by_zero(optimizer, self.weights):
                _mask_weights(weights)
                _mask_slots(optimizer, weights)  # Adadelta keeps what it divided
        elif steps_under_way(optimizer) == 1:
            _mask_weights(weights)


def may_divide_by_zero(optimizer: Optimizer, weights: Collection[nn.Parameter]) -> bool:
    """Whether the update of a zero weight may be 0/0: epsilon is zero, or too small for the weights' type."""
    return any(
        group["eps"] < torch.finfo(parameter.dtype).smallest_normal
        for group in optimizer.param_groups
        if "eps" in group
        for parameter in group["params"]
        if parameter in weights
    )


@torch.no_grad()
def _mask_weights(weights: Sequence[_Weight]) -> None:
    _zero_all([weight.parameter for weight in weights], [weight.mask for weight in weights])


def _mask_slots(optimizer: Optimizer, weights: Sequence[_Weight]) -> None:
    for weight in weights:
        for slot in optimizer.state.get(weight.parameter, {}).values():
            if isinstance(slot, Tensor) and slot.shape == weight.parameter.shape:
                _mask_slot(slot, weight.mask.to(slot.device))  # which an optimizer may keep on the CPU
    if isinstance(optimizer, LBFGS):
        _forget_curvature(optimizer, {weight.parameter: weight.mask for weight in weights})


def _mask_slot(slot: Tensor, mask: Tensor) -> None:
    """Set to zero what is pruned of a slot; not in quantised ones that are plain codes, whose 0 stands for a value.

    No optimizer that keeps such codes is among the elementwise ones: its weights are masked after each step.
    """
    if type(slot) in (Tensor, nn.Parameter):
        if slot.is_floating_point() or slot.is_complex():
            zero(slot, mask)
    else:  # as torchao's, which can be copied and little else
        values = torch.empty(slot.shape, dtype=slot.dtype, device=slot.device).copy_(slot)
        zero(values, mask)
        slot.copy_(values)


def _forget_curvature(optimizer: LBFGS, masks: Mapping[nn.Parameter, Tensor]) -> None:
    """Start LBFGS anew if its last gradient was the dense network's: products of its vectors cannot be masked."""
    (group,) = optimizer.param_groups
    state = optimizer.state.get(group["params"][0], {})
    if (gradient := state.get("prev_flat_grad")) is None:
        return
    kept = [masks.get(parameter, torch.ones_like(parameter)).reshape(-1) for parameter in group["params"]]
    if gradient[torch.cat(kept) == 0].any():
        optimizer.state.clear()


def _mask_gradients(weights: Iterable[_Weight]) -> None:
    grads, masks = [], []
    for weight in weights:
        if (grad := weight.parameter.grad) is None:
            continue
        if grad.requires_grad:  # backward(create_graph=True): a second derivative comes through here
            zero(grad, weight.mask)
        else:
            grads.append(grad)
            masks.append(weight.mask)
    _zero_all(grads, masks)


def _zero_all(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Set what is pruned of each to zero, together."""
    bits, factors = [], []
    for tensor, mask in zip(tensors, masks, strict=True):
        dtype = _INTEGERS.get(tensor.element_size())
        if tensor.layout is not torch.strided or dtype is None or tensor.is_neg():  # a negative view is not its bits
            zero(tensor, mask)
        else:
            bits.append(tensor.view(dtype))
            factors.append(mask)
    if bits:
        torch._foreach_mul_(bits, factors)


def zero(tensor: Tensor, mask: Tensor) -> None:
    """Set what is pruned to zero, whatever it was."""
    if tensor.layout is torch.strided:
        tensor.masked_fill_(mask == 0, 0)
    else:  # torch fills no sparse tensor; its values may have been summed up or not
        tensor._values().masked_fill_(mask[tuple(tensor._indices())] == 0, 0)


def _at_the_end_of_backward(function: Callable[[], None]) -> None:
    # A callback queued by a callback runs after DistributedDataParallel has put the averaged gradients in place.
    torch.autograd.Variable._execution_engine.queue_callback(function)


def _hooked(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    trains = parameter.requires_grad
    parameter.requires_grad_(True)  # torch refuses the hook otherwise; a frozen weight may be thawed in the context
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trains)
    return handle
