"""A learning-rate schedule S as data: pieces of curves, and the value that holds after the end.

`S.at(step)` is a pure function of the step, so "start at step g" needs no state: rewinding the learning rate is
reading S from an earlier step. The paper's `S[g > T] = S[T]` is `final`, the rate of the last executed step unless
declared otherwise.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise, takewhile
from numbers import Integral
from typing import NamedTuple

from rewound.foundations.errors import InputError, as_number, as_whole, check_kind
from rewound.foundations.names import unknown

# Fraction of the piece done -> learning rate, from `start` towards `stop`.
CURVES: Mapping[str, Callable[[float, float, float], float]] = {
    "constant": lambda start, stop, done: start,
    "linear": lambda start, stop, done: start + (stop - start) * done,
    "exponential": lambda start, stop, done: start * (stop / start) ** done,
    "cosine": lambda start, stop, done: stop + (start - stop) * (1 + math.cos(math.pi * done)) / 2,
}
_LARGEST = 3.4028234663852886e38  # of float32: a step with a larger rate is an error in torch
_BETWEEN = f"from 0 to {_LARGEST:.4g}"


class Segment(NamedTuple):
    """`steps` consecutive steps at one rate."""

    rate: float
    steps: int


class Piece(NamedTuple):
    """A curve that holds for the steps before `until` (a position, not a length; it may be fractional)."""

    until: float
    start: float
    stop: float
    curve: str = "constant"


def _plain(piece: Piece) -> Piece:
    """The piece in Python's own numbers."""
    until, start, stop, curve = piece
    rate = partial(_plain_number, "a learning rate")
    return Piece(_plain_number("a step", until), rate(start), rate(stop), curve)


def _plain_number(name: str, value: object) -> float:
    number = as_number(name, value)
    return int(value) if isinstance(value, Integral) else number  # keys tell 10 from 10.0


def _realised(rate: float) -> float:
    """Nine significant digits: what is trained with is what the key hashes."""
    return float(f"{rate:.9g}")


