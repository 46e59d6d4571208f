"""A small grammar of English and German: sentences with their translations, for a task that needs no download.

What there is to learn: German nouns have one of three genders; article and adjective agree with gender, number and
case; the verb stands second in a main clause, last after "dass" and first in a question; participles stand last. It is
so small that a network of 128 units begins to translate within a minute on a CPU.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch

from rewound.foundations.randomness import bits, fold

Case = Literal["nominative", "accusative"]
T = TypeVar("T")


class Noun(NamedTuple):
    english: str
    english_plural: str
    german: str
    german_plural: str
    gender: Literal["m", "f", "n"]


class Verb(NamedTuple):
    english: str  # infinitive
    english_third: str
    english_participle: str
    german: str  # infinitive, which is also the plural
    german_third: str
    german_participle: str


SUBJECTS = (
    Noun("man", "men", "Mann", "Männer", "m"),
    Noun("dog", "dogs", "Hund", "Hunde", "m"),
    Noun("bird", "birds", "Vogel", "Vögel", "m"),
    Noun("woman", "women", "Frau", "Frauen", "f"),
    Noun("cat", "cats", "Katze", "Katzen", "f"),
    Noun("child", "children", "Kind", "Kinder", "n"),
    Noun("horse", "horses", "Pferd", "Pferde", "n"),
)
OBJECTS = (
    Noun("apple", "apples", "Apfel", "Äpfel", "m"),
    Noun("tree", "trees", "Baum", "Bäume", "m"),
    Noun("flower", "flowers", "Blume", "Blumen", "f"),
    Noun("lamp", "lamps", "Lampe", "Lampen", "f"),
    Noun("book", "books", "Buch", "Bücher", "n"),
    Noun("house", "houses", "Haus", "Häuser", "n"),
    Noun("picture", "pictures", "Bild", "Bilder", "n"),
)
VERBS = (
    Verb("see", "sees", "seen", "sehen", "sieht", "gesehen"),
    Verb("find", "finds", "found", "finden", "findet", "gefunden"),
    Verb("love", "loves", "loved", "lieben", "liebt", "geliebt"),
    Verb("need", "needs", "needed", "brauchen", "braucht", "gebraucht"),
    Verb("look for", "looks for", "looked for", "suchen", "sucht", "gesucht"),
)
OF_SUBJECTS = (("big", "groß"), ("small", "klein"), ("old", "alt"), ("young", "jung"))
OF_OBJECTS = (
    ("big", "groß"),
    ("small", "klein"),
    ("old", "alt"),
    ("red", "rot"),
    ("beautiful", "schön"),
)
ADVERBS = (("today", "heute"), ("now", "jetzt"), ("in the garden", "im Garten"))
BEGINNINGS = (
    ("I know that", "Ich weiß, dass"),
    ("She says that", "Sie sagt, dass"),
    ("We hope that", "Wir hoffen, dass"),
)
# Determiners: in the English singular, in the English plural, and the German stem.
DEFINITE = (("the", "the", "d"), ("this", "these", "dies"))
INDEFINITE = (("a", "", "ein"), ("my", "my", "mein"))
# Endings by gender, with "p" for the plural, in the nominative; the accusative differs in the masculine alone.
ARTICLE = {"m": "er", "f": "ie", "n": "as", "p": "ie"}  # of "d"
STRONG = {"m": "er", "f": "e", "n": "es", "p": "e"}  # of "dies", and of an adjective where no determiner shows the case


def sentences(count: int) -> list[tuple[str, str]]:
    """Different English sentences with their translations, always the same ones."""
    key = fold("toy grammar")
    made: dict[str, str] = {}
    for number in range(20 * count):
        english, german = _sentence(iter(bits(key, torch.arange(32) + 32 * number).tolist()))
        made.setdefault(english, german)
        if len(made) == count:
            return list(made.items())
    raise AssertionError(f"the grammar has fewer than {count} sentences")


def _one_of(options: Sequence[T], draws: Iterator[int]) -> T:
    return options[next(draws) % len(options)]


def _sentence(draws: Iterator[int]) -> tuple[str, str]:
    subject, subject_de, plural = _noun_phrase(SUBJECTS, OF_SUBJECTS, "nominative", draws)
    things, things_de, _ = _noun_phrase(OBJECTS, OF_OBJECTS, "accusative", draws)
    verb = _one_of(VERBS, draws)
    when, when_de = _one_of((*ADVERBS, *(("", ""),) * (2 * len(ADVERBS))), draws)
    does, does_de = (verb.english, verb.german) if plural else (verb.english_third, verb.german_third)
    middle_de = f"{when_de} {things_de}"
    form = _one_of(("main", "main", "inverted", "that", "that", "question", "perfect"), draws)
    if form == "inverted" and when:
        return _written(f"{when} {subject} {does} {things}"), _written(f"{when_de} {does_de} {subject_de} {things_de}")
    if form == "that":
        known, known_de = _one_of(BEGINNINGS, draws)
        return (
            _written(f"{known} {subject} {does} {things} {when}"),
            _written(f"{known_de} {subject_de} {middle_de} {does_de}"),
        )
    if form == "question":
        return (
            _written(f"{'do' if plural else 'does'} {subject} {verb.english} {things} {when}", "?"),
            _written(f"{does_de} {subject_de} {middle_de}", "?"),
        )
    if form == "perfect":
        return (
            _written(f"{subject} {'have' if plural else 'has'} {verb.english_participle} {things} {when}"),
            _written(f"{subject_de} {'haben' if plural else 'hat'} {middle_de} {verb.german_participle}"),
        )
    return _written(f"{subject} {does} {things} {when}"), _written(f"{subject_de} {does_de} {middle_de}")


def _noun_phrase(
    nouns: Sequence[Noun], adjectives: Sequence[tuple[str, str]], case: Case, draws: Iterator[int]
) -> tuple[str, str, bool]:
    noun = _one_of(nouns, draws)
    plural = _one_of((False, False, True), draws)
    adjective, adjective_de = _one_of((*adjectives, *(("", ""),) * (2 * len(adjectives))), draws)
    singular_word, plural_word, stem = _one_of((*DEFINITE, *INDEFINITE), draws)
    determiner = plural_word if plural else singular_word
    if determiner == "a" and (adjective or noun.english)[0] in "aeio":
        determiner = "an"
    determiner_de, ending = _endings(stem, "p" if plural else noun.gender, case)
    return (
        f"{determiner} {adjective} {noun.english_plural if plural else noun.english}",
        f"{determiner_de} {adjective_de and adjective_de + ending} {noun.german_plural if plural else noun.german}",
        plural,
    )


def _endings(stem: str, gender: Literal["m", "f", "n", "p"], case: Case) -> tuple[str, str]:
    """The determiner as it is declined, and the ending of an adjective after it.

    >>> _endings("d", "m", "accusative"), _endings("ein", "n", "nominative"), _endings("ein", "p", "nominative")
    (('den', 'en'), ('ein', 'es'), ('', 'e'))
    """
    if gender == "m" and case == "accusative":
        return stem + "en", "en"
    if stem in ("d", "dies"):
        return stem + (ARTICLE if stem == "d" else STRONG)[gender], "en" if gender == "p" else "e"
    if gender == "p":
        return ("", STRONG["p"]) if stem == "ein" else (stem + "e", "en")
    return (stem + "e" if gender == "f" else stem), STRONG[gender]


def _written(words: str, mark: str = ".") -> str:
    text = " ".join(words.split())
    return text[0].upper() + text[1:] + mark
