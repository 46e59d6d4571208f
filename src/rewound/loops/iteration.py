"""The algorithm in a user's own training loop: epochs that somebody else trains, with pruning and rewinding in between.

It yields the T epochs (or steps, if the loop counts those) of the dense run and records what the schedule does to the
optimizer. Then, for each of
`algorithm.levels`, it prunes, puts back what the technique rewinds, and yields again, with the mask attached and the
recorded learning rates set before every step; the scheduler itself rests until the loop ends.
"""

import time
import weakref
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, ExitStack

from rewound.foundations.errors import Diverged, InputError, few, warn
from rewound.loops import ranks
from rewound.loops.checkpoints import Folder, level_name, opened, rewind_name
from rewound.loops.course import trained_weights
from rewound.loops.epoch import Part, recorded, replayed
from rewound.loops.joint import members
from rewound.loops.keeping import Keeper
from rewound.loops.recording import Recording
from rewound.loops.rehearsal import check_final_ahead
from rewound.loops.resumption import resume_or_begin
from rewound.loops.rewinding import begin_level
from rewound.loops.rules import recording_of
from rewound.loops.run import Run
from rewound.loops.schedulers import resting, tell_rates
from rewound.method.algorithm import check_final
from rewound.method.pruning.counts import counts_of
from rewound.method.pruning.mask import Mask

SAVE_SECONDS = 60.0
"""How much work a killed process loses, at most, beside the epoch or step it was in."""


def iterated(run: Run) -> Generator[int]:
    """The epochs of the whole run, from where it has been left."""
    with opened(run.path) as (folder, held):
        epochs = _Iteration(run, folder).epochs()
        known = weakref.ref(epochs)  # a trainer that is dropped is collected with the run inside it
        held.leave = lambda: inside.close() if (inside := known()) is not None else None
        yield from epochs
        held.check()


