"""The copies of English-German text that exist, each read as pairs of sentences.

| corpus   | what its folder holds                                                                                     |
|----------|-----------------------------------------------------------------------------------------------------------|
| wmt16    | train.en, train.de, newstest2014 and newstest2015 (.en, .de); or the parquet files of Hugging Face's      |
|          | wmt/wmt16 de-en (train-*, and validation-*, which is newstest2015) and newstest2014 (.en, .de)            |
| multi30k | train, val and test_2016_flickr (.en, .de)                                                                |
| ende     | train-mix.tsv (source, English, German, with tabs between them) and newstest2014 (.en, .de)               |

Text is UTF-8, a sentence a line, as it is or gzipped (.gz). A newstest file lies in the folder or in `newstest` there.
Training text is not held in memory, except ende's; first it is read through, to check its encoding and count its lines.
"""

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import NamedTuple

from rewound.foundations.errors import InputError
from rewound.foundations.names import optional
from rewound.foundations.randomness import fold, permutation

Pair = tuple[str, str]  # English, German
HELD_OUT = 2_000  # pairs of ende that validate, and as many that test
NEWSTEST2015 = 2_169  # lines: copies that were filled up to whole batches have more


class Text(NamedTuple):
    """A corpus as it was written; `left_out` says why pairs are missing in `train`, and how many."""

    train: Iterable[Pair]
    held_out: Mapping[str, list[Pair]]
    left_out: Mapping[str, int] = {}


def check_folder(name: str, source: Path | None) -> None:
    """An error if something else than a folder is given for the corpus, whether or not it would be read."""
    if source is not None and not source.is_dir():
        given = "is a file" if source.exists() else "does not exist"
        raise InputError(f"{source} {given}: give the folder that holds {name}; {REMEDIES[name]}")


def read_text(name: str, source: Path) -> Text:
    """The corpus of that name, from a folder."""
    return _READERS[name](source)


def _wmt16(folder: Path) -> Text:
    train, validation = (_parquet_files(folder, split) for split in ("train", "validation"))
    if not train:
        return Text(
            _parallel("wmt16", folder, "train"),
            {
                "val": _held_out("wmt16", folder, "newstest2014"),
                "test": _held_out("wmt16", folder, "newstest2015")[:NEWSTEST2015],
            },
        )
    if not validation:
        raise InputError(f"{folder} has no validation-*.parquet beside its train-*.parquet; {REMEDIES['wmt16']}")
    test = _whole(str(validation[0]), _parquet_pairs(validation))
    if len(test) != NEWSTEST2015:
        raise InputError(
            f"{validation[0]} has {len(test):,} pairs, and newstest2015 has {NEWSTEST2015:,}; {REMEDIES['wmt16']}"
        )
    return Text(_parquet_pairs(train), {"val": _held_out("wmt16", folder, "newstest2014"), "test": test})


def _multi30k(folder: Path) -> Text:
    held_out = {"val": "val", "test": "test_2016_flickr"}
    return Text(
        _parallel("multi30k", folder, "train"),
        {part: _held_out("multi30k", folder, stem) for part, stem in held_out.items()},
    )


def _ende(folder: Path) -> Text:
    pairs = list(_columns(_file("ende", folder, "train-mix.tsv")))
    return _divided(pairs, {"newstest2014": _held_out("ende", folder, "newstest2014")}, HELD_OUT)


def _divided(pairs: list[Pair], further: Mapping[str, list[Pair]], each: int) -> Text:
    """Pairs drawn for "val" and "test", and the others; no sentence of either language is in two parts."""
    seen = {_key(sentence) for held in further.values() for pair in held for sentence in pair}
    drawn = []
    for number in permutation(fold("ende", "held out"), len(pairs)).tolist():
        keys = [_key(sentence) for sentence in pairs[number]]
        if all(keys) and seen.isdisjoint(keys):
            seen.update(keys)
            drawn.append(number)
            if len(drawn) == 2 * each:
                break
    if len(drawn) < 2 * each:
        raise InputError(f"{len(pairs):,} pairs are too few to hold out {2 * each:,} different ones: give more text")
    train = [pair for pair in pairs if seen.isdisjoint(map(_key, pair))]
    return Text(
        train,
        {"val": [pairs[i] for i in drawn[:each]], "test": [pairs[i] for i in drawn[each:]], **further},
        {"held out": 2 * each, "with a sentence that is held out": len(pairs) - 2 * each - len(train)},
    )


