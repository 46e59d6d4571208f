"""What a schedule did to an optimizer, step by step, so that it can be done again from any epoch.

Whatever sets a learning rate (a scheduler, a warm-up, a line in the loop) leaves it in the optimizer's groups before
each step. A `Recording` keeps, for every group and hyperparameter that moves (the rate; under OneCycle also momentum or
betas), its value at each step, by (epoch, step in the epoch). Reading it from an earlier epoch is rewinding the
learning rate; beyond its end the last values hold: the paper's S[g > T] = S[T]. Where a loop counts steps, what is
called an epoch here is a longer part of the run (`course`).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, repeat
from typing import NotRequired, TypedDict

from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import InputError
from rewound.loops.groups import Value, hyperparameters, rate_of
from rewound.method.schedule import Piece, Schedule, Segment, merged

Runs = list[tuple[Value, int]]  # (value, for so many steps)


class RecordingState(TypedDict):
    """A recording as plain data."""

    groups: list[dict[str, list[Runs]]]
    epochs: int
    declared: NotRequired[float | None]


class Recording:
    """The hyperparameters of every step of a training run: `groups[i][name][epoch]` are runs of equal values."""

    def __init__(
        self, groups: Sequence[Mapping[str, Sequence[Runs]]] = (), epochs: int = 0, declared_final: float | None = None
    ) -> None:
        self.groups = _copied(groups)
        self.epochs = epochs
        self.declared_final = declared_final
        """The rate that was said to hold after the end; it is then the last epoch."""
        self._own: set[tuple[int, str]] = set()

    def begin_epoch(self) -> None:
        """The steps from here on belong to the next epoch."""
        self.epochs += 1
        for group in self.groups:
            for track in group.values():
                track.append([])

    def before_step(self, optimizer: Optimizer) -> list[dict[str, Value]]:
        """Note what the step that is about to be taken will use, and return it, by group."""
        found = [hyperparameters(group) for group in optimizer.param_groups]
        for number, values in enumerate(found):
            if number == len(self.groups):  # the first step of all, or a group that joined on the way
                self.groups.append({})
            tracks = self.groups[number]
            for name, value in values.items():
                if (number, name) in self._own:
                    continue
                if name not in tracks:
                    tracks[name] = [[] for _ in range(self.epochs)]
                _note(tracks[name][-1], value)
        return found

    def inside_step(self, optimizer: Optimizer, before: Sequence[Mapping[str, Value]]) -> None:
        """Note instead what differs from `before`: the step under way has set it before its update."""
        for group, tracks, was in zip(optimizer.param_groups, self.groups, before, strict=True):
            for name, value in hyperparameters(group).items():
                if name in tracks and was.get(name) != value:
                    runs = tracks[name][-1]
                    noted, steps = runs.pop()
                    if steps > 1:
                        runs.append((noted, steps - 1))
                    _note(runs, value)

    def after_step(self, optimizer: Optimizer) -> None:
        """Forget what the step itself changed: numbers that an optimizer keeps for itself, like Prodigy's d."""
        for number, (group, tracks) in enumerate(zip(optimizer.param_groups, self.groups, strict=True)):
            for name, value in hyperparameters(group).items():
                if name != "lr" and name in tracks and tracks[name][-1][-1][0] != value:
                    del tracks[name]
                    self._own.add((number, name))

    def replayed(self, epoch: int, after: int = 0) -> Iterator[list[dict[str, Value]]]:
        """What to set before each step of an epoch from its step `after` on, by group, without end: the last hold."""
        self._check_rates()
        groups = [{name: track for name, track in group.items() if _moves(name, track)} for group in self.groups]
        streams = [{name: _values(track, epoch, after) for name, track in group.items()} for group in groups]
        while True:
            yield [{name: next(stream) for name, stream in group.items()} for group in streams]

    def steps(self, epoch: int) -> int:
        """How many steps were recorded of an epoch; none beyond the end."""
        tracks = [group["lr"][epoch : epoch + 1] for group in self.groups if "lr" in group]
        return max((sum(count for _, count in runs) for track in tracks for runs in track), default=0)

    def rates(self) -> list[list[float]]:
        """All learning rates that occurred, by group, the last one last."""
        self._check_rates()
        return [[rate_of(value) for runs in group["lr"] for value, _ in runs] for group in self.groups]

    def peaks(self) -> list[float]:
        """The largest learning rate, by group."""
        return [max(rates) for rates in self.rates()]

    def ending_at(self, final: float) -> "Recording":
        """The same with another rate after its end: `final` for the largest group, the others in proportion."""
        return self.extended([[Segment(final, 1)]], final)

    def extended(self, epochs: Sequence[Sequence[Segment]], declared_final: float | None = None) -> "Recording":
        """The same with more epochs, at these rates for the largest group, the others in proportion."""
        groups: list[dict[str, list[Runs]]] = []
        for group, peak in zip(self.groups, peaks := self.peaks(), strict=True):
            scale = peak / max(peaks)
            more: list[Runs] = [[(rate * scale, steps) for rate, steps in epoch] for epoch in epochs]
            groups.append({**group, "lr": [*group["lr"], *more]})  # of all else the last value holds
        return Recording(groups, self.epochs + len(epochs), declared_final)

    @property
    def trained_epochs(self) -> int:
        """How many epochs there were, without one for what was declared to follow."""
        return self.epochs - (self.declared_final is not None)

    def schedule(self) -> Schedule:
        """The learning rate of the group with the largest, step by step."""
        peaks = self.peaks()
        track = self.groups[peaks.index(max(peaks))]["lr"][: self.trained_epochs]
        pieces: list[Piece] = []
        steps = 0
        for rate, count in merged([Segment(rate_of(value), count) for runs in track for value, count in runs]):
            steps += count
            pieces.append(Piece(steps, rate, rate))
        return Schedule(steps, tuple(pieces), self.declared_final)

    def _check_rates(self) -> None:
        for number, group in enumerate(self.groups):
            if not any(group.get("lr", [])):
                raise InputError(
                    f"no learning rate was recorded for parameter group {number}, so none can be rewound; "
                    "train the dense run anew, with a number as the lr of every group"
                )

    def state_dict(self) -> RecordingState:
        """The recording as plain data; what has not moved yet may still do so."""
        return {"epochs": self.epochs, "groups": _copied(self.groups), "declared": self.declared_final}

    @classmethod
    def from_state_dict(cls, state: RecordingState) -> "Recording":
        """The inverse of `state_dict`."""
        return cls(state["groups"], state["epochs"], state.get("declared"))