class _Iteration:
    """One pass over a run."""

    def __init__(self, run: Run, folder: Folder) -> None:
        self.run, self.course, self.subjects, self._folder = run, run.course, run.subjects, folder
        self._untrained = run.course.untrained(run.subjects.model, run.subjects.optimizer)
        self._saved_at = time.monotonic()
        self._look_at = 0
        """The number of the epoch, or step, before which it is looked at whether to save."""
        self._looked = (0, self._saved_at)
        """Where the loop was at the last look, and when."""

    def epochs(self) -> Generator[int]:
        run = self.run
        self._start()
        try:
            yield from self._train()
            while not run.is_over:
                self._prune()
                yield from self._train()
        except GeneratorExit:
            levels, course = len(run.levels) - 1, self.course
            run.say(run.progress.told_when_left(levels, course.length, course.unit, run.is_resumable))
            raise
        except Diverged as failure:
            if not run.ends_when_diverged:
                raise
            run.say(f"{failure}; the levels before it remain")
        self._give_back()

    def _train(self) -> Iterator[int]:
        """Train^t(W, m, g), by somebody else: the epochs that are left of the present level."""
        run, progress, subjects = self.run, self.run.progress, self.subjects
        recording = recording_of(run) if run.level else progress.recording
        with ExitStack() as level:
            self._keeper.look(level)
            if progress.mask is not None:
                level.enter_context(progress.mask.attached(subjects.model, members(subjects.optimizer)))
                level.enter_context(resting(subjects.schedulers, subjects.optimizer))
            while progress.done < run.present.length:
                number, end = run.part
                if not progress.steps:  # else it is resumed in its middle
                    self._begin_part()
                with self._part(recording, number, end) as part:
                    while True:
                        yield progress.epoch
                        can_save = progress.has_stepped  # gradients that wait for their step are not saved
                        part.end_unit()
                        if progress.done + 1 == end:
                            break
                        progress.end_epoch(part_ended=False)
                        if can_save and progress.epoch >= self._look_at:
                            self._save_if_due()
                self._end_part()
                if can_save and progress.epoch >= self._look_at:
                    self._save_if_due()
        if len(progress.reached) == run.level:
            self._end_level()

    def _prune(self) -> None:
        if not self.run.level:
            self._check_final()
            self._tell_of_frozen()
            self._tell_of_gradients()
        begin_level(self.run, self._folder)

    # A part, a level and the run: how they begin and end

    def _start(self) -> None:
        run, course, subjects = self.run, self.course, self.subjects
        resume_or_begin(run, self._folder)
        self._keeper = Keeper(run, self._folder)
        self._keeper.go_on()
        self._looked = (run.progress.epoch, time.monotonic())
        run.progress.check_reports(course.max_drop, run.path)
        mask = run.progress.mask
        counts = course.counts(subjects.model, subjects.optimizer) if mask is None else counts_of(subjects.model, mask)
        run.say(course.told(run.progress.epoch, counts.at(course.levels[-1].density).network_compression))
        if run.progress.mask is None and self._untrained:
            why = "not trained by this optimizer, and so not pruned unless that changes before the first pruning"
            run.say(f"{why}: {few(self._untrained)}")
        if course.adopt and not run.progress.epoch and not subjects.optimizer.state:
            run.say("the optimizer has no state: momentum and its like start empty")

    def _check_final(self) -> None:
        """Whether the dense run ends at a rate to fine-tune at; one that is kept need not be trained again."""
        try:
            check_final(self.course.how, self.run.recording.schedule())
        except InputError as error:
            if self.course.adopt or not self.run.resumes:
                raise
            where = "the same script with it" if self.run.is_resumable else "with checkpoint= the same script"
            raise InputError(f"{error}; {where} goes on after the dense run") from None

    def _tell_of_frozen(self) -> None:
        """Name what was trained at the start and is left out now, as by a GAN's loop that freezes its critic."""
        now = self.course.untrained(self.subjects.model, self.subjects.optimizer)
        if frozen := [name for name in now if name not in self._untrained]:
            why = "frozen when the dense run ended, and so not pruned; unfreeze at the end of an epoch what is to be"
            self.run.say(f"{why}: {few(frozen)}")

    def _tell_of_gradients(self) -> None:
        """Name what no gradient has reached in the dense run: neither pruned nor counted (law 11)."""
        if self.course.adopt or not (missed := self.run.without_gradient):
            return
        model, optimizer = self.subjects.model, self.subjects.optimizer
        if set(missed) >= set(self.course.pruner.selected(trained_weights(model, optimizer), model)):
            raise InputError(
                f"no gradient has reached any of the weights to prune in the dense run ({few(missed)}); give the model "
                "that the loop trains, or select the weights that it trains"
            )
        why = "not pruned and not counted, since no gradient has reached them in the dense run"
        self.run.say(f"{why}: {few(missed)}")

    def _warn_of_gradients(self) -> None:
        """An adopted network has no dense run to look at: what its first level does not reach has been pruned."""
        if missed := [name for name in self.run.without_gradient if name in (self.run.progress.mask or {})]:
            warn(
                f"no gradient has reached {few(missed)} in level 1: what is pruned there is no compression of what is "
                f"trained; begin anew with Pruner(skip=({missed[0]!r}, ...))"
            )

    def _begin_part(self) -> None:
        progress = self.run.progress
        if not self.run.level:
            if progress.done in self.course.rewound_to:
                self._folder.write(rewind_name(progress.done), self.subjects, progress)
            progress.recording.begin_epoch()

    def _part(self, recording: Recording, number: int, end: int) -> AbstractContextManager[Part]:
        optimizer, schedulers, progress = self.subjects.optimizer, self.subjects.schedulers, self.run.progress
        unseen, course = self.run.unseen, self.course
        if self.run.level:
            return replayed(optimizer, progress, unseen, course.unit, recording, number, schedulers, course.adopt)
        # In epochs a scheduler that nobody steps is told after the first; of steps there may be many before its turn.
        checked = not progress.epoch if course.unit == "epoch" else end == course.training_time
        checks = self.run.resumes and checked  # a trainer steps its schedulers when it likes
        return recorded(optimizer, progress, unseen, course.unit, schedulers if checks else ())

    def _end_part(self) -> None:
        progress = self.run.progress
        progress.end_epoch()
        self._keeper.note()
        if progress.epoch == 1 and not self.run.level and self.course.unit == "epoch":
            self._look_ahead()

    def _save_if_due(self) -> None:
        """Save where the run is if that is SAVE_SECONDS ago, and choose when to look again, the same on every rank."""
        run, progress, now = self.run, self.run.progress, time.monotonic()
        if self.course.unit == "step" and not run.level and not self._look_at:
            self.subjects.check()  # after the first step, as below after the first epoch
        overdue = ranks.from_first(now - self._saved_at > SAVE_SECONDS)
        if run.is_resumable and overdue and progress.done < run.present.length:
            run.check_finite()
            self._keeper.note()
            self._folder.write("latest", self.subjects, progress)
            self._saved_at = time.monotonic()
        ahead = 1
        if self.course.unit == "step":
            # A look costs more than a step may: as many steps go by as would take until it is due, or twice as many as
            # last time, since the first ones are slow.
            (epoch, then), left = self._looked, SAVE_SECONDS - (time.monotonic() - self._saved_at)
            steps = progress.epoch - epoch
            pace = (now - then) / steps if steps else SAVE_SECONDS
            ahead = ranks.from_first(max(1, min(2 * steps, int(left / max(pace, 1e-9)))))
        self._look_at, self._looked = progress.epoch + ahead, (progress.epoch, time.monotonic())

    def _look_ahead(self) -> None:
        """Refuse after the first epoch what would fail after the dense run; optimizers have slots by now."""
        self.subjects.check()
        if self.course.final is None:
            recording, T = self.run.progress.recording, self.course.training_time
            check_final_ahead(self.course.how, self.subjects, T, recording)

    def _end_level(self) -> None:
        run, progress, max_drop = self.run, self.run.progress, self.course.max_drop
        run.check_finite()
        progress.agree()
        if max_drop is not None and progress.value is None and not progress.epoch:
            raise InputError(
                "max_drop needs run.report(accuracy=...) of the adopted network, before the loop; report it, on rank 0 "
                "at least"
            )
        reached = progress.reached_at(run.present.density, progress.epoch)
        mask = progress.mask if progress.mask is not None else Mask({})
        whole = counts_of(self.subjects.model, mask).network_compression
        progress.reached.append(reached._replace(network_compression=whole))
        self._keep_level(progress.returned(max_drop))
        self._keeper.keep()
        self._saved_at = time.monotonic()
        run.say(progress.reached[-1].told(len(run.levels) - 1, self.course.length, self.course.unit))
        # By now the level is in the folder.
        progress.check_reports(max_drop, run.path)
        if self.course.adopt and run.level == 1:
            self._warn_of_gradients()

    def _keep_level(self, returned: int) -> None:
        """Write the end of the level, for whoever may come back to it, and remove what nobody will."""
        level = self.run.level
        if self.run.path is not None:
            # A larger compression goes on from the level before a last, smaller step, or from the dense run.
            kept = {0, level - 1, level, returned}
        else:  # the folder ends with the run
            kept = set() if self.course.max_drop is None else {returned}
        if level in kept:
            self._folder.write(level_name(level), self.subjects, self.run.progress)
        self._folder.keep(kept)

    def _give_back(self) -> None:
        """Leave the model at the returned level."""
        run = self.run
        if (chosen := run.progress.returned(self.course.max_drop)) != run.level:
            found = self._folder.read(level_name(chosen))
            if found is None:  # of a run that went on from an earlier level, and was worse this time
                raise InputError(f"{self._folder.path} no longer holds level {chosen}; train anew in another folder")
            self.subjects.rewind(found.content)
            tell_rates(self.subjects.schedulers, self.subjects.optimizer)
            run.progress.mask = found.progress.mask
            run.say(f"returned: {f'level {chosen}' if chosen else 'the dense network'}, the last within max_drop")
