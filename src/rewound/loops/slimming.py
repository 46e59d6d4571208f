"""A user's own model and optimizer made small in place, and large again: `rewound.epochs(..., slim=True)`.

Pruning and rewinding happen in the shapes of the large network, and between them a level trains the small one. All
objects stay the same: the modules, the parameters that optimizer, scheduler and loop hold, and the averages in `also`.
What is small becomes large by zeros where units are gone, which is what a mask leaves there (law 8); a buffer that no
snapshot holds gets back what it had there, as the level that is returned in the end may still have those units.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rewound.foundations.copying import copied
from rewound.foundations.errors import InputError
from rewound.loops.averages import averages, copies
from rewound.loops.optimizers import with_inner
from rewound.loops.snapshot import Stateful, Subjects
from rewound.method.copies import flatten_recurrent
from rewound.method.pruning.mask import plain_name, plain_parameters
from rewound.method.structure.kept import (
    KeptIndices,
    contracted,
    expanded,
    replace_data,
    shapes_of,
    tensors_of,
    zero_gone,
)
from rewound.method.structure.slimming import Slim, has_several, slot_dimensions

T = TypeVar("T")
Counts = list[tuple[nn.Module, Mapping[str, int | Sequence[int]]]]
Resized = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]  # named tensors -> the same in other sizes


class Shrunk:
    """The subjects of a run, which become small, and large again."""

    def __init__(self, subjects: Subjects, slim: Slim) -> None:
        self.subjects, self.slim = subjects, slim
        self._small = shapes_of(slim.model)
        things = averages(subjects)
        self._copies = [(subjects.model, ""), *copies(things, subjects.model, slim.kept)]
        self._states = [thing for thing in things if not isinstance(thing, nn.Module)]
        self._counts: Counts = [
            (module.get_submodule(name), numbers)
            for module, part in self._copies
            for name, numbers in _within(part, slim.counts).items()
        ]
        self._summed: dict[str, int] = {}
        """By the key of slots, the dimension of weights that they were summed over, counted from the last."""
        self._unsaved: list[dict[str, Tensor]] = []
        """Of each copy, the buffers that no state holds, as they were when large: nothing else has what is gone."""
        self._large_counts: Counts = [(module, {key: vars(module)[key] for key in new}) for module, new in self._counts]

    def check(self) -> None:
        """An error for what cannot be made small; nothing changes."""
        self._learn_summed()
        for _, key, name, value in self._slots():
            self._large_slot(name, key, self._small_slot(name, key, value))
        for thing, state in self._new_states(small=True):
            _load(copied(thing), state)

    def make(self, *, small: bool) -> None:
        """Make everything small, or large again."""
        self._learn_summed()
        new_slot = self._small_slot if small else self._large_slot
        slots = [(held, key, new_slot(name, key, value)) for held, key, name, value in self._slots()]
        states = self._new_states(small=small)
        if small:
            self._unsaved = [_unsaved(module, _within(part, self.slim.kept)) for module, part in self._copies]
        for (module, part), unsaved in zip(self._copies, self._unsaved, strict=True):
            kept, shapes = _within(part, self.slim.kept), _within(part, self.slim.shapes)
            _replace_all(module, kept, _resizing(kept, shapes, small=small))
            if not small:
                _put_back(module, unsaved, kept)
        for held, key, value in slots:
            held[key] = value
        for module, numbers in self._counts if small else self._large_counts:
            vars(module).update(numbers)
        for module, _ in self._copies:
            flatten_recurrent(module)
        for thing, state in states:
            _load(thing, state)
        if self.subjects.is_compiled:
            torch.compiler.reset()  # its code is for the shapes before, and after eight of them it would give up

    # Slots of optimizers

    def _slots(self) -> Iterator[tuple[dict[str, Any], str, str, Any]]:
        """The slots of the model's parameters in all optimizers: their dict, the key, and the parameter's name.

        An error for one that holds several tensors of a parameter that shrinks, as Shampoo and SOAP keep them.
        """
        names: dict[Tensor, str] = {
            parameter: name for name, parameter in plain_parameters(self.subjects.model, tied=False).items()
        }
        seen: set[int] = set()
        for optimizer in with_inner(self.subjects.optimizer):
            for parameter, slots in optimizer.state.items():
                if parameter in names and id(slots) not in seen:
                    seen.add(id(slots))
                    for key, value in slots.items():
                        self._check_slot(names[parameter], key, value)
                        yield slots, key, names[parameter], value

    def _check_slot(self, name: str, key: str, value: Any) -> None:
        if self.slim.kept.get(name) and has_several(value):
            raise InputError(
                f"the optimizer's slot {key} of {name} is a {type(value).__name__} of tensors, and it is not known how "
                f"they follow from the parameter's shape, {self.slim.shapes[name]}; use another optimizer, or leave "
                "out slim"
            )

    def _learn_summed(self) -> None:
        """Learn over which dimension slots were summed that have one less than their weights, as Adafactor's do.

        A square weight does not show it, and others do.
        """
        shapes, found = shapes_of(self.subjects.model), dict[str, set[int]]()
        for _, key, name, value in self._slots():
            if isinstance(value, Tensor) and (ways := _summed_over(tuple(value.shape), shapes[name])):
                found[key] = found.get(key, ways) & ways
        self._summed |= {key: next(iter(ways)) for key, ways in found.items() if len(ways) == 1}

    def _ways(self, name: str, key: str, value: Tensor, shape: tuple[int, ...]) -> list[Mapping[int, Tensor]]:
        """What is kept of a slot's dimensions, by each way in which its shape may follow from the parameter's."""
        kept, gone = self.slim.kept[name], self._summed.get(key)
        if gone not in _summed_over(tuple(value.shape), shape):
            return list(slot_dimensions(tuple(value.shape), shape, kept))
        gone += len(shape)
        return [{dim - (dim > gone): left for dim, left in kept.items() if dim != gone}]

    def _small_slot(self, name: str, key: str, value: Any) -> Any:
        if isinstance(value, Tensor) and value.numel() > 1 and self.slim.kept.get(name):
            ways = self._ways(name, key, value, self.slim.shapes[name])
            if len(ways) == 1:
                return contracted({name: value}, {name: ways[0]})[name]
        return self.slim.slot(name, key, value)  # which compares the results of several ways

    def _large_slot(self, name: str, key: str, value: Any) -> Any:
        kept = self.slim.kept.get(name, {})
        if not isinstance(value, Tensor) or not kept:
            return value
        if value.numel() == 1 and tuple(value.shape) != self._small[name]:
            return value  # a count of steps; a slot of the one unit that is left has the parameter's shape
        ways = self._ways(name, key, value, self._small[name])
        if len(ways) != 1:
            raise InputError(
                f"the optimizer's slot {key} of {name} has the shape {tuple(value.shape)}, and it is not known how it "
                f"follows from the parameter's, {self._small[name]}; use another optimizer, or leave out slim"
            )
        sizes = {dim: self._large_size(name, left) for dim, left in ways[0].items()}
        shape = [sizes.get(dim, size) for dim, size in enumerate(value.shape)]
        return expanded({name: value}, {name: ways[0]}, {name: shape})[name]

    def _large_size(self, name: str, left: Tensor) -> int:
        """The size of the large parameter's dimension of which these indices are left."""
        dim = next(dim for dim, indices in self.slim.kept[name].items() if indices is left)
        return self.slim.shapes[name][dim]

    # Averages that are no modules

    def _new_states(self, *, small: bool) -> list[tuple[Stateful, dict[str, object]]]:
        """The averages with their states in other sizes; whatever else is in `also` is left alone."""
        kept, shapes = self.slim.kept, self.slim.shapes
        resized, present = _resizing(kept, shapes, small=small), shapes if small else self._small
        states = [(thing, thing.state_dict()) for thing in self._states]
        changed = [(thing, state, _mapped(state, resized, kept, present)) for thing, state in states]
        return [(thing, new) for thing, old, new in changed if _shapes_in(old) != _shapes_in(new)]


