"""A level of a run in a user's own loop: how it begins, and how its end is kept.

It begins with pruning and rewinding. The mask comes from the weights as they are, those of the level before; the
weights under it may then come from the dense run, or be drawn anew (laws 4 to 6). What belongs to them goes along:
buffers, optimizer slots, EMA and scaler. A gradual technique begins with the mask of the level before, and prunes on
the way (`GradualPruning`): between two steps, in the middle of an epoch if the loop counts those.

What a script gives in `also` may be an average of the weights (an EMA), which is pruned with the model. A module that
has the model's weights gets the model's mask; a copy of one part of it (of a generator alone, or of the network inside
a LightningModule) gets the mask of that part. Anything else is masked through its `state_dict`: the tensors in it,
however deep in dictionaries, that have the name and the shape of a pruned weight. A module in `also` that is trained (a
GAN's critic, a head, a loss with parameters) is no average and is never pruned, even if it has the same layers. What an
optimizer trains outside the model and `also` is refused: it would begin anew when the run is resumed, with the old
state of its optimizer.

Every level is kept as a ticket, to choose from afterwards (`tickets/kept_levels`). FLOPs need the shapes of the input,
which only the loop knows: they are counted in the loop's first forward pass in training, and divided by the number of
examples in it. Nothing is counted, and the column is empty, where the loop never calls the model itself, and where the
model is compiled, since a hook would have it compiled again.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import InputError, warn
from rewound.foundations.quantities import counted
from rewound.loops import ranks
from rewound.loops.checkpoints import Folder, level_name, rewind_name
from rewound.loops.course import Course, LoopRun, trained_weights
from rewound.loops.optimizers import members, with_inner
from rewound.loops.progress import Operations, Progress
from rewound.loops.snapshot import Stateful, Subjects
from rewound.method.flops import FirstPass, Profile
from rewound.method.pruning.attachment import Attachment, zero
from rewound.method.pruning.counts import counts_of, facts_of
from rewound.method.pruning.mask import Mask, plain_name, plain_parameters
from rewound.method.pruning.prunable import prunable_weights
from rewound.method.technique import Facts
from rewound.states.tickets.kept_levels import KeptLevel, KeptLevels, place_of


def begin_level(run: LoopRun, folder: Folder) -> None:
    """Bring the run and its subjects to the start of the next level."""
    subjects, level = run.subjects, run.levels[run.level + 1]
    mask, facts = _pruned(run, level.before if level.gradual else level.density)
    if isinstance(level.weights_from, int):
        _rewind(level.weights_from, subjects, folder)
    elif level.weights_from == "fresh":
        _draw_anew(run.course, subjects, folder)
    mask.apply(subjects.model)
    prune_along(averages(subjects), mask, subjects.model)
    run.progress.begin_level(level.density, mask, facts)


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
    mask = course.the_pruner.prune(candidates, density, before, seed=torch.initial_seed(), model=model)
    mask = ranks.agreed(mask, model)
    if not callable(course.the_technique.lr):
        return mask, None
    return mask, ranks.from_first(facts_of({**trained, **candidates}, before, mask))


def _trained(run: LoopRun) -> dict[str, nn.Parameter]:
    trained = trained_weights(run.subjects.model, run.subjects.optimizer)
    if not run.course.adopt:  # the dense run of an adopted network was not observed
        for name in run.without_gradient:
            del trained[name]
    return trained


def _candidates(run: LoopRun) -> dict[str, nn.Parameter]:
    """What the next level may prune: the weights trained at the end of the dense run; later those of the mask."""
    weights, mask = prunable_weights(run.subjects.model), run.progress.mask
    return {name: weights[name] for name in (_trained(run) if mask is None else mask)}


def weights_to_prune(run: LoopRun) -> dict[str, nn.Parameter]:
    """The weights that a mask of the run is for."""
    candidates = _candidates(run)
    return {name: candidates[name] for name in run.course.the_pruner.selected(candidates, run.subjects.model)}


def _rewind(epoch: int, subjects: Subjects, folder: Folder) -> None:
    found = folder.read(rewind_name(epoch))
    if found is None:
        raise nothing_to_rewind_to(epoch, folder)
    subjects.rewind(found.states)


def nothing_to_rewind_to(epoch: int, folder: Folder) -> InputError:
    """The error for a missing snapshot of that epoch."""
    return InputError(f"{folder.path} holds no weights of epoch {epoch} to rewind to; train anew in another folder")


def _draw_anew(course: Course, subjects: Subjects, folder: Folder) -> None:
    """Draw fresh weights, and put everything else back as it was before the first epoch."""
    assert course.init is not None  # `Course` checks it
    if course.adopt:
        for optimizer in with_inner(subjects.optimizer):
            optimizer.state.clear()
    else:
        _rewind(0, subjects, folder)
    weights = prunable_weights(subjects.model)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    course.init(subjects.model)
    ranks.share(subjects.model)  # each rank has drawn its own
    if all(torch.equal(weights[name], old) for name, old in before.items()):  # law 6
        raise InputError("init gave the initial weights of the dense run: let it draw others, with another seed")


# Averages of the weights in `also`

Named = Mapping[str, Tensor]


def prune_along(things: Sequence[Stateful], mask: Mask, model: nn.Module) -> None:
    """Set to zero in `things` what the mask prunes of the model; an average would only approach zero."""
    masks = _under_every_name(mask, model)
    for thing in things:
        if isinstance(thing, nn.Module):
            found = _masks_of(thing, mask, model)
            if len(found) == 1:
                found[0].apply(thing)
            continue
        state = thing.state_dict()
        for tensor, kept in _paired(state, masks):
            with torch.no_grad():
                zero(tensor, kept.to(tensor.device))
        if any(tensor[~kept.to(tensor.device)].any() for tensor, kept in _paired(thing.state_dict(), masks)):
            thing.load_state_dict(state)  # its state_dict gives copies


def warn_of_unpruned(things: Sequence[Stateful], weights: Named, model: nn.Module) -> None:
    """Warn of a thing with tensors of the weights' shapes that `prune_along` will not find."""
    full = Mask.full(weights)
    masks = _under_every_name(full, model)
    for thing in things:
        state = thing.state_dict()
        parts = len(_masks_of(thing, full, model)) if isinstance(thing, nn.Module) else 0
        found = parts == 1 if isinstance(thing, nn.Module) else any(_paired(state, masks))
        held = Counter(tensor.shape for tensor in _tensors(state))
        if parts > 1:
            warn(
                f"{type(thing).__name__} in also may be a copy of any of {parts} parts of the model, which have "
                "the same names and shapes, so it will not be pruned: average the whole model"
            )
        elif not found and Counter(weight.shape for weight in weights.values()) <= held:
            warn(
                f"{type(thing).__name__} in also holds tensors of the weights' shapes, but not under their names, and "
                "so will not be pruned with the model: let its state_dict name them as the model's does "
                f"({next(iter(weights))!r}), or give the averaged module itself"
            )


