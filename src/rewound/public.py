"""What `import rewound` gives: every public name, from the module that has it."""

from rewound.algorithm import Level, densities, levels
from rewound.compression import LevelReport, PrunedNetwork, prune
from rewound.errors import Diverged, InputError
from rewound.flops import Profile, profile
from rewound.loops.loop import Epochs, Steps
from rewound.loops.preparation import epochs, steps
from rewound.loops.progress import Reached
from rewound.pruning.foreign import from_torch_prune, mask_of_zeros
from rewound.pruning.mask import Mask
from rewound.pruning.pruner import Pruner
from rewound.recipe import Batch, Metric, Position, Recipe, Scores
from rewound.recipes.resident import Part, ResidentRecipe
from rewound.schedule import Schedule, Segment
from rewound.sweeps.sweep import Sweep, load_sweep
from rewound.technique import TECHNIQUES, Facts, Technique
from rewound.tickets.ticket import Ticket, load, save
from rewound.training import State, begin, evaluate, train

__all__ = [
    "TECHNIQUES",
    "Batch",
    "Diverged",
    "Epochs",
    "Facts",
    "InputError",
    "Level",
    "LevelReport",
    "Mask",
    "Metric",
    "Part",
    "Position",
    "Profile",
    "PrunedNetwork",
    "Pruner",
    "Reached",
    "Recipe",
    "ResidentRecipe",
    "Schedule",
    "Scores",
    "Segment",
    "State",
    "Steps",
    "Sweep",
    "Technique",
    "Ticket",
    "begin",
    "densities",
    "epochs",
    "evaluate",
    "from_torch_prune",
    "levels",
    "load",
    "load_sweep",
    "mask_of_zeros",
    "profile",
    "prune",
    "save",
    "steps",
    "train",
]
