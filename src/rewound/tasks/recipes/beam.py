"""Beam search by the rule of the authors' translation code.

A beam holds the `width` likeliest hypotheses of a sentence. One that has ended stays among them, and is compared with
the unfinished ones by probability alone. When all of a beam have ended, the best of them by penalised score is
the translation: log-probability / ((5 + length) / 6) ** length_penalty, plus coverage_penalty times the sum over the
source's words of log(min(attention received, 1)). The length counts the word that ends a sentence. If some hypothesis
has not ended after the most words allowed, the likeliest is the translation.

Two things differ from the authors' code. It stores the number of a hypothesis and word in the lowest bits of each score
when it compares them, which leaves five bits of the fraction: of hypotheses whose scores differ by less than about 3%,
the first wins. Here scores are compared as they are. And a beam whose last hypothesis ends with the very last word
allowed is not penalised there.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from rewound.tasks.recipes.attended import wide

State: TypeAlias = tuple[Tensor, ...]
"""What a network carries from word to word; the first dimension counts hypotheses."""
Step: TypeAlias = Callable[[Tensor, State], tuple[Tensor, State, Tensor]]
"""From the last words and the state to scores of the next word, the next state, and the attention paid in this step."""


_STEPS_BETWEEN_LOOKS = 8  # how many steps are taken before the host looks whether all hypotheses have ended


class Search(NamedTuple):
    """How hypotheses are searched for."""

    start: int
    """The word that begins every sentence."""
    end: int
    """The word that ends it."""
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
    is_first = torch.arange(width, device=device).expand(sentences, width) == 0
    likelihood, has_ended = torch.zeros((sentences, width), device=device).masked_fill(~is_first, -torch.inf), ~is_first
    lengths = torch.zeros((sentences, width), dtype=torch.long, device=device)
    attention = torch.zeros((sentences, width, source_words), device=device)
    last = torch.full((sentences * width,), search.start, device=device)
    trail = list[tuple[Tensor, Tensor]]()  # which hypothesis each one continues, and with which word
    for number in range(1, search.most_words + 1):
        scores, state, attended = step(last, state)
        attention = attention + attended.view_as(attention) * ~has_ended.unsqueeze(2)
        chances, words = _likeliest(scores, width)
        chances = chances.view(sentences, width, -1)
        words = words.view_as(chances)
        # A hypothesis that has ended goes on with the word that ends it for certain, and with nothing else.
        only = torch.arange(words.shape[2], device=device) == 0
        chances = torch.where(has_ended.unsqueeze(2), torch.where(only, 0.0, -torch.inf), chances)
        words = words.masked_fill(has_ended.unsqueeze(2), search.end)
        likelihood, chosen = (likelihood.unsqueeze(2) + chances).flatten(1).topk(width, 1)
        parents, last = chosen // words.shape[2], words.flatten(1).gather(1, chosen)
        trail.append((parents, last))
        state = tuple(tensor[(first + parents).flatten()] for tensor in state)
        attention = attention.gather(1, parents.unsqueeze(2).expand_as(attention))
        had_ended = has_ended.gather(1, parents)
        lengths = lengths.gather(1, parents) + ~had_ended
        has_ended, last = had_ended | (last == search.end), last.flatten()
        # Steps after all have ended change nothing, and to ask makes the host wait for the device.
        if number % _STEPS_BETWEEN_LOOKS == 0 and bool(has_ended.all()):
            break
    penalised = likelihood / ((5 + lengths) / 6) ** search.length_penalty
    penalised = penalised + search.coverage_penalty * _coverage(attention)
    scores, best = torch.where(has_ended.all(1, keepdim=True), penalised, likelihood).max(1, keepdim=True)
    if not bool(scores.isfinite().all()):
        raise FloatingPointError("the scores of words are not numbers")
    found = list[Tensor]()
    for parents, words in reversed(trail):
        found.append(words.gather(1, best))
        best = parents.gather(1, best)
    return Translations(torch.cat(found[::-1], 1)[:, : int(lengths.max())], scores.squeeze(1))


def _likeliest(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The logarithms of the chances of the `width` likeliest words in each row, and these words.

    They are among the `width` groups with the largest maxima, so that only these are sorted.
    """
    groups = math.isqrt(scores.shape[1])
    total = wide(scores).logsumexp(1, keepdim=True)
    if groups > width:
        in_groups = F.pad(scores, (0, -scores.shape[1] % groups), value=-torch.inf).view(len(scores), groups, -1)
        chosen, size = in_groups.amax(2).topk(width, 1).indices.unsqueeze(2), in_groups.shape[2]
        found, index = in_groups.gather(1, chosen.expand(-1, -1, size)).flatten(1).topk(width, 1)
        words = chosen.squeeze(2).gather(1, index // size) * size + index % size
    else:
        found, words = scores.topk(min(width, scores.shape[1]), 1)
    return wide(found) - total, words


def _coverage(attention: Tensor) -> Tensor:
    """The sum of log(min(attention, 1)) over the words of a source; what is behind its end has none at all."""
    return torch.where(attention == 0, 1.0, attention).clamp_max(1).log().sum(2)