def _under_every_name(mask: Mask, model: nn.Module) -> dict[str, Tensor]:
    """The masks by all names that the model has for each weight: an average may hold tied weights separately."""
    parameters = plain_parameters(model, tied=True)
    masks = _by_parameter(mask, model)
    return {name: masks[parameter] for name, parameter in parameters.items() if parameter in masks}


def _by_parameter(mask: Mask, model: nn.Module) -> dict[nn.Parameter, Tensor]:
    parameters = plain_parameters(model, tied=True)
    return {parameters[name]: kept for name, kept in mask.items()}


def _masks_of(thing: nn.Module, mask: Mask, model: nn.Module) -> list[Mask]:
    """The model's mask for a module that has its weights; otherwise those of the parts that it may be a copy of.

    A part has more than one weight, unless the model has only one: a single layer is often like another.
    """
    if mask.fits(thing):
        return [mask]
    masks, shapes = _by_parameter(mask, model), _shapes(_parameters(thing))
    parts: dict[frozenset[nn.Parameter], Mask] = {}
    for part in model.modules():
        named = _parameters(part)
        pruned = {name: parameter for name, parameter in named.items() if parameter in masks}
        if len(pruned) >= min(2, len(mask)) and _shapes(named) == shapes:
            parts[frozenset(pruned.values())] = Mask({name: masks[parameter] for name, parameter in pruned.items()})
    return list(parts.values())


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_name(name): parameter for name, parameter in module.named_parameters(remove_duplicate=False)}


def _shapes(named: Named) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in named.items()}


def _paired(state: Mapping[str, object], masks: Named) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors of a state that have the name and shape of a weight, with its mask."""
    for name, value in state.items():
        kept = masks.get(plain_name(name)) if isinstance(name, str) else None
        if isinstance(value, Mapping):
            yield from _paired(value, masks)
        elif isinstance(value, Tensor) and kept is not None and kept.shape == value.shape:
            yield value, kept


def _tensors(state: object) -> Iterator[Tensor]:
    """All tensors of a state, in dictionaries and lists."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping | list | tuple):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from _tensors(value)


