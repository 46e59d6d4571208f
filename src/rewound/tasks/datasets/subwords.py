"""From sentences to numbers and back, and how good a translation is: sacremoses, tokenizers and sacrebleu.

sentence -> Moses tokens, XML-escaped -> pieces of a joint BPE over both languages -> numbers
numbers  -> pieces, joined to tokens  -> detokenised by Moses for German           -> sentence, scored by BLEU

Escaping leaves no < in a token, so that no text is taken for one of the special words.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from rewound.foundations.errors import InputError
from rewound.foundations.names import optional

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNKNOWN, START, END = 0, 1, 2
SPECIAL: Final = ("<unk>", "<s>", "</s>")
"""The special words of every vocabulary, in the order of their numbers."""
ALPHABET: Final = 313
"""So many characters, the most frequent ones, are in a vocabulary; in wmt16's they leave the authors' 32,000 merges."""
SIGNATURE: Final = "nrefs:1|case:lc|eff:no|tok:intl|smooth:exp"
"""How sacrebleu describes our BLEU, apart from its version; the authors' call: sacrebleu 1.2.11 -lc --tokenize intl."""

_SPACE: Final = "▁"  # begins the first piece of each token
_PACKAGES: Final = ("tokenizers", "sacremoses", "sacrebleu")
_AT_ONCE: Final = 5_000  # sentence pairs that a process tokenises at once, in about two seconds


def check_installed() -> None:
    """An error unless the packages that text needs are installed."""
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise InputError(f"translation needs {' and '.join(missing)}: `pip install 'rewound[translation]'`")


def versions() -> dict[str, str]:
    """Whose BLEU it is: sacrebleu's version, where it is installed."""
    try:
        return {"sacrebleu": version("sacrebleu")}
    except PackageNotFoundError:
        return {}


def _package(package: str) -> Any:
    return optional(package, f"translation needs {package}: `pip install 'rewound[translation]'`")


@cache
def _moses(language: str) -> Any:
    return _package("sacremoses").MosesTokenizer(language)


def tokenised(sentence: str, language: str) -> str:
    """The sentence in Moses tokens with spaces between them.

    >>> tokenised("It's here.", "en")
    'It &apos;s here .'
    """
    tokens: str = _moses(language).tokenize(sentence, return_str=True)
    return tokens


def tokenised_pairs(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """English and German sentences in Moses tokens, in order, by all processors where there are many pairs."""
    chunks = _chunks(pairs)
    first = next(chunks, [])
    yield from _tokenised_chunk(first)
    if len(first) < _AT_ONCE:
        return
    # joblib, as in sacremoses itself: it hands out few chunks ahead, so that no large text is held in memory.
    joblib = _package("joblib")
    parallel = joblib.Parallel(n_jobs=-1, return_as="generator")
    for done in parallel(joblib.delayed(_tokenised_chunk)(chunk) for chunk in chunks):
        yield from done


def _chunks(pairs: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    rest = iter(pairs)
    while chunk := list(islice(rest, _AT_ONCE)):
        yield chunk


def _tokenised_chunk(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(tokenised(english, "en"), tokenised(german, "de")) for english, german in pairs]


def characters(lines: Iterable[str]) -> list[str]:
    """The most frequent characters of tokenised text, at most `ALPHABET`; among equally frequent ones by their code."""
    counts = Counter[str]()
    for line in lines:
        counts.update(line)
    counts.pop(" ", None)
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    return [_SPACE, *ranked[: ALPHABET - 1]]


def trained_bpe(lines: Iterable[str], alphabet: Sequence[str], size: int) -> "Tokenizer":
    """A BPE of `size` words, the special ones and the alphabet included, from tokenised text.

    The alphabet is given, because `tokenizers` would choose between equally frequent characters by chance.
    """
    library = _package("tokenizers")
    bpe: Tokenizer = library.Tokenizer(library.models.BPE(unk_token=SPECIAL[UNKNOWN], fuse_unk=True))
    bpe.pre_tokenizer = library.pre_tokenizers.Metaspace(_SPACE)
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=list(alphabet),
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    bpe.train_from_iterator(lines, trainer)
    if bpe.get_vocab_size() != size:
        raise InputError(
            f"the text gives a vocabulary of {bpe.get_vocab_size():,} words, and {size:,} are needed: give more text"
        )
    return bpe


def words_of(bpe: "Tokenizer") -> tuple[str, ...]:
    """The vocabulary, in the order of its numbers."""
    numbers = bpe.get_vocab()
    return tuple(sorted(numbers, key=numbers.__getitem__))


def sentences(numbers: Sequence[Sequence[int]], vocabulary: Sequence[str]) -> list[str]:
    """German sentences of words of the vocabulary; each ends before its first END.

    >>> sentences([[3, 4, END, 3]], [*SPECIAL, "▁Hal", "lo"])
    ['Hallo']
    """
    moses = _package("sacremoses").MosesDetokenizer("de")
    return [moses.detokenize(_tokens(each, vocabulary), return_str=True) for each in numbers]


def _tokens(numbers: Sequence[int], vocabulary: Sequence[str]) -> list[str]:
    pieces = []
    for number in numbers:
        if number == END:
            break
        if not 0 <= number < len(vocabulary):
            raise InputError(
                f"a sentence has word {number}, and the vocabulary has {len(vocabulary):,} words from 0 on"
            )
        if number != START:
            pieces.append(vocabulary[number])
    return "".join(pieces).replace(_SPACE, " ").split()


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """BLEU of the whole text by sacrebleu, lower-cased, with international tokenisation; 0 where nothing was put out.

    >>> round(bleu(["das ist ein kleiner Hund ."], ["Das ist ein kleiner Hund."]), 1)
    100.0
    """
    return scored(hypotheses, references)[0]


def scored(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """`bleu`, and sacrebleu's signature of it."""
    if len(hypotheses) != len(references):
        raise InputError(f"{len(hypotheses):,} translations for {len(references):,} references: give one for each")
    # force: our output is detokenised, and a warning that it does not look so would be wrong.
    metric = _package("sacrebleu").metrics.BLEU(lowercase=True, tokenize="intl", force=True)
    # sacrebleu refuses to score no sentence at all; of one without words it says 0.
    score = metric.corpus_score(list(hypotheses) or [""], [list(references) or [""]]).score
    return float(score), str(metric.get_signature())