def _key(sentence: str) -> str:
    return " ".join(sentence.casefold().split())


_READERS: Mapping[str, Callable[[Path], Text]] = {"wmt16": _wmt16, "ende": _ende, "multi30k": _multi30k}
REMEDIES: Mapping[str, str] = {
    "wmt16": "get the parquet files of Hugging Face's wmt/wmt16 (folder de-en) and into the same folder by "
    "`sacrebleu -t wmt14/full -l en-de --echo src` newstest2014.en and by `--echo ref` newstest2014.de (or train, "
    "newstest2014 and newstest2015, each as .en and .de), then run `rewound data wmt16 --from FOLDER`",
    "ende": "put train-mix.tsv.gz (columns source, English, German) and newstest2014.en and newstest2014.de into a "
    "folder, then run `rewound data ende --from FOLDER`",
    "multi30k": "get train, val and test_2016_flickr, each as .en.gz and .de.gz, from github.com/multi30k/dataset "
    "(folder data/task1/raw), then run `rewound data multi30k --from FOLDER`",
}


def _file(name: str, folder: Path, file: str) -> Path:
    folders = (folder, folder / "newstest") if file.startswith("newstest") else (folder,)
    candidates = [place / each for place in folders for each in (file, f"{file}.gz")]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise InputError(f"{folder} has neither {file} nor {file}.gz: {REMEDIES[name]}")
    return found


def _parallel(name: str, folder: Path, stem: str) -> Iterator[Pair]:
    english, german = (_file(name, folder, f"{stem}.{language}") for language in ("en", "de"))
    lines = [sum(1 for _ in _lines(path)) for path in (english, german)]
    if lines[0] != lines[1]:
        raise InputError(
            f"{english} has {lines[0]:,} lines and {german} has {lines[1]:,}: "
            "line by line, one must be the translation of the other"
        )
    return ((en.strip(), de.strip()) for en, de in zip(_lines(english), _lines(german), strict=True))


def _held_out(name: str, folder: Path, stem: str) -> list[Pair]:
    return _whole(f"{stem} in {folder}", _parallel(name, folder, stem))


def _whole(what: str, pairs: Iterable[Pair]) -> list[Pair]:
    whole = list(pairs)
    for line, (english, german) in enumerate(whole, 1):
        if not (english and german):
            side = "German" if english else "English"
            raise InputError(f"line {line:,} of {what} has no {side} text: held-out text must be complete")
    if not whole:
        raise InputError(f"{what} is empty: give held-out text")
    return whole


def _columns(path: Path) -> Iterator[Pair]:
    for number, line in enumerate(_lines(path), 1):
        columns = line.split("\t")
        if len(columns) != 3:
            raise InputError(f"{path}, line {number:,}, has {len(columns)} columns: it must be source, English, German")
        yield columns[1].strip(), columns[2].strip()


def _lines(path: Path) -> Iterator[str]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number in count(1):
                if not (line := file.readline()):
                    return
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}, line {number:,}, is not UTF-8 (byte {error.object[error.start]:#04x}): "
            "convert the file, for example by `iconv -f latin1 -t utf-8`"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path} after line {number:,}: {error}; get it again") from error


def _parquet_files(folder: Path, split: str) -> list[Path]:
    for place in (folder, folder / "de-en", folder / "data"):
        if files := [*sorted(place.glob(f"{split}-*.parquet")), *sorted(place.glob(f"{split}/*.parquet"))]:
            return files
    return []


def _parquet_pairs(files: Iterable[Path]) -> Iterator[Pair]:
    parquet = optional("pyarrow.parquet", "this copy of wmt16 needs pyarrow to be read: `pip install pyarrow`")
    for path in files:
        try:
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(10_000, columns=["translation"]):
                    for row in batch.column("translation").to_pylist():
                        yield " ".join((row["en"] or "").split()), " ".join((row["de"] or "").split())
        except InputError:
            raise
        except Exception as error:  # pyarrow raises a dozen types for damaged input
            reason = f"{type(error).__name__}: {error}"
            raise InputError(f"{path} has no column `translation` of de and en ({reason}); get it again") from error
