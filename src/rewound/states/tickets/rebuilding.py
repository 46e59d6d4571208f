"""How a ticket's network is built again: the large one that it was saved from, and an example of what that takes.

What a file says is not trusted. Nothing is imported or run because a ticket names it: of the recipes that tickets name,
only those that come with the package are built; any other network is given, or named, by the user. Of the example that
a network was traced with, a ticket has types, shapes and ranges, and no data; another of that kind is drawn.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rewound.foundations.errors import InputError, shown
from rewound.foundations.names import imported
from rewound.states.tickets.fileformat import DTYPE_NAMES, DTYPES
from rewound.tasks.recipe import Recipe
from rewound.tasks.recipes import RECIPES, recipe_named

_MOST_NUMBERS = 2**24
"""How many an example may have that is drawn on the word of a file."""
Model = nn.Module | Callable[[], nn.Module] | str


def recipe_of(about: Mapping[str, object], fields: Mapping[str, object] = {}) -> Recipe | None:
    """The recipe that a ticket names, if it comes with the package; `fields` take the place of those it names."""
    said, values = about.get("recipe"), about.get("fields", {})
    if not isinstance(said, str) or said not in RECIPES or not isinstance(values, Mapping):
        return None
    try:
        return recipe_named(said).with_fields({**values, **fields})
    except InputError:  # fields of another version
        return None


def large_network(model: Model | None, about: Mapping[str, object]) -> nn.Module:
    """The network that a ticket was saved from, with any weights: as the user says, or of the recipe that it names."""
    if model is None:
        if (recipe := recipe_of(about)) is not None:
            return recipe.model(0)
        said = about.get("model", about.get("recipe"))
        hint = f" (by what it says of itself, {said!r})" if isinstance(said, str) else ""
        raise InputError(
            f"this ticket is of no recipe that comes with rewound; give the large network{hint}, or a function or "
            "'package.module:name' that makes it"
        )
    if isinstance(model, nn.Module):
        return model
    make = imported("model", model) if isinstance(model, str) else model
    made = _called(make, model) if callable(make) else make
    if not isinstance(made, nn.Module):
        raise InputError(f"{shown(model)} makes {shown(made)} and no network; give what makes the large one")
    return made


def _called(make: Callable[[], object], model: object) -> object:
    """What a function returns that is called without arguments; an error if it needs some."""
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise InputError(
            f"{shown(model)} cannot be called without arguments ({error}); give a function that makes the network "
            "without any, such as one around it"
        ) from error
    except ValueError:  # some functions of C do not say what they take
        pass
    return make()


# Examples


def described_example(inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, object] | None:
    """The kind of an example as plain facts, without its values; None where a file cannot say it."""
    try:
        return {"inputs": [_described(each) for each in inputs], "keywords": _described(dict(keywords))["dict"]}
    except (KeyError, TypeError):
        return None


def _described(value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        kind: list[object] = [DTYPE_NAMES[value.dtype], list(value.shape)]
        if value.numel() and not value.is_floating_point() and not value.is_complex():
            kind += [int(value.min()), int(value.max())]
        return {"tensor": kind}
    if isinstance(value, Mapping):
        return {"dict": {str(name): _described(each) for name, each in value.items()}}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_described(each) for each in value]}
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return {"value": value}
    raise TypeError(f"a file cannot say {value!r}")


def drawn_example(kind: object) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """An example of a kind; None where a ticket says no kind that could be drawn."""
    if not isinstance(kind, Mapping) or sum(_numbers(kind)) > _MOST_NUMBERS:
        return None
    draw = torch.Generator().manual_seed(0)
    try:
        inputs = tuple(_drawn(each, draw) for each in kind["inputs"])
        return inputs, {str(name): _drawn(each, draw) for name, each in kind["keywords"].items()}
    except (AttributeError, IndexError, KeyError, OverflowError, RecursionError, RuntimeError, TypeError, ValueError):
        return None


def _numbers(kind: object) -> Iterator[int]:
    """How many numbers each tensor has, before any is drawn; too many for what is no shape."""
    match kind:
        case {"tensor": [str(), list(shape), *_]}:
            good = all(type(size) is int and 0 <= size <= _MOST_NUMBERS for size in shape) and len(shape) <= 16
            yield math.prod(shape) if good else _MOST_NUMBERS + 1
        case Mapping():
            for each in kind.values():
                yield from _numbers(each)
        case list():
            for each in kind:
                yield from _numbers(each)


def _drawn(kind: Any, draw: torch.Generator) -> Any:
    match kind:
        case {"tensor": [str(dtype), list(shape)]}:
            return torch.randn(shape, generator=draw).to(DTYPES[dtype])
        case {"tensor": [str(dtype), list(shape), int(low), int(high)]}:
            return torch.randint(low, high + 1, shape, generator=draw).to(DTYPES[dtype])
        case {"dict": Mapping() as entries}:
            return {name: _drawn(each, draw) for name, each in entries.items()}
        case {"list": list(entries)}:
            return [_drawn(each, draw) for each in entries]
        case {"tuple": list(entries)}:
            return tuple(_drawn(each, draw) for each in entries)
        case {"value": None | bool() | int() | float() | str() as value}:
            return value
    raise ValueError("it is of no kind that is known")
