"""What a user's own training loop iterates over, and may ask: which level this is, and what has been reached."""

from collections.abc import Generator
from dataclasses import replace
from itertools import accumulate
from typing import NotRequired, cast

from rewound.errors import InputError
from rewound.loops.progress import Progress, ProgressState, Reached
from rewound.loops.resumption import epochs_in
from rewound.loops.run import Run
from rewound.loops.snapshot import StateDict
from rewound.pruning.mask import Mask


class HandedOver(ProgressState):
    """What a trainer's own checkpoint keeps of a run."""

    also: NotRequired[list[StateDict]]  # there was none before


class Epochs:
    """A run in a user's own loop: iterate over it once. `epochs` makes it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._begun = False

    def __iter__(self) -> Generator[int]:
        if self._begun:
            raise InputError("this run has been iterated over; make a new one with rewound.epochs to go on")
        self._begun = True
        return self._run.epochs()

    def __repr__(self) -> str:
        last, done = len(self._run.levels) - 1, self._run.progress.epoch
        return (
            f"Epochs({done:,} of {len(self):,} epochs done, level {self.level} of {last}, density {self.density:.4g})"
        )

    def __len__(self) -> int:
        """All epochs, those already done included; `max_drop` may end the run sooner."""
        return self._run.course.epochs

    @property
    def ends(self) -> tuple[int, ...]:
        """How many epochs are done when each level ends, the dense run first."""
        return tuple(accumulate(level.length for level in self._run.levels))

    @property
    def epochs_done(self) -> int:
        """How many epochs are done; before the loop, after how many it will go on: `tqdm(run, initial=...)`."""
        run = self._run
        if run.path is None or not run.resumes or self._begun or run.handed_over:
            return run.progress.epoch
        return epochs_in(run.path, run.course)

    @property
    def level(self) -> int:
        """The present level; 0 is the dense run."""
        return self._run.progress.level

    @property
    def density(self) -> float:
        """What the present level was asked to prune to; 1 in the dense run."""
        return self._run.present.density

    @property
    def schedule_epoch(self) -> int:
        """The epoch of the original schedule whose learning rates are used now; from T on, its final ones.

        Where a rule draws the rates of a level, it is the epoch of the level.
        """
        return (self._run.present.schedule_from or 0) + self._run.progress.done

    @property
    def mask(self) -> Mask | None:
        """The mask of the present level, after the loop that of the returned one; None for a dense network."""
        return self._run.progress.mask

    @property
    def levels(self) -> tuple[Reached, ...]:
        """What has been reached so far, the dense run first."""
        return tuple(self._run.progress.reached)

    @property
    def is_in_last_epoch(self) -> bool:
        """Whether the run ends with the present epoch, by what this process has reported in its level so far."""
        progress = self._run.progress
        if progress.done + 1 < self._run.present.length:
            return False
        reached = Reached(self.level, self.density, progress.epoch + 1, progress.accuracy)
        return self._run.is_over(replace(progress, reached=[*progress.reached, reached]))

    def report(self, accuracy: float, *, higher_is_better: bool = True, metric: str | None = None) -> None:
        """Tell how good the network is now; what is told last in a level counts for the level.

        `metric` is what it is called: "accuracy", or "loss" where lower is better. Of several processes rank 0's word
        counts, and the others need not report.
        """
        self._run.progress.report(accuracy, higher_is_better, metric or ("accuracy" if higher_is_better else "loss"))

    def state_dict(self, *, epoch_ended: bool = True) -> dict[str, object]:
        """How far the run has come, and what is in `also`, of which a trainer's own checkpoints know nothing else.

        An epoch in which a step was taken counts as done; with `epoch_ended=False` as begun, so that a run that loads
        this yields it again and goes on after the steps it has taken.
        """
        progress = replace(self._run.progress)
        if epoch_ended and progress.steps:
            progress.end_epoch()
        return {**progress.state_dict(), "also": [thing.state_dict() for thing in self._run.subjects.also]}

    def load_state_dict(self, state: dict[str, object], /) -> None:
        """Go on from there; model and optimizer are restored by whoever saved them."""
        if self._begun:
            raise InputError("this run is being iterated over; load its state before the loop")
        saved = cast(HandedOver, state)
        progress = Progress.from_state_dict(saved)
        asked = [level.density for level in self._run.levels[1:]][: len(progress.densities)]
        if progress.densities != asked:
            raise InputError(
                f"this state was pruned to densities {progress.densities}, not {asked}; give the same arguments"
            )
        self._run.subjects.restore_also(saved.get("also", []))
        self._run.progress, self._run.handed_over = progress, True
