"""The value of a recipe's field: given in a file, of the type that its default has, and told in a word."""

import math

from rewound.errors import InputError


def coerced(name: str, value: object, default: object) -> object:
    """A TOML value as the type of the field's default."""
    value = widened(tuple(value) if isinstance(value, list) else value, default)
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name} must be a finite number, not {value}")
    if isinstance(default, tuple) and default and isinstance(value, tuple):
        return tuple(coerced(f"each of {name}", item, default[0]) for item in value)
    if default is not None and type(value) is not type(default):
        raise InputError(f"{name} must be of type {type(default).__name__}, not {value!r}")
    return value


def widened(value: object, default: object) -> object:
    """A whole number where the default is none, as what it is equal to: 8 epochs and 8.0 are one address."""
    if isinstance(default, tuple) and default and isinstance(value, tuple):
        return tuple(widened(item, default[0]) for item in value)
    return float(value) if isinstance(default, float) and type(value) is int else value


def field_word(name: str, value: object) -> str:
    """A field and its value as one word.

    >>> field_word("batch_size", 64), field_word("epochs", 8.0), field_word("widths", (4, 8)), field_word("fast", True)
    ('batch-size=64', 'epochs=8', 'widths=4,8', 'fast=true')
    """
    return f"{name.replace('_', '-')}={_text(value)}"


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return str(value).lower() if isinstance(value, bool) else str(value)