def _resizing(kept: KeptIndices, shapes: Mapping[str, Sequence[int]], *, small: bool) -> Resized:
    """What cuts tensors to what is kept of them, or puts them back into the shapes of the large network."""
    return partial(contracted, kept=kept) if small else partial(expanded, kept=kept, shapes=shapes)


def _summed_over(slot: tuple[int, ...], shape: tuple[int, ...]) -> set[int]:
    """Over which of the last two dimensions of a weight a slot may have been summed, counted from the last."""
    if len(slot) != len(shape) - 1 or not slot:
        return set()
    return {gone for gone in (-2, -1) if slot == tuple(size for d, size in enumerate(shape, -len(shape)) if d != gone)}


def _mapped(
    state: Mapping[str, object], resized: Resized, kept: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, object]:
    """A state with other tensors for those that have the name and the shape of a tensor that shrinks."""
    found: dict[str, object] = {}
    for name, value in state.items():
        plain = plain_name(name) if isinstance(name, str) else ""
        if isinstance(value, Mapping):
            found[name] = _mapped(value, resized, kept, shapes)
        elif isinstance(value, Tensor) and plain in kept and tuple(value.shape) == shapes[plain]:
            found[name] = resized({plain: value})[plain]
        else:
            found[name] = value
    return found


def _load(thing: Stateful, state: dict[str, object]) -> None:
    """Load a state of other shapes, and check that it is there."""
    kind = type(thing).__name__
    try:
        thing.load_state_dict(state)
        fits = _shapes_in(thing.state_dict()) == _shapes_in(state)
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{kind} in also cannot be made smaller ({error}); {_REMEDY}") from error
    if not fits:
        raise InputError(f"{kind} in also cannot be made smaller: it keeps the shapes that it has; {_REMEDY}")


