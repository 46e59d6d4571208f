"""Several optimizers of one loop as one: its groups are theirs, and every step of one of them is a step of its own.

Muon for matrices and AdamW for the rest, or a generator's and a critic's: a loop steps them in the same order again and
again, so that the n-th step of an epoch, whoever takes it, finds the same learning rates in all groups when it is
replayed.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial, update_wrapper
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import InputError

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


def held_by(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers inside one that is around them, as in Lookahead and SAM, by the names of its attributes."""
    return {name: held for name, held in vars(optimizer).items() if isinstance(held, Optimizer)}


def with_held(optimizer: Optimizer) -> list[Optimizer]:
    """The members with all that they hold, the innermost first."""
    inner = [each for member in members(optimizer) for held in held_by(member).values() for each in with_held(held)]
    return [*inner, *members(optimizer)]


def unsaved(optimizer: Optimizer) -> list[Optimizer]:
    """The held optimizers whose slots are in nobody's `state_dict`: SAM saves its own, and not its base's momentum."""
    return [
        held
        for holder in with_held(optimizer)
        if type(holder).state_dict is Optimizer.state_dict
        for held in held_by(holder).values()
        if held.state is not holder.state
    ]


def complete(optimizer: Optimizer) -> None:
    """Give an optimizer that does not call `Optimizer.__init__`, as timm's Lookahead, the hooks it would have got."""
    for name in ("step", "state_dict", "load_state_dict"):
        for when in ("pre", "post"):
            if not hasattr(optimizer, attribute := f"_optimizer_{name}_{when}_hooks"):
                setattr(optimizer, attribute, OrderedDict())
    if not hasattr(optimizer, "_zero_grad_profile_name"):
        optimizer._patch_step_function()
    step = vars(optimizer).get("step")  # that a scheduler has put there, around the step that had no hooks
    if step is not None and not hasattr(step, "hooked"):
        hooked = Optimizer.profile_hook_step(lambda _, *args, **kwargs: step(*args, **kwargs))
        optimizer.step = update_wrapper(partial(hooked, optimizer), step)  # type: ignore[method-assign]
        optimizer.step.hooked = True  # type: ignore[attr-defined]


def optimizer_kind(optimizer: Optimizer) -> str:
    """What kind of optimizer it is, for a person."""
    return " + ".join(type(member).__name__ for member in members(optimizer))
