"""What went wrong, said to a person: what was given, the limit, the remedy, in one sentence."""


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
