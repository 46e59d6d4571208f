"""Several optimizers of one loop as one: its groups are theirs, and every step of one of them is a step of its own.

Muon for matrices and AdamW for the rest, or a generator's and a critic's: a loop steps them in the same order again and
again, so that the n-th step of an epoch, whoever takes it, finds the same learning rates in all groups when it is
replayed.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from rewound.errors import InputError

StateDict = dict[str, Any]


class Joint(Optimizer):
    """Reads and restores all its members as one optimizer; it never steps itself."""

    def __init__(self, members: Sequence[Optimizer]) -> None:  # no super().__init__: nothing is its own
        self.members = tuple(members)
        self._sizes = [len(member.param_groups) for member in members]

    def __repr__(self) -> str:
        return f"Joint({', '.join(map(repr, self.members))})"

    @property
    def param_groups(self) -> list[StateDict]:  # type: ignore[override]  # loading a state replaces them
        for member, size in zip(self.members, self._sizes, strict=True):
            if (now := len(member.param_groups)) != size:
                raise InputError(
                    f"{type(member).__name__} had {size} parameter groups and has {now}: of several optimizers, give "
                    "each all of its groups before the first epoch"
                )
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> dict[Tensor, StateDict]:  # type: ignore[override]
        return {parameter: slots for member in self.members for parameter, slots in member.state.items()}

    def state_dict(self) -> StateDict:
        states = [member.state_dict() for member in self.members]
        return {"members": states, "param_groups": [group for state in states for group in state["param_groups"]]}

    def load_state_dict(self, state: StateDict) -> None:
        for member, mine in zip(self.members, state["members"], strict=True):
            member.load_state_dict(mine)


def joint(optimizers: Sequence[Optimizer]) -> Optimizer:
    """One optimizer for all of them; a single one is itself."""
    if not optimizers:
        raise InputError("no optimizer is given; give the one that trains the model, or all of them in a list")
    return optimizers[0] if len(optimizers) == 1 else Joint(optimizers)


def members(optimizer: Optimizer) -> Sequence[Optimizer]:
    """The optimizers that take steps.

    >>> import torch
    >>> pair = [torch.optim.SGD([torch.zeros(1)], lr=rate) for rate in (0.1, 0.2)]
    >>> [group["lr"] for group in joint(pair).param_groups], optimizer_kind(joint(pair)), optimizer_kind(pair[0])
    ([0.1, 0.2], 'SGD + SGD', 'SGD')
    """
    return optimizer.members if isinstance(optimizer, Joint) else (optimizer,)


def optimizer_kind(optimizer: Optimizer) -> str:
    """What kind of optimizer it is, for a person."""
    return " + ".join(type(member).__name__ for member in members(optimizer))
