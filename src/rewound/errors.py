"""What went wrong, said to a person: what was given, the limit, the remedy, in one sentence."""

from collections.abc import Sequence


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


def few(names: Sequence[str]) -> str:
    """The first five of many names.

    >>> few(["a", "b"]), few(list("abcdefg"))
    ('a, b', 'a, b, c, d, e and 2 more')
    """
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
