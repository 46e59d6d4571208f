"""How a name becomes a thing: a table first, then `package.module:name`.

There is no registry to fill: a user's own recipe, score, scope, pattern or technique is named by where it can be
imported from, and the package stays as it is.
"""

import difflib
import hashlib
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from rewound.errors import InputError, shown

T = TypeVar("T")
_DIGESTS: dict[str, tuple[object, str]] = {}


def lookup(kind: str, name: str, table: Mapping[str, T], expected: type | None = None) -> T:
    """The entry `name` of `table`, else the object at `package.module:name`.

    >>> lookup("fruit", "apple", {"apple": 1})
    1
    """
    if not isinstance(name, str):
        raise InputError(f"a {kind} is given by its name, not as {shown(name)} (known: {', '.join(sorted(table))})")
    if name in table:
        return table[name]
    if ":" not in name:
        raise InputError(unknown(kind, name, table))
    found = imported(kind, name)
    if expected is not None and not isinstance(found, expected):
        raise InputError(f"{kind} {name!r} is a {type(found).__name__}, not a {expected.__name__}")
    return found  # type: ignore[return-value]  # checked against `expected` where the caller can say what it is


def imported(kind: str, name: str) -> object:
    """The object at `package.module:name`."""
    module, _, attribute = name.partition(":")
    try:
        found: object = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise InputError(f"cannot import {kind} {name!r}: {error}") from error
    return found


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The sentence for a name nobody knows, with the nearest known ones.

    >>> unknown("technique", "lr-rewind", ["fine-tuning", "lr-rewinding"])
    "unknown technique 'lr-rewind'; did you mean 'lr-rewinding'? (known: fine-tuning, lr-rewinding)"
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"unknown {kind} {name!r}{hint} (known: {', '.join(known)})"


def path_of(thing: object) -> str:
    """The `package.module:name` under which `lookup` finds a class or function again."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not module or not name or "<" in name:
        raise InputError(f"{thing!r} has no importable name; define it at the top level of a module")
    return f"{module}:{name}"


def source_digest(path: str) -> str:
    """A digest of the file of `package.module` or `package.module:name`; empty for what was typed into a console.

    The file may be edited while its code runs: it is read once, and again when the module was loaded again.
    """
    module = importlib.import_module(path.partition(":")[0])
    loaded = getattr(module, "__spec__", None)  # another one after each load
    if module.__name__ not in _DIGESTS or _DIGESTS[module.__name__][0] is not loaded:
        file = getattr(module, "__file__", None)
        digest = hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest() if file else ""
        _DIGESTS[module.__name__] = loaded, digest
    return _DIGESTS[module.__name__][1]
