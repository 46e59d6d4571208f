"""Which weights are kept: a mapping from parameter names to boolean tensors, beside the model and never inside it.

`attached` is W (.) m for any training loop (law 3). Weights, gradients and optimizer slots are masked once when it
starts, then gradients as they arrive, before any clipping. For optimizers that treat each element by itself, zero
weight, gradient and slot stay zero; for all others the weights are masked again after every step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from weakref import WeakSet

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


class _Attachment:
    """The hooks of one `attached` context."""

    def __init__(self, masks: dict[nn.Parameter, Tensor], hooks: ExitStack) -> None:
        self.masks = masks
        self.hooks = hooks
        self.adopted: WeakSet[Optimizer] = WeakSet()
        self.arrived: list[Tensor] = []
        """The weights whose gradients the backward pass under way has touched."""
        self.backward = -1
        """The number of that backward pass."""
        self.masked_as: dict[Tensor, tuple[int, int]] = {}
        """The identity and version of each gradient when it was masked."""
        self.stepped_to: dict[Tensor, int] = {}
        """The version of each weight after the last step: one that differs was written to, by load_state_dict say."""

    def begin(self) -> None:
        with torch.no_grad():
            for parameter, mask in self.masks.items():
                _zero(parameter, mask)
                self.stepped_to[parameter] = parameter._version
                if parameter.grad is not None:
                    _zero(parameter.grad, mask)
        for parameter in self.masks:
            self.hooks.callback(_hooked(parameter, self.gradient_arrived).remove)
        self.hooks.callback(register_optimizer_step_pre_hook(self.before_step).remove)

    def gradient_arrived(self, parameter: Tensor) -> None:
        # Masking them together when the backward pass ends takes a third of the time of one after the other.
        if self.backward != (number := torch._C._current_graph_task_id()):
            self.backward, self.arrived = number, []
            _at_the_end_of_backward(lambda: _at_the_end_of_backward(self.gradients_complete))
        self.arrived.append(parameter)

    def gradients_complete(self) -> None:
        self._mask_gradients(self.arrived)
        self.masked_as |= {p: (id(p.grad), p.grad._version) for p in self.arrived if p.grad is not None}
        self.backward, self.arrived = -1, []

    def _mask_gradients(self, parameters: Sequence[Tensor]) -> None:
        pairs = [(p.grad, self.masks[p]) for p in parameters if p.grad is not None]  # type: ignore[index]  # ours alone
        for grad, mask in pairs:
            if grad.layout != torch.strided:
                grad.mul_(mask)
        if dense := [(grad, mask) for grad, mask in pairs if grad.layout == torch.strided]:
            torch._foreach_mul_(*map(list, zip(*dense, strict=True)))

    def adopt(self, optimizer: Optimizer) -> None:
        """Mask an optimizer's slots, once, and follow its steps."""
        if optimizer in self.adopted:
            return
        self.adopted.add(optimizer)
        for parameter in self._owned(optimizer):
            for slot in optimizer.state.get(parameter, {}).values():
                if isinstance(slot, Tensor) and slot.shape == parameter.shape:
                    _zero(slot, self.masks[parameter])
        self.hooks.callback(optimizer.register_step_post_hook(self.after_step).remove)

    def before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self.adopt(optimizer)
        unmasked: list[Tensor] = []
        for parameter in self._owned(optimizer):
            if self.stepped_to[parameter] != parameter._version:
                with torch.no_grad():
                    _zero(parameter, self.masks[parameter])
            # Gradients that a loop assigned itself never arrived; noise may have been added to those that did.
            grad = parameter.grad
            if grad is not None and self.masked_as.pop(parameter, None) != (id(grad), grad._version):
                unmasked.append(parameter)
        self._mask_gradients(unmasked)

    def after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        couples = type(optimizer) not in _ELEMENTWISE
        with torch.no_grad():
            for parameter in self._owned(optimizer):
                if couples:
                    parameter.mul_(self.masks[parameter])
                self.stepped_to[parameter] = parameter._version

    def _owned(self, optimizer: Optimizer) -> list[nn.Parameter]:
        return [p for group in optimizer.param_groups for p in group["params"] if p in self.masks]


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


def plain_name(name: str) -> str:
    """A parameter's name without what DataParallel and torch.compile put around it.

    >>> plain_name("module._orig_mod.conv1.weight"), plain_name("encoder._orig_mod.weight")
    ('conv1.weight', 'encoder.weight')
    """
    while name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return name.replace("._orig_mod.", ".")
