"""Tasks whose training data is on the device when a step needs it: their batches, and what makes a step repeatable.

A batch is a pure function of (data, key, counter): `assembled` makes it of the examples that a counter-based order
chooses (`randomness`). So the stream of batches can be entered anywhere (law 1), and a training step can be captured
once and replayed (`fleets`). Data that does not fit there is brought in time, batch after batch (`feed`).
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, repeat
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from rewound.foundations.errors import InputError
from rewound.foundations.randomness import fold, permutation
from rewound.tasks.feed import Source, streamed
from rewound.tasks.recipe import Batch, Position, Recipe


class Part(NamedTuple):
    """Examples whose batches all have the same shape."""

    examples: int
    batch_size: int


class Share(NamedTuple):
    """The part of every batch that one of several processes takes: they have consecutive slices of equal size."""

    number: int = 0
    of: int = 1

    def offsets(self, batch_size: int, device: torch.device) -> Tensor:
        """Which examples of a batch these are, counted from its first."""
        size = batch_size // self.of
        return torch.arange(self.number * size, (self.number + 1) * size, device=device)


WHOLE = Share()


@dataclass(frozen=True)
class ResidentRecipe(Recipe):
    """A task whose training data stays on the device, or streams past it.

    Most tasks are one part. Data of several shapes, such as sentences by their length, are several: all batches of a
    step come from one of them, and the parts take turns in random order.
    """

    compiles: ClassVar[bool] = True
    """Whether the whole loss is given to `torch.compile`. False for recurrent layers, which it would unroll: such a
    loss may compile functions of its own."""
    divisible: ClassVar[bool] = False
    """Whether the loss of a batch is the mean of the losses of its equal slices, as a mean over images is. Several
    processes can then train one network. A loss that divides by a number that differs between slices is not."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """How many examples there are to train on, and how many make a batch.

        It must be known without the data, unless the recipe has a `steps_per_epoch` of its own.
        """

    @abstractmethod
    def resident(self, device: torch.device) -> Sequence[Tensor]:
        """The training data on the device; asked for once per run, so keep it in a cache."""

    def source(self, device: torch.device) -> Source | None:
        """Where the training data is decoded from, if it does not stay on the device; None: it does.

        Only data of one part can be streamed. `assembled` is then given the examples of a batch alone, as (bytes of one
        example after another, *their other tensors).
        """
        return None

    def checked_source(self, device: torch.device) -> Source | None:
        """The source, if it has the examples of the only part."""
        if (source := self.source(device)) is not None:
            found, expected = len(source.lengths), [part.examples for part in self.parts]
            if [found] != expected:
                counts = " + ".join(f"{count:,}" for count in expected)
                raise InputError(
                    f"recipe {self.label()} has {counts} examples, and its source {found:,}; "
                    "data is streamed as one part, with all of its examples"
                )
        return source

    def assembled(
        self, data: Sequence[Tensor], part: int, chosen: Tensor, key: int | Tensor, counters: Tensor
    ) -> Batch:
        """A batch: the `chosen` examples of a part.

        What is drawn for them (shifts, noise) is drawn by `key` and `counters`, a number for each example that no
        other of its part has (`randomness.integers`).
        """
        return tuple(tensor[chosen] for tensor in data)

    @property
    def steps_per_epoch(self) -> float:
        return sum(self._batches_per_epoch) / self.accumulation

    @property
    def _batches_per_epoch(self) -> list[float]:
        if len(self.parts) == 1:  # batches straddle the ends of epochs
            (only,) = self.parts
            return [only.examples / only.batch_size]
        per_step = self.accumulation
        return [part.examples // (part.batch_size * per_step) * per_step for part in self.parts]

    def batches(self, seed: int, position: Position, device: torch.device, share: Share = WHOLE) -> Iterator[Batch]:
        offsets = [share.offsets(part.batch_size, device) for part in self.parts]
        source = self.checked_source(device)
        chosen = self.chosen(seed, position, device if source is None else "cpu")
        own = (batch[share.offsets(len(batch), batch.device)] for batch in chosen)
        if source is None:
            examples = zip(repeat(self.resident(device)), own, strict=False)
        else:  # those of the batch alone
            all_of_them = torch.arange(len(offsets[0]), device=device)
            examples = zip(streamed(source, own, device), repeat(all_of_them), strict=False)
        for (part, number), (data, which) in zip(self.turns(seed, position), examples, strict=False):
            counters = number * self.parts[part].batch_size + offsets[part]
            yield self.assembled(data, part, which, self.key(seed, position.prunings, part), counters)

    def chosen(
        self, seed: int, position: Position, device: torch.device | str = "cpu", at_once: int = 1
    ) -> Iterator[Tensor]:
        """The examples of the next batches from a position on; `at_once` batches of one part are taken together."""
        orders: list[dict[int, Tensor]] = [{} for _ in self.parts]  # of the latest epochs, by part
        device = torch.device(device)
        for part, number in islice(self.turns(seed, position), 0, None, at_once):
            examples, size = self.parts[part]
            epochs, known = self.epochs_of(part, number, at_once), orders[part]
            for epoch in epochs:
                if epoch not in known:
                    known[epoch] = self.order(seed, position.prunings, epoch, part, device)
            for epoch in known.keys() - epochs:
                del known[epoch]
            begin = number * size - epochs[0] * examples
            order = torch.cat([known[epoch] for epoch in epochs]) if len(epochs) > 1 else known[epochs[0]]
            yield order[begin : begin + at_once * size]

    def largest(self, source: Source, seed: int, position: Position, steps: int, device: torch.device) -> int:
        """The bytes of the largest of a run's next steps."""
        lengths, most = source.lengths.to(device), 0
        per_epoch = min(steps, math.ceil(self.steps_per_epoch))
        passes = self.chosen(seed, position, device, at_once=per_epoch * self.accumulation)
        for chosen in islice(passes, -(-steps // per_epoch)):
            most = max(most, int(lengths[chosen].view(per_epoch, -1).sum(1).max()))
        return most

    def turns(self, seed: int, position: Position) -> Iterator[tuple[int, int]]:
        """From a position on: which part the next batch comes from, and how many of that part came before it."""
        if len(self.parts) == 1:
            yield from ((0, number) for number in count(position.steps))
            return
        each, per_step = [round(batches) for batches in self._batches_per_epoch], self.accumulation
        whole = [part for part, batches in enumerate(each) for _ in range(batches // per_step)]
        for epoch in count(position.steps // (len(whole) * per_step)):
            numbers = [epoch * batches for batches in each]
            order = permutation(fold(seed, position.prunings, "parts", epoch), len(whole)).tolist()
            turns = (whole[i] for i in order for _ in range(per_step))
            for turn, part in enumerate(turns, start=epoch * len(whole) * per_step):
                if turn >= position.steps:
                    yield part, numbers[part]
                numbers[part] += 1

    def epochs_of(self, part: int, number: int, batches: int) -> range:
        """The passes over a part that its next batches lie in."""
        examples, size = self.parts[part]
        return range(number * size // examples, ((number + batches) * size - 1) // examples + 1)

    def order(self, seed: int, prunings: int, epoch: int, part: int, device: torch.device) -> Tensor:
        """The order of a part's examples in one pass over them."""
        return permutation(
            fold(seed, prunings, "order", epoch, *_unless_first(part)), self.parts[part].examples, device
        )

    def key(self, seed: int, prunings: int, part: int) -> int:
        """What the draws for the examples of a part are made by."""
        return fold(seed, prunings, "augmentation", *_unless_first(part))


def _unless_first(part: int) -> list[int]:
    return [part] if part else []
