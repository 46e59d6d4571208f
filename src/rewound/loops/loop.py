"""What a user's own training loop iterates over, and may ask: which level this is, and what has been reached."""

from collections.abc import Generator
from itertools import accumulate
from typing import cast

from rewound.loops.iteration import iterated
from rewound.loops.progress import Reached
from rewound.loops.run import HandedOver, Run
from rewound.method.pruning.mask import Mask


class _Loop:
    """A run in a user's own loop: iterate over it once."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __iter__(self) -> Generator[int]:
        self._run.begin()
        return iterated(self._run)

    def __repr__(self) -> str:
        last, done, units = len(self._run.levels) - 1, self._run.progress.epoch, f"{self._run.course.unit}s"
        where = f"level {self.level} of {last}, density {self.density:.4g}"
        return f"{units.capitalize()}({done:,} of {len(self):,} {units} done, {where})"

    def __len__(self) -> int:
        """All epochs or steps, those already done included; `max_drop` may end the run sooner."""
        return self._run.course.length

    @property
    def ends(self) -> tuple[int, ...]:
        """How many epochs or steps are done when each level ends, the dense run first."""
        return tuple(accumulate(level.length for level in self._run.levels))

    @property
    def level(self) -> int:
        """The present level; 0 is the dense run."""
        return self._run.level

    @property
    def density(self) -> float:
        """The density that the present level prunes to; 1 in the dense run."""
        return self._run.present.density

    @property
    def mask(self) -> Mask | None:
        """The mask of the present level, after the loop that of the returned one; None for a dense network."""
        return self._run.progress.mask

    @property
    def levels(self) -> tuple[Reached, ...]:
        """What has been reached so far, the dense run first."""
        return tuple(self._run.progress.reached)

    def report(self, accuracy: float, *, higher_is_better: bool = True, metric: str | None = None) -> None:
        """Report how good the network is now; the last report of a level counts for the level.

        `metric` is what it is called: "accuracy", or "loss" where lower is better. `max_drop` is in the same unit: 0.01
        for an accuracy of 0.97, 1 for one of 97 percent. Of several processes rank 0's word counts, and the others need
        not report.
        """
        self._run.report(accuracy, higher_is_better, metric or ("accuracy" if higher_is_better else "loss"))

    def load_state_dict(self, state: dict[str, object], /) -> None:
        """Go on from there; model and optimizer are restored by whoever saved them."""
        self._run.take_over(cast(HandedOver, state))


class Epochs(_Loop):
    """A run in a user's own loop: iterate over it once. `epochs` makes it."""

    @property
    def epochs_done(self) -> int:
        """How many epochs are done; known before the loop, too, for a progress bar: `tqdm(run, initial=...)`."""
        return self._run.done.epoch

    @property
    def steps_done(self) -> int:
        """How many optimizer steps were taken, in the dense run and all levels; known before the loop, too.

        A rate that the loop computes itself from a number of steps is computed from this one: a counter of the loop's
        own starts again when a run is resumed. Of several optimizers, each step of each counts.
        """
        return self._run.done.steps_done

    @property
    def schedule_epoch(self) -> int:
        """The epoch of the original schedule whose learning rates are used now; from T on, its final ones.

        Where a rule draws the rates of a level, it is the epoch of the level.
        """
        return self._run.position

    @property
    def is_in_last_epoch(self) -> bool:
        """Whether the present epoch is the last of the run, as far as the reports of this process show."""
        return self._run.is_in_last_epoch

    def state_dict(self, *, epoch_ended: bool = True) -> dict[str, object]:
        """How far the run has come, with the states of what is in `also`: for a trainer's own checkpoints.

        An epoch in which a step was taken counts as done; with `epoch_ended=False` as begun, so that a run that loads
        this yields it again and goes on after the steps it has taken.
        """
        return self._run.state_dict(epoch_ended=epoch_ended)


class Steps(_Loop):
    """A run in a user's own loop that counts steps: iterate over it once. `steps` makes it."""

    @property
    def steps_done(self) -> int:
        """How many steps are done; known before the loop, too, for a progress bar: `tqdm(run, initial=...)`."""
        return self._run.done.epoch

    @property
    def schedule_step(self) -> int:
        """The step of the original schedule whose learning rates are used now; from T on, its final ones.

        Where a rule draws the rates of a level, it is the step of the level.
        """
        return self._run.position

    @property
    def is_in_last_step(self) -> bool:
        """Whether the present step is the last of the run, as far as the reports of this process show."""
        return self._run.is_in_last_epoch

    def state_dict(self) -> dict[str, object]:
        """How far the run has come, with the states of what is in `also`: for a trainer's own checkpoints.

        The present step counts as done if the optimizer has taken one in it.
        """
        return self._run.state_dict(epoch_ended=True)