# What is trained outside the model

Tensors = Mapping[int, Tensor]  # by identity


def check_also(subjects: Subjects) -> None:
    """An error for an optimizer or scheduler in `also`, and for trained tensors outside the model and `also`."""
    for thing in subjects.also:
        if isinstance(thing, Optimizer | LRScheduler):
            raise InputError(
                f"the learning rates of {type(thing).__name__} in also would not be rewound; give it in the lists of "
                "optimizers and schedulers"
            )
    trained = _trained_outside(subjects)
    if lost := len(trained.keys() - {key for thing in subjects.also for key in _held(thing, trained)}):
        raise InputError(
            f"the optimizer trains {counted(lost, 'tensor')} outside the model, which would be neither saved "
            "nor rewound; put all into one module and give that, or give the other module in also=[...]"
        )


def averages(subjects: Subjects) -> list[Stateful]:
    """The objects in `also` that may be averages of the model's weights: those that are not trained."""
    trained = _trained_outside(subjects)
    return [thing for thing in subjects.also if not _held(thing, trained)]


def _trained_outside(subjects: Subjects) -> Tensors:
    """The tensors that the optimizer trains and the model does not have."""
    trained = {id(tensor): tensor for group in subjects.optimizer.param_groups for tensor in group["params"]}
    within = _held(subjects.model, trained)
    return {key: tensor for key, tensor in trained.items() if key not in within}


def _held(thing: Stateful, tensors: Tensors) -> set[int]:
    """Which of the tensors an object holds; copies in its state do not count."""
    if isinstance(thing, nn.Module):
        return tensors.keys() & {id(tensor) for tensor in (*thing.parameters(), *thing.buffers())}
    if not tensors:
        return set()
    values = [value for value in thing.state_dict().values() if isinstance(value, Tensor)]
    return {key for key, tensor in tensors.items() if any(_shares_memory(tensor, value) for value in values)}


def _shares_memory(tensor: Tensor, other: Tensor) -> bool:
    """Whether they share their memory: a state may hold a tensor itself, or a detached one."""
    if tensor is other:
        return True
    strided = tensor.layout == other.layout == torch.strided
    alike = (tensor.device, tensor.dtype, tensor.shape) == (other.device, other.dtype, other.shape)
    return strided and alike and tensor.data_ptr() == other.data_ptr()


# Tickets


class Keeper:
    """Keeps each level of a run as a ticket, on rank 0, if the run has a folder."""

    def __init__(self, run: LoopRun, folder: Folder) -> None:
        self.run, self.folder = run, folder
        self.keeps = run.path is not None
        self.tickets = KeptLevels(folder.path / "levels", run.progress.run)
        self.first: FirstPass | None = None

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
        known = self.run.progress.operations is not None or self.run.subjects.is_compiled
        if self.keeps and not known and not ranks.rank():
            self.first = FirstPass(self.run.subjects.model)
            until.callback(self.first.close)

    def note_operations(self) -> None:
        """Put what was counted into the progress, once there was a forward pass."""
        if self.first is not None and (profile := self.first.profile) is not None:
            weights = {name: list(operations) for name, operations in profile.weights.items()}
            counted: Operations = {"weights": weights, "fixed": profile.fixed, "examples": self.first.examples}
            self.run.progress.operations, self.first = counted, None

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
        self.tickets.read(self.run.say)
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
        mask = progress.mask or Mask.full(weights_to_prune(self.run))
        kept = KeptLevel(
            level=reached.level,
            density=reached.density,
            counts=counts_of(self.run.subjects.model, mask),
            flops=self._flops(mask),
            metric=reached.metric,
            value=reached.value,
        )
        try:
            about = {"technique": course.technique, f"retrain_{course.unit}s": course.retraining_time}
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
                self.tickets.kept[place] = replace(kept, flops=self._flops(None))
        returned = progress.reached[progress.returned(self.run.course.max_drop)]
        self.tickets.write_table(place_of(returned.level, returned.density))

    def _flops(self, mask: Mask | None) -> int | None:
        """The operations of one example under a mask, if they were counted."""
        if (counted := self.run.progress.operations) is None:
            return None
        shapes = {name: weight.shape for name, weight in plain_parameters(self.run.subjects.model, tied=False).items()}
        weights = {name: tuple(each) for name, each in counted["weights"].items()}
        try:
            return round(Profile(shapes, weights, counted["fixed"]).total(mask) / counted["examples"])
        except (InputError, KeyError):  # of another network's pass, or a tied weight that is pruned by its other name
            return None