@dataclass(frozen=True)
class Schedule:
    """The learning rate of every step of a training run of `steps` steps.

    >>> S = Schedule.piecewise(8, [0.1, 0.01, 0.001], drops=[4, 6])
    >>> S.segments(3, 10)
    [Segment(rate=0.1, steps=1), Segment(rate=0.01, steps=2), Segment(rate=0.001, steps=4)]
    """

    steps: int
    pieces: tuple[Piece, ...]
    declared_final: float | None = None
    """What was said to hold after the end, where anything was; `final` is what does."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", as_whole("steps", self.steps))
        object.__setattr__(self, "pieces", tuple(map(_plain, self.pieces)))
        if self.declared_final is not None:
            object.__setattr__(self, "declared_final", _plain_number("final", self.declared_final))
        if self.steps < 1:
            raise InputError(
                f"a schedule needs at least one step, not {self.steps}; train for longer, or in smaller batches"
            )
        if not self.pieces:
            raise InputError("a schedule needs at least one piece, as Schedule.constant has")
        ends = [0.0, *(piece.until for piece in self.pieces)]
        if any(b <= a for a, b in pairwise(ends)) or ends[-1] < self.steps:
            raise InputError(
                f"the pieces of a schedule must end in growing order, the last at {self.steps} or later; "
                "train for longer, or with fewer pieces"
            )
        if (rate := self.declared_final) is not None and not 0 <= rate <= _LARGEST:
            raise InputError(f"the learning rate that holds after the end must be {_BETWEEN}, not {rate:g}")
        for piece in self.pieces:
            if piece.curve not in CURVES:
                raise InputError(unknown("curve", piece.curve, CURVES))
            rates = (piece.start, piece.stop)
            above = ", and above 0 on an exponential curve" if piece.curve == "exponential" else ""
            if not all(0 <= rate <= _LARGEST for rate in rates) or (piece.curve == "exponential" and 0 in rates):
                raise InputError(f"learning rates must be {_BETWEEN}{above}, not {piece.start} to {piece.stop}")

    @classmethod
    def constant(cls, steps: int, rate: float) -> "Schedule":
        """One rate throughout."""
        return cls(steps, (Piece(steps, rate, rate),))

    @classmethod
    def piecewise(
        cls,
        steps: int,
        rates: Sequence[float],
        drops: Sequence[float],
        *,
        warmup: float = 0,
        warmup_from: float = 0.0,
        warmup_curve: str = "linear",
        final: float | None = None,
    ) -> "Schedule":
        """`rates[i]` until step `drops[i]`, the last to the end; the first `warmup` steps rise to `rates[0]`."""
        check_kind("rates", rates, Sequence, "give a list, as [0.1, 0.01]")
        check_kind("drops", drops, Sequence, "give a list of steps, as [60]")
        if len(rates) != len(drops) + 1:
            raise InputError(f"{len(rates)} rates need {len(rates) - 1} drops between them, not {len(drops)}")
        flat = (Piece(until, rate, rate) for until, rate in zip((*drops, steps), rates, strict=True))
        return cls(steps, (*_rise(warmup, rates[0], warmup_from, warmup_curve), *flat), final)

    @classmethod
    def cosine(
        cls, steps: int, peak: float, end: float = 0.0, *, warmup: float = 0, final: float | None = None
    ) -> "Schedule":
        """Half a cosine from `peak` to `end`, after a linear warm-up."""
        return cls(steps, (*_rise(warmup, peak), Piece(steps, peak, end, "cosine")), final)

    @classmethod
    def linear(
        cls, steps: int, peak: float, end: float = 0.0, *, warmup: float = 0, final: float | None = None
    ) -> "Schedule":
        """A straight line from `peak` to `end`, after a linear warm-up."""
        return cls(steps, (*_rise(warmup, peak), Piece(steps, peak, end, "linear")), final)

    def at(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0; beyond the end, `final`."""
        if step >= self.steps:
            return self.final
        begin = 0.0
        for piece in self.pieces:
            if step < piece.until:
                done = (step - begin) / (piece.until - begin)
                return _realised(CURVES[piece.curve](piece.start, piece.stop, done))
            begin = piece.until
        raise AssertionError("unreachable: the last piece ends at `steps` or later")

    @cached_property
    def final(self) -> float:
        """What holds after the end: declared, else the rate of the last executed step."""
        return self.at(self.steps - 1) if self.declared_final is None else _realised(self.declared_final)

    @cached_property
    def peak(self) -> float:
        """The largest rate."""
        return max(max(piece.start, piece.stop) for piece in self.pieces)

    @cached_property
    def share_at_final(self) -> float:
        """For which fraction of the steps the rate has stayed within a factor of two of `final`; 1 if declared.

        >>> Schedule.piecewise(90, [0.4, 0.04, 0.004, 0.0004], drops=[30, 60, 80]).share_at_final == 10 / 90
        True
        >>> Schedule.cosine(90, 0.4).share_at_final == 1 / 90
        True
        """
        if self.declared_final is not None:
            return 1.0
        runs, final = self.segments(0, self.steps), self.final
        return total([*takewhile(lambda run: final / 2 <= run.rate <= final * 2, reversed(runs))]) / self.steps

    def segments(self, start: int, stop: int) -> list[Segment]:
        """The realised rates of the steps in [start, stop), run-length encoded."""
        return merged(self._runs(start, stop))

    def _runs(self, start: int, stop: int) -> Iterator[Segment]:
        step, stop_inside = start, min(stop, self.steps)
        for piece in self.pieces:
            end = min(math.ceil(piece.until), stop_inside)
            if piece.curve == "constant" and step < end:
                yield Segment(_realised(piece.start), end - step)
                step = end
            while step < end:
                yield Segment(self.at(step), 1)
                step += 1
        if step < stop:
            yield Segment(self.final, stop - step)


def _rise(warmup: float, peak: float, start: float = 0.0, curve: str = "linear") -> tuple[Piece, ...]:
    return (Piece(warmup, start, peak, curve),) if warmup else ()


def merged(runs: Iterator[Segment] | Sequence[Segment]) -> list[Segment]:
    """Neighbouring segments of one rate made one; the canonical run-length encoding.

    >>> merged([Segment(0.1, 2), Segment(0.1, 3), Segment(0.01, 1)])
    [Segment(rate=0.1, steps=5), Segment(rate=0.01, steps=1)]
    """
    out: list[Segment] = []
    for rate, steps in runs:
        if out and out[-1].rate == rate:
            out[-1] = Segment(rate, out[-1].steps + steps)
        elif steps:
            out.append(Segment(rate, steps))
    return out


def total(segments: Sequence[Segment]) -> int:
    """How many steps the segments span."""
    return sum(steps for _, steps in segments)


def sliced(segments: Sequence[Segment], start: int, stop: int | None = None) -> list[Segment]:
    """The steps in [start, stop) of the segments."""
    out, begin = [], 0
    for rate, steps in segments:
        end = begin + steps
        low, high = max(begin, start), end if stop is None else min(end, stop)
        if low < high:
            out.append(Segment(rate, high - low))
        begin = end
    return out
