"""Parallel text: what is kept of it, what is refused, and that the prepared file is what was written."""

import gzip
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from rewound.foundations.errors import InputError
from rewound.tasks.datasets import parallel_text, subwords, toy_grammar
from rewound.tasks.datasets.parallel_text import END, LIMIT, START, UNKNOWN, Corpus, Pairs, bleu, sentences, toy

PAIRS = toy_grammar.sentences(140)
TRAIN, VAL, TEST = PAIRS[:100], PAIRS[100:120], PAIRS[120:]
SIZE = 150
Pair = tuple[str, str]


def prepare(name: str, source: Path | None, cache: Path) -> Path:
    return parallel_text._prepare(name, source, cache, SIZE, lambda _: None)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def written(folder: Path, stem: str, pairs: list[Pair], zipped: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for side, language in enumerate(("en", "de")):
        content = "".join(f"{pair[side]}\n" for pair in pairs).encode()
        path = folder / f"{stem}.{language}{'.gz' * zipped}"
        path.write_bytes(gzip.compress(content) if zipped else content)


def multi30k(folder: Path, train: list[Pair] = TRAIN, val: list[Pair] = VAL, zipped: bool = False) -> Path:
    for stem, pairs in (("train", train), ("val", val), ("test_2016_flickr", TEST)):
        written(folder, stem, pairs, zipped)
    return folder


def each(words: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    return [part.tolist() for part in words.split(lengths.tolist())]


def test_a_prepared_corpus_is_the_text(tmp_path: Path, cache: Path) -> None:
    path = prepare("multi30k", multi30k(tmp_path / "source", zipped=True), cache)
    corpus = parallel_text.load("multi30k", cache)
    assert corpus.vocabulary[UNKNOWN] == "<unk>"
    assert corpus.vocabulary[START] == "<s>"
    assert corpus.vocabulary[END] == "</s>"
    assert len(corpus.vocabulary) == len(set(corpus.vocabulary)) == SIZE
    assert {tensor.dtype for tensor in corpus.train[::2]} == {torch.int32}
    assert {tensor.dtype for tensor in corpus.train[1::2]} == {torch.int64}
    german = each(corpus.train.target, corpus.train.target_lengths)
    assert sentences(german, corpus.vocabulary) == [pair[1] for pair in TRAIN]
    assert min(map(min, german)) > END
    assert list(corpus.held_out) == ["val", "test"]
    assert corpus.held_out["val"].references == tuple(pair[1] for pair in VAL)
    assert len(corpus.held_out["test"].source_lengths) == len(TEST)
    assert path == cache / "multi30k.safetensors"
    assert parallel_text.summary("multi30k", cache).startswith("100 pairs to train on: ")


def test_preparing_again_reads_nothing_and_gives_the_same_bytes(tmp_path: Path, cache: Path) -> None:
    source = multi30k(tmp_path / "source")
    content = prepare("multi30k", source, cache).read_bytes()
    assert prepare("multi30k", source, tmp_path / "other").read_bytes() == content
    assert prepare("multi30k", tmp_path / "gone", cache).read_bytes() == content
    assert prepare("multi30k", None, cache).read_bytes() == content


def test_pairs_that_are_empty_or_too_long_are_left_out_and_counted(tmp_path: Path, cache: Path) -> None:
    word = TRAIN[0][0].split()[0]
    more = [
        ("", "Ein Hund."),
        ("A dog.", " "),
        (f"{word} " * 81, f"{word} " * 81),
        (word, f"{word} " * 10),
        (f"{word} " * LIMIT, f"{word} " * LIMIT),
    ]
    prepare("multi30k", multi30k(tmp_path / "source", train=[*TRAIN, *more]), cache)
    assert len(parallel_text.load("multi30k", cache).train.source_lengths) == len(TRAIN)
    assert parallel_text.summary("multi30k", cache).splitlines()[2:] == [
        "left out: 2 with an empty side",
        "left out: 1 with more than 80 tokens",
        "left out: 1 with one side more than 9 times longer",
        "left out: 1 with 48 or more pieces",
    ]


def test_a_long_source_is_cut_where_it_is_held_out(tmp_path: Path, cache: Path) -> None:
    long = ("the dog " * parallel_text.LONGEST_SOURCE, "Hund")
    prepare("multi30k", multi30k(tmp_path / "source", val=[*VAL, long]), cache)
    assert parallel_text.load("multi30k", cache).held_out["val"].source_lengths[-1] == parallel_text.LONGEST_SOURCE


def test_text_that_looks_like_a_special_word_is_text(tmp_path: Path, cache: Path) -> None:
    tag = ("The tag </s> ends <s> and <unk>.", "Die Marke </s> beendet <s> und <unk>.")
    prepare("multi30k", multi30k(tmp_path / "source", train=[*TRAIN, *[tag] * 9]), cache)
    corpus = parallel_text.load("multi30k", cache)
    german = each(corpus.train.target, corpus.train.target_lengths)[-1]
    assert min(german) > END
    assert "< / s >" in sentences([german], corpus.vocabulary)[0]


def spoilt(folder: Path, file: str, content: bytes | None) -> Path:
    multi30k(folder)
    path = folder / file
    path.unlink() if content is None else path.write_bytes(content)
    return folder


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "an empty line in held-out text": (
        partial(multi30k, val=[*VAL, ("", "Ein Hund.")]),
        r"line 21 of val in .* has no English text: held-out text must be complete$",
    ),
    "no held-out text": (partial(multi30k, val=[]), r"val in .* is empty: give held-out text$"),
    "nothing to train on": (
        partial(multi30k, train=[("", "Ein Hund."), ("A dog.", "")]),
        r"no pair is left to train on \(2 with an empty side\): give sentences and their translations",
    ),
    "an empty training text": (partial(multi30k, train=[]), r"no pair is left .*\(the training text is empty\)"),
    "only long pairs": (
        partial(multi30k, train=[("x " * 70, "y " * 70)] * 3),
        r"gives a vocabulary of \d+ words, and 150 are needed: give more text",
    ),
    "unequal numbers of lines": (
        partial(spoilt, file="train.de", content=b"Ein Hund.\n"),
        r"train\.en has 100 lines and .*train\.de has 1: line by line, one must be the translation of the other$",
    ),
    "another encoding": (
        partial(spoilt, file="val.de", content="Hund\nM\xe4dchen\n".encode("latin1")),
        r"val\.de, line 2, is not UTF-8 \(byte 0xe4\): convert the file, for example by `iconv",
    ),
    "a missing file": (
        partial(spoilt, file="val.de", content=None),
        r"has neither val\.de nor val\.de\.gz: get train, val and test_2016_flickr, .* --from FOLDER`$",
    ),
    "a file in place of a folder": (lambda folder: multi30k(folder) / "train.en", "is a file: give the folder"),
    "a folder of something else": (lambda folder: folder.parent, r"has neither train\.en nor train\.en\.gz: get"),
    "no folder": (lambda folder: folder / "nowhere", "does not exist: give the folder that holds multi30k; get"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_text_is_refused_in_one_sentence(what: str, tmp_path: Path, cache: Path) -> None:
    source, message = BAD[what]
    with pytest.raises(InputError, match=message):
        prepare("multi30k", source(tmp_path / "source"), cache)
    assert not (cache / "multi30k.safetensors").exists()


def test_a_damaged_archive_is_refused(tmp_path: Path, cache: Path) -> None:
    source = multi30k(tmp_path / "source", zipped=True)
    path = source / "train.en.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"cannot read .*train\.en\.gz after line \d+: .*; get it again$"):
        prepare("multi30k", source, cache)


@pytest.mark.parametrize("damage", ["flip", "truncate", "garbage", "foreign"])
def test_a_damaged_prepared_file_says_so_and_is_made_anew(damage: str, tmp_path: Path, cache: Path) -> None:
    source = multi30k(tmp_path / "source")
    made = prepare("multi30k", source, cache)
    content = made.read_bytes()
    made.write_bytes(
        {
            "flip": content[:-1] + bytes([content[-1] ^ 1]),
            "truncate": content[:-100],
            "garbage": b"?" * 100,
            "foreign": struct.pack("<Q", 2) + b"{}",
        }[damage]
    )
    for attempt in (partial(parallel_text.load, "multi30k", cache), partial(prepare, "multi30k", None, cache)):
        with pytest.raises(InputError, match=r"is damaged \(.*`rewound data multi30k --from FOLDER` to make it anew"):
            attempt()
    assert prepare("multi30k", source, cache).read_bytes() == content


def test_what_is_missing_says_how_to_get_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in parallel_text.CORPORA:
        for attempt in (parallel_text.check, parallel_text.load, parallel_text.summary):
            with pytest.raises(InputError, match=rf"^no {name} in .*`rewound data {name} --from FOLDER`$"):
                attempt(name, cache)
    with pytest.raises(InputError, match=r"unknown corpus 'wmt17'"):
        parallel_text.check("wmt17", cache)
    monkeypatch.setattr(subwords, "find_spec", lambda name: None if name == "sacrebleu" else True)
    with pytest.raises(InputError, match=r"^translation needs sacrebleu: `pip install 'rewound\[translation\]'`$"):
        parallel_text.check("multi30k", cache)


def test_bleu_is_lower_cased_with_international_tokens() -> None:
    text = ["Das ist ein kleines Haus am See.", "Der Hund läuft heute im Garten."]
    score, signature = subwords.scored([line.upper() for line in text], text)
    assert score == pytest.approx(100)
    assert signature.startswith(subwords.SIGNATURE)
    assert "case:lc" in signature
    assert "tok:intl" in signature
    assert 0 < bleu(["Das ist ein kleines Haus", text[1]], text) < 100


def test_bleu_of_nothing_is_zero_and_of_too_little_is_refused() -> None:
    assert bleu(["", ""], ["Ein Hund.", "Eine Katze."]) == 0
    assert bleu([], []) == 0
    with pytest.raises(InputError, match="1 translations for 2 references: give one for each"):
        bleu(["Ein Hund."], ["Ein Hund.", "Eine Katze."])


def test_words_outside_the_vocabulary_are_refused() -> None:
    assert sentences([[], [END], [START, 3]], [*subwords.SPECIAL, "▁Hund"]) == ["", "", "Hund"]
    for word in (4, -1):
        with pytest.raises(InputError, match=f"a sentence has word {word}, and the vocabulary has 4 words"):
            sentences([[word]], [*subwords.SPECIAL, "▁Hund"])


def words_of(corpus: Corpus, train: Pairs) -> set[str]:
    return set(sentences(each(train.target, train.target_lengths), corpus.vocabulary))


def test_toy_is_whole_and_its_held_out_sentences_are_new() -> None:
    corpus = toy()
    trained = words_of(corpus, corpus.train)
    assert len(corpus.train.source_lengths) == 3000
    for part, count in (("val", 150), ("test", 300)):
        assert len(corpus.held_out[part].references) == count
        assert trained.isdisjoint(corpus.held_out[part].references)
        assert UNKNOWN not in corpus.held_out[part].source
    assert max(corpus.train.source_lengths.max(), corpus.train.target_lengths.max()) < LIMIT


def test_the_grammar_agrees_in_gender_number_and_case() -> None:
    made = dict(toy_grammar.sentences(3450))
    assert len(made) == 3450
    german = " ".join(made.values())
    for right in ("einen roten Apfel", "ein kleines Kind ", "ein junger Mann ", "die alten Frauen ", "den großen Hut"):
        assert right in german
    for wrong in (" einen rote ", " das alter ", " eine Hund ", " die Mann ", " den Blume ", " der Buch "):
        assert wrong not in german
    for english, translation in made.items():
        if english.startswith("I know that "):
            assert translation.startswith("Ich weiß, dass ")
            assert translation.removesuffix(".").split()[-1] in {
                form for verb in toy_grammar.VERBS for form in (verb.german, verb.german_third)
            }
