"""Beam search: against all sentences there are, and against the rule word for word."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from rewound.tasks.recipes import beam
from rewound.tasks.recipes.beam import Search, State, translated

START, END, VOCABULARY = 0, 1, 4


class Table:
    """A network whose scores are a table: they depend on the sentence, on the last word and on the position."""

    def __init__(self, sentences: int, positions: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.scores = 2 * torch.randn(sentences, positions, VOCABULARY, VOCABULARY, generator=draw)
        self.attention = torch.rand(sentences, positions, 3, generator=draw)
        self.attention[:, :, 2] = 0  # behind the end of the source

    def step(self, words: Tensor, state: State) -> tuple[Tensor, State, Tensor]:
        sentence, position = state
        return self.scores[sentence, position, words], (sentence, position + 1), self.attention[sentence, position]

    def state(self) -> State:
        return torch.arange(len(self.scores)), torch.zeros(len(self.scores), dtype=torch.long)

    def likelihood(self, sentence: int, words: tuple[int, ...]) -> float:
        chances = self.scores[sentence].log_softmax(2)
        pairs = zip((START, *words), words, strict=False)
        return sum(float(chances[at, last, word]) for at, (last, word) in enumerate(pairs))

    def penalised(self, sentence: int, words: tuple[int, ...], search: Search) -> float:
        attended = self.attention[sentence, : len(words)].sum(0)
        coverage = sum(math.log(min(float(share), 1)) for share in attended[:2])
        length = ((5 + len(words)) / 6) ** search.length_penalty
        return self.likelihood(sentence, words) / length + search.coverage_penalty * coverage


def ended(most: int) -> list[tuple[int, ...]]:
    others = [word for word in range(VOCABULARY) if word != END]
    return [(*words, END) for length in range(most) for words in product(others, repeat=length)]


def without_ends(words: Tensor) -> tuple[int, ...]:
    found = words.tolist()
    return (*found[: found.index(END)], END) if END in found else tuple(found)


def sequential(table: Table, sentence: int, search: Search) -> tuple[tuple[int, ...], float]:
    """The rule for one sentence, hypothesis by hypothesis."""
    beam: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(search.most_words):
        grown = []
        for words, _ in beam:
            if words[-1:] == (END,):
                grown.append(words)
            else:
                grown += [(*words, word) for word in range(VOCABULARY)]
        ranked = sorted(((words, table.likelihood(sentence, words)) for words in grown), key=lambda each: -each[1])
        beam = ranked[: search.width]
        if all(words[-1] == END for words, _ in beam):
            scored = [(words, table.penalised(sentence, words, search)) for words, _ in beam]
            return max(scored, key=lambda each: each[1])
    return beam[0]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("width", [1, 2, 5])
def test_it_follows_the_rule_for_each_sentence_of_a_batch(seed: int, width: int) -> None:
    table, search = Table(6, 7, seed), Search(START, END, width=width, most_words=6)
    found = translated(table.step, table.state(), 3, search)
    for sentence in range(6):
        words, score = sequential(table, sentence, search)
        assert without_ends(found.words[sentence]) == words
        assert float(found.scores[sentence]) == pytest.approx(score, abs=1e-4)


def test_a_beam_as_wide_as_all_sentences_finds_the_best_of_all() -> None:
    table = Table(10, 5, seed=1)
    table.scores[:, 3:, :, END] = 100.0  # no sentence has more than four words
    search = Search(START, END, width=len(ended(4)), most_words=5)
    found = translated(table.step, table.state(), 3, search)
    for sentence in range(10):
        best = max(ended(4), key=lambda words: table.penalised(sentence, words, search))
        assert without_ends(found.words[sentence]) == best


def test_penalties_change_what_is_best() -> None:
    table = Table(40, 7, seed=2)
    plain, penalised = (
        translated(table.step, table.state(), 3, Search(START, END, 5, length, coverage, 6))
        for length, coverage in ((0.0, 0.0), (1.0, 0.5))
    )
    assert not torch.equal(plain.words, penalised.words)


def test_a_search_that_never_ends_is_bounded() -> None:
    table = Table(3, 9, seed=3)
    table.scores[:, :, :, END] = -1e9
    found = translated(table.step, table.state(), 3, Search(START, END, most_words=8))
    assert found.words.shape == (3, 8)
    assert (found.words != END).all()
    for sentence in range(3):
        likelihood = table.likelihood(sentence, tuple(found.words[sentence].tolist()))
        assert float(found.scores[sentence]) == pytest.approx(likelihood, abs=1e-4), "nothing is penalised"


@pytest.mark.parametrize("vocabulary", [3, 4, 30, 101, 1000])
def test_the_likeliest_words_are_found_among_few(vocabulary: int) -> None:
    scores = 3 * torch.randn(20, vocabulary, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    for width in (1, 2, 5, 40):
        chances, words = beam._likeliest(scores, width)
        expected = scores.log_softmax(1).topk(min(width, vocabulary), 1)
        assert torch.equal(words, expected.indices)
        torch.testing.assert_close(chances, expected.values)


def test_looking_seldom_whether_all_have_ended_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    table, search = Table(20, 41, seed=5), Search(START, END, most_words=40)
    seldom = translated(table.step, table.state(), 3, search)
    monkeypatch.setattr(beam, "_STEPS_BETWEEN_LOOKS", 1)
    always = translated(table.step, table.state(), 3, search)
    assert always.words.shape[1] < 40
    assert torch.equal(seldom.words, always.words)
    assert torch.equal(seldom.scores, always.scores)
