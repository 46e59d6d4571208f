"""A result as one JSON file, with a checksum over all of it and the key that it was measured at.

Whatever passes `decoded` is a result of that key, with every field of the kind that readers rely on; all else is
`Damaged`. Files of versions that did not write the key are known by the last line of their history, which ends with it.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from rewound.foundations.errors import shown
from rewound.states.storage.artifact import Damaged, digest
from rewound.states.storage.layout import is_key
from rewound.states.storage.records import CurvePoint, Notes, Result

LONGEST_RESULT: Final = 16 * 2**20
"""Bytes of the largest result: 200,000 points of a curve (one per epoch) or layers, of about 80 bytes each."""
_LARGEST = 2**63  # above all counts


def encoded(key: str, result: Result) -> bytes:
    """The content of the file."""
    content = {"key": key, **result}
    if wrong := _wrong(content, _RESULT):
        raise ValueError(f"no result of {key}: {wrong}")
    return json.dumps({**content, "checksum": digest(content)}, indent=1).encode()


def decoded(content: bytes, key: str) -> Result:
    """The result in a file that lies where the one of `key` belongs."""
    try:
        found = json.loads(content)
        checksum = found.pop("checksum")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):  # not even an object
        raise Damaged from None
    if checksum != digest(found):
        raise Damaged
    if wrong := _wrong(found, _RESULT):
        raise Damaged(f"is no result: {wrong}")
    named, last = found.pop("key", None), found["history"][-1]
    if named != key if named is not None else not last.endswith(f"-> {key[:12]}"):
        raise Damaged(f"holds the result of another key ({named or last})")
    found["curve"] = [CurvePoint(*point) for point in found["curve"]]
    return cast(Result, found)


def checked_notes(notes: object) -> Notes:
    """The notes of a draft, as they were written."""
    if wrong := _wrong(notes, _NOTES):
        raise Damaged(f"is no draft: {wrong}")
    found = cast(Notes, notes)
    return {**found, "curve": [CurvePoint(*point) for point in found["curve"]]}


def _wrong(content: object, kinds: Mapping[str, Callable[[Any], bool]]) -> str | None:
    """What in the content is not of the kind that it should be."""
    if not isinstance(content, dict):
        return f"{shown(content)} has no fields"
    required = (Result if kinds is _RESULT else Notes).__required_keys__
    if missing := sorted(required - content.keys()):
        return f"it has no {missing[0]}"
    if wrong := [name for name, is_right in kinds.items() if name in content and not is_right(content[name])]:
        return f"{wrong[0]} is {shown(content[wrong[0]])}"
    if kinds is _RESULT and "val" in content and not content.keys() >= {"test", "flops", "layers"}:
        return "it is evaluated only in part"
    if kinds is _RESULT and not content["curve"] and "failed" not in content:
        return "its curve has no point"
    return None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)  # can be printed


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < _LARGEST)


def _is_duration(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value) and value >= 0


def _is_point(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and _is_count(value[0]) and all(map(_is_number, value))


def _is_curve(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_point, value))


def _is_layer(value: Any) -> bool:
    counts = ("kept", "total", "flops")
    return isinstance(value, dict) and all(_is_count(value.get(name)) for name in counts)


def _is_failure(value: Any) -> bool:
    try:
        return _is_count(value["step"]) and isinstance(value["loss"], str) and float(value["loss"]) is not None
    except (ValueError, KeyError, TypeError):
        return False


def _is_made(value: Any) -> bool:
    return isinstance(value, dict) and _is_texts([*value, *value.values()])


def _is_no_key_or_key(value: Any) -> bool:
    return value is None or is_key(value)


_NOTES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "curve": _is_curve,
    "seconds": _is_duration,
    "begin": _is_count,
    "after": _is_no_key_or_key,
    "made": _is_made,
}
_RESULT: Final[Mapping[str, Callable[[Any], bool]]] = {
    "key": is_key,
    "recipe": _is_text,
    "history": lambda value: _is_texts(value) and bool(value),
    "after": _is_no_key_or_key,
    "steps": _is_count,
    "seconds": _is_duration,
    "curve": _is_curve,
    "made": _is_made,
    "val": _is_number,
    "test": _is_number,
    "flops": _is_count,
    "parameters": _is_count,
    "layers": lambda value: isinstance(value, dict) and _is_texts([*value]) and all(map(_is_layer, value.values())),
    "failed": _is_failure,
}
