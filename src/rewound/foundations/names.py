"""How a name becomes a thing: a table first, then `package.module:name`.

There is no registry to fill: a user's own recipe, score, scope, pattern or technique is named by where it can be
imported from, and the package stays as it is. Importing runs the module's code; what is found there is called only if
it is of the kind asked for. A function has no kind but its parameters, so these have to have the names that the kind
gives them: of 7,716 Python functions in the standard library, NumPy and torch, 2,003 can be called like a score, and
`shutil.rmtree` is one of them, but none has a score's names.
"""

import difflib
import hashlib
import importlib
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

from rewound.foundations.errors import InputError, shown

T = TypeVar("T")
_DIGESTS: dict[str, tuple[object, str]] = {}
_FOLDER: str | None = None  # see `look_in`


def lookup(kind: str, name: str, table: Mapping[str, T], expected: type | None = None) -> T:
    """The entry `name` of `table`, else the object at `package.module:name`.

    >>> lookup("fruit", "apple", {"apple": 1})
    1
    """
    if isinstance(name, str) and name in table:
        return table[name]
    if not isinstance(name, str) or ":" not in name:
        raise InputError(unknown(kind, name, table))
    found = imported(kind, name)
    if expected is not None and not isinstance(found, expected):
        raise InputError(f"{kind} {name!r} is a {type(found).__name__}, not a {expected.__name__}; name one that is")
    return found  # type: ignore[return-value]  # checked against `expected` where the caller can say what it is


def look_in(folder: Path) -> None:
    """Have named modules looked for in this folder, too, after all that is installed.

    It joins Python's path when the first name is looked up, and not before: a folder that came from elsewhere, with a
    table or a ticket to look at, may hold a module that has the name of a package which is not installed here.
    """
    global _FOLDER
    _FOLDER = str(folder)


def imported(kind: str, name: str) -> object:
    """The object at `package.module:name`."""
    if _FOLDER is not None and _FOLDER not in sys.path:
        sys.path.append(_FOLDER)
    module, _, attribute = name.partition(":")
    try:
        found: object = importlib.import_module(module)
    except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise InputError(f"cannot import {kind} {name!r}: {error}; {_import_remedy(module, error)}") from error
    except SystemExit as end:
        raise InputError(
            f"cannot import {kind} {name!r}: {module} ends the process when it is imported; "
            'put what it does under if __name__ == "__main__":'
        ) from end
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            near = difflib.get_close_matches(part, dir(found), n=1)
            remedy = (
                f"did you mean {near[0]}?" if near else "write package.module:name, with a name that is in the module"
            )
            raise InputError(f"cannot import {kind} {name!r}: {error}; {remedy}") from error
    return found


def optional(module: str, error: str) -> Any:
    """A module of a package that need not be installed; `error` says what needs it, and how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise InputError(error) from missing


def _import_remedy(module: str, error: Exception) -> str:
    """What to do about a module that cannot be imported."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        if f"{module}.".startswith(f"{error.name}."):
            return "start in the folder that has it, or install it"
        return f"install {error.name}, which {module} imports"
    if isinstance(error, SyntaxError):
        return "correct that line"
    return "write package.module:name, with a module that can be imported"


def check_function(kind: str, name: str, found: object, parameters: Sequence[str]) -> None:
    """An error unless what was imported is a function with parameters of these names; `_` may precede a name.

    >>> check_function("scope", "os:walk", sorted, ["names"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    rewound.foundations.errors.InputError: scope 'os:walk' ...
    """
    wanted = f"{kind} {name!r} must be a Python function ({', '.join(parameters)})"
    if not isinstance(found, FunctionType):
        raise InputError(f"{wanted}, not a {type(found).__name__}")
    given = [parameter.name.lstrip("_") for parameter in inspect.signature(found).parameters.values()]
    if given != list(parameters):
        raise InputError(f"{wanted}, but its parameters are ({', '.join(given)}); rename them if it is a {kind}")


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """The sentence for a name nobody knows, with the nearest known ones, or for what is no name at all.

    >>> unknown("technique", "lr-rewind", ["fine-tuning", "lr-rewinding"])
    "unknown technique 'lr-rewind'; did you mean 'lr-rewinding'? (known: fine-tuning, lr-rewinding)"
    """
    known = sorted(known)
    if not isinstance(name, str):
        return f"a {kind} is given by its name, not as {shown(name)} (known: {', '.join(known)})"
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
    """A digest of the file of `package.module` or `package.module:name`; in a notebook, of the thing's own source.

    The file may be edited while its code runs: it is read once, and again when the module was loaded again.
    """
    module_name, _, name = path.partition(":")
    module = importlib.import_module(module_name)
    if getattr(module, "__file__", None) is None:
        return _typed_digest(getattr(module, name, None))
    loaded = getattr(module, "__spec__", None)  # another one after each load
    if module.__name__ not in _DIGESTS or _DIGESTS[module.__name__][0] is not loaded:
        content = Path(str(module.__file__)).read_bytes()
        _DIGESTS[module.__name__] = loaded, hashlib.blake2b(content, digest_size=8).hexdigest()
    return _DIGESTS[module.__name__][1]


def _typed_digest(thing: object) -> str:
    """A digest of a function, or of a class's methods, typed into a notebook; empty where the source is not kept."""
    functions = [thing, *(vars(thing).values() if isinstance(thing, type) else ())]
    try:
        sources = [inspect.getsource(each) for each in functions if isinstance(each, FunctionType)]
    except OSError:
        return ""
    return hashlib.blake2b("".join(sources).encode(), digest_size=8).hexdigest() if sources else ""
