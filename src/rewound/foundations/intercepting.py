"""What comes of functions of torch where code calls them."""

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode


class Intercepting(TorchFunctionMode):
    """Inside, `instead(function, args, kwargs)` gives what code that calls a function of torch gets.

    A function that others consist of is not seen within them.

    >>> import torch
    >>> def doubled(function, args, kwargs):
    ...     return 2 * function(*args, **kwargs)
    >>> with Intercepting(doubled):
    ...     two = torch.ones(2)
    >>> two
    tensor([2., 2.])
    """

    def __init__(self, instead: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.instead = instead

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.instead(func, args, kwargs or {})
