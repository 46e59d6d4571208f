"""The algorithm in a user's own training loop: it yields the epochs that the loop trains, and prunes between them.

It yields the T epochs (or steps, if the loop counts those) of the dense run and records what the schedule does to the
optimizer. Then, for each of `algorithm.levels`, it prunes, puts back what the technique rewinds, and yields again, with
the mask attached and the recorded learning rates set before every step; the scheduler itself rests until the loop ends.
A run begins at the newest snapshot of its folder, where a trainer's checkpoint left it, or anew.
"""

import secrets
import time
import weakref
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, ExitStack

from rewound.foundations.errors import Diverged, InputError, few, warn
from rewound.loops.checkpoints import Folder, level_name, opened, rewind_name
from rewound.loops.course import Course
from rewound.loops.hooks import StepHooks, recorded, replayed
from rewound.loops.level import GradualPruning, Keeper, begin_level, nothing_to_rewind_to
from rewound.loops.looprun import LoopRun
from rewound.loops.optimizers import check_all_given, check_new, members, set_last_rates
from rewound.loops.progress import Progress
from rewound.loops.recording import Recording, check_final_ahead
from rewound.loops.snapshot import Damaged
from rewound.method.algorithm import check_final
from rewound.method.pruning.attachment import attached
from rewound.method.pruning.mask import Mask
from rewound.tasks import ranks

SAVE_SECONDS = 60.0
"""How much work a killed process loses at most, apart from the epoch or step it was in."""


def iterated(run: LoopRun) -> Generator[int]:
    """The epochs of the whole run, from where it stands."""
    with opened(run.path) as (folder, lock):
        epochs = _Iteration(run, folder).epochs()
        reference = weakref.ref(epochs)  # weak, so that a trainer that is dropped is collected with its run
        lock.leave = lambda: inside.close() if (inside := reference()) is not None else None
        yield from epochs
        lock.check()


