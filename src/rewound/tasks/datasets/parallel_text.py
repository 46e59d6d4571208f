"""Parallel text in the cache: English sentences with their German translations, as numbers of a joint vocabulary.

prepare: pairs of sentences -> Moses tokens, cleaned -> joint BPE -> numbers -> NAME.safetensors, with a sha256
load:    NAME.safetensors -> the sha256 still holds -> Corpus

| corpus   | vocabulary | validates on                 | tests on                                            |
|----------|------------|------------------------------|-----------------------------------------------------|
| wmt16    | 32,316     | newstest2014                 | newstest2015                                        |
| ende     | 16,000     | 2,000 pairs of its own text  | 2,000 pairs of its own text, newstest2014           |
| multi30k | 8,000      | val                          | test_2016_flickr                                    |
| toy      | 450        | 150 sentences of a grammar   | 300 sentences of a grammar                          |

A training pair is left out if a side is empty, has more than 80 tokens, or has more than 9 times as many as the other
(the rules of Moses's clean-corpus-n, by which the authors clean their text), or if a side has 48 pieces or more.
Held-out pairs all stay; of a source, the first 150 pieces count.
"""

import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache as cached
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rewound.foundations.errors import InputError
from rewound.foundations.names import unknown
from rewound.foundations.wholefiles import default_cache
from rewound.tasks.datasets.parallel_text_sources import REMEDIES, Text, check_folder, read_text
from rewound.tasks.datasets.prepared import Damaged, cannot_write, checksum_of, publish, read
from rewound.tasks.datasets.subwords import (
    END,
    START,
    UNKNOWN,
    bleu,
    characters,
    check_installed,
    sentences,
    tokenised,
    tokenised_pairs,
    trained_bpe,
    versions,
    words_of,
)
from rewound.tasks.datasets.toy_grammar import sentences as toy_sentences

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = (
    "CORPORA",
    "END",
    "LIMIT",
    "LONGEST_SOURCE",
    "START",
    "UNKNOWN",
    "Corpus",
    "HeldOut",
    "Pairs",
    "bleu",
    "check",
    "check_installed",
    "load",
    "made_with",
    "prepare",
    "sentences",
    "stamp",
    "summary",
    "toy",
    "versions",
)

CORPORA: Final[Mapping[str, int]] = {"wmt16": 32_316, "ende": 16_000, "multi30k": 8_000}
"""The size of each vocabulary."""
LIMIT: Final = 48
"""Pieces: both sides of a training pair have fewer."""
LONGEST_SOURCE: Final = 150
"""Pieces of a held-out sentence that are translated."""
_TOKENS, _RATIO = 80, 9
_TOY = (450, 3_000, 150, 300)  # vocabulary, train, val, test
_AT_ONCE = 20_000  # lines that are encoded at once
_IN_MEMORY = 2**26  # bytes of tokenised text; more goes to a file


class Pairs(NamedTuple):
    """Sentences as int32 words, one sentence after another, and their int64 lengths; without START and END."""

    source: Tensor
    source_lengths: Tensor
    target: Tensor
    target_lengths: Tensor


