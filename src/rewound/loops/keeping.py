"""Every level of a run in a user's own loop is kept as a ticket, to choose from afterwards (`tickets/choices`).

FLOPs need the shapes of the input, which only the loop knows: they are counted in its first forward pass in training,
and divided by the number of examples in it. Where the loop never calls the model itself, or the model is compiled, so
that a hook would have it compiled again, nothing is counted, and the column is empty.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

from torch import Tensor

from rewound.foundations.errors import InputError
from rewound.loops import ranks
from rewound.loops.checkpoints import Folder, level_name
from rewound.loops.progress import Operations, Progress
from rewound.loops.rewinding import weights_to_prune
from rewound.loops.run import Run
from rewound.method.flops import FirstPass, Profile
from rewound.method.pruning.counts import counts_of
from rewound.method.pruning.mask import Mask, plain_parameters
from rewound.states.tickets.choices import Choice, Choices, place_of


class Keeper:
    """Keeps the levels of a run that has a folder, on rank 0; of any other run nothing."""

    def __init__(self, run: Run, folder: Folder) -> None:
        self.run, self.folder = run, folder
        self.keeps = run.path is not None
        self.choices = Choices(folder.path / "levels", run.progress.run)
        self.first: FirstPass | None = None

    def go_on(self) -> None:
        """Find what is kept; what is missing is written from the snapshots that are there."""
        if self.keeps:
            self._on_first(self._find)

    def keep(self) -> None:
        """Keep the level that has ended, as the model is now."""
        if self.keeps:
            self._on_first(lambda: self._add(self.run.progress, self.run.subjects.model.state_dict()))

    def look(self, until: ExitStack) -> None:
        """Count the operations of the loop's first forward pass, unless that has been done."""
        known = self.run.progress.operations is not None or self.run.subjects.is_compiled
        if self.keeps and not known and not ranks.rank():
            self.first = FirstPass(self.run.subjects.model)
            until.callback(self.first.close)

    def note(self) -> None:
        """Hold what was counted, if the first forward pass has been."""
        if self.first is not None and (profile := self.first.profile) is not None:
            weights = {name: list(operations) for name, operations in profile.weights.items()}
            counted: Operations = {"weights": weights, "fixed": profile.fixed, "examples": self.first.examples}
            self.run.progress.operations, self.first = counted, None

    def _on_first(self, keep: Callable[[], None]) -> None:
        """Do it on rank 0; an error that was raised there alone would leave the others waiting."""
        failed = None
        if not ranks.rank():
            try:
                keep()
            except (InputError, OSError) as error:
                failed = str(error) if isinstance(error, InputError) else f"{error.filename}: {error.strerror}"
        if failed := ranks.from_first(failed):
            raise InputError(f"cannot keep the level: {failed}; make room there, or give another checkpoint=")

    def _find(self) -> None:
        self.choices.read(self.run.say)
        reached = self.run.progress.reached
        for level in self.folder.levels():
            if level < len(reached) and place_of(level, reached[level].density) not in self.choices.kept:
                self._add_from_snapshot(level)
        if reached:
            self._write_table()

    def _add_from_snapshot(self, level: int) -> None:
        try:
            found = self.folder.read(level_name(level))
        except InputError:
            return  # told when it is needed
        if found is not None and found.progress.reached:
            self._add(found.progress, found.content["model"])

    def _add(self, progress: Progress, state: Mapping[str, Tensor]) -> None:
        reached, course = progress.reached[-1], self.run.course
        mask = progress.mask or Mask.full(weights_to_prune(self.run))
        choice = Choice(
            level=reached.level,
            density=reached.density,
            counts=counts_of(self.run.subjects.model, mask),
            flops=self._flops(mask),
            metric=reached.metric,
            value=reached.value,
        )
        try:
            about = {"technique": course.technique, f"retrain_{course.unit}s": course.retraining_time}
            self.choices.add(choice, state, mask, about)
        except InputError as error:
            if isinstance(error.__cause__, OSError):
                raise
            self.run.say(f"level {reached.level} is not kept as a ticket: {error}")
        self._write_table()

    def _write_table(self) -> None:
        progress = self.run.progress
        for place, choice in self.choices.kept.items():
            if choice.flops is None and not choice.level:  # an adopted network is kept before the first pass
                self.choices.kept[place] = replace(choice, flops=self._flops(None))
        returned = progress.reached[progress.returned(self.run.course.max_drop)]
        self.choices.write_table(place_of(returned.level, returned.density))

    def _flops(self, mask: Mask | None) -> int | None:
        """The operations of one example under a mask, if they were counted."""
        if (counted := self.run.progress.operations) is None:
            return None
        shapes = {name: weight.shape for name, weight in plain_parameters(self.run.subjects.model, tied=False).items()}
        weights = {name: tuple(each) for name, each in counted["weights"].items()}
        try:
            return round(Profile(shapes, weights, counted["fixed"]).total(mask) / counted["examples"])
        except (InputError, KeyError):  # the pass was another network's, or a tied weight is pruned by its other name
            return None
