"""A level of a run in a user's own loop: how it begins, and how its end is kept.

It begins with pruning and rewinding. The mask comes from the weights as they are, those of the level before; the
weights under it may then come from the dense run, or be drawn anew (laws 4 to 6). What belongs to them goes along:
buffers, optimizer slots, EMA and scaler. A gradual technique begins with the mask of the level before, and prunes on
the way (`GradualPruning`): between two steps, in the middle of an epoch if the loop counts those.

Every level is kept as a ticket, to choose from afterwards (`tickets/kept_levels`). FLOPs need the shapes of the input,
which only the loop knows: they are counted in the loop's first forward pass in training, and divided by the number of
examples in it. Nothing is counted, and the column is empty, where the loop never calls the model itself, and where the
model is compiled, since a hook would have it compiled again.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn

from rewound.foundations.errors import InputError
from rewound.loops.averages import averages, prune_along
from rewound.loops.checkpoints import Folder, level_name, rewind_name
from rewound.loops.course import Course
from rewound.loops.looprun import LoopRun
from rewound.loops.optimizers import members, with_inner
from rewound.loops.progress import Operations, Progress
from rewound.method.flops import FirstPass, Profile
from rewound.method.pruning.attachment import Attachment
from rewound.method.pruning.counts import facts_of
from rewound.method.pruning.mask import Mask, plain_parameters
from rewound.method.pruning.prunable import prunable_weights
from rewound.method.technique import Facts
from rewound.states.tickets.kept_levels import KeptLevel, KeptLevels, place_of
from rewound.tasks import ranks


def begin_level(run: LoopRun, folder: Folder) -> None:
    """Bring the run and its subjects to the start of the next level."""
    subjects, level = run.subjects, run.levels[run.level + 1]
    if run.structure is not None:
        run.structure.fit(None)  # pruning and rewinding happen in the shapes of the large network
    mask, facts = _pruned(run, level.before if level.gradual else level.density)
    if isinstance(level.weights_from, int):
        _rewind(run, level.weights_from, folder)
    elif level.weights_from == "fresh":
        _draw_anew(run, folder)
    mask.apply(subjects.model)
    prune_along(averages(subjects), mask, subjects.model)
    run.progress.begin_level(level.density, mask, facts)
    if run.structure is not None:
        run.structure.fit(mask)


class GradualPruning:
    """The prunings on the way through the present level; most techniques have none."""

    def __init__(self, run: LoopRun, attachment: Attachment | None) -> None:
        self.run, self.attachment = run, attachment
        self.updates = run.updates_of(run.present)

    @property
    def _steps(self) -> int:
        """How many steps of the level are done, in those that the updates count."""
        progress, by_step = self.run.progress, self.run.course.unit == "step"
        return progress.done if by_step else progress.level_steps // len(members(self.run.subjects.optimizer))

    def prune_if_due(self) -> None:
        """Prune to the density of the last update whose step has come, if that has not been done."""
        progress, subjects = self.run.progress, self.run.subjects
        while progress.updates < len(self.updates) and self.updates[progress.updates].step <= self._steps:
            assert self.attachment is not None  # the dense run has no updates
            progress.mask, _ = _pruned(self.run, self.updates[progress.updates].density)
            self.attachment.shrink(progress.mask.pairs(subjects.model))
            prune_along(averages(subjects), progress.mask, subjects.model)
            progress.updates += 1

    def check_done(self) -> None:
        """An error at the end of a level that was too short for all updates of its mask."""
        if (done := self.run.progress.updates) < len(self.updates):
            raise InputError(
                f"level {self.run.level} took {self._steps:,} steps, but the last of its {len(self.updates):,} "
                f"prunings was due after {self.updates[-1].step:,} by the steps of the dense run, so that only "
                f"{done:,} were done; take as many steps in an epoch as before"
            )


def _pruned(run: LoopRun, density: float) -> tuple[Mask, Facts | None]:
    """The mask of the next level, the same on every rank, and what a learning-rate rule may know of it."""
    course, model, before = run.course, run.subjects.model, run.progress.mask
    trained, candidates = _trained(run), _candidates(run)
    if run.structure is not None:
        mask = run.structure.pruned(candidates, density, before)
    else:
        mask = course.the_pruner.prune(candidates, density, before, seed=torch.initial_seed(), model=model)
    mask = ranks.agreed(mask, model)
    if not callable(course.the_technique.lr):
        return mask, None
    weights = {**trained, **candidates}
    if run.structure is not None:  # biases and normalisation go with units, and are no prunable weights
        prunable = prunable_weights(model)
        weights = {name: each for name, each in weights.items() if name in prunable}
    facts = facts_of(weights, before and _among(weights, before), _among(weights, mask))
    return mask, ranks.from_first(facts)


def _among(weights: Mapping[str, Tensor], mask: Mask) -> Mask:
    return Mask({name: kept for name, kept in mask.items() if name in weights})


def _trained(run: LoopRun) -> dict[str, nn.Parameter]:
    # What belongs to a unit is not only weights.
    trained = run.subjects.trained_weights if run.structure is None else run.subjects.trained_parameters
    if not run.course.adopt:  # the dense run of an adopted network was not observed
        for name in run.without_gradient:
            del trained[name]
    return trained


def _candidates(run: LoopRun) -> dict[str, nn.Parameter]:
    """What the next level may prune: the weights trained at the end of the dense run; later those of the mask."""
    trained, mask = _trained(run), run.progress.mask
    if mask is None:
        return trained
    if run.structure is None:
        weights = prunable_weights(run.subjects.model)
        return {name: weights[name] for name in mask}
    parameters = plain_parameters(run.subjects.model, tied=False)
    return trained | {name: parameters[name] for name in mask}


def _full_mask(run: LoopRun) -> Mask:
    """The mask of the dense network: all that is pruned in the levels, all of it kept."""
    if (mask := run.progress.mask) is not None and run.structure is not None:
        return Mask({name: torch.ones_like(kept) for name, kept in mask.items()})
    candidates = _candidates(run)
    if run.structure is not None:
        return run.structure.pruned(candidates, 1.0, None)
    selected = run.course.the_pruner.selected(candidates, run.subjects.model)
    return Mask.full({name: candidates[name] for name in selected})


def _rewind(run: LoopRun, at: int, folder: Folder) -> None:
    found = folder.read(rewind_name(at))
    if found is None:
        raise nothing_to_rewind_to(at, run.course, folder)
    run.subjects.rewind(found.states)


def nothing_to_rewind_to(at: int, course: Course, folder: Folder) -> InputError:
    """The error for a missing snapshot of that epoch, or step."""
    where = f"{course.unit} {at:,}"
    return InputError(f"{folder.path} holds no weights of {where} to rewind to; train anew in another folder")


def _draw_anew(run: LoopRun, folder: Folder) -> None:
    """Draw fresh weights, and put everything else back as it was before the first epoch."""
    course, subjects = run.course, run.subjects
    assert course.init is not None  # `Course` checks it
    if course.adopt:
        for optimizer in with_inner(subjects.optimizer):
            optimizer.state.clear()
    else:
        _rewind(run, 0, folder)
    weights = prunable_weights(subjects.model)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    course.init(subjects.model)
    ranks.share(subjects.model)  # each rank has drawn its own
    if all(torch.equal(weights[name], old) for name, old in before.items()):  # law 6
        raise InputError("init gave the initial weights of the dense run: let it draw others, with another seed")


# Tickets


class Keeper:
    """Keeps each level of a run as a ticket, on rank 0, if the run has a folder."""

    def __init__(self, run: LoopRun, folder: Folder) -> None:
        self.run, self.folder = run, folder
        self.keeps = run.path is not None
        self.tickets = KeptLevels(folder.path / "levels", run.progress.run)
        self.first: FirstPass | None = None
        self.operations_of_small: dict[int, int] = {}
        """Those of one example, by the level in which the network is small."""

    def read(self) -> None:
        """Read which levels are kept, and write missing ones from the snapshots that are there."""
        if self.keeps:
            self._on_first(self._find)

    def keep(self) -> None:
        """Keep the level that has ended, as the model is now."""
        if self.keeps:
            self._on_first(lambda: self._add(self.run.progress, self.run.subjects.model.state_dict()))

    def count_operations(self, until: ExitStack) -> None:
        """Count the operations of the loop's first forward pass, unless they are known."""
        known = (self.run.progress.operations is not None and not self._is_small) or self.run.subjects.is_compiled
        if self.keeps and not known and not ranks.rank():
            self.first = FirstPass(self.run.subjects.model)
            until.callback(self.first.close)

    def note_operations(self) -> None:
        """Put what was counted into the progress, once there was a forward pass."""
        if self.first is not None and (profile := self.first.profile) is not None:
            weights = {name: list(operations) for name, operations in profile.weights.items()}
            counted: Operations = {"weights": weights, "fixed": profile.fixed, "examples": self.first.examples}
            if self._is_small:
                self.operations_of_small[self.run.level] = round(profile.total() / self.first.examples)
            else:
                self.run.progress.operations = counted
            self.first = None

    @property
    def _is_small(self) -> bool:
        structure = self.run.structure
        return structure is not None and structure.slims and self.run.level > 0

    def _on_first(self, keep: Callable[[], None]) -> None:
        """Call it on rank 0 and raise its error on every rank: raised on rank 0 alone, others would wait for ever."""
        failed = None
        if not ranks.rank():
            try:
                keep()
            except (InputError, OSError) as error:
                failed = str(error) if isinstance(error, InputError) else f"{error.filename}: {error.strerror}"
        if failed := ranks.from_first(failed):
            raise InputError(f"cannot keep the level: {failed}; make room there, or give another checkpoint=")

    def _find(self) -> None:
        self.tickets.read(self.run.counts, self.run.say)
        reached = self.run.progress.reached
        for level in self.folder.levels():
            if level < len(reached) and place_of(level, reached[level].density) not in self.tickets.kept:
                self._add_from_snapshot(level)
        if reached:
            self._write_table()

    def _add_from_snapshot(self, level: int) -> None:
        try:
            found = self.folder.read(level_name(level))
        except InputError:
            return  # the error is raised when the snapshot is needed
        if found is not None and found.progress.reached:
            self._add(found.progress, found.states["model"])

    def _add(self, progress: Progress, state: Mapping[str, Tensor]) -> None:
        reached, course = progress.reached[-1], self.run.course
        mask = progress.mask or _full_mask(self.run)
        kept = KeptLevel(
            level=reached.level,
            density=reached.density,
            counts=self.run.counts(mask),
            flops=self._flops(mask, progress.level),
            metric=reached.metric,
            value=reached.value,
        )
        try:
            about: dict[str, object] = {
                "technique": course.technique,
                f"retrain_{course.unit}s": course.retraining_time,
            }
            if (structure := self.run.structure) is not None:
                state, about = structure.large_state(state, mask), about | structure.facts
            self.tickets.add(kept, state, mask, about)
        except InputError as error:
            if isinstance(error.__cause__, OSError):
                raise
            self.run.say(f"level {reached.level} is not kept as a ticket: {error}")
        self._write_table()

    def _write_table(self) -> None:
        progress = self.run.progress
        for place, kept in self.tickets.kept.items():
            if kept.flops is None and not kept.level:  # an adopted network is kept before the first pass
                self.tickets.kept[place] = replace(kept, flops=self._flops(None, 0))
        returned = progress.reached[progress.returned(self.run.course.max_drop)]
        self.tickets.write_table(place_of(returned.level, returned.density))

    def _flops(self, mask: Mask | None, level: int) -> int | None:
        """The operations of one example under the mask of a level, if they were counted."""
        if level in self.operations_of_small:
            return self.operations_of_small[level]
        if (counted := self.run.progress.operations) is None:
            return None
        parameters, structure = plain_parameters(self.run.subjects.model, tied=False), self.run.structure
        large = {} if structure is None else structure.shapes
        shapes = {name: torch.Size(large.get(name, weight.shape)) for name, weight in parameters.items()}
        weights = {name: tuple(each) for name, each in counted["weights"].items()}
        try:
            return round(Profile(shapes, weights, counted["fixed"]).total(mask) / counted["examples"])
        except (InputError, KeyError):  # of another network's pass, or a tied weight that is pruned by its other name
            return None