class HeldOut(NamedTuple):
    """Sentences to translate, as in `Pairs`, and their translations as they were written."""

    source: Tensor
    source_lengths: Tensor
    references: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Text to train on, and held-out text: "val", "test" and further test sets by their names."""

    vocabulary: tuple[str, ...]
    train: Pairs
    held_out: Mapping[str, HeldOut]


def prepare(
    name: str, source: Path | None = None, cache: Path | None = None, *, say: Callable[[str], object] = lambda _: None
) -> Path:
    """Make the cache file of a corpus from the folder `source`, unless a valid one is there; return its path.

    >>> prepare("multi30k", Path("nowhere"), cache=Path("no-cache"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    rewound.foundations.errors.InputError: nowhere does not exist: give the folder that holds multi30k; get train, ...
    """
    return _prepare(_known(name), source, cache or default_cache(), CORPORA[name], say)


def load(name: str, cache: Path | None = None) -> Corpus:
    """The prepared corpus, checked against the checksum it was written with.

    >>> load("multi30k", Path("no-cache"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    rewound.foundations.errors.InputError: no multi30k in no-cache: get train, val and test_2016_flickr, ...
    """
    return _unpacked(_prepared(_known(name), cache or default_cache()))


def check(name: str, cache: Path | None = None) -> None:
    """An error if the corpus was not prepared, or a package is missing that text needs; what is there is not read."""
    check_installed()
    cache = cache or default_cache()
    if not _path(_known(name), cache).exists():
        raise _missing(name, cache)


def stamp(name: str) -> tuple[int, int] | None:
    """When the prepared file was written, and its size: another one has others."""
    path = _path(_known(name), default_cache())
    return (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None


def made_with(name: str, cache: Path | None = None) -> Mapping[str, str]:
    """What a BLEU depends on beside the code: the text, by its checksum, and sacrebleu's version; as far as known."""
    checksum = checksum_of(_path(_known(name), cache or default_cache()))
    return {**({"text": checksum[:16]} if checksum else {}), **versions()}


def summary(name: str, cache: Path | None = None) -> str:
    """What is in a prepared corpus, and how many pairs were left out of it, and why."""
    return _text(_prepared(_known(name), cache or default_cache())["summary"])


@cached
def toy() -> Corpus:
    """A small corpus of our own grammar, made in memory: no held-out sentence is in the text to train on.

    >>> corpus = toy()
    >>> len(corpus.train.source_lengths), len(corpus.held_out["test"].references)
    (3000, 300)
    """
    check_installed()
    size, train, val, test = _TOY
    pairs = toy_sentences(train + val + test)
    held_out = {"val": pairs[train : train + val], "test": pairs[train + val :]}
    return _made(Text(pairs[:train], held_out), size)[0]


def _known(name: str) -> str:
    if name not in CORPORA:
        raise InputError(unknown("corpus", name, CORPORA))
    return name


def _path(name: str, cache: Path) -> Path:
    return cache / f"{name}.safetensors"


def _missing(name: str, cache: Path) -> InputError:
    return InputError(f"no {name} in {cache}: {REMEDIES[name]}")


def _prepared(name: str, cache: Path) -> dict[str, Tensor]:
    tensors = read(_path(name, cache), REMEDIES[name])
    if tensors is None:
        raise _missing(name, cache)
    if "vocabulary" not in tensors:
        raise Damaged(f"{_path(name, cache)} is not {name}", f"{REMEDIES[name]} to make it anew")
    return tensors


def _prepare(name: str, source: Path | None, cache: Path, size: int, say: Callable[[str], object]) -> Path:
    check_folder(name, source)
    target = _path(name, cache)
    try:
        if read(target, REMEDIES[name]) is not None:
            if source is not None:
                say(f"{target} is there already, and {source} was not read; remove the file to prepare it anew")
            return target
    except Damaged:
        if source is None:
            raise
    if source is None:
        raise _missing(name, cache)
    check_installed()
    text = read_text(name, source)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        corpus, left_out = _made(text, size, cache, say)
    except OSError as error:  # the tokenised text needs about as much room as the text
        raise cannot_write(target, error, "as much as the text has") from error
    publish(_packed(corpus, _summary(corpus, left_out)), target)
    return target


def _made(
    text: Text, size: int, folder: Path | None = None, say: Callable[[str], object] = lambda _: None
) -> tuple[Corpus, Counter[str]]:
    """The corpus of a text, and how many pairs were left out for each reason; large text is put into `folder`."""
    left_out = Counter(text.left_out)
    with tempfile.SpooledTemporaryFile(_IN_MEMORY, dir=str(folder) if folder else None) as file:
        for done, (english, german) in enumerate(tokenised_pairs(text.train), 1):
            if reason := _unclean(english, german):
                left_out[reason] += 1
            else:
                file.write(f"{english}\n{german}\n".encode())
            if done % 100_000 == 0:
                say(f"{done:,} pairs tokenised")
        if not file.tell():
            raise InputError(_nothing_left(left_out))
        alphabet = characters(_lines(file))
        say("learning the vocabulary")
        bpe = trained_bpe(_lines(file), alphabet, size)
        say("encoding")
        train = _encoded(_lines(file), bpe, left_out)
    held_out = {part: _held_out(pairs, bpe) for part, pairs in text.held_out.items()}
    return Corpus(words_of(bpe), train, held_out), left_out


def _unclean(english: str, german: str) -> str | None:
    shorter, longer = sorted(len(side.split()) for side in (english, german))
    if not shorter:
        return "with an empty side"
    if longer > _TOKENS:
        return f"with more than {_TOKENS} tokens"
    return f"with one side more than {_RATIO} times longer" if longer > _RATIO * shorter else None


def _nothing_left(left_out: Mapping[str, int]) -> str:
    counts = ", ".join(f"{number:,} {reason}" for reason, number in left_out.items()) or "the training text is empty"
    return f"no pair is left to train on ({counts}): give sentences and their translations, one of each a line"


def _lines(file: IO[bytes]) -> Iterator[str]:
    file.seek(0)
    for line in file:
        yield line.decode().rstrip("\n")


def _numbers(lines: Iterable[str], bpe: "Tokenizer") -> Iterator[list[int]]:
    rest = iter(lines)
    while chunk := list(islice(rest, _AT_ONCE)):
        for encoding in bpe.encode_batch_fast(chunk, add_special_tokens=False):
            yield encoding.ids


class _Side:
    """Sentences of one language in little memory: two bytes a word, one a length."""

    def __init__(self, numbers: Iterable[Sequence[int]] = ()) -> None:
        self.words, self.lengths = array("H"), array("B")
        for each in numbers:
            self.append(each)

    def append(self, numbers: Sequence[int]) -> None:
        self.words.extend(numbers)
        self.lengths.append(len(numbers))

    def tensors(self) -> tuple[Tensor, Tensor]:
        words, lengths = np.array(self.words, np.int32), np.array(self.lengths, np.int64)
        return torch.from_numpy(words), torch.from_numpy(lengths)


def _encoded(lines: Iterable[str], bpe: "Tokenizer", left_out: Counter[str]) -> Pairs:
    numbers = _numbers(lines, bpe)
    source, target = _Side(), _Side()
    for english, german in zip(numbers, numbers, strict=True):
        if max(len(english), len(german)) >= LIMIT:
            left_out[f"with {LIMIT} or more pieces"] += 1
        else:
            source.append(english)
            target.append(german)
    if not source.lengths:
        raise InputError(_nothing_left(left_out))
    return Pairs(*source.tensors(), *target.tensors())


def _held_out(pairs: Sequence[tuple[str, str]], bpe: "Tokenizer") -> HeldOut:
    numbers = _numbers((tokenised(english, "en") for english, _ in pairs), bpe)
    source = _Side(each[:LONGEST_SOURCE] for each in numbers)
    if empty := [number for number, length in enumerate(source.lengths, 1) if not length]:
        raise InputError(
            f"sentence {empty[0]:,} of a held-out text, {pairs[empty[0] - 1][0]!r}, has no words; repair it"
        )
    return HeldOut(*source.tensors(), tuple(german for _, german in pairs))


def _summary(corpus: Corpus, left_out: Mapping[str, int]) -> str:
    kept = len(corpus.train.source_lengths)
    words = len(corpus.train.source), len(corpus.train.target)
    held_out = ", ".join(f"{part} {len(text.references):,}" for part, text in corpus.held_out.items())
    lines = [
        f"{kept:,} pairs to train on: {words[0]:,} English and {words[1]:,} German pieces, {len(corpus.vocabulary):,} "
        "different ones",
        f"held out: {held_out}",
        *(f"left out: {number:,} {reason}" for reason, number in left_out.items() if number),
    ]
    return "\n".join(lines)


def _packed(corpus: Corpus, summary: str) -> dict[str, Tensor]:
    tensors = {"summary": _bytes(summary), "vocabulary": _bytes("\n".join(corpus.vocabulary))}
    for field, tensor in corpus.train._asdict().items():
        tensors[f"train/{field}"] = _small(field, tensor)
    for part, text in corpus.held_out.items():
        tensors[f"held out/{part}/source"] = _small("source", text.source)
        tensors[f"held out/{part}/source_lengths"] = _small("source_lengths", text.source_lengths)
        tensors[f"held out/{part}/references"] = _bytes("\n".join(text.references))
    return dict(sorted(tensors.items()))


def _unpacked(tensors: Mapping[str, Tensor]) -> Corpus:
    parts = {name.split("/")[1] for name in tensors if name.startswith("held out/")}
    return Corpus(
        tuple(_text(tensors["vocabulary"]).split("\n")),
        Pairs(*(_large(field, tensors[f"train/{field}"]) for field in Pairs._fields)),
        {
            part: HeldOut(
                _large("source", tensors[f"held out/{part}/source"]),
                _large("source_lengths", tensors[f"held out/{part}/source_lengths"]),
                tuple(_text(tensors[f"held out/{part}/references"]).split("\n")),
            )
            for part in sorted(parts, key=lambda part: (part not in ("val", "test"), part == "test", part))
        },
    )


def _small(field: str, tensor: Tensor) -> Tensor:
    return tensor.to(torch.uint8 if "lengths" in field else torch.uint16)


def _large(field: str, tensor: Tensor) -> Tensor:
    return tensor.to(torch.int64 if "lengths" in field else torch.int32)


def _bytes(text: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())


def _text(tensor: Tensor) -> str:
    return tensor.numpy().tobytes().decode()
