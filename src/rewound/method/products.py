"""Products that a forward pass computes outside of the modules whose costs are known.

Whatever they are written with (`F.linear`, `F.conv2d`, `@`, einsum, attention), they arrive at torch's dispatcher as
one of a few operations, which are counted there: one for each pair of numbers that is multiplied, as in `costs`. A
product with a parameter, a part of it, or a view of either is charged to that parameter, so that a mask saves what it
removes. Products of two activations, and those with something that is computed from a parameter, are charged to none.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rewound.foundations.intercepting import Intercepting

_MOST_PARTS = 10_000
"""Into how many parts a parameter is divided at most, where products use parts of it."""


class Product(NamedTuple):
    """One product: how many multiply-adds it takes, the layer that does the same, and what weight takes part in it."""

    operations: int
    layer: type[nn.Module]
    weight: str | None
    parts: tuple[int, ...] = ()
    """How many operations each element of the weight takes part in: one number, or several for equal parts of it."""


class Products:
    """Finds the products of what runs while it looks, except within `hidden`."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.found: list[Product] = []
        self.failed = False
        self._strict = True
        self._hidden = 0
        self._parameters: dict[int, list[tuple[str, Tensor]]] = {}
        for name, parameter in parameters.items():
            if parameter.ndim > 1 and (memory := _memory(parameter)) is not None:
                self._parameters.setdefault(memory, []).append((name, parameter))

    def look(self, until: ExitStack, *, strict: bool = True) -> None:
        """Find products until then; an error is raised in the pass, or noted as failed."""
        self._strict = strict
        # An active mode also keeps nn.TransformerEncoder off its fused path, which would call no submodule.
        until.enter_context(Intercepting(self.called))
        until.enter_context(_Operations(self))

    def hide(self) -> None:
        """Leave out what follows, until `show`: a module whose cost is known has begun."""
        self._hidden += 1

    def show(self) -> None:
        """End what `hide` has begun."""
        self._hidden -= 1

    @contextmanager
    def _hiding(self) -> Iterator[None]:
        self.hide()
        try:
            yield
        finally:
            self.show()

    @property
    def is_looking(self) -> bool:
        """Whether products count now; those of a backward pass within the forward pass do not."""
        return not self._hidden and torch._C._current_autograd_node() is None

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception:  # of a kind of tensor that has no such shape or memory
            if self._strict:
                raise
            self.failed = True

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch; attention is counted here, since kernels may pad what they are given."""
        if func is F.scaled_dot_product_attention and self.is_looking:
            with self._guarded():
                given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
                self.found.append(_attention(given["query"], given["value"]))
            with self._hiding():
                return func(*args, **kwargs)
        before = len(self.found)
        output = func(*args, **kwargs)
        with self._guarded():
            # A product with a copy, which autocast or a broadcast batch makes, is one with what the function was given.
            if len(self.found) == before + 1 and self.found[-1].weight is None:
                first = 1 if getattr(func, "__name__", "").startswith(("add", "badd")) else 0  # the sum's other term
                self.found[-1] = self._charged(self.found[-1], [*_factors((args, kwargs))][first:])
        return output

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of the dispatcher, and note its product if it is one."""
        rule = _RULES.get(operation.overloadpacket)
        if rule is None and torch.is_inference_mode_enabled():  # elsewhere autograd has taken functions apart before
            with _Operations(self):
                if (output := operation.decompose(*args, **kwargs)) is not NotImplemented:
                    return output
        output = operation(*args, **kwargs)
        if rule is not None and self.is_looking:
            with self._guarded():
                product, factors = rule(args, output)
                self.found.append(self._charged(product, factors))
        return output

    def _charged(self, product: Product, factors: Sequence[Tensor]) -> Product:
        """The product, charged to the parameter among its factors, if there is exactly one."""
        found = [place for factor in factors if (place := self._place(factor)) is not None]
        if len(found) != 1:
            return product
        (name, size, parts) = found[0]
        operations, rest = divmod(product.operations, size)
        return product if rest else product._replace(weight=name, parts=tuple(operations * used for used in parts))

    def _place(self, factor: Tensor) -> tuple[str, int, tuple[int, ...]] | None:
        """The parameter that a factor is a view of, how many elements of it, and which of its parts (0 or 1 for each).

        None where it is none, and where its elements are not neighbours.
        """
        memory = _memory(factor)
        for name, parameter in self._parameters.get(memory, ()) if memory is not None else ():
            begin, size = factor.storage_offset() - parameter.storage_offset(), _dense_size(factor)
            if size is None or begin < 0 or begin + size > parameter.numel():
                continue
            if size == parameter.numel():
                return name, size, (1,)
            each = math.gcd(begin, size, parameter.numel())
            if parameter.is_contiguous() and (count := parameter.numel() // each) <= _MOST_PARTS:
                used = range(begin // each, (begin + size) // each)
                return name, size, tuple(int(part in used) for part in range(count))
        return None


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operations that functions come down to."""

    def __init__(self, products: Products) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = products

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.products.run(func, args, kwargs or {})


def _memory(tensor: Tensor) -> int | None:
    """What tensors have in common that share their memory; None for a tensor without any of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a sparse tensor, and some of other classes
        return None


def _dense_size(tensor: Tensor) -> int | None:
    """How many elements a view has, each counted once, if they are neighbours in memory; None otherwise."""
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    size = 1
    for stride, length in sorted(each for each in dimensions if each[0] and each[1] > 1):
        if stride != size:
            return None
        size *= length
    return size


def _factors(given: object) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping):
        yield from _factors(list(given.values()))
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _factors(each)


# What an operation of the dispatcher multiplies: its arguments and output -> the product, and its two factors

_Rule = Callable[[tuple[Any, ...], Any], tuple[Product, Sequence[Tensor]]]


def _matrices(one: int) -> _Rule:
    """The product of argument `one` and the next, over the last dimension of the first."""

    def rule(args: tuple[Any, ...], output: Any) -> tuple[Product, Sequence[Tensor]]:
        left, right = args[one], args[one + 1]
        columns = right.shape[-1] if right.ndim > 1 else 1
        return Product(left.numel() * columns, nn.Linear, None), (left, right)

    return rule


def _convolution(args: tuple[Any, ...], output: Any) -> tuple[Product, Sequence[Tensor]]:
    inputs, weight, transposed = args[0], args[1], args[6]
    positions = inputs.numel() // inputs.shape[1] if transposed else output.numel() // output.shape[1]
    return Product(positions * weight.numel(), nn.Conv2d, None), (inputs, weight)


def _attention(query: Tensor, value: Tensor) -> Product:
    operations = query.shape[:-1].numel() * value.shape[-2] * (query.shape[-1] + value.shape[-1])
    return Product(operations, nn.MultiheadAttention, None)


def _attention_kernel(args: tuple[Any, ...], output: Any) -> tuple[Product, Sequence[Tensor]]:
    return _attention(args[0], args[2]), ()


_aten = torch.ops.aten
_RULES: Mapping[object, _Rule] = {
    **dict.fromkeys((_aten.mm, _aten.bmm, _aten.mv, _aten.dot), _matrices(0)),
    **dict.fromkeys((_aten.addmm, _aten.baddbmm, _aten.addbmm, _aten.addmv), _matrices(1)),
    _aten.convolution: _convolution,
    **dict.fromkeys(
        (
            _aten._scaled_dot_product_flash_attention,
            _aten._scaled_dot_product_flash_attention_for_cpu,
            _aten._scaled_dot_product_efficient_attention,
            _aten._scaled_dot_product_cudnn_attention,
        ),
        _attention_kernel,
    ),
}