class _Iteration:
    """One pass over a run."""

    def __init__(self, run: LoopRun, folder: Folder) -> None:
        self.run, self.course, self.subjects, self._folder = run, run.course, run.subjects, folder
        self._untrained = run.course.untrained(run.subjects)
        self._saved_at = time.monotonic()
        self._next_look = 0
        """The number of the epoch, or step, at which the clock is looked at to decide whether to save."""
        self._last_look = (0, self._saved_at)
        """The epoch, or step, and the time of the last look."""

    def epochs(self) -> Generator[int]:
        run = self.run
        self._start()
        try:
            yield from self._train()
            while not run.is_over:
                self._prune()
                yield from self._train()
        except GeneratorExit:
            self._say_left()
            raise
        except Diverged as failure:
            if not run.ends_when_diverged:
                raise
            run.say(f"{failure}; the levels before it remain")
        self._return_level()

    def _train(self) -> Iterator[int]:
        """Train^t(W, m, g), by the user's loop: the epochs that are left of the present level."""
        run, progress, subjects = self.run, self.run.progress, self.subjects
        recording = run.level_recording
        with ExitStack() as level:
            self._keeper.count_operations(level)
            if run.structure is not None:
                run.structure.watch(level)
            attachment = None
            if (mask := run.attached_mask) is not None:
                attachment = level.enter_context(attached(mask.pairs(subjects.model), members(subjects.optimizer)))
            gradual = GradualPruning(run, attachment)
            gradual.prune_if_due()  # where a trainer has saved the run just before an update of the mask
            while progress.done < run.present.length:
                yield from self._train_part(recording, gradual)
            gradual.check_done()
        if len(progress.reached) == run.level:
            self._end_level()

    def _train_part(self, recording: Recording, gradual: GradualPruning) -> Iterator[int]:
        """The epochs, or steps, that are left of the present part of the recording."""
        run, progress, by_epoch = self.run, self.run.progress, self.course.unit == "epoch"
        number, end = run.part
        if not progress.steps:  # otherwise the part is resumed in its middle
            self._begin_part()
        with self._followed(recording, number, end) as hooks:
            if by_epoch:
                hooks.on_step = gradual.prune_if_due
            while True:
                yield progress.epoch
                can_save = progress.has_stepped  # otherwise accumulated gradients would be lost
                hooks.end_unit()
                if run.structure is not None:
                    run.structure.learn(self._folder, progress.run, 1 if by_epoch else 100)
                if progress.done + 1 == end:
                    break
                progress.end_epoch(part_ended=False)
                self._prune_and_save_if_due(gradual, can_save)
        self._end_part()
        self._prune_and_save_if_due(gradual, can_save)

    def _prune_and_save_if_due(self, gradual: GradualPruning, can_save: bool) -> None:
        gradual.prune_if_due()
        if can_save and self.run.progress.epoch >= self._next_look:
            self._save_if_due()

    def _prune(self) -> None:
        if not self.run.level:
            self._check_final()
            self._say_frozen()
            self._say_without_gradient()
        begin_level(self.run, self._folder)

    # How the run, a part and a level begin and end

    def _start(self) -> None:
        run, course, subjects = self.run, self.course, self.subjects
        resume_or_begin(run, self._folder)
        self._keeper = Keeper(run, self._folder)
        self._keeper.read()
        self._last_look = (run.progress.epoch, time.monotonic())
        run.progress.check_reports(course.max_drop, run.path)
        mask = run.progress.mask
        counts = course.counts(subjects) if mask is None else run.counts(mask)
        run.say(course.described(run.progress.epoch, counts.at(course.levels[-1].density)))
        if run.progress.mask is None and self._untrained:
            why = "not trained by this optimizer, and so not pruned unless that changes before the first pruning"
            run.say(f"{why}: {few(self._untrained)}")
        if course.adopt and not run.progress.epoch and not subjects.optimizer.state:
            run.say("the optimizer has no state: momentum and its like start empty")

    def _check_final(self) -> None:
        """An error if the dense run ends at a rate too low to fine-tune at; a kept dense run is not trained again."""
        try:
            check_final(self.course.the_technique, self.run.recording.schedule())
        except InputError as error:
            if self.course.adopt or not self.run.resumes:
                raise
            where = "the same script with it" if self.run.is_resumable else "with checkpoint= the same script"
            raise InputError(f"{error}; {where} goes on after the dense run") from None

    def _say_left(self) -> None:
        """Tell a user whose loop has left the run before its end."""
        run, progress, unit = self.run, self.run.progress, self.course.unit
        where = f"level {run.level} of {len(run.levels) - 1}" if run.level else "the dense run"
        state = "the mask is no longer held" if run.level else "nothing has been pruned"
        remedy = "; run the same script again to go on" if run.is_resumable else ""
        when = f"{unit} {progress.epoch + 1:,} of {self.course.length:,}"
        run.say(f"left in {when}, in {where}, which is not finished: {state}{remedy}")

    def _say_frozen(self) -> None:
        """Name what was trained at the start and is frozen now, as by a GAN's loop that freezes its critic."""
        now = self.course.untrained(self.subjects)
        if frozen := [name for name in now if name not in self._untrained]:
            why = "frozen when the dense run ended, and so not pruned; unfreeze at the end of an epoch what is to be"
            self.run.say(f"{why}: {few(frozen)}")

    def _say_without_gradient(self) -> None:
        """Name what no gradient has reached in the dense run; it is neither pruned nor counted (law 11)."""
        if self.course.adopt or not (missed := self.run.without_gradient):
            return
        if set(missed) >= set(self.course.the_pruner.selected(self.subjects.trained_weights, self.subjects.model)):
            raise InputError(
                f"no gradient has reached any of the weights to prune in the dense run ({few(missed)}); give the model "
                "that the loop trains, or select the weights that it trains"
            )
        why = "not pruned and not counted, since no gradient has reached them in the dense run"
        self.run.say(f"{why}: {few(missed)}")

    def _warn_without_gradient(self) -> None:
        """Name what no gradient has reached in the first level of an adopted network: it has been pruned already."""
        if missed := [name for name in self.run.without_gradient if name in (self.run.progress.mask or {})]:
            warn(
                f"no gradient has reached {few(missed)} in level 1: pruning them does not compress what is trained; "
                f"begin anew with Pruner(skip=({missed[0]!r}, ...))"
            )

    def _begin_part(self) -> None:
        progress = self.run.progress
        if not self.run.level:
            if progress.done in self.course.rewound_to:
                self._folder.write(rewind_name(progress.done), self.subjects, progress)
            progress.recording.begin_epoch()

    def _followed(self, recording: Recording, number: int, end: int) -> AbstractContextManager[StepHooks]:
        """The hooks on the optimizer for a part of the run."""
        run, course = self.run, self.course
        if run.level:
            return replayed(run, recording, number)
        # A scheduler that is never stepped is an error after the first epoch; a loop that counts steps may have many
        # before a scheduler's turn, so there the error comes at the end of the dense run.
        checks = not run.progress.epoch if course.unit == "epoch" else end == course.training_time
        checks = checks and run.resumes  # a trainer steps its schedulers at times of its own
        return recorded(run, self.subjects.schedulers if checks else ())

    def _end_part(self) -> None:
        progress = self.run.progress
        progress.end_epoch()
        self._keeper.note_operations()
        if progress.epoch == 1 and not self.run.level and self.course.unit == "epoch":
            self._check_ahead()

    def _save_if_due(self) -> None:
        """Save if SAVE_SECONDS have passed, and choose when to look at the clock again, the same on every rank."""
        run, progress, now = self.run, self.run.progress, time.monotonic()
        if self.course.unit == "step" and not run.level and not self._next_look:
            self.subjects.check()  # after the first step; a loop that counts epochs does it in `_check_ahead`
        overdue = ranks.from_first(now - self._saved_at > SAVE_SECONDS)
        if run.is_resumable and overdue and progress.done < run.present.length:
            run.check_finite()
            self._keeper.note_operations()
            self._folder.write("latest", self.subjects, progress)
            self._saved_at = time.monotonic()
        ahead = 1 if self.course.unit == "epoch" else ranks.from_first(self._steps_to_next_look(now))
        self._next_look, self._last_look = progress.epoch + ahead, (progress.epoch, time.monotonic())

    def _steps_to_next_look(self, now: float) -> int:
        """How many steps there are until saving is due at the present pace: a look may cost more than a step.

        At most twice as many as since the last look, since the first steps are slow.
        """
        (epoch, then), left = self._last_look, SAVE_SECONDS - (time.monotonic() - self._saved_at)
        steps = self.run.progress.epoch - epoch
        pace = (now - then) / steps if steps else SAVE_SECONDS
        return max(1, min(2 * steps, int(left / max(pace, 1e-9))))

    def _check_ahead(self) -> None:
        """Refuse after the first epoch what would fail after the dense run; optimizers have slots by now."""
        course, subjects, first = self.course, self.subjects, self.run.progress.recording
        subjects.check()
        self.run.updates_of(course.levels[0])  # an error if gradual pruning has too few steps
        check_final_ahead(course, subjects, first)

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
        counts = run.counts(mask)
        progress.reached.append(
            reached._replace(
                network_compression=counts.network_compression,
                measured_density=counts.density(reached.density),
                flops_left=None if run.structure is None else run.structure.flops_left(mask),
            )
        )
        self._keep_level(progress.returned(max_drop))
        self._keeper.keep()
        self._saved_at = time.monotonic()
        run.say(progress.reached[-1].described(len(run.levels) - 1, self.course.length, self.course.unit))
        progress.check_reports(max_drop, run.path)  # after the level was written
        if self.course.adopt and run.level == 1:
            self._warn_without_gradient()

    def _keep_level(self, returned: int) -> None:
        """Write the end of the level if the run may come back to it, and remove the ends that it will not."""
        level = self.run.level
        if self.run.path is not None:
            # A larger compression goes on from the level before the last, smaller step, or from the dense run.
            kept = {0, level - 1, level, returned}
        else:  # the folder is removed with the run
            kept = set() if self.course.max_drop is None else {returned}
        if level in kept:
            self._folder.write(level_name(level), self.subjects, self.run.progress)
        self._folder.keep(kept)

    def _return_level(self) -> None:
        """Leave the model as it was at the end of the returned level."""
        run = self.run
        if (chosen := run.progress.returned(self.course.max_drop)) != run.level:
            found = self._folder.read(level_name(chosen))
            if found is None:  # the run went on from an earlier level, and was worse this time
                raise InputError(f"{self._folder.path} no longer holds level {chosen}; train anew in another folder")
            if run.structure is not None:
                run.structure.fit(found.progress.mask)
            self.subjects.rewind(found.states)
            set_last_rates(self.subjects.schedulers, self.subjects.optimizer)
            run.progress.mask = found.progress.mask
            run.say(f"returned: {f'level {chosen}' if chosen else 'the dense network'}, the last within max_drop")


