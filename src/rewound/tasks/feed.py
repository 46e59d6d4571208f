"""Data that does not fit into the memory of the device: read and decoded ahead of the steps that need it.

Threads decode the examples of the next batches into buffers of host memory, each example at its place, whoever is
first. On a GPU the buffers are pinned and travel on a stream of their own into one of two slots of device memory; a
slot is filled again only when the step that read it has run. What a batch holds depends neither on the number of
threads nor on where a run began. A batch larger than the ones before it gets larger buffers; nothing is left out.

    resident   batch = assembled(all examples, chosen, counters)      chosen by the order of the epoch
    streamed   batch = assembled(these examples, 0 ... n-1, counters)  the same examples, and nothing else
"""

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import closing
from functools import cache
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from numpy import uint8
from numpy.typing import NDArray
from torch import Tensor

from rewound.foundations.errors import InputError
from rewound.foundations.owners import usable_cores
from rewound.foundations.randomness import bits, fold, permutation

LIMIT = "REWOUND_RESIDENT_GB"
"""The environment variable that says how many GB of data may stay on a device; 0 streams everything."""
_SHARE = 1 / 4  # of the device's memory for data that stays there
_AT_ONCE = 8  # examples that a thread decodes before it looks for more
_AHEAD, _ROOM = (4, 16), 1 << 28  # batches that are decoded ahead: from 4 to 16, as many as have these bytes
_CHUNK, _WINDOW = 64, 16_384  # examples read one after another; the authors' shuffle buffer
_waited = threading.local()


class Source(Protocol):
    """Examples that are decoded when a batch needs them."""

    @property
    def lengths(self) -> Tensor:
        """The bytes of each example when it is decoded (int64)."""

    def other_tensors(self, chosen: Tensor) -> Sequence[Tensor]:
        """What a batch of these examples has beside their bytes, which lie one after another: labels, shapes."""

    def decode(self, index: int, into: NDArray[uint8]) -> None:
        """Put the bytes of an example where they belong; an `InputError` names one that cannot be decoded."""


def stays_on(device: torch.device, size: int) -> bool:
    """Whether data of so many bytes stays in the memory of a device: a quarter of it, unless `REWOUND_RESIDENT_GB`
    says how much."""
    return size <= _limit(device)


def given_limit() -> float | None:
    """The bytes that `REWOUND_RESIDENT_GB` lets stay on a device, if it is set; an error if it is no number of GB."""
    if not (given := os.environ.get(LIMIT)):
        return None
    try:
        limit = float(given)
    except ValueError:
        limit = -1.0
    if not limit >= 0:
        raise InputError(f"{LIMIT} must be a number of GB that is at least 0, not {given!r}; 0 streams all data")
    return limit * 1e9


def _limit(device: torch.device) -> float:
    if (given := given_limit()) is not None:
        return given
    if device.type == "cuda":
        return _SHARE * torch.cuda.get_device_properties(device).total_memory
    return _SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def threads_to_decode() -> int:
    """One for each core that this process may use, at most 32.

    Python holds its lock for 20 us per picture, so that more threads would wait for each other.
    """
    return min(usable_cores(), 32)


