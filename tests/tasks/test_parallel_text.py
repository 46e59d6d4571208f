"""Parallel text: what is kept of it, what is refused, and that the prepared file is what was written."""

import gzip
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sacrebleu
import torch

from rewound.foundations.errors import InputError
from rewound.tasks import datasets
from rewound.tasks.datasets import parallel_text, parallel_text_sources, subwords, toy_grammar
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
    (other := tmp_path / "empty").mkdir()
    assert prepare("multi30k", other, cache).read_bytes() == content
    with pytest.raises(InputError, match="gone does not exist: give the folder that holds multi30k; "):
        prepare("multi30k", tmp_path / "gone", cache)
    assert prepare("multi30k", None, cache).read_bytes() == content


def test_results_say_which_text_they_are_of(tmp_path: Path, cache: Path) -> None:
    assert "text" not in parallel_text.made_with("multi30k", cache)
    prepare("multi30k", multi30k(tmp_path / "source"), cache)
    made = parallel_text.made_with("multi30k", cache)
    assert made["sacrebleu"] == sacrebleu.__version__
    prepare("multi30k", multi30k(tmp_path / "shorter", train=TRAIN[:-1]), tmp_path / "other")
    assert parallel_text.made_with("multi30k", tmp_path / "other")["text"] != made["text"]


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


def test_a_cache_that_cannot_be_written_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sentence = r"cannot write .*file/cache/multi30k.*: .*'; set REWOUND_CACHE to a folder that can be written$"
    with pytest.raises(InputError, match=sentence):
        prepare("multi30k", multi30k(tmp_path / "source"), tmp_path / "file" / "cache")


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
    for right in ("einen roten Apfel", "ein kleines Kind ", "ein junger Mann ", "eine schöne Blume", "den großen Baum"):
        assert right in german
    for wrong in (" einen rote ", " das alter ", " eine Hund ", " die Mann ", " den Blume ", " der Buch "):
        assert wrong not in german
    for english, translation in made.items():
        if english.startswith("I know that "):
            assert translation.startswith("Ich weiß, dass ")
            assert translation.removesuffix(".").split()[-1] in {
                form for verb in toy_grammar.VERBS for form in (verb.german, verb.german_third)
            }


