"""The beginning of a level: prune what the last one left, and put back what the technique rewinds.

The mask comes from the weights as they are, the previous level's; the weights under it may then come from the dense
run, or be drawn anew (laws 4 to 6). What belongs to them goes along: buffers, optimizer slots, EMA and scaler.
"""

import torch
from torch import nn

from rewound.foundations.errors import InputError
from rewound.loops import ranks
from rewound.loops.averages import prune_along
from rewound.loops.beside import averages
from rewound.loops.checkpoints import Folder, rewind_name
from rewound.loops.course import Course, trained_weights
from rewound.loops.joint import with_held
from rewound.loops.run import Run
from rewound.loops.snapshot import Subjects
from rewound.method.pruning.facts import facts_of
from rewound.method.pruning.mask import Mask
from rewound.method.pruning.prunable import prunable_weights
from rewound.method.technique import Facts


def begin_level(run: Run, folder: Folder) -> None:
    """Bring the run and its subjects to the start of the next level."""
    subjects, level = run.subjects, run.levels[run.level + 1]
    mask, facts = _pruned(run, level.density)
    if isinstance(level.weights_from, int):
        _rewind(level.weights_from, subjects, folder)
    elif level.weights_from == "fresh":
        _draw_anew(run.course, subjects, folder)
    mask.apply(subjects.model)
    prune_along(averages(subjects), mask, subjects.model)
    run.progress.begin_level(level.density, mask, facts)


def _pruned(run: Run, density: float) -> tuple[Mask, Facts | None]:
    """The mask of the next level, the same on every rank, and what a rule may know of it."""
    course, model, mask = run.course, run.subjects.model, run.progress.mask
    trained, chosen = _trained(run), _candidates(run)
    pruned = course.pruner.prune(chosen, density, mask, seed=torch.initial_seed(), model=model)
    made = ranks.agreed(pruned, model)
    if not callable(course.how.lr):
        return made, None
    return made, ranks.from_first(facts_of({**trained, **chosen}, mask, made))


def _trained(run: Run) -> dict[str, nn.Parameter]:
    trained = trained_weights(run.subjects.model, run.subjects.optimizer)
    if not run.course.adopt:  # else nobody has seen the dense run
        for name in run.without_gradient:
            del trained[name]
    return trained


def _candidates(run: Run) -> dict[str, nn.Parameter]:
    """What the next level is pruned from: what is trained when the dense run ends, and then what the mask is for."""
    weights, mask = prunable_weights(run.subjects.model), run.progress.mask
    return {name: weights[name] for name in (_trained(run) if mask is None else mask)}


def weights_to_prune(run: Run) -> dict[str, nn.Parameter]:
    """The weights that a mask of the run is for."""
    candidates = _candidates(run)
    return {name: candidates[name] for name in run.course.pruner.selected(candidates, run.subjects.model)}


def _rewind(epoch: int, subjects: Subjects, folder: Folder) -> None:
    found = folder.read(rewind_name(epoch))
    if found is None:
        raise nothing_to_rewind_to(epoch, folder)
    subjects.rewind(found.content)


def nothing_to_rewind_to(epoch: int, folder: Folder) -> InputError:
    """What is said where the snapshot of that epoch is gone."""
    return InputError(f"{folder.path} holds no weights of epoch {epoch} to rewind to; train anew in another folder")


def _draw_anew(course: Course, subjects: Subjects, folder: Folder) -> None:
    """Fresh weights, and everything else as it was before the first epoch."""
    assert course.init is not None  # `Course` asks for it
    if course.adopt:
        for optimizer in with_held(subjects.optimizer):
            optimizer.state.clear()
    else:
        _rewind(0, subjects, folder)
    weights = prunable_weights(subjects.model)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    course.init(subjects.model)
    ranks.share(subjects.model)  # each rank has drawn its own
    if all(torch.equal(weights[name], old) for name, old in before.items()):  # law 6
        raise InputError("init gave the initial weights of the dense run: let it draw others, with another seed")
