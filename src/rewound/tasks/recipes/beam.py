"""Beam search by the rule of the authors' translation code.

A beam holds the `width` likeliest hypotheses of a sentence. One that has ended stays among them, and is compared with
the unfinished ones by probability alone. When all of a beam have ended, the best of them by penalised score is
the translation: log-probability / ((5 + length) / 6) ** length_penalty, plus coverage_penalty times the sum over the
source's words of log(min(attention received, 1)). The length counts the word that ends a sentence. If some hypothesis
has not ended after the most words allowed, the likeliest is the translation.

The authors' code stores the index in the lowest bits of each score, so that hypotheses whose scores agree to about
five digits may be swapped. Here scores are compared as they are.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

State: TypeAlias = tuple[Tensor, ...]
"""What a network carries from word to word; the first dimension counts hypotheses."""
Step: TypeAlias = Callable[[Tensor, State], tuple[Tensor, State, Tensor]]
"""From the last words and the state to scores of the next word, the next state, and the attention paid in this step."""


class Search(NamedTuple):
    """How hypotheses are searched for."""

    start: int
    """The word that begins every sentence, and the word that ends it."""
    end: int
    width: int = 5
    length_penalty: float = 0.6
    coverage_penalty: float = 0.1
    most_words: int = 150


class Translations(NamedTuple):
    """The best hypothesis of each sentence."""

    words: Tensor
    """(sentences, words); behind the end of a sentence there is the word that ends it."""
    scores: Tensor
    """Penalised ones, or log-probabilities where not all hypotheses of a sentence have ended."""


@torch.no_grad()
def translated(step: Step, state: State, source_words: int, search: Search) -> Translations:
    """Search for the best translation of each sentence; `state` has one row for each."""
    sentences, width, device = len(state[0]), search.width, state[0].device
    state = tuple(tensor.repeat_interleave(width, 0) for tensor in state)
    first = torch.arange(sentences, device=device).unsqueeze(1) * width  # of each sentence's hypotheses
    # All begin alike, so that only the first of each sentence counts.
    likelihood = torch.full((sentences, width), -torch.inf, device=device)
    likelihood[:, 0] = 0
    has_ended = torch.ones((sentences, width), dtype=torch.bool, device=device)
    has_ended[:, 0] = False
    lengths = torch.zeros((sentences, width), dtype=torch.long, device=device)
    attention = torch.zeros((sentences, width, source_words), device=device)
    words = torch.full((sentences, width, 0), search.end, device=device)
    last = torch.full((sentences * width,), search.start, device=device)
    for _ in range(search.most_words):
        scores, state, attended = step(last, state)
        chances = scores.float().log_softmax(1).view(sentences, width, -1)
        attention = attention + attended.view_as(attention) * ~has_ended.unsqueeze(2)
        chances = torch.where(has_ended.unsqueeze(2), _only(search.end, chances), chances)
        vocabulary = chances.shape[2]
        likelihood, chosen = (likelihood.unsqueeze(2) + chances).flatten(1).topk(width, 1)
        parents, next_words = chosen // vocabulary, chosen % vocabulary
        state = tuple(tensor[(first + parents).flatten()] for tensor in state)
        attention = attention.gather(1, parents.unsqueeze(2).expand_as(attention))
        had_ended = has_ended.gather(1, parents)
        lengths = lengths.gather(1, parents) + ~had_ended
        words = torch.cat([words.gather(1, parents.unsqueeze(2).expand_as(words)), next_words.unsqueeze(2)], 2)
        has_ended = had_ended | (next_words == search.end)
        last = next_words.flatten()
        if bool(has_ended.all()):
            break
    penalised = likelihood / ((5 + lengths) / 6) ** search.length_penalty
    penalised = penalised + search.coverage_penalty * _coverage(attention)
    scores, best = torch.where(has_ended.all(1, keepdim=True), penalised, likelihood).max(1)
    return Translations(words[torch.arange(sentences, device=device), best], scores)


def _only(word: int, chances: Tensor) -> Tensor:
    """What follows a hypothesis that has ended: that word for certain, and nothing else."""
    certain = torch.full_like(chances, -torch.inf)
    certain[..., word] = 0
    return certain


def _coverage(attention: Tensor) -> Tensor:
    """The sum of log(min(attention, 1)) over the words of a source; what is behind its end has none at all."""
    return torch.where(attention == 0, 1.0, attention).clamp_max(1).log().sum(2)