# Where a run begins


def resume_or_begin(run: LoopRun, folder: Folder) -> None:
    """Bring the run and its subjects to where the run begins; from here on the folder belongs to the run."""
    course, subjects = run.course, run.subjects
    newest, damaged = folder.newest(course.densities) if run.resumes else (None, [])
    if run.was_loaded:  # from a trainer's checkpoint; the trainer has restored the subjects
        newest, damaged = None, []
    elif newest is None and not course.adopt:
        check_new(subjects.schedulers)
        if run.resumes:
            check_final_ahead(course, subjects)
    progress = run.progress if newest is None else newest.progress
    if not progress.run:
        goes_on = newest is not None or run.was_loaded  # then it was begun by a version that gave runs no names
        progress.run = ranks.from_first(folder.run if goes_on else "") or ranks.from_first(secrets.token_hex(8))
    if run.is_resumable and progress.epoch < course.dense.length:
        check_all_given(subjects.schedulers, subjects.optimizer)
    arguments = course.arguments(subjects)
    may_differ = ["compression"] if newest is not None and progress.densities else ["compression", "final"]
    if course.one_shot:
        may_differ.append("rate")  # it has no meaning in one shot, but an earlier version accepted it
    folder.claim(arguments, progress.run, run.say, may_differ, check=run.resumes)
    if run.structure is not None and newest is not None:
        run.structure.read(folder)
        run.structure.fit(progress.mask)
    if newest is not None or run.was_loaded:
        _check_rewound_to(course, progress, folder)
    if newest is not None:
        folder.set_aside(damaged, f"{course.unit} {progress.epoch:,}", run.say)
        subjects.resume(newest.states)
        run.progress = progress


def _check_rewound_to(course: Course, progress: Progress, folder: Folder) -> None:
    """An error before the present level is trained if the snapshot is missing that the next level goes back to."""
    if progress.level == len(course.levels):
        return
    for at in course.rewound_to:
        if not progress.level and progress.epoch <= at:
            continue  # it is still to be written
        try:
            if not folder.has(rewind_name(at)):
                raise nothing_to_rewind_to(at, course, folder)
        except Damaged as error:
            raise InputError(f"{error}, and the next level goes back to it; train anew in another folder") from error
