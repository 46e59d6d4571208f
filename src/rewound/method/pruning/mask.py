"""Which weights are kept: a mapping from parameter names to boolean tensors, beside the model and never inside it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import InputError, check_kind, few, shown
from rewound.method.pruning.attachment import attached, zero

_T = TypeVar("_T")
_WRAPPERS = ("module.", "_orig_mod.")


class Mask(Mapping[str, Tensor]):
    """Parameter name -> boolean tensor, True where the weight is kept.

    >>> mask = Mask({"weight": torch.tensor([[True, False], [False, False]])})
    >>> mask.density, mask.kept, mask.total
    (0.25, 1, 4)
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        check_kind("a mask", tensors, Mapping, "give boolean tensors by the names of parameters")
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.bool:
                given = tensor.dtype if isinstance(tensor, Tensor) else shown(tensor)
                raise InputError(f"the mask of {name!r} must be a tensor of bool, not {given}")
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

    def __eq__(self, other: object) -> bool:
        """Whether the other keeps the same weights of the same tensors, on whatever device.

        >>> Mask({"weight": torch.tensor([True, False])}) == Mask({"weight": torch.tensor([True, False])})
        True
        """
        if not isinstance(other, Mask):
            return NotImplemented
        return self.keys() == other.keys() and all(torch.equal(self[name].cpu(), other[name].cpu()) for name in self)

    @property
    def density(self) -> float:
        """The fraction of weights kept."""
        return self.kept / self.total if self.total else 1.0

    def apply(self, model: nn.Module) -> None:
        """Set the pruned weights of `model` to exactly zero (also for an EMA copy made earlier)."""
        with torch.no_grad():
            for parameter, mask in self.pairs(model):
                zero(parameter, mask)

    def attached(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None
    ) -> AbstractContextManager[object]:
        """Inside this context any loop trains W (.) m: pruned weights are exactly zero after every step.

        What a loop itself writes into weights between steps, by `.data` or load_state_dict, is masked at the next step;
        call `apply` where a forward pass comes before that.

        >>> layer = nn.Linear(2, 1, bias=False)
        >>> sgd = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        >>> with Mask({"weight": torch.tensor([[True, False]])}).attached(layer, sgd):
        ...     for _ in range(3):
        ...         layer(torch.ones(1, 2)).sum().backward()
        ...         sgd.step()
        >>> layer.weight[0, 1].item()
        0.0
        """
        several = optimizer if isinstance(optimizer, Sequence) else () if optimizer is None else (optimizer,)
        return attached(self.pairs(model), several)

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
        check_kind("model", model, nn.Module, "give the model itself")
        parameters = plain_parameters(model, tied=True)
        self.check_shapes({name: parameter.shape for name, parameter in parameters.items()})
        return [(parameters[name], mask.to(parameters[name].device)) for name, mask in self.items()]

    def fits(self, model: nn.Module) -> bool:
        """Whether the model has a parameter of every name and shape of the mask."""
        parameters = plain_parameters(model, tied=True)
        return not self._strangers({name: parameter.shape for name, parameter in parameters.items()})

    def check_shapes(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """An error for a mask of a model whose parameters have other names and shapes than these."""
        if wrong := self._strangers(shapes):
            may_be_slim = all(fits_into(shapes.get(name), self[name].shape) for name in wrong)
            raise InputError(
                f"this mask is for another model: no parameter here has the name and shape of {few(wrong)}"
                + ("; if this is the slim network, its mask is of the large one: use it without" if may_be_slim else "")
            )

    def _strangers(self, shapes: Mapping[str, Sequence[int]]) -> list[str]:
        """The names under which there is no parameter of the mask's shape."""
        return [name for name, mask in self.items() if tuple(shapes.get(name, (-1,))) != tuple(mask.shape)]


def fits_into(small: Sequence[int] | None, large: Sequence[int]) -> bool:
    """Whether a shape may be what is left of another."""
    return small is not None and len(small) == len(large) and all(a <= b for a, b in zip(small, large, strict=True))


def _count(kept: Tensor) -> int:
    # numpy counts bools twice as fast as torch on one core, and does not wait for a second one to be free.
    return int(np.count_nonzero(kept.numpy()) if kept.device.type == "cpu" else kept.count_nonzero())


def plain_name(name: str) -> str:
    """A parameter's name without what DataParallel and torch.compile put around it.

    >>> plain_name("module._orig_mod.conv1.weight"), plain_name("encoder._orig_mod.weight")
    ('conv1.weight', 'encoder.weight')
    """
    while name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return name.replace("._orig_mod.", ".")


def bare_model(model: nn.Module) -> nn.Module:
    """The model without what torch.compile and data parallelism have put around it."""
    while True:
        if isinstance(within := getattr(model, "_orig_mod", None), nn.Module):
            model = within
        elif isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        else:
            return model


def by_plain_name(named: Mapping[str, _T]) -> dict[str, _T]:
    """The same things by their plain names, if those tell them apart."""
    plain: dict[str, _T] = {}
    for name, thing in named.items():
        if plain.setdefault(plain_name(name), thing) is not thing:
            raise InputError(
                f"two tensors of this model are called {plain_name(name)} once `module.` and `_orig_mod.` are taken "
                "away; rename one of the layers"
            )
    return plain


def first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The first name of each tensor: tied ones lie in the same memory."""
    first: dict[object, str] = {}
    memory = {name: (t.device, t.data_ptr(), t.dtype, t.shape, t.stride()) for name, t in tensors.items()}
    return {name: first.setdefault(memory[name], name) if t.numel() else name for name, t in tensors.items()}


def check_memory(model: nn.Module) -> None:
    """An error for a model that has shapes and no values."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError(
            "this model has no memory yet (meta device); call model.to_empty(device=...) and load its weights first"
        )


def check_apart(model: nn.Module) -> None:
    """Refuse parameters that lie in the same memory and are not one: they change together, and are masked apart."""
    places = [
        (str(each.device), each.data_ptr(), each.data_ptr() + each.itemsize * _reach(each), name)
        for name, each in model.named_parameters()
        if type(each) is nn.Parameter and each.layout == torch.strided and each.numel() and not each.is_meta
    ]
    last: tuple[str, int, str] = "", 0, ""
    for device, start, end, name in sorted(places):
        if device == last[0] and start < last[1]:
            raise InputError(
                f"{last[2]} and {name} are two parameters in the same memory, so that what changes one also changes "
                "the other; make them one parameter of the model, or let forward compute with one of them"
            )
        last = device, end, name


def _reach(tensor: Tensor) -> int:
    """How many elements lie between the first and the last one of a tensor, in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def plain_parameters(model: nn.Module, *, tied: bool) -> dict[str, nn.Parameter]:
    """A model's parameters by plain name, tied ones once or under each of their names."""
    parameters = by_plain_name(dict(model.named_parameters(remove_duplicate=not tied)))
    if lazy := [name for name, parameter in parameters.items() if is_lazy(parameter)]:
        raise InputError(f"{few(lazy)} have no shape yet (lazy layers); run a batch through the model first")
    return parameters


def all_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """All plain names that a model has for a parameter, by each of them: a tied weight has several.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    >>> model[1].weight = model[0].weight
    >>> all_names(model)
    {'0.weight': ('0.weight', '1.weight'), '0.bias': ('0.bias',), '1.weight': ('0.weight', '1.weight')}
    """
    parameters = by_plain_name(dict(model.named_parameters(remove_duplicate=False)))
    names: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(names[id(parameter)]) for name, parameter in parameters.items()}
