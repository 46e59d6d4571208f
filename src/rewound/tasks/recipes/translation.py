"""Translation from English into German as the authors train it: GNMT, Adam, batches by length, BLEU by beam search.

| recipe         | corpus (of `parallel_text`)    | network       | a step                 | trains for              |
|----------------|--------------------------------|---------------|------------------------|-------------------------|
| wmt16-gnmt     | WMT16, the paper's             | 4 x 1,024     | 8 batches of 256 pairs | 5 epochs of 1,726 steps |
| ende-gnmt      | 0.6 million pairs of any kind  | 2 x 512       | 256 pairs              | 8 epochs of 2,361 steps |
| multi30k-gnmt  | captions of images             | 2 x 256       | 128 pairs              | 20 epochs of 224 steps  |
| translate-toy  | sentences of a small grammar   | 2 x 128       | 32 pairs               | 8 epochs of 93 steps    |

The loss is the sum over words of the cross-entropy with smoothed labels. The gradient of each batch is clipped to a
norm of 5. The gradient of a sum over words is nearly always longer than that, so that only its direction counts. The
learning rate rises exponentially for the first steps, is halved four times in the last quarter, and is an eighth of its
peak after the end, as the authors set it for fine-tuning.
Everything but the scale `attention.g` is pruned, embeddings and biases too, as in their code.

Pairs are sorted into batches by the length of their longer side, in steps of ten words; lengths for which there are
too few pairs to fill a step join the next shorter ones. An epoch is `steps_per_epoch` steps, whatever the size of the
text, so that a plan needs no data.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from rewound.foundations.errors import InputError
from rewound.foundations.metric import Metric
from rewound.foundations.names import source_digest
from rewound.foundations.wholefiles import default_cache
from rewound.method.costs import Cost, Costs
from rewound.method.schedule import Schedule
from rewound.tasks.datasets import parallel_text, subwords
from rewound.tasks.datasets.parallel_text import END, START, Corpus, HeldOut
from rewound.tasks.hyperparameters import check_fields, check_precision
from rewound.tasks.recipe import Batch, Scores
from rewound.tasks.recipes import attended, beam, gnmt
from rewound.tasks.recipes.gnmt import GNMT, NO_WORD, Decoding, smoothed_loss
from rewound.tasks.resident import Part, ResidentRecipe

_MODULES = (attended, beam, gnmt, parallel_text, subwords)
_BUCKET = 10  # words
_TRANSLATED_AT_ONCE = 256


def _cost(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Cost:
    """Multiply-adds of one forward pass: each matrix once at each of its positions."""
    source, _, target = inputs
    words, said, pairs = source.numel(), target.numel(), source.shape[1] * target.numel()
    times = {"attention.key": words, "attention.query": said, "projection": said, "decoder": said, "attention.v": pairs}
    weights: dict[str, tuple[int, ...]] = {}
    for name, parameter in module.named_parameters():
        if "embedding" not in name and (parameter.ndim > 1 or name == "attention.v"):
            weights[name] = (next((count for part, count in times.items() if name.startswith(part)), words),)
    return Cost(weights, fixed=pairs * cast(GNMT, module).attention.v.numel())  # contexts


@dataclass(frozen=True)
class Translation(ResidentRecipe):
    """What the four recipes share; the defaults are the authors'."""

    corpus: ClassVar[str]
    metric: ClassVar[Metric] = Metric("BLEU", "BLEU")
    costs: ClassVar[Costs] = {GNMT: _cost}
    compiles: ClassVar[bool] = False

    layers: int = 4
    width: int = 1024
    vocabulary: int = 32_316
    shares_embedding: bool = True
    """Whether both languages have one embedding: yes by the paper's 165 million parameters, no by the authors' flag."""
    dropout: float = 0.2
    epochs: float = 5.0
    steps_per_epoch: float = 1_726.0
    batch_size: int = 256
    learning_rate: float = 0.002
    warmup: int = 200
    smoothing: float = 0.1
    precision: str = "float32"
    beam_width: int = 5
    most_words: int = 150
    """Where a translation is cut off."""
    clip_norm: float = field(default=5.0, kw_only=True)
    clip_each: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = ("width", "epochs", "steps_per_epoch", "batch_size", "learning_rate", "beam_width", "most_words")
        check_fields(self, positive, lambda value: 0 < value < math.inf, "above 0 and finite")
        check_fields(self, ("dropout", "smoothing"), lambda value: 0 <= value < 1, "at least 0 and below 1")
        if not 0 <= self.warmup < (steps := round(self.epochs * self.steps_per_epoch)):
            raise InputError(f"warmup must be shorter than the {steps:,} steps of the training, not {self.warmup:,}")
        if self.beam_width > self.vocabulary:
            raise InputError(
                f"beam-width must be at most the vocabulary's {self.vocabulary:,}, not {self.beam_width:,}"
            )
        check_precision(self.precision)

    @property
    def training_epochs(self) -> float:
        return self.epochs

    @cached_property
    def schedule(self) -> Schedule:
        """The authors' "luong234": the last third in four parts, the rate halved at the end of each."""
        steps, peak = round(self.epochs * self.steps_per_epoch), self.learning_rate
        begin = steps * 2 // 3
        halvings = [begin + max(1, (steps - begin) // 4) * part for part in (1, 2, 3, 4)]
        drops = sorted({step for step in halvings if self.warmup < step < steps})
        halved = [sum(step >= each for each in halvings) for step in (self.warmup, *drops)]
        return Schedule.piecewise(
            steps,
            [peak / 2**times for times in halved],
            drops,
            warmup=self.warmup,
            warmup_from=peak / 100 / 2 ** halved[0],
            warmup_curve="exponential",
            final=peak / 8,
        )

    def model(self, seed: int) -> GNMT:
        return GNMT(
            self.vocabulary,
            layers=self.layers,
            units=self.width,
            dropout=self.dropout,
            shares_embedding=self.shares_embedding,
            generator=torch.Generator().manual_seed(seed),
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Adam:
        return torch.optim.Adam(model.parameters(), lr=self.learning_rate)

    def prunable(self, model: nn.Module) -> Mapping[str, nn.Parameter]:
        return {name: parameter for name, parameter in model.named_parameters() if name != "attention.g"}

    def example(self) -> Batch:
        words = torch.full((1, parallel_text.LIMIT - 1), END)
        return words, torch.tensor([words.shape[1]]), words

    # Data

    def text(self) -> Corpus:
        """The corpus, if its vocabulary is that of the network."""
        found = self.loaded()
        if (size := len(found.vocabulary)) != self.vocabulary:
            raise InputError(
                f"the vocabulary of {self.corpus} has {size:,} words, and the network of {self.label()} takes "
                f"{self.vocabulary:,}; give the recipe vocabulary = {size}"
            )
        return found

    def loaded(self) -> Corpus:
        """The corpus, whatever its vocabulary."""
        return _loaded(self.corpus, default_cache(), parallel_text.stamp(self.corpus))

    def check_data(self) -> None:
        parallel_text.check(self.corpus)

    def made_with(self) -> Mapping[str, str]:
        return parallel_text.made_with(self.corpus)

    @property
    def _buckets(self) -> "_Buckets":
        return _buckets(self.text(), self.batch_size * self.accumulation)

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(Part(size, self.batch_size) for size in self._buckets.sizes)

    def resident(self, device: torch.device) -> Sequence[Tensor]:
        return _resident(self._buckets, device)

    def assembled(
        self, data: Sequence[Tensor], part: int, chosen: Tensor, key: int | Tensor, counters: Tensor
    ) -> Batch:
        """Sources with their lengths, targets behind the word that begins a sentence, and what follows each word."""
        source, target, *others = data
        positions, *sentences = others[5 * part : 5 * part + 5]
        starts, lengths, target_starts, target_lengths = (tensor[chosen] for tensor in sentences)
        source = _matrix(source, starts, lengths, positions)
        target = _matrix(target, target_starts, target_lengths, positions)
        begin, end = (torch.full_like(target[:, :1], word) for word in (START, END))
        is_behind = torch.arange(target.shape[1] + 1, device=chosen.device) > target_lengths.unsqueeze(1)
        following = torch.cat([target, end], 1).masked_fill(is_behind, NO_WORD)
        return source, lengths, torch.cat([begin, target], 1), following

    def source_digest(self) -> str:
        """A digest of all code that decides what a translation is."""
        return "-".join([super().source_digest(), *(source_digest(module.__name__)[:4] for module in _MODULES)])

    # Training and evaluation

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        source, lengths, target, following = batch
        with self._in_precision(source.device):
            scores = model(source, lengths, target)
        return smoothed_loss(scores, following, self.smoothing)

    def _in_precision(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    def evaluate(self, model: nn.Module) -> Scores:
        found, network = self.text(), cast(GNMT, model)
        scores = dict[str, float]()
        for name, held in found.held_out.items():
            try:
                said = self.translations(network, held, found.vocabulary)
            except FloatingPointError:  # of a network whose scores are none
                scores[name] = math.nan
            else:
                scores[name] = parallel_text.bleu(said, held.references)
        return Scores(**scores)

    @torch.no_grad()
    def translations(self, model: GNMT, held: HeldOut, vocabulary: Sequence[str]) -> list[str]:
        """What the network makes of held-out sentences, as text."""
        search = beam.Search(START, END, width=self.beam_width, most_words=self.most_words)
        device = model.projection.weight.device
        numbers: list[list[int]] = [[] for _ in held.references]
        for chosen, source, lengths in _by_length(held):
            with self._in_precision(device):
                found = _searched(model, source.to(device), lengths.to(device), search)
            for sentence, words in zip(chosen, found.tolist(), strict=True):
                numbers[sentence] = words[: words.index(END)] if END in words else words
        return parallel_text.sentences(numbers, vocabulary)


def _searched(model: GNMT, source: Tensor, lengths: Tensor, search: beam.Search) -> Tensor:
    memory, first = model.encoded(source, lengths)
    layers = len(first.outputs)

    def step(words: Tensor, state: beam.State) -> tuple[Tensor, beam.State, Tensor]:
        here = Decoding(state[:layers], state[layers:-1], state[-1])
        scores, following, attention = model.step(words, here, memory)
        return scores, (*following.outputs, *following.cells, following.context), attention

    return beam.translated(step, (*first.outputs, *first.cells, first.context), source.shape[1], search).words


def _by_length(held: HeldOut) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Which sentences, their words, and how many each has."""
    starts = _starts(held.source_lengths)
    for chosen in torch.split(held.source_lengths.argsort(stable=True), _TRANSLATED_AT_ONCE):
        lengths = held.source_lengths[chosen]
        yield chosen.tolist(), _matrix(held.source, starts[chosen], lengths, torch.arange(int(lengths.max()))), lengths


def _matrix(words: Tensor, starts: Tensor, lengths: Tensor, positions: Tensor) -> Tensor:
    """Sentences as rows, with the word that ends a sentence behind their ends."""
    index = (starts.unsqueeze(1) + positions).clamp(max=len(words) - 1)
    return words[index].long().masked_fill(positions >= lengths.unsqueeze(1), END)


def _starts(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


class _Buckets(NamedTuple):
    """The training pairs by the length of their longer side, the shortest first."""

    sizes: tuple[int, ...]
    """How many pairs each bucket has."""
    tensors: tuple[Tensor, ...]
    """The words of all sources and of all targets; then for each bucket the positions that its sentences may have, and
    where sources begin, their lengths, and the same of targets."""


@lru_cache(maxsize=4)
def _loaded(corpus: str, cache: Path, stamp: object) -> Corpus:
    return parallel_text.load(corpus, cache)


@lru_cache(maxsize=4)
def _buckets(text: Corpus, step: int) -> _Buckets:
    pairs = text.train
    longest = torch.maximum(pairs.source_lengths, pairs.target_lengths + 1)  # with the word that begins a target
    sizes, widths = list[int](), list[int]()
    for bucket, size in reversed(list(enumerate(torch.bincount(longest // _BUCKET).tolist()))):
        if sizes and sizes[-1] < step:
            sizes[-1] += size
        elif size:
            sizes.append(size)
            widths.append(min((bucket + 1) * _BUCKET, parallel_text.LIMIT) - 1)
    if len(sizes) > 1 and sizes[-1] < step:
        sizes[-2:], widths[-2:] = [sizes[-2] + sizes[-1]], widths[-2:-1]
    if sizes[-1] < step:
        raise InputError(f"{sizes[-1]:,} pairs of sentences are fewer than the {step:,} of a step; lower batch-size")
    sizes.reverse()
    widths.reverse()
    order, tensors = torch.split(longest.argsort(stable=True), sizes), [pairs.source, pairs.target]
    for chosen, width in zip(order, widths, strict=True):
        tensors.append(torch.arange(width))
        for lengths in (pairs.source_lengths, pairs.target_lengths):
            tensors += [_starts(lengths)[chosen], lengths[chosen]]
    return _Buckets(tuple(sizes), tuple(tensors))


@lru_cache(maxsize=4)
def _resident(buckets: _Buckets, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(tensor.to(device) for tensor in buckets.tensors)


@dataclass(frozen=True)
class WMT16(Translation):
    """The paper's: 164,788,225 parameters."""

    name: ClassVar[str] = "wmt16-gnmt"
    corpus: ClassVar[str] = "wmt16"
    epoch_seconds: ClassVar[Mapping[str, float]] = {"cuda": 380.0}  # with words drawn at random

    accumulation: int = field(default=8, kw_only=True)


@dataclass(frozen=True)
class EnDe(Translation):
    """Less text, and two layers of 512 units."""

    name: ClassVar[str] = "ende-gnmt"
    corpus: ClassVar[str] = "ende"
    epoch_seconds: ClassVar[Mapping[str, float]] = {"cuda": 12.6}

    layers: int = 2
    width: int = 512
    vocabulary: int = 16_000
    epochs: float = 8.0
    steps_per_epoch: float = 2_361.0


@dataclass(frozen=True)
class Multi30k(Translation):
    """Captions of images: 29,000 pairs."""

    name: ClassVar[str] = "multi30k-gnmt"
    corpus: ClassVar[str] = "multi30k"

    layers: int = 2
    width: int = 256
    vocabulary: int = 8_000
    dropout: float = 0.15
    epochs: float = 20.0
    steps_per_epoch: float = 224.0
    batch_size: int = 128
    most_words: int = 80


@dataclass(frozen=True)
class Toy(Translation):
    """Sentences of our own grammar, made in memory: for tests and a first try."""

    name: ClassVar[str] = "translate-toy"
    corpus: ClassVar[str] = "toy"
    epoch_seconds: ClassVar[Mapping[str, float]] = {"cpu": 6.3}

    layers: int = 2
    width: int = 128
    vocabulary: int = 450
    dropout: float = 0.1
    epochs: float = 8.0
    steps_per_epoch: float = 93.0
    batch_size: int = 32
    learning_rate: float = 0.01
    warmup: int = 30
    most_words: int = 40

    def loaded(self) -> Corpus:
        return parallel_text.toy()

    def check_data(self) -> None:
        parallel_text.check_installed()

    def made_with(self) -> Mapping[str, str]:
        return parallel_text.versions()