def _copied(groups: Sequence[Mapping[str, Sequence[Runs]]]) -> list[dict[str, list[Runs]]]:
    return [{name: [list(runs) for runs in track] for name, track in group.items()} for group in groups]


def _note(runs: Runs, value: Value) -> None:
    if runs and runs[-1][0] == value:
        runs[-1] = (value, runs[-1][1] + 1)
    else:
        runs.append((value, 1))


def _moves(name: str, track: Sequence[Runs]) -> bool:
    # The learning rate always counts: a loop that sets it by hand would go on past the end of its own schedule.
    return name == "lr" or len({value for runs in track for value, _ in runs}) > 1


def _values(track: Sequence[Runs], epoch: int, after: int) -> Iterator[Value]:
    """The values of an epoch's steps; beyond the recording, and in an epoch without steps, the last one before it."""
    runs = track[epoch] if epoch < len(track) else []
    if not runs:
        earlier = [r for r in track[:epoch] if r]
        return repeat(earlier[-1][-1][0] if earlier else next(r for r in track if r)[0][0])
    ends = list(accumulate(steps for _, steps in runs))
    left = [repeat(value, min(steps, max(0, end - after))) for (value, steps), end in zip(runs, ends, strict=True)]
    return chain(*left, repeat(runs[-1][0]))
