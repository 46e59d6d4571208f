"""What went wrong, said to a person: what was given, the limit, the remedy, in one sentence."""

from collections.abc import Sequence
from numbers import Integral, Real


class InputError(ValueError):
    """A request that cannot be honoured as given; the command line prints it and exits with 2."""


class Diverged(ArithmeticError):
    """Training produced a loss that is not a finite number."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"the loss became {loss} by step {step}")
        self.step = step
        self.loss = loss

    def __reduce__(self) -> tuple[type["Diverged"], tuple[int, float]]:
        return type(self), (self.step, self.loss)


def as_number(name: str, value: object) -> float:
    """What was given for `name`, if it is a number.

    >>> as_number("compression", 10)
    10.0
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} must be a number, not {value!r}{_remedy(value)}")
    return float(value)


def as_whole(name: str, value: object) -> int:
    """What was given for `name`, if it is a whole number.

    >>> as_whole("training_epochs", 90)
    90
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} must be a whole number, not {value!r}{_remedy(value)}")
    return int(value)


def _remedy(value: object) -> str:
    return "; leave out the quotes" if isinstance(value, str) else ""


def few(names: Sequence[str]) -> str:
    """The first five of many names.

    >>> few(["a", "b"]), few(list("abcdefg"))
    ('a, b', 'a, b, c, d, e and 2 more')
    """
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