def nearly_in_sequence(key: int, n: int, device: torch.device | str = "cpu") -> Tensor:
    """A random permutation of range(n) that visits neighbours at about the same time, as storage is read fastest.

    Chunks of 64 neighbours take turns in random order. Of what they give, each 16,384 are shuffled, as by the authors'
    buffer; a permutation of so few is a random one.

    >>> sorted(nearly_in_sequence(3, 130).tolist()) == list(range(130))
    True
    """
    if n <= _WINDOW:
        return permutation(key, n, device)
    chunks = permutation(fold(key, "chunks"), -(-n // _CHUNK), device)
    order = (chunks[:, None] * _CHUNK + torch.arange(_CHUNK, device=device)).flatten()
    order = order[order < n]  # the last chunk may be shorter
    places = torch.arange(n, device=device)
    shuffled = torch.argsort((places // _WINDOW << 40) | (bits(key, places) >> 23), stable=True)
    return order[shuffled]


def seconds_waited() -> float:
    """How long this thread has waited for data so far; a clock, of which differences count."""
    return float(getattr(_waited, "seconds", 0.0))


class _Decoding(NamedTuple):
    """A batch on its way."""

    buffer: Tensor
    size: int
    others: Sequence[Tensor]
    parts: list[Future[None]]


class _Slot:
    """Device memory for the bytes of a batch, and the event after which it may be filled again."""

    def __init__(self) -> None:
        self.bytes: Tensor | None = None
        self.is_read: torch.cuda.Event | None = None


class Feed:
    """Batches of examples on a device, as (bytes, *other tensors); each is valid until the next is asked for.

    `chosen` gives the examples of each batch, on the host. Close it, or let go of it, and its threads end.
    """

    def __init__(
        self, source: Source, chosen: Iterable[Tensor], device: torch.device, *, threads: int | None = None
    ) -> None:
        self.source, self.device, self._lengths = source, device, source.lengths
        self._chosen = iter(chosen)
        first = next(self._chosen, None)
        self._chosen = self._chosen if first is None else chain([first], self._chosen)
        size = 0 if first is None else int(self._lengths[first].sum())
        least, most = _AHEAD
        self._free: list[Tensor | None] = [None] * min(max(least, _ROOM // max(size, 1)), most)  # buffers
        self._decoding: deque[_Decoding] = deque()
        self._read: Tensor | None = None  # the buffer that the caller reads, on a CPU
        self._leaving: deque[tuple[torch.cuda.Event, Tensor]] = deque()  # buffers on their way to a GPU
        self._copies = _copy_stream(device) if device.type == "cuda" else None
        self._slots = deque([_Slot(), _Slot()])
        self._threads = ThreadPoolExecutor(threads or threads_to_decode(), "rewound-decode")

    def __iter__(self) -> Iterator[Sequence[Tensor]]:
        return self

    def __next__(self) -> Sequence[Tensor]:
        if self._read is not None:
            self._free.append(self._read)
            self._read = None
        self._begin()
        if not self._decoding and self._leaving:
            self._leaving[0][0].synchronize()
            self._begin()
        if not self._decoding:
            self.close()
            raise StopIteration
        batch, began = self._decoding[0], time.perf_counter()
        if not all(part.done() for part in batch.parts):
            wait(batch.parts)
            _waited.seconds = seconds_waited() + time.perf_counter() - began
        self._decoding.popleft()
        try:
            for part in batch.parts:
                part.result()  # the first error, by the place of its example
        except BaseException:
            self.close()
            raise
        return self._delivered(batch)

    def is_ready(self) -> bool:
        """Whether the next batch is decoded, or there is none."""
        self._begin()
        return all(part.done() for part in self._decoding[0].parts) if self._decoding else not self._leaving

    def close(self) -> None:
        """End the threads; what they have begun is finished first, which takes milliseconds."""
        self._chosen = iter(())
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _begin(self) -> None:
        """Let threads decode batches for which there are buffers."""
        while self._leaving and self._leaving[0][0].query():  # type: ignore[no-untyped-call]
            self._free.append(self._leaving.popleft()[1])
        while self._free and (chosen := next(self._chosen, None)) is not None:
            ends = self._lengths[chosen].cumsum(0).tolist()
            buffer = self._free.pop()
            if buffer is None or len(buffer) < ends[-1]:
                # Batches differ in size: with some more, most fit.
                buffer = torch.empty(ends[-1] * 5 // 4, dtype=torch.uint8, pin_memory=self._copies is not None)
            parts = begin_to_decode(self.source, chosen, ends, buffer, self._threads)
            self._decoding.append(_Decoding(buffer, ends[-1], self.source.other_tensors(chosen), parts))

    def _delivered(self, batch: _Decoding) -> Sequence[Tensor]:
        """The batch on the device, where what the caller queues from now on finds it."""
        here = batch.buffer[: batch.size]
        if self._copies is None:
            self._read = batch.buffer
            return here, *batch.others
        reading = torch.cuda.current_stream(self.device)
        self._slots[-1].is_read = reading.record_event()  # all that was queued since it was delivered
        slot = self._slots.popleft()
        self._slots.append(slot)
        with torch.cuda.stream(self._copies):
            if slot.is_read is not None:
                self._copies.wait_event(slot.is_read)
            if slot.bytes is None or len(slot.bytes) < batch.size:
                slot.bytes = torch.empty(len(batch.buffer), dtype=torch.uint8, device=self.device)
            slot.bytes.record_stream(reading)
            there = slot.bytes[: batch.size]
            there.copy_(here, non_blocking=True)
            others = [each.pin_memory().to(self.device, non_blocking=True) for each in batch.others]
            for each in others:
                each.record_stream(reading)
            arrived = self._copies.record_event()
        self._leaving.append((arrived, batch.buffer))
        reading.wait_event(arrived)
        return there, *others


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all feeds: torch hands out few streams in turn, and another might be one that steps run on."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def begin_to_decode(
    source: Source, chosen: Tensor, ends: Sequence[int], into: Tensor, threads: Executor
) -> list[Future[None]]:
    """Let threads put the bytes of examples, which end at `ends`, one after another into memory of the host."""
    places = list(zip(chosen.tolist(), [0, *ends], ends, strict=False))
    return [
        threads.submit(_decode, source, places[first : first + _AT_ONCE], into.numpy())
        for first in range(0, len(places), _AT_ONCE)
    ]


def _decode(source: Source, places: Sequence[tuple[int, int, int]], into: NDArray[uint8]) -> None:
    for index, start, end in places:
        source.decode(index, into[start:end])


def streamed(source: Source, chosen: Iterable[Tensor], device: torch.device) -> Iterator[Sequence[Tensor]]:
    """The batches of a feed, which ends with the iteration."""
    with closing(Feed(source, chosen, device)) as feed:
        yield from feed
