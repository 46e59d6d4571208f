"""The values of a recipe's fields: read from a file or from words such as `epochs=8`, written as such words, checked.

A value has the type of the field's default.
"""

import math
import tomllib
from collections.abc import Callable, Iterable

from rewound.foundations.errors import InputError


def coerced(name: str, value: object, default: object) -> object:
    """A TOML value as the type of the field's default."""
    value = widened(tuple(value) if isinstance(value, list) else value, default)
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name} must be a finite number, not {value}")
    if isinstance(default, tuple) and default and isinstance(value, tuple):
        return tuple(coerced(f"each of {name}", item, default[0]) for item in value)
    if default is not None and type(value) is not type(default):
        raise InputError(f"{name} must be of type {type(default).__name__}, not {value!r}{_remedy(default)}")
    return value


def _remedy(default: object) -> str:
    if isinstance(default, tuple):
        return f"; write a list, as {list(default)}"
    return "; write true or false" if isinstance(default, bool) else ""


def widened(value: object, default: object) -> object:
    """A whole number where the default is none, as what it is equal to: 8 epochs and 8.0 give one key."""
    if isinstance(default, tuple) and default and isinstance(value, tuple):
        return tuple(widened(item, default[0]) for item in value)
    return float(value) if isinstance(default, float) and type(value) is int else value


def field_word(name: str, value: object) -> str:
    """A field and its value as one word.

    >>> field_word("batch_size", 64), field_word("epochs", 8.0), field_word("widths", (4, 8)), field_word("fast", True)
    ('batch-size=64', 'epochs=8', 'widths=4,8', 'fast=true')
    """
    return f"{name.replace('_', '-')}={_text(value)}"


def fields_in(words: Iterable[str]) -> dict[str, object]:
    """The fields that words give: values as in TOML, where a text may go without quotes.

    >>> fields_in(["batch-size=64", "widths=[4, 8]", "precision=bfloat16"])
    {'batch-size': 64, 'widths': [4, 8], 'precision': 'bfloat16'}
    """
    fields: dict[str, object] = {}
    for word in words:
        name, equals, text = word.partition("=")
        name = name.strip().replace("_", "-")
        if not (name and equals):
            raise InputError(f"a field is given as name=value, such as epochs=8, not as {word!r}")
        if name in fields:
            raise InputError(f"field {name} is given twice; give it once")
        fields[name] = _value(text.strip())
    return fields


def _value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def check_fields(recipe: object, names: Iterable[str], is_right: Callable[[float], bool], what: str) -> None:
    """An error for a field whose number is not `what`, as "above 0"."""
    for name in names:
        if not is_right(value := getattr(recipe, name)):
            raise InputError(f"{name.replace('_', '-')} must be {what}, not {value:g}")


def check_precision(precision: str) -> None:
    """An error for what is no precision of activations; weights and outputs have float32 in any case."""
    if precision not in ("float32", "bfloat16"):
        raise InputError(f"precision is float32 or bfloat16, not {precision!r}")


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return str(value).lower() if isinstance(value, bool) else str(value)
