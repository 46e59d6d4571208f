"""Whether a network's outputs still depend on its inputs where a mask removes every unit of some layers."""

from contextlib import suppress

import torch
from torch import nn

from rewound.foundations.errors import InputError, few
from rewound.method.copies import evaluating, runnable_copy
from rewound.method.pruning.mask import Mask
from rewound.method.structure.examples import Call, changed, numbers
from rewound.method.structure.groups import Units
from rewound.method.structure.kept import dead_groups
from rewound.method.structure.trials import draw_weights

_DRAWS = 4  # of weights, to see what an output depends on


def check_path(model: nn.Module, groups: Units, mask: Mask, example: Call) -> None:
    """Refuse a mask that removes every unit of a layer on the only way from the network's inputs to its outputs."""
    dead = dead_groups(groups, groups.gone(mask))
    if not dead or not _cuts_off(model, mask, example):
        return
    alone = [group for group in dead if _cuts_off(model, groups.mask_without(group.units), example)]
    names = few([f"{group.name} ({len(group)})" for group in alone or dead])
    raise InputError(
        f"the mask removes all units of {names}, which are on the only way from the network's inputs to its outputs: "
        "these no longer depend on the inputs; keep at least one unit of them"
    )


@torch.no_grad()
def _cuts_off(model: nn.Module, mask: Mask, given: Call) -> bool:
    """Whether an output that depends on an input does not once the mask is applied, as seen on changed inputs.

    The mask may have been applied already, so that the weights are drawn anew where the network runs with others: a few
    times, since all units of a small layer may be silent on the example.
    """
    dense_moved, masked_moved = set[tuple[int, int]](), set[tuple[int, int]]()
    for seed in range(_DRAWS):
        dense = evaluating(runnable_copy(model))
        draw_weights(dense, dense, {}, seed)
        if not (runs := numbers(dense, given) is not None):
            dense = evaluating(runnable_copy(model))
        masked = runnable_copy(dense)
        mask.apply(masked)
        dense_moved |= _moved(dense, given)
        masked_moved |= _moved(masked, given)
        if not runs:
            break
    return not dense_moved <= masked_moved


def _moved(network: nn.Module, given: Call) -> set[tuple[int, int]]:
    """Which outputs change with which inputs, by their numbers: inputs first."""
    found, before = set[tuple[int, int]](), given.outputs(network)
    for place, other in enumerate(changed(given)):
        with suppress(Exception):  # of code that does not take it, such as offsets that do not begin with 0
            same = map(torch.equal, before, other.outputs(network))
            found.update((place, number) for number, is_same in enumerate(same) if not is_same)
    return found
