"""The numbers in an optimizer's parameter groups: its learning rates and whatever else a schedule may move."""

from collections.abc import Mapping

from torch import Tensor
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import InputError
from rewound.loops.joint import optimizer_kind

Value = float | tuple[float, ...]
Group = dict[str, object]


def hyperparameters(group: Group) -> dict[str, Value]:
    """The numbers of a parameter group; tensors become numbers, names and switches are left out.

    >>> hyperparameters({"params": [], "lr": 0.1, "betas": (0.9, 0.99), "nesterov": True, "dampening": 0})
    {'lr': 0.1, 'betas': (0.9, 0.99), 'dampening': 0.0}
    """
    found: dict[str, Value] = {}
    for name, value in group.items():
        kind = type(value)  # asked first: this is done twice in every step
        if kind is float:
            found[name] = value  # type: ignore[assignment]
        elif kind is bool or kind is list or value is None:
            continue
        elif (isinstance(value, Tensor) and value.ndim == 0) or (
            isinstance(value, int | float) and not isinstance(value, bool)
        ):
            found[name] = float(value)
        elif isinstance(value, tuple) and value and all(isinstance(v, int | float) for v in value):
            found[name] = tuple(map(float, value))
    return found


def check_rates(optimizer: Optimizer) -> None:
    """An error for a group whose learning rate is no number, as with optimizers that find their own."""
    for number, group in enumerate(optimizer.param_groups):
        if not isinstance(hyperparameters(group).get("lr"), float):
            raise InputError(
                f"parameter group {number} of {optimizer_kind(optimizer)} has lr={group.get('lr')!r}, which can be "
                "neither recorded nor rewound; give each group a number, and a scheduler if it is to move"
            )


def assign(group: Group, values: Mapping[str, Value]) -> None:
    """Set hyperparameters of a group; a tensor is filled in place, since a compiled or captured step reads it there."""
    for name, value in values.items():
        if isinstance(held := group.get(name), Tensor):
            held.fill_(rate_of(value))
        else:
            group[name] = value


def rate_of(value: Value) -> float:
    """A learning rate, which is one number."""
    if isinstance(value, tuple):
        raise TypeError(f"a learning rate is one number, not {value}")
    return value
