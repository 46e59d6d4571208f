"""What is kept of a node under its key: where it lies in a store, what a result says, and a result as one JSON file.

results/ab/abcd....json          what was measured; kept for ever
states/ab/abcd....safetensors    tensors; kept while a planned node needs them (`statefile`)
drafts/abcd....safetensors       where an unfinished node can be resumed

A result has a checksum over all of it and the key that it was measured at. Whatever passes `decoded` is a result of
that key, with every field of the kind that readers rely on; all else is `Damaged`. Files of versions that did not write
the key are known by the last line of their history, which ends with it.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, NamedTuple, NotRequired, Required, TypeAlias, TypedDict, cast

from rewound.foundations.errors import InputError, shown

DEFAULT_STORE: Final = Path("rewound-store")
LONGEST_RESULT: Final = 16 * 2**20
"""Bytes of the largest result: 200,000 points of a curve (one per epoch) or layers, of about 80 bytes each."""
_LARGEST = 2**63  # above all counts
_LAYER = itemgetter("kept", "total", "flops")


class Damaged(Exception):
    """An artifact that is not what was written under its key; `reason` follows its name in a sentence."""

    def __init__(self, reason: str = "is not what was written") -> None:
        super().__init__(reason)
        self.reason = reason


# Keys and paths

Kind: TypeAlias = Literal["result", "state", "draft"]
PATHS: Final[Mapping[Kind, str]] = {
    "result": "results/{key:.2}/{key}.json",
    "state": "states/{key:.2}/{key}.safetensors",
    "draft": "drafts/{key}.safetensors",
}
_KEY = re.compile(r"[0-9a-f]{32}")
_HALVES = re.compile("[\ud800-\udfff]")  # of character pairs


class Artifact(NamedTuple):
    """What is kept of a node under its key."""

    kind: Kind
    key: str

    @property
    def path(self) -> str:
        return PATHS[self.kind].format(key=checked(self.key))


def artifact_at(path: str) -> Artifact | None:
    """The artifact that lies at a path below a store; None: no such path is an artifact's.

    >>> artifact_at("drafts/" + 32 * "0" + ".safetensors")
    Artifact(kind='draft', key='00000000000000000000000000000000')
    """
    key = PurePosixPath(path).stem
    found = (Artifact(kind, key) for kind in PATHS if is_key(key))
    return next((artifact for artifact in found if artifact.path == path), None)


def keys_in(paths: Iterable[str], kind: Kind) -> set[str]:
    """The keys of the artifacts of a kind among the paths of a store; an editor's or a copy's file ends otherwise."""
    suffix = PurePosixPath(PATHS[kind]).suffix
    stems = (path.rpartition("/")[2].removesuffix(suffix) for path in paths if path.endswith(suffix))
    return {stem for stem in stems if _KEY.fullmatch(stem)}


def is_key(value: object) -> bool:
    """Whether something is a key of a state."""
    return isinstance(value, str) and _KEY.fullmatch(value) is not None


def checked(key: str) -> str:
    """A key, if it is one."""
    if not is_key(key):
        raise InputError(f"{key!r} is not a key: keys have 32 hexadecimal digits")
    return key


# What is measured, and noted on the way


class CurvePoint(NamedTuple):
    """One point of a training curve: the mean loss since the point before it."""

    step: int
    lr: float
    loss: float


class LayerCount(TypedDict):
    """What is left of one layer."""

    kept: int
    total: int
    flops: int


class Failure(TypedDict):
    """Where a run stopped being numbers, or how many workers in a row died while they worked on it."""

    step: int
    loss: str
    deaths: NotRequired[int]


def failure_in_words(failure: Failure) -> str:
    """Why a node has failed.

    >>> failure_in_words({"step": 1200, "loss": "nan"})
    'the loss became nan by step 1,200'
    >>> failure_in_words({"step": 0, "loss": "nan", "deaths": 3})
    '3 workers in a row died while they worked on it; --retry-failed tries it again'
    """
    if deaths := failure.get("deaths"):
        return f"{deaths} workers in a row died while they worked on it; --retry-failed tries it again"
    return f"the loss became {failure['loss']} by step {failure['step']:,}"


class Summary(TypedDict, total=False):
    """What is known of a node, in a few words and numbers."""

    recipe: Required[str]
    after: Required[str | None]
    """The node under the same mask that it continued."""
    steps: Required[int]
    seconds: Required[float]
    waited: float
    """How many of the seconds training waited for data; missing where it did not."""
    made: Required[dict[str, str]]
    val: float
    test: float
    others: dict[str, float]
    """The metric on further test sets, where the recipe has any."""
    flops: int
    parameters: int
    """How many the whole network has; missing in earlier results."""
    parameters_left: int
    """How many of them are not pruned, biases and normalisation included; missing in earlier results."""
    host: str
    """The name of the machine that trained it; missing in earlier results."""
    failed: Failure


class Measurements(Summary, total=False):
    """What tables are made of; only what a target asks for is evaluated."""

    curve: Required[list[CurvePoint]]
    layers: dict[str, LayerCount]


class Result(Measurements, total=False):
    """All that is known of a node."""

    history: Required[list[str]]


class Notes(TypedDict):
    """What a draft knows beside its tensors."""

    curve: list[CurvePoint]
    seconds: float
    waited: NotRequired[float]
    begin: NotRequired[int]
    """The step from which both are counted: another plan may cut the same run elsewhere."""
    after: NotRequired[str | None]
    """The node that ends there, under the same mask."""
    made: NotRequired[dict[str, str]]
    """As in a result."""


Outcome: TypeAlias = Literal["measured", "failed", "passed"]
"""What a result says: it was measured, it failed, or another sweep passed it without an evaluation."""


def outcome_of(result: Summary) -> Outcome:
    """What a result says, in a word."""
    return "measured" if "val" in result else "failed" if "failed" in result else "passed"


def summary_of(result: Measurements) -> Summary:
    """A result without its history, curve and layers, which are most of it."""
    return cast(Summary, {name: value for name, value in result.items() if name in Summary.__annotations__})


def measurements_of(result: Result) -> Measurements:
    """A result without its history."""
    return cast(Measurements, {name: value for name, value in result.items() if name != "history"})


# A result as a file


def digest(content: object) -> str:
    """32 hexadecimal digits, a function of what JSON says of `content`."""
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def encoded(key: str, result: Result) -> bytes:
    """The content of the file."""
    content = {"key": key, **result}
    if wrong := _wrong(content, _RESULT) or _lacking(content):
        raise ValueError(f"no result of {key}: {wrong}")
    return json.dumps({**content, "checksum": digest(content)}).encode()


def decoded(content: bytes, key: str) -> Result:
    """The result in a file that lies where the one of `key` belongs."""
    try:
        found = json.loads(content)
        checksum = found.pop("checksum")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):  # not even an object
        raise Damaged from None
    if checksum != digest(found):
        raise Damaged
    if wrong := _wrong(found, _RESULT) or _lacking(found):
        raise Damaged(f"is no result: {wrong}")
    named, last = found.pop("key", None), found["history"][-1]
    if named != key if named is not None else not last.endswith(f"-> {key[:12]}"):
        raise Damaged(f"holds the result of another key ({named or repr(last)})")
    found["curve"] = list(map(partial(tuple.__new__, CurvePoint), found["curve"]))
    return cast(Result, found)


def checked_summary(content: object) -> Summary:
    """The summary of a result, as it was written."""
    if wrong := _wrong(content, _SUMMARY):
        raise Damaged(f"is no summary: {wrong}")
    return cast(Summary, content)


def checked_measurements(content: Measurements) -> Measurements:
    """A result as it was written but for its history; its curve and its layers have been checked."""
    if wrong := _wrong(content, _SUMMARY) or _lacking(content):
        raise Damaged(f"is no result: {wrong}")
    return content


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
    required = (Result if kinds is _RESULT else Summary if kinds is _SUMMARY else Notes).__required_keys__
    if missing := sorted(required - content.keys()):
        return f"it has no {missing[0]}"
    if wrong := [name for name, is_right in kinds.items() if name in content and not is_right(content[name])]:
        return f"{wrong[0]} is {shown(content[wrong[0]])}"
    return None


def _lacking(content: Mapping[str, Any]) -> str | None:
    """What a result lacks whose fields are all of the right kind."""
    if "val" in content and not content.keys() >= {"test", "flops", "layers"}:
        return "it is evaluated only in part"
    if not content["curve"] and "failed" not in content:
        return "its curve has no point"
    return None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and (value.isascii() or _HALVES.search(value) is None)  # can be printed


# A store has a hundred thousand results with some fifty values each. So lists are first looked at as a whole, which
# settles nearly all of them; what is unusual there is looked at one by one.


def is_texts(value: Any) -> bool:
    """Whether something is a list of texts."""
    if not isinstance(value, list):
        return False
    return ({str}.issuperset(map(type, value)) and "".join(value).isascii()) or all(map(_is_text, value))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def are_counts(values: Sequence[Any]) -> bool:
    """Whether all of them are whole numbers that something may be counted by."""
    return not values or ({int}.issuperset(map(type, values)) and min(values) >= 0 and max(values) < _LARGEST)


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < _LARGEST)


def are_numbers(values: Sequence[Any]) -> bool:
    """Whether all of them are numbers, or what a run gives that diverges."""
    return {float}.issuperset(map(type, values)) or all(map(_is_number, values))


def _is_duration(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value) and value >= 0


def _is_point(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 3:
        return False
    step, lr, loss = value
    return _is_count(step) and _is_number(lr) and _is_number(loss)


def _is_curve(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    if value and {list, CurvePoint}.issuperset(map(type, value)) and {3}.issuperset(map(len, value)):
        steps, *numbers = zip(*value, strict=True)
        if are_counts(steps) and {float}.issuperset(map(type, chain(*numbers))):
            return True
    return all(map(_is_point, value))


def _is_layer(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return _is_count(value.get("kept")) and _is_count(value.get("total")) and _is_count(value.get("flops"))


def _is_layers(value: Any) -> bool:
    if not isinstance(value, dict) or not is_texts([*value]):
        return False
    if {dict}.issuperset(map(type, value.values())):
        with suppress(KeyError):
            return are_counts([*chain.from_iterable(map(_LAYER, value.values()))])
    return all(map(_is_layer, value.values()))


def _is_failure(value: Any) -> bool:
    try:
        counts = _is_count(value["step"]) and _is_count(value.get("deaths", 0))
        return counts and isinstance(value["loss"], str) and float(value["loss"]) is not None
    except (ValueError, KeyError, TypeError):
        return False


def _is_made(value: Any) -> bool:
    return isinstance(value, dict) and is_texts([*value, *value.values()])


def _is_no_key_or_key(value: Any) -> bool:
    return value is None or is_key(value)


_NOTES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "curve": _is_curve,
    "seconds": _is_duration,
    "waited": _is_duration,
    "begin": _is_count,
    "after": _is_no_key_or_key,
    "made": _is_made,
}
_RESULT: Final[Mapping[str, Callable[[Any], bool]]] = {
    "key": is_key,
    "recipe": _is_text,
    "history": lambda value: is_texts(value) and bool(value),
    "after": _is_no_key_or_key,
    "steps": _is_count,
    "seconds": _is_duration,
    "waited": _is_duration,
    "curve": _is_curve,
    "made": _is_made,
    "val": _is_number,
    "test": _is_number,
    "others": lambda value: isinstance(value, dict) and is_texts([*value]) and all(map(_is_number, value.values())),
    "flops": _is_count,
    "parameters": _is_count,
    "parameters_left": _is_count,
    "host": _is_text,
    "layers": _is_layers,
    "failed": _is_failure,
}
_SUMMARY: Final = {name: is_right for name, is_right in _RESULT.items() if name in Summary.__annotations__}
