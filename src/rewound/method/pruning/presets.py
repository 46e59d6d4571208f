"""The paper's structured presets: how many filters each convolution loses, by Li et al. (2017).

Only the first convolution of a block is pruned, as nothing but the second reads it. With exponent k a layer of rate p
loses the fraction 1 - (1 - p)^k of its filters, those of the smallest L1 norm; a fraction of a filter is drawn, once
and for all, from Python's generator with seed 0, so that every run removes as many.

| network    | preset       | rates by stage | convolutions, numbered in order, the stem being 1  |
|------------|--------------|----------------|----------------------------------------------------|
| ResNet-56  | structured-a | .1 .1 .1       | even ones but 16 20 38 54                          |
| ResNet-56  | structured-b | .6 .3 .1       | even ones but 16 18 20 34 38 54                    |
| ResNet-110 | structured-a | .5             | even ones of stage 1 but 36                        |
| ResNet-110 | structured-b | .5 .4 .3       | even ones but 36 38 74                             |
| ResNet-34  | structured-a | .3 .3 .3       | 4 6 10 12 18 20 22 24                              |
| ResNet-34  | structured-b | .5 .6 .4       | 4 6 10 12 18 20 22 24                              |

What goes is the filter alone: the batch normalisation behind it and the weights that read it stay, so that a dead
channel still feeds ReLU(beta) to the next layer, as in the authors' code. The density that they report counts those
weights as gone, too, and also some weights of projections (`reported_density`); `masks_density` counts what is masked.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from rewound.foundations.errors import InputError

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Preset:
    """The rate of each stage, and which of its convolutions are not pruned."""

    rates: tuple[float, ...]
    skip: tuple[int, ...]


PRESETS: Mapping[str, Mapping[tuple[int, ...], Preset]] = {  # by the number of blocks of each stage
    "structured-a": {
        (9, 9, 9): Preset((0.1, 0.1, 0.1), (16, 20, 38, 54)),
        (18, 18, 18): Preset((0.5, 0.0, 0.0), (36,)),
        (3, 4, 6, 3): Preset((0.3, 0.3, 0.3, 0.0), (2, 8, 14, 16, 26)),
    },
    "structured-b": {
        (9, 9, 9): Preset((0.6, 0.3, 0.1), (16, 18, 20, 34, 38, 54)),
        (18, 18, 18): Preset((0.5, 0.4, 0.3), (36, 38, 74)),
        (3, 4, 6, 3): Preset((0.5, 0.6, 0.4, 0.0), (2, 8, 14, 16, 26)),
    },
}
_NAME = "stage{}.block{}.{}.weight"


def removed_filters(preset: str, k: int, shapes: Shapes) -> dict[str, int]:
    """How many filters each convolution loses, by the names of the network's weights.

    >>> from rewound.tasks.recipes.cifar10 import ResNet56
    >>> list(removed_filters("structured-b", 1, ResNet56().shapes).values())[:7]
    [9, 9, 10, 10, 10, 10, 9]
    """
    blocks = _blocks(shapes)
    if (chosen := PRESETS[preset].get(blocks)) is None:
        raise InputError(
            f"preset {preset} is defined for the paper's ResNet-56, ResNet-110 and ResNet-34, not for this network; "
            "prune it without a preset"
        )
    generator, removed, number = random.Random(0), dict[str, int](), 0
    for stage, (count, rate) in enumerate(zip(blocks, chosen.rates, strict=True), start=1):
        for block in range(1, count + 1):
            number += 2
            if not rate or number in chosen.skip:
                continue
            name = _NAME.format(stage, block, "conv1")
            exact = shapes[name][0] * (1 - (1 - rate) ** k)
            removed[name] = int(exact) + (generator.random() < exact - int(exact))
    return removed


def _blocks(shapes: Shapes) -> tuple[int, ...]:
    """How many blocks each stage has; none where the network has other names."""
    found = [match for name in shapes if (match := re.fullmatch(_NAME.format(r"(\d+)", r"(\d+)", "conv1"), name))]
    if any(_NAME.format(*match.groups(), "conv3") in shapes for match in found):
        return ()  # bottlenecks
    stages = {int(match[1]): 0 for match in found}
    for match in found:
        stages[int(match[1])] = max(stages[int(match[1])], int(match[2]))
    return tuple(stages[stage] for stage in sorted(stages))


def masks_density(removed: Mapping[str, int], shapes: Shapes) -> float:
    """The fraction of weights that are not masked."""
    return 1 - sum(count * prod(shapes[name][1:]) for name, count in removed.items()) / _total(shapes)


def reported_density(removed: Mapping[str, int], shapes: Shapes) -> float:
    """The density that the authors report: without the filters, the weights that read them, and some of projections.

    A projection does not read what the block before it has lost, but all that this block puts out: the term looks like
    a slip, of at most 0.2 points.
    """
    gone = 0
    for name, count in removed.items():
        reader = shapes[name.replace("conv1", "conv2")]
        gone += count * (prod(shapes[name][1:]) + prod(reader) // reader[1])
    blocks = _blocks(shapes)
    for stage in range(2, len(blocks) + 1):
        before = removed.get(_NAME.format(stage - 1, blocks[stage - 2], "conv1"), 0)
        outputs, inputs = shapes[_NAME.format(stage, 1, "proj")][:2]
        gone += before * (outputs if len(blocks) == 3 else inputs)
    return 1 - gone / _total(shapes)


def _total(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes.values())