def parquet(path: Path, rows: list[dict[str, dict[str, str]]] | list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def translations(pairs: list[Pair]) -> list[dict[str, dict[str, str]]]:
    return [{"translation": {"de": german, "en": english}} for english, german in pairs]


def plain_wmt16(folder: Path, news: str = "") -> Path:
    written(folder, "train", TRAIN, zipped=True)
    written(folder / news, "newstest2014", VAL)
    written(folder / news, "newstest2015", [*TEST, *VAL])
    return folder


def hugging_face_wmt16(folder: Path, splits: str = "{}-0000{}-of-00002.parquet") -> Path:
    parquet(folder / "de-en" / splits.format("train", 0), translations(TRAIN[:60]))
    parquet(folder / "de-en" / splits.format("train", 1), translations(TRAIN[60:]))
    parquet(folder / "de-en" / splits.format("validation", 0), translations(TEST))
    parquet(folder / "de-en" / splits.format("test", 0), translations(VAL[:3]))
    written(folder, "newstest2014", VAL)
    return folder


@pytest.fixture
def short_newstest2015(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_text_sources, "NEWSTEST2015", len(TEST))


@pytest.mark.usefixtures("short_newstest2015")
def test_every_copy_of_wmt16_gives_the_same_file(tmp_path: Path) -> None:
    copies = [
        plain_wmt16(tmp_path / "plain"),
        plain_wmt16(tmp_path / "news", "newstest"),
        hugging_face_wmt16(tmp_path / "hf"),
        hugging_face_wmt16(tmp_path / "converted", "{}/000{}.parquet"),
    ]
    made = {prepare("wmt16", copy, tmp_path / f"cache of {copy.name}").read_bytes() for copy in copies}
    assert len(made) == 1
    corpus = parallel_text.load("wmt16", tmp_path / "cache of plain")
    assert corpus.held_out["val"].references == tuple(german for _, german in VAL)
    assert corpus.held_out["test"].references == tuple(german for _, german in TEST)


@pytest.mark.usefixtures("short_newstest2015")
def test_copies_of_wmt16_that_are_not_whole(tmp_path: Path, cache: Path) -> None:
    def refused(source: Path, message: str) -> None:
        with pytest.raises(InputError, match=message):
            prepare("wmt16", source, cache)

    source = hugging_face_wmt16(tmp_path / "hf")
    (source / "newstest2014.de").unlink()
    refused(source, r"has neither newstest2014\.de nor newstest2014\.de\.gz: get the parquet files .* --from FOLDER`$")
    source = hugging_face_wmt16(tmp_path / "hf")
    validation = source / "de-en" / "validation-00000-of-00002.parquet"
    parquet(validation, translations(VAL[:3]))
    refused(source, r"validation-.*parquet has 3 pairs, and newstest2015 has 20; get")
    parquet(validation, translations([*TEST[1:], ("A dog.", "")]))
    refused(source, r"line 20 of .*validation-.*parquet has no German text")
    parquet(validation, [{"de": "Ein Hund.", "en": "A dog."}])
    refused(source, r"validation-.*parquet has no column `translation` of de and en \(.*\); get it again")
    validation.write_bytes(b"<html>404</html>")
    refused(source, r"validation-.*parquet has no column `translation` .*ArrowInvalid.*; get it again")
    validation.unlink()
    refused(source, r"has no validation-\*\.parquet beside its train-\*\.parquet; get")


def mix(folder: Path, pairs: list[Pair]) -> Path:
    written(folder / "newstest", "newstest2014", VAL)
    lines = "".join(f"toy\t{english}\t{german}\n" for english, german in pairs)
    (folder / "train-mix.tsv.gz").write_bytes(gzip.compress(lines.encode()))
    return folder


def test_ende_holds_out_sentences_that_are_not_in_its_training_text(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_text_sources, "HELD_OUT", 10)
    again = [(english.upper(), f"Noch einmal: {german}") for english, german in TRAIN]
    pairs = [*TRAIN, *again, ("", "Ein Hund."), ("A dog.", "")]
    prepare("ende", mix(tmp_path / "source", pairs), cache)
    corpus = parallel_text.load("ende", cache)
    assert list(corpus.held_out) == ["val", "test", "newstest2014"]
    english = dict(map(reversed, pairs))
    held_out = [english[german] for part in ("val", "test") for german in corpus.held_out[part].references]
    assert len({sentence.casefold() for sentence in held_out}) == 20
    trained = [english[german] for german in sentences(each(*corpus.train[2:]), corpus.vocabulary)]
    assert {sentence.casefold() for sentence in trained}.isdisjoint(sentence.casefold() for sentence in held_out)
    assert len(trained) == 2 * len(TRAIN) - 40
    assert parallel_text.summary("ende", cache).splitlines()[1:] == [
        "held out: val 10, test 10, newstest2014 20",
        "left out: 20 held out",
        "left out: 20 with a sentence that is held out",
        "left out: 2 with an empty side",
    ]


def test_a_mix_that_is_too_small_or_has_other_columns_is_refused(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(InputError, match=r"100 pairs are too few to hold out 4,000 different ones: give more text"):
        prepare("ende", mix(tmp_path / "source", TRAIN), cache)
    (tmp_path / "source" / "train-mix.tsv.gz").unlink()
    (tmp_path / "source" / "train-mix.tsv").write_text("toy\tA dog.\tEin Hund.\nA cat.\tEine Katze.\n")
    with pytest.raises(InputError, match=r"train-mix\.tsv, line 2, has 2 columns: it must be source, English, German"):
        prepare("ende", tmp_path / "source", cache)


def test_many_pairs_are_tokenised_in_order_by_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = list(subwords.tokenised_pairs(PAIRS))
    monkeypatch.setattr(subwords, "_AT_ONCE", 30)
    assert list(subwords.tokenised_pairs(PAIRS)) == alone == subwords._tokenised_chunk(PAIRS)


def test_the_command_says_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_text, "CORPORA", {**parallel_text.CORPORA, "multi30k": SIZE})
    monkeypatch.setenv("REWOUND_CACHE", str(tmp_path / "cache"))
    said: list[str] = []
    datasets.prepare("multi30k", multi30k(tmp_path / "source"), said.append)
    assert said[-3].startswith("100 pairs to train on: ")
    assert said[-2] == "held out: val 20, test 20"
    assert said[-1] == f"ready: {tmp_path / 'cache' / 'multi30k.safetensors'}"