_REMEDY = "let its load_state_dict take tensors of other shapes, or average with torch's AveragedModel"


def _shapes_in(state: Mapping[str, object]) -> dict[str, object]:
    return {
        name: _shapes_in(value) if isinstance(value, Mapping) else getattr(value, "shape", None)
        for name, value in state.items()
    }


def _replace_all(module: nn.Module, names: Collection[str], resized: Resized) -> None:
    """Give tensors of a module another size, and their gradients, which may still wait for a step."""
    tensors = {id(tensor): (name, tensor) for name, tensor in tensors_of(module).items() if name in names}  # tied: once
    held = dict(tensors.values())
    gradients = {name: tensor.grad for name, tensor in held.items()}
    found = {name: grad for name, grad in gradients.items() if grad is not None and grad.layout is torch.strided}
    sizes, slopes = resized(held), resized(found)
    for name, tensor in held.items():
        replace_data(tensor, sizes[name])
        tensor.grad = slopes.get(name)


def _unsaved(module: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Copies of those buffers of a module that its state does not hold."""
    saved = {plain_name(name) for name in module.state_dict()}
    buffers = ((name, each) for name, each in tensors_of(module).items() if name in names and name not in saved)
    return {name: each.detach().clone() for name, each in buffers}


def _put_back(module: nn.Module, large: Mapping[str, Tensor], kept: KeptIndices) -> None:
    """Put back into buffers what was gone of them while they were small."""
    tensors = tensors_of(module)
    with torch.no_grad():
        for name, before in large.items():
            left = torch.ones_like(before, dtype=torch.bool)
            zero_gone(left, kept[name])
            tensor = tensors[name]
            tensor.copy_(tensor.where(left.to(tensor.device), before.to(tensor.device)))


def _within(part: str, named: Mapping[str, T]) -> dict[str, T]:
    """What belongs to a part of the network, by the names that it has there."""
    if not part:
        return dict(named)
    start = f"{part}."
    return {
        name.removeprefix(start) if name != part else "": each
        for name, each in named.items()
        if f"{name}.".startswith(start)
    }
